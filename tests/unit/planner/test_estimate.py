"""The closed forms: identities that hold whatever the numbers, and the direction in which each input moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.model_configs import QWEN_7B
from headrace.planner import estimate, staleness
from headrace.planner.distributions import Distribution
from headrace.planner.estimate import Setup, steady_state
from headrace.planner.hardware import DEVICES
from headrace.planner.profile import Profile
from headrace.planner.roofline import Engine, estimate_profile
from headrace.planner.shapes import ModelShape

ASYNC = Setup(
    mode="async", placement="split", num_samplers=8, num_learner_ranks=8, slots_per_sampler=128, batch_trajectories=512, max_staleness=4
)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    engine = Engine(shape=ModelShape.from_config(QWEN_7B), device=DEVICES["H100"])
    answers = Distribution.lognormal(2000, 1500).capped(8192)
    return estimate_profile(engine, name="7b", prompt_tokens=Distribution.constant(300), answer_tokens=answers, group_size=8)


def with_tools(profile: Profile, seconds: float) -> Profile:
    lengths = replace(profile.distributions, steps=Distribution.constant(10.0), tool_wait_seconds=Distribution.constant(seconds))
    return profile.with_distributions(lengths)


def test_an_asynchronous_step_is_the_slower_side(profile: Profile) -> None:
    for samplers in (2, 4, 8, 16, 32, 64):
        steady = steady_state(profile, replace(ASYNC, num_samplers=samplers))
        assert steady.step_seconds == pytest.approx(max(steady.learn_seconds, steady.generate_seconds), rel=1e-6)
        assert (steady.bottleneck == "learner") == (steady.production_rate >= steady.consumption_rate)


def test_a_synchronous_step_is_the_sum_of_its_phases(profile: Profile) -> None:
    steady = steady_state(profile, replace(ASYNC, mode="sync"))
    assert steady.step_seconds == pytest.approx(steady.generate_seconds + steady.learn_seconds)
    assert steady.staleness.mean == 0.0 and steady.bottleneck == "both in turn"


def test_staleness_zero_is_the_synchronous_step(profile: Profile) -> None:
    assert steady_state(profile, replace(ASYNC, max_staleness=0)) == steady_state(profile, replace(ASYNC, mode="sync", max_staleness=0))


def test_littles_law_holds_between_rollouts_in_flight_and_their_time(profile: Profile) -> None:
    for one in (profile, with_tools(profile, 3.0)):
        for samplers in (4, 16, 64):
            steady = steady_state(one, replace(ASYNC, num_samplers=samplers))
            rate = min(steady.production_rate, steady.consumption_rate)
            assert steady.in_flight == pytest.approx(estimate.littles_law(rate, steady.rollout_seconds), rel=0.02)


def test_more_samplers_produce_more_until_admission_holds_them(profile: Profile) -> None:
    rates = [steady_state(profile, replace(ASYNC, num_samplers=samplers)).production_rate for samplers in (2, 4, 8, 16, 32, 64, 128)]
    assert rates == sorted(rates)
    assert rates[-1] < 1.4 * rates[-2]  # the same rollouts in flight, spread over smaller batches


def test_a_wider_staleness_bound_never_slows_a_run_and_makes_data_older(profile: Profile) -> None:
    steadies = [steady_state(profile, replace(ASYNC, num_samplers=4, slots_per_sampler=512, max_staleness=bound)) for bound in (1, 2, 4, 8)]
    steps = [steady.step_seconds for steady in steadies]
    assert steps == sorted(steps, reverse=True)
    ages = [steady.staleness.mean for steady in steadies]
    assert ages == sorted(ages) and all(age <= bound for age, bound in zip(ages, (1, 2, 4, 8), strict=True))


def test_rollouts_that_wait_cost_nothing_where_more_of_them_fit_and_much_in_sync(profile: Profile) -> None:
    waiting = with_tools(profile, 5.0)
    few = replace(ASYNC, num_samplers=2, max_staleness=8)
    assert steady_state(waiting, few).step_seconds < 1.25 * steady_state(profile, few).step_seconds
    sync = replace(few, mode="sync")
    assert steady_state(waiting, sync).step_seconds > steady_state(profile, sync).step_seconds + 50.0


def test_a_full_kv_cache_bounds_the_running_batch(profile: Profile) -> None:
    small = replace(profile, decode=replace(profile.decode, kv_capacity_tokens=40_000))
    rate, running = estimate.sampler_rate(small, 512, 512)
    assert running == pytest.approx(40_000 / estimate.mean_context(small), rel=1e-6)
    assert rate < estimate.sampler_rate(profile, 512, 512)[0]


def test_a_quorum_shortens_the_wait_for_the_longest_member(profile: Profile) -> None:
    whole, most = (steady_state(profile, replace(ASYNC, num_samplers=3, max_staleness=16, quorum=quorum)).staleness.mean for quorum in (None, 6))
    assert most < whole


@pytest.mark.parametrize(
    ("concurrency", "batch", "queue", "rho", "tailness", "published"),
    [(120, 240, 2, 0.63, 1.42, 1.34), (240, 120, 2, 0.92, 1.43, 3.78), (240, 120, 1, 0.86, 1.42, 3.70), (120, 120, 1, 0.67, 1.42, 2.09)],
)
def test_queue_drop_staleness_is_the_published_formula(concurrency: float, batch: float, queue: float, rho: float, tailness: float, published: float) -> None:
    got = staleness.queue_drop_staleness(concurrency=concurrency, batch=batch, rho=rho, tailness=tailness, queue_batches=queue)
    assert got.mean == pytest.approx(published, abs=0.01)


def test_a_queue_that_turns_over_fast_holds_data_half_a_step() -> None:
    assert staleness.queue_drop_staleness(concurrency=0, batch=1, rho=1e9, tailness=1, queue_batches=2).in_pool == pytest.approx(0.5)


def test_idle_shares_belong_to_the_faster_side() -> None:
    assert estimate.idle_shares(0.5) == (0.0, 0.5)
    assert estimate.idle_shares(2.0) == (0.5, 0.0)


def test_groups_that_leave_in_order_wait_for_older_ones_only_where_durations_differ() -> None:
    assert staleness.resequencing_seconds(Distribution.constant(10.0), 8, 5.0) == pytest.approx(0.0, abs=0.1)
    spread = Distribution.lognormal(10.0, 8.0)
    waits = [staleness.resequencing_seconds(spread, 8, rate) for rate in (0.01, 0.3, 3.0)]
    assert waits == sorted(waits) and waits[0] < 0.5
    longest = spread.most - spread.expected_max(8)
    assert 0.4 * longest < waits[-1] < longest
