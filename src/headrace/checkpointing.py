"""When a run is saved, which checkpoints stay, and what lets it go on from one: its journal, and what a restore gives the conductor.

A checkpoint is the learner's files and, beside them, the state of the pool and the task source at that moment. While nothing is
written down (no journal) it is the learner's files alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import events as ev
from headrace.clock import Waits, now
from headrace.config import Settings
from headrace.pool.journal import Journal, Record, SourcePlace, StateTaken
from headrace.pool.pool import ExperiencePool
from headrace.pool.restoring import Held, RestoredPool, pool_state, restore_pool
from headrace.retention import Retention
from headrace.roles import EventSink, Learner, TaskSource, TrajectoryRecorder
from headrace.supervision import blamed_on_learner
from headrace.types import PolicyVersion, Task
from headrace.updates import UpdateResult

LEARNER_SHARE = 0.02
"""Of its time that saving by checkpoint.every_seconds may cost the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopy:
    """The learner's state of a version lies in memory (checkpoint.memory_copy); this is what goes with it."""

    version: PolicyVersion
    text: str
    """JSON of what a checkpoint would have beside it: frozen, as the pool goes on changing."""

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = json.loads(self.text)
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """What a run goes on from."""

    version: PolicyVersion
    """Of the checkpoint; the learner has its weights under a new lineage."""
    state: Mapping[str, Any]
    """What `Checkpoints.save` gave the journal."""
    held: Held
    records: Iterable[Record]
    """Written down since the state was taken."""
    checkpoints: Sequence[Path] = ()
    """That the run may still go back to, oldest first."""
    learning_rate_factor: float = 1.0
    """What rollbacks have multiplied the learning rate by."""
    copied: MemoryCopy | None = None
    """What it goes on from, where that is no checkpoint."""
    rolled_back: bool = False
    """It goes on from here because what came after was no good."""


class RepeatingSource:
    """Implements roles.TaskSource: tasks of undone groups first, then those of another source."""

    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._again: tuple[Task, ...] = ()
        self._num_again = 0

    @property
    def position(self) -> int:
        return self._source.position

    @position.setter
    def position(self, position: int) -> None:
        self._source.position = position

    def next(self) -> Task:
        if self._num_again:
            self._num_again -= 1
            return self._again[len(self._again) - self._num_again - 1]
        return self._source.next()

    def place(self) -> SourcePlace:
        return SourcePlace(self._source.position, self._num_again)

    def restore(self, restored: RestoredPool) -> None:
        self._source.position, self._again, self._num_again = restored.position, restored.again, len(restored.again)

    def to_come(self, place: SourcePlace) -> tuple[Task, ...]:
        """Tasks that were to be offered again when the source stood there."""
        return self._again[len(self._again) - place.num_again :]


class Checkpoints:
    def __init__(
        self, settings: Settings, learner: Learner, events: EventSink, waits: Waits, *, directory: Path | None, journal: Journal | None, restore: Restore | None
    ) -> None:
        """Without a directory nothing is saved."""
        self._settings, self._learner, self._events, self._waits = settings, learner, events, waits
        self._directory, self._journal = directory, journal
        self.retention = Retention(settings) if restore is None else Retention(settings, restore.checkpoints, restore.state.get("retention"))
        self.last: Path | None = self.retention.kept[-1] if self.retention.kept else None
        self._saved_seconds = now()
        self.copied = None if restore is None else restore.copied
        """What the run can go back to if its learner is lost, while that is newer than the last checkpoint."""
        self._saved_number = learner.version.number if self.copied is None else self.retention.newest
        self._cost_seconds = 0.0

    @property
    def behind(self) -> bool:
        """Something was learned since the last checkpoint, or since the run began."""
        return self._directory is not None and self._learner.version.number != self._saved_number

    def due(self, result: UpdateResult) -> bool:
        """After an update; not the last one, after which the run is saved anyway."""
        before, after = result.version_before.number, result.version_after.number
        if self._directory is None or after >= self._settings.run.num_updates or after == before:
            return False
        every = self._settings.checkpoint.every_updates
        if every and before // every != after // every:
            return True
        seconds = self._settings.checkpoint.every_seconds
        return bool(seconds) and now() - self._saved_seconds >= max(seconds, self._cost_seconds / LEARNER_SHARE)

    async def save(self, pool: ExperiencePool, source: RepeatingSource, governor: Mapping[str, Any]) -> None:
        """While no batch is out. The learner waits meanwhile, samplers do not. `governor`: what it wants back after a restore."""
        if self._directory is None:
            return
        started, version = now(), self._learner.version
        path = self._directory / f"update_{version.number:06d}"
        retention = self.retention.state(version.number)
        state = None if self._journal is None else self._state(self._journal, pool, source, version, retention, governor)
        limit_seconds = self._settings.limits.save_seconds
        saving = self._waits.limited(self._learner.save(path), f"conductor waits for the learner to save {path.name}", limit_seconds)
        await blamed_on_learner(saving)
        if state is not None and self._journal is not None:
            await self._waits.limited(
                self._journal.checkpointed(path.name, state), f"conductor waits for the state of {path.name} to be written", limit_seconds
            )
        self.last = path
        for gone in self.retention.saved(path):
            await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)
        self._saved_seconds, self._saved_number, self._cost_seconds = now(), version.number, now() - started
        best = None if self.retention.best is None else self.retention.best.name
        saved = ev.CheckpointSaved(version=version.number, lineage=version.lineage, path=str(path), seconds=self._cost_seconds, best=best)
        self._events.emit(saved)

    async def copy(self, pool: ExperiencePool, source: RepeatingSource, governor: Mapping[str, Any]) -> None:
        """The same in memory, where that is wanted: for the learner's successor, of no use to a run that has ended."""
        if self._directory is None or self._journal is None or not self._settings.checkpoint.memory_copy:
            return
        started, version = now(), self._learner.version
        text = json.dumps(self._state(self._journal, pool, source, version, self.retention.between(), governor))
        limit_seconds = self._settings.limits.save_seconds
        copying = self._waits.limited(self._learner.copy(), "conductor waits for the learner to copy its state", limit_seconds)
        num_bytes = await blamed_on_learner(copying)
        self.copied = MemoryCopy(version=version, text=text)
        self._events.emit(ev.StateCopied(version=version.number, lineage=version.lineage, bytes=num_bytes, seconds=now() - started))

    async def written_down(self) -> None:
        """Everything that happened so far would survive this process."""
        if self._journal is not None:
            await self._waits.limited(self._journal.committed(), "conductor waits for the journal to be written", self._settings.limits.save_seconds)

    @staticmethod
    def _state(
        journal: Journal, pool: ExperiencePool, source: RepeatingSource, version: PolicyVersion, retention: Mapping[str, Any], governor: Mapping[str, Any]
    ) -> dict[str, Any]:
        mark = journal.append(StateTaken(version=version))
        held = pool_state(pool, source.to_come(pool.place))
        return {"version": list(version), "mark": mark, "pool": held, "retention": retention, "governor": governor}


def go_on(restore: Restore, learner: Learner, pool: ExperiencePool, source: RepeatingSource, recorder: TrajectoryRecorder | None) -> RestoredPool:
    """Fills pool, ledger and source; what has to be rolled out at once is with what it returns. Raises CheckpointError or LedgerError."""
    lineage = learner.version.lineage
    restored = restore_pool(
        pool, restore.state["pool"], restore.held, restore.records,
        version=restore.version, lineage=lineage, learning_rate_factor=restore.learning_rate_factor,
    )  # fmt: skip
    source.restore(restored)
    if recorder is not None:
        for finished in restored.pooled:
            recorder.finished(finished)
    return restored
