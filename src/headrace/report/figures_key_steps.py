"""Figures of key steps, as plotly values: their age and that of other tokens, verification, pace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.report.figures_learning import Points, rolling_mean, thinned
from headrace.report.markup import Chart
from headrace.report.record import Line, RunRecord
from headrace.report.summary import OutForVerification

_MAX_BINS = 60
_TAIL_BINS = 10
_SMOOTHED = 5


def key_step_figures(run: RunRecord) -> list[Chart]:
    """What there is to draw of key steps, verification and pace."""
    charts = (key_ages(run), over_bound(run), verified_rollouts(run), out_for_verification(run), redrawn_tails(run), pace(run))
    return [chart for chart in charts if chart is not None]


def key_ages(run: RunRecord) -> Chart | None:
    lines = [line for line in run.surviving("updated") if line["statistics"] is not None and line["statistics"]["key_staleness_mean"] is not None]
    if not lines:
        return None
    others = [(line["version"], *ages) for line in lines if (ages := other_ages(line["statistics"])) is not None]
    data = [
        _line([(line["version"], line["statistics"]["key_staleness_mean"]) for line in lines], "key steps, mean", "$orange", width=2.2),
        _line([(line["version"], line["statistics"]["key_staleness_max"]) for line in lines], "key steps, oldest (dotted)", "$orange", dash="dot"),
    ]
    if others:
        data += [
            _line([(version, mean) for version, mean, _ in others], "other tokens, mean", "$blue", width=2.2),
            _line([(version, oldest) for version, _, oldest in others], "other tokens, oldest (dotted)", "$blue", dash="dot"),
        ]
    else:  # logs from before key tokens were told apart
        data.append(_line([(line["version"], line["statistics"]["staleness_mean"]) for line in lines], "all tokens, mean", "$blue", width=2.2))
    bound = key_bound(run)
    if bound is not None:
        ends = [(lines[0]["version"], bound), (lines[-1]["version"], bound)]
        data.append(_line(ends, "pool.max_key_staleness (dashed)", "$muted", dash="dash"))
    return Chart(
        title="Age of key steps and of other tokens", data=data, height=300,
        caption="How many updates old the trained tokens of each update were; a verified token counts from the version that verified it.",
        layout={"xaxis": _axis("update"), "yaxis": {**_axis("updates old"), "rangemode": "tozero"}, "showlegend": True},
    )  # fmt: skip


def other_ages(statistics: Mapping[str, Any]) -> tuple[float, int] | None:
    """(mean, largest) age of the trained tokens outside key steps; None where there is none, or the log does not tell them apart."""
    key_counts = statistics.get("key_staleness_histogram") or {}
    counts = {int(age): tokens - key_counts.get(age, 0) for age, tokens in statistics["staleness_histogram"].items()}
    counts = {age: tokens for age, tokens in counts.items() if tokens > 0}
    if not key_counts or not counts:
        return None
    return sum(age * tokens for age, tokens in counts.items()) / sum(counts.values()), max(counts)


def over_bound(run: RunRecord) -> Chart | None:
    """From one ledger to the next: counts of the batch between them."""
    points: list[tuple[float, float]] = []
    trained = over = 0
    for line in run.events("ledger"):
        steps = line["ledger"].get("key_steps") or {}
        new, new_over = steps.get("trained", 0) - trained, steps.get("over_bound", 0) - over
        trained, over = trained + new, over + new_over
        if new > 0:
            points.append((line["ledger"]["at_update"], new_over / new))
    if not points:
        return None
    caption = f"Share of the key steps of each batch that were older than their bound when they were trained (through PPO-clip), over {_SMOOTHED} batches."
    return Chart(
        title="Key steps over their bound", caption=caption, data=[_line(rolling_mean(points, _SMOOTHED), "share", "$orange", width=2.0)], height=240,
        layout={"xaxis": _axis("update"), "yaxis": {"tickformat": ".0%", "range": [0, max(0.1, 1.05 * max(y for _, y in points))]}, "showlegend": False},
    )  # fmt: skip


def verified_rollouts(run: RunRecord) -> Chart | None:
    """Bars over time."""
    lines = run.events("rollout_verified")
    if not lines:
        return None
    times = [run.training_seconds(line["time"]) for line in lines]
    width = _bin_width(max(run.windows.seconds, max(times)))
    num_bins = int(max(times) / width) + 1
    counts = {"whole": [0] * num_bins, "cut": [0] * num_bins}
    for line, time in zip(lines, times, strict=True):
        counts["cut" if line["refreshed"] else "whole"][int(time / width)] += 1
    data = [
        {
            "type": "bar", "x": [(index + 0.5) * width for index in range(num_bins)], "y": counts[key], "width": [width * 0.92] * num_bins, "name": name,
            "marker": {"color": color}, "hovertemplate": f"%{{x:.3g}} s: %{{y:,}} {name}",
        }
        for key, name, color in (("whole", "every checked token accepted", "$teal"), ("cut", "cut and gone on with", "$orange"))
    ]  # fmt: skip
    return Chart(
        title="Verified rollouts", data=data, height=240,
        caption=f"Finished rollouts that came back from a verification, by {width:g} s; one that is checked again counts again.",
        layout={"barmode": "stack", "xaxis": _axis("seconds of training"), "yaxis": _axis("rollouts"), "showlegend": True},
    )  # fmt: skip


def out_for_verification(run: RunRecord) -> Chart | None:
    points = thinned([(run.training_seconds(time), float(number)) for time, number in rollouts_out(run.lines)])
    if not points:
        return None
    return Chart(
        title="Out for verification", data=[_line(points, "rollouts", "$blue")], height=240,
        caption="Finished rollouts that are with a worker to be checked, or gone on with after a cut: a group is not trained meanwhile.",
        layout={"xaxis": _axis("seconds of training"), "yaxis": {**_axis("rollouts"), "rangemode": "tozero"}, "showlegend": False},
    )  # fmt: skip


def rollouts_out(lines: Iterable[Line]) -> list[tuple[float, int]]:
    """(time, rollouts out for verification from then on), one entry for each change."""
    found: list[tuple[float, int]] = []
    out = OutForVerification()
    for line in lines:
        match line["event"]:
            case "verification_asked":
                out.asked(line["role"], line["rollouts"])
            case "rollout_verified":
                out.returned(line["role"])
            case "role_lost" if found:
                out.lost(line["role"])
            case "run_resumed" if found:
                out.all_lost()
            case _:
                continue
        found.append((line["time"], out.number))
    return found


def redrawn_tails(run: RunRecord) -> Chart | None:
    """Histogram over the rollouts that were cut."""
    shares = redrawn_shares(run.events("rollout_verified"))
    if not shares:
        return None
    counts = [0] * _TAIL_BINS
    for share in shares:
        counts[min(_TAIL_BINS - 1, int(share * _TAIL_BINS))] += 1
    size = 1 / _TAIL_BINS
    data = [
        {
            "type": "bar", "x": [(index + 0.5) * size for index in range(_TAIL_BINS)], "y": counts, "width": [size * 0.94] * _TAIL_BINS, "name": "rollouts",
            "marker": {"color": "$orange"}, "hovertemplate": "about %{x:.0%} redrawn: %{y:,} rollouts",
        }
    ]  # fmt: skip
    return Chart(
        title="Redrawn tails", data=data, height=240,
        caption="Rollouts that were cut, by the share of their tokens that had to be drawn again: what a group waits for.",
        layout={"xaxis": {**_axis("share redrawn"), "tickformat": ".0%", "range": [0, 1]}, "yaxis": _axis("rollouts"), "showlegend": False},
    )  # fmt: skip


def redrawn_shares(verified: Iterable[Line]) -> list[float]:
    """Of each rollout that was cut: redrawn tokens / tokens."""
    return [line["redrawn"] / line["tokens"] for line in verified if line["refreshed"] and line["tokens"]]


def pace(run: RunRecord) -> Chart | None:
    judged = run.events("paced")
    if not judged:
        return None
    begin = (0.0, float(judged[0]["max_groups"]))
    limits = [begin, *((run.training_seconds(line["time"]), float(line["limit_groups"])) for line in judged)]
    limits.append((max(run.windows.seconds, limits[-1][0]), limits[-1][1]))
    shares = [(run.training_seconds(line["time"]), line["over_share"]) for line in judged]
    data = [
        {**_line(limits, "groups that may be out", "$blue", width=2.0), "line": {"color": "$blue", "width": 2.0, "shape": "hv"}},
        _line([(0.0, begin[1]), (limits[-1][0], begin[1])], "without pace", "$muted", dash="dash"),
        {
            **_line(shares, "key steps over their bound (right axis)", "$orange"),
            "yaxis": "y2",
            "mode": "lines+markers",
            "marker": {"size": 5, "color": "$orange"},
        },
    ]
    caption = f"Limit of the groups that may be outstanding. It has cost {judged[-1]['wait_seconds']:.1f} s in which workers had room and admission too."
    return Chart(
        title="Pace", data=data, height=260, caption=caption,
        layout={
            "xaxis": _axis("seconds of training"), "yaxis": {**_axis("groups"), "rangemode": "tozero"}, "showlegend": True,
            "yaxis2": {"overlaying": "y", "side": "right", "tickformat": ".0%", "range": [0, max(0.1, 1.05 * max(y for _, y in shares))], "showgrid": False},
        },
    )  # fmt: skip


def key_bound(run: RunRecord) -> int | None:
    bound = run.settings.get("pool", {}).get("max_key_staleness")
    return bound if isinstance(bound, int) else None


def _bin_width(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, for at most 60 bins."""
    least = max(seconds, 1e-6) / _MAX_BINS
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _line(points: Points | Sequence[tuple[float, Any]], name: str, color: str, *, width: float = 1.4, dash: str | None = None) -> dict[str, Any]:
    thin = thinned(points)
    style: dict[str, Any] = {"color": color, "width": width, **({"dash": dash} if dash else {})}
    return {"type": "scatter", "mode": "lines", "x": [x for x, _ in thin], "y": [y for _, y in thin], "name": name, "line": style}


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}}
