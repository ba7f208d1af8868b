"""How long decode steps took, by running batch and context: the latency curve that a profile is fitted through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.report.markup import Chart
from headrace.report.record import RunRecord

_COLORS = ("$work", "$learn", "$wait-environment", "$wait-batch", "$wait-admission")
_MIN_STEPS = 3
"""Fewer of a kind are left out: one interrupted step would stand for all."""


def decode_latency(run: RunRecord) -> Chart | None:
    """None for runs whose events do not tell steps apart."""
    curves = latency_curves(line["activity"] for line in run.events("worker_active"))
    largest = sorted(curves, key=lambda octave: -sum(point["steps"] for point in curves[octave]))[: len(_COLORS)]
    data = []
    for color, octave in zip(_COLORS, sorted(largest), strict=False):
        points = curves[octave]
        name = f"contexts of {2 ** (octave - 1):,} to {2**octave - 1:,} tokens" if octave > 1 else ("contexts under 1 token", "contexts of 1 token")[octave]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": name, "x": [point["running"] for point in points],
                "y": [1e3 * point["seconds"] for point in points], "line": {"color": color}, "marker": {"color": color, "size": 5},
                "customdata": [[int(point["steps"]), point["running"] / point["seconds"]] for point in points],
                "hovertemplate": "%{x:.1f} running: %{y:.3g} ms<br>%{customdata[0]:,} steps, %{customdata[1]:,.0f} tokens/s",
            }
        )  # fmt: skip
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "sequences in the step"}, "type": "log"}, "yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"},
        "showlegend": len(data) > 1,
    }  # fmt: skip
    caption = "Means over all samplers, observations and prompts that were computed in the same step included. A profile is fitted through these points."
    return Chart(title="How long a decode step took", caption=caption, data=data, layout=layout, height=320)


def latency_curves(activities: Iterable[Mapping[str, Any]]) -> dict[int, list[dict[str, float]]]:
    """Octave of the mean context -> points {running, seconds, steps}, means, by rising batch; half octaves of the batch are one point."""
    sums: dict[tuple[int, int], list[float]] = {}
    for activity in activities:
        for steps, sequences, _, context, seconds in activity.get("decode_work") or ():
            running = sequences / steps
            octave = int(running).bit_length()
            half = 2 * octave + (running >= 1.5 * 2 ** (octave - 1))
            entry = sums.setdefault((int(context / sequences).bit_length(), half), [0.0, 0.0, 0.0])
            for index, value in enumerate((steps, sequences, seconds)):
                entry[index] += value
    curves: dict[int, list[dict[str, float]]] = {}
    for (octave, _), (steps, sequences, seconds) in sorted(sums.items()):
        if steps >= _MIN_STEPS:
            curves.setdefault(octave, []).append({"running": sequences / steps, "seconds": seconds / steps, "steps": steps})
    return curves
