"""Which groups carry a signal is found in a run's rewards, drawn again in simulated ones, and ends with what there is to learn."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from fakes.plan_profiles import plain_profile
from headrace.config import Settings
from headrace.planner.forecast import from_the_start, without_drift
from headrace.planner.profile import Profile
from headrace.planner.rewards import Progress, Rewards, fit_rewards, share_with_signal
from headrace.planner.simulation import merged, simulated_tree
from headrace.planner.time_model import time_model
from headrace.runtime.simulated import simulate

SIZE = 8
TRUE = Rewards(log_odds=0.5, per_length=-0.8, spread=1.2, log_odds_per_update=0.08)


def groups(true: Rewards, *, count: int = 600, updates: int = 40) -> list[list[dict[str, Any]]]:
    """Of a run from `updates` / 2 before the middle to as many after it."""
    stream, made = random.Random(3), []
    for index in range(count):
        version, score, ease = index * updates // count, stream.gauss(0.0, 1.0), stream.gauss(0.0, 1.0)
        chance = true.chance(score, ease, true.log_odds_per_update * (version - updates / 2))
        made.append([{"versions": [version, version], "tokens": 100 + 10 * score, "reward": float(stream.random() < chance)} for _ in range(SIZE)])
    return made


def profile_with(rewards: Rewards | None) -> Profile:
    return replace(plain_profile(group_size=4), rewards=rewards)


def updates_of(profile: Profile, **pool: Any) -> list[dict[str, Any]]:
    """Lines of a simulated run."""
    tree = merged(simulated_tree(profile), {"run": {"num_updates": 20}, "pool": {"groups_per_batch": 4, "max_staleness": 2, **pool}})
    settings, lines = Settings.model_validate(tree), list[dict[str, Any]]()
    simulate(settings, time_model(profile, settings), subscribers=[lines.append])
    return lines


def test_a_run_s_rewards_give_back_the_odds_that_made_them() -> None:
    found = fit_rewards(groups(TRUE))
    assert found is not None
    assert found.log_odds == pytest.approx(TRUE.log_odds, abs=0.25)
    assert found.log_odds_per_update == pytest.approx(TRUE.log_odds_per_update, rel=0.25)
    assert found.per_length == pytest.approx(TRUE.per_length, abs=0.25)
    assert found.spread == pytest.approx(TRUE.spread, abs=0.25)


def test_odds_that_do_not_plainly_rise_are_taken_to_stay() -> None:
    found = fit_rewards(groups(replace(TRUE, log_odds_per_update=0.001)))
    assert found is not None and found.log_odds_per_update == 0.0


def test_rewards_of_more_than_two_values_are_not_modelled_and_leave_no_group_out() -> None:
    made = groups(TRUE)
    made[0][0]["reward"] = 0.25
    assert fit_rewards(made) is None
    tree = simulated_tree(profile_with(None))
    assert tree["pool"]["no_signal"] == "train"


def test_a_run_of_equal_rewards_has_odds_and_hardly_any_signal() -> None:
    made = [[{**line, "reward": 1.0} for line in group] for group in groups(TRUE)]
    found = fit_rewards(made)
    assert found is not None and share_with_signal(found, SIZE) < 0.1 and found.signal_share == 0.0


def test_share_of_groups_with_signal_is_that_of_drawn_groups() -> None:
    steady = replace(TRUE, log_odds_per_update=0.0)
    drawn = statistics.fmean(len({line["reward"] for line in group}) > 1 for group in groups(steady, count=4000))
    assert share_with_signal(steady, SIZE) == pytest.approx(drawn, abs=0.03)


def test_odds_rise_with_what_carries_a_signal_and_with_the_batch_and_then_no_more() -> None:
    rewards = replace(TRUE, signal_share=share_with_signal(TRUE, SIZE))
    one, twice = Progress(rewards, group_size=SIZE), Progress(rewards, group_size=SIZE, batch_ratio=2.0)
    assert one.rise(1) == pytest.approx(TRUE.log_odds_per_update, rel=1e-6)
    assert twice.rise(20) == pytest.approx(one.rise(40), rel=0.02)
    assert one.rise(400) - one.rise(300) < 0.2 * (one.rise(100) - one.rise(0))
    assert Progress(replace(rewards, log_odds_per_update=0.0), group_size=SIZE).rise(1000) == 0.0


def test_a_profile_is_put_back_to_its_run_s_start_and_freed_of_its_drift() -> None:
    profile = profile_with(TRUE)
    assert profile.observed is None and from_the_start(profile).rewards == TRUE
    steady = without_drift(profile).rewards
    assert steady is not None and steady.log_odds_per_update == 0.0 and steady.log_odds == TRUE.log_odds
    assert TRUE.at(-20.0).log_odds == pytest.approx(TRUE.log_odds - 20.0 * TRUE.log_odds_per_update)


def test_simulated_batches_are_filtered_as_the_odds_say_and_the_learner_takes_less_for_them() -> None:
    mixed = updates_of(profile_with(Rewards(log_odds=0.0, per_length=0.0, spread=0.0)))
    easy = updates_of(profile_with(Rewards(log_odds=3.5, per_length=0.0, spread=0.0)))

    def filtered(lines: list[dict[str, Any]]) -> float:
        taken = [line for line in lines if line["event"] == "selection_taken"]
        return statistics.fmean(line["filtered"] / (line["filtered"] + line["trajectories"]) for line in taken)

    def learned(lines: list[dict[str, Any]]) -> float:
        return statistics.fmean(line["seconds"] for line in lines if line["event"] == "updated")

    assert filtered(mixed) < 0.3 and 0.75 < filtered(easy) < 1.0
    assert learned(easy) < learned(mixed)


def test_batches_without_any_signal_cost_rollouts_and_make_no_update() -> None:
    rare = Rewards(log_odds=3.5, per_length=0.0, spread=0.0)
    lines = updates_of(profile_with(rare), groups_per_batch=2)
    taken = [line for line in lines if line["event"] == "selection_taken"]
    updates = [line for line in lines if line["event"] == "updated"]
    assert len(updates) == 20 == sum(line["trajectories"] > 0 for line in taken)
    assert len(taken) > 2 * len(updates)
