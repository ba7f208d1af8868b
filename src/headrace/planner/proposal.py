"""From a profile and a request to everything that plan.json holds: search, checks by simulation, forecast, words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.planner.estimate import Steady, steady_state
from headrace.planner.explain import deadline_missed, deadline_odds, flat_region, sensitivity, too_few_devices, why_not_better
from headrace.planner.forecast import cost, finish_seconds, without_drift
from headrace.planner.inputs import apply_what_if
from headrace.planner.plan import Plan, Proposal, RatePoint, Request, StalenessSpread, Verification
from headrace.planner.profile import Profile
from headrace.planner.search import TIE, Candidate, Search, adapted

MAX_SIMULATED = 3
MAX_ROLLOUTS = 200_000
"""Of all simulations of one proposal together."""
_ROLLOUTS_A_DEVICE = 80
_ROLLOUTS = 16_000
_LEAST_ROLLOUTS = 6_000
_SHORT_UPDATES = 14
_COST_OF_A_STEP = 0.15
"""Of simulating a further step of a rollout / of the whole rollout with its first one."""
_TAIL = 0.95
_CURVE_POINTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A plan as the simulated runtime ran it, in its steady state."""

    verification: Verification
    staleness: StalenessSpread
    occupancy: float
    busy_fraction: float


Trial = tuple[Profile, Plan, int]
"""(profile of the plan's engines, plan, rollouts at most)."""
Simulate = Callable[[Sequence[Trial]], Sequence[Simulated | None]]
"""How each went; None where it cannot be simulated."""


def affordable_rollouts(num_gpus: int, steps: float = 1.0) -> int:
    """For simulations that keep a proposal for 64 devices under 10 s, for 1,024 under 60 s, on 2 cores; `steps` of one rollout, mean."""
    dearer = 1.0 + _COST_OF_A_STEP * max(0.0, steps - 1.0)
    return max(_LEAST_ROLLOUTS, int(min(MAX_ROLLOUTS, max(_ROLLOUTS, _ROLLOUTS_A_DEVICE * num_gpus)) / dearer))


def make_proposal(profile: Profile, request: Request, *, simulate: Simulate | None = None, max_rollouts: int | None = None) -> Proposal:
    """Raises ConfigError where the request makes no sense; where it cannot be met, `infeasible_reason` says why.

    `max_rollouts`: of all simulations together; None: what is affordable.
    """
    profile = adapted(apply_what_if(profile, request.what_if), request.group_size)
    search = Search(profile, request)
    found = search.run()
    if not found.candidates:
        return Proposal(
            profile=profile, request=request, plans=(), flat_region=(), flat_region_text="", speedup_over_best_sync=None, rates=(), sensitivity=(),
            infeasible_reason=too_few_devices(search),
        )  # fmt: skip
    pairs = [(each, _plan(search, each)) for each in found.candidates]
    if simulate is not None:
        pairs = _checked(search, pairs, simulate, max_rollouts)
    best = pairs[0][1]
    plans = tuple(replace(plan, rank=rank) for rank, (_, plan) in enumerate(pairs, start=1))
    plans = tuple(replace(plan, why_not_better=why_not_better(plan, plans[0])) for plan in plans)
    ranks, text = flat_region(found.flat, plans)
    return Proposal(
        profile=profile, request=request, plans=plans, flat_region=ranks, flat_region_text=text,
        speedup_over_best_sync=_speedup(plans), rates=_rates(found.curve), sensitivity=sensitivity(search, pairs[0][0]),
        infeasible_reason=deadline_missed(search, best), notes=tuple(_notes(profile, request, plans)),
    )  # fmt: skip


def _plan(search: Search, candidate: Candidate) -> Plan:
    """What the closed forms promise; its words come when all are known."""
    setup, steady = candidate.setup, candidate.steady
    engine, num_updates = search.engine(candidate.tensor_parallel), math.ceil(search.request.num_trajectories / setup.batch_trajectories)
    finish = finish_seconds(engine, setup, steady, num_updates)
    return Plan(
        rank=1, mode=setup.mode, placement=setup.placement, num_sampler_devices=candidate.num_sampler_devices,
        num_learner_devices=setup.num_learner_ranks, tensor_parallel=candidate.tensor_parallel, slots_per_sampler=setup.slots_per_sampler,
        batch_trajectories=setup.batch_trajectories, group_size=search.request.group_size, max_staleness=setup.max_staleness,
        selection=setup.selection, quorum=setup.quorum, step_seconds=steady.step_seconds, production_rate=steady.production_rate,
        consumption_rate=steady.consumption_rate, staleness=_staleness(engine, candidate), occupancy=steady.occupancy,
        busy_fraction=steady.busy_fraction, finish_seconds=finish, cost=cost(finish, search.request.num_gpus, search.request.price_per_gpu_hour),
        bottleneck=steady.bottleneck, why_not_better="", verified_by="closed form", running=steady.running, in_flight=steady.in_flight,
        num_updates=num_updates, sampler_idle_fraction=max(0.0, steady.sampler_idle_fraction), learner_idle_fraction=max(0.0, steady.learner_idle_fraction),
    )  # fmt: skip


def _staleness(profile: Profile, candidate: Candidate) -> StalenessSpread:
    """The mean is the closed form's. A token of a long rollout waits as much longer for its group's end as the rollout is longer than the
    mean one: that carries the mean to the 95 %, and the longest answer to the most, never over the bound."""
    steady, bound = candidate.steady.staleness, float(candidate.setup.max_staleness)
    answers = profile.distributions.answer_tokens
    mean = max(answers.table_mean, 1e-9)
    if candidate.setup.mode == "sync" or bound == 0:
        return StalenessSpread(mean=0.0, p95=0.0, max=0.0)
    high = steady.in_flight * answers.quantile(_TAIL) / mean + math.ceil(steady.in_pool)
    most = steady.in_flight * answers.most / mean + math.ceil(steady.in_pool) + 1
    return StalenessSpread(mean=steady.mean, p95=min(bound, max(high, steady.mean)), max=min(bound, float(math.ceil(most))), in_flight=steady.in_flight)


def _checked(search: Search, pairs: Sequence[tuple[Candidate, Plan]], simulate: Simulate, max_rollouts: int | None) -> list[tuple[Candidate, Plan]]:
    """The best, the best synchronous one and the runner-up by simulation; plans of their mode are then corrected as the best of them was."""
    chosen = [0, *(index for index, (_, plan) in enumerate(pairs) if plan.mode == "sync" and index)][:2]
    others = [index for index in range(len(pairs)) if index not in chosen]
    # another split tells more than another order
    others.sort(key=lambda index: pairs[index][1].selection != pairs[0][1].selection)
    chosen += others[: MAX_SIMULATED - len(chosen)]
    chosen.sort()
    # drift is the forecast's: a simulated run is short and stands for the profile as it was measured
    trials = [
        (without_drift(search.engine(pairs[index][0].tensor_parallel)), pairs[index][1], _rollouts(search, pairs[index][1], max_rollouts, len(chosen)))
        for index in chosen
    ]
    outcomes: dict[int, Simulated] = {}
    for index, outcome in zip(chosen, simulate(trials), strict=True):
        if outcome is not None:
            closed_form = _at_scale(search, pairs[index][0], outcome.verification).step_seconds
            outcomes[index] = replace(outcome, verification=replace(outcome.verification, closed_form_step_seconds=closed_form))
    corrections: dict[str, float] = {}
    for index, outcome in outcomes.items():
        corrections.setdefault(pairs[index][1].mode, _correction(outcome))
    checked = []
    for index, (candidate, plan) in enumerate(pairs):
        corrected = _corrected(search, candidate, plan, corrections.get(plan.mode, 1.0))
        checked.append((candidate, _shown(corrected, outcomes[index], search, candidate) if index in outcomes else corrected))
    # in a tie the order of the search stays, which looks at staleness too
    fastest = max(plan.rate for _, plan in checked)
    first = next(pair for pair in checked if pair[1].rate >= (1 - TIE) * fastest)
    return [first, *sorted((pair for pair in checked if pair is not first), key=lambda pair: -pair[1].rate)]


def _rollouts(search: Search, plan: Plan, most: int | None, count: int) -> int:
    """Of one of `count` simulations: an even share, and where nothing was asked for at least what one sampler does in a short run."""
    if most is not None:
        return min(most, MAX_ROLLOUTS) // count
    share = affordable_rollouts(search.request.num_gpus, search.profile.distributions.steps.mean) // count
    one_sampler = math.ceil(plan.batch_trajectories / plan.num_samplers / plan.group_size) * plan.group_size
    begun = 1.0 + (plan.max_staleness + 1) / _SHORT_UPDATES
    return min(MAX_ROLLOUTS // count, max(share, math.ceil(_SHORT_UPDATES * one_sampler * begun)))


def _correction(outcome: Simulated) -> float:
    return outcome.verification.step_seconds / outcome.verification.closed_form_step_seconds


def _at_scale(search: Search, candidate: Candidate, shown: Verification) -> Steady:
    """The closed form of what was simulated: a part of samplers and batch, and a learner that takes as long as for the whole batch.

    The longest rollout of a smaller batch is shorter: simulation and closed form are compared at the same size.
    """
    engine, setup = search.engine(candidate.tensor_parallel), candidate.setup
    batch, samplers = round(shown.num_rollouts / shown.num_updates), max(1, round(setup.num_samplers * shown.scale))
    if (batch, samplers) == (setup.batch_trajectories, setup.num_samplers):
        return candidate.steady
    lengths = engine.distributions
    each = engine.learn.tokens_per_trajectory or lengths.prompt_tokens.mean + lengths.answer_tokens.mean
    engine = replace(engine, learn=replace(engine.learn, tokens_per_trajectory=each * setup.batch_trajectories / batch))
    return steady_state(engine, replace(setup, num_samplers=samplers, batch_trajectories=batch))


def _corrected(search: Search, candidate: Candidate, plan: Plan, correction: float) -> Plan:
    """With another step; `correction`: seconds of a step / those of the closed form. It is the limiting side's."""
    side = "consumption_rate" if plan.bottleneck == "learner" else "production_rate"
    plan = replace(plan, **{side: getattr(candidate.steady, side) / correction})
    finish = finish_seconds(search.engine(candidate.tensor_parallel), candidate.setup, candidate.steady, plan.num_updates, correction=correction)
    price = cost(finish, search.request.num_gpus, search.request.price_per_gpu_hour)
    return replace(plan, step_seconds=candidate.steady.step_seconds * correction, finish_seconds=finish, cost=price)


def _shown(plan: Plan, outcome: Simulated, search: Search, candidate: Candidate) -> Plan:
    """What the simulation showed stands in for the closed form."""
    corrected = _corrected(search, candidate, plan, _correction(outcome))
    return replace(
        corrected, staleness=outcome.staleness, occupancy=outcome.occupancy, busy_fraction=outcome.busy_fraction, verified_by="simulation",
        verification=outcome.verification,
    )  # fmt: skip


def _speedup(plans: Sequence[Plan]) -> float | None:
    """Of the best plan over the best synchronous one."""
    best = plans[0]
    synchronous = next((plan for plan in plans if plan.mode == "sync"), None)
    if synchronous is None:
        return None
    return best.rate / synchronous.rate


def _rates(curve: Sequence[Candidate]) -> tuple[RatePoint, ...]:
    thin = max(1, math.ceil(len(curve) / _CURVE_POINTS))
    return tuple(
        RatePoint(
            num_sampler_devices=each.num_sampler_devices, num_learner_devices=each.setup.num_learner_ranks,
            production_rate=each.steady.production_rate, consumption_rate=each.steady.consumption_rate, rate=each.rate,
            staleness_mean=each.steady.staleness.mean,
        )
        for index, each in enumerate(curve)
        if index % thin == 0 or index == len(curve) - 1
    )  # fmt: skip


def _notes(profile: Profile, request: Request, plans: Sequence[Plan]) -> list[str]:
    """What a reader should know of how far the numbers carry."""
    best, notes = plans[0], []
    if profile.estimated:
        notes.append("The profile is an estimate: no hardware was measured, and the intervals are wide.")
    elif best.tensor_parallel != profile.model.tensor_parallel:
        notes.append(f"Samplers on {best.tensor_parallel} devices were not measured; their speed is scaled from {profile.model.tensor_parallel}.")
    measured = max(point.running for point in profile.decode.points)
    if not profile.estimated and best.running > 1.05 * measured:
        notes.append(f"The best plan decodes {best.running:.0f} sequences at once; measured were up to {measured:.0f}.")
    if profile.group.draw_to_end is None and not profile.estimated:
        notes.append(f"Groups of {request.group_size} were not measured: how long the longest of them takes follows from the lengths.")
    if (odds := deadline_odds(request, best)) is not None:
        notes.append(odds)
    for plan in plans:
        if plan.verification is not None and plan.verification.scale < 1:
            notes.append(f"Plan {plan.rank} was simulated at {plan.verification.scale:.2g} of its samplers and batch.")
    return notes
