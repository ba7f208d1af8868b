"""The workers as the conductor sees them: who is up and has room, which weights each uses, and who has which rollout.

What a lost worker had is given to the others at once; while nobody is up it is kept for the first that joins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.errors import WorkerLostError
from headrace.roles import RolloutWorker
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, WorkerReport
from headrace.updates import WeightUpdate


@dataclass(slots=True)
class WorkerState:
    """What the conductor knows of one worker."""

    worker: RolloutWorker
    version: PolicyVersion
    room: int = 0
    in_flight: int = 0
    longest_wait: str | None = None
    up: bool = True
    """False from its loss until its successor uses the newest weights."""
    rollouts: set[RolloutKey] = field(default_factory=set)
    """Given to it and not back."""

    @property
    def name(self) -> str:
        return self.worker.name

    def heard(self, report: WorkerReport) -> None:
        self.version, self.room, self.in_flight, self.longest_wait = report.version, report.room, report.in_flight, report.longest_wait

    def lose(self) -> tuple[RolloutKey, ...]:
        """What it had, in order."""
        lost = tuple(sorted(self.rollouts))
        self.up, self.room, self.in_flight, self.longest_wait = False, 0, 0, None
        self.rollouts.clear()
        return lost


class Workers:
    """All of a run's."""

    def __init__(self, workers: Sequence[RolloutWorker], version: PolicyVersion) -> None:
        self.states = {worker.name: WorkerState(worker, version) for worker in workers}
        self.newest: WeightUpdate | None = None
        """Published last."""
        self._kept: list[RolloutRequest] = []

    @property
    def up(self) -> list[WorkerState]:
        return [state for state in self.states.values() if state.up]

    def have_room(self) -> bool:
        return any(state.room > 0 for state in self.states.values())

    def oldest_version(self) -> PolicyVersion:
        """No worker samples with older weights; one that is not up will not, either. Never falls."""
        versions = [state.version for state in self.up]
        if not versions:
            assert self.newest is not None
            versions.append(self.newest.version)
        return min(versions)

    def longest_waits(self) -> list[str]:
        return [state.longest_wait for state in self.states.values() if state.longest_wait]

    async def give(self, requests: Sequence[RolloutRequest]) -> None:
        """Each to the worker with most room."""
        if not self.up:
            self._kept.extend(requests)
            return
        batches: dict[str, list[RolloutRequest]] = {}
        for request in requests:
            state = max(self.up, key=lambda state: state.room)
            state.room -= 1
            state.rollouts.add(request.key)
            batches.setdefault(state.name, []).append(request)
        for name, batch in batches.items():
            await self._start(self.states[name], batch)

    async def give_to(self, state: WorkerState, request: RolloutRequest) -> None:
        state.rollouts.add(request.key)
        await self._start(state, [request])

    async def _start(self, state: WorkerState, requests: Sequence[RolloutRequest]) -> None:
        """Those that it still has: others were given away when it was lost. What a lost one is told is lost with it; its next report says so."""
        with contextlib.suppress(WorkerLostError):
            await state.worker.start([request for request in requests if request.key in state.rollouts])

    async def announce(self, update: WeightUpdate) -> None:
        """Nobody waits for a sampler here."""
        self.newest = update
        for state in self.states.values():
            with contextlib.suppress(WorkerLostError):
                await state.worker.announce(update)

    async def taken_up(self, state: WorkerState) -> WorkerReport:
        """The first report of a successor that uses weights as new as the newest when it started, and none older than everybody else's."""
        assert self.newest is not None
        newest = self.newest
        await state.worker.announce(newest)
        while (report := await state.worker.next_report()).version < max(newest.version, self.oldest_version()):
            pass
        return report

    async def joined(self, state: WorkerState) -> None:
        """It is up again and gets what nobody could take."""
        state.up = True
        kept, self._kept = self._kept, []
        await self.give(kept)
