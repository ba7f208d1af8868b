"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: one track a device with its slices (two where it also learns), and counters.

The format is Chrome's Trace Event Format: `X` complete slices, `C` counters, `i` instants, `M` names; times in whole microseconds.
Perfetto drops a slice that begins within another of its track and ends after it, be it by a nanosecond, and what is before zero. A report
reaches the log a little early or late, so that the next one seems to begin before its end: slices are cut to follow each other.
A sampler's slice is one report of its worker, named by what took most of it; the exact shares are in its counter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.report.markup import printable
from headrace.report.record import RunRecord
from headrace.report.timeline import Lane, Slice, lanes

_CONDUCTOR_TRACK = 1  # not 0: readers take thread 0 for the idle one of the machine; devices follow from 2 on


def write_trace(runs: Sequence[RunRecord], path: Path) -> None:
    """One process a run, one thread a device. Raises OSError."""
    events = [event for process, run in enumerate(runs, start=1) for event in trace_events(run, process)]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def trace_events(run: RunRecord, process: int = 1) -> Iterator[dict[str, Any]]:
    yield _named(process, None, "process_name", printable(f"{run.started.get('recipe') or 'run'} {run.name}"))
    yield _named(process, _CONDUCTOR_TRACK, "thread_name", "conductor")
    found = lanes(run.lines)
    tracks = {lane.name: 2 * number for number, lane in enumerate(found, start=1)}
    for lane in found:
        yield from _lane_events(lane, process, tracks[lane.name])
    yield from _marks(run, process, tracks)


def _lane_events(lane: Lane, process: int, track: int) -> Iterator[dict[str, Any]]:
    # slices of one track must not cut each other: a colocated device has a second one for its learner
    learning = track + 1 if lane.sampling and lane.learning else track
    for number, kind in {track: lane.role, learning: "learning" if learning != track else lane.role}.items():
        yield _named(process, number, "thread_name", printable(f"{lane.name} ({kind})"))
        yield {"ph": "M", "name": "thread_sort_index", "cat": "__metadata", "pid": process, "tid": number, "args": {"sort_index": number}}
    yield from _slices(lane.sampling, process, track)
    yield from _slices(lane.learning, process, learning)
    for each in lane.sampling:
        length = each.end - each.start
        shares = {activity: round(seconds / length, 4) for activity, seconds in each.seconds.items()}
        yield _counter(process, f"{lane.name} shares of time", each.start, shares)
        yield _counter(process, f"{lane.name} running sequences", each.start, {"mean": _number(each.facts["mean running sequences"])})
        yield _counter(process, f"{lane.name} rollouts in flight", each.end, {"in flight": each.facts["rollouts in flight"]})


def _marks(run: RunRecord, process: int, tracks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for line in run.lines:
        time = line["time"]
        match line["event"]:
            case "updated":
                yield _counter(process, "reward of a batch", time, {"mean": _number(line["reward_mean"])})
                if line["statistics"] is not None:
                    numbers = line["statistics"]
                    yield _counter(process, "staleness", time, {"mean": _number(numbers["staleness_mean"])})
                    yield _counter(process, "effective sample size", time, {"fraction": _number(numbers["effective_sample_size"])})
            case "pool":
                yield _counter(process, "pool", time, {"rollouts in flight": line["rollouts_in_flight"], "pooled trajectories": line["pooled_trajectories"]})
            case "evaluated":
                yield _counter(process, "evaluation", time, {"mean": _number(line["mean"])})
            case "weights_applied":
                yield _instant(process, tracks.get(line["role"], _CONDUCTOR_TRACK), time, f"weights {line['version']} in use")
            case "timed_window":
                yield _instant(process, _CONDUCTOR_TRACK, time, f"training: {line['phase']}")
            case "role_lost" | "role_restarted":
                yield _instant(process, tracks.get(line["role"], _CONDUCTOR_TRACK), time, line["event"].replace("_", " "))
            case "run_resumed" | "run_finished":
                yield _instant(process, _CONDUCTOR_TRACK, time, line["event"].replace("_", " "))


def _slices(slices: Sequence[Slice], process: int, track: int) -> Iterator[dict[str, Any]]:
    """Of one track, in order of their ends as in the log; each begins where the one before it ended, or later."""
    ended = 0
    for each in slices:
        start, end = max(ended, _microseconds(each.start)), _microseconds(each.end)
        if end > start:
            yield _slice(each, process, track, start, end)
            ended = end


def _slice(each: Slice, process: int, track: int, start: int, end: int) -> dict[str, Any]:
    name = max(each.seconds, key=lambda activity: each.seconds[activity], default="other")
    arguments = (
        {**{f"{activity} seconds": _number(seconds) for activity, seconds in each.seconds.items()}, **each.facts} if len(each.seconds) > 1 else each.facts
    )
    return {
        "ph": "X", "name": name, "cat": "device", "pid": process, "tid": track, "ts": start, "dur": end - start,
        "args": {key: _number(value) for key, value in arguments.items()},
    }  # fmt: skip


def _counter(process: int, name: str, time: float, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "cat": "run", "pid": process, "tid": _CONDUCTOR_TRACK, "ts": _microseconds(time), "args": dict(values)}


def _instant(process: int, track: int, time: float, name: str) -> dict[str, Any]:
    return {"ph": "i", "name": name, "cat": "run", "s": "t", "pid": process, "tid": track, "ts": _microseconds(time)}


def _named(process: int, track: int | None, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "cat": "__metadata", "pid": process, "tid": _CONDUCTOR_TRACK if track is None else track, "args": {"name": name}}


def _number(value: Any) -> Any:
    """Counters take numbers only; a value that was not finite is 0."""
    if isinstance(value, float):
        return round(value, 6)
    return 0 if value is None else value


def _microseconds(seconds: float) -> int:
    """Since line 1; what began before it begins with it."""
    return max(0, round(seconds * 1e6))
