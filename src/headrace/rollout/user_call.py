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


class BlockingWatch:
    """Remembers which of the user's coroutines held the loop, the worst stretch of each, in seconds."""

    def __init__(self) -> None:
        self.worst_seconds: dict[str, float] = {}

    def note(self, name: str, seconds: float) -> None:
        if seconds < BLOCKING_SECONDS:
            return
        if name not in self.worst_seconds:
            logger.warning("%s", blocking_text(name, seconds))
        self.worst_seconds[name] = max(seconds, self.worst_seconds.get(name, 0.0))

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


async def call_on_loop(function: Callable[..., Awaitable[T]], *arguments: Any, name: str, limit_seconds: float, watch: BlockingWatch) -> T:
    """Awaits the user's async function. Raises UserCallError for whatever it raises and after `limit_seconds`."""
    timeout: asyncio.Timeout | None = None
    try:
        call = _Watched(_as_coroutine(function, arguments), name, watch)
        if not call.begin():  # most environments answer at once: no timer for those
            async with asyncio.timeout(limit_seconds) as timeout:
                await call
        answer: T = call.answer
        return answer
    except UserCallError:
        raise
    except TimeoutError as error:
        if timeout is None or not timeout.expired():
            raise UserCallError(f"{name} raised {describe_exception(error)}") from error
        raise UserCallError(f"{name} gave no answer in {limit_seconds:g} s (rollout.max_environment_seconds)") from error
    except Exception as error:
        blocked = watch.worst_seconds.get(name)
        suffix = f"; {blocking_text(name, blocked)}" if blocked else ""
        raise UserCallError(f"{name} raised {describe_exception(error)}{suffix}") from error
    except SystemExit as error:
        raise UserCallError(f"{name} called exit({error.code})") from error


class LoopEnvironment:
    """A user's async environment, called on the loop."""

    def __init__(self, environment: Environment, *, limit_seconds: float, watch: BlockingWatch) -> None:
        self._environment = environment
        self.name = type(environment).__name__
        self._limit_seconds = limit_seconds
        self._watch = watch

    async def reset(self, task: Task) -> Observation:
        return await call_on_loop(self._environment.reset, task, name=f"{self.name}.reset", limit_seconds=self._limit_seconds, watch=self._watch)

    async def step(self, action: Action) -> Outcome | tuple[Observation | None, float, bool]:
        return await call_on_loop(self._environment.step, action, name=f"{self.name}.step", limit_seconds=self._limit_seconds, watch=self._watch)

    @property
    def rewind(self) -> Rewind:
        return rewind_of(self._environment)

    async def snapshot(self) -> Any:
        return await self._call("snapshot", take_snapshot, self._environment)

    async def restore(self, snapshot: Any) -> None:
        await self._call("restore", restore, self._environment, snapshot)

    async def _call(self, method: str, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await call_on_loop(function, *arguments, name=f"{self.name}.{method}", limit_seconds=self._limit_seconds, watch=self._watch)


class _Watched:
    """Awaits a coroutine and measures each stretch in which it runs without giving the loop back."""

    __slots__ = ("_coroutine", "_name", "_waited_for", "_watch", "answer")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str, watch: BlockingWatch) -> None:
        self._coroutine = coroutine
        self._name = name
        self._watch = watch
        self._waited_for: Any = None
        self.answer: Any = None
        """What the coroutine returned, once it has."""

    def begin(self) -> bool:
        """Runs the coroutine up to its first wait, in this task. True: there was none, it has answered."""
        return self._resume(None, None)

    def __await__(self) -> Generator[Any, Any, None]:
        """Goes on from that first wait."""
        finished = False
        while not finished:
            value: Any = None
            error: BaseException | None = None
            try:
                value = yield self._waited_for
            except BaseException as raised:
                error = raised
            finished = self._resume(value, error)

    def _resume(self, value: Any, error: BaseException | None) -> bool:
        started = perf_counter()
        try:
            self._waited_for = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
        except StopIteration as stop:
            self.answer = stop.value
            return True
        finally:
            self._watch.note(self._name, perf_counter() - started)
        return False


async def _as_coroutine(function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> Any:
    return await function(*arguments)
