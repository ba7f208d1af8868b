"""headrace watch on run directories: going, finished, starting, torn, and what is no run. It only reads."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, evaluated, run_started, statistics, taken, updated, window
from headrace import events as ev
from headrace.cli.main import main
from headrace.cli.watch import Watching
from headrace.event_log import EventLog

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]


class MadeRun:
    """A run directory whose events are written one by one."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.time = directory, 0.0
        self.path = directory / "events.jsonl"
        (directory / "config.toml").write_text("[pool]\nmax_staleness = 4\n")
        self._held = os.open(directory, os.O_RDONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self.log: EventLog | None = None

    def emit(self, time: float, *emitted: ev.Event) -> None:
        self.log = self.log or EventLog(self.path, lambda: self.time)
        self.time = time
        for event in emitted:
            self.log.emit(event)

    def train(self, updates: int, *, start: int = 0) -> None:
        for version in range(start + 1, start + updates + 1):
            work = active("sampler-0", 10.0, running={8: 4.0}, idle={"environment": 6.0}, tokens=100)
            self.emit(5.0 + 10 * version, taken(version, 8.0), updated(version, reward=version / 10, numbers=statistics({1: 10})), work)

    def begin(self) -> None:
        self.emit(0.0, run_started(SPLIT, num_updates=10), evaluated(0, 0.2))
        self.emit(5.0, window("start"))

    def be_killed(self) -> None:
        os.close(self._held)

    def end(self, status: str = "done") -> None:
        self.emit(self.time, ev.RunFinished(status=status, error=None, version=3, lineage=0))


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "a-run")


def test_once_prints_one_frame(run: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run.begin()
    run.train(3)
    assert main(["watch", str(run.directory), "--once"]) == 0
    text = capsys.readouterr().out
    assert text.count("progress") == 1
    assert "3/10 updates" in text
    assert "try pool.max_staleness=8 (now 4)" in " ".join(text.split()), "settings come from config.toml"
    assert max(len(line) for line in text.splitlines()) <= 80


def test_json_gives_the_summary_with_state_and_warnings(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    run.train(3)
    assert main(["watch", str(run.directory), "--once", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["command"], result["status"], result["error"], result["schema"]) == ("watch", "done", None, 1)
    assert (result["run_dir"], result["state"], result["num_updates"]) == (str(run.directory), "running", 3)
    assert result["utilization"]["devices"][0]["busy_fraction"] == pytest.approx(0.4)
    assert "samplers idle 60%" in result["warnings"][0]
    assert "progress" in captured.err, "the frame is text for people"


@pytest.mark.parametrize("status", ["done", "failed", "interrupted"])
def test_finished_run_can_be_watched_and_ends_at_once(run: MadeRun, status: str, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    run.train(3)
    run.end(status)
    assert main(["watch", str(run.directory)]) == 0
    assert f"{status} · 30 s" in capsys.readouterr().out


def test_run_that_is_starting_has_no_events_yet(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run.directory), "--once", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["state"] == "starting"
    assert "starting" in captured.err


def test_run_whose_process_is_gone_is_called_killed_at_once_and_how_to_go_on(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    run.train(1)
    run.be_killed()
    assert main(["watch", str(run.directory), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["state"] == "killed"
    assert result["warnings"][0].endswith(f"headrace resume {run.directory}")
    assert "ended without a word" in captured.err
    assert "to go" not in captured.err, "nothing is to be expected of it"


def test_finished_run_is_not_called_killed(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.begin()
    run.end()
    run.be_killed()
    assert main(["watch", str(run.directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"


@pytest.mark.parametrize(("killed", "state"), [(True, "killed"), (False, "running")])
def test_run_without_its_event_log_is_not_starting(run: MadeRun, killed: bool, state: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run.directory / "pool.sqlite").touch()
    if killed:
        run.be_killed()
    assert main(["watch", str(run.directory), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["state"] == state
    assert any("events.jsonl is not in the run directory" in text for text in result["warnings"])


@pytest.mark.parametrize(("make", "what"), [("nothing", "does not exist"), ("file", "is a file"), ("directory", "holds no events.jsonl")])
def test_what_is_no_run_is_wrong_usage(tmp_path: Path, make: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    elif make == "directory":
        path.mkdir()
    assert main(["watch", str(path), "--once", "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert (error["kind"], error["key"], error["value"]) == ("ConfigError", "RUN", str(path))
    assert what in error["message"]
    assert "Traceback" not in captured.err


def test_run_is_found_by_its_name_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    made = MadeRun(tmp_path / "runs" / "door-1")
    made.begin()
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "door-1", "--once"]) == 0
    assert "door-1" in capsys.readouterr().out


def test_torn_last_line_is_read_once_it_is_whole(run: MadeRun) -> None:
    run.begin()
    run.train(1)
    whole = run.path.read_bytes()
    run.path.write_bytes(whole[:-30])
    watching = Watching(run.directory)
    watching.read()
    seen = watching.state.num_events
    watching.read()
    assert watching.state.num_events == seen
    run.path.write_bytes(whole)
    watching.read()
    assert watching.state.num_events == seen + 1 == whole.count(b"\n")


def test_watching_reads_each_event_once_and_writes_nothing(run: MadeRun) -> None:
    """I14."""
    run.begin()
    watching = Watching(run.directory)
    for index in range(5):
        run.train(1, start=index)
        watching.read()
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.directory.rglob("*") if path.is_file()}
    watching.read()
    watching.picture(80)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.directory.rglob("*") if path.is_file()} == before
    assert watching.state.num_events == run.path.read_bytes().count(b"\n")
    fresh = Watching(run.directory)
    fresh.read()
    assert fresh.state.summary.result() == watching.state.summary.result()


def in_terminal(arguments: list[str], columns: int = 80) -> tuple[subprocess.Popen[bytes], list[bytes], threading.Thread]:
    """Runs headrace in a terminal of its own; what it draws is collected."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-m", "headrace.cli", *arguments], stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    drawn: list[bytes] = []

    def collect() -> None:
        while True:
            try:
                drawn.append(os.read(controller, 65536))
            except OSError:
                os.close(controller)
                return

    thread = threading.Thread(target=collect)
    thread.start()
    return process, drawn, thread


def test_terminal_is_updated_in_place_until_the_run_ends(run: MadeRun) -> None:
    process, drawn, thread = in_terminal(["watch", str(run.directory)])
    try:
        wait_for(drawn, "starting")
        run.begin()
        run.train(2)
        wait_for(drawn, "2/10 updates")
        run.train(1, start=2)
        wait_for(drawn, "3/10 updates")
        run.end()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        thread.join(timeout=10)
    text = b"".join(drawn).decode()
    assert "done · 30 s" in text
    assert "\x1b[1A" in text, "it goes up and draws over what is there"


def test_ctrl_c_leaves_the_terminal_in_order(run: MadeRun) -> None:
    import signal

    run.begin()
    process, drawn, thread = in_terminal(["watch", str(run.directory)])
    try:
        wait_for(drawn, "0/10 updates")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.wait()
        thread.join(timeout=10)
    text = b"".join(drawn).decode()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "Traceback" not in text


def wait_for(drawn: list[bytes], text: str, *, seconds: float = 20.0) -> None:
    done = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if text in b"".join(drawn).decode(errors="replace"):
            return
        done.wait(0.05)
    raise AssertionError(f"{text!r} was not drawn: {b''.join(drawn).decode(errors='replace')[-500:]!r}")


def test_events_hold_no_surprise_for_the_frame(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """An event of a later version of headrace, with a name that this one does not know, is passed over."""
    run.begin()
    with run.path.open("a") as file:
        file.write(json.dumps({"event": "from_the_future", "time": 6.0, "role": "conductor", "what": [1, 2]}) + "\n")
    arguments: list[Any] = ["watch", str(run.directory), "--once"]
    assert main(arguments) == 0
    assert "0/10 updates" in capsys.readouterr().out
