"""Ctrl-C in a command that is a process of its own: the first ends its work, later ones hasten that end and never cut it.

By itself Python dies of a Ctrl-C that comes while it cleans up after the last one, prints what it has to say, or shuts down: what the
work had started stays behind, and the exit code names a signal. Calls in somebody else's process (`main([...])`) change nothing there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class _Interrupts:
    """What the next Ctrl-C does. One of a process, as signals are."""

    def __init__(self) -> None:
        self.installed = False
        self.held = False
        """Nobody is there yet to be told."""
        self.num_waiting = 0
        self.ending = False
        """The end is decided, and whoever decides it has been told."""
        self.cancel: Callable[[], object] | None = None
        """Cancels the work that runs in a loop."""
        self.num_cancelled = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.held:
            self.num_waiting += 1
        elif self.cancel is not None:
            self.num_cancelled += 1
            self.cancel()
        elif not self.ending:
            raise KeyboardInterrupt


_interrupts = _Interrupts()


def install() -> None:
    """For the process's entry point. Holds Ctrl-C back until `release`; one that is ignored (`headrace ... &` in a script) stays so."""
    _interrupts.installed = _interrupts.held = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupts.handle)


def release() -> None:
    """Whoever ends the command is there. Raises KeyboardInterrupt if there was a Ctrl-C before."""
    _interrupts.held = False
    if _interrupts.num_waiting and not _interrupts.ending:
        raise KeyboardInterrupt


def handler() -> Any:
    """Where a Ctrl-C goes that is to end the work."""
    return _interrupts.handle if _interrupts.installed else signal.default_int_handler


def absorb() -> None:
    """The end is decided: from now on a Ctrl-C does nothing."""
    _interrupts.ending = True


def ignore() -> None:
    """Nothing will be started any more, the interpreter shuts down. Before, a child would inherit this; a handler it does not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Python remembers a KeyboardInterrupt that once left an exec("text") (dataclasses has some), caught or not, and in the end kills itself
    # by SIGINT for it. The next exec makes it forget.
    exec("")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """asyncio.run; raises KeyboardInterrupt, too, but only when everything that the coroutine does at its end is done.

    Every Ctrl-C cancels it once more, which cuts what it waits for just then.
    """
    import asyncio

    if signal.getsignal(signal.SIGINT) != _interrupts.handle:
        return asyncio.run(coroutine)

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _interrupts.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        return await coroutine

    _interrupts.num_cancelled = 0
    try:
        with asyncio.Runner() as runner:
            try:
                return runner.run(cancellable())
            finally:
                _interrupts.cancel = lambda: None  # what the loop still ends is not the work
    except BaseException as error:
        # of a clean-up that was cut whatever may come; after one Ctrl-C another error is the work's own
        if _interrupts.num_cancelled > 1 or (_interrupts.num_cancelled and isinstance(error, asyncio.CancelledError)):
            _interrupts.ending = True
            raise KeyboardInterrupt from error
        raise
    finally:
        _interrupts.cancel = None
