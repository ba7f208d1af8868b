"""A child process that runs the user's plain `def` code: environments live in it by key, rewards and marks are computed in it.

The parent sends calls as they come; the child makes one after the other and answers in that order, so that neither waits for the
other's next turn. The oldest call without an answer is the one that runs: at its limit the parent kills the child. The child holds
nothing outside itself: it leads a process group of its own, so that whatever the user's code started dies with it, and the group ends as
soon as its parent is gone, also when it hangs in the user's code (the kernel kills it, see orphans.py; a thread waits for the end of the
socket as well). Pickles travel only between the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace import clock
from headrace.orphans import end_with
from headrace.recipe import RecipeCode
from headrace.rollout.user_call import UserCallError, describe_exception

_HEADER = struct.Struct("<QQ")
"""Bytes of the message, number of the call. Without bytes: that call need not be made any more. Number 0: there is no answer."""
_JOIN_SECONDS = 5.0


class UnsentCallError(UserCallError):
    """The process was lost before it began this call: nothing was done, it can be made again elsewhere."""


class _Lost(Exception):
    """In the future of a call: the process ended without an answer to it."""


@dataclass(slots=True, eq=False)
class _Call:
    """One that the child has been sent, and its answer to be."""

    number: int
    name: str
    limit_seconds: float
    answer: asyncio.Future[bytes]
    deadline: float = 0.0
    """On the loop's clock; counts from when the call before it was answered."""
    begun: bool = False


class UserProcess:
    """The parent's side. Starts its child with the first call."""

    def __init__(self, recipe: RecipeCode, *, environment: str | None, reward: str | None, startup_seconds: float) -> None:
        self._arguments = (recipe, environment, reward)
        self._startup_seconds = startup_seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._ours: socket.socket | None = None
        self._one_start = asyncio.Lock()
        self._starting: asyncio.Future[None] | None = None
        self._loading: _Call | None = None
        self._loaded = self._over = False
        self._connection: asyncio.Transport | None = None
        self._calls: deque[_Call] = deque()
        self._last_number = 0
        self._incoming = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._over_limit: _Call | None = None
        self.lost: str | None = None
        """Why it is gone; its environments went with it."""
        self.num_calls = 0
        """Calls that wait or run."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def call(self, message: tuple[Any, ...], *, name: str, limit_seconds: float) -> Any:
        """The value that the user's code returned. The limit counts from when the call begins, not while it queues.

        Raises UserCallError; over the limit the child is killed. Being cancelled leaves the child to finish a call that it has begun.
        """
        self.num_calls += 1
        try:
            if not self._loaded and self.lost is None:
                async with self._one_start:
                    if not self._loaded and self.lost is None:
                        await self._start()
            if self.lost is not None:
                raise UnsentCallError(f"{name}: its process was lost before the call: {self.lost}", retryable=True)
            return await self._answered(self._send(message, name, limit_seconds))
        finally:
            self.num_calls -= 1

    def tell(self, message: tuple[Any, ...]) -> None:
        """A message without an answer."""
        if self._connection is not None and self.lost is None:
            self._write(0, pickle.dumps(message))

    async def close(self) -> None:
        """Kills the child and all it started."""
        self.lost = self.lost or "the worker has ended"
        if self._starting is not None:
            await asyncio.shield(self._starting)
        self._end_now()
        await self._joined()

    async def _start(self) -> None:
        """Cancelled while the child starts or loads, it is taken up again by the next call."""
        if self._starting is None:
            self._ours, theirs = socket.socketpair()
            context = multiprocessing.get_context("forkserver")
            # daemon: an interpreter that exits without close() ends it instead of waiting for it
            self._process = context.Process(target=serve, args=(theirs, *self._arguments), name="headrace-user-code", daemon=True)
            self._starting = asyncio.get_running_loop().run_in_executor(None, _start_and_close, self._process, theirs)
        await asyncio.shield(self._starting)  # in a thread: the first process waits for the forkserver
        if self._loading is None:
            try:
                await asyncio.get_running_loop().create_connection(lambda: _Receiver(self), sock=self._ours)
            except BaseException:  # asyncio has closed the socket
                self.lost = "its start was interrupted"
                self._end_now()
                raise
            self._loading = self._send(("load",), "importing the recipe", self._startup_seconds)
        loading = self._loading
        await asyncio.wait([loading.answer])  # which leaves it alone when this is cancelled
        await self._answered(loading)
        self._loaded = True

    def _send(self, message: tuple[Any, ...], name: str, limit_seconds: float) -> _Call:
        try:
            payload = pickle.dumps(message)
        except Exception as error:
            raise UserCallError(f"{name}: its arguments cannot be sent to a process: {describe_exception(error)}") from error
        self._last_number += 1
        call = _Call(self._last_number, name, limit_seconds, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        if len(self._calls) == 1:
            self._begin_next()
        self._write(call.number, payload)
        return call

    async def _answered(self, call: _Call) -> Any:
        name = call.name
        try:
            payload = await call.answer
        except _Lost as lost:
            if not call.begun:
                raise UnsentCallError(f"{name}: its process was lost before the call: {self.lost}", retryable=True) from lost
            how = await self._how_it_ended()
            if self._over_limit is call:
                limit = f"{call.limit_seconds:g} s"
                raise UserCallError(f"{name} gave no answer in {limit} (rollout.max_environment_seconds): its process was killed") from lost
            raise UserCallError(f"{name}: its process {how} during the call") from lost
        except asyncio.CancelledError:
            if self.lost is None and not call.begun:
                self._write(call.number, b"")
            raise
        try:
            succeeded, value = pickle.loads(payload)
        except Exception as error:
            raise UserCallError(f"{name} returned something that cannot be read back: {describe_exception(error)}") from error
        if not succeeded:
            raise UserCallError(f"{name} raised {value}")
        return value

    def _write(self, number: int, payload: bytes) -> None:
        assert self._connection is not None
        self._connection.write(_HEADER.pack(len(payload), number) + payload)

    def connected(self, connection: asyncio.Transport) -> None:
        self._connection = connection

    def take(self, data: bytes) -> None:
        """Bytes of answers; they come in the order of the calls."""
        self._incoming += data
        read = 0
        while len(self._incoming) >= read + _HEADER.size:
            size, _ = _HEADER.unpack_from(self._incoming, read)
            end = read + _HEADER.size + size
            if len(self._incoming) < end:
                break
            call = self._calls.popleft()
            if not call.answer.done():  # its caller was cancelled
                call.answer.set_result(bytes(self._incoming[read + _HEADER.size : end]))
            read = end
        if read:
            del self._incoming[:read]
            self._begin_next()

    def disconnected(self) -> None:
        """The child is gone, or nobody hears it any more."""
        if self.lost is None:
            self.lost = f"it ended while {self._calls[0].name} ran" if self._calls else "it ended"
        told = self._calls and not self._calls[0].answer.done()
        self._fail_calls()
        if not told:  # whoever made the call that ran looks first how the child ended
            self._end_now()

    def _begin_next(self) -> None:
        """The child takes the oldest call; its time runs from now."""
        if not self._calls:
            return
        call = self._calls[0]
        call.begun, call.deadline = True, clock.now() + call.limit_seconds
        if self._timer is None or self._timer.when() > call.deadline:
            self._set_timer(call.deadline)

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._look_at_time)

    def _look_at_time(self) -> None:
        """One timer for all calls, set again when it was an earlier call's. The loop has read what came before it looks at timers."""
        self._timer = None
        if not self._calls or self._over:
            return
        call = self._calls[0]
        if call.deadline > clock.now():
            self._set_timer(call.deadline)
            return
        self._over_limit = call
        self.lost = self.lost or f"{call.name} gave no answer in {call.limit_seconds:g} s (rollout.max_environment_seconds)"
        self._end_now()

    def _fail_calls(self) -> None:
        while self._calls:
            answer = self._calls.popleft().answer
            if not answer.done():
                answer.set_exception(_Lost())
                answer.exception()  # its caller may be gone

    async def _how_it_ended(self) -> str:
        """Waits until it has; ends it where it only does not talk any more."""
        assert self._process is not None
        killed = self._over
        try:
            await self._joined()
        finally:
            self._end_now()
        code = self._process.exitcode
        if killed:
            return "was killed"
        if code is None:
            await self._joined()
            return "closed its connection"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    async def _joined(self) -> None:
        if self._process is not None and self.pid is not None:
            await asyncio.to_thread(self._process.join, _JOIN_SECONDS)

    def _end_now(self) -> None:
        """Kills the child and what it started, and closes the connection. Once: its number may belong to another process later."""
        if self._over:
            return
        self._over = True
        if self._process is not None and self.pid is not None:
            self._process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.abort()
        elif self._ours is not None:
            self._ours.close()
        self._fail_calls()


class _Receiver(asyncio.Protocol):
    """What asyncio tells of the connection."""

    def __init__(self, owner: UserProcess) -> None:
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._owner.connected(transport)

    def data_received(self, data: bytes) -> None:
        self._owner.take(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.disconnected()


def _start_and_close(process: multiprocessing.process.BaseProcess, end: socket.socket) -> None:
    try:
        process.start()
    finally:
        end.close()


def serve(end: socket.socket, recipe: RecipeCode, environment: str | None, reward: str | None) -> None:
    """Runs in the child: answers each call until the parent is gone. Never returns."""
    os.setsid()  # Ctrl-C is the parent's business, and the group can be killed as a whole
    if (parent := multiprocessing.parent_process()) is not None:
        end_with(parent.sentinel, group=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back while the forkserver started; the user's code may want it
    os.dup2(2, 1)  # what the user's code prints is for people
    inbox = _Inbox()
    threading.Thread(target=_read_calls, args=(end, inbox), daemon=True).start()
    desk = _Desk(recipe, environment, reward)
    while True:
        number, call = inbox.calls.get()
        payload = _answer(desk, call) if inbox.is_wanted(number) else b""
        if number == 0:
            continue
        try:
            end.sendall(_HEADER.pack(len(payload), number) + payload)
        except OSError:
            _end_group()


class _Inbox:
    """Calls in their order, filled by a thread."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._unwanted: set[int] = set()

    def put(self, number: int, call: bytes) -> None:
        """No bytes: take the call back, if it has not begun."""
        if call:
            self.calls.put((number, call))
        else:
            self._unwanted.add(number)

    def is_wanted(self, number: int) -> bool:
        """Of the next call. Asked once each."""
        if not self._unwanted:
            return True
        wanted = number not in self._unwanted
        self._unwanted.difference_update([each for each in tuple(self._unwanted) if each <= number])
        return wanted


@dataclass(slots=True)
class _Desk:
    """What the child holds."""

    recipe: RecipeCode
    environment: str | None
    reward: str | None
    environments: dict[Any, Any] = field(default_factory=dict)
    snapshots: dict[Any, dict[int, Any]] = field(default_factory=dict)
    """By rollout and number; an exception in place of one that could not be taken."""
    runner: asyncio.Runner | None = None

    def load(self) -> None:
        for reference in (self.environment, self.reward):
            if reference is not None:
                self.recipe.resolve(reference)

    def reset(self, key: Any, task: Any) -> Any:
        assert self.environment is not None
        self.environments[key] = self.recipe.resolve(self.environment)()
        return self._finished(self.environments[key].reset(task))

    def step(self, key: Any, action: Any) -> Any:
        return self._finished(self.environments[key].step(action))

    def snapshot(self, key: Any, number: int) -> None:
        """Nobody waits for it: what it raises is raised by `restore`."""
        taken = self.snapshots.setdefault(key, {})
        try:
            taken[number] = self._finished(self.environments[key].snapshot())
        except Exception as error:
            taken[number] = error

    def restore(self, key: Any, number: int) -> None:
        snapshot = self.snapshots[key][number]
        if isinstance(snapshot, Exception):
            raise snapshot
        self._finished(self.environments[key].restore(snapshot))

    def drop(self, key: Any) -> None:
        self.environments.pop(key, None)
        self.snapshots.pop(key, None)

    def grade(self, task: Any, answer: str) -> Any:
        assert self.reward is not None
        return self._finished(self.recipe.resolve(self.reward)(task, answer))

    def mark(self, function: str, trajectory: Any) -> Any:
        weights = self._finished(self.recipe.resolve(function)(trajectory))
        return list(weights) if isinstance(weights, Iterator) else weights  # a generator cannot be sent

    def _finished(self, value: Any) -> Any:
        """An environment may mix plain and async methods."""
        if not inspect.isawaitable(value):
            return value
        if self.runner is None:
            self.runner = asyncio.Runner()
        return self.runner.run(_await(value))


async def _await(value: Any) -> Any:
    return await value


def _answer(desk: _Desk, call: bytes) -> bytes:
    try:
        kind, *arguments = pickle.loads(call)
        method: Callable[..., Any] = getattr(desk, kind)
        return pickle.dumps((True, method(*arguments)))
    except KeyboardInterrupt as error:
        return pickle.dumps((False, describe_exception(error)))
    except SystemExit as error:
        return pickle.dumps((False, f"SystemExit: it called exit({error.code})"))
    except BaseException as error:
        return pickle.dumps((False, describe_exception(error)))


def _read_calls(end: socket.socket, inbox: _Inbox) -> None:
    """However reading ends (closed, reset, cut in the middle of a message by a parent that was killed), the process ends with it."""
    try:
        with end.makefile("rb") as stream:
            while len(header := stream.read(_HEADER.size)) == _HEADER.size:
                size, number = _HEADER.unpack(header)
                call = stream.read(size)
                if len(call) < size:
                    return
                inbox.put(number, call)
    finally:
        _end_group()


def _end_group() -> None:
    """The parent is gone: end, whatever the user's code is doing, with all it started."""
    os.killpg(0, signal.SIGKILL)
