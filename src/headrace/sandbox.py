"""Runs a program that nobody has read, such as code that a model wrote, for a reward or a tool (docs/security.md). Linux.

    result = await run_python(answer, stdin="3 4", limits=SandboxLimits(seconds=2))
    reward = float(result.ok and result.stdout.strip() == "7")

A new process in its own session and empty directory, an empty environment, limits of time, memory, file size and processes; where the
kernel lets us, namespaces without network and of its own processes. What was in force is in the result; what was not is warned of once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

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
    """It was killed for writing too much."""
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

    @property
    def missing(self) -> list[str]:
        texts = {"network": "network access is open", "processes": "processes that leave its session survive", "privileges": "it may gain privileges"}
        texts["number"] = "it may start any number of processes (run headrace as another user than root)"
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
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(_LAUNCHER), str(tell), json.dumps(asdict(limits)), *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            cwd=directory, env={"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8"},
            pass_fds=(tell,), start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        os.close(told)
        return SandboxResult(end=SandboxEnd.NOT_STARTED, exit_code=None, stdout="", stderr=str(error), protections=Protections())
    finally:
        os.close(tell)
    output = _Output(limits.output_bytes)
    end = SandboxEnd.EXITED
    try:
        async with asyncio.timeout(limits.seconds + _GRACE_SECONDS):
            await output.read(process, stdin)
            await process.wait()
    except TimeoutError:
        end = SandboxEnd.SECONDS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
        protections, timed_out = _told(told)
    code = process.returncode or 0
    if output.too_much:
        end = SandboxEnd.OUTPUT
    elif timed_out:
        end = SandboxEnd.SECONDS
    elif end is SandboxEnd.EXITED and code < 0:
        end = SandboxEnd.KILLED
    stdout, stderr = output.texts()
    return SandboxResult(end=end, exit_code=code if end is SandboxEnd.EXITED else None, stdout=stdout, stderr=stderr, protections=protections)


class _Output:
    """Both streams, up to a limit in all."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._streams: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self.too_much = False

    async def read(self, process: asyncio.subprocess.Process, stdin: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed(process.stdin, stdin))
            for stream, kept in zip((process.stdout, process.stderr), self._streams, strict=True):
                group.create_task(self._keep(stream, kept, process.pid))

    def texts(self) -> tuple[str, str]:
        stdout, stderr = (bytes(kept).decode(errors="replace") for kept in self._streams)
        return stdout, stderr

    async def _feed(self, writer: asyncio.StreamWriter, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # it does not read
            writer.write(text.encode(errors="replace"))
            await writer.drain()
            writer.close()

    async def _keep(self, stream: asyncio.StreamReader, kept: bytearray, pid: int) -> None:
        while chunk := await stream.read(_CHUNK_BYTES):
            kept += chunk[: self._left]
            self._left -= min(self._left, len(chunk))
            if self._left == 0 and not self.too_much:
                self.too_much = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def _told(told: int) -> tuple[Protections, bool]:
    """What the launcher said: the protections, and whether the time limit ended the program."""
    os.set_blocking(told, False)
    with open(told, "rb") as pipe:
        lines = (pipe.read() or b"").splitlines()
    if not lines:
        return Protections(), False
    protections = Protections(**json.loads(lines[0]))
    _warn(protections)
    return protections, b"seconds" in lines[1:]


_warned: set[Protections] = set()


def _warn(protections: Protections) -> None:
    if protections.missing and protections not in _warned:
        _warned.add(protections)
        logger.warning("SANDBOX: programs that nobody has read run here with less protection than usual: %s.", "; ".join(protections.missing))
