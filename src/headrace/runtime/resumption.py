"""What a run in a directory can go on from: its newest whole checkpoint, or its start where it had saved none, and the journal since."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpointing import MemoryCopy, Restore
from headrace.clock import now
from headrace.conductor import Conductor
from headrace.config import Settings
from headrace.config_loading import ResolvedSettings, value_of
from headrace.errors import ConfigError, Problem
from headrace.events import ResumeCause, RunResumed, RunStarted
from headrace.manifest import find_damage
from headrace.pool.journal import Consumed
from headrace.pool.pool import ExperiencePool
from headrace.pool.restoring import pool_state
from headrace.restoration import Return
from headrace.runtime.hosts import LearnerStart
from headrace.runtime.journal import FILE, START, STATE_FILE, JournalRead, RunJournal, read_journal, read_state
from headrace.types import PolicyVersion

FIXED = ("model.path", "model.prepare", "model.architecture", "model.characters", "model.lora_rank", "run.seed", "rollout.group_size", "task.module")
"""Settings that a run keeps for its whole life: its weights, its random streams, the groups in its pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    checkpoint: Path | None
    """None: a copy in memory (`restore.copied`), or the weights that the run began with."""
    restore: Restore
    start: PolicyVersion
    """Of the learner."""
    next_record: int
    states: tuple[Mapping[str, Any], ...]
    """Of the checkpoints that are whole, oldest first."""
    passed_over: tuple[str, ...]
    """Newer checkpoints that are not whole, and why. They are renamed."""
    undone: tuple[str, ...] = ()
    """Newer checkpoints that a rollback leaves behind. They are renamed."""

    @property
    def learner_start(self) -> LearnerStart:
        copied = self.restore.copied
        return LearnerStart(
            place=self.checkpoint if copied is None else copied.version, lineage=self.start.lineage, learning_rate_factor=self.restore.learning_rate_factor
        )

    def event(self, started: RunStarted, conductor: Conductor, back: Return | None = None) -> RunResumed:
        """For the log; `started`: what a new run of these settings would say; `back`: why a run goes back by itself."""
        restored = conductor.restored
        assert restored is not None
        values = {field.name: getattr(started, field.name) for field in dataclasses.fields(started)}
        values |= {"lineage": self.start.lineage, "resumed_from_update": self.start.number}
        values |= {} if back is None else {"cause": back.cause, "reason": back.reason, "seconds": now() - back.since_seconds}
        consumed = [record.version_after for record in self.restore.records if isinstance(record, Consumed)]
        return RunResumed(
            **values,
            checkpoint="" if self.checkpoint is None else str(self.checkpoint),
            from_memory=self.restore.copied is not None,
            pooled=len(restored.pooled),
            void=restored.num_void,
            lost=restored.num_lost,
            again=len(restored.again),
            passed_over=list(self.passed_over),
            undone_updates=max((version.number for version in consumed if version is not None), default=self.start.number) - self.start.number,
            learning_rate_factor=self.restore.learning_rate_factor,
        )


def refuse_changes(before: Settings, resolved: ResolvedSettings) -> None:
    """Raises ConfigError for a setting that a run keeps for life. `before`: as in its config.toml."""
    problems = [
        Problem(
            key=key, value=value_of(resolved.settings, key), message=f"'{key}' cannot change when a run goes on.", remedy="Leave it out, or start a new run."
        )
        for key in FIXED
        if value_of(before, key) != value_of(resolved.settings, key)
    ]
    if problems:
        raise ConfigError(problems)


def find_resumption(directory: Path, settings: Settings, back: Return | None = None, copied: MemoryCopy | None = None) -> Resumption:
    """Raises ConfigError when there is nothing to go on from or nothing left to do, CheckpointError when the journal is damaged. `back`: why a
    run goes back by itself; then all may have been done, and a copy in memory that is newer than every checkpoint will do."""
    whole, undone, broken = _look_at(directory / "checkpoints", None if back is None else back.newest_update)
    newest = whole[-1][1] if whole else None
    if copied is not None and (back is None or back.cause is not ResumeCause.LEARNER_LOST or (whole and whole[-1][0] >= copied.version)):
        copied = None
    version: PolicyVersion
    checkpoint: Path | None
    state: Mapping[str, Any]
    if copied is not None:
        version, checkpoint, state = copied.version, None, copied.state
    elif whole:
        version, checkpoint, state = whole[-1]
    else:
        version, checkpoint, state = PolicyVersion(0, 0), None, start_state(settings)
    if version.number >= settings.run.num_updates and back is None:
        message = f"the run is at update {version.number}, and run.num_updates is {settings.run.num_updates}: nothing is left to do."
        remedy = f"Raise it to train on: run.num_updates={max(2 * version.number, 1)}."
        raise ConfigError([Problem(key="run.num_updates", value=settings.run.num_updates, limit=f"above {version.number}", message=message, remedy=remedy)])
    journal = read_journal(directory / FILE, state)
    if newest is None and copied is None and broken and not ((directory / FILE).exists() and journal.reaches_back):
        raise _nothing_whole(directory, broken)
    lineage, factor = _newest_lineage([*whole, *undone], journal)
    passed_over = [(path, why) for path, why in broken if newest is None or path.name > newest.name]
    return Resumption(
        checkpoint=checkpoint,
        restore=Restore(
            version=version,
            state=state,
            held=journal.held,
            records=journal.records,
            checkpoints=[path for _, path, _ in whole],
            learning_rate_factor=factor * (1.0 if back is None else back.learning_rate_factor),
            copied=copied,
            rolled_back=back is not None and back.cause is ResumeCause.ROLL_BACK,
        ),
        start=PolicyVersion(lineage + 1, version.number),
        next_record=journal.highest + 1,
        states=tuple(found for _, _, found in whole) or (START,),
        passed_over=tuple(f"{path.name}: {why}" for path, why in passed_over),
        undone=tuple(path.name for _, path, _ in undone),
    )


def open_journal(directory: Path, settings: Settings, resumption: Resumption | None) -> RunJournal:
    """Of a new run, or of one that goes on. Raises RunDirectoryError when it cannot be written."""
    checkpoint = settings.checkpoint
    return RunJournal(
        directory,
        directory / "checkpoints",
        first=1 if resumption is None else resumption.next_record,
        states=(START,) if resumption is None else resumption.states,
        keeps_records=bool(checkpoint.every_updates or checkpoint.every_seconds),
    )


def set_aside(directory: Path, resumption: Resumption) -> None:
    """Checkpoints that were passed over or undone get another name, so that nothing takes them for the run's newest. What was never whole goes."""
    for path in (directory / "checkpoints").glob(".update_*"):
        shutil.rmtree(path, ignore_errors=True)
    for text in (*resumption.passed_over, *resumption.undone):
        path = directory / "checkpoints" / text.partition(":")[0]
        shutil.rmtree(aside := path.with_name(f"unused_{path.name}"), ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(aside)


Found = tuple[PolicyVersion, Path, Mapping[str, Any]]


def _look_at(checkpoints: Path, newest_update: int | None) -> tuple[list[Found], list[Found], list[tuple[Path, str]]]:
    """(those that a run can go on from, oldest first; those left behind for an older one; the broken ones, and why).

    Of the whole ones only the newest has been read through. `newest_update`: see RollBackError.
    """
    whole: list[Found] = []
    broken: list[tuple[Path, str]] = []
    for path in sorted(checkpoints.glob("update_*")):
        state = _whole(path)
        if isinstance(state, str):
            broken.append((path, state))
        else:
            whole.append((PolicyVersion(*state["version"]), path, state))
    whole.sort(key=lambda one: one[0])
    while whole and (damage := find_damage(whole[-1][1])) is not None:
        broken.append((whole.pop()[1], damage))
    if newest_update is not None and len(whole) > 1 and whole[-1][0].number > newest_update:
        older = [one for one in whole if one[0].number <= newest_update] or whole[:1]
        while older and find_damage(older[-1][1]) is not None:
            older.pop()
        if older:
            return whole[: whole.index(older[-1]) + 1], whole[whole.index(older[-1]) + 1 :], broken
    return whole, [], broken


def _newest_lineage(found: Sequence[Found], journal: JournalRead) -> tuple[int, float]:
    """(the highest that there was, and what rollbacks had multiplied its learning rate by)."""
    lineages = [(0, 1.0), *((record.lineage, record.learning_rate_factor) for record in journal.restores)]
    for version, path, _ in found:
        learner = json.loads((path / "learner.json").read_text(encoding="utf-8"))
        lineages.append((version.lineage, float(learner.get("learning_rate_factor", 1.0))))
    return max(lineages, key=lambda one: one[0])


def _whole(path: Path) -> Mapping[str, Any] | str:
    """The state beside a checkpoint, or what is wrong with it at first sight."""
    try:
        state = read_state(path)
        if (damage := find_damage(path, sizes_only=True)) is not None:
            return damage
        learner = json.loads((path / "learner.json").read_text(encoding="utf-8"))
        if list(learner["version"]) != list(state["version"]):
            return f"learner.json is of version {learner['version']}, {STATE_FILE} of {state['version']}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read: {error}"
    return state


def start_state(settings: Settings) -> dict[str, Any]:
    """Of a run before its first rollout."""
    return {**START, "pool": pool_state(ExperiencePool(settings), ())}


def _nothing_whole(directory: Path, broken: list[tuple[Path, str]]) -> ConfigError:
    message = f"run '{directory}' holds no whole checkpoint: {'; '.join(f'{path.name}: {why}' for path, why in broken)}."
    remedy = f"Start it anew: headrace run {directory / 'config.toml'}; checkpoint.keep says how many checkpoints stay."
    return ConfigError([Problem(key="RUN", value=str(directory), limit="a run with a whole checkpoint", message=message, remedy=remedy)])
