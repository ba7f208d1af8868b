"""Role processes: starting them from a warm forkserver, talking to them, and ending every one of them.

A child ends by itself when its parent is gone, ignores Ctrl-C (the conductor decides), and is killed when it does not stop in
time. Nothing it holds has a name in the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from headrace.errors import HeadraceError, WorkerLostError, first_error
from headrace.runtime.wire import AsyncWire, BlockingWire

_THREAD_SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_PRELOADED = [
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    "headrace.learner.core",
    "headrace.learner.warm_start",
    "headrace.sampler.transformers_sampler",
    "headrace.weights.shared_memory",
    "headrace.rollout.worker",
    "headrace.rollout.evaluation",
    "headrace.runtime.hosts",
]
"""What the forkserver loads once, so that every role process starts with torch and transformers in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a role process: it is up."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Last message of a role process, or the answer to a call that raised."""

    error: HeadraceError


def context() -> multiprocessing.context.ForkServerContext:
    """The forkserver context, with torch and transformers loaded on first use and threads held to one a process."""
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload(_PRELOADED)
    for key, value in _THREAD_SETTINGS.items():
        os.environ[key] = value
    return result


def refuse_start_while_importing() -> None:
    """Role processes import the program's script again. Raises HeadraceError where that import would start the next run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise HeadraceError("A role process imports this script again and would start another run.", remedy="Put the call under `if __name__ == '__main__':`.")


def end_forkserver() -> None:
    """Ends the forkserver and waits for it, for commands that leave nothing behind (I13); it would end by itself soon after us."""
    from multiprocessing import forkserver

    stop = getattr(forkserver._forkserver, "_stop", None)
    if stop is not None:
        stop()


class RoleProcess:
    """The conductor's side of one child."""

    def __init__(self, name: str, main: Callable[..., None], arguments: tuple[Any, ...], *, core: int | None) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = context().Process(target=_child, args=(name, theirs, core, main, arguments), name=name, daemon=False)
        self._process.start()
        theirs.close()
        self.wire: AsyncWire | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def hello(self) -> dict[str, Any]:
        """Waits until the role is up; returns what it says of itself."""
        self.wire = await AsyncWire.open(self._socket)
        message = await self.receive()
        assert isinstance(message, Hello)
        return message.facts

    async def receive(self) -> Any:
        """The next message. Raises the child's own error, or WorkerLostError when it died without a word."""
        assert self.wire is not None
        try:
            message = await self.wire.receive()
        except EOFError:
            raise await self._lost() from None
        if isinstance(message, Failed):
            raise message.error
        return message

    async def send(self, message: Any) -> None:
        assert self.wire is not None
        try:
            await self.wire.send(message)
        except ConnectionError:
            raise await self._lost() from None

    async def stop(self, limit_seconds: float) -> None:
        """Closes the connection, which tells the child to end; kills it when it does not."""
        if self.wire is not None:
            await self.wire.close()
        else:
            self._socket.close()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await _ended(loop, self._process.sentinel)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()

    async def _lost(self) -> WorkerLostError:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await _ended(asyncio.get_running_loop(), self._process.sentinel)
        code = self._process.exitcode
        how = "closed its connection" if code is None else f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerLostError(f"Process {self.name} {how} in the middle of the run.", remedy="See its last lines on stderr; 'headrace doctor' checks memory.")


async def _ended(loop: asyncio.AbstractEventLoop, sentinel: int) -> None:
    done = asyncio.Event()
    loop.add_reader(sentinel, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(sentinel)


def _child(name: str, end: socket.socket, core: int | None, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs in the child: `main(end, *arguments)` owns the socket from its Hello on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
    try:
        main(end, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the conductor closed the connection: the ordinary end
    except BaseException as error:
        failure = as_headrace_error(error, name)
        with contextlib.suppress(OSError):
            BlockingWire(end).send(Failed(error=failure))
    os._exit(0)  # skips interpreter shutdown: seconds with torch loaded, and nothing here needs it


def as_headrace_error(error: BaseException, name: str) -> HeadraceError:
    """The error to send home: the first HeadraceError inside, else the exception named with its place."""
    error = first_error(error)
    if isinstance(error, HeadraceError):
        return error
    place = traceback.extract_tb(error.__traceback__)
    where = f" ({place[-1].filename}:{place[-1].lineno})" if place else ""
    traceback.print_exception(error)
    return HeadraceError(f"{name}: {type(error).__name__}: {error}{where}")


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
