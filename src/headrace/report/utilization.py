"""Busy fraction, occupancy and where idle time went, by device and for the run (DESIGN section 2).

A worker's decode work belongs to the device of its name (colocated: of its index); the learner's belongs to every device that
learns, because `busy_seconds` of an update is a mean over ranks. A colocated device gets both. Work that an event reports for an
interval that only partly lies in the timed window counts in proportion; but before a window opens no rollout exists, so a worker
was idle there. Workers report about once a second.

Both meters are fed line by line, so a run of any length can be followed in constant memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Line = Mapping[str, Any]

COLOCATED = "colocated"
_WAITS_FOR_BATCH = "batch"
_OTHER = "other"
_UNREPORTED = "unreported"
RESTART = "restart"
_REPORT_GAP_SECONDS = 2.0
# while a colocated learner works, its device's sampler reports that it has nothing to do: most plainly for want of admission
_IDLE_BEFORE = ("admission", "weights", "gather", "rollouts", "bookkeeping")
_IDLE_OF_THE_OTHER_ROLE = ("admission", "weights", "environment", "gather", "rollouts", "bookkeeping", _OTHER)


@dataclass(frozen=True, slots=True)
class Windows:
    """The timed parts of a run: one, or one each time it was resumed. Or any stretches of it."""

    spans: tuple[tuple[float, float], ...]
    cut_out: bool = False
    """Stretches of a run that was already going, so that work before them is ordinary work."""

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def inside(self, end: float, seconds: float) -> float:
        """How many of the `seconds` before `end` lie in the windows."""
        return sum(max(0.0, min(end, b) - max(end - seconds, a)) for a, b in self.spans)

    def before_opening(self, end: float, seconds: float) -> float:
        """How many of the `seconds` before `end` lie just before a window that opens within them."""
        if self.cut_out:
            return 0.0
        return next((a - (end - seconds) for a, b in self.spans if end - seconds < a < end), 0.0)

    def share(self, end: float, seconds: float) -> float:
        """The same as a fraction; an instant is in or out."""
        if seconds > 0:
            return min(1.0, self.inside(end, seconds) / seconds)
        return float(any(a <= end <= b for a, b in self.spans))


class WindowMeter:
    """Timed windows, from each `timed_window` start to its end; one that is cut short ends at the last event before the run is resumed. A run
    that goes back to a checkpoint by itself keeps its devices: the time until it goes on counts."""

    def __init__(self) -> None:
        self._closed: tuple[tuple[float, float], ...] = ()
        self._start: float | None = None
        self._last = 0.0

    def add(self, line: Line) -> None:
        match line["event"]:
            case "timed_window" if line["phase"] == "start":
                self._start = line["time"] if self._start is None else self._start
            case "timed_window" if self._start is not None:
                self._close(line["time"])
            case "run_resumed" if self._start is not None and not went_back(line):
                self._close(self._last)
        self._last = line["time"]

    @property
    def windows(self) -> Windows:
        """Up to the newest event."""
        return Windows(self._closed if self._start is None else (*self._closed, (self._start, self._last)))

    def _close(self, end: float) -> None:
        assert self._start is not None
        self._closed, self._start = (*self._closed, (self._start, end)), None


def went_back(line: Line) -> bool:
    """Whether a line `run_resumed` is of a run that went back to a checkpoint by itself."""
    return bool(line.get("cause", "command") != "command")


def timed_windows(lines: Iterable[Line]) -> Windows:
    """Of a whole run; one that was cut short ends at its last event."""
    meter = WindowMeter()
    for line in lines:
        meter.add(line)
    return meter.windows


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
    sampled_tokens: float = 0.0
    covered: float = 0.0
    """Timed seconds that the worker reported on."""
    in_flight: int = 1
    """Rollouts, by its last report: a worker without any has nothing to report."""

    def add_sampler_work(self, line: Line, windows: Windows) -> None:
        activity, self.in_flight = line["activity"], line["in_flight"]
        seconds, idle = activity["seconds"], dict(activity["idle_seconds"])
        opened = windows.before_opening(line["time"], seconds)
        if opened > 0:
            seconds -= _take(idle, opened, _IDLE_BEFORE)
        share = windows.share(line["time"], seconds)
        self.covered += share * seconds
        self.sampler_busy += share * activity["busy_seconds"]
        self.sampled_tokens += share * activity["sampled_tokens"]
        self.occupied += share * sum(min(1.0, int(running) / self.capacity) * busy for running, busy in activity["running_seconds"].items())
        for reason, lasted in idle.items():
            self.sampler_idle[reason] = self.sampler_idle.get(reason, 0.0) + share * lasted

    def add_restart(self, seconds: float) -> None:
        """Its worker was lost, and its successor is up again."""
        self.covered += seconds
        self.sampler_idle[RESTART] = self.sampler_idle.get(RESTART, 0.0) + seconds


class UtilizationMeter:
    """Adds up what each device did. Each line is given with the windows known by then, or with any stretch of time to look at."""

    def __init__(self, devices: Iterable[Mapping[str, Any]]) -> None:
        self._devices = [_Device(each["name"], each["role"], float(each.get("capacity") or 1)) for each in devices]
        self._learner_idle: dict[str, float] = {}

    def add(self, line: Line, windows: Windows) -> None:
        time = line["time"]
        match line["event"]:
            case "worker_active":
                for device in self._devices:
                    if _works_on(line["role"], device):
                        device.add_sampler_work(line, windows)
            case "role_restarted":
                for device in self._devices:
                    if _works_on(line["role"], device):
                        device.add_restart(windows.inside(time, line["seconds"]))
            case "run_resumed" if went_back(line):
                seconds = windows.inside(time, line["seconds"])
                for device in self._devices:
                    device.add_restart(seconds)
                self._add_idle(RESTART, seconds)
            case "updated":
                finished = time - line.get("finished_seconds_ago", 0.0)
                share = windows.share(finished, line["seconds"])
                for device in self._devices:
                    if device.role in ("learner", COLOCATED):
                        device.learner_busy += line["busy_seconds"] * share
                self._add_idle("overhead", max(0.0, line["seconds"] - line["busy_seconds"]) * share)
                self._add_idle("transfer", line.get("transfer_seconds", 0.0) * share)
            case "selection_taken":
                self._add_idle(_WAITS_FOR_BATCH, windows.inside(time, line["wait_seconds"]))
            case "weights_acknowledged":
                self._add_idle("acknowledgement", windows.inside(time, line["wait_seconds"]))
            case "weights_published":
                self._add_idle("publish", windows.inside(time, line["seconds"]))
            case "checkpoint_saved" | "state_copied":
                self._add_idle("checkpoint", windows.inside(time, line["seconds"]))

    def sampled_tokens(self, windows: Windows) -> float | None:
        """Drawn in the timed windows, a missing last report taken to be like the others; None before the first report."""
        if all(device.covered <= 0 for device in self._devices):
            return None
        return sum(_completed(device, windows.seconds).sampled_tokens for device in self._devices)

    def result(self, windows: Windows) -> dict[str, Any]:
        """The `utilization` object of CONTRACTS. Fractions are None before the first timed second."""
        allocated = windows.seconds
        if allocated <= 0:
            return {"busy_fraction": None, "occupancy": None, "attainable_occupancy": None, "devices": []}
        rows = [_row(_completed(device, allocated), allocated, self._learner_idle) for device in self._devices]
        # every device is allocated for the same time, so the weighted mean is the plain one
        return {
            "busy_fraction": _mean([row["busy_fraction"] for row in rows]),
            "occupancy": _mean([row["occupancy"] for row in rows]),
            "attainable_occupancy": attainable_occupancy(rows),
            "devices": rows,
        }

    def _add_idle(self, reason: str, seconds: float) -> None:
        self._learner_idle[reason] = self._learner_idle.get(reason, 0.0) + seconds


def utilization(lines: Sequence[Line], windows: Windows) -> dict[str, Any]:
    """Of the stretches of time in `windows`; see UtilizationMeter.result."""
    started: Line = next((line for line in lines if line["event"] == "run_started"), {"devices": []})
    meter = UtilizationMeter(started["devices"])
    for line in lines:
        meter.add(line, windows)
    return meter.result(windows)


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


def _completed(device: _Device, allocated: float) -> _Device:
    """The last report before the window closes is missing: those seconds are taken to be like the others.

    A longer silence is idle, and so is any silence of a worker that had nothing in flight when it last spoke.
    """
    missing = allocated - device.covered
    if device.covered <= 0:  # the run was over before the first report
        return replace(device, sampler_idle={_UNREPORTED: allocated})
    if missing <= 0:
        return device
    if missing > _REPORT_GAP_SECONDS or device.in_flight == 0:
        reason = _UNREPORTED if device.in_flight else "admission"
        return replace(device, sampler_idle={**device.sampler_idle, reason: device.sampler_idle.get(reason, 0.0) + missing})
    scale = allocated / device.covered
    return replace(
        device,
        sampler_busy=device.sampler_busy * scale,
        occupied=device.occupied * scale,
        sampled_tokens=device.sampled_tokens * scale,
        sampler_idle={reason: seconds * scale for reason, seconds in device.sampler_idle.items()},
    )


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
    _take(fitted, -missing, (*_IDLE_OF_THE_OTHER_ROLE, *fitted))
    return {reason: seconds for reason, seconds in fitted.items() if seconds > 1e-9}


def _take(seconds: dict[str, float], wanted: float, order: Iterable[str]) -> float:
    """Takes up to `wanted` seconds out, reason by reason, and returns how much that was."""
    left = wanted
    for reason in order:
        taken = max(0.0, min(seconds.get(reason, 0.0), left))
        if taken > 0:
            seconds[reason] -= taken
            left -= taken
    return wanted - left


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
