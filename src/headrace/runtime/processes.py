"""Role processes: starting them from a warm forkserver, talking to them, and ending every one of them.

A child ends by itself when the conductor is gone (the kernel kills it, see orphans.py; a thread watches as well), ignores Ctrl-C (the
conductor decides), and is killed when it does not stop in time. Nothing it holds has a name in the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import Any

from headrace.errors import HeadraceError, WorkerLostError, first_error
from headrace.orphans import end_with
from headrace.runtime.loading import STARTER
from headrace.runtime.wire import AsyncWire, BlockingWire

_THREAD_SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_PRELOADED = [
    "headrace.runtime.loading",
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
    "headrace.runtime.loaded",
]
"""What the forkserver loads once, so that every role process starts with torch and transformers in place."""


_GRACE_SECONDS = 2.0
"""For a process to be gone after its connection closed, for a start to end after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a role process: it is up."""

    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Sent now and then while an answer takes long: the process's loop still turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Last message of a role process, or the answer to a call that raised."""

    error: HeadraceError


def context() -> multiprocessing.context.ForkServerContext:
    """The forkserver context, with torch and transformers loaded on first use and threads held to one a process."""
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload(_PRELOADED)
    for key, value in {**_THREAD_SETTINGS, STARTER: f"{os.getpid()}:{_life_line(os.getpid())}"}.items():
        os.environ[key] = value
    return result


@functools.cache
def _life_line(pid: int) -> int:
    """Descriptor of a pipe that nobody but this process can write to, which ends with it; both ends stay open as long as it lives."""
    reading, _ = os.pipe()
    return reading


def refuse_start_while_importing() -> None:
    """Role processes import the program's script again. Raises HeadraceError where that import would start the next run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise HeadraceError("A role process imports this script again and would start another run.", remedy="Put the call under `if __name__ == '__main__':`.")


def start_process(process: multiprocessing.process.BaseProcess) -> None:
    """Starts it with Ctrl-C held back: the first start brings up the forkserver, which a Ctrl-C would end while it loads.

    Call it in a thread where the first start's seconds matter. What is forked inherits the mask: `let_ctrl_c_in` ends it there.
    """
    resource_tracker.ensure_running()  # by itself it would undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_forkserver() -> None:
    """Ends the forkserver and waits for it, for commands that leave nothing behind (I13). Killed: while it loads it hears nothing."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stop = getattr(server, "_stop", None)
    if stop is not None:
        stop()


class RoleProcess:
    """The conductor's side of one child, which `hello` starts."""

    def __init__(self, name: str, main: Callable[..., None], arguments: tuple[Any, ...], *, core: int | None, is_learner: bool = False) -> None:
        self.name = name
        self._is_learner = is_learner
        self._socket, self._theirs = socket.socketpair()
        self._process = context().Process(target=_child, args=(name, self._theirs, core, main, arguments), name=name, daemon=False)
        self._may_end = False
        self._receiving = False
        self._stopped = False
        self.fell_silent = False
        """It was lost without having said why: killed, most likely."""
        self.wire: AsyncWire | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def hello(self) -> dict[str, Any]:
        """Starts the process and waits until the role is up; returns what it says of itself."""
        await self._start()
        self.wire = await AsyncWire.open(self._socket)
        message = await self.receive()
        assert isinstance(message, Hello)
        return message.facts

    async def receive(self) -> Any:
        """The next message. Raises the child's own error, or WorkerLostError when it died without a word."""
        assert self.wire is not None
        self._receiving = True
        try:
            message = await self.wire.receive()
        except EOFError:
            raise await self._lost() from None
        finally:
            self._receiving = False
        if isinstance(message, Failed):
            message.error.learner_lost = self._is_learner and isinstance(message.error, WorkerLostError)
            raise message.error
        return message

    async def send(self, message: Any) -> None:
        assert self.wire is not None
        try:
            await self.wire.send(message)
        except ConnectionError:
            raise await self._lost() from None

    def post(self, message: Any) -> None:
        """Returns at once. What a process is told that has ended, or is not up yet, is lost; `receive` tells of the end."""
        if self.wire is not None:
            self.wire.post(message)

    def let_end(self) -> None:
        """From now on its end is no surprise."""
        self._may_end = True

    async def watch(self) -> None:
        """Waits for the process to end, and raises why when that is a surprise, also while nobody waits for an answer of it."""
        await self._ended()
        while not (self._receiving or self._may_end):  # whoever receives is told the same
            await self.receive()

    async def stop(self, limit_seconds: float) -> None:
        """Closes the connection, which tells the child to end; kills it when it does not, also when this is cancelled. Once is enough."""
        self.let_end()
        if self._stopped:
            return
        if self.wire is not None:
            self.wire.close()
        else:
            self._socket.close()
        self._theirs.close()
        if self._process.pid is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_seconds):
                    await self._ended()
        finally:
            if self._process.is_alive():
                self._process.kill()
            self._process.join()
            self._process.close()
            self._stopped = True

    async def _start(self) -> None:
        """In a thread: the first one waits for the forkserver to load. Cancelled meanwhile, it does not wait for that."""
        starting = asyncio.get_running_loop().run_in_executor(None, start_process, self._process)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda done: done.exception())  # nobody else asks for it
            try:
                await asyncio.wait([starting], timeout=_GRACE_SECONDS)
            finally:  # at once when cancelled again
                if not starting.done():
                    end_forkserver()
            await asyncio.wait([starting])
            raise
        self._theirs.close()

    async def _lost(self) -> WorkerLostError:
        self.fell_silent = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._ended()
        code = self._process.exitcode
        how = "closed its connection" if code is None else f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = WorkerLostError(f"Process {self.name} {how} in the middle of the run.", remedy="See its last lines on stderr; 'headrace doctor' checks memory.")
        error.learner_lost = self._is_learner
        return error

    async def _ended(self) -> None:
        """Returns when the process is gone. Several may wait: each on a descriptor of its own."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        sentinel = os.dup(self._process.sentinel)
        loop.add_reader(sentinel, done.set)
        try:
            await done.wait()
        finally:
            loop.remove_reader(sentinel)
            os.close(sentinel)


@contextlib.asynccontextmanager
async def watched(processes: Sequence[RoleProcess]) -> AsyncIterator[None]:
    """The body ends with the error of the first of these processes that ends by surprise, also one that nobody waits for just now."""
    try:
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(process.watch()) for process in processes]
            yield
            for watch in watches:
                watch.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def let_ctrl_c_in() -> None:
    """Undoes, in a forked process, what `start_process` held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _child(name: str, end: socket.socket, core: int | None, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs in the child: `main(end, *arguments)` owns the socket from its Hello on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    let_ctrl_c_in()
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_watch_parent, args=(parent.sentinel,), name="parent-watch", daemon=True).start()
    end_with(parent.sentinel)
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
    """The error to send home: the first HeadraceError inside, else, of a role that broke down, the exception named with its place."""
    error = first_error(error)
    if isinstance(error, HeadraceError):
        return error
    place = traceback.extract_tb(error.__traceback__)
    where = f" ({place[-1].filename}:{place[-1].lineno})" if place else ""
    traceback.print_exception(error)
    return WorkerLostError(f"{name}: {type(error).__name__}: {error}{where}")


def _watch_parent(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
