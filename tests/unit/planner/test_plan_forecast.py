"""When a plan is done: intervals follow the uncertainty of the profile, and drift is carried through the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.plan_profiles import plain_profile
from headrace.planner import forecast
from headrace.planner.distributions import Distribution
from headrace.planner.estimate import Setup, steady_state
from headrace.planner.forecast import cost, finish_seconds, without_drift
from headrace.planner.plan import Spread
from headrace.planner.profile import Observed, Profile

SETUP = Setup(mode="async", placement="split", num_samplers=4, num_learner_ranks=4, slots_per_sampler=64, batch_trajectories=512, max_staleness=16)


def finish(profile: Profile, setup: Setup = SETUP, updates: int = 100) -> Spread:
    return finish_seconds(profile, setup, steady_state(profile, setup), updates)


def test_without_any_uncertainty_a_run_takes_its_updates_times_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_MACHINE_ERROR", 0.0)
    profile = plain_profile()
    for setup in (SETUP, replace(SETUP, mode="sync")):
        exact = 100 * steady_state(profile, setup).step_seconds
        spread = finish(profile, setup)
        assert spread.p10 == pytest.approx(exact) and spread.p50 == pytest.approx(exact) and spread.p90 == pytest.approx(exact)


def test_estimates_are_less_sure_than_measurements() -> None:
    measured, estimated = (finish(plain_profile(errors=0.3, kind=kind)) for kind in ("measured", "estimated"))
    assert estimated.p90 / estimated.p10 > measured.p90 / measured.p10 > 1.0


def test_beyond_what_was_measured_intervals_widen() -> None:
    profile = plain_profile(learn_seconds_per_token=1.0, errors=0.05)
    inside, beyond = (finish(profile, replace(SETUP, num_learner_ranks=ranks)) for ranks in (64, 1024))
    assert beyond.p90 / beyond.p10 > 1.2 * inside.p90 / inside.p10


def test_balanced_sides_take_longer_than_either_alone_since_the_slower_one_counts() -> None:
    profile = plain_profile(errors=0.3, kind="estimated")
    one = steady_state(profile, SETUP)
    ratio = one.generate_seconds / one.learn_seconds
    balanced = plain_profile(errors=0.3, kind="estimated", learn_seconds_per_token=1e-4 * ratio)
    steady = steady_state(balanced, SETUP)
    assert steady.generate_seconds == pytest.approx(steady.learn_seconds, rel=0.05)
    assert finish(balanced).p50 > 1.05 * 100 * steady.step_seconds


def test_growing_answers_lengthen_the_run_by_their_mean_over_it() -> None:
    steady = plain_profile(floor_seconds=0.0, seconds_per_sequence=1e-3, learn_seconds_per_token=1e-9)
    grows = replace(Distribution.constant(1000.0), quantiles=((0.0, 1000.0), (0.999, 1000.0), (1.0, 5000.0)), drift_per_update=10.0)
    growing = steady.with_distributions(replace(steady.distributions, answer_tokens=grows))
    # from 1,000 to 2,000 tokens over 100 updates: half as long again
    assert finish(growing).p50 / finish(steady).p50 == pytest.approx(1.5, rel=0.05)


def test_growth_ends_at_the_longest_answer() -> None:
    still = plain_profile(floor_seconds=0.0, seconds_per_sequence=1e-3, learn_seconds_per_token=1e-9)
    bounded = replace(Distribution.constant(1000.0), quantiles=((0.0, 1000.0), (0.999, 1000.0), (1.0, 1200.0)), drift_per_update=100.0)
    growing = still.with_distributions(replace(still.distributions, answer_tokens=bounded))
    assert 1.1 < finish(growing).p90 / finish(still).p90 < 1.25


def test_cost_counts_every_device_for_as_long_as_the_run_takes() -> None:
    assert cost(Spread(p10=1800.0, p50=3600.0, p90=7200.0), 8, 2.5) == Spread(p10=10.0, p50=20.0, p90=40.0)
    assert cost(Spread(p50=1.0, p90=1.0), 8, None) is None


def test_a_measured_drift_dies_away_beyond_what_was_measured() -> None:
    lengths = replace(Distribution.constant(1000.0), quantiles=((0.0, 1000.0), (0.999, 1000.0), (1.0, 9000.0)), drift_per_update=10.0)
    still = plain_profile(floor_seconds=0.0, seconds_per_sequence=1e-3, learn_seconds_per_token=1e-9)
    growing = still.with_distributions(replace(still.distributions, answer_tokens=lengths))
    seen = Observed(
        mode="async", placement="split", num_sampler_devices=1, num_learner_devices=1, slots_per_sampler=64, batch_trajectories=512, max_staleness=8,
        num_updates=10, step_seconds=1.0, trajectories_per_second=1.0, mean_in_flight=1.0, rollout_seconds=1.0, staleness_mean=1.0,
        learner_busy_fraction=0.5, sampler_busy_fraction=0.5, mean_running=1.0,
    )  # fmt: skip
    measured = replace(growing, observed=seen)
    # ten updates were seen: at most twice as many count, 200 tokens more
    assert finish(measured, updates=1000).p50 / finish(still, updates=1000).p50 == pytest.approx(1.2, rel=0.03)
    assert finish(growing, updates=300).p50 > 1.8 * finish(still, updates=300).p50


def test_simulations_see_a_profile_that_does_not_drift() -> None:
    profile = plain_profile(answers=replace(Distribution.lognormal(100, 50), drift_per_update=3.0))
    stripped = without_drift(profile)
    assert stripped.distributions.answer_tokens.drift_per_update == 0.0
    assert stripped.distributions.answer_tokens.quantiles == profile.distributions.answer_tokens.quantiles
