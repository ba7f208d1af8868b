"""Closed forms against a run played decode step by decode step, in the regimes that they are for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.step_simulation import Played, StepSimulation
from headrace.planner.distributions import Distribution
from headrace.planner.estimate import Setup, Steady, littles_law, steady_state
from headrace.planner.fits import DecodeFit, LearnFit
from headrace.planner.profile import (
    Decode,
    Distributions,
    Group,
    Hardware,
    Learn,
    Model,
    Prefill,
    Profile,
    Saturation,
    Source,
    WeightUpdate,
)

FIT = DecodeFit(floor_seconds=4e-3, seconds_per_sequence=1e-4, seconds_per_context_token=1e-7, seconds_per_extra_token=0.0, sharpness=2.0)
LENGTHS = Distribution.lognormal(40, 25).capped(200)


def made_profile(*, wait: float, group_size: int, learn: float) -> Profile:
    return Profile(
        source=Source(kind="measured", origin="made"),
        hardware=Hardware(device="made", count=1),
        model=Model(num_parameters=1),
        decode=Decode(points=(), fit=FIT, kv_capacity_tokens=None, saturation=Saturation(running=32, tokens_per_second=5000)),
        prefill=Prefill(overhead_seconds=0.0, tokens_per_second=1e9),
        learn=Learn(points=(), fit=LearnFit(overhead_seconds=learn, seconds_per_micro_batch=0.0, seconds_per_token=0.0, seconds_per_exchange=0.0)),
        weight_update=WeightUpdate(bytes=1, publish_seconds=0.0, transfer_seconds=0.0, pause_seconds=0.0),
        distributions=Distributions(
            prompt_tokens=Distribution.constant(0.0),
            answer_tokens=LENGTHS,
            steps=LENGTHS if wait else Distribution.constant(1.0),
            tool_wait_seconds=Distribution.constant(wait),
        ),
        group=Group(size=group_size, tailness=LENGTHS.tailness(group_size)),
    )


def both(
    engines: int, slots: int, batch: int, group_size: int, bound: int, learn: float, wait: float = 0.0, *, in_order: bool = False
) -> tuple[Steady, Played]:
    played = StepSimulation(
        fit=FIT, lengths=LENGTHS, engines=engines, slots=slots, batch=batch, group_size=group_size, max_staleness=bound, learn_seconds=learn,
        wait_seconds=wait, in_order=in_order,
    ).play(60)  # fmt: skip
    setup = Setup(
        mode="async", placement="split", num_samplers=engines, num_learner_ranks=1, slots_per_sampler=slots, batch_trajectories=batch,
        max_staleness=bound, gather_seconds=0.0, queue_share=0.0, selection="oldest_first" if in_order else "ready_first",
    )  # fmt: skip
    return steady_state(made_profile(wait=wait, group_size=group_size, learn=learn), setup), played


REGIMES = {
    "samplers": (2, 32, 64, 8, 8, 0.05),
    "samplers, large groups": (1, 128, 128, 16, 4, 0.5),
    "learner": (2, 32, 64, 8, 8, 0.8),
    "learner, far slower": (2, 32, 64, 8, 8, 1.5),
    "learner, tight bound": (4, 64, 64, 8, 3, 0.4),
    "admission": (4, 64, 64, 8, 2, 0.05),
    "admission, one update": (4, 64, 64, 8, 1, 0.3),
    "slow tools": (2, 64, 64, 8, 8, 0.2, 0.05),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_step_staleness_and_rollouts_in_flight_are_those_of_the_played_run(regime: str) -> None:
    steady, played = both(*REGIMES[regime])
    assert steady.step_seconds == pytest.approx(played.step_seconds, rel=0.06)
    assert steady.staleness.mean == pytest.approx(played.staleness, abs=0.4)
    assert steady.in_flight == pytest.approx(played.in_flight, rel=0.2)


@pytest.mark.parametrize("regime", [name for name in REGIMES if name != "slow tools"])
def test_the_named_bottleneck_is_the_one_whose_relief_shortens_the_played_step(regime: str) -> None:
    engines, slots, batch, group_size, bound, learn, *_ = REGIMES[regime]
    steady, played = both(engines, slots, batch, group_size, bound, learn)
    assert steady.bottleneck == regime.partition(",")[0]
    relieved = {
        "samplers": (2 * engines, slots, batch, group_size, bound, learn),
        "learner": (engines, slots, batch, group_size, bound, 0.8 * learn),
        "admission": (engines, slots, batch, group_size, 2 * bound + 1, learn),
    }
    gains = {name: 1 - both(*changed)[1].step_seconds / played.step_seconds for name, changed in relieved.items()}
    assert gains[steady.bottleneck] > 0.05
    assert gains[steady.bottleneck] == max(gains.values())


def test_littles_law_holds_in_the_played_run_too() -> None:
    for regime in ("samplers", "learner", "admission"):
        _, played = both(*REGIMES[regime])
        assert littles_law(REGIMES[regime][2] / played.step_seconds, played.rollout_seconds) == pytest.approx(played.in_flight, rel=0.1)


@pytest.mark.parametrize(("case", "age"), [((2, 32, 64, 8, 8, 0.05), 0.25), ((1, 128, 128, 16, 4, 0.5), 0.25), ((4, 64, 64, 8, 2, 0.05), 0.4)])
def test_training_in_order_costs_the_wait_for_older_groups(case: tuple[int, int, int, int, int, float], age: float) -> None:
    steady, played = both(*case, in_order=True)
    assert steady.step_seconds == pytest.approx(played.step_seconds, rel=0.08)
    assert steady.staleness.mean == pytest.approx(played.staleness, abs=age)
    assert steady.staleness.mean > both(*case)[0].staleness.mean


@pytest.mark.parametrize("case", [(2, 32, 64, 8, 0.05, 0.0), (4, 16, 64, 8, 0.05, 0.0), (2, 8, 64, 8, 0.05, 0.0), (2, 64, 64, 8, 0.2, 0.05)])
def test_a_synchronous_step_is_that_of_the_played_run(case: tuple[int, int, int, int, float, float]) -> None:
    engines, slots, batch, group_size, learn, wait = case
    played = StepSimulation(
        fit=FIT, lengths=LENGTHS, engines=engines, slots=slots, batch=batch, group_size=group_size, max_staleness=0, learn_seconds=learn, wait_seconds=wait
    ).play(40)
    setup = Setup(mode="sync", placement="split", num_samplers=engines, num_learner_ranks=1, slots_per_sampler=slots, batch_trajectories=batch)
    steady = steady_state(made_profile(wait=wait, group_size=group_size, learn=learn), setup)
    assert steady.step_seconds == pytest.approx(played.step_seconds, rel=0.1)
    assert steady.in_flight == pytest.approx(played.in_flight, rel=0.15)
    assert played.staleness == steady.staleness.mean == 0.0


def test_a_pause_at_every_update_slows_the_samplers_by_its_share() -> None:
    profile = made_profile(wait=0.0, group_size=8, learn=0.05)
    setup = Setup(
        mode="async", placement="split", num_samplers=2, num_learner_ranks=1, slots_per_sampler=32, batch_trajectories=64, max_staleness=8, gather_seconds=0.0
    )
    paused = replace(profile, weight_update=replace(profile.weight_update, pause_seconds=0.02))
    without, with_pause = (steady_state(each, setup).step_seconds for each in (profile, paused))
    assert with_pause == pytest.approx(without + 0.02, rel=0.02)
