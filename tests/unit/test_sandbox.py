"""Programs that nobody has read: what they can do in the sandbox, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace import sandbox
from headrace.sandbox import Protections, SandboxEnd, SandboxLimits, run_command, run_python_blocking

QUICK = SandboxLimits(seconds=1.0)


def test_a_program_reads_its_input_and_its_output_and_exit_code_come_back() -> None:
    result = run_python_blocking("import sys; print(int(input()) + 1); print('beside', file=sys.stderr)", stdin="41")
    assert (result.ok, result.stdout, result.stderr) == (True, "42\n", "beside\n")
    failed = run_python_blocking("raise SystemExit(3)")
    assert (failed.ok, failed.end, failed.exit_code) == (False, SandboxEnd.EXITED, 3)


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(1000)", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"]
)
def test_a_program_without_end_is_killed_at_its_limit(code: str) -> None:
    result = run_python_blocking(code, limits=QUICK)
    assert result.end in (SandboxEnd.SECONDS, SandboxEnd.KILLED)
    assert result.exit_code is None


def test_memory_over_the_limit_is_not_given() -> None:
    result = run_python_blocking("bytearray(2**31)")
    assert "MemoryError" in result.stderr and not result.ok


def test_endless_output_ends_the_program_and_is_kept_up_to_the_limit() -> None:
    result = run_python_blocking("while True: print('x' * 1000)", limits=SandboxLimits(output_bytes=5000))
    assert result.end is SandboxEnd.OUTPUT
    assert len(result.stdout) == 5000


def test_a_file_over_the_limit_is_not_written() -> None:
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('big', 'wb').write(bytes(10**6))"
    assert "File too large" in run_python_blocking(code, limits=SandboxLimits(file_bytes=10_000)).stderr


def test_it_sees_no_variable_of_ours_and_starts_in_an_empty_directory_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "key")
    result = run_python_blocking("import os; print(os.environ.get('HEADRACE_SECRET'), os.listdir('.')); open('a', 'w'); print(os.getcwd())")
    said, directory = result.stdout.splitlines()
    assert said == "None []"
    assert not Path(directory).exists()


@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
        "os.mkdir('d'); open('d/f', 'w'); os.chmod('d', 0); os.chmod('.', 0)",
        "os.symlink(os.environ['HOME'], 'round'); os.symlink('/etc', 'etc'); os.mkfifo('p')",
        "os.mkdir('.headrace-1'); os.makedirs('a/.headrace-2/b')",
    ],
)
def test_no_tree_that_a_program_leaves_raises_or_stays(code: str) -> None:
    result = run_python_blocking(f"import os; print(os.getcwd(), flush=True)\n{code}")
    assert result.ok, result.stderr
    assert Path("/etc").is_dir()
    assert not Path(result.stdout.strip()).exists()


def test_input_that_is_no_text_is_replaced_and_raises_nothing() -> None:
    assert run_python_blocking("print(ascii(input()))", stdin="a\ud800").stdout == "'a?'\n"


def test_a_killed_caller_leaves_no_program_and_no_directory(tmp_path: Path) -> None:
    code = 'from headrace.sandbox import run_python_blocking\nrun_python_blocking(\'open("here", "w"); import time; time.sleep(1000)\')'
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    waiting = time.monotonic() + 20
    while not list(tmp_path.glob("*/here")) and time.monotonic() < waiting:
        time.sleep(0.02)
    started = psutil.Process(caller.pid).children(recursive=True)
    assert started
    caller.kill()
    caller.wait()
    assert psutil.wait_procs(started, timeout=8)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_it_has_no_network_where_the_kernel_grants_that() -> None:
    result = run_python_blocking("import socket; socket.create_connection(('127.0.0.1', 9), timeout=1)")
    if not result.protections.network:
        pytest.skip("this kernel grants no network namespace")
    assert "unreachable" in result.stderr


def test_what_it_starts_ends_with_it_also_outside_its_session(tmp_path: Path) -> None:
    mark = f"sandboxed-{os.getpid()}-{time.monotonic_ns()}"
    daemon = "import sys, time; time.sleep(1000)"
    code = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {daemon!r}, {mark!r}], start_new_session=True)"
    result = run_python_blocking(code, limits=QUICK)
    if not result.protections.processes:
        pytest.skip("this kernel grants no process namespace")
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        pass
    assert not any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not limit root's processes, and the machine would feel it")
def test_a_fork_bomb_ends_at_the_time_limit() -> None:
    before = len(psutil.pids())
    result = run_python_blocking("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=SandboxLimits(seconds=0.3, max_processes=16))
    assert result.end in (SandboxEnd.SECONDS, SandboxEnd.KILLED) or not result.ok
    if result.protections.processes:
        assert len(psutil.pids()) < before + 50


def test_cancelling_kills_the_program() -> None:
    async def main() -> list[int]:
        before = set(psutil.Process().children(recursive=True))
        task = asyncio.create_task(sandbox.run_python("import time; time.sleep(1000)"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [child.pid for child in psutil.Process().children(recursive=True) if child not in before]

    assert asyncio.run(main()) == []


def test_a_program_that_is_not_there_is_said_to_be_missing() -> None:
    result = asyncio.run(run_command(["/no/such/program"]))
    assert result.exit_code == 127
    assert "/no/such/program: No such file" in result.stderr


def test_a_signal_from_outside_is_told() -> None:
    async def main() -> sandbox.SandboxResult:
        task = asyncio.create_task(sandbox.run_python("import time; time.sleep(1000)"))
        await asyncio.sleep(0.3)
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        for launcher in [child for child in children if "sandbox_launcher" in " ".join(child.cmdline())]:
            launcher.send_signal(signal.SIGKILL)
        return await task

    assert asyncio.run(main()).end is SandboxEnd.KILLED


def test_missing_protections_are_warned_of_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_warned", set())
    for _ in range(2):
        sandbox._warn(Protections(privileges=True))
    assert [record.message for record in caplog.records] == [
        "SANDBOX: programs that nobody has read run here with less protection than usual: network access is open; processes that leave its session survive; "
        "it may start any number of processes (run headrace as another user than root)."
    ]


def test_limits_must_be_over_0() -> None:
    with pytest.raises(ValueError, match=r"SandboxLimits\.seconds must be over 0, not 0"):
        SandboxLimits(seconds=0)
