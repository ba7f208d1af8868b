"""Figures of what was learned and from which data, as plotly values: curves, staleness, off-policy statistics, lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headrace.report.markup import Chart, plotly_text
from headrace.report.record import Line, RunRecord

_MAX_POINTS = 1500
_MAX_MARKERS = 100
_MAX_HEAT_COLUMNS = 240
_MAX_HEAT_ROWS = 40
_HEAT = [[0.0, "$heat-0"], [0.001, "$heat-1"], [0.25, "$heat-2"], [0.5, "$heat-3"], [0.75, "$heat-4"], [1.0, "$heat-5"]]
ARM_COLORS = ("blue", "orange", "teal", "purple", "pink", "green")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs of one recipe with the same settings but for the seed."""

    name: str
    runs: Sequence[RunRecord]
    color: str

    @property
    def label(self) -> str:
        return self.name if len(self.runs) == 1 else f"{self.name}, {len(self.runs)} seeds"


def reward_curve(arms: Sequence[Arm]) -> Chart | None:
    data: list[dict[str, Any]] = []
    window = 1
    for arm in arms:
        series = [[(line["version"], line["reward_mean"]) for line in run.surviving("updated") if line["reward_mean"] is not None] for run in arm.runs]
        series = [each for each in series if each]
        if not series:
            continue
        window = max(window, min(25, 1 + 2 * (max(map(len, series)) // 30)))
        if len(series) == 1:
            points = thinned(series[0])
            data.append(
                _trace(points, mode="markers", name="a batch", marker={"size": 4, "color": f"${arm.color}", "opacity": 0.35}, showlegend=len(arms) == 1)
            )
        data += _mean_and_band(arm, [thinned(rolling_mean(each, window)) for each in series])
    if not data:
        return None
    caption = (
        f"Mean reward of the batch of each update; the line is smoothed over {window} updates." if window > 1 else "Mean reward of the batch of each update."
    )
    return Chart(
        title="Reward", caption=caption + _band_words(arms), data=data,
        layout={"xaxis": _axis("update"), "yaxis": _axis("reward"), "showlegend": len(arms) > 1},
    )  # fmt: skip


def evaluation_curve(arms: Sequence[Arm], *, by_seconds: bool, metric: str) -> Chart | None:
    """Over updates, or over seconds of training. A run alone has its 95 % interval, several have the band of their seeds."""
    data: list[dict[str, Any]] = []
    exact = True
    for arm in arms:
        series = [_evaluations(run, by_seconds=by_seconds) for run in arm.runs]
        series = [each for each in series if each]
        if len(series) == 1:
            points = [(x, line["mean"]) for x, line in series[0]]
            low = [line["interval95"][0] for _, line in series[0]]
            high = [line["interval95"][1] for _, line in series[0]]
            if any(b - a > 1e-9 for a, b in zip(low, high, strict=True)):
                exact = False
                data += _band([x for x, _ in points], low, high, arm.color, plotly_text(arm.label))
            data.append(_line(points, arm, markers=True))
        elif series:
            data += _mean_and_band(arm, [[(x, line["mean"]) for x, line in each] for each in series], markers=True)
    if not data:
        return None
    words = _band_words(arms) + ("" if exact else f" Band{' of a single seed' if len(arms) > 1 else ''}: 95 % interval of the evaluation.")
    over = "seconds of training" if by_seconds else "update"
    return Chart(
        title=f"Evaluation by {'time' if by_seconds else 'update'}", caption=f"{metric} on the evaluation tasks.{words}", data=data,
        layout={"xaxis": _axis(over), "yaxis": _axis(plotly_text(metric)), "showlegend": len(arms) > 1},
    )  # fmt: skip


def staleness_map(run: RunRecord) -> Chart | None:
    """Column: update. Row: staleness. Colour: share of the update's trained tokens."""
    lines = [line for line in run.surviving("updated") if line["statistics"] is not None and line["statistics"]["staleness_histogram"]]
    if not lines:
        return None
    chunk = math.ceil(len(lines) / _MAX_HEAT_COLUMNS)
    largest = max(int(age) for line in lines for age in line["statistics"]["staleness_histogram"])
    step = math.ceil((largest + 1) / _MAX_HEAT_ROWS)
    rows = largest // step + 1
    columns, shares = [], []
    for start in range(0, len(lines), chunk):
        part = lines[start : start + chunk]
        counts = [0] * rows
        for line in part:
            for age, tokens in line["statistics"]["staleness_histogram"].items():
                counts[int(age) // step] += tokens
        columns.append(part[0]["version"])
        shares.append([count / (sum(counts) or 1) for count in counts])
    heat = {
        "type": "heatmap", "x": columns, "y": [row * step for row in range(rows)], "z": [list(row) for row in zip(*shares, strict=True)], "zmin": 0, "zmax": 1,
        "colorscale": _HEAT, "colorbar": {"title": {"text": "share"}, "tickformat": ".0%", "thickness": 10, "len": 0.95, "outlinewidth": 0},
        "hovertemplate": "update %{x}<br>%{y} updates old: %{z:.1%} of the trained tokens<extra></extra>",
    }  # fmt: skip
    data = [heat]
    keys = [(line["version"], line["statistics"]["key_staleness_mean"]) for line in lines if line["statistics"]["key_staleness_mean"] is not None]
    if keys:
        data.append(_trace(thinned(keys), mode="lines", name="key steps, mean", line={"color": "$orange", "width": 2}))
    key_words = " Line: mean over the tokens of key steps." if keys else ""
    return Chart(
        title="Staleness of the trained tokens", data=data, caption=f"How many updates old the tokens of each update were when they were trained.{key_words}",
        layout={
            "xaxis": {**_axis("update"), "showgrid": False}, "yaxis": {**_axis("updates old"), "showgrid": False, "dtick": max(1, rows * step // 8)},
            "showlegend": False,
        },
    )  # fmt: skip


def arrival_delays(run: RunRecord) -> Chart | None:
    """How long published weights took until a sampler said that it draws with them."""
    published = {(line["lineage"], line["version"]): line["time"] for line in run.events("weights_published")}
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for line in run.events("weights_applied"):
        start = published.get((line["lineage"], line["version"]))
        if start is not None:
            by_worker.setdefault(line["role"], []).append((line["version"], max(0.0, line["time"] - start)))
    if not by_worker:
        return None
    data = [
        _trace(thinned(points), mode="lines+markers", name=plotly_text(worker), line={"width": 1, "color": f"${ARM_COLORS[index % 6]}"},
               marker={"size": 4, "color": f"${ARM_COLORS[index % 6]}"})
        for index, (worker, points) in enumerate(sorted(by_worker.items()))
    ]  # fmt: skip
    return Chart(
        title="Arrival of new weights", data=data, height=220,
        caption="Seconds from the publication of a version until a sampler said that it draws with it. Versions that were overtaken on the way do not appear.",
        layout={"xaxis": _axis("version"), "yaxis": {**_axis("seconds"), "rangemode": "tozero"}, "showlegend": len(by_worker) > 1},
    )  # fmt: skip


def pool_levels(run: RunRecord) -> Chart | None:
    """What is out and what waits to be trained, about once a second."""
    levels = [line for line in run.events("pool") if run.windows.share(line["time"], 0.0)]
    if not levels:
        return None
    data = []
    for key, name, color in (("rollouts_in_flight", "rollouts in flight", "blue"), ("pooled_trajectories", "trajectories in the pool", "teal")):
        points = thinned([(run.training_seconds(line["time"]), line[key]) for line in levels])
        data.append(_trace(points, mode="lines", name=name, line={"color": f"${color}", "width": 1.8}))
    return Chart(
        title="In flight and in the pool", data=data, height=220,
        caption="Rollouts that have begun and not ended, and finished trajectories that wait to be trained.",
        layout={"xaxis": _axis("seconds of training"), "yaxis": {"rangemode": "tozero"}, "showlegend": True},
    )  # fmt: skip


_STATISTICS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("effective_sample_size", "Effective sample size", "1: the data is on-policy; it falls as ratios spread.", {"rangemode": "tozero"}),
    ("kl_sampler_learner", "KL(sampler || learner)", "Mean of sampler minus learner log-probability, nats.", {}),
    ("clipped_fraction", "Clipped fraction", "Trained tokens whose ratio was clipped or capped.", {"tickformat": ".0%", "rangemode": "tozero"}),
    ("entropy", "Entropy", "Of the policy, nats a token.", {"rangemode": "tozero"}),
    ("gradient_norm", "Gradient norm", "Before it is scaled down.", {"rangemode": "tozero"}),
    ("trained_tokens", "Trained tokens", "Tokens with weight in the update.", {"rangemode": "tozero"}),
)


def ratio_figures(run: RunRecord) -> list[Chart]:
    """Small ones, side by side: importance ratio, its maximum, and the other statistics of every update."""
    lines = [line for line in run.surviving("updated") if line["statistics"] is not None]
    if not lines:
        return []
    charts = [_ratio_chart(lines), _small(_series(lines, "ratio_max"), "Largest ratio", "Learner over sampler, of one token of the update.", {}, max)]
    charts += [_small(_series(lines, key), title, caption, axis) for key, title, caption, axis in _STATISTICS]
    if any(line["statistics"].get("masked_fraction") for line in lines):
        charts.append(_small(_series(lines, "masked_fraction"), "Masked fraction", "Tokens that the correction took out.", {"tickformat": ".0%"}))
    if any(line["statistics"].get("reference_kl") is not None for line in lines):
        charts.append(_small(_series(lines, "reference_kl"), "KL to the reference model", "Nats a token.", {}))
    return [chart for chart in charts if chart is not None]


def _ratio_chart(lines: Sequence[Line]) -> Chart | None:
    points = [
        (line["version"], numbers["ratio_mean"], math.sqrt(max(0.0, numbers["ratio_variance"])))
        for line in lines
        if (numbers := line["statistics"])["ratio_mean"] is not None and numbers["ratio_variance"] is not None
    ]
    if not points:
        return None
    means = thinned([(x, mean) for x, mean, _ in points])
    deviations = [y for _, y in thinned([(x, deviation) for x, _, deviation in points])]
    low = [mean - deviation for (_, mean), deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for (_, mean), deviation in zip(means, deviations, strict=True)]
    data = [*_band([x for x, _ in means], low, high, "blue", "ratio"), _trace(means, mode="lines", name="mean", line={"color": "$blue", "width": 2})]
    caption = "Learner over sampler probability of the trained tokens: mean, and one standard deviation (root of the variance) as a band."
    return Chart(title="Importance ratio", caption=caption, data=data, layout={"xaxis": _axis("update"), "showlegend": False}, height=210)


def _small(points: Points, title: str, caption: str, axis: Mapping[str, Any], of: Callable[[Iterable[float]], float] = fmean) -> Chart | None:
    if not points:
        return None
    data = [_trace(thinned(points, of), mode="lines", name=title, line={"color": "$blue", "width": 1.6})]
    return Chart(title=title, caption=caption, data=data, layout={"xaxis": _axis("update"), "yaxis": dict(axis), "showlegend": False}, height=210)


def length_figures(run: RunRecord) -> list[Chart]:
    """Tokens and seconds of the finished rollouts by kind of task, and how many versions drew one trajectory."""
    finished = [each for each in run.rollouts if each.tokens > 0]
    if not finished:
        return []
    kinds = [kind for kind, _ in Counter(each.kind for each in finished).most_common()]
    shown = kinds[: len(ARM_COLORS)]
    tokens = {kind: [float(each.tokens) for each in finished if each.kind == kind] for kind in shown}
    seconds = {kind: [each.seconds for each in finished if each.kind == kind] for kind in shown}
    versions = {kind: [float(each.num_versions) for each in finished if each.kind == kind] for kind in shown}
    return [
        _histogram(tokens, "Length", "Finished rollouts by action tokens.", "action tokens", whole=True),
        _histogram(seconds, "Duration", "Finished rollouts by seconds from start to end, waits for the environment included.", "seconds", whole=False),
        _histogram(
            versions, "Versions in one trajectory", "Newest minus oldest version that drew one of its tokens: staleness in flight.", "updates", whole=True
        ),
    ]


def _histogram(by_kind: Mapping[str, Sequence[float]], title: str, caption: str, unit: str, *, whole: bool) -> Chart:
    """Counted here: the page holds bins, not rollouts."""
    largest = max(max(values) for values in by_kind.values())
    width = largest / 40 or 1.0
    if whole:
        width = float(max(1, math.ceil((largest + 1) / 40)))
    data = []
    for index, (kind, values) in enumerate(by_kind.items()):
        counts = Counter(int(value / width) for value in values)
        bins = sorted(counts)
        centres = [(each + 0.5) * width - (0.5 if whole else 0.0) for each in bins]
        label = [f"{each * width:g}" if whole and width == 1 else f"{each * width:.4g} to {(each + 1) * width - (1 if whole else 0):.4g}" for each in bins]
        data.append(
            {
                "type": "bar", "x": centres, "y": [counts[each] for each in bins], "width": [width * 0.94] * len(bins), "name": plotly_text(kind),
                "text": label,
                "textposition": "none", "marker": {"color": f"${ARM_COLORS[index]}"},
                "hovertemplate": f"%{{text}} {unit}: %{{y:,}} rollouts",
            }
        )  # fmt: skip
    layout = {"barmode": "stack", "xaxis": _axis(unit), "yaxis": _axis("rollouts"), "showlegend": len(by_kind) > 1}
    return Chart(title=title, caption=caption, data=data, layout=layout, height=240)


def rolling_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Over `window` (odd) neighbours, fewer at the ends."""
    half = window // 2
    return [(x, fmean(y for _, y in points[max(0, index - half) : index + half + 1])) for index, (x, _) in enumerate(points)]


def thinned(points: Points, of: Callable[[Iterable[float]], float] = fmean) -> list[tuple[float, float]]:
    """At most about 1,500 points: means of neighbours, or what else `of` makes of them."""
    chunk = math.ceil(len(points) / _MAX_POINTS)
    if chunk <= 1:
        return list(points)
    return [(part[len(part) // 2][0], of(y for _, y in part)) for start in range(0, len(points), chunk) if (part := points[start : start + chunk])]


def _evaluations(run: RunRecord, *, by_seconds: bool) -> list[tuple[float, Line]]:
    """(update or seconds of training at which the evaluated version was reached, line)."""
    seconds = run.seconds_of_versions()
    lines = [line for line in run.surviving("evaluated") if line["mean"] is not None]
    return [(seconds.get(line["version"], run.training_seconds(line["time"])) if by_seconds else line["version"], line) for line in lines]


def _mean_and_band(arm: Arm, series: Sequence[Points], *, markers: bool = False) -> list[dict[str, Any]]:
    """Points of the same place in each series belong together: their x too is a mean, which matters where x is seconds."""
    if len(series) == 1:
        return [_line(series[0], arm, markers=markers)]
    together = [[each[index] for each in series if index < len(each)] for index in range(max(map(len, series)))]
    together = [points for points in together if len(points) == len(series)]
    xs = [fmean(x for x, _ in points) for points in together]
    ys = [[y for _, y in points] for points in together]
    band = _band(xs, [min(each) for each in ys], [max(each) for each in ys], arm.color, plotly_text(arm.label))
    return [*band, _line(list(zip(xs, map(fmean, ys), strict=True)), arm, markers=markers)]


def _band(xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str, group: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter", "x": [*xs, *reversed(xs)], "y": [*high, *reversed(low)], "fill": "toself", "fillcolor": f"${color}-band", "line": {"width": 0},
            "mode": "lines", "hoverinfo": "skip", "showlegend": False, "legendgroup": group,
        }
    ]  # fmt: skip


def _line(points: Points, arm: Arm, *, markers: bool) -> dict[str, Any]:
    name = plotly_text(arm.label)
    style = {"line": {"color": f"${arm.color}", "width": 2.2}, "marker": {"size": 6, "color": f"${arm.color}"}}
    return _trace(points, mode="lines+markers" if markers and len(points) <= _MAX_MARKERS else "lines", name=name, legendgroup=name, **style)


def _trace(points: Points, **rest: Any) -> dict[str, Any]:
    return {"type": "scatter", "x": [x for x, _ in points], "y": [y for _, y in points], **rest}


def _series(lines: Iterable[Line], key: str) -> list[tuple[float, float]]:
    return [(line["version"], line["statistics"][key]) for line in lines if line["statistics"].get(key) is not None]


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}}


def _band_words(arms: Sequence[Arm]) -> str:
    return " Line: mean over seeds; band: lowest to highest seed." if any(len(arm.runs) > 1 for arm in arms) else ""
