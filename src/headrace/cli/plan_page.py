"""`headrace plan --report`: the plans as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.planner.plan import Plan, Proposal
from headrace.report.markup import Chart, Markup, figure, number_text, percent, table, tag
from headrace.report.page import document
from headrace.report.progress import duration
from headrace.report.sections import section

_HEADER = (
    "rank", "mode", "learner:sampler", "parallel", "slots", "bound", "s an update", "trajectories/s", "staleness (95 %)", "occupancy", "busy",
    "done P50", "done P90", "limited by",
)  # fmt: skip
_CHECKED = (
    "Splits are learner:sampler devices; parallel: devices of one sampler. "
    "* simulated; the others in closed form, corrected by what simulation showed of their mode."
)


def plan_page(proposal: Proposal, headline: str) -> str:
    """`headline`: the answer in a sentence. The proposal has a plan."""
    origin = proposal.profile.source.origin
    told = [proposal.flat_region_text, *proposal.notes]
    if proposal.speedup_over_best_sync is not None:
        told.insert(0, f"{proposal.speedup_over_best_sync:.2f} x the throughput of the best synchronous plan.")
    if proposal.infeasible_reason is not None:
        told.insert(0, proposal.infeasible_reason)
    header = tag("header", tag("p", "Headrace plan", class_="brand"), tag("h1", origin))
    return document(
        f"{origin} · headrace plan",
        header,
        tag("div", tag("p", headline), tag("p", " ".join(part for part in told if part)), class_="summary"),
        section("The plans", table(_HEADER, [_row(plan) for plan in proposal.plans]), tag("p", _CHECKED, class_="note"), _reasons(proposal.plans)),
        section("Who limits whom", figure(_rates(proposal)), figure(_staleness(proposal))),
        section("What matters most", table(("input", "per cent of throughput for each per cent more"), _sensitivity(proposal))),
    )


def _row(plan: Plan) -> list[object]:
    stale = f"{plan.staleness.mean:.2f} ({plan.staleness.p95:.3g})" if plan.mode == "async" else "0"
    rank = f"{plan.rank}*" if plan.verified_by == "simulation" else plan.rank
    return [
        rank, plan.kind, plan.split, plan.tensor_parallel, plan.slots_per_sampler, plan.max_staleness, number_text(plan.step_seconds),
        number_text(plan.rate), stale, percent(plan.occupancy), percent(plan.busy_fraction), _unbroken(plan.finish_seconds.p50),
        _unbroken(plan.finish_seconds.p90), plan.bottleneck,
    ]  # fmt: skip


def _unbroken(seconds: float) -> str:
    return duration(seconds).replace(" ", "\u00a0")


def _reasons(plans: Sequence[Plan]) -> Markup:
    return tag("ol", *(tag("li", plan.why_not_better) for plan in plans))


def _sensitivity(proposal: Proposal) -> list[list[object]]:
    return [[each.meaning or each.input, f"{each.elasticity:+.2f}"] for each in proposal.sensitivity if abs(each.elasticity) >= 0.005]


def _rates(proposal: Proposal) -> Chart | None:
    if len(proposal.rates) < 2:
        return None
    samplers = [point.num_sampler_devices for point in proposal.rates]
    most = 2.2 * max(point.rate for point in proposal.rates)
    return Chart(
        title="Production and consumption",
        caption="Trajectories/s that the samplers could make and the learner could take; a run does the smaller one.",
        data=[
            _line(samplers, [point.production_rate for point in proposal.rates], "production", "blue"),
            _line(samplers, [point.consumption_rate for point in proposal.rates], "consumption", "orange"),
        ],
        layout={
            "xaxis": {"title": {"text": "devices that sample"}},
            "yaxis": {"title": {"text": "trajectories/s"}, "range": [0, most]},
            "showlegend": True,
        },
    )


def _staleness(proposal: Proposal) -> Chart | None:
    if len(proposal.rates) < 2:
        return None
    samplers = [point.num_sampler_devices for point in proposal.rates]
    return Chart(
        title="Staleness",
        caption=f"Mean of trained tokens in updates, with the bound of {proposal.request.max_staleness} and every slot open.",
        data=[_line(samplers, [point.staleness_mean for point in proposal.rates], "staleness", "teal")],
        layout={"xaxis": {"title": {"text": "devices that sample"}}, "yaxis": {"title": {"text": "updates"}, "rangemode": "tozero"}},
    )


def _line(xs: Sequence[float], ys: Sequence[float], name: str, color: str) -> dict[str, Any]:
    return {"type": "scatter", "x": list(xs), "y": list(ys), "mode": "lines", "name": name, "line": {"color": f"${color}", "width": 2.2}}
