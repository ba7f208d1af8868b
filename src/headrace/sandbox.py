"""Runs a program that nobody has read, such as code that a model wrote, for a reward or a tool (docs/security.md). Linux.

    result = await run_python(answer, stdin="3 4", limits=SandboxLimits(seconds=2))
    reward = float(result.ok and result.stdout.strip() == "7")

A new process in its own session and empty directory, an empty environment, limits of time, memory, disk and processes; where the kernel
lets us, namespaces without network and of its own processes. What was in force is in the result; what was not is warned of once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import IO

from headrace.sandbox_launcher import remove_tree

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_GRACE_SECONDS = 5.0
"""For the start of the interpreter, before the program's own time begins to count."""
_CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 10.0
    """Wall time; processor time is limited to the next whole second."""
    memory_bytes: int = 512 * 2**20
    """Address space of each of its processes."""
    output_bytes: int = 2**20
    """Of stdout and stderr together; more ends it."""
    file_bytes: int = 2**24
    """Of each file that it writes."""
    total_memory_bytes: int = 2**30
    """Resident, of all its processes together, and of files in memory that they hold open without a name. Looked at 10 times a second
    (less often where that takes over a tenth of a core), so that it can be over for that long."""
    disk_bytes: int = 2**28
    """Of its directory in all, and of files there that it holds open without a name; a file takes at least 4 KiB. Looked at as often."""
    max_processes: int = 32
    """Of its user; the kernel does not apply it to root, who has a fork bomb until the time limit."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"SandboxLimits.{name} must be over 0, not {value!r}.")


class SandboxEnd(StrEnum):
    """Why a program ended."""

    EXITED = "exited"
    SECONDS = "seconds"
    """It was killed at its time limit."""
    OUTPUT = "output"
    """It was killed for writing too much to stdout and stderr."""
    DISK = "disk"
    """It was killed for what its directory held."""
    MEMORY = "memory"
    """It was killed for the memory of all its processes together; a single one over memory_bytes is refused more."""
    KILLED = "killed"
    """By a signal: its memory or processor time, or of itself."""
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protections:
    """What the kernel granted besides the limits."""

    network: bool = False
    """It had none."""
    processes: bool = False
    """Whatever it started has ended with it, also what left its session."""
    privileges: bool = False
    """It could gain none (set-user-id programs)."""
    number: bool = False
    """It could not start more than max_processes at a time."""
    proc: bool = False
    """/proc showed it its own processes only."""

    @property
    def missing(self) -> list[str]:
        texts = {"network": "network access is open", "processes": "processes that leave its session survive", "privileges": "it may gain privileges"}
        texts["number"] = "it may start any number of processes (run headrace as another user than root)"
        texts["proc"] = "it sees the machine's other processes in /proc"
        return [text for name, text in texts.items() if not getattr(self, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What became of a program. A failure is data: nothing is raised for what the program does."""

    end: SandboxEnd
    exit_code: int | None
    """None unless it exited."""
    stdout: str
    stderr: str
    protections: Protections

    @property
    def ok(self) -> bool:
        return self.end is SandboxEnd.EXITED and self.exit_code == 0


async def run_python(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs Python code with the standard library only. Cancelling it kills the program."""
    return await run_command([sys.executable, "-I", "-S", "-c", code], stdin=stdin, limits=limits)


async def run_command(command: list[str], *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Runs a program by its absolute path; no shell reads the command."""
    limits = limits or SandboxLimits()
    directory = tempfile.mkdtemp(prefix="headrace-sandbox-")
    try:
        return await _run(command, stdin, limits, directory)
    finally:  # in a thread: it may hold a hundred thousand files
        await asyncio.shield(asyncio.to_thread(remove_tree, directory))


def run_python_blocking(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """For a plain `def` reward, which runs in a process of its own anyway."""
    return asyncio.run(run_python(code, stdin=stdin, limits=limits))


async def _run(command: list[str], stdin: str, limits: SandboxLimits, directory: str) -> SandboxResult:
    told, tell = os.pipe()
    try:
        # no process of asyncio: it is reaped only when its whole session was killed, as its number could be another's afterwards
        process = subprocess.Popen(  # noqa: ASYNC220 (as quick as asyncio's own)
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(tell), json.dumps(asdict(limits)), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            cwd=directory, env={"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
            pass_fds=(tell,), start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        os.close(told)
        return SandboxResult(end=SandboxEnd.NOT_STARTED, exit_code=None, stdout="", stderr=str(error), protections=Protections())
    finally:
        os.close(tell)
    talk = _Talk(process, os.fdopen(told, "rb", buffering=0), limits.output_bytes)
    timed_out = False
    try:
        async with asyncio.timeout(limits.seconds + _GRACE_SECONDS):
            await talk.hold(stdin)
    except TimeoutError:
        timed_out = True
    finally:
        talk.kill()
        talk.close()
        await asyncio.shield(asyncio.to_thread(process.wait))
    protections, why, code = talk.told()
    if talk.too_much:
        end = SandboxEnd.OUTPUT
    elif why is not None:
        end = why
    elif timed_out:
        end = SandboxEnd.SECONDS
    else:
        end = SandboxEnd.KILLED if code < 0 else SandboxEnd.EXITED
    stdout, stderr = talk.texts()
    return SandboxResult(end=end, exit_code=code if end is SandboxEnd.EXITED else None, stdout=stdout, stderr=stderr, protections=protections)


class _Talk:
    """The pipes to and from a launcher and its program."""

    def __init__(self, process: subprocess.Popen[bytes], told: IO[bytes], output_bytes: int) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process, self._left = process, output_bytes
        self._pipes: list[IO[bytes]] = [process.stdin, process.stdout, process.stderr, told]
        self._open: list[asyncio.BaseTransport] = []
        self._stdout, self._stderr, self._told = bytearray(), bytearray(), bytearray()
        self.too_much = False

    async def hold(self, stdin: str) -> None:
        """Until all pipes are closed. What the launcher leaves behind in its session is killed when it ends: it may hold them open."""
        loop = asyncio.get_running_loop()
        readers = []
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._pipes[0])
        self._open.append(transport)
        for pipe in self._pipes[1:]:
            reader = asyncio.StreamReader()
            self._open.append((await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe))[0])
            readers.append(reader)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed(asyncio.StreamWriter(transport, protocol, None, loop), stdin.encode(errors="replace")))
            group.create_task(self._keep(readers[0], self._stdout))
            group.create_task(self._keep(readers[1], self._stderr))
            group.create_task(self._hear(readers[2]))

    def kill(self) -> None:
        """The whole session; its leader has not been reaped yet, so its number is nobody else's."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        for transport in self._open:
            transport.close()
        for pipe in self._pipes[len(self._open) :]:  # cancelled before they were
            pipe.close()

    def texts(self) -> tuple[str, str]:
        return self._stdout.decode(errors="replace"), self._stderr.decode(errors="replace")

    def told(self) -> tuple[Protections, SandboxEnd | None, int]:
        """What the launcher said: the protections, which limit ended the program, and its exit code (-signal), else the launcher's own."""
        protections, why, code = Protections(), None, self._process.returncode
        for line in bytes(self._told).decode().splitlines():
            if line.startswith("{"):
                protections = Protections(**json.loads(line))
                _warn(protections)
            elif line.removeprefix("-").isdigit():
                code = int(line)
            else:
                why = why or SandboxEnd(line)
        return protections, why, code

    async def _feed(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        try:
            writer.write(data)
            await writer.drain()
            writer.close()
        except ConnectionError:
            pass  # it does not read
        except asyncio.CancelledError:
            if not writer.transport.is_closing():
                writer.transport.abort()  # closing would wait until it reads
            raise

    async def _keep(self, reader: asyncio.StreamReader, kept: bytearray) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            kept += chunk[: self._left]
            self._left -= min(self._left, len(chunk))
            if self._left == 0 and not self.too_much:
                self.too_much = True
                self.kill()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            self._told += chunk
        self.kill()


_warned: set[Protections] = set()


def _warn(protections: Protections) -> None:
    if protections.missing and protections not in _warned:
        _warned.add(protections)
        logger.warning("SANDBOX: programs that nobody has read run here with less protection than usual: %s.", "; ".join(protections.missing))
