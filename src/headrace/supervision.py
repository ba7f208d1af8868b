"""Roles that are lost in the middle of a run and come back: when a loss ends the run, how long to wait before the next start.

A loss is a process that ended, broke down or gave no sign of life. Each role may be restarted limits.max_restarts times within
limits.restart_window_seconds, the first time after BACK_OFF_SECONDS, then after twice as long each time. One loss more ends the run with
its cause: whatever kills a role that often is no accident. A role that says what is wrong with the recipe or the model is not restarted.
The learner cannot be replaced by itself: the run goes back to a checkpoint with it (restoration.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace import events as ev
from headrace.clock import Waits, now
from headrace.config import Settings
from headrace.errors import HeadraceError, WaitTimeoutError, WorkerLostError
from headrace.roles import EventSink

BACK_OFF_SECONDS = 0.5
MAX_BACK_OFF_SECONDS = 30.0
_WATCHDOG_SECONDS = 10.0

Restart = Callable[[str], Awaitable[None]]
"""Ends what is left of a role, by name, and starts its successor; returns when that is up."""
T = TypeVar("T")


class Supervision:
    def __init__(self, settings: Settings, events: EventSink, waits: Waits, restart: Restart | None) -> None:
        """Without `restart` every loss ends the run."""
        self._limits = settings.limits
        self._events = events
        self._waits = waits
        self._restart = restart
        self._losses: dict[str, deque[float]] = {}
        self._lost_seconds: dict[str, float] = {}

    def lost(self, name: str, error: HeadraceError, *, rollouts: int = 0) -> None:
        """Notes a loss and its cause; `rollouts` were in flight. Raises it where it was one too many."""
        time, losses = now(), self._losses.setdefault(name, deque())
        while losses and losses[0] <= time - self._limits.restart_window_seconds:
            losses.popleft()
        losses.append(time)
        self._lost_seconds.setdefault(name, time)
        restarted = self._restart is not None and len(losses) <= self._limits.max_restarts
        self._events.emit(ev.RoleLost(role=name, error=str(error), rollouts=rollouts, losses=len(losses), restarted=restarted))
        if restarted:
            return
        if len(losses) == 1:
            raise error
        raise WorkerLostError(
            f"{name} was lost {len(losses)} times within {self._limits.restart_window_seconds:g} s (limits.max_restarts = "
            f"{self._limits.max_restarts}). The last time: {error.message}",
            remedy=error.remedy,
        ) from error

    async def restarted(self, name: str, take_up: Callable[[], Awaitable[T]]) -> T:
        """Waits, starts the successor and lets it take up its work, as often as it takes; what `take_up` returned. Call `lost` before."""
        while True:
            try:
                result = await self._waits.limited(
                    self._started(name, take_up),
                    f"conductor waits for {name} to be restarted",
                    MAX_BACK_OFF_SECONDS + self._limits.startup_seconds + self._limits.apply_seconds,
                )
            except (WorkerLostError, WaitTimeoutError) as error:
                self.lost(name, error)
            else:
                self._events.emit(ev.RoleRestarted(role=name, seconds=now() - self._lost_seconds.pop(name)))
                return result

    async def repeated(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """`work` of a role, from the start again whenever it is lost over it."""
        while True:
            try:
                return await work()
            except WorkerLostError as error:
                self.lost(name, error)
            await self.restarted(name, _nothing)

    async def _started(self, name: str, take_up: Callable[[], Awaitable[T]]) -> T:
        assert self._restart is not None
        await asyncio.sleep(min(MAX_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2 ** (len(self._losses[name]) - 1)))
        await self._restart(name)
        return await take_up()


async def blamed_on_learner(work: Awaitable[T]) -> T:
    """A loss or a time-out in `work` is the learner's."""
    try:
        return await work
    except (WorkerLostError, WaitTimeoutError) as error:
        error.learner_lost = True
        raise


async def watch_waits(waits: Waits, events: EventSink) -> None:
    """Writes down who waits for whom when it lasts."""
    while True:
        await asyncio.sleep(_WATCHDOG_SECONDS)
        long = [(name, round(seconds, 1)) for name, seconds in waits.current() if seconds >= _WATCHDOG_SECONDS]
        if long:
            events.emit(ev.Waiting(waits=long))


async def _nothing() -> None:
    """Its work is given to it by whoever asked."""
