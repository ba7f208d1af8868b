"""What every device did when: slices of time with seconds by activity, for the report's timeline and for trace viewers.

A learner's slices are exact (its events name begin and end). A sampler's cover one report of its worker, about a second, and say
how many of its seconds went where, not in which order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.report.utilization import COLOCATED, RESTART, went_back

Line = Mapping[str, Any]

FULL = "at capacity"
BUSY = "below capacity"
LEARN = "learn"
BATCH = "batch"
OTHER = "other"
# while a colocated device learns, its sampler reports itself idle: what overlaps is taken from these first
_HIDDEN_BY_LEARNING = ("admission", "weights", "environment", "gather", "rollouts", "bookkeeping", OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    start: float
    end: float
    """Seconds since line 1 of the events."""
    seconds: Mapping[str, float]
    """By activity: `learn`, a sampler's forward in its occupied part (`at capacity`) and the rest (`below capacity`), or a reason to be idle."""
    facts: Mapping[str, Any]
    """For people: what else the event says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One device, or the evaluator."""

    name: str
    role: str
    sampling: Sequence[Slice] = ()
    learning: Sequence[Slice] = ()
    """Exact ones, each with one activity; they may touch and do not overlap."""


def lanes(lines: Sequence[Line]) -> list[Lane]:
    """Of every device of line 1, and of the evaluator where there were evaluations."""
    learning = learner_slices(lines)
    end = end_of(lines)
    found = []
    for device in lines[0]["devices"]:
        role, name = device["role"], device["name"]
        sampling = [] if role == "learner" else _sampler_slices(lines, name, role, float(device.get("capacity") or 1))
        found.append(Lane(name=name, role=role, sampling=sampling, learning=learning if role in ("learner", COLOCATED) else ()))
    evaluations = [
        _one(line["time"], line["seconds"], "evaluate", version=line["version"], mean=line["mean"])
        for line in lines
        if line["event"] == "evaluated" and line["time"] <= end and line["seconds"] > 0
    ]
    return [*found, Lane(name="evaluator", role="evaluator", learning=evaluations)] if evaluations else found


def end_of(lines: Sequence[Line]) -> float:
    """Seconds at which the run ended, or stands; checkpoints may be evaluated later."""
    return next((float(line["time"]) for line in reversed(lines) if line["event"] == "run_finished"), float(lines[-1]["time"]))


def learner_slices(lines: Iterable[Line]) -> list[Slice]:
    """In order, without overlap: event times are taken when the conductor hears of a thing. Work wins over waiting for a batch."""
    work: list[Slice] = []
    waits: list[Slice] = []
    for line in lines:
        match line["event"]:
            case "selection_taken":
                waits.append(_one(line["time"], line["wait_seconds"], BATCH, trajectories=line["trajectories"], filtered=line["filtered"]))
            case "updated":
                work += _update_slices(line)
            case "weights_acknowledged":
                work.append(_one(line["time"], line["wait_seconds"], "acknowledgement", version=line["version"]))
            case "weights_published":
                work.append(_one(line["time"], line["seconds"], "publish", version=line["version"], bytes=line["bytes"]))
            case "checkpoint_saved" | "state_copied":
                work.append(_one(line["time"], line["seconds"], "checkpoint", version=line["version"]))
            case "run_resumed" if went_back(line):
                work.append(_one(line["time"], line["seconds"], RESTART, lineage=line["lineage"]))
    work = _in_turn(work)
    free = [piece for wait in _in_turn(waits) for piece in _outside(wait, work)]
    return sorted([*work, *free], key=lambda each: each.start)


def binned(lane: Lane, start: float, end: float, count: int) -> list[dict[str, float]]:
    """Shares by activity of `count` equal bins of [start, end); they add up to 1 where the lane is known at all."""
    width = (end - start) / count
    sampling = _spread(lane.sampling, start, width, count)
    learning = _spread(lane.learning, start, width, count)
    return [_merged(sampled, learned, width) for sampled, learned in zip(sampling, learning, strict=True)]


def _merged(sampled: dict[str, float], learned: dict[str, float], width: float) -> dict[str, float]:
    """A colocated device's bin: its learner's work first, then its sampler's, then reasons until the bin is full."""
    if not sampled:
        return {activity: seconds / width for activity, seconds in learned.items()}
    covered = sum(sampled.values())
    shares = {LEARN: learned[LEARN] / width} if LEARN in learned else {}
    for activity in (FULL, BUSY):
        shares[activity] = min(1.0 - sum(shares.values()), sampled.get(activity, 0.0) / width)
    reasons = {reason: seconds / width for reason, seconds in sampled.items() if reason not in (FULL, BUSY)}
    excess = sum(shares.values()) + sum(reasons.values()) - min(1.0, max(covered, sum(learned.values())) / width)
    for reason in (*_HIDDEN_BY_LEARNING, *reasons):
        taken = min(reasons.get(reason, 0.0), max(0.0, excess))
        if taken > 0:
            reasons[reason] -= taken
            excess -= taken
    return {activity: share for activity, share in {**shares, **reasons}.items() if share > 1e-6}


def _spread(slices: Sequence[Slice], start: float, width: float, count: int) -> list[dict[str, float]]:
    bins: list[dict[str, float]] = [{} for _ in range(count)]
    for each in slices:
        length = each.end - each.start
        first, last = int((each.start - start) / width), int((each.end - start) / width)
        for index in range(max(0, first), min(count - 1, last) + 1):
            low, high = start + index * width, start + (index + 1) * width
            share = (min(high, each.end) - max(low, each.start)) / length
            if share > 0:
                for activity, seconds in each.seconds.items():
                    bins[index][activity] = bins[index].get(activity, 0.0) + share * seconds
    return bins


def _sampler_slices(lines: Iterable[Line], device: str, role: str, capacity: float) -> list[Slice]:
    slices = []
    for line in lines:
        if (line["event"] == "role_restarted" and _works_on(line["role"], device, role)) or (line["event"] == "run_resumed" and went_back(line)):
            slices.append(_one(line["time"], line["seconds"], RESTART))
        if line["event"] != "worker_active" or not _works_on(line["role"], device, role):
            continue
        activity = line["activity"]
        if activity["seconds"] <= 0:
            continue
        running = {int(count): seconds for count, seconds in activity["running_seconds"].items()}
        busy = sum(running.values())
        occupied = min(activity["busy_seconds"], sum(min(1.0, count / capacity) * seconds for count, seconds in running.items()))
        facts = {
            "mean running sequences": sum(count * seconds for count, seconds in running.items()) / busy if busy > 0 else 0.0,
            "rollouts in flight": line["in_flight"],
            "sampled tokens": activity["sampled_tokens"],
            "decode steps": activity["decode_steps"],
            "weight updates applied": activity["applied_updates"],
        }
        seconds = {FULL: occupied, BUSY: activity["busy_seconds"] - occupied, **activity["idle_seconds"]}
        slices.append(Slice(start=line["time"] - activity["seconds"], end=line["time"], seconds=seconds, facts=facts))
    return slices


def _works_on(worker: str, device: str, role: str) -> bool:
    return worker == device or (role == COLOCATED and worker.rpartition("-")[2] == device.rpartition("-")[2])


def _one(end: float, seconds: float, activity: str, **facts: Any) -> Slice:
    start = max(0.0, end - seconds)  # what began before line 1 is start-up
    return Slice(start=start, end=end, seconds={activity: end - start}, facts=facts)


def _update_slices(line: Line) -> list[Slice]:
    """Transfer there and back, then overhead, then work: the event says how long each took, this order is as good as any."""
    finished = line["time"] - line.get("finished_seconds_ago", 0.0)
    version = line["version"]
    return [
        _one(finished - line["seconds"], line.get("transfer_seconds", 0.0), "transfer", version=version),
        _one(finished - line["busy_seconds"], max(0.0, line["seconds"] - line["busy_seconds"]), "overhead", version=version),
        _one(finished, line["busy_seconds"], LEARN, **_update_facts(line)),
    ]


def _update_facts(line: Line) -> dict[str, Any]:
    facts = {"version": line["version"], "reward": line["reward_mean"], "refused": line["refused"]}
    if line["statistics"] is not None:
        facts |= {key: line["statistics"][key] for key in ("trained_tokens", "staleness_mean", "effective_sample_size")}
    return {key: value for key, value in facts.items() if value is not None}


def _in_turn(slices: Iterable[Slice]) -> list[Slice]:
    """Each begins where the one before ended at the earliest; what is left of none is dropped."""
    kept: list[Slice] = []
    for each in sorted(slices, key=lambda one: one.start):
        start = max(each.start, kept[-1].end) if kept else each.start
        if each.end > start:
            kept.append(_cut(each, start, each.end))
    return kept


def _outside(each: Slice, others: Sequence[Slice]) -> list[Slice]:
    """The parts of a slice that none of the others (in order, without overlap) covers."""
    pieces, start = [], each.start
    for index in range(bisect_right(others, each.start, key=lambda other: other.end), len(others)):
        if others[index].start >= each.end:
            break
        if others[index].start > start:
            pieces.append(_cut(each, start, others[index].start))
        start = max(start, others[index].end)
    return [*pieces, _cut(each, start, each.end)] if each.end > start else pieces


def _cut(each: Slice, start: float, end: float) -> Slice:
    (activity,) = each.seconds
    return Slice(start=start, end=end, seconds={activity: end - start}, facts=each.facts)
