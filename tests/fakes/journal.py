"""A journal in memory, which can be cut at any record, as a crash cuts the real one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from headrace.checkpointing import MemoryCopy, Restore
from headrace.config import Settings
from headrace.pool.journal import Delivered, Record, Restored, record_from_json, record_to_json, summary_from_json, summary_to_json
from headrace.runtime.resumption import start_state
from headrace.types import FinishedRollout, PolicyVersion


class MemoryJournal:
    """Implements pool.journal.Journal."""

    def __init__(self, settings: Settings | None = None) -> None:
        """With settings the start of the run is a place to go on from, too."""
        self.start = None if settings is None else start_state(settings)
        self.records: list[Record] = []
        self.states: list[tuple[int, Mapping[str, Any]]] = []
        """(records by the time it was durable, state)"""

    def append(self, record: Record) -> int:
        self.records.append(_as_from_disk(record))
        return len(self.records)

    async def committed(self) -> None:
        """It always is."""

    async def checkpointed(self, name: str, state: Mapping[str, Any]) -> None:
        self.states.append((len(self.records), json.loads(json.dumps(state))))

    def cut(self, num_records: int) -> MemoryJournal:
        """What a crash leaves when so many records were written."""
        left = MemoryJournal()
        left.start = self.start
        left.records = self.records[:num_records]
        left.states = [(at, copy.deepcopy(state)) for at, state in self.states if at <= num_records]
        return left

    def restore(self, *, newest: int = -1, copied: MemoryCopy | None = None) -> tuple[Restore, PolicyVersion]:
        """From its newest checkpoint, or an older one, or the start, or a copy that is newer; and the version that the learner starts at."""
        state = self.states[newest][1] if self.states or self.start is None else self.start
        copied = None if copied is None or copied.version <= PolicyVersion(*state["version"]) else copied
        state = state if copied is None else copied.state
        version, mark = PolicyVersion(*state["version"]), state["mark"]
        held = {(r.finished.summary.key, r.finished.summary.round): r.finished.payload for r in self.records[:mark] if isinstance(r, Delivered)}
        lineage = 1 + max([version.lineage, *(record.lineage for record in self.records if isinstance(record, Restored))])
        return Restore(version=version, state=state, held=held, records=self.records[mark:], copied=copied), PolicyVersion(lineage, version.number)


def _as_from_disk(record: Record) -> Record:
    """What is read back of it."""
    if not isinstance(record, Delivered):
        return record_from_json(*record_to_json(record))
    summary = summary_from_json(summary_to_json(record.finished.summary))
    return Delivered(worker=record.worker, generated_tokens=record.generated_tokens, finished=FinishedRollout(summary=summary, payload=record.finished.payload))
