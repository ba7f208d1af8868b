"""Scripted runs whose workers die, hang and come back, in one loop under the virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fakes.rollouts import LoopUserCode, ScriptedSampler, scripted_worker
from fakes.runs import MemberTasks, ReplayableScriptedEnvironment, ScriptedRun
from headrace import clock
from headrace.errors import HeadraceError, WorkerLostError
from headrace.rollout.worker import RolloutWorkerCore
from headrace.supervision import Supervision
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, WorkerReport
from headrace.updates import WeightUpdate
from headrace.workers import Workers


class Death(NamedTuple):
    seconds: float
    """When, from the start of the run."""
    worker: int
    how: str
    """`killed`: what it had finished and not reported is lost; `killed_after_report`: that still arrives; `hung`: it says nothing more."""


class MortalWorker:
    """roles.RolloutWorker over one core after another."""

    def __init__(self, core: RolloutWorkerCore) -> None:
        self.name = core.name
        self.core = core
        self.how: str | None = None
        """How it died; None while it lives."""
        self._task: asyncio.Task[None] | None = None

    def live(self, core: RolloutWorkerCore, group: asyncio.TaskGroup) -> None:
        self.core, self.how = core, None
        self._task = group.create_task(core.run())

    def die(self, how: str) -> None:
        if self.how is None and self._task is not None and not self._task.done():
            self.how = how
            if how != "killed_after_report":
                self.core._finished.clear()
            self._task.cancel()

    async def start(self, requests: Sequence[RolloutRequest]) -> None:
        if self.how is None:
            await self.core.start(requests)

    async def next_report(self) -> WorkerReport:
        report = None
        with contextlib.suppress(WorkerLostError):
            report = await self.core.next_report()
        if self.how == "hung":
            await asyncio.Event().wait()
        if report is None or self.how == "killed":
            raise WorkerLostError(f"{self.name} was killed.")
        return report

    async def announce(self, update: WeightUpdate) -> None:
        if self.how is None:
            await self.core.announce(update)

    async def verify(self, keys: Sequence[RolloutKey]) -> None:
        if self.how is None:
            await self.core.verify(keys)

    async def forget(self, keys: Sequence[RolloutKey]) -> None:
        if self.how is None:
            await self.core.forget(keys)

    async def cancel(self, keys: Sequence[RolloutKey]) -> None:
        if self.how is None:
            await self.core.cancel(keys)

    async def stop(self) -> None:
        if self.how is None:
            await self.core.stop()


@dataclass(kw_only=True)
class MortalRun(ScriptedRun):
    """Workers die as `deaths` say; a successor is up `restart_seconds` after it was asked for, with the weights that the run began with."""

    deaths: Sequence[Death] = ()
    restart_seconds: float = 0.6
    fail_restart: Callable[[int], HeadraceError | None] = lambda number: None
    """What the so-manyth restart of the run raises."""
    restarts: list[tuple[float, str]] = field(default_factory=list)
    mortals: list[MortalWorker] = field(init=False)

    def build(self) -> None:
        super().build()
        self.mortals = [MortalWorker(core) for core in self.workers]
        conductor = self.conductor
        conductor.workers = Workers(self.mortals, conductor.learner.version)
        conductor._supervision = Supervision(self.settings, self.log, conductor.waits, self._restart)

    async def run(self) -> None:
        self.build()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for mortal in self.mortals:
                    mortal.live(mortal.core, group)
                dying = group.create_task(self._die())
                await self.conductor.run()
                dying.cancel()
                for mortal in self.mortals:
                    mortal.die("killed")
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        finally:
            self.log.close()

    async def _die(self) -> None:
        for death in sorted(self.deaths):
            await asyncio.sleep(max(0.0, death.seconds - clock.now()))
            self.mortals[death.worker % len(self.mortals)].die(death.how)

    async def _restart(self, name: str) -> None:
        self.restarts.append((clock.now(), name))
        mortal = next(each for each in self.mortals if each.name == name)
        mortal.die("killed")
        number = len(self.restarts)
        await asyncio.sleep(self.restart_seconds)
        if (error := self.fail_restart(number)) is not None:
            raise error
        first = self.samplers[0]
        sampler = ScriptedSampler(
            max_running=self.max_running, seconds_per_token=self.seconds_per_token, apply_seconds=self.apply_seconds, weights=first.weights,
            action_tokens=first._action_tokens, applies=self.applies, fail=self.fail, reject=self.reject,
        )  # fmt: skip
        sampler._version = PolicyVersion(0, 0)
        self.samplers.append(sampler)
        core = scripted_worker(sampler, name=name, settings=self.settings, user_code=LoopUserCode(make_environment=ReplayableScriptedEnvironment))
        self._note_starts(core, self._member_tasks)
        mortal.live(core, self._group)

    def _note_starts(self, worker: RolloutWorkerCore, member_tasks: MemberTasks) -> None:
        self._member_tasks = member_tasks
        super()._note_starts(worker, member_tasks)
