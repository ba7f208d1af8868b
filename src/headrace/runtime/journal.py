"""pool.sqlite: the journal of a run on disk, written by a thread in group commits (DESIGN section 9).

The conductor's loop only puts records into a queue; it waits for the disk once a batch, before the batch is learned from, and when a
checkpoint is saved. SQLite in WAL mode, synchronous = NORMAL: what was committed survives the death of any process; a power cut may take
the newest commits, never the file. Beside each checkpoint lies run_state.json, written last: a checkpoint without it is no place to go on
from. What neither of the two newest ones needs is deleted (the start of the run counts as the first one), so the file stays as large as
what happens between two checkpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError, RunDirectoryError
from headrace.pool.journal import Delivered, Record, Reported, Restored, record_from_json, record_to_json, summary_from_json, summary_to_json
from headrace.pool.restoring import held_rollouts
from headrace.types import FinishedRollout, RolloutKey

FILE = "pool.sqlite"
STATE_FILE = "run_state.json"
SCHEMA = 2
COMMIT_SECONDS = 0.25
"""Between two commits that nobody waits for."""
NUM_STATES = 2
"""Newest checkpoints that the journal can still serve."""
START: Mapping[str, Any] = {"version": [0, 0], "mark": 0, "pool": {"groups": []}}
"""As much of the state of a run that has just begun as the journal needs."""
_FLOOR = "floor"
"""Fact: the mark of the oldest state that the journal serves."""

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (
    seq INTEGER PRIMARY KEY, group_id INTEGER, member INTEGER, attempt INTEGER, round INTEGER,
    worker TEXT, generated_tokens INTEGER, summary TEXT, payload BLOB
);
CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, kind TEXT, record TEXT);
"""


@dataclass(frozen=True, slots=True)
class _Order:
    """For the thread: commit what came before; with a state, write that too. Then tell the loop."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    name: str = ""
    state: Mapping[str, Any] | None = None


class RunJournal:
    """Implements pool.journal.Journal. `close` commits the rest and ends the thread."""

    def __init__(
        self, directory: Path, checkpoints: Path, *, first: int = 1, states: Sequence[Mapping[str, Any]] = (START,), keeps_records: bool = True
    ) -> None:
        """`first`: number of the next record; `states`: that the run may still go back to, oldest first. Without `keeps_records` only states
        are written: then what was pooled at a checkpoint is lost to a run that goes on from it.

        Raises RunDirectoryError when the file cannot be written.
        """
        self._next, self.keeps_records = first, keeps_records
        self._queue: queue.SimpleQueue[tuple[int, Record] | _Order | None] = queue.SimpleQueue()
        self._writer = _Writer(directory / FILE, checkpoints, states, keeps_records=keeps_records, before=first - 1)
        self._thread = threading.Thread(target=self._writer.run, args=(self._queue,), name="journal", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> int:
        if self._writer.failure is not None:
            raise self._writer.failure
        number = self._next
        self._next += 1
        if self.keeps_records:
            self._queue.put((number, record))
        return number

    async def committed(self) -> None:
        await self._ordered()

    async def checkpointed(self, name: str, state: Mapping[str, Any]) -> None:
        await self._ordered(name, state)

    async def _ordered(self, name: str = "", state: Mapping[str, Any] | None = None) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Order(loop, done, name, state))
        await done

    def close(self) -> None:
        """Blocks until everything is on disk. A second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()


class _Writer:
    """What the thread does."""

    def __init__(self, path: Path, checkpoints: Path, states: Sequence[Mapping[str, Any]], *, keeps_records: bool, before: int) -> None:
        """`before`: a new file holds nothing of the records up to this number."""
        self._path, self._checkpoints = path, checkpoints
        self._states = list(states)[-NUM_STATES:]
        self.failure: RunDirectoryError | None = None
        self._connection: sqlite3.Connection | None = None
        if not keeps_records:
            return
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL"):
                self._connection.execute(f"PRAGMA {pragma}")
            self._connection.executescript(_TABLES)
            self._connection.execute("INSERT OR IGNORE INTO facts VALUES ('schema', ?)", (str(SCHEMA),))
            self._connection.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (_FLOOR, str(before)))
        except sqlite3.Error as error:
            raise self._unwritable(error) from error

    def run(self, items: queue.SimpleQueue[tuple[int, Record] | _Order | None]) -> None:
        going = True
        while going:
            batch, order, going = _collect(items)
            try:
                if self.failure is None:
                    self._work(batch, order)
            except (sqlite3.Error, OSError) as error:
                self.failure = self._unwritable(error)
            if order is not None:
                order.loop.call_soon_threadsafe(_tell, order.done, self.failure)
        if self._connection is not None:
            self._connection.close()

    def _work(self, batch: Sequence[tuple[int, Record]], order: _Order | None) -> None:
        if self._connection is not None:
            self._commit(self._connection, batch)
        if order is not None and order.state is not None:
            write_state(self._checkpoints / order.name, order.state)
            if self._connection is not None:
                self._forget(self._connection, order.state)

    def _commit(self, connection: sqlite3.Connection, batch: Sequence[tuple[int, Record]]) -> None:
        newest = {record.worker: number for number, record in batch if isinstance(record, Reported)}  # of each worker's counter
        trajectories, records = [], []
        for number, record in batch:
            if isinstance(record, Delivered):
                summary = record.finished.summary
                payload = b"" if summary.failed else record.finished.payload
                trajectories.append((number, *summary.key, summary.round, record.worker, record.generated_tokens, summary_to_json(summary), payload))
            elif not isinstance(record, Reported) or newest[record.worker] == number:
                records.append((number, *record_to_json(record)))
        if not batch:
            return
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", trajectories)
        connection.executemany("INSERT INTO records VALUES (?, ?, ?)", records)
        connection.execute("COMMIT")

    def _forget(self, connection: sqlite3.Connection, state: Mapping[str, Any]) -> None:
        """A checkpoint is there: what neither it nor the one before needs may go."""
        self._states = [*(other for other in self._states if other["version"] != state["version"]), state][-NUM_STATES:]
        oldest = self._states[0]
        connection.execute("BEGIN")
        connection.execute("CREATE TEMP TABLE IF NOT EXISTS held (group_id, member, attempt, round, PRIMARY KEY (group_id, member, attempt, round))")
        connection.execute("DELETE FROM held")
        connection.executemany("INSERT OR IGNORE INTO held VALUES (?, ?, ?, ?)", [(*key, round_) for key, round_ in held_rollouts(oldest["pool"])])
        connection.execute("DELETE FROM records WHERE seq <= ?", (oldest["mark"],))
        connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_FLOOR, str(oldest["mark"])))
        connection.execute("DELETE FROM trajectories WHERE seq <= ? AND (group_id, member, attempt, round) NOT IN (SELECT * FROM held)", (oldest["mark"],))
        connection.execute("COMMIT")

    def _unwritable(self, error: Exception) -> RunDirectoryError:
        """Of the journal, or of the state beside a checkpoint."""
        where = f"{error.filename}: the run's state cannot be written: {error.strerror}" if isinstance(error, OSError) else None
        return RunDirectoryError(
            f"{where or f'{self._path}: the journal cannot be written: {error}'}.",
            remedy="Free disk space or mend the rights, then go on with 'headrace resume'; what was saved before is whole.",
        )


def _collect(items: queue.SimpleQueue[tuple[int, Record] | _Order | None]) -> tuple[list[tuple[int, Record]], _Order | None, bool]:
    """(records, what ended the wait, whether more may come): up to the next order, or for COMMIT_SECONDS from the first record on."""
    batch: list[tuple[int, Record]] = []
    deadline = None
    while True:
        try:
            item = items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return batch, None, True
        if item is None or isinstance(item, _Order):
            return batch, item, item is not None
        batch.append(item)
        deadline = deadline or time.monotonic() + COMMIT_SECONDS


def _tell(done: asyncio.Future[None], failure: RunDirectoryError | None) -> None:
    if done.done():  # who waited was cancelled
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)


def write_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Makes a learner's checkpoint one that a run can go on from: whole, or not there."""
    body = {"schema": SCHEMA, **state}
    aside = checkpoint / f".{STATE_FILE}.part"
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump({**body, "sha256": _digest(body)}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(checkpoint / STATE_FILE)) from error
    aside.replace(checkpoint / STATE_FILE)
    descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(checkpoint: Path) -> Mapping[str, Any]:
    """What `write_state` wrote. Raises OSError when it is not there, ValueError when it is damaged or of another headrace."""
    text = (checkpoint / STATE_FILE).read_bytes()
    try:
        state: dict[str, Any] = json.loads(text)
        schema, digest = state["schema"], state.pop("sha256", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{STATE_FILE} is damaged: {error}") from error
    if schema != SCHEMA:
        raise ValueError(f"{STATE_FILE} has schema {schema}, this headrace reads {SCHEMA}")
    if digest != _digest(state):
        raise ValueError(f"{STATE_FILE} is damaged (its contents are not what was written)")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRead:
    """What pool.sqlite holds for a run that goes on from one state."""

    held: Mapping[tuple[RolloutKey, int], bytes]
    """Payloads that the state needs."""
    records: Sequence[Record]
    """Since it was taken, in order."""
    highest: int
    """Number of any record."""
    restores: Sequence[Restored]
    """That there have been, as far as it is remembered."""
    reaches_back: bool
    """False: records since the state are gone, all of them are left out."""


def read_journal(path: Path, state: Mapping[str, Any]) -> JournalRead:
    """A file that is not there holds nothing. Raises CheckpointError when it is damaged."""
    mark = int(state["mark"])
    if not path.exists():
        return JournalRead(held={}, records=[], highest=mark, restores=[], reaches_back=mark == 0)
    try:
        connection = sqlite3.connect(path)
        try:
            [(verdict,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
            if verdict != "ok":
                raise sqlite3.DatabaseError(" ".join(verdict.split()))
            floor = connection.execute("SELECT value FROM facts WHERE name = ?", (_FLOOR,)).fetchone()
            reaches_back = floor is None or int(floor[0]) <= mark
            wanted = set(held_rollouts(state["pool"]))
            rows = connection.execute("SELECT group_id, member, attempt, round, payload FROM trajectories WHERE seq <= ?", (mark,))
            held = {(RolloutKey(*row[:3]), row[3]): row[4] for row in rows if (RolloutKey(*row[:3]), row[3]) in wanted}
            since = [*_delivered(connection, mark), *_others(connection, mark)] if reaches_back else []
            highest = [connection.execute(f"SELECT max(seq) FROM {table}").fetchone()[0] or 0 for table in ("records", "trajectories")]
            restored = [record_from_json(*row) for row in connection.execute("SELECT kind, record FROM records WHERE kind = 'restored'")]
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        remedy = "Move it away: the run then goes on from its checkpoint without what lay in the pool."
        raise CheckpointError(f"{path}: the journal is damaged: {error}.", remedy=remedy, file=str(path)) from error
    return JournalRead(
        held=held,
        records=[record for _, record in sorted(since, key=lambda one: one[0])],
        highest=max(mark, *highest),
        restores=[record for record in restored if isinstance(record, Restored)],
        reaches_back=reaches_back,
    )


def _delivered(connection: sqlite3.Connection, mark: int) -> Iterable[tuple[int, Record]]:
    rows = connection.execute("SELECT seq, worker, generated_tokens, summary, payload FROM trajectories WHERE seq > ?", (mark,))
    for number, worker, tokens, summary, payload in rows:
        yield number, Delivered(worker=worker, generated_tokens=tokens, finished=FinishedRollout(summary=summary_from_json(summary), payload=payload))


def _others(connection: sqlite3.Connection, mark: int) -> Iterable[tuple[int, Record]]:
    for number, kind, text in connection.execute("SELECT seq, kind, record FROM records WHERE seq > ?", (mark,)):
        yield number, record_from_json(kind, text)
