"""What Ctrl-C and SIGTERM leave: the batch that the learner has is learned to its end and the run is saved, within a limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from headrace import events as ev
from headrace.checkpointing import Checkpoints
from headrace.clock import Waits
from headrace.errors import HeadraceError, WorkerLostError, first_error
from headrace.roles import EventSink, Learner
from headrace.supervision import blamed_on_learner
from headrace.types import PolicyVersion
from headrace.updates import Selection, UpdateResult, WeightUpdate

T = TypeVar("T")
_NOTICEABLE_SECONDS = 0.5
"""An end that takes longer is explained."""


class SteadyLearner:
    """Implements roles.Learner over another one, inside `calls`: a call whose caller is cancelled goes on, and the next one waits for it. So no
    answer gets lost on its way or into the wrong hands."""

    def __init__(self, learner: Learner, waits: Waits, limit_seconds: float) -> None:
        """`limit_seconds`: for a batch to be learned, and for weights to be published."""
        self._learner, self._waits, self._limit_seconds = learner, waits, limit_seconds
        self._group: asyncio.TaskGroup | None = None
        self._going: asyncio.Task[None] | None = None
        self._learned: tuple[Selection, asyncio.Future[UpdateResult]] | None = None

    @property
    def version(self) -> PolicyVersion:
        return self._learner.version

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[None]:
        """When it is left, a call that still goes on is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    yield
                finally:
                    if self._going is not None:
                        self._going.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def learn(self, selection: Selection) -> UpdateResult:
        await self._settled()
        answer = self._begun(lambda: self._learner.learn(selection))
        self._learned = selection, answer
        return await self._limited(asyncio.shield(answer), "conductor waits for the learner to learn a batch")

    async def result_of(self, selection: Selection) -> UpdateResult:
        """Of a batch whose call was cancelled, perhaps before it began."""
        await self._settled()
        if self._learned is not None and self._learned[0] is selection:
            return self._learned[1].result()
        return await self.learn(selection)

    async def publish(self) -> WeightUpdate:
        await self._settled()
        return await self._limited(asyncio.shield(self._begun(self._learner.publish)), "conductor waits for the learner to publish weights")

    async def save(self, directory: Path) -> None:
        await self._settled()
        await asyncio.shield(self._begun(lambda: self._learner.save(directory)))

    async def copy(self) -> int:
        await self._settled()
        return await asyncio.shield(self._begun(self._learner.copy))

    async def stop(self) -> None:
        await self._learner.stop()

    async def _limited(self, answer: Awaitable[T], name: str) -> T:
        return await blamed_on_learner(self._waits.limited(answer, name, self._limit_seconds))

    async def _settled(self) -> None:
        """No call goes on."""
        if self._going is not None:
            await asyncio.wait([self._going])

    def _begun(self, call: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        assert self._group is not None
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled caller does not ask for it
        self._going = self._group.create_task(_answered(call, answer))
        return answer


async def _answered(call: Callable[[], Awaitable[Any]], answer: asyncio.Future[Any]) -> None:
    try:
        result = await call()
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)


async def save_interrupted(
    limit_seconds: float,
    learner: SteadyLearner,
    checkpoints: Checkpoints,
    save: Callable[[], Awaitable[None]],
    events: EventSink,
    in_hand: Selection | None,
    learned: Callable[[Selection, UpdateResult], None],
) -> None:
    """Where something was learned since the last checkpoint: saves it and `in_hand`, which `learned` takes note of. Being cancelled cuts it."""
    if not limit_seconds or not checkpoints.behind:
        return
    saying = asyncio.get_running_loop().call_later(_NOTICEABLE_SECONDS, events.emit, ev.Interrupted(limit_seconds=limit_seconds))
    failure = None
    try:
        async with asyncio.timeout(limit_seconds):
            await checkpoints.written_down()  # one that was being saved is, or is not
            if in_hand is not None:
                learned(in_hand, await learner.result_of(in_hand))
            await save()
    except TimeoutError:
        failure = f"the learner did not answer within {limit_seconds:g} s (checkpoint.interrupt_seconds)"
    except HeadraceError as error:
        if not (error.learner_lost or isinstance(error, WorkerLostError)):  # then that is what ended the run
            failure = str(error)
    finally:
        saying.cancel()
    if failure is not None:
        events.emit(ev.Interrupted(limit_seconds=limit_seconds, failure=failure))
