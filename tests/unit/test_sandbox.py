"""Programs that nobody has read: what they can do in the sandbox, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from headrace import sandbox
from headrace.sandbox import Protections, SandboxEnd, SandboxLimits, run_command, run_python_blocking
from headrace.sandbox_launcher import tree_bytes

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
        "it may start any number of processes (run headrace as another user than root); it sees the machine's other processes in /proc."
    ]


HOGS = """
import os, time
blocks = []
for _ in range({count}):
    if os.fork() == 0:
        blocks.append(b'x' * {size})
        time.sleep(100)
{then}
"""


def test_memory_of_all_its_processes_together_is_limited() -> None:
    code = HOGS.format(count=4, size=40 * 2**20, then="time.sleep(100)")
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, memory_bytes=200 * 2**20, total_memory_bytes=100 * 2**20))
    assert (result.end, result.exit_code) == (SandboxEnd.MEMORY, None)


def test_memory_is_found_wherever_its_processes_went() -> None:
    """Each starts the next in a session of its own and ends."""
    code = """
import os, time
def start(left):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            block = b'x' * (40 * 2**20)
            time.sleep(100)
        os._exit(0)
for left in range(4):
    start(left)
    os.wait()
time.sleep(100)
"""
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, total_memory_bytes=100 * 2**20))
    assert result.end is SandboxEnd.MEMORY


def test_memory_that_processes_share_counts_once() -> None:
    code = "import os, time\nblock = b'x' * (60 * 2**20)\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(0.6); os._exit(0)\nfor _ in range(3): os.wait()"
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, total_memory_bytes=120 * 2**20))
    assert result.ok, result


@pytest.mark.parametrize(
    "write",
    [
        "open(f'{number}', 'wb').write(bytes(5000))",
        "open(f'{number}', 'wb')",
        "os.mkdir('d'); os.chdir('d'); open('f', 'wb').write(bytes(10_000))",
        "kept.append(open('f', 'wb')); kept[-1].write(bytes(10**6)); kept[-1].flush(); os.unlink('f'); time.sleep(0.3 * (number > 5))",
        "os.makedirs(f'{number}/a'); open(f'{number}/a/f', 'wb').write(bytes(10_000)); os.chmod(f'{number}', 0)",
    ],
    ids=["files", "empty files", "depth", "files without a name", "hidden directories"],
)
def test_disk_of_all_its_files_together_is_limited(write: str) -> None:
    code = f"import os, time\nkept = []\nfor number in range(10**6):\n    {write}\n    time.sleep(0.001)"
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, disk_bytes=2**21))
    assert (result.end, result.exit_code) == (SandboxEnd.DISK, None), result.stderr


def test_files_in_memory_without_a_name_count_as_memory() -> None:
    code = "import os, time\nkept = [os.memfd_create(str(n)) for n in range(10)]\nfor file in kept: os.write(file, bytes(4 * 2**20))\ntime.sleep(100)"
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, total_memory_bytes=30 * 2**20))
    assert result.end is SandboxEnd.MEMORY


def test_bytes_of_a_tree_are_those_of_its_files_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/big").write_bytes(b"x" * 100_000)
    (tmp_path / "a/small").write_bytes(b"x")
    (tmp_path / "etc").symlink_to("/etc")
    (tmp_path / "up").symlink_to("..")
    assert 100_000 + 5 * 4096 <= tree_bytes(str(tmp_path), 1e12) <= 110_000 + 5 * 4096
    assert tree_bytes(str(tmp_path), 4096) <= 120_000
    assert tree_bytes(str(tmp_path / "gone"), 1e12) == 0


def test_it_makes_no_namespaces_of_its_own_where_it_has_one() -> None:
    """In which it could mount file systems that nobody sees."""
    code = "import ctypes; libc = ctypes.CDLL(None); print(libc.unshare(0x10000000), libc.unshare(0x20000))"
    result = run_python_blocking(code)
    if not result.protections.processes:
        pytest.skip("this kernel grants no namespaces")
    assert result.stdout == "-1 -1\n"


def test_root_is_nothing_special_in_it() -> None:
    result = run_python_blocking("print(next(line for line in open('/proc/self/status') if line.startswith('CapEff')))")
    assert result.stdout.split() == ["CapEff:", "0" * 16]


def test_its_own_environ_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "key-5309")
    code = "print(open('/proc/self/environ').read().split(chr(0)))\nimport os; print(sorted(os.environ))"
    result = run_python_blocking(code)
    assert "key-5309" not in result.stdout
    assert result.stdout.endswith("['HOME', 'LANG', 'PATH', 'TMPDIR']\n")


def test_it_sees_no_other_process_where_the_kernel_grants_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any process's variables or command line."""
    code = """
import os
print(sorted(name for name in os.listdir('/proc') if name.isdigit()))
for number in range(1, 70000):
    try:
        if b'key-5309' in open(f'/proc/{number}/environ', 'rb').read(): print('found')
    except OSError:
        pass
"""
    environment = {**os.environ, "HEADRACE_SECRET": "key-5309"}
    script = "import sys; from headrace.sandbox import run_python_blocking as run; r = run(sys.stdin.read()); print(r.protections.proc, r.stdout)"
    found = subprocess.run([sys.executable, "-c", script], input=code, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    if not found.startswith("True"):
        pytest.skip("this kernel grants no /proc of its own")
    assert found.split("\n") == ["True ['1', '2']", "", ""]


def test_its_session_is_killed_before_its_number_can_be_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every kill its leader runs or waits to be reaped."""
    states = []
    kill = os.killpg

    def checked(group: int, number: int) -> None:
        states.append(Path(f"/proc/{group}/stat").exists())
        kill(group, number)

    monkeypatch.setattr(os, "killpg", checked)
    assert run_python_blocking("pass").ok
    assert run_python_blocking("while True: print('x' * 1000)", limits=SandboxLimits(output_bytes=5000)).end is SandboxEnd.OUTPUT
    assert run_python_blocking("import time; time.sleep(100)", limits=QUICK).end is SandboxEnd.SECONDS
    assert len(states) >= 6 and all(states)


def test_what_it_leaves_in_its_session_ends_with_it_and_holds_nobody_up() -> None:
    result = run_python_blocking("import os, time\nif os.fork() == 0: time.sleep(1000)", limits=SandboxLimits(seconds=60))
    assert result.ok  # long before its time limit: the child held stdout open


def test_no_descriptor_is_left_open_however_it_ends() -> None:
    async def main() -> None:
        await sandbox.run_python("pass")  # asyncio's own, and its thread's
        before = set(os.listdir("/proc/self/fd"))
        await sandbox.run_python("pass", stdin="x" * 10**6)
        await sandbox.run_python("import time; time.sleep(100)", stdin="x" * 10**6, limits=SandboxLimits(seconds=0.2))
        await sandbox.run_python("while True: print('x' * 1000)", limits=SandboxLimits(output_bytes=5000))
        for wait_seconds in (0.0, 0.01, 0.3):
            task = asyncio.create_task(sandbox.run_python("import time; time.sleep(100)", stdin="x" * 10**6))
            await asyncio.sleep(wait_seconds)
            task.cancel()
            await asyncio.wait([task])
        await asyncio.sleep(0.05)  # transports close in a later turn
        assert set(os.listdir("/proc/self/fd")) <= before

    asyncio.run(main())


def ends_for_good(mark: str) -> bool:
    """Whether every process with this word in its command line is gone soon."""
    deadline = time.monotonic() + 5
    while any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("then", ["while True: print('x' * 1000)", "time.sleep(1000)"])
def test_a_program_that_refuses_to_end_with_its_parent_ends_all_the_same(then: str) -> None:
    """It leaves the session, takes back the signal at its parent's death and stops whoever is in its group."""
    mark = f"sandboxed-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import ctypes, os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.kill(0, signal.SIGSTOP)
    os._exit(0)
os.kill(os.getpid(), signal.SIGCONT)
try: os.setsid()
except OSError: pass
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
{then}
"""
    command = [sys.executable, "-I", "-S", "-c", code, mark]
    result = asyncio.run(run_command(command, limits=SandboxLimits(seconds=1, output_bytes=5000)))
    if not result.protections.processes:
        pytest.skip("this kernel grants no process namespace")
    assert result.end in (SandboxEnd.OUTPUT, SandboxEnd.SECONDS)
    assert ends_for_good(mark)


def test_it_cannot_stop_what_watches_it() -> None:
    code = """
import os, signal
signal.signal(signal.SIGTSTP, lambda *_: None)  # for itself
os.kill(0, signal.SIGTSTP)
for number in (signal.SIGSTOP, signal.SIGKILL):
    os.kill(1, number)
for number in range(10**6):
    open(str(number), 'w')
"""
    result = run_python_blocking(code, limits=SandboxLimits(seconds=30, disk_bytes=2**20))
    if not result.protections.processes:
        pytest.skip("this kernel grants no process namespace")
    assert result.end is SandboxEnd.DISK


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print(input())", SandboxEnd.EXITED),
        ("while True: pass", SandboxEnd.SECONDS),
        ("while True: print('x' * 1000)", SandboxEnd.OUTPUT),
        ("for number in range(10**6): open(str(number), 'w')", SandboxEnd.DISK),
        (HOGS.format(count=4, size=40 * 2**20, then="time.sleep(100)"), SandboxEnd.MEMORY),
        ("import os; os.kill(os.getpid(), 11)", SandboxEnd.KILLED),
    ],
)
def test_its_limits_hold_without_any_namespace(code: str, end: SandboxEnd) -> None:
    """In a sandbox, which grants none."""
    inner = f"""
from headrace.sandbox import SandboxLimits, run_python_blocking
limits = SandboxLimits(seconds=50 if {str(end)!r} != 'seconds' else 1, output_bytes=5000, disk_bytes=2**20, total_memory_bytes=100 * 2**20)
result = run_python_blocking({code!r}, stdin='said', limits=limits)
print(result.end, result.stdout[:4], result.protections.network, result.protections.processes, result.protections.proc)
"""
    outer = asyncio.run(run_command([sys.executable, "-c", inner], limits=SandboxLimits(seconds=90, memory_bytes=2**31)))
    if not outer.protections.processes:
        pytest.skip("this kernel grants no namespaces: the other tests are this one")
    said = {SandboxEnd.EXITED: "said", SandboxEnd.OUTPUT: "xxxx"}.get(end, "")
    assert outer.stdout == f"{end} {said} False False False\n", outer.stderr


def test_its_own_signals_end_it() -> None:
    result = run_python_blocking("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.end, result.exit_code) == (SandboxEnd.KILLED, None)


def test_shared_memory_that_nobody_holds_counts_and_does_not_stay() -> None:
    code = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(10):
    segment = libc.shmget(0, ctypes.c_size_t(10 * 2**20), 0o1600)
    place = libc.shmat(segment, None, 0)
    ctypes.memset(place, 1, 10 * 2**20)
    libc.shmdt(ctypes.c_void_p(place))
time.sleep(100)
"""
    before = Path("/proc/sysvipc/shm").read_text()
    result = run_python_blocking(code, limits=SandboxLimits(seconds=10, total_memory_bytes=60 * 2**20))
    if not result.protections.processes:
        pytest.skip("this kernel grants no namespaces")
    assert result.end is SandboxEnd.MEMORY
    assert Path("/proc/sysvipc/shm").read_text() == before


def test_sockets_of_forkservers_are_hidden_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects to one has it run anything, outside."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "pymp-abc").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "pymp-abc" / "listener"))
        listener.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / 'pymp-abc' / 'listener')!r}); print('connected')"
        result = run_python_blocking(code)
    if not result.protections.proc:
        pytest.skip("this kernel grants no mount namespace")
    assert "connected" not in result.stdout and "Error" in result.stderr


def test_limits_must_be_over_0() -> None:
    with pytest.raises(ValueError, match=r"SandboxLimits\.seconds must be over 0, not 0"):
        SandboxLimits(seconds=0)
