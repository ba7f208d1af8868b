"""A child process that runs the user's plain `def` code: environments live in it by key, rewards are computed in it.

The parent sends one call at a time and can kill the child at the call's limit. The child holds nothing outside itself: it leads a
process group of its own, so that whatever the user's code started dies with it, and it ends as soon as its parent is gone,
also when it hangs in the user's code (a thread waits for the end of the socket). Pickles travel only between the two.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace import clock
from headrace.recipe import RecipeCode
from headrace.rollout.user_call import UserCallError, describe_exception

_SIZE = struct.Struct("<Q")
_JOIN_SECONDS = 5.0


class UnsentCallError(UserCallError):
    """The process was lost before this call reached it: nothing was done, it can be made again elsewhere."""


class UserProcess:
    """The parent's side. Starts its child with the first call."""

    def __init__(self, recipe: RecipeCode, *, environment: str | None, reward: str | None, startup_seconds: float) -> None:
        self._arguments = (recipe, environment, reward)
        self._startup_seconds = startup_seconds
        self._process: multiprocessing.process.BaseProcess | None = None
        self._starting: asyncio.Future[None] | None = None
        self._ours: socket.socket | None = None
        self._loaded = False
        self._over = False
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._one_call = asyncio.Lock()
        self._incoming_size: int | None = None
        self._abandoned: tuple[str, float] | None = None
        """Name and deadline of a call whose caller was cancelled: its answer is still to come."""
        self.lost: str | None = None
        """Why it is gone; its environments went with it."""
        self.num_calls = 0
        """Calls that wait or run."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def call(self, message: tuple[Any, ...], *, name: str, limit_seconds: float) -> Any:
        """The value that the user's code returned. The limit counts from when the call begins, not while it queues.

        Raises UserCallError; over the limit the child is killed. Being cancelled leaves the child to finish the call.
        """
        self.num_calls += 1
        try:
            async with self._one_call:
                if self.lost is None and not self._loaded:
                    await self._start()
                if self.lost is None and self._abandoned is not None:
                    await self._finish_abandoned()
                if self.lost is not None:
                    raise UnsentCallError(f"{name}: its process was lost before the call: {self.lost}", retryable=True)
                return await self._exchange(message, name, limit_seconds)
        finally:
            self.num_calls -= 1

    def tell(self, message: tuple[Any, ...]) -> None:
        """A message without an answer."""
        if self._writer is not None and self.lost is None:
            self._write(message)

    async def close(self) -> None:
        """Kills the child and all it started."""
        await self._kill("the worker has ended")

    async def _start(self) -> None:
        """Cancelled while the child starts, it is taken up again by the next call."""
        if self._starting is None:
            self._ours, theirs = socket.socketpair()
            context = multiprocessing.get_context("forkserver")
            # daemon: an interpreter that exits without close() ends it instead of waiting for it
            self._process = context.Process(target=serve, args=(theirs, *self._arguments), name="headrace-user-code", daemon=True)
            self._starting = asyncio.get_running_loop().run_in_executor(None, _start_and_close, self._process, theirs)
        await asyncio.shield(self._starting)  # in a thread: the first process waits for the forkserver
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._ours)
        except BaseException:  # asyncio has closed the socket
            self.lost = "its start was interrupted"
            self._end_now()
            raise
        self._loaded = True
        await self._exchange(("load",), "importing the recipe", self._startup_seconds)

    async def _finish_abandoned(self) -> None:
        """Reads the answer that nobody waits for, or kills the child at that call's limit."""
        assert self._abandoned is not None
        name, deadline = self._abandoned
        try:
            async with asyncio.timeout_at(deadline):
                await self._receive()
            self._abandoned = None
        except TimeoutError:
            await self._kill(f"{name} gave no answer in its time")
        except EOFError:
            await self._kill(f"it ended while {name} ran")

    async def _exchange(self, message: tuple[Any, ...], name: str, limit_seconds: float) -> Any:
        deadline = clock.now() + limit_seconds
        try:
            self._write(message)
        except Exception as error:
            raise UserCallError(f"{name}: its arguments cannot be sent to a process: {describe_exception(error)}") from error
        try:
            async with asyncio.timeout_at(deadline):
                payload = await self._receive()
        except TimeoutError as error:
            await self._kill(f"{name} gave no answer in {limit_seconds:g} s")
            raise UserCallError(f"{name} gave no answer in {limit_seconds:g} s (rollout.max_environment_seconds): its process was killed") from error
        except EOFError as error:
            how = await self._kill(f"it ended while {name} ran")
            raise UserCallError(f"{name}: its process {how} during the call") from error
        except asyncio.CancelledError:
            self._abandoned = (name, deadline)
            raise
        try:
            succeeded, value = pickle.loads(payload)
        except Exception as error:
            raise UserCallError(f"{name} returned something that cannot be read back: {describe_exception(error)}") from error
        if not succeeded:
            raise UserCallError(f"{name} raised {value}")
        return value

    def _write(self, message: tuple[Any, ...]) -> None:
        assert self._writer is not None
        payload = pickle.dumps(message)
        self._writer.write(_SIZE.pack(len(payload)) + payload)

    async def _receive(self) -> bytes:
        """One message; being cancelled in the middle loses nothing. EOFError when the child is gone."""
        assert self._reader is not None
        try:
            if self._incoming_size is None:
                (self._incoming_size,) = _SIZE.unpack(await self._reader.readexactly(_SIZE.size))
            payload = await self._reader.readexactly(self._incoming_size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error
        self._incoming_size = None
        return payload

    async def _kill(self, reason: str) -> str:
        """Ends the child for good; returns how it had ended."""
        self.lost = self.lost or reason
        if self._starting is not None:
            await asyncio.shield(self._starting)
        how = "was killed"
        try:
            if self._reader is not None and self._reader.at_eof():
                how = await self._how_it_ended()
        finally:
            self._end_now()
        if self._process is not None and self.pid is not None:
            await asyncio.to_thread(self._process.join, _JOIN_SECONDS)
        return how

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        await asyncio.to_thread(self._process.join, _JOIN_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def _end_now(self) -> None:
        """Kills the child and what it started, and closes the connection. Once: its number may belong to another process later."""
        if self._over:
            return
        self._over = True
        if self._process is not None and self.pid is not None:
            self._process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.close()
        elif self._ours is not None:
            self._ours.close()


def _start_and_close(process: multiprocessing.process.BaseProcess, end: socket.socket) -> None:
    try:
        process.start()
    finally:
        end.close()


def serve(end: socket.socket, recipe: RecipeCode, environment: str | None, reward: str | None) -> None:
    """Runs in the child: answers each call until the parent is gone. Never returns."""
    os.setsid()  # Ctrl-C is the parent's business, and the group can be killed as a whole
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back while the forkserver started; the user's code may want it
    os.dup2(2, 1)  # what the user's code prints is for people
    inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(end, inbox), daemon=True).start()
    desk = _Desk(recipe, environment, reward)
    while True:
        kind, *arguments = inbox.get()
        if kind == "drop":
            desk.environments.pop(arguments[0], None)
            continue
        payload = _answer(desk, kind, arguments)
        try:
            end.sendall(_SIZE.pack(len(payload)) + payload)
        except OSError:
            _end_group()


@dataclass(slots=True)
class _Desk:
    """What the child holds."""

    recipe: RecipeCode
    environment: str | None
    reward: str | None
    environments: dict[Any, Any] = field(default_factory=dict)
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

    def grade(self, task: Any, answer: str) -> Any:
        assert self.reward is not None
        return self._finished(self.recipe.resolve(self.reward)(task, answer))

    def _finished(self, value: Any) -> Any:
        """An environment may mix plain and async methods."""
        if not inspect.isawaitable(value):
            return value
        if self.runner is None:
            self.runner = asyncio.Runner()
        return self.runner.run(_await(value))


async def _await(value: Any) -> Any:
    return await value


def _answer(desk: _Desk, kind: str, arguments: list[Any]) -> bytes:
    method: Callable[..., Any] = getattr(desk, kind)
    try:
        return pickle.dumps((True, method(*arguments)))
    except KeyboardInterrupt as error:
        return pickle.dumps((False, describe_exception(error)))
    except SystemExit as error:
        return pickle.dumps((False, f"SystemExit: it called exit({error.code})"))
    except BaseException as error:
        return pickle.dumps((False, describe_exception(error)))


def _read_calls(end: socket.socket, inbox: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """However reading ends (closed, reset, cut in the middle of a message by a parent that was killed), the process ends with it."""
    try:
        with end.makefile("rb") as stream:
            while len(header := stream.read(_SIZE.size)) == _SIZE.size:
                inbox.put(pickle.loads(stream.read(_SIZE.unpack(header)[0])))
    finally:
        _end_group()


def _end_group() -> None:
    """The parent is gone: end, whatever the user's code is doing, with all it started."""
    os.killpg(0, signal.SIGKILL)
