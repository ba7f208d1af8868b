"""Figures of who worked and who waited, as plotly values: shares of allocated time, and the timeline of every device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.report.markup import Chart, plotly_text
from headrace.report.record import RunRecord
from headrace.report.timeline import BATCH, BUSY, FULL, LEARN, OTHER, Lane, binned, end_of, lanes

_MAX_EXACT_SLICES = 900
_MAX_BINS = 240
_MIN_BIN_SECONDS = 1.0
_LANE_PIXELS = 46

# colour and words of what a device does; reasons that are not here come from newer events
ACTIVITIES: Mapping[str, tuple[str, str]] = {
    FULL: ("work", "working at capacity"),
    BUSY: ("work-part", "working below capacity"),
    LEARN: ("learn", "learning"),
    "environment": ("wait-environment", "waits for environments"),
    BATCH: ("wait-batch", "waits for a batch"),
    "admission": ("wait-admission", "nothing admitted"),
    "gather": ("wait-gather", "gathers a fuller batch"),
    "rollouts": ("wait-rollouts", "runs the rollouts' Python"),
    "bookkeeping": ("wait-bookkeeping", "sampler's bookkeeping"),
    "weights": ("wait-weights", "takes up weights"),
    "overhead": ("wait-overhead", "learner's overhead"),
    "transfer": ("wait-transfer", "batch or result under way"),
    "acknowledgement": ("wait-acknowledgement", "waits until samplers use new weights"),
    "publish": ("wait-publish", "publishes weights"),
    "checkpoint": ("wait-checkpoint", "writes a checkpoint"),
    "unreported": ("wait-unreported", "did not report"),
    "restart": ("wait-restart", "was lost, is started again"),
    OTHER: ("wait-other", "other"),
    "evaluate": ("evaluate", "evaluates"),
}


def words(activity: str) -> str:
    return ACTIVITIES[activity][1] if activity in ACTIVITIES else activity.replace("_", " ")


def color(activity: str) -> str:
    return f"${ACTIVITIES.get(activity, ACTIVITIES[OTHER])[0]}"


def shares_of(device: Mapping[str, Any]) -> dict[str, float]:
    """A device of `utilization`: shares of its allocated time that add up to 1. The occupied part, the rest of the busy part, reasons.

    A learner is occupied whenever it is busy (DESIGN section 2), so that its work is one part.
    """
    occupied = min(device["occupancy"], device["busy_fraction"])
    shares = {LEARN if device["role"] == "learner" else FULL: occupied, BUSY: device["busy_fraction"] - occupied}
    idle = sorted(device["idle_seconds"].items(), key=lambda item: -item[1])
    shares |= {reason: seconds / device["allocated_seconds"] for reason, seconds in idle}
    return {activity: share for activity, share in shares.items() if share > 1e-4}


def utilization_bars(run: RunRecord) -> Chart | None:
    utilization = run.summary["utilization"]
    devices = utilization["devices"]
    if not devices:
        return None
    names = [plotly_text(device["name"]) for device in devices]
    shares = [shares_of(device) for device in devices]
    data = []
    for activity in _ordered(activity for each in shares for activity in each):
        values = [each.get(activity, 0.0) for each in shares]
        data.append(
            {
                "type": "bar", "orientation": "h", "y": names, "x": values, "name": words(activity), "marker": {"color": color(activity)},
                "text": [f"{value:.0%}" if value >= 0.06 else "" for value in values], "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
                "hovertemplate": "%{y}: %{x:.1%}",
            }
        )  # fmt: skip
    layout = {
        "barmode": "stack", "bargap": 0.3, "xaxis": {"tickformat": ".0%", "range": [0, 1]}, "yaxis": {"autorange": "reversed", "showgrid": False},
        "showlegend": True,
    }  # fmt: skip
    caption = (
        "Shares of the time from the first rollout to the last update. A batch that is half of the capacity counts half as work at capacity: "
        "that part is the occupancy. Busy is all work."
    )
    return Chart(title="Utilization of the devices", caption=caption, data=data, layout=layout, height=60 + 40 * len(devices))


def timeline(run: RunRecord) -> Chart | None:
    """One row a device. Rows with exact slices show them; the others show, for each bin, how large a share went where."""
    found = lanes(run.lines)
    end = end_of(run.lines)
    if end <= 0 or not any(lane.sampling or lane.learning for lane in found):
        return None
    bars: dict[str, dict[str, list[Any]]] = {}
    for row, lane in enumerate(found):
        if lane.sampling or len(lane.learning) > _MAX_EXACT_SLICES:
            _add_bins(bars, lane, row, end)
        else:
            _add_exact(bars, lane, row)
    data = [
        {
            "type": "bar", "name": words(activity), "marker": {"color": color(activity), "line": {"width": 0}}, "customdata": each.pop("custom"),
            "hovertemplate": "%{customdata}", **each,
        }
        for activity in _ordered(bars)
        if (each := bars[activity])
    ]  # fmt: skip
    ticks = [-row + 0.4 for row in range(len(found))]
    layout = {
        "barmode": "overlay", "bargap": 0, "xaxis": {"title": {"text": "seconds since start"}, "range": [0, end]}, "shapes": _windows(run),
        "yaxis": {
            "tickvals": ticks, "ticktext": [plotly_text(lane.name) for lane in found], "range": [-len(found) + 0.9, 0.95], "showgrid": False,
            "fixedrange": True, "zeroline": False,
        },
        "showlegend": True,
    }  # fmt: skip
    caption = (
        "A learner's row shows each wait and each update; a sampler's row shows, second by second, which share of it went where "
        "(from below: work, then waits). Drag to zoom, double-click to go back. Dotted: begin and end of training."
    )
    return Chart(title="Timeline", caption=caption, data=data, layout=layout, height=70 + _LANE_PIXELS * len(found))


def _add_exact(bars: dict[str, dict[str, list[Any]]], lane: Lane, row: int) -> None:
    for each in lane.learning:
        (activity,) = each.seconds
        length = each.end - each.start
        facts = "".join(f"<br>{plotly_text(key.replace('_', ' '))}: {_shown(value)}" for key, value in each.facts.items())
        _add_bar(
            bars, activity, each.start, each.end, -row, 0.8, f"{plotly_text(lane.name)} {words(activity)}<br>{_seconds(length)} from {each.start:.2f} s{facts}"
        )


def _add_bins(bars: dict[str, dict[str, list[Any]]], lane: Lane, row: int, end: float) -> None:
    count = max(1, min(_MAX_BINS, int(end / _MIN_BIN_SECONDS)))
    width = end / count
    for index, shares in enumerate(binned(lane, 0.0, end, count)):
        base = 0.0
        for activity in _ordered(shares):
            hover = f"{plotly_text(lane.name)} {words(activity)}<br>{shares[activity]:.0%} of {index * width:.1f} to {(index + 1) * width:.1f} s"
            _add_bar(bars, activity, index * width, (index + 1) * width, -row + 0.8 * base, 0.8 * shares[activity], hover)
            base += shares[activity]


def _add_bar(bars: dict[str, dict[str, list[Any]]], activity: str, start: float, end: float, base: float, height: float, hover: str) -> None:
    each = bars.setdefault(activity, {"x": [], "width": [], "base": [], "y": [], "custom": []})
    each["x"].append((start + end) / 2)
    each["width"].append(end - start)
    each["base"].append(base)
    each["y"].append(height)
    each["custom"].append(hover)


def _windows(run: RunRecord) -> list[dict[str, Any]]:
    edges = [edge for span in run.windows.spans for edge in span]
    style = {"color": "$muted", "width": 1, "dash": "dot"}
    return [{"type": "line", "x0": edge, "x1": edge, "y0": 0, "y1": 1, "yref": "paper", "line": style} for edge in edges]


def _ordered(activities: Iterable[str]) -> list[str]:
    """Known ones first, in the order of ACTIVITIES."""
    present = set(activities)
    return [*(each for each in ACTIVITIES if each in present), *sorted(present - set(ACTIVITIES))]


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else plotly_text(value)


def _seconds(length: float) -> str:
    return f"{length * 1000:.1f} ms" if length < 1 else f"{length:.2f} s"
