"""Batches: every trained token is packed exactly once, inside the budget, in the same order every time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.learner_material import make_selection, make_trajectory, mixed_trajectories
from headrace.config import Advantage, ContextRule, LossScale
from headrace.learner.batch import Batch, MicroBatch, coefficients, deal_rows, micro_batches, split_minibatches, weigh
from headrace.learner.unpack import unpack
from headrace.types import PolicyVersion, Trajectory

VERSION = 9


def unpacked(trajectories: list[Trajectory], *, max_staleness: int = 4, context: ContextRule = ContextRule.TRAJECTORY) -> Batch:
    selection = make_selection(trajectories, version=VERSION, max_staleness=max_staleness)
    return unpack(selection, PolicyVersion(0, VERSION), {0: 0}, Advantage.MEAN, context=context)


def cut(batch: Batch, rows: np.ndarray, budget: int, *, whole: bool = True) -> list[MicroBatch]:
    weighing = weigh(batch, VERSION)
    coefficient = coefficients(batch, weighing, np.arange(len(batch.rows)), LossScale.SEQUENCE, 100)
    return list(micro_batches(batch, weighing, rows, coefficient, budget_tokens=budget, dtype=torch.float64, device=torch.device("cpu"), whole=whole))


step = st.tuples(st.integers(1, 12), st.lists(st.tuples(st.integers(0, VERSION), st.integers(1, 6)), min_size=0, max_size=3), st.sampled_from([0.0, 0.0, 1.0]))


@st.composite
def any_trajectories(draw: st.DrawFn) -> list[Trajectory]:
    generator = np.random.default_rng(draw(st.integers(0, 100)))
    result = []
    for group in range(draw(st.integers(1, 4))):
        for member in range(draw(st.integers(1, 4))):
            steps = []
            for observation, spans, key in draw(st.lists(step, min_size=1, max_size=4)):
                rising = sorted(spans)
                steps.append((observation, sum(length for _, length in rising), rising, key))
            result.append(make_trajectory(generator, group=group, member=member, reward=float(member), steps=steps))
    return result


@settings(max_examples=60, deadline=None)
@given(any_trajectories(), st.integers(16, 80), st.integers(1, 3))
def test_every_trained_token_is_packed_once_whatever_the_cut(trajectories: list[Trajectory], budget: int, world_size: int) -> None:
    batch = unpacked(trajectories)
    shares = deal_rows(batch, weigh(batch, VERSION), np.arange(len(batch.rows)), world_size)
    parts = [part for share in shares for part in cut(batch, share, budget)]
    packed = sorted(index for part in parts for index in part.index_N.tolist())
    expected, offset = [], 0
    for trajectory in trajectories:
        for record in trajectory.steps:
            for span in record.version_spans:
                for _ in range(span.start, span.end):
                    if record.key_weight > 0 or VERSION - span.version.number <= 4:
                        expected.append(offset)
                    offset += 1
    assert packed == expected
    for part in parts:
        assert part.padded_tokens <= budget or part.tokens_RT.shape[0] == 1
        for index, hidden, target, row in zip(part.index_N, part.hidden_N, part.target_N, part.row_N, strict=True):
            source = trajectories[int(batch.row_A[index])]
            position = int(batch.positions_A[index])
            width = part.tokens_RT.shape[1]
            assert (int(hidden) // width, int(hidden) % width) == (int(row), position - 1)
            assert int(target) == source.tokens[position]
            assert part.tokens_RT[int(row), :position].tolist() == list(source.tokens[:position])
            assert float(part.sampler_logprobs_N[part.index_N == index]) == source.sampler_logprobs[int(index) - batch.rows[int(batch.row_A[index])].start]
    weight = sum(float(part.coefficient_N.sum()) for part in parts)
    assert not parts or abs(weight - 1.0) < 1e-9  # sequence scale: every trajectory weighs 1 / trajectories


@settings(max_examples=60, deadline=None)
@given(any_trajectories(), st.integers(16, 80), st.booleans())
def test_input_rows_of_single_observations_hold_their_own_context_and_nothing_else(trajectories: list[Trajectory], budget: int, whole: bool) -> None:
    batch = unpacked(trajectories, context=ContextRule.OBSERVATION)
    trained = weigh(batch, VERSION).trained_A
    parts = cut(batch, np.arange(len(batch.rows)), budget, whole=whole)
    packed = sorted(index for part in parts for index in part.index_N.tolist())
    assert packed == np.flatnonzero(trained).tolist()
    context_of = {index: context for row in batch.rows for context in row.contexts for index in range(context.start, context.end)}
    for part in parts:
        width = part.tokens_RT.shape[1]
        inputs = {index: divmod(int(hidden), width) for index, hidden in zip(part.index_N.tolist(), part.hidden_N, strict=True)}
        assert sorted({place for place, _ in inputs.values()}) == list(range(part.tokens_RT.shape[0]))  # no input row without a trained token
        for index, (place, column) in inputs.items():
            source, position = trajectories[int(batch.row_A[index])], int(batch.positions_A[index])
            assert part.tokens_RT[place, : column + 1].tolist() == list(source.tokens[context_of[index].first : position])
            assert all((place == other) == (context_of[index] is context_of[i]) for i, (other, _) in inputs.items())
        together = {place: set(part.index_N[part.row_N == place].tolist()) for place in set(part.row_N.tolist())}
        for members in together.values():
            (owner,) = {int(batch.row_A[index]) for index in members}
            row = batch.rows[owner]
            assert not whole or members == {index for index in range(row.start, row.end) if trained[index]}
        assert part.padded_tokens <= budget or part.tokens_RT.shape[0] == 1 or len(together) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50), st.integers(1, 4))
def test_ranks_get_all_rows_and_nearly_the_same_tokens(seed: int, world_size: int) -> None:
    batch = unpacked(mixed_trajectories(seed, groups=4, version=VERSION))
    shares = deal_rows(batch, weigh(batch, VERSION), np.arange(len(batch.rows)), world_size)
    assert sorted(index for share in shares for index in share.tolist()) == list(range(len(batch.rows)))
    loads = [sum(len(batch.rows[index].tokens) for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(len(row.tokens) for row in batch.rows)


def test_minibatches_hold_whole_groups_in_order() -> None:
    batch = unpacked(mixed_trajectories(1, groups=5, size=2, version=VERSION))
    parts = split_minibatches(batch, 3)
    assert [sorted({batch.rows[index].group_id for index in part}) for part in parts] == [[0, 1], [2, 3], [4]]
    assert [len(part) for part in split_minibatches(batch, 9)] == [2] * 5


def test_the_cut_is_the_same_every_time_and_buckets_by_length() -> None:
    generator = np.random.default_rng(0)
    lengths = [3, 60, 4, 58, 5, 3, 61, 4] * 4
    trajectories = [
        make_trajectory(generator, group=0, member=index, reward=float(index), steps=[(2, length, [(VERSION, length)], 0.0)])
        for index, length in enumerate(lengths)
    ]
    batch = unpacked(trajectories)
    first, second = (cut(batch, np.arange(len(batch.rows)), 4096) for _ in range(2))
    assert [part.index_N.tolist() for part in first] == [part.index_N.tolist() for part in second]
    real = sum(len(trajectory.tokens) - 1 for trajectory in trajectories)
    padded = sum(part.padded_tokens for part in first)
    assert padded < 1.2 * real  # one batch of all rows would be 2.2 times
    assert len(first) <= 4


def test_groups_are_compared_within_themselves_only() -> None:
    batch = unpacked(mixed_trajectories(2, groups=3, size=4, version=VERSION))
    for group in range(3):
        assert abs(sum(row.advantage for row in batch.rows if row.group_id == group)) < 1e-9
    assert len({row.advantage for row in batch.rows}) == 12
