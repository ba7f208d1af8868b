"""What the pool writes down as it happens, so that a run can go on after any of its processes died (DESIGN section 9).

Records in order, each one thing that happened. Together with the state of the pool at a checkpoint they say where every rollout was when
the run ended (pool/restoring.py). What was taken, trained or dropped after that checkpoint is undone by going back to it, so `Consumed` and
`Retired` are there to be read by people and tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from headrace.types import EndReason, FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task, TrajectorySummary, VersionCount


class SourcePlace(NamedTuple):
    """Where a task source stands."""

    position: int
    """Tasks of its own that it has given."""
    num_again: int
    """Tasks of undone groups that come before the next one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """A group took its place in the admission."""

    group_id: int
    task: Task
    size: int
    place: SourcePlace
    """Of the task source when it had given this task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A worker's counter of drawn tokens (Ledger.report_generated)."""

    worker: str
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A rollout came back, for the first time or from a verification."""

    worker: str
    generated_tokens: int
    """The worker's counter by then."""
    finished: FinishedRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBack:
    """Their workers have these again, to verify them."""

    keys: tuple[RolloutKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    worker: str
    generated_tokens: int
    keys: tuple[RolloutKey, ...]
    """What was in flight there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """What one batch was made of, and the versions before and after it."""

    selection_id: int
    version_before: PolicyVersion | None
    """None: a batch without signal, which no learner saw."""
    version_after: PolicyVersion | None
    keys: tuple[RolloutKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """A member left the pool."""

    key: RolloutKey
    reason: RetireReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The run went on from a checkpoint: everything above `version` is void, what was in flight is lost."""

    version: PolicyVersion
    """Of the checkpoint."""
    lineage: int
    """From now on."""
    learning_rate_factor: float = 1.0
    """What rollbacks have multiplied the learning rate by, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken:
    """The run's state was read for a checkpoint of this version: it holds everything before this record."""

    version: PolicyVersion


Record = Reserved | Reported | Delivered | SentBack | WorkerLost | Consumed | Retired | Restored | StateTaken
_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in (Reserved, Reported, SentBack, WorkerLost, Consumed, Retired, Restored, StateTaken)}


class Journal(Protocol):
    """Keeps records in order. In a run a file with a thread of its own, in tests a list."""

    def append(self, record: Record) -> int:
        """Returns at once with the record's number; numbers rise. Raises RunDirectoryError once nothing can be written any more."""
        ...

    async def committed(self) -> None:
        """Returns when everything appended so far would survive the death of this process."""
        ...

    async def checkpointed(self, name: str, state: Mapping[str, Any]) -> None:
        """The checkpoint of this name is durable but for `state`, the run's state as of the moment it was taken: keeps it beside it.
        Records that no kept checkpoint needs may go."""
        ...


def record_to_json(record: Record) -> tuple[str, str]:
    """(kind, text) of any record but Delivered, whose payload stays bytes."""
    return type(record).__name__.lower(), json.dumps(_plain(asdict(record)), separators=(",", ":"))


def record_from_json(kind: str, text: str) -> Record:
    values = json.loads(text)
    if "task" in values:
        values["task"], values["place"] = Task(**values["task"]), SourcePlace(*values["place"])
    if "key" in values:
        values["key"] = RolloutKey(*values["key"])
    if "keys" in values:
        values["keys"] = tuple(RolloutKey(*key) for key in values["keys"])
    if "reason" in values:
        values["reason"] = RetireReason(values["reason"])
    for name in ("version", "version_before", "version_after"):
        if values.get(name) is not None:
            values[name] = PolicyVersion(*values[name])
    record: Record = _KINDS[kind](**values)
    return record


def summary_to_json(summary: TrajectorySummary) -> str:
    return json.dumps(_plain(asdict(summary)), separators=(",", ":"))


def summary_from_json(text: str) -> TrajectorySummary:
    values = json.loads(text)
    values["key"] = RolloutKey(*values["key"])
    values["end_reason"] = EndReason(values["end_reason"])
    values["versions"] = tuple(VersionCount(**{**count, "version": PolicyVersion(*count["version"])}) for count in values["versions"])
    return TrajectorySummary(**values)


def _plain(value: Any) -> Any:
    """asdict rebuilds named tuples; JSON wants lists and texts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
