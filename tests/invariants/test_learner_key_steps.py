"""I8 and I9 with verified tokens, sampled unmarked steps, observation contexts, marked members and quorum baselines; what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.learner_gradient import (
    MAX_KEY_STALENESS,
    MAX_STALENESS,
    PAPERS,
    VERSION,
    aged_selection,
    expected_gradient,
    gradients,
    largest_difference,
    learner_at,
    load,
    stale_trajectories,
)
from fakes.learner_material import (
    action_logprobs,
    as_if_newly_drawn,
    make_selection,
    make_trajectory,
    mixed_trajectories,
    save_model,
    step_logprobs,
    with_logprobs,
    with_verified,
)
from headrace.config import Advantage, ContextRule, LossScale
from headrace.errors import InvariantError
from headrace.learner.batch import Batch, check_weights, coefficients, micro_batches, weigh
from headrace.learner.unpack import inclusion_weight, unpack
from headrace.types import PolicyVersion, RolloutKey, Trajectory, VersionSpan
from headrace.updates import UpdateResult

OBSERVATION = {"context": "observation"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


def learned(path: Path, trajectories: Sequence[Trajectory], *, rollout: Any = None, selection: Any = None, **learner: Any) -> tuple[Any, UpdateResult]:
    rank = learner_at(path, VERSION, rollout=rollout, **learner)
    result = rank.learn(aged_selection(trajectories) if selection is None else selection)
    return gradients(rank.model), replace(result, seconds=0.0, busy_seconds=0.0)


# --- verified tokens


def partly_verified(path: Path) -> list[Trajectory]:
    """In every trajectory the first step, in every other one the last one too, accepted by newer weights under other log-probs."""
    result = []
    for index, trajectory in enumerate(stale_trajectories(path)):
        last = len(trajectory.steps) - 1
        verified = [(0, VERSION - 1, -0.3)] + ([(last, VERSION, 0.2)] if index % 2 and last else [])
        result.append(with_verified(trajectory, verified))
    return result


RATIO_CASES: list[dict[str, Any]] = [
    {"loss": "ppo_clip"},
    {"loss": "gspo"},
    {"loss": "reinforce", "correction": "truncated"},
    {"loss": "reinforce", "correction": "masked", "ratio_level": "sequence"},
    {"loss": "reinforce", "correction": "sequence_masked"},
    {"loss": "decoupled_ppo", "correction": "decoupled", "num_minibatches": 3, "num_epochs": 2},
]


@pytest.mark.parametrize("rollout", [None, OBSERVATION], ids=["trajectory", "observation"])
@pytest.mark.parametrize("learner", RATIO_CASES, ids=lambda learner: "-".join(map(str, learner.values())))
def test_a_verified_token_is_trained_as_if_newly_drawn(model_path: Path, learner: dict[str, Any], rollout: Any) -> None:
    verified = partly_verified(model_path)
    found, result = learned(model_path, verified, rollout=rollout, micro_batch_tokens=48, **learner)
    expected, other = learned(model_path, [as_if_newly_drawn(t) for t in verified], rollout=rollout, micro_batch_tokens=48, **learner)
    without, _ = learned(model_path, stale_trajectories(model_path), rollout=rollout, micro_batch_tokens=48, **learner)
    assert result == other
    assert largest_difference(found, expected) == 0.0
    assert largest_difference(found, without) > 1e-3


def test_verified_key_steps_count_with_their_verified_staleness(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    old = [make_trajectory(generator, group=0, member=m, reward=m, steps=[(2, 3, [(0, 3)], 1.0), (1, 2, [(1, 2)], 0.0)]) for m in range(2)]
    _, result = learned(model_path, [with_verified(old[0], [(0, VERSION, 0.0), (1, VERSION - 1, 0.0)]), old[1]])
    fresh, stale = result.outcomes
    assert (fresh.trained_tokens, fresh.trained_key_steps, fresh.over_bound_key_steps) == (5, 1, 0)
    assert (stale.trained_tokens, dict(stale.skipped_tokens), stale.over_bound_key_steps) == (3, {"stale": 2}, 1)
    s = result.statistics
    assert s is not None
    assert (dict(s.staleness_histogram), s.key_staleness_mean) == ({0: 3, 1: 2, VERSION: 3}, VERSION / 2)
    assert dict(s.key_staleness_histogram) == {0: 3, VERSION: 3}


def test_verified_logprobs_equal_to_the_learners_give_the_plain_policy_gradient(model_path: Path) -> None:
    """I9: what the tokens were drawn with, long ago, plays no part."""
    model, trajectories = load(model_path), []
    for trajectory in mixed_trajectories(3):
        exact = action_logprobs(model, trajectory).tolist()
        spans = tuple(VersionSpan(version=PolicyVersion(0, VERSION), start=step.action_start, end=step.action_end) for step in trajectory.steps)
        trajectories.append(replace(trajectory, verified_spans=spans, verified_logprobs=tuple(exact)))
    found, result = learned(model_path, trajectories)
    plain, _ = learned(model_path, [with_logprobs(t, action_logprobs(model, t).tolist()) for t in mixed_trajectories(3, version=VERSION)], loss="reinforce")
    assert largest_difference(found, plain) < 1e-5  # log-probs travel as float32
    s = result.statistics
    assert s is not None and s.staleness_max == 0
    assert (s.ratio_mean, s.ratio_max, s.effective_sample_size) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)


def test_verified_spans_outside_the_actions_are_refused(model_path: Path) -> None:
    first, second = stale_trajectories(model_path)[:2]
    observation = VersionSpan(version=PolicyVersion(0, VERSION), start=0, end=1)
    with pytest.raises(InvariantError, match="do not lie in its actions"):
        learned(model_path, [replace(first, verified_spans=(observation,), verified_logprobs=(-0.1,)), second])


# --- rollout.context = observation: each step is an input row of its own

CONTEXT_CASES = [("ppo_clip", "none", "token"), ("gspo", "none", "token"), ("topr", "none", "token"), ("decoupled_ppo", "decoupled", "sequence")]
CONTEXT_CASES += [("reinforce", c, level) for c in ("truncated", "sequence_masked") for level in ("token", "sequence")]


@pytest.mark.parametrize(("loss", "correction", "level"), CONTEXT_CASES)
def test_steps_that_saw_one_observation_have_the_gradient_of_that_context(model_path: Path, loss: str, correction: str, level: str) -> None:
    """Ratios of trajectories are still those of all their steps."""
    trajectories = stale_trajectories(model_path, step_logprobs)
    advantage, scale = PAPERS.get(loss, ("mean_std", "token"))
    expected = expected_gradient(model_path, trajectories, loss, correction, level, advantage, scale, table_of=step_logprobs)
    for budget in (16, 100_000):
        found, result = learned(model_path, trajectories, rollout=OBSERVATION, loss=loss, correction=correction, ratio_level=level, micro_batch_tokens=budget)
        assert result.refused is None
        assert largest_difference(found, expected) < 1e-5, budget


def test_untrained_steps_are_not_packed_where_each_saw_its_observation_only(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    steps = [(7, 2, [(0, 2)], 0.0), (5, 3, [(VERSION, 3)], 0.0), (9, 4, [(0, 4)], 0.0), (5, 3, [(VERSION, 3)], 0.0), (6, 1, [(0, 1)], 0.0)]
    trajectories = [make_trajectory(generator, group=0, member=m, reward=m, steps=steps) for m in range(2)]
    _, observation = learned(model_path, trajectories, rollout=OBSERVATION)
    _, whole = learned(model_path, trajectories)
    assert observation.statistics is not None and whole.statistics is not None
    assert observation.outcomes == whole.outcomes
    assert observation.statistics.padded_tokens == 2 * 2 * (5 + 3 - 1)
    assert whole.statistics.padded_tokens == 2 * (7 + 2 + 5 + 3 + 9 + 4 + 5 + 3 - 1)


def test_an_action_without_any_context_is_refused(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    trajectories = [make_trajectory(generator, group=0, member=m, reward=m, steps=[(2, 3, [(6, 3)], 0.0), (0, 2, [(6, 2)], 0.0)]) for m in range(2)]
    learned(model_path, trajectories)
    with pytest.raises(InvariantError, match="token 5 is an action before which the policy saw nothing"):
        learned(model_path, trajectories, rollout=OBSERVATION)


# --- learner.unmarked_fraction


def long_trajectories() -> list[Trajectory]:
    """Two groups; lengths, numbers of steps and log-probs that differ much, one key step in four, some steps over the bound."""
    generator = np.random.default_rng(3)
    result = []
    for group in range(2):
        for member in range(2):
            steps = []
            for index in range(3 + 4 * member + group):
                length = int(generator.integers(1, 5))
                steps.append((int(generator.integers(1, 4)), length, [(0 if index == 2 else VERSION - 1, length)], float(index % 4 == 1)))
            result.append(make_trajectory(generator, group=group, member=member, reward=float(generator.normal()), steps=steps))
    return result


@pytest.mark.parametrize("rollout", [None, OBSERVATION], ids=["trajectory", "observation"])
@pytest.mark.parametrize("scale", ["token", "sequence"])
def test_the_mean_gradient_over_draws_is_the_full_gradient(model_path: Path, scale: str, rollout: Any) -> None:
    trajectories, num_draws = long_trajectories(), 150
    full, _ = learned(model_path, trajectories, rollout=rollout, loss_scale=scale)
    rank = learner_at(model_path, VERSION, rollout=rollout, loss_scale=scale, unmarked_fraction=0.4, learning_rate=1e-300)
    draws = []
    for draw in range(num_draws):
        rank._version = PolicyVersion(0, VERSION)
        rank.learn(replace(aged_selection(trajectories), id=draw))
        draws.append(torch.cat([value.flatten() for value in gradients(rank.model).values()]))
    expected = torch.cat([value.flatten() for value in full.values()])
    along = torch.stack(draws) @ expected / expected.square().sum()  # 1 for the full gradient
    assert along.std() > 0.05
    assert abs(along.mean() - 1.0) < 3 * along.std() / num_draws**0.5
    mean = torch.stack(draws).mean(0)
    alone = torch.stack([(draw - expected).norm() for draw in draws]).mean()
    assert (mean - expected).norm() < 2 * alone / num_draws**0.5


def batch_of(trajectories: Sequence[Trajectory], selection_id: int, fraction: float, context: ContextRule = ContextRule.TRAJECTORY) -> Batch:
    selection = replace(aged_selection(trajectories), id=selection_id)
    return unpack(selection, PolicyVersion(0, VERSION), {0: 0}, Advantage.MEAN, context=context, unmarked_fraction=fraction)


def test_the_mean_weight_of_every_token_over_draws_is_its_full_weight_at_every_scale() -> None:
    trajectories, num_draws = long_trajectories(), 1500

    def weights(selection_id: int, fraction: float) -> np.ndarray:
        """[scales, A]"""
        batch = batch_of(trajectories, selection_id, fraction)
        weighing = weigh(batch, VERSION)
        of_row = np.stack([coefficients(batch, weighing, np.arange(len(batch.rows)), scale, 50) for scale in LossScale])
        return np.where(weighing.trained_A, of_row[:, batch.row_A] * batch.weight_A, 0.0)

    full = weights(0, 1.0)
    mean = np.mean([weights(draw, 0.25) for draw in range(num_draws)], axis=0)
    error = full * (3 / num_draws) ** 0.5  # a weight of 4 with probability 1/4 has variance 3
    assert (np.abs(mean - full) <= 3 * error + 1e-15).all()
    key_A = batch_of(trajectories, 0, 1.0).key_A
    assert np.allclose(mean[:, key_A], full[:, key_A], rtol=1e-12)


def test_steps_enter_or_stay_out_as_a_whole_and_key_steps_always_enter() -> None:
    trajectories = long_trajectories()
    seen = set()
    for draw in range(20):
        batch = batch_of(trajectories, draw, 0.5)
        for row in batch.rows:
            for step in row.steps:
                (weight,) = set(batch.weight_A[step.start : step.end])
                assert weight == 1.0 if step.key else weight in (0.0, 2.0)
                seen.add((step.key, weight))
    assert seen == {(True, 1.0), (False, 0.0), (False, 2.0)}


def test_the_draw_depends_on_seed_selection_rollout_and_step_only() -> None:
    key = RolloutKey(3, 1, 0)
    assert inclusion_weight(1, 2, key, 4, 0.5) == inclusion_weight(1, 2, key, 4, 0.5)
    draws = [
        [inclusion_weight(seed, selection, RolloutKey(3, 1, attempt), step, 0.5) for step in range(64)]
        for seed, selection, attempt in ((1, 2, 0), (2, 2, 0), (1, 3, 0), (1, 2, 1))
    ]
    assert all(10 < sum(weight > 0 for weight in draw) < 54 for draw in draws)
    assert len({tuple(draw) for draw in draws}) == 4
    trajectories = long_trajectories()
    alone, together = batch_of(trajectories[:1], 7, 0.5), batch_of(trajectories, 7, 0.5)
    assert alone.weight_A.tolist() == together.weight_A[: len(alone.weight_A)].tolist()


def test_sampled_steps_have_the_same_gradient_however_they_are_cut(model_path: Path) -> None:
    for rollout in (None, OBSERVATION):
        found = [learned(model_path, long_trajectories(), rollout=rollout, unmarked_fraction=0.5, micro_batch_tokens=budget)[0] for budget in (16, 50, 10_000)]
        assert all(largest_difference(other, found[0]) < 1e-10 for other in found[1:])


def test_what_is_sampled_out_is_skipped_once_and_packs_nothing(model_path: Path) -> None:
    trajectories = long_trajectories()
    learner = {"unmarked_fraction": 0.3, "num_epochs": 2}
    _, result = learned(model_path, trajectories, rollout=OBSERVATION, **learner)
    _, full = learned(model_path, trajectories, rollout=OBSERVATION, num_epochs=2)
    batch = batch_of(trajectories, 1, 0.3)
    drawn = weigh(batch, VERSION)
    for outcome, all_in, row in zip(result.outcomes, full.outcomes, batch.rows, strict=True):
        inside = slice(row.start, row.end)
        sampled_out = int((drawn.eligible_A & ~drawn.trained_A)[inside].sum())
        assert outcome.skipped_tokens.get("sampled_out", 0) == sampled_out == all_in.trained_tokens - outcome.trained_tokens
        assert outcome.skipped_tokens.get("stale", 0) == all_in.skipped_tokens.get("stale", 0)
        assert outcome.trained_tokens + sum(outcome.skipped_tokens.values()) == row.end - row.start
        assert (outcome.trained_key_steps, dict(outcome.skipped_key_steps)) == (all_in.trained_key_steps, {})
    assert sum(outcome.skipped_tokens.get("sampled_out", 0) for outcome in result.outcomes) > 0
    assert result.statistics is not None and full.statistics is not None
    assert result.statistics.padded_tokens < full.statistics.padded_tokens
    contexts = batch_of(trajectories, 1, 0.3, context=ContextRule.OBSERVATION)
    parts = micro_batches(contexts, drawn, np.arange(4), np.ones(4), budget_tokens=10_000, dtype=torch.float64, device=torch.device("cpu"))
    trained_steps = sum(bool(drawn.trained_A[step.start : step.end].any()) for row in contexts.rows for step in row.steps)
    assert sum(part.tokens_RT.shape[0] for part in parts) == trained_steps


def test_a_minibatch_whose_steps_are_all_sampled_out_makes_no_update(model_path: Path) -> None:
    trajectories = mixed_trajectories(1, groups=1, size=2, version=VERSION)
    selection = next(
        replace(aged_selection(trajectories), id=draw) for draw in range(1000) if not weigh(batch_of(trajectories, draw, 0.1), VERSION).trained_A.any()
    )
    _, result = learned(model_path, trajectories, selection=selection, unmarked_fraction=0.1)
    assert (result.statistics, result.refused, result.version_after) == (None, None, result.version_before)
    assert [dict(outcome.skipped_tokens) for outcome in result.outcomes] == [{"sampled_out": t.num_action_tokens} for t in trajectories]


def test_a_key_token_left_out_of_the_loss_is_a_bug_that_is_named(model_path: Path) -> None:
    batch = batch_of(long_trajectories(), 0, 1.0)
    weighing = weigh(batch, VERSION)
    with pytest.raises(InvariantError, match="left out"):
        check_weights(batch, replace(weighing, trained_A=weighing.trained_A & ~batch.key_A), VERSION)
    with pytest.raises(InvariantError, match="weigh something else"):
        check_weights(replace(batch, weight_A=batch.weight_A * 2), weighing, VERSION)


# --- marked members, quorum, learning rate


def test_every_step_of_a_marked_member_is_key(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    old = [make_trajectory(generator, group=0, member=m, reward=m, steps=[(2, 3, [(0, 3)], 0.0), (1, 2, [(6, 2)], 0.0)]) for m in range(2)]
    keyed = replace(old[0], steps=tuple(replace(step, key_weight=1.0) for step in old[0].steps))
    selection = replace(aged_selection(old), members=make_selection(old, marked=[0]).members)
    found, result = learned(model_path, old, selection=selection, unmarked_fraction=0.5)
    expected, other = learned(model_path, [keyed, old[1]], unmarked_fraction=0.5)
    assert result == other and largest_difference(found, expected) == 0.0
    assert (result.outcomes[0].trained_tokens, result.outcomes[0].trained_key_steps, result.outcomes[0].over_bound_key_steps) == (5, 2, 1)


@pytest.mark.parametrize("advantage", list(Advantage))
def test_members_of_a_quorum_have_the_advantages_they_would_have_in_the_whole_group(advantage: Advantage) -> None:
    trajectories = mixed_trajectories(2, groups=2, size=4, version=VERSION)
    whole = unpack(aged_selection(trajectories), PolicyVersion(0, VERSION), {0: 0}, advantage)
    rewards = tuple(t.reward for t in trajectories if t.key.group_id == 0)
    early, late = [trajectories[i] for i in (0, 2, 3)], [trajectories[1], *trajectories[4:]]
    for part in (early, late):
        selection = replace(aged_selection(part), group_rewards={0: rewards})
        batch = unpack(selection, PolicyVersion(0, VERSION), {0: 0}, advantage)
        expected = {(row.group_id, row.tokens.tobytes()): row.advantage for row in whole.rows}
        assert [row.advantage for row in batch.rows] == [expected[row.group_id, row.tokens.tobytes()] for row in batch.rows]


def test_group_rewards_without_a_members_own_reward_are_refused(model_path: Path) -> None:
    trajectories = mixed_trajectories(2, groups=1, size=2, version=VERSION)
    rewards = (trajectories[0].reward, 123.0, 0.5)
    with pytest.raises(InvariantError, match="not among those known"):
        learned(model_path, trajectories, selection=replace(aged_selection(trajectories), group_rewards={0: rewards}))


def test_the_learning_rate_falls_with_the_staleness_of_what_is_trained(model_path: Path) -> None:
    trajectories = partly_verified(model_path)
    for slope in (0.0, 0.3):
        _, result = learned(model_path, trajectories, staleness_slope=slope)
        s = result.statistics
        assert s is not None and s.staleness_mean > 0.5
        assert s.learning_rate == pytest.approx(1e-3 / (1 + slope * s.staleness_mean), rel=1e-12)
    assert MAX_KEY_STALENESS < MAX_STALENESS < s.staleness_max  # over-bound key tokens count as well


def test_the_learning_rate_of_each_minibatch_follows_its_own_staleness(model_path: Path) -> None:
    generator = np.random.default_rng(0)
    groups = [
        make_trajectory(generator, group=group, member=member, reward=float(member), steps=[(2, 3, [(VERSION - 2 * group, 3)], 0.0)])
        for group in range(2)
        for member in range(2)
    ]
    _, result = learned(model_path, groups, num_minibatches=2, staleness_slope=1.0)
    assert result.statistics is not None
    assert dict(result.statistics.staleness_histogram) == {0: 6, 3: 6}  # the second minibatch is an update older
    assert result.statistics.learning_rate == pytest.approx(1e-3 / 4)
