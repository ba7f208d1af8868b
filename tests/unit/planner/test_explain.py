"""Words about plans: they name the side that limits, and sensitivities are those of the closed forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from fakes.plan_profiles import plain_profile
from headrace.planner.distributions import Distribution
from headrace.planner.explain import sensitivity, why_not_better
from headrace.planner.plan import Proposal, Request, StalenessSpread, Verification
from headrace.planner.profile import Profile
from headrace.planner.proposal import MAX_SIMULATED, Simulated, Trial, affordable_rollouts, make_proposal
from headrace.planner.search import Search

LONG_TAIL = Distribution.lognormal(1000, 900).capped(8000)
REQUEST = Request(num_gpus=8, batch_trajectories=(512,), group_size=8, max_staleness=8)


@pytest.fixture(scope="module")
def proposal() -> Proposal:
    return make_proposal(plain_profile(answers=LONG_TAIL, learn_seconds_per_token=3e-4), REQUEST)


def elasticities(profile: Profile, samplers: int) -> dict[str, float]:
    search = Search(profile, REQUEST)
    return {each.input: each.elasticity for each in sensitivity(search, search.split(1, samplers, 512))}


def test_where_the_learner_limits_only_what_it_takes_counts() -> None:
    found = elasticities(plain_profile(learn_seconds_per_token=1e-2), 4)
    assert found["learn"] == pytest.approx(-1.0, abs=0.01) and found["answers"] == pytest.approx(-1.0, abs=0.01)
    assert found["decode"] == found["tools"] == found["kv"] == 0.0


def test_where_samplers_limit_only_what_they_take_counts() -> None:
    found = elasticities(plain_profile(learn_seconds_per_token=1e-6), 4)
    assert found["decode"] == pytest.approx(-1.0, abs=0.01) and found["learn"] == 0.0


def test_sensitivities_stand_by_size_and_say_what_they_mean(proposal: Proposal) -> None:
    sizes = [abs(each.elasticity) for each in proposal.sensitivity]
    assert sizes == sorted(sizes, reverse=True)
    assert all(each.meaning for each in proposal.sensitivity)


def test_a_split_with_too_many_samplers_is_told_to_learn_with_more(proposal: Proposal) -> None:
    best = proposal.plans[0]
    alike = [plan for plan in proposal.plans if plan.mode == "async" and plan.tensor_parallel == best.tensor_parallel and plan is not best]
    many = min((plan for plan in alike if plan.num_sampler_devices > best.num_sampler_devices), key=lambda plan: plan.rate)
    few = min((plan for plan in alike if plan.num_sampler_devices < best.num_sampler_devices), key=lambda plan: plan.rate)
    assert "The learner limits" in many.why_not_better and "more should learn." in many.why_not_better
    assert "Sampling limits" in few.why_not_better and "more should sample." in few.why_not_better
    assert f"slower than plan {best.rank}" in few.why_not_better


def test_tight_staleness_is_named_where_it_starves_the_samplers() -> None:
    # one batch more than the learner holds may be in flight, a small part of what eight samplers could decode
    profile = plain_profile(running=512, learn_seconds_per_token=1e-6, answers=LONG_TAIL)
    plans = make_proposal(profile, Request(num_gpus=8, batch_trajectories=(64,), group_size=8, max_staleness=1)).plans
    held = next(plan for plan in plans if plan.mode == "async" and plan.num_sampler_devices >= 6)
    assert held.bottleneck == "admission"
    assert "max_staleness 1 admits 128 trajectories" in held.why_not_better


def test_synchronous_plans_are_said_not_to_overlap(proposal: Proposal) -> None:
    sync = next(plan for plan in proposal.plans if plan.mode == "sync")
    assert "Nothing overlaps" in sync.why_not_better
    assert "Nothing overlaps" in why_not_better(sync, sync)


def test_the_best_split_is_told_in_the_other_order_too(proposal: Proposal) -> None:
    best = next(plan for plan in proposal.plans if plan.mode == "async")
    (in_order,) = (plan for plan in proposal.plans if plan.selection == "oldest_first")
    assert best.selection == "ready_first" and in_order.split == best.split and in_order.rate <= 1.01 * best.rate
    assert "in the order they began" in in_order.why_not_better.replace("groups are", "Groups are")


def test_flat_region_names_its_ends_as_learner_to_sampler_devices(proposal: Proposal) -> None:
    inside = [plan for plan in proposal.plans if plan.rank in proposal.flat_region and plan.tensor_parallel == 1]
    assert inside and all(plan.rate >= 0.92 * proposal.plans[0].rate for plan in inside)
    ends = sorted((plan.num_learner_devices, plan.split) for plan in inside)
    assert ends[0][1] in proposal.flat_region_text and ends[-1][1] in proposal.flat_region_text


def test_production_rises_and_consumption_falls_with_the_samplers(proposal: Proposal) -> None:
    points = proposal.rates
    assert [point.num_sampler_devices for point in points] == list(range(1, 8))
    assert all(a.production_rate <= b.production_rate + 1e-9 and a.consumption_rate > b.consumption_rate for a, b in itertools.pairwise(points))
    assert all(point.rate == pytest.approx(min(point.production_rate, point.consumption_rate)) for point in points)


def test_speedup_is_that_over_the_best_synchronous_plan(proposal: Proposal) -> None:
    sync = max(plan.rate for plan in proposal.plans if plan.mode == "sync")
    assert proposal.speedup_over_best_sync == pytest.approx(proposal.plans[0].rate / sync)


def simulated(seconds: float, *, rollouts: int = 20 * 512) -> Simulated:
    verification = Verification(num_rollouts=rollouts, num_updates=20, scale=1.0, step_seconds=seconds, closed_form_step_seconds=1.0)
    return Simulated(verification=verification, staleness=StalenessSpread(mean=1.5, p95=3.0, max=4.0), occupancy=0.5, busy_fraction=0.6)


def test_simulation_corrects_what_it_checked_and_the_others_of_its_mode(proposal: Proposal) -> None:
    asked: list[tuple[str, int]] = []

    def simulate(trials: Sequence[Trial]) -> list[Simulated | None]:
        asked.extend((plan.mode, most) for _, plan, most in trials)
        return [simulated(plan.step_seconds * (1.2 if plan.mode == "async" else 1.1)) for _, plan, _ in trials]

    checked = make_proposal(proposal.profile, REQUEST, simulate=simulate, max_rollouts=3000)
    assert len(asked) == MAX_SIMULATED and {mode for mode, _ in asked} == {"sync", "async"} and {most for _, most in asked} == {1000}
    before = {(plan.kind, plan.split, plan.tensor_parallel): plan for plan in proposal.plans}
    for plan in checked.plans:
        closed = before[plan.kind, plan.split, plan.tensor_parallel]
        factor = 1.2 if plan.mode == "async" else 1.1
        assert plan.step_seconds == pytest.approx(factor * closed.step_seconds)
        assert plan.finish_seconds.p50 == pytest.approx(factor * closed.finish_seconds.p50)
    shown = [plan for plan in checked.plans if plan.verified_by == "simulation"]
    assert len(shown) == MAX_SIMULATED and all(plan.staleness.p95 == 3.0 and plan.occupancy == 0.5 for plan in shown)
    assert checked.plans[0].verified_by == "simulation"


def test_a_simulation_that_finds_the_runner_up_faster_changes_the_order(proposal: Proposal) -> None:
    best = proposal.plans[0]

    def simulate(trials: Sequence[Trial]) -> list[Simulated | None]:
        return [simulated(plan.step_seconds * (2.0 if plan.split == best.split and plan.mode == best.mode else 1.0)) for _, plan, _ in trials]

    checked = make_proposal(proposal.profile, REQUEST, simulate=simulate)
    assert checked.plans[0].split != best.split and checked.plans[0].verified_by == "simulation"


def test_no_proposal_simulates_more_than_it_may() -> None:
    assert [affordable_rollouts(devices) for devices in (1, 64, 1024, 100_000)] == [16_000, 16_000, 81_920, 200_000]
    assert affordable_rollouts(64, steps=21.0) == 6000


def test_estimates_are_marked_and_noted() -> None:
    estimate = make_proposal(plain_profile(kind="estimated", errors=0.3), REQUEST)
    assert estimate.estimated and any("estimate" in note for note in estimate.notes)
