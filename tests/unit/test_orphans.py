"""A process ends with another one, also where no thread of it can run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel sends signals for a pipe on Linux only")
LIMIT_SECONDS = 60.0
HOLDS_THE_INTERPRETER = "ctypes.PyDLL(None).sleep(1000)"
"""A call into C that lets no other thread of the interpreter run."""


def started(pipe: int, *lines: str) -> subprocess.Popen[str]:
    code = "\n".join(["import ctypes, os, subprocess, sys", "from headrace.orphans import end_with", *lines])
    return subprocess.Popen([sys.executable, "-c", code], pass_fds=(pipe,), stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(LIMIT_SECONDS)
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_process_whose_interpreter_is_held_ends_when_the_last_writer_is_gone() -> None:
    reading, writing = os.pipe()
    process = started(reading, f"end_with({reading})", "print('up', flush=True)", HOLDS_THE_INTERPRETER)
    assert told(process) == "up\n" and process.poll() is None
    os.close(writing)
    os.close(reading)
    assert ended(process) == -signal.SIGKILL


def test_a_process_that_comes_too_late_ends_at_once() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    process = started(reading, f"end_with({reading})", HOLDS_THE_INTERPRETER)
    os.close(reading)
    assert ended(process) == -signal.SIGKILL


def test_a_group_ends_with_all_that_its_process_started() -> None:
    reading, writing = os.pipe()
    lines = ("os.setsid()", "child = subprocess.Popen(['sleep', '1000'])", f"end_with({reading}, group=True)", "print(child.pid, flush=True)")
    process = started(reading, *lines, HOLDS_THE_INTERPRETER)
    grandchild = psutil.Process(int(told(process)))
    os.close(writing)
    os.close(reading)
    assert ended(process) == -signal.SIGKILL
    _, alive = psutil.wait_procs([grandchild], timeout=LIMIT_SECONDS)
    assert not alive
