"""A run against what it was promised (`promised` of its first event): for watch, for the report, and as advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.report.finish import Finish
from headrace.report.progress import duration

_PLAINLY_LATE = 1.1
"""Times the latest promised end."""
_FAR = 0.15
"""Points of occupancy, or share of the staleness."""


def expected_seconds(summary: Mapping[str, Any], left: Finish | None) -> float | None:
    """Of the whole timed window: of a run that has made all its updates as long as it was, else with what is left."""
    if left is not None:
        return float(summary["wall_seconds"]) + left.seconds
    is_whole = summary["planned_updates"] and summary["num_updates"] >= summary["planned_updates"]
    return float(summary["wall_seconds"]) if is_whole else None


def promise_text(promised: Mapping[str, Any] | None, summary: Mapping[str, Any], left: Finish | None) -> str | None:
    """`by plan.json, rank 1: 5 min 10 s (4 min 50 s to 5 min 40 s), now 5 min 32 s (+7%); staleness 1.90, is 2.10; occupancy 65%, is 60%`.

    None where nothing was promised.
    """
    if not promised:
        return None
    finish, seconds = promised["finish_seconds"], expected_seconds(summary, left)
    text = f"by {promised['by']}: {duration(finish['p50'])} ({duration(finish['p10'])} to {duration(finish['p90'])})"
    if seconds is not None:
        text += f", {'now' if left is not None else 'was'} {duration(seconds)} ({seconds / finish['p50'] - 1:+.0%})"
    stale, occupancy = summary["staleness"]["mean"], summary["utilization"]["occupancy"]
    if stale is not None and promised["staleness_mean"] is not None:
        text += f"; staleness {promised['staleness_mean']:.2f}, is {stale:.2f}"
    if occupancy is not None:
        text += f"; occupancy {promised['occupancy']:.0%}, is {occupancy:.0%}"
    return text


def promise_advice(promised: Mapping[str, Any] | None, summary: Mapping[str, Any], left: Finish | None) -> str | None:
    """Where a run is plainly later than it was promised: what differs, and what to do."""
    seconds = expected_seconds(summary, left)
    if not promised or seconds is None or seconds <= _PLAINLY_LATE * promised["finish_seconds"]["p90"]:
        return None
    occupancy, busy = summary["utilization"]["occupancy"], summary["utilization"]["busy_fraction"]
    if busy is not None and abs(busy - promised["busy_fraction"]) > _FAR:
        differs = f"devices are busy {busy:.0%} instead of {promised['busy_fraction']:.0%}"
    elif occupancy is not None and abs(occupancy - promised["occupancy"]) > _FAR:
        differs = f"devices are filled {occupancy:.0%} instead of {promised['occupancy']:.0%}"
    else:
        differs = "devices are as busy as they should be, so steps or updates take longer than the profile says"
    late = f"{seconds / promised['finish_seconds']['p50'] - 1:.0%} later than {promised['by']} promised"
    return f"{late}: {differs}; 'headrace profile RUN' measures this run, 'headrace plan' shares out the devices anew"
