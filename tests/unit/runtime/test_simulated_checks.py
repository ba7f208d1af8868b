"""Key steps, pace and verification in simulated time: the real pool asks, checks take time and cut what they reject, and the ledger closes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fakes.runs import run_settings
from fakes.simulated_runs import random_times
from headrace.errors import ConfigError
from headrace.planner.key_steps import key_step_share, measure_checks
from headrace.runtime.simulated import simulate
from headrace.runtime.simulated_checks import CheckRule
from headrace.runtime.time_model import PlannedRollout, PlannedStep, TimeModel
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest

HAZARD = 0.002
OLD, NEW = PolicyVersion(0, 3), PolicyVersion(0, 5)
KEY = RolloutKey(1, 2, 0)


def marked_times(*, hazard: float = HAZARD, **changes: Any) -> TimeModel:
    """Every second step is a key step."""
    model = random_times()

    def plan(request: RolloutRequest, version: int) -> PlannedRollout:
        found = model.plan_rollout(request, version)
        return replace(found, steps=tuple(step._replace(key=index % 2 == 0) for index, step in enumerate(found.steps)))

    known = {"rejects": lambda tokens, updates: -math.expm1(-hazard * tokens * max(0, updates)), "verify_seconds": lambda tokens: 1e-4 * tokens}
    return replace(model, plan_rollout=plan, key_step_share=0.5, **{**known, **changes})


def played(model: TimeModel, **pool: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    settings = run_settings(num_updates=16, groups=4, group_size=4, num_samplers=2, max_staleness=4, sampler={"max_running": 8}, pool=pool)
    simulate(settings, model, subscribers=[lines.append])
    return lines


def of(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


def key_age(lines: list[dict[str, Any]]) -> float:
    """Oldest key token that was trained."""
    return max(line["statistics"]["key_staleness_max"] for line in of(lines, "updated") if line["statistics"]["key_staleness_max"] is not None)


def rule(*, hazard: float, key_steps_only: bool = False) -> CheckRule:
    return CheckRule(key_steps_only=key_steps_only, max_rounds=8, seed=0, rejects=lambda tokens, updates: -math.expm1(-hazard * tokens * updates))


def test_accepted_tokens_count_for_the_version_that_checked_them() -> None:
    steps = [PlannedStep(1, 4, 0.0), PlannedStep(1, 6, 0.0, True)]
    drawn = [{OLD: 4}, {OLD: 2, NEW: 4}]
    assert rule(hazard=0.0).accept(drawn, steps, NEW, KEY, 1) == ([{NEW: 4}, {NEW: 6}], None)
    assert rule(hazard=0.0, key_steps_only=True).accept(drawn, steps, NEW, KEY, 1) == ([{OLD: 4}, {NEW: 6}], None)


def test_everything_from_the_first_rejected_token_on_is_cut() -> None:
    steps = [PlannedStep(1, 4, 0.0), PlannedStep(1, 6, 0.0), PlannedStep(1, 5, 0.0)]
    stands, cut = rule(hazard=1e9).accept([{NEW: 4}, {OLD: 6}, {OLD: 5}], steps, NEW, KEY, 1)
    assert cut is not None and cut.step == 1 and 0 <= cut.kept_tokens < 6
    assert len(stands) == 2 and sum(stands[1].values()) == cut.kept_tokens and set(stands[1]) <= {NEW}


@pytest.mark.parametrize("verify", ["key_steps", "all"])
def test_verified_runs_close_their_ledger_and_train_no_checked_token_older_than_asked(verify: str) -> None:
    lines = played(marked_times(), verify=verify, verify_after=1)
    assert len(of(lines, "updated")) == 16 and of(lines, "verification_asked")
    verified = of(lines, "rollout_verified")
    assert {line["refreshed"] > 0 for line in verified} == {True, False}
    ledger = of(lines, "ledger")[-1]["ledger"]
    assert ledger["closes"] and ledger["tokens"]["skipped"]["refreshed"] > 0
    assert key_age(lines) <= 2  # a batch is waited for while weights go on once
    activity = [line["activity"] for line in of(lines, "worker_active")]
    tokens = sum(each["verify_tokens"] for each in activity)
    assert tokens > 0 and sum(each["verify_seconds"] for each in activity) == pytest.approx(1e-4 * tokens)


def test_without_verification_key_steps_are_trained_as_old_as_they_are_and_counted() -> None:
    lines = played(marked_times())
    assert key_age(lines) > 2
    steps = of(lines, "ledger")[-1]["ledger"]["key_steps"]
    assert steps["over_bound"] > 0 and steps["trained"] > steps["over_bound"]


def test_rejections_cost_time() -> None:
    accepting, rejecting = (played(marked_times(hazard=hazard), verify="all", verify_after=1) for hazard in (0.0, 0.01))
    assert of(accepting, "updated")[-1]["time"] < of(rejecting, "updated")[-1]["time"]


def test_pace_is_the_pool_s_own_and_lowers_the_age_of_key_steps() -> None:
    free, paced = played(marked_times()), played(marked_times(), pace_key_steps=True, max_key_staleness=1)
    assert of(paced, "paced") and not of(free, "paced")
    ages = [sum(line["statistics"]["key_staleness_mean"] or 0.0 for line in of(lines, "updated")[8:]) for lines in (free, paced)]
    assert ages[1] < ages[0]


@pytest.mark.parametrize(("pool", "key"), [({"pace_key_steps": True}, "pool.pace_key_steps"), ({"verify": "all"}, "pool.verify")])
def test_what_the_profile_lacks_is_named(pool: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        played(random_times(), **pool)
    (problem,) = refused.value.problems
    assert problem.key == key and "profile" in problem.message and "headrace profile RUN" in problem.remedy


def test_a_run_s_verifications_give_back_what_they_rest_on() -> None:
    lines = played(marked_times(hazard=0.004), verify="all", verify_after=1)
    deliveries = [line for line in lines if line["event"] in ("rollout_finished", "rollout_verified")]
    found = measure_checks("all", deliveries, of(lines, "worker_active"))
    assert found is not None and found.count == len(of(lines, "rollout_verified"))
    assert found.seconds_per_token == pytest.approx(1e-4)
    # ages inside a rollout differ; the mean of its oldest and newest stands for them
    assert found.rejections_per_token_update == pytest.approx(0.004, rel=0.35)
    assert found.rejects(100, 2) == pytest.approx(-math.expm1(-200 * found.rejections_per_token_update))
    assert measure_checks("off", deliveries, []) is None
    assert 0.4 < key_step_share(of(lines, "rollout_finished")) < 0.75
