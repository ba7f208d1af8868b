"""What is kept to verify rollouts: the right rows, within the memory, and free again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.sampling import request
from headrace.sampler.distributions import DistributionStore, is_kept
from headrace.types import RolloutKey, SampleRequest

VOCABULARY = 4


def store(num_rows: int) -> DistributionStore:
    return DistributionStore(VOCABULARY, memory_bytes=4 * VOCABULARY * num_rows, device=torch.device("cpu"))


def action(group: int, step: int = 0, drawn_tokens: int = 0) -> SampleRequest:
    return dataclasses.replace(request([1], group=group, step=step), keep_distribution=True, drawn_tokens=drawn_tokens)


def add(kept: DistributionStore, *groups: int, value: float, step: int = 0) -> None:
    kept.add([(RolloutKey(group, 0, 0), step) for group in groups], torch.full((len(groups), VOCABULARY), value, dtype=torch.float64))


def values(kept: DistributionStore, group: int, step: int = 0) -> list[float]:
    rows = kept.rows_of(RolloutKey(group, 0, 0), step)
    return kept.read(rows)[:, 0].tolist() if rows else []


def test_rows_come_back_by_rollout_step_and_position() -> None:
    kept = store(10)
    for each in (action(1), action(2), action(1, step=1)):
        kept.begin(each)
    add(kept, 1, 2, value=-1.0)
    add(kept, 2, value=-2.0)
    add(kept, 1, step=1, value=-3.0)
    assert (values(kept, 1), values(kept, 2), values(kept, 1, step=1)) == ([-1.0], [-1.0, -2.0], [-3.0])
    assert kept.num_used == 4


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_rollout_that_began_last_gives_its_rows_to_those_before_it(order: tuple[int, int]) -> None:
    kept = store(3)
    kept.begin(action(1))
    kept.begin(action(2))
    add(kept, *order, value=-1.0)
    add(kept, *order, value=-2.0)
    assert values(kept, 1) == [-1.0, -2.0] and values(kept, 2) == []
    assert kept.can_verify(RolloutKey(1, 0, 0)) and not kept.can_verify(RolloutKey(2, 0, 0))
    assert kept.num_unkept == 1
    add(kept, 1, 2, value=-3.0)
    kept.begin(action(2, step=1))
    add(kept, 2, step=1, value=-4.0)
    assert values(kept, 1) == [-1.0, -2.0, -3.0] and kept.num_used == 3 and kept.num_unkept == 1


def test_forgotten_rows_are_used_again_and_a_forgotten_rollout_may_begin_anew() -> None:
    kept = store(2)
    for group in (1, 2, 3):
        kept.begin(action(group))
        add(kept, group, value=-1.0)
        add(kept, group, value=-2.0)
        assert values(kept, group) == [-1.0, -2.0]
        kept.forget(RolloutKey(group, 0, 0))
        assert not kept.can_verify(RolloutKey(group, 0, 0)) and kept.num_used == 0
    assert kept.num_unkept == 0


def test_a_cut_rollout_keeps_what_stands_and_goes_on_in_the_middle_of_its_action() -> None:
    kept, key = store(20), RolloutKey(1, 0, 0)
    for step in range(3):
        kept.begin(action(1, step=step))
        for position in range(3):
            add(kept, 1, step=step, value=-10.0 * step - position)
    kept.cut(key, 1, 2)
    assert values(kept, 1, step=0) == [0.0, -1.0, -2.0] and values(kept, 1, step=1) == [-10.0, -11.0] and values(kept, 1, step=2) == []
    assert kept.num_used == 5
    kept.begin(action(1, step=1, drawn_tokens=2))
    add(kept, 1, step=1, value=-77.0)
    assert values(kept, 1, step=1) == [-10.0, -11.0, -77.0]


def test_an_action_that_begins_again_replaces_its_rows_and_one_with_missing_rows_is_given_up() -> None:
    kept = store(20)
    kept.begin(action(1))
    add(kept, 1, value=-1.0)
    kept.begin(action(1))
    add(kept, 1, value=-2.0)
    assert values(kept, 1) == [-2.0]
    kept.begin(action(1, drawn_tokens=5))
    assert not kept.can_verify(RolloutKey(1, 0, 0)) and kept.num_used == 0


def test_no_memory_is_taken_before_the_first_row() -> None:
    kept = store(10**9)
    kept.begin(action(1))
    assert kept._block is None


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_draws_that_are_never_verified_are_not_kept(change: dict[str, float]) -> None:
    wanted = action(1)
    assert is_kept(wanted)
    assert not is_kept(dataclasses.replace(wanted, sampling=dataclasses.replace(wanted.sampling, **change)))  # type: ignore[arg-type]
    assert not is_kept(dataclasses.replace(wanted, evaluation=True))
    assert not is_kept(dataclasses.replace(wanted, keep_distribution=False))


@given(st.lists(st.tuples(st.sampled_from(["begin", "add", "cut", "forget", "give up"]), st.integers(0, 4), st.integers(0, 2)), max_size=60))
def test_no_row_has_two_owners_and_none_is_lost(events: list[tuple[str, int, int]]) -> None:
    kept, num_rows = store(7), 7
    begun: dict[tuple[int, int], list[float]] = {}
    for number, (name, group, step) in enumerate(events):
        key = RolloutKey(group, 0, 0)
        match name:
            case "begin":
                kept.begin(action(group, step=step))
                begun[group, step] = []
            case "add" if (group, step) in begun:
                add(kept, group, step=step, value=-float(number))
                begun[group, step].append(-float(number))
            case "cut":
                kept.cut(key, step, 1)
                for each in [each for each in begun if each[0] == group and each[1] >= step]:
                    begun[each] = begun[each][:1] if each[1] == step else []
                    if each[1] > step:
                        del begun[each]
            case "forget":
                kept.forget(key)
                begun = {each: row for each, row in begun.items() if each[0] != group}
            case "give up":
                kept.give_up(key)
        owned = [row for owner in range(5) for at in range(3) for row in kept.rows_of(RolloutKey(owner, 0, 0), at)]
        assert len(set(owned)) == len(owned) == kept.num_used <= num_rows
        for (owner, at), expected in begun.items():
            if kept.can_verify(RolloutKey(owner, 0, 0)):
                assert values(kept, owner, at) == expected
