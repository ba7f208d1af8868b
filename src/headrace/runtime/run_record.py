"""What a run leaves on disk, while it is written: its directory, the event log, the recorded trajectories."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import events as ev
from headrace.config import Settings
from headrace.errors import HeadraceError
from headrace.event_log import EventLog
from headrace.runtime.journal import RunJournal
from headrace.runtime.run_directory import RunDirectory
from headrace.runtime.trajectory_store import TrajectoryStore
from headrace.types import PolicyVersion

_NONE = PolicyVersion(0, 0)


@dataclass(slots=True)
class RunRecord:
    """`begin` writes line 1; from then on the run is one that happened, however it ends."""

    directory: RunDirectory
    log: EventLog
    store: TrajectoryStore
    has_begun: bool = False
    goes_on: bool = False
    """It is that of a run that was over."""
    final_version: PolicyVersion = _NONE
    """Reached when the run ended, however it ended."""
    journal: RunJournal | None = None

    def begin(self, event: ev.RunStarted) -> None:
        if self.goes_on:
            self.directory.update_settings()
        self.log.emit(event)
        self.has_begun = True

    def keep(self, journal: RunJournal) -> RunJournal:
        """Closed when the run ends."""
        self.journal = journal
        return journal

    def begin_again(self) -> None:
        """The run goes back to a checkpoint by itself: everything so far is written down, and what lay in the pool will be told again."""
        if self.journal is not None:
            self.journal.close()
        self.store.begin_again()

    def end(self, status: str, error: dict[str, Any] | None) -> None:
        """The last lines; a run that never began leaves nothing, one that did not go on what it had."""
        if self.journal is not None:
            self.journal.close()
        if not self.has_begun:
            if not self.goes_on:
                self.directory.discard()
            return
        self.store.close()
        self.log.emit(self.store.outcome())
        self.log.emit(ev.RunFinished(status=status, error=error, version=self.final_version.number, lineage=self.final_version.lineage))


@contextlib.contextmanager
def run_record(
    settings: Settings,
    run_directory: Path,
    *,
    clock: Callable[[], float],
    subscribers: Sequence[Callable[[dict[str, Any]], None]] = (),
    goes_on: bool = False,
) -> Iterator[RunRecord]:
    """Raises ConfigError for a directory that is in use. Says in the log how the block ended: done, interrupted or failed.

    `goes_on`: the directory is that of a run that is over; its record is continued.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(contextlib.closing(RunDirectory(run_directory, settings, used=goes_on)))
        log = stack.enter_context(contextlib.closing((EventLog.reopened if goes_on else EventLog)(directory.events, clock)))
        for subscriber in subscribers:
            log.subscribe(subscriber)
        store = stack.enter_context(contextlib.closing(TrajectoryStore.of(settings, run_directory)))
        record = RunRecord(directory, log, store, goes_on=goes_on)
        status, error = "failed", None
        try:
            yield record
            status = "done"
        except asyncio.CancelledError:
            status = "interrupted"
            raise
        except HeadraceError as failure:
            error = failure.as_json()
            raise
        finally:
            record.end(status, error)
