"""What a run was, in one screen of text: the curve, who was busy, where everything lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.report.progress import duration
from headrace.report.summary import summarize

Line = Mapping[str, Any]

_CHART_ROWS = 11  # odd: the middle label is the middle
_BAR_COLUMNS = 24
_FAILURES = 5


def end_picture(events: Sequence[Line], run_directory: Path, *, width: int = 100) -> str:
    """Made of the run's events; parts that have no data are left out."""
    summary = summarize(events, run_directory)
    parts = [_chart(events, min(width, 110)), _headline(summary), _bars(summary), _places(summary, run_directory)]
    return "\n" + "\n\n".join(part for part in parts if part)


def _chart(events: Sequence[Line], width: int) -> str:
    rewards = [(line["version"], line["reward_mean"]) for line in events if line["event"] == "updated" and line["reward_mean"] is not None]
    evaluations = [(line["version"], line["mean"]) for line in events if line["event"] == "evaluated" and line["mean"] is not None]
    return chart({"·": rewards, "●": evaluations}, columns=width - 10, legend="·  mean reward of a batch    ●  evaluation") if rewards else ""


def chart(series: Mapping[str, Sequence[tuple[float, float]]], *, columns: int, legend: str, rows: int = _CHART_ROWS, unit: str = "updates") -> str:
    """Points (x, y) of each mark on one grid, later marks on top; a column that holds several points of a mark shows their mean."""
    points = [point for each in series.values() for point in each]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    if high_y - low_y < 1e-9:
        low_y, high_y = low_y - 0.5, high_y + 0.5
    grid = [[" "] * columns for _ in range(rows)]
    for mark, each in series.items():
        by_column: dict[int, list[float]] = {}
        for x, y in each:
            column = round((x - low_x) / ((high_x - low_x) or 1) * (columns - 1))
            by_column.setdefault(column, []).append(y)
        for column, values in by_column.items():
            y = sum(values) / len(values)
            grid[rows - 1 - round((y - low_y) / (high_y - low_y) * (rows - 1))][column] = mark
    lines = []
    for index, row in enumerate(grid):
        label = f"{high_y - (high_y - low_y) * index / (rows - 1):7.3f}" if index in (0, rows // 2, rows - 1) else ""
        lines.append(f"{label:>7} ┤{''.join(row).rstrip()}")
    left, right = f"{low_x:g}", f"{high_x:g} {unit}"
    lines.append(" " * 8 + "└" + "─" * columns)
    lines.append(" " * 9 + left + right.rjust(columns - len(left)))
    lines.append(" " * 9 + legend)
    return "\n".join(lines)


def _headline(summary: Mapping[str, Any]) -> str:
    before, after = summary["evaluation"]["before"], summary["evaluation"]["after"]
    lines = []
    if before and after:
        lines.append(f"evaluation   {_with_interval(before)}  ->  {_with_interval(after)}")
    elif before:
        lines.append(f"evaluation   {_with_interval(before)} before training")
    if summary["num_updates"]:
        rate = f", {summary['tokens_per_second']:,.0f} tokens/s" if summary["tokens_per_second"] else ""
        lines.append(f"training     {summary['num_updates']} updates in {duration(summary['wall_seconds'])}{rate}; start-up {summary['startup_seconds']:.1f} s")
    staleness = summary["staleness"]
    if staleness["mean"] is not None:
        key = f"; key steps mean {staleness['key_mean']:.2f}, max {staleness['key_max']}" if staleness["key_mean"] is not None else ""
        lines.append(f"staleness    mean {staleness['mean']:.2f}, max {staleness['max']} updates{key}")
    trajectories = (summary["ledger"] or {}).get("trajectories")
    if trajectories:
        lines.append(f"trajectories {_counts(trajectories)}")
    for one in summary["failures"][:_FAILURES]:
        lines.append(f"failed       task {one['task']}, {one['rollouts']} rollouts: {one['reason']}: {one['error']}"[:240])
    if len(summary["failures"]) > _FAILURES:
        lines.append(f"             and {len(summary['failures']) - _FAILURES} more tasks: rollout_failed in events.jsonl")
    return "\n".join(lines)


def _with_interval(numbers: Mapping[str, Any]) -> str:
    low, high = numbers["interval95"]
    if high - low < 5e-4:  # an exact metric
        return f"{numbers['mean']:.3f}"
    return f"{numbers['mean']:.3f} ({low:.3f} to {high:.3f})"


def _counts(counts: Mapping[str, Any]) -> str:
    texts = []
    for name, value in counts.items():
        number = sum(value.values()) if isinstance(value, Mapping) else value
        if number:
            texts.append(f"{number:,} {name.replace('_', ' ')}")
    return ", ".join(texts)


def _bars(summary: Mapping[str, Any]) -> str:
    utilization = summary["utilization"]
    if not utilization["devices"]:
        return ""
    if not any(map(_is_measured, utilization["devices"])):
        return "devices      not measured: the run ended before their first report, about a second after its start"
    lines = [f"{'device':<12} {'occupancy':<{_BAR_COLUMNS + 6}} {'busy':>5}   idle"]
    for device in utilization["devices"]:
        idle = sorted(device["idle_seconds"].items(), key=lambda item: -item[1])
        total = device["allocated_seconds"]
        reasons = ", ".join(f"{reason} {seconds / total:.0%}" for reason, seconds in idle[:3] if seconds / total >= 0.005)
        lines.append(f"{device['name']:<12} {_bar(device['occupancy'])} {device['occupancy']:>4.0%}  {device['busy_fraction']:>5.0%}   {reasons}")
    run = f"{'run':<12} {_bar(utilization['occupancy'])} {utilization['occupancy']:>4.0%}  {utilization['busy_fraction']:>5.0%}"
    if utilization["attainable_occupancy"] is not None:
        run += f"   attainable occupancy with this split {utilization['attainable_occupancy']:.0%}"
    return "\n".join([*lines, run])


def _is_measured(device: Mapping[str, Any]) -> bool:
    """Whether anything is known of its time."""
    return bool(device["busy_fraction"] or device["occupancy"] or set(device["idle_seconds"]) - {"other", "unreported"})


def _bar(fraction: float) -> str:
    full = round(fraction * _BAR_COLUMNS)
    return "█" * full + "░" * (_BAR_COLUMNS - full)


def _places(summary: Mapping[str, Any], run_directory: Path) -> str:
    lines = [f"run          {run_directory}"]
    places = (("config.toml", "every setting"), ("events.jsonl", "everything that happened"), ("trajectories", "what was trained: headrace trajectories RUN"))
    for name, what in places:
        if (run_directory / name).exists():
            lines.append(f"  {name:<12} {what}")
    if summary["checkpoint"]:
        lines.append(f"checkpoint   {summary['checkpoint']}  (a Hugging Face directory)")
    if summary["num_updates"]:
        lines.append(f"see it       headrace report {run_directory}")
    return "\n".join(lines)
