"""A run goes back to a checkpoint and on from there, inside the same run: its learner was lost, or a rollback was asked for (DESIGN section 9).

One path for both, and the one that `headrace resume` takes: whatever the runtime holds of the run ends, a checkpoint is chosen, and a new
conductor with new roles goes on from it under the next lineage, as from a run that had ended. The runtime's part is `live`: one life.

When it is given up: the learner may be lost limits.max_restarts times within limits.restart_window_seconds, and as often in a row without an
update that had not been reached before (a batch that kills it each time comes at any pace); rollbacks in a row as often as they say themselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace import events as ev
from headrace.clock import now
from headrace.config import Settings
from headrace.errors import DivergedError, HeadraceError, RollBackError, WaitTimeoutError, WorkerLostError
from headrace.roles import EventSink
from headrace.supervision import BACK_OFF_SECONDS, MAX_BACK_OFF_SECONDS

LEARNER = "learner"
"""Who is lost, in events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """Why the run goes back, and how."""

    cause: ev.ResumeCause
    reason: str
    """For people."""
    since_seconds: float
    """When the life before ended."""
    learning_rate_factor: float = 1.0
    newest_update: int | None = None
    """See RollBackError."""


Live = Callable[[Return | None], Awaitable[None]]
"""One life: from the start of the run, or from what the return says. Calls `Restoration.took_up` once its conductor is made."""


class Restoration:
    def __init__(self, settings: Settings, events: EventSink) -> None:
        self._limits = settings.limits
        self._events = events
        self._reached: Callable[[], int] | None = None
        self._can_go_back: Callable[[], bool] = lambda: False
        self._furthest = -1
        self._in_a_row: Counter[ev.ResumeCause] = Counter()
        """Without an update that had not been reached before."""
        self._losses: deque[float] = deque()

    async def survive(self, live: Live) -> None:
        """Lives on until a life ends well. Raises what no restore cures, and what came once too often."""
        back: Return | None = None
        while True:
            self._reached = None
            try:
                return await live(back)
            except HeadraceError as error:
                back = self._return(error, back)
            await asyncio.sleep(min(MAX_BACK_OFF_SECONDS, BACK_OFF_SECONDS * 2 ** (self._in_a_row.total() - 1)))

    def took_up(self, *, reached: Callable[[], int], can_go_back: Callable[[], bool]) -> None:
        """From now on an end of the life is a loss. `reached`: the learner's update; `can_go_back`: something has been saved."""
        self._reached, self._can_go_back = reached, can_go_back

    def _return(self, error: HeadraceError, before: Return | None) -> Return:
        if self._reached is None:  # a life that did not begin: the first one's error is the run's, a role lost over a later one another loss
            if before is None or not isinstance(error, WorkerLostError | WaitTimeoutError):
                raise error
            self._count(ev.ResumeCause.LEARNER_LOST, self._furthest)
            self._check_loss(error)
            return before
        rollback = error if isinstance(error, RollBackError) else None
        if rollback is None and not error.learner_lost:
            raise error
        cause = ev.ResumeCause.LEARNER_LOST if rollback is None else ev.ResumeCause.ROLL_BACK
        self._count(cause, self._reached())
        if not self._can_go_back():
            error.remedy = f"{error.remedy or ''} {_NOTHING_SAVED}".strip()
        if rollback is None:
            self._check_loss(error)
            return Return(cause=cause, reason=error.message, since_seconds=now())
        self._check_rollback(rollback)
        return Return(
            cause=cause, reason=error.message, since_seconds=now(),
            learning_rate_factor=rollback.learning_rate_factor, newest_update=rollback.newest_update,
        )  # fmt: skip

    def _count(self, cause: ev.ResumeCause, reached: int) -> None:
        if reached > self._furthest:
            self._in_a_row.clear()
        self._in_a_row[cause] += 1
        self._furthest = max(self._furthest, reached)

    def _check_rollback(self, error: RollBackError) -> None:
        rollbacks = self._in_a_row[ev.ResumeCause.ROLL_BACK]
        if rollbacks > error.limit:
            raise DivergedError(
                f"{rollbacks - 1} rollbacks in a row did not help. Now: {error.message}",
                remedy="Lower learner.learning_rate or pool.max_staleness, or start from an earlier checkpoint.",
            ) from error
        if not self._can_go_back():
            raise error

    def _check_loss(self, error: HeadraceError) -> None:
        """Says it in the log. Raises when it was one too many."""
        time, limits = now(), self._limits
        while self._losses and self._losses[0] <= time - limits.restart_window_seconds:
            self._losses.popleft()
        self._losses.append(time)
        recent, in_a_row = len(self._losses), self._in_a_row[ev.ResumeCause.LEARNER_LOST]
        again = self._can_go_back() and max(recent, in_a_row) <= limits.max_restarts
        self._events.emit(ev.RoleLost(role=LEARNER, error=str(error), rollouts=0, losses=max(recent, in_a_row), restarted=again))
        if again:
            return
        if not self._can_go_back() or max(recent, in_a_row) == 1:
            raise error
        often = f"{recent} times within {limits.restart_window_seconds:g} s"
        how = often if recent > limits.max_restarts else f"{in_a_row} times before it had made update {self._furthest + 1}"
        failure = WorkerLostError(
            f"the learner was lost {how} (limits.max_restarts = {limits.max_restarts}). The last time: {error.message}", remedy=error.remedy
        )
        failure.learner_lost = True
        raise failure from error


_NOTHING_SAVED = "The run cannot go back, because nothing of it was saved: set checkpoint.every_updates or checkpoint.every_seconds."
