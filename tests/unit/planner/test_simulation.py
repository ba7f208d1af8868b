"""Plans checked by simulation, held against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakes.plan_profiles import plain_profile
from headrace.config import Settings
from headrace.planner.distributions import Distribution
from headrace.planner.measure import measure
from headrace.planner.plan import Plan, Request, StalenessSpread
from headrace.planner.profile import Profile
from headrace.planner.proposal import Simulated, make_proposal
from headrace.planner.simulation import merged, observed_tree, simulate_plan, simulated_tree
from headrace.planner.time_model import time_model
from headrace.runtime.simulated import simulate

TAILED = Distribution.lognormal(300.0, 250.0)


def some_plan(profile: Profile, **changes: object) -> Plan:
    """Of 2 samplers and 2 learner devices, batches of 64."""
    request = Request(num_gpus=4, batch_trajectories=(64,), group_size=profile.group.size, max_staleness=2)
    plan = next(plan for plan in make_proposal(profile, request).plans if plan.mode == "async")
    setup = {"num_sampler_devices": 2, "num_learner_devices": 2, "slots_per_sampler": 64, "max_staleness": 2, "tensor_parallel": 1, "quorum": None}
    return replace(plan, **{**setup, **changes})  # type: ignore[arg-type]


def checked(profile: Profile, plan: Plan, max_rollouts: int = 4000) -> Simulated:
    outcome = simulate_plan(profile, plan, max_rollouts)
    assert outcome is not None
    return outcome


def test_a_slow_learner_sets_the_step_and_is_always_busy() -> None:
    profile = plain_profile(answers=TAILED, learn_seconds_per_token=1e-2)
    outcome = checked(profile, some_plan(profile, num_learner_devices=1))
    assert outcome.verification.step_seconds == pytest.approx(64 * 300.0 * 1e-2, rel=0.05)
    assert outcome.staleness.max == 2
    assert outcome.busy_fraction < 0.6 + 1 / 3  # one of three devices learns, and samplers wait for it


def test_slow_samplers_set_the_step_by_their_rate() -> None:
    profile = plain_profile(answers=Distribution.constant(300.0), learn_seconds_per_token=1e-6)
    outcome = checked(profile, some_plan(profile, num_learner_devices=1, slots_per_sampler=16, max_staleness=8))
    # all 16 slots of both samplers are taken all the time: one step of them is 16 tokens
    assert outcome.verification.step_seconds == pytest.approx(64 * 300 / (2 * 16 / (0.02 + 16e-4)), rel=0.02)


def test_a_synchronous_step_is_sampling_and_learning_one_after_the_other() -> None:
    profile = plain_profile(answers=Distribution.constant(300.0), learn_seconds_per_token=1e-4, overhead_seconds=1.0)
    plan = some_plan(profile, mode="sync", placement="colocated", num_sampler_devices=2, num_learner_devices=2, max_staleness=0)
    outcome = checked(profile, plan)
    sampling, learning = 300 * (0.02 + 32e-4), 1.0 + 64 * 300 * 1e-4 / 2
    assert outcome.verification.step_seconds == pytest.approx(sampling + learning, rel=0.01)
    assert outcome.staleness == StalenessSpread(mean=0.0, p95=0.0, max=0.0)
    assert outcome.busy_fraction == pytest.approx(1.0, abs=0.01)


def test_a_plan_simulated_at_a_quarter_of_its_size_takes_about_as_long() -> None:
    profile = plain_profile(answers=TAILED, learn_seconds_per_token=2e-4)
    plan = some_plan(profile, num_sampler_devices=4, num_learner_devices=4, batch_trajectories=128)
    whole, part = checked(profile, plan, 5000), checked(profile, plan, 1500)
    assert whole.verification.scale == 1.0 and part.verification.scale <= 0.25
    assert part.verification.step_seconds == pytest.approx(whole.verification.step_seconds, rel=0.12)
    assert part.occupancy == pytest.approx(whole.occupancy, abs=0.08)


def test_what_cannot_be_simulated_with_so_few_rollouts_is_not() -> None:
    profile = plain_profile(answers=TAILED)
    assert simulate_plan(profile, some_plan(profile, num_sampler_devices=1), 100) is None


def test_profiling_a_simulated_run_gives_its_profile_back(tmp_path: Path) -> None:
    profile = plain_profile(answers=TAILED, learn_seconds_per_token=1e-4, overhead_seconds=0.5)
    setup = {"run": {"num_samplers": 2, "num_updates": 30}, "sampler": {"max_running": 48}, "pool": {"groups_per_batch": 8, "max_staleness": 3}}
    settings = Settings.model_validate(merged(simulated_tree(profile), setup))
    simulate(settings, time_model(profile, settings), run_directory=tmp_path / "run")
    again = measure(tmp_path / "run")
    for running in (16, 32, 48):
        assert again.decode.fit.seconds(running, 300.0) == pytest.approx(profile.decode.fit.seconds(running, 300.0), rel=0.03)
    for tokens in (15_000, 25_000):
        assert again.learn.fit.seconds(1, 8192, tokens) == pytest.approx(profile.learn.fit.seconds(1, 8192, tokens), rel=0.03)
    assert again.distributions.answer_tokens.mean == pytest.approx(300.0, rel=0.06)
    assert again.group.tailness == pytest.approx(profile.group.tailness, rel=0.1)
    tree = observed_tree(again)
    assert tree["pool"] == {"groups_per_batch": 8, "max_staleness": 3, "selection": "ready_first"}
    assert (tree["run"]["num_samplers"], tree["run"]["num_updates"], tree["sampler"]["max_running"]) == (2, 30, 48)
