"""Scripted runs that go back to a checkpoint by themselves, one life after another under one virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fakes.journal import MemoryJournal
from fakes.runs import RecordingLog, ScriptedRun
from headrace import clock
from headrace.checkpointing import Restore
from headrace.errors import HeadraceError, RollBackError, WorkerLostError, first_error
from headrace.events import ResumeCause
from headrace.restoration import Restoration, Return
from headrace.runtime.resumption import start_state
from headrace.types import PolicyVersion
from headrace.updates import Selection, UpdateResult

KILLED = "Process learner-0 was ended by signal SIGKILL in the middle of the run."


class Blow(NamedTuple):
    """What befalls the learner."""

    seconds: float
    """When, from the start of the run; one that comes between two lives hits the next."""
    how: str
    """`killed`; `hung`: no call is answered any more; `rolled_back`; `rolled_back_far`: to the oldest checkpoint there is."""


@dataclass
class Life:
    start: PolicyVersion
    base: Restore | None
    selections: list[Selection]
    """Of its learner, the last one perhaps not learned."""
    published: list[PolicyVersion]
    lines: list[dict[str, Any]]


@dataclass(kw_only=True)
class RestoredRun(ScriptedRun):
    """`lives` holds what each did; the fields of ScriptedRun are those of the last one."""

    blows: Sequence[Blow] = ()
    keeps_records: bool = True
    fails_to_start: int = 0
    """So many later lives end before they begin."""
    dies_at: int | None = None
    """Update that the learner dies over, each time."""
    roll_back_limit: int = 3
    lives: list[Life] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    told: RecordingLog = field(init=False)
    """What the restoration says."""

    async def run(self) -> None:
        self.told, self._left = RecordingLog(), sorted(self.blows)
        self.journal = MemoryJournal()
        self.journal.start = start_state(self.settings)
        restoration = Restoration(self.settings, self.told)

        async def live(back: Return | None) -> None:
            if back is not None:
                self.returns.append(back)
                if self.fails_to_start:
                    self.fails_to_start -= 1
                    raise WorkerLostError("sampler-0 did not come up")
                self._go_back(back)
            await self._live(restoration)

        await restoration.survive(live)

    def _go_back(self, back: Return) -> None:
        if back.newest_update is not None:
            numbers = [state["version"][1] for _, state in self.journal.states]
            keep = max((index for index, number in enumerate(numbers) if number <= back.newest_update), default=0)
            del self.journal.states[keep + 1 :]
        lost = back.cause is ResumeCause.LEARNER_LOST
        restore, self.start = self.journal.restore(copied=self.conductor.checkpoints.copied if lost else None)
        self.restore = replace(restore, rolled_back=back.cause is ResumeCause.ROLL_BACK)

    async def _live(self, restoration: Restoration) -> None:
        self.build()
        life = Life(self.start, self.restore, self.learner.selections, self.learner.published, self.log.lines)
        self.lives.append(life)
        conductor, learn = self.conductor, self.learner.learn

        async def learn_or_die(selection: Selection) -> UpdateResult:
            if self.learner.version.number + 1 == self.dies_at:
                raise WorkerLostError(KILLED)
            return await learn(selection)

        self.learner.learn = learn_or_die  # type: ignore[method-assign]
        restoration.took_up(reached=lambda: conductor.learner.version.number, can_go_back=lambda: self.keeps_records)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.run())
                befalling = group.create_task(self._befall())
                await conductor.run()
                befalling.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            self.log.close()

    async def _befall(self) -> None:
        while self._left:
            await asyncio.sleep(max(0.0, self._left[0].seconds - clock.now()))
            self._strike(self._left.pop(0).how)

    def _strike(self, how: str) -> None:
        if how == "hung":
            self.learner.learn_seconds = self.learner.publish_seconds = float("inf")
            return
        error: HeadraceError = WorkerLostError(KILLED)
        error.learner_lost = True
        if how != "killed":
            error = RollBackError(
                "the reward fell", learning_rate_factor=0.5, newest_update=0 if how == "rolled_back_far" else None, limit=self.roll_back_limit
            )
        raise error
