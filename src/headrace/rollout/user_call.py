"""Calls of the user's async code on the loop: a time limit, an error text that names what happened, and who blocks the loop.

The user's Python is not trusted to behave: whatever it does becomes a UserCallError with a text for people. It cannot be
killed on the loop, so a coroutine that computes or sleeps without `await` stops every rollout of the worker. That is measured
around each of its resumptions and named.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from time import perf_counter
from types import CoroutineType
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.roles import Environment
from headrace.rollout.rewind import Rewind, restore, rewind_of, take_snapshot
from headrace.types import Action, Observation, Outcome, Task

T = TypeVar("T")

BLOCKING_SECONDS = 0.25
"""One uninterrupted stretch of the user's code on the loop from which on it is named."""
MAX_ERROR_CHARACTERS = 600

logger = logging.getLogger(__name__)


class UserCallError(HeadraceError):
    """A call of the user's code failed; the message is complete. `retryable`: the rollout itself did nothing wrong."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(shorten(message))
        self.retryable = retryable


class CallWatch:
    """What the calls of a worker have in common: their time limit, and which of the user's coroutines held the loop."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.worst_seconds: dict[str, float] = {}
        """The worst stretch of each coroutine that held the loop."""
        self._waiting: dict[_Call, float] = {}
        """Calls that wait, with their deadlines. The limit is the same for all, so the oldest is due first, and one timer serves them all."""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, name: str, seconds: float) -> None:
        """It held the loop for at least BLOCKING_SECONDS."""
        if name not in self.worst_seconds:
            logger.warning("%s", blocking_text(name, seconds))
        self.worst_seconds[name] = max(seconds, self.worst_seconds.get(name, 0.0))

    def begin(self, call: _Call, loop: asyncio.AbstractEventLoop) -> None:
        """The call waits from now on, until `end` or until it is told to `expire`."""
        deadline = self._waiting[call] = loop.time() + self.limit_seconds
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._expire, loop)

    def end(self, call: _Call) -> None:
        del self._waiting[call]
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        time, self._timer = loop.time(), None
        for call, deadline in self._waiting.items():
            if deadline > time:
                self._timer = loop.call_at(deadline, self._expire, loop)
                return
            call.expire()

    def text(self) -> str | None:
        """For people; None when nothing blocked."""
        if not self.worst_seconds:
            return None
        name = max(self.worst_seconds, key=lambda name: self.worst_seconds[name])
        return blocking_text(name, self.worst_seconds[name])


def blocking_text(name: str, seconds: float) -> str:
    return f"{name} held the event loop for {seconds:.2f} s and stopped every rollout: use `await` for waits, or a plain `def` (it runs in its own process)"


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 4] + " ..."


def describe_exception(error: BaseException) -> str:
    """`ValueError: no such door (task.py:41 in step)`: type, message and the innermost place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({Path(f.filename).name}:{f.lineno} in {f.name})" for f in reversed(frames) if "headrace/rollout" not in f.filename), "")
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    return shorten(f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}")


async def call_on_loop(function: Callable[..., Awaitable[T]], *arguments: Any, name: str, watch: CallWatch) -> T:
    """Awaits the user's async function. Raises UserCallError for whatever it raises and after the watch's limit."""
    call = _Call(name, watch)
    try:
        if not call.begin(function, arguments):  # most environments answer at once: no limit for those
            await call
        answer: T = call.answer
        return answer
    except UserCallError:
        raise
    except TimeoutError as error:
        if not call.expired:
            raise UserCallError(f"{name} raised {describe_exception(error)}") from error
        raise UserCallError(f"{name} gave no answer in {watch.limit_seconds:g} s (rollout.max_environment_seconds)") from error
    except Exception as error:
        blocked = watch.worst_seconds.get(name)
        suffix = f"; {blocking_text(name, blocked)}" if blocked else ""
        raise UserCallError(f"{name} raised {describe_exception(error)}{suffix}") from error
    except SystemExit as error:
        raise UserCallError(f"{name} called exit({error.code})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # nobody cancelled the rollout: its task would end without a trajectory, and its member would be in flight for ever
        raise UserCallError(f"{name} raised {describe_exception(error)}: something that it awaited was cancelled") from error
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        raise UserCallError(f"{name} raised {describe_exception(error)}") from error


class LoopEnvironment:
    """A user's async environment, called on the loop."""

    def __init__(self, environment: Environment, *, watch: CallWatch) -> None:
        self._environment = environment
        self.name = type(environment).__name__
        self._step_name = f"{self.name}.step"
        self._watch = watch

    async def reset(self, task: Task) -> Observation:
        return await self._call("reset", self._environment.reset, task)

    def step(self, action: Action) -> Coroutine[Any, Any, Outcome | tuple[Observation | None, float, bool]]:
        return call_on_loop(self._environment.step, action, name=self._step_name, watch=self._watch)

    @property
    def rewind(self) -> Rewind:
        return rewind_of(self._environment)

    async def snapshot(self) -> Any:
        return await self._call("snapshot", take_snapshot, self._environment)

    async def restore(self, snapshot: Any) -> None:
        await self._call("restore", restore, self._environment, snapshot)

    async def _call(self, method: str, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await call_on_loop(function, *arguments, name=f"{self.name}.{method}", watch=self._watch)


class _Call:
    """Awaits a coroutine, measures each stretch in which it runs without giving the loop back, and ends it at its limit as asyncio.timeout would."""

    __slots__ = ("_cancelling", "_coroutine", "_expired", "_name", "_task", "_waited_for", "_watch", "answer")

    def __init__(self, name: str, watch: CallWatch) -> None:
        self._name = name
        self._watch = watch
        self._expired = False
        self._task: asyncio.Task[Any]
        self._cancelling = 0
        self.answer: Any = None
        """What the coroutine returned, once it has."""

    def begin(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> bool:
        """Runs the coroutine up to its first wait, in this task. True: there was none, it has answered."""
        started = perf_counter()
        awaitable = function(*arguments)
        self._coroutine: Coroutine[Any, Any, Any] = awaitable if type(awaitable) is CoroutineType else _as_coroutine(awaitable)
        return self._resume(started, None, None)

    @property
    def expired(self) -> bool:
        """It was cancelled at its limit."""
        return self._expired

    def expire(self) -> None:
        """Once: told so a second time, it would look as if somebody else had cancelled it."""
        if not self._expired:
            self._expired = True
            self._task.cancel()

    def __await__(self) -> Generator[Any, Any, None]:
        """Goes on from that first wait. Raises TimeoutError at the limit."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._watch.begin(self, loop)
        try:
            finished = False
            while not finished:
                value: Any = None
                error: BaseException | None = None
                try:
                    value = yield self._waited_for
                except BaseException as raised:
                    error = raised
                finished = self._resume(perf_counter(), value, error)
        except asyncio.CancelledError as error:
            if self._expired and self._task.cancelling() - 1 <= self._cancelling:  # nobody else cancelled it
                raise TimeoutError from error
            raise
        finally:
            self._watch.end(self)
            if self._expired:
                self._task.uncancel()

    def _resume(self, started: float, value: Any, error: BaseException | None) -> bool:
        try:
            self._waited_for = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
        except StopIteration as stop:
            self.answer = stop.value
            return True
        finally:
            seconds = perf_counter() - started
            if seconds >= BLOCKING_SECONDS:
                self._watch.note(self._name, seconds)
        return False


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
