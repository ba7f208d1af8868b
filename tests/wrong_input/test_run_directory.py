"""The run directory: used, held by another run, not writable, on a full disk. Nothing that lies there is touched, nothing half made stays."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.config import Settings
from headrace.config_loading import load_settings
from headrace.errors import ConfigError, RunDirectoryError
from headrace.event_log import EventLog, read_events
from headrace.events import TimedWindow
from headrace.runtime.run_directory import RunDirectory
from wrong_input.rig import Wrong, assert_ended_as_said, command, contents, make_recipe, run_row, scripted_runtime

__all__ = ["scripted_runtime"]

FINE = Wrong(did="nothing wrong", says=(), exit=0)
NOBODY = 65534
RUN = ("run", "wrong", "--run-dir", "run")


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """What a full disk does to a write, without a disk: the kernel refuses to make any file larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Root may write anywhere: become nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    make_recipe(tmp_path / "wrong", FINE)
    return load_settings(tmp_path / "wrong").anchored()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["run_started"], "a run that was killed, with the checkpoints it had saved"),
        (["run_started", "run_finished"], "a run that ended as interrupted"),
    ],
    ids=["leftovers of a killed run", "a finished run"],
)
def test_a_used_run_directory_is_refused_and_kept(
    lines: list[str], says: str, scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run/checkpoints/update_000003").mkdir(parents=True)
    text = "".join(json.dumps({"event": line, "status": "interrupted"}, separators=(",", ":")) + "\n" for line in lines)
    Path("run/events.jsonl").write_text(text + '{"event":"upda')
    before = contents(Path("run"))
    ended = run_row(FINE, capsys)
    assert ended.code == 2 and ended.error["key"] == "--run-dir" and ended.error["value"] == "run"
    assert all(text in ended.people for text in ("'run'", "is not empty", says, "Name another one"))
    assert contents(Path("run")) == before


def test_a_run_directory_in_use_is_refused_and_the_run_there_goes_on(
    settings: Settings, tmp_path: Path, scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    held = RunDirectory(tmp_path / "run", settings)
    ended = run_row(FINE, capsys)
    assert ended.code == 2 and "a run is writing there now" in ended.people
    assert (tmp_path / "run/config.toml").is_file()
    held.close()
    assert "a run is writing there now" not in run_row(FINE, capsys).people, "the lock goes with its run"


def test_of_many_runs_that_start_at_once_in_one_directory_exactly_one_gets_it(settings: Settings, tmp_path: Path) -> None:
    for round_number in range(20):
        start, won, lost = threading.Barrier(4), [], []

        def compete(path: Path, start: threading.Barrier, won: list[RunDirectory], lost: list[str]) -> None:
            start.wait()
            try:
                won.append(RunDirectory(path, settings))
            except ConfigError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=compete, args=(tmp_path / f"run{round_number}", start, won, lost)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(lost) == 3, lost
        assert load_settings(won[0].path / "config.toml").settings.run.name == "wrong"
        won[0].close()


def test_a_run_that_cannot_start_gives_back_an_empty_directory_that_was_there(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    RunDirectory(tmp_path / "mine", settings).discard()
    assert list((tmp_path / "mine").iterdir()) == []
    RunDirectory(tmp_path / "new/deep/run", settings).discard()
    assert not (tmp_path / "new").exists()


def test_a_run_directory_that_may_not_be_written_is_named(settings: Settings, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.name.startswith("pytest-"):  # its rights let nobody else through
            parent.chmod(0o755)
    tmp_path.chmod(0o555)
    (tmp_path / "wrong").chmod(0o555)
    try:
        for path in (tmp_path / "run", tmp_path / "wrong/deep/run"):
            with without_rights(), pytest.raises(ConfigError, match=rf"'{path}' cannot be written: Permission denied.*--run-dir"):
                RunDirectory(path, settings)
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / "wrong").chmod(0o755)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_is_full_at_the_start_leaves_nothing(scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    make_recipe(Path("wrong"), FINE)
    with largest_file(500):
        ended = command(capsys, *RUN)
    assert_ended_as_said(Wrong(did="full", says=("run'", "cannot be written", "File too large", "--run-dir")), ended)


def test_a_disk_that_fills_up_ends_the_run_with_a_whole_event_log(scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    make_recipe(Path("wrong"), FINE)
    with largest_file(30_000):
        ended = command(capsys, *RUN, "run.num_updates=100000", "checkpoint.every_seconds=0")  # without the journal, which is larger
    assert ended.code == 1 and ended.error["kind"] == "RunDirectoryError" and "Traceback" not in ended.people
    assert all(text in ended.people for text in ("events.jsonl", "cannot be written", "File too large", "Free disk space"))
    raw = Path("run/events.jsonl").read_bytes()
    assert 25_000 < len(raw) <= 30_000 and raw.endswith(b"}\n"), "a line that did not fit is cut off again"
    assert len(list(read_events(Path("run/events.jsonl")))) == raw.count(b"\n")
    load_settings("run/config.toml")


def test_a_device_that_takes_nothing_is_named_once_and_viewers_go_on() -> None:
    log = EventLog(Path("/dev/full"), lambda: 0.0)
    seen: list[str] = []
    log.subscribe(lambda line: seen.append(line["event"]))
    with pytest.raises(RunDirectoryError, match=r"/dev/full.*No space left on device"):
        log.emit(TimedWindow(phase="start"))
    log.emit(TimedWindow(phase="end"))
    log.close()
    assert seen == ["timed_window"]
