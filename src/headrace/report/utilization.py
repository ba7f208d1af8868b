"""Busy fraction, occupancy and where idle time went, by device and for the run (DESIGN section 2).

A worker's decode work belongs to the device of its name (colocated: of its index); the learner's belongs to every device that
learns, because `busy_seconds` of an update is a mean over ranks. A colocated device gets both. Work that an event reports for an
interval that only partly lies in the timed window counts in proportion. Workers report about once a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

COLOCATED = "colocated"
_WAITS_FOR_BATCH = "batch"
_OTHER = "other"
_UNREPORTED = "unreported"
_REPORT_GAP_SECONDS = 2.0
# while a colocated learner works, its device's sampler reports that it has nothing to do: most plainly for want of admission
_IDLE_OF_THE_OTHER_ROLE = ("admission", "weights", "environment", "gather", _OTHER)


@dataclass(frozen=True, slots=True)
class Windows:
    """The timed parts of a run: one, or one each time it was resumed."""

    spans: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def inside(self, end: float, seconds: float) -> float:
        """How many of the `seconds` before `end` lie in the windows."""
        return sum(max(0.0, min(end, b) - max(end - seconds, a)) for a, b in self.spans)

    def share(self, end: float, seconds: float) -> float:
        """The same as a fraction; an instant is in or out."""
        if seconds > 0:
            return min(1.0, self.inside(end, seconds) / seconds)
        return float(any(a <= end <= b for a, b in self.spans))


@dataclass(slots=True)
class _Device:
    name: str
    role: str
    capacity: float
    sampler_busy: float = 0.0
    learner_busy: float = 0.0
    occupied: float = 0.0
    """Integral of min(capacity, running) / capacity, seconds."""
    sampler_idle: dict[str, float] = field(default_factory=dict)
    covered: float = 0.0
    """Timed seconds that the worker reported on."""


def timed_windows(lines: Iterable[Line]) -> Windows:
    """From each `timed_window` start to its end; a run that was cut short ends at its last event."""
    spans: list[tuple[float, float]] = []
    start: float | None = None
    last = 0.0
    for line in lines:
        if line["event"] == "timed_window" and line["phase"] == "start":
            start = line["time"]
        elif line["event"] == "timed_window" and start is not None:
            spans.append((start, line["time"]))
            start = None
        elif line["event"] == "run_resumed" and start is not None:
            spans.append((start, last))
            start = None
        last = line["time"]
    if start is not None:
        spans.append((start, last))
    return Windows(tuple(spans))


def utilization(lines: Sequence[Line], windows: Windows) -> dict[str, Any]:
    """The `utilization` object of CONTRACTS. Fractions are None before the first timed second."""
    started: Line = next((line for line in lines if line["event"] == "run_started"), {"devices": []})
    devices = [_Device(each["name"], each["role"], float(each.get("capacity") or 1)) for each in started["devices"]]
    for device in devices:
        _add_sampler_work(device, lines, windows)
        if device.role in ("learner", COLOCATED):
            device.learner_busy = sum(line["busy_seconds"] * windows.share(line["time"], line["seconds"]) for line in lines if line["event"] == "updated")
    allocated = windows.seconds
    if allocated <= 0:
        return {"busy_fraction": None, "occupancy": None, "attainable_occupancy": None, "devices": []}
    learner_idle = _learner_idle(lines, windows)
    rows = [_row(device, allocated, learner_idle) for device in devices]
    # every device is allocated for the same time, so the weighted mean is the plain one
    return {
        "busy_fraction": _mean([row["busy_fraction"] for row in rows]),
        "occupancy": _mean([row["occupancy"] for row in rows]),
        "attainable_occupancy": attainable_occupancy(rows),
        "devices": rows,
    }


def attainable_occupancy(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """What this split of devices allows at best.

    Data flows at one rate through samplers (mean occupancy s at that rate) and learner (mean occupancy l). Full speed is
    reached when the busier of the two is at 1: every occupancy grows by 1 / max(s, l). Colocated devices can always reach 1.
    """
    by_role: dict[str, list[float]] = {}
    for row in rows:
        by_role.setdefault(row["role"], []).append(row["occupancy"])
    busiest = max((_mean(values) or 0.0 for values in by_role.values()), default=0.0)
    if busiest <= 0:
        return None
    mean = _mean([row["occupancy"] for row in rows])
    assert mean is not None
    return min(1.0, mean / busiest)


def _works_on(role: str, device: _Device) -> bool:
    return role == device.name or (device.role == COLOCATED and role.rpartition("-")[2] == device.name.rpartition("-")[2])


def _add_sampler_work(device: _Device, lines: Iterable[Line], windows: Windows) -> None:
    for line in lines:
        if line["event"] != "worker_active" or not _works_on(line["role"], device):
            continue
        activity = line["activity"]
        share = windows.share(line["time"], activity["seconds"])
        device.covered += share * activity["seconds"]
        device.sampler_busy += share * activity["busy_seconds"]
        device.occupied += share * sum(min(1.0, int(running) / device.capacity) * seconds for running, seconds in activity["running_seconds"].items())
        for reason, seconds in activity["idle_seconds"].items():
            device.sampler_idle[reason] = device.sampler_idle.get(reason, 0.0) + share * seconds
    _complete(device, windows.seconds)


def _complete(device: _Device, allocated: float) -> None:
    """The last report before the window closes is missing: those seconds are taken to be like the others. A longer silence is idle."""
    missing = allocated - device.covered
    if device.covered <= 0 or missing <= 0:
        return
    if missing > _REPORT_GAP_SECONDS:
        device.sampler_idle[_UNREPORTED] = device.sampler_idle.get(_UNREPORTED, 0.0) + missing
        return
    scale = allocated / device.covered
    device.sampler_busy *= scale
    device.occupied *= scale
    device.sampler_idle = {reason: seconds * scale for reason, seconds in device.sampler_idle.items()}


def _learner_idle(lines: Iterable[Line], windows: Windows) -> dict[str, float]:
    """Why the learner's devices were not busy: no batch, the learner's own overhead, publishing, checkpoints."""
    idle = {_WAITS_FOR_BATCH: 0.0, "overhead": 0.0, "publish": 0.0, "checkpoint": 0.0}
    for line in lines:
        match line["event"]:
            case "selection_taken":
                idle[_WAITS_FOR_BATCH] += windows.inside(line["time"], line["wait_seconds"])
            case "updated":
                idle["overhead"] += max(0.0, line["seconds"] - line["busy_seconds"]) * windows.share(line["time"], line["seconds"])
            case "weights_published":
                idle["publish"] += windows.inside(line["time"], line["seconds"])
            case "checkpoint_saved":
                idle["checkpoint"] += windows.inside(line["time"], line["seconds"])
    return idle


def _row(device: _Device, allocated: float, learner_idle: Mapping[str, float]) -> dict[str, Any]:
    busy = min(allocated, device.sampler_busy + device.learner_busy)
    return {
        "name": device.name,
        "role": device.role,
        "capacity": device.capacity,
        "allocated_seconds": allocated,
        "busy_fraction": busy / allocated,
        "occupancy": min(1.0, (device.occupied + device.learner_busy) / allocated),
        "idle_seconds": _fit(learner_idle if device.role == "learner" else device.sampler_idle, allocated - busy),
    }


def _fit(reasons: Mapping[str, float], idle: float) -> dict[str, float]:
    """Reasons that sum up to `idle`: what is missing becomes `other`; too much is taken from the other role's share first."""
    fitted = {reason: seconds for reason, seconds in reasons.items() if seconds > 0}
    missing = idle - sum(fitted.values())
    if missing > 1e-9:
        fitted[_OTHER] = fitted.get(_OTHER, 0.0) + missing
        return fitted
    for reason in (*_IDLE_OF_THE_OTHER_ROLE, *fitted):
        if missing >= 0:
            break
        taken = min(fitted.get(reason, 0.0), -missing)
        if taken > 0:
            fitted[reason] -= taken
            missing += taken
    return {reason: seconds for reason, seconds in fitted.items() if seconds > 1e-9}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
