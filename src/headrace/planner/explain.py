"""Plans in words: what limits each, why the next is worse, which splits are as good, which input matters most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from headrace.planner.estimate import steady_state
from headrace.planner.inputs import INPUTS
from headrace.planner.plan import Elasticity, Plan, Request
from headrace.planner.search import FLAT, TIE, Candidate, Search

_DIFFERENCE = 1.05
"""Factor up and down of the finite differences."""
_ORDER = {"oldest_first": " Groups are trained in the order they began.", "ready_first": " Groups are trained as they finish."}
_BALANCED = 0.97
"""Production / consumption at which neither side is said to limit."""
_DEADLINE_SEARCH = 16
"""Times the devices asked for, up to which a deadline is tried."""


def why_not_better(plan: Plan, best: Plan) -> str:
    """Of the best: what holds it. Of the others: what they lose to it, and where."""
    if plan.rank == best.rank:
        return f"{_limit(plan)} Every other split loses on one side what it gains on the other."
    lost = 1.0 - plan.rate / best.rate
    if lost < 0.0005:
        return f"As fast as plan {best.rank}{_differences(plan, best)}. {_limit(plan)}"
    return f"{_percent(lost)} slower than plan {best.rank}. {_limit(plan)}{_remedy(plan, best)}"


def _limit(plan: Plan) -> str:
    production, consumption = number(plan.production_rate), number(plan.consumption_rate)
    if plan.mode == "sync":
        parts = "all devices sample, then all learn" if plan.placement == "colocated" else "samplers and learner take turns"
        idle = f"samplers idle {_percent(plan.sampler_idle_fraction)} of the time" if plan.placement == "split" else f"occupancy {_percent(plan.occupancy)}"
        return f"Nothing overlaps: {parts}, and every batch waits for its longest rollout ({idle})."
    if _BALANCED < plan.production_rate / plan.consumption_rate < 1 / _BALANCED:
        return f"Both sides are balanced: {production} trajectories/s can be sampled, {consumption} learned."
    if plan.bottleneck == "learner":
        return f"The learner limits: {_devices(plan.num_learner_devices, 'take')} {consumption} of the {production} trajectories/s that could be sampled."
    if plan.bottleneck == "admission":
        admitted = (plan.max_staleness + 1) * plan.batch_trajectories
        return (
            f"Staleness limits: max_staleness {plan.max_staleness} admits {admitted:,} trajectories, so a sampler decodes {plan.running:.3g} at once "
            f"and {production} of the {consumption} trajectories/s come that the learner could take."
        )
    return f"Sampling limits: {_devices(plan.num_sampler_devices, 'finish')} {production} of the {consumption} trajectories/s that the learner could take."


def _remedy(plan: Plan, best: Plan) -> str:
    if plan.selection != best.selection and plan.mode == best.mode == "async":
        return _ORDER[plan.selection]
    if plan.mode == "sync" or best.mode == "sync" or plan.tensor_parallel != best.tensor_parallel:
        return "" if plan.tensor_parallel == best.tensor_parallel else f" Its samplers take {_devices(plan.tensor_parallel)} each."
    if plan.num_sampler_devices > best.num_sampler_devices:
        return f" {_devices(plan.num_sampler_devices - best.num_sampler_devices)} more should learn."
    if plan.num_sampler_devices < best.num_sampler_devices:
        return f" {_devices(best.num_sampler_devices - plan.num_sampler_devices)} more should sample."
    return ""


def _differences(plan: Plan, best: Plan) -> str:
    differing = [_ORDER[plan.selection].strip(" .").lower()] if plan.selection != best.selection and plan.mode == best.mode else []
    if plan.staleness.mean > best.staleness.mean + 0.05:
        differing.append(f"with staleness {plan.staleness.mean:.2f} instead of {best.staleness.mean:.2f}")
    if plan.tensor_parallel > best.tensor_parallel:
        differing.append(f"with {_devices(plan.tensor_parallel)} a sampler")
    return ", but " + " and ".join(differing) if differing else ""


def flat_region(flat: tuple[Candidate, Candidate] | None, plans: Sequence[Plan]) -> tuple[tuple[int, ...], str]:
    """(ranks within it, the sentence). Splits are learner:sampler devices."""
    overlapping = [plan for plan in plans if plan.mode == "async"]
    if not overlapping or flat is None:
        return (), ""
    best = max(plan.rate for plan in overlapping)
    # plans gave up to two ties away for fewer slots and less staleness
    ranks = tuple(plan.rank for plan in overlapping if plan.rate >= (1 - FLAT - 2 * TIE) * best)
    few, many = sorted(flat, key=lambda each: each.setup.num_learner_ranks)
    if few.split == many.split:
        return ranks, f"Only the split {few.split} (learner:sampler devices) is within {FLAT:.0%} of the best."
    return ranks, f"Anything from {few.split} to {many.split} (learner:sampler devices) is within {FLAT:.0%} of the best."


def sensitivity(search: Search, candidate: Candidate) -> tuple[Elasticity, ...]:
    """Of the plan's throughput, the split held: d log rate / d log input by central differences; the largest first."""
    engine, found = search.engine(candidate.tensor_parallel), []
    for name, one in INPUTS.items():
        seconds = [steady_state(one.apply(engine, factor), candidate.setup).step_seconds for factor in (_DIFFERENCE, 1 / _DIFFERENCE)]
        elasticity = math.log(seconds[1] / seconds[0]) / (2 * math.log(_DIFFERENCE))
        found.append(Elasticity(input=name, elasticity=round(elasticity, 4) + 0.0, meaning=one.meaning))
    return tuple(sorted(found, key=lambda each: -abs(each.elasticity)))


def too_few_devices(search: Search) -> str:
    """Why there is no plan at all."""
    parallel, learner, asked = search.profile.model.tensor_parallel, search.least_learner_devices, search.request.num_gpus
    billions = search.profile.model.num_parameters / 1e9
    least = max(parallel, learner)
    count = _devices(asked, "are") if asked > 1 else "1 device is"
    return (
        f"{count} too few: one sampler takes {parallel}, and weights, gradients and optimizer states of {billions:.3g} billion "
        f"parameters take {learner} to learn. At least {least} are needed in sync mode, {parallel + learner} in async mode."
    )


def deadline_missed(search: Search, best: Plan) -> str | None:
    """None where half the runs make it, or no deadline was given; else what would."""
    deadline = search.request.deadline_hours
    if deadline is None or best.finish_seconds.p50 <= 3600 * deadline:
        return None
    reason = f"The deadline of {deadline:g} h is missed: the fastest plan takes {best.finish_seconds.p50 / 3600:.3g} h (P50)"
    enough = _devices_for(search, best.rate * best.finish_seconds.p50 / (3600 * deadline))
    if enough is None:
        return f"{reason}, and even {_devices(_DEADLINE_SEARCH * search.request.num_gpus)} would not make it."
    return f"{reason}; about {_devices(enough)} would make it."


def _devices_for(search: Search, rate: float) -> int | None:
    """About the fewest devices with this throughput."""

    def enough(devices: int) -> bool:
        return Search(search.profile, replace(search.request, num_gpus=devices)).best_rate() >= rate

    low, high = search.request.num_gpus, _DEADLINE_SEARCH * search.request.num_gpus
    if not enough(high):
        return None
    while high > 1.05 * low + 1:
        middle = round(math.sqrt(low * high))
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def deadline_odds(request: Request, best: Plan) -> str | None:
    """A word on a deadline that is met at even odds only."""
    finish, deadline = best.finish_seconds, request.deadline_hours
    if deadline is None or not finish.p50 <= 3600 * deadline < finish.p90:
        return None
    return f"The deadline of {deadline:g} h is likely met (P50 {finish.p50 / 3600:.3g} h), not surely (P90 {finish.p90 / 3600:.3g} h)."


def number(value: float) -> str:
    """Three digits, without powers of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _devices(count: int, verb: str = "") -> str:
    if count != 1:
        return f"{count:,} devices {verb}".rstrip()
    return f"1 device {verb}{'es' if verb.endswith('sh') else 's' if verb else ''}".rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
