"""Time and waiting. All of headrace reads time from the running loop, so a virtual loop makes any of it jump.

`run_virtual(main())` runs a coroutine under a clock that jumps from timer to timer: hours take milliseconds, the order of
events is reproducible, and a deadlock (nothing runnable, no timer) raises instead of hanging. The virtual loop knows no real
file descriptors or threads: touching one raises.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.errors import HeadraceError, WaitTimeoutError

T = TypeVar("T")


class VirtualDeadlockError(HeadraceError):
    """Under the virtual clock nothing can run and no timer is set."""


def now() -> float:
    """Seconds of the running loop's clock (monotonic, or virtual)."""
    return asyncio.get_running_loop().time()


class _JumpingSelector(selectors.BaseSelector):
    """Stands where the loop would wait for sockets: waiting moves the clock instead."""

    def __init__(self) -> None:
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlockError("nothing can run and no timer is set: every task waits for another one")
        self.time += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise RuntimeError("the virtual clock knows no file descriptors: use in-process roles")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise RuntimeError("the virtual clock knows no file descriptors: use in-process roles")

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time() jumps to the next timer as soon as nothing is runnable."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.time

    def _make_self_pipe(self) -> None:  # no thread can reach this loop, so nothing has to wake it
        pass

    def _close_self_pipe(self) -> None:
        pass

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if threading.current_thread() is threading.main_thread() and self.is_running():  # a signal handler's: asyncio cancels on Ctrl-C
            return self.call_soon(*args, **kwargs)
        raise RuntimeError("the virtual clock knows no threads: use in-process roles")

    def run_in_executor(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("the virtual clock knows no threads: use in-process roles")

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run under a virtual clock that starts at 0. Raises VirtualDeadlockError where a real run would hang."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def periodic_seconds(age_seconds: float) -> float:
    """Between two of the event log's periodic lines in a run of that age: a second in its first hour, then longer and longer, at most ten.
    So a weekend's log is about a tenth as long, and still says what goes on."""
    return min(10.0, max(1.0, age_seconds / 3600.0))


@dataclass(frozen=True, slots=True)
class Wait:
    name: str | Callable[[], str]
    since: float

    def text(self) -> str:
        return self.name if isinstance(self.name, str) else self.name()


class Waits:
    """Who waits for what, now. Every wait of the conductor goes through here: it has a name and a limit."""

    def __init__(self) -> None:
        self._current: dict[int, Wait] = {}
        self._next = 0

    async def limited(self, awaitable: Awaitable[T], name: str | Callable[[], str], limit_seconds: float | None, remedy: str | None = None) -> T:
        """Awaits under a name. Raises WaitTimeoutError naming who did not answer after `limit_seconds` (None: no limit)."""
        wait = Wait(name, now())
        self._next += 1
        index = self._next
        self._current[index] = wait
        try:
            async with asyncio.timeout(limit_seconds) as timeout:
                return await awaitable
        except TimeoutError as error:
            if limit_seconds is None or not timeout.expired():
                raise  # not ours
            raise WaitTimeoutError(f"{wait.text()}: no answer in {limit_seconds:g} s.", remedy=remedy) from error
        finally:
            del self._current[index]

    def current(self) -> list[tuple[str, float]]:
        """(name, seconds so far) of each wait, oldest first."""
        time = now()
        return [(wait.text(), time - wait.since) for wait in sorted(self._current.values(), key=lambda wait: wait.since)]
