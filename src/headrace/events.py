"""The event log: typed records, one JSON line each (CONTRACTS, events.jsonl). Append-only, one writer, readable while written.

Every line has `event`, `time` (seconds since line 1) and `role`. watch, report, profile and progress only read them; taking
them away changes no event (I14).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from headrace.errors import RunDirectoryError
from headrace.types import TrajectorySummary, UpdateStatistics, WorkerActivity

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base: `name` is the line's `event`."""

    name: ClassVar[str] = ""
    role: str = "conductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Line 1."""

    name: ClassVar[str] = "run_started"
    run_id: str
    headrace: str
    runtime: str
    clock: str
    """monotonic | virtual"""
    wall_time: str | None
    mode: str
    placement: str
    seed: int
    lineage: int
    resumed_from_update: int | None
    devices: list[dict[str, Any]]
    """{name, role, capacity}"""
    schema: int = SCHEMA
    recipe: str = ""
    num_updates: int = 0
    startup_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReserved(Event):
    name: ClassVar[str] = "group_reserved"
    group_id: int
    task_id: str
    task_kind: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinished(Event):
    """One a trajectory (<= 300 bytes). `role` is the worker."""

    name: ClassVar[str] = "rollout_finished"
    group: int
    member: int
    attempt: int
    kind: str
    reward: float
    end: str
    steps: int
    keys: int
    tokens: int
    """Action tokens."""
    versions: list[int]
    """[oldest, newest] number; empty when no token was drawn."""
    seconds: float
    wait_seconds: float

    @classmethod
    def of(cls, summary: TrajectorySummary, *, role: str) -> RolloutFinished:
        key, numbers = summary.key, [count.version.number for count in summary.versions]
        return cls(
            role=role, group=key.group_id, member=key.member, attempt=key.attempt, kind=summary.task_kind, reward=summary.reward, end=summary.end_reason,
            steps=summary.num_steps, keys=summary.num_key_steps, tokens=summary.num_action_tokens, versions=[numbers[0], numbers[-1]] if numbers else [],
            seconds=summary.seconds, wait_seconds=summary.wait_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailed(Event):
    """Names the task and the error, beside RolloutFinished."""

    name: ClassVar[str] = "rollout_failed"
    group: int
    member: int
    attempt: int
    task_id: str
    reason: str
    error: str
    retried: bool

    @classmethod
    def of(cls, summary: TrajectorySummary, *, role: str, retried: bool) -> RolloutFailed:
        return cls(
            role=role, group=summary.key.group_id, member=summary.key.member, attempt=summary.key.attempt, task_id=summary.task_id,
            reason=summary.end_reason, error=summary.error or "", retried=retried,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTaken(Event):
    name: ClassVar[str] = "selection_taken"
    selection: int
    learner_version: int
    lineage: int
    trajectories: int
    filtered: int
    wait_seconds: float
    """How long the learner waited for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Event):
    """One a selection: what the learner did. `role` is the learner."""

    name: ClassVar[str] = "updated"
    selection: int
    version: int
    lineage: int
    reward_mean: float
    """Over the batch, filtered groups included."""
    seconds: float
    busy_seconds: float
    refused: str | None
    statistics: UpdateStatistics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    name: ClassVar[str] = "weights_published"
    version: int
    lineage: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsApplied(Event):
    """`role` is the worker."""

    name: ClassVar[str] = "weights_applied"
    version: int
    lineage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActive(Event):
    """Aggregated decode work of one worker (about one a second)."""

    name: ClassVar[str] = "worker_active"
    in_flight: int
    activity: WorkerActivity


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerClosed(Event):
    name: ClassVar[str] = "ledger"
    ledger: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    name: ClassVar[str] = "evaluated"
    version: int
    lineage: int
    mean: float
    interval95: list[float]
    num_rollouts: int
    """Without the failed ones, which have no reward."""
    metrics: dict[str, float]
    seconds: float
    num_failed: int = 0
    failure: str | None = None
    """Task and error of the first failed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    name: ClassVar[str] = "checkpoint_saved"
    version: int
    lineage: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Who waits for whom, when it lasts."""

    name: ClassVar[str] = "waiting"
    waits: list[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWindow(Event):
    """The training window: from the first rollout to the last update."""

    name: ClassVar[str] = "timed_window"
    phase: str
    """start | end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    name: ClassVar[str] = "run_finished"
    status: str
    """done | failed | interrupted"""
    error: dict[str, Any] | None
    version: int
    lineage: int


class EventLog:
    """The one writer. `subscribe` lets a progress view see events as they pass; a subscriber that raises is dropped.

    Each line is written whole or not at all: where the disk is full, what was written of it is cut off again, `emit` raises
    RunDirectoryError once, and later events reach the subscribers only.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._file: IO[bytes] | None = None if path is None else path.open("ab", buffering=0)
        self._start: float | None = None
        self._subscribers: list[Callable[[dict[str, Any]], None]] = []

    def subscribe(self, subscriber: Callable[[dict[str, Any]], None]) -> None:
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        if self._start is None:
            self._start = self._clock()
        line = {"event": event.name, "time": round(self._clock() - self._start, 4), **_plain(event)}
        self._write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        for subscriber in list(self._subscribers):
            try:
                subscriber(line)
            except Exception:  # a view must never break a run
                self._subscribers.remove(subscriber)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # a device that cannot be cut
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            self.close()
            remedy = "Free disk space, or choose another run directory; what was saved before is whole."
            raise RunDirectoryError(f"{self._path}: the event log cannot be written: {error.strerror}.", remedy=remedy) from error


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of an events file, also of one still being written: a torn last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def _plain(value: Any) -> Any:
    """Dataclasses and mappings to JSON values: floats to 6 significant digits, non-finite ones to null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"an event holds a {type(value).__name__}: {value!r}")
