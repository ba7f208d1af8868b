"""trajectories/*.parquet in the run directory: what was sampled, for people and notebooks (DESIGN section 9).

The conductor's loop only puts references into a queue; one background thread takes the payloads apart and writes them. A file is
whole or not there: it is written aside and renamed. Recording changes no event and cannot fail a run: where the disk is full or
slower than the run, rows are lost and counted.

`versions` are numbers of policy versions, one an action token; `staleness_*` is against the version that the learner was about to
update from, over the action tokens, and null for what the learner never got. Indices of `action_starts` and `action_ends` are into
`tokens`; `logprobs` and `versions` run over the action tokens in order; `key_weights` and `step_rewards` over the steps.
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RecordTrajectories, Settings
from headrace.events import TrajectoriesRecorded
from headrace.marks import RULE_WEIGHT
from headrace.types import FinishedRollout, RetireReason, RolloutKey
from headrace.updates import Selection, UpdateResult

DIRECTORY = "trajectories"
MAX_ROWS = 5_000
"""Of one file."""
MAX_BYTES = 32 * 2**20
"""Of payloads, of one file."""
MAX_SECONDS = 60.0
"""From the first row of a file until it is written, as long as more rows come."""
MAX_PENDING_BYTES = 256 * 2**20
"""Payloads that wait for the thread; more are lost."""

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class _Row:
    """One trajectory on its way to the thread."""

    payload: bytes
    reason: RetireReason
    learned: _Learned | None


@dataclass(frozen=True, slots=True)
class _Learned:
    """What the learner did with the batch of a trajectory."""

    version_before: int
    version_after: int | None
    """None: every update was refused."""
    lineage: int
    trained_tokens: Mapping[RolloutKey, int]
    marked: frozenset[RolloutKey]
    """Every step of these is key: their reward stood out of their group (marks.min_advantage)."""


class TrajectoryStore:
    """Implements roles.TrajectoryRecorder. `close` writes the rest and ends the thread."""

    def __init__(self, directory: Path, *, record: RecordTrajectories = RecordTrajectories.TRAINED, fraction: float = 1.0) -> None:
        """Nothing is made on disk before the first file is full."""
        self._record, self._fraction = record, fraction
        self._pool: dict[RolloutKey, bytes] = {}
        """Payloads of what the pool holds too."""
        self._learned: _Learned | None = None
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._writer = _Writer(directory, self._queue)
        self._put_bytes = 0
        self._num_lost = 0
        self._thread: threading.Thread | None = None
        if record is not RecordTrajectories.NONE:
            self._thread = threading.Thread(target=self._writer.run, name="trajectory-store", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, settings: Settings, run_directory: Path) -> TrajectoryStore:
        return cls(run_directory / DIRECTORY, record=settings.run.record_trajectories, fraction=settings.run.record_fraction)

    def finished(self, rollout: FinishedRollout) -> None:
        key = rollout.summary.key
        if self._thread is None or not self._is_recorded(key.group_id):
            return
        self._pool.pop(key, None)  # a verified rollout comes again, and may fail then
        if not rollout.summary.failed:
            self._pool[key] = rollout.payload
        elif self._record is RecordTrajectories.ALL:  # each failed attempt, tried again or not
            self._put(_Row(rollout.payload, RetireReason.FAILED, None))

    def learned(self, selection: Selection, result: UpdateResult) -> None:
        self._learned = _Learned(
            selection.learner_version.number,
            result.version_after.number if result.version_after > result.version_before else None,
            result.version_after.lineage,
            {outcome.key: outcome.trained_tokens for outcome in result.outcomes},
            frozenset(member.summary.key for member in selection.members if member.marked),
        )

    def retired(self, key: RolloutKey, reason: RetireReason) -> None:
        payload = self._pool.pop(key, None)
        if payload is None:
            return
        with_learner = reason in (RetireReason.TRAINED, RetireReason.SKIPPED)
        if with_learner or self._record is RecordTrajectories.ALL:
            self._put(_Row(payload, reason, self._learned if with_learner else None))

    def begin_again(self) -> None:
        """The run goes on from a checkpoint: what its pool holds comes again."""
        self._pool.clear()
        self._learned = None

    def close(self) -> None:
        """Blocks until everything is on disk. A second call does nothing."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            self._pool.clear()

    def outcome(self) -> TrajectoriesRecorded:
        """After `close`."""
        writer = self._writer
        return TrajectoriesRecorded(trajectories=writer.num_written, files=writer.num_files, lost=self._num_lost + writer.num_lost, failure=writer.failure)

    def _is_recorded(self, group_id: int) -> bool:
        """Multiples of the golden ratio spread evenly, so any stretch of groups has this share of them."""
        return self._fraction >= 1.0 or (group_id * _GOLDEN) % 1.0 < self._fraction

    def _put(self, row: _Row) -> None:
        if self._put_bytes - self._writer.taken_bytes > MAX_PENDING_BYTES:
            self._num_lost += 1
            return
        self._put_bytes += len(row.payload)
        self._queue.put(row)


class _Writer:
    """What the thread does. Its counters are read by the loop: each has one writer."""

    def __init__(self, directory: Path, rows: queue.SimpleQueue[_Row | None]) -> None:
        self._directory = directory
        self._queue = rows
        self._num_before = max((int(path.stem) for path in directory.glob("[0-9]*.parquet")), default=0)  # of a run that goes on
        self.taken_bytes = 0
        self.num_written = self.num_files = self.num_lost = 0
        self.failure: str | None = None

    def run(self) -> None:
        try:
            import pyarrow.parquet  # noqa: F401  # a fifth of a second, before the first row and not on the loop
        except ImportError as error:
            self.failure = f"pyarrow cannot be imported: {error}"
        columns, started = _Columns(), 0.0
        while (row := self._queue.get()) is not None:
            self.taken_bytes += len(row.payload)
            if self.failure is not None:
                self.num_lost += 1
                continue
            started = started if columns.num_rows else time.monotonic()
            try:
                columns.add(row)
            except Exception as error:  # a payload that is no trajectory: the pool would have failed before
                self._fail(error, 1 + columns.num_rows)
                columns = _Columns()
            if columns.num_rows >= MAX_ROWS or columns.num_bytes >= MAX_BYTES or time.monotonic() - started >= MAX_SECONDS:
                self._write(columns)
                columns = _Columns()
        if columns.num_rows:
            self._write(columns)

    def _fail(self, error: Exception, num_lost: int) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self.num_lost += num_lost

    def _write(self, columns: _Columns) -> None:
        first = self._num_before + self.num_files + 1
        aside = self._directory / f".{first:06d}.parquet.part"
        try:
            import pyarrow.parquet as parquet

            self._directory.mkdir(exist_ok=True)
            parquet.write_table(columns.table(), aside, compression="zstd")
            aside.replace(self._directory / f"{first:06d}.parquet")
        except Exception as error:  # whatever is wrong with the disk, the run goes on
            self._fail(error, columns.num_rows)
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return
        self.num_written += columns.num_rows
        self.num_files += 1


class _Columns:
    """Rows of one file, kept by column: token columns as flat arrays with offsets, which Parquet takes without a copy."""

    def __init__(self) -> None:
        self.num_rows = self.num_bytes = 0
        self._scalars: dict[str, list[Any]] = {name: [] for name in _SCALARS}
        self._lists = {name: _Lists(code) for name, code in _LISTS.items()}

    def add(self, row: _Row) -> None:
        payload = row.payload
        (size,) = struct.unpack_from("<I", payload)
        header = json.loads(payload[4 : 4 + size])  # Trajectory.from_bytes checks what the pool has checked already
        num_tokens, num_action_tokens, _ = header["counts"]
        start, end = 4 + size, 4 + size + 4 * num_tokens
        lists = self._lists
        lists["tokens"].add_bytes(payload[start:end])
        lists["logprobs"].add_bytes(payload[end : end + 4 * num_action_tokens])  # those of a verification follow
        steps = header["steps"]
        versions = array("i")
        for step in steps:
            for _, number, span_start, span_end in step[2]:
                versions.extend(array("i", (number,)) * (span_end - span_start))
        lists["versions"].add(versions)
        lists["action_starts"].add(step[0] for step in steps)
        lists["action_ends"].add(step[1] for step in steps)
        least = RULE_WEIGHT if row.learned is not None and RolloutKey(*header["key"]) in row.learned.marked else 0.0
        weights = [max(step[3], least) for step in steps]
        lists["key_steps"].add(index for index, weight in enumerate(weights) if weight > 0)
        lists["key_weights"].add(weights)
        lists["step_rewards"].add(step[4] for step in steps)
        self._add_scalars(header, row, num_action_tokens, versions)
        self.num_rows += 1
        self.num_bytes += len(payload)

    def _add_scalars(self, header: Mapping[str, Any], row: _Row, num_action_tokens: int, versions: Sequence[int]) -> None:
        key, learned = RolloutKey(*header["key"]), row.learned
        started, finished, wait = header["times"]
        staleness = learned is not None and num_action_tokens > 0
        before = learned.version_before if learned else 0
        values = {
            "group": key.group_id,
            "member": key.member,
            "attempt": key.attempt,
            "task_id": header["task_id"],
            "kind": header["task_kind"],
            "retired": str(row.reason),
            "update": learned.version_after if learned else None,
            "lineage": learned.lineage if learned else None,
            "trained_tokens": learned.trained_tokens.get(key, 0) if learned else 0,
            "reward": header["reward"],
            "end": header["end_reason"],
            "error": header["error"],
            "steps": len(header["steps"]),
            "action_tokens": num_action_tokens,
            "seconds": finished - started,
            "wait_seconds": wait,
            "temperature": header["temperature"],
            "staleness_mean": before - sum(versions) / num_action_tokens if staleness else None,
            "staleness_max": before - min(versions) if staleness else None,
        }
        for name, value in values.items():
            self._scalars[name].append(value)

    def table(self) -> Any:
        import pyarrow as pa

        arrays = {name: pa.array(values, type=getattr(pa, _SCALARS[name])()) for name, values in self._scalars.items()}
        for name, lists in self._lists.items():
            kind = pa.int32() if lists.values.typecode == "i" else pa.float32()
            flat = pa.Array.from_buffers(kind, len(lists.values), [None, pa.py_buffer(lists.values)])
            arrays[name] = pa.ListArray.from_arrays(pa.array(lists.offsets, type=pa.int32()), flat)
        return pa.table(arrays)


def empty_table() -> Any:
    """A pyarrow table of no rows: the columns and their types."""
    return _Columns().table()


class _Lists:
    """Rows of numbers of one kind: values one after another, and where each row begins."""

    def __init__(self, typecode: str) -> None:
        self.values: array[Any] = array(typecode)
        self.offsets = [0]

    def add(self, values: Any) -> None:
        self.values.extend(values)
        self.offsets.append(len(self.values))

    def add_bytes(self, values: bytes) -> None:
        self.values.frombytes(values)
        self.offsets.append(len(self.values))


# pyarrow type of each column, by the name of the function that makes it
_SCALARS = {
    "group": "int64",
    "member": "int32",
    "attempt": "int32",
    "task_id": "string",
    "kind": "string",
    "retired": "string",
    "update": "int32",
    "lineage": "int32",
    "trained_tokens": "int32",
    "reward": "float64",
    "end": "string",
    "error": "string",
    "steps": "int32",
    "action_tokens": "int32",
    "seconds": "float64",
    "wait_seconds": "float64",
    "temperature": "float64",
    "staleness_mean": "float64",
    "staleness_max": "int32",
}
# array typecode of each list column
_LISTS = {
    "tokens": "i",
    "action_starts": "i",
    "action_ends": "i",
    "logprobs": "f",
    "versions": "i",
    "key_steps": "i",
    "key_weights": "f",
    "step_rewards": "f",
}
COLUMNS = (*_SCALARS, *_LISTS)
