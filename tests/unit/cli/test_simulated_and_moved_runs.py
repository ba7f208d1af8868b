"""What the commands say of a run that was simulated, and of one that lies elsewhere than it was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fakes.made_events import evaluated, run_started, statistics, updated, window
from headrace import events as ev
from headrace.cli.main import main
from headrace.event_log import EventLog

DEVICES = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]


def write_run(directory: Path, *, runtime: str) -> Path:
    checkpoint = directory / "checkpoints" / "update_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (directory / "config.toml").touch()
    times = iter(range(100))
    log = EventLog(directory / "events.jsonl", lambda: float(next(times)))
    for event in (run_started(DEVICES, num_updates=3), evaluated(0, 0.2), window("start"), updated(1, numbers=statistics({1: 10})), updated(2)):
        log.emit(event)
    log.emit(ev.CheckpointSaved(version=2, lineage=0, path=str(checkpoint), seconds=0.1))
    log.emit(window("end"))
    log.close()
    path = directory / "events.jsonl"
    path.write_text(path.read_text().replace('"runtime":"local"', f'"runtime":"{runtime}"'))
    return directory


def test_watch_shows_no_invented_learning_of_a_simulated_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "real", runtime="local")
    write_run(tmp_path / "played", runtime="simulated")
    shown = {}
    for name in ("real", "played"):
        assert main(["watch", str(tmp_path / name), "--once"]) == 0
        shown[name] = capsys.readouterr().out
    for word in ("reward", "evaluation", "last update"):
        lines = {name: [line for line in text.splitlines() if line.startswith(word)] for name, text in shown.items()}
        assert lines["real"] and not lines["played"]
    assert "simulated" in shown["played"].splitlines()[0] and "simulated" not in shown["real"]


def test_a_simulated_run_cannot_be_resumed_and_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "played", runtime="simulated")
    assert main(["resume", str(directory), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] == "RUN" and "was simulated" in error["message"] and "headrace simulate" in error["remedy"]


@pytest.mark.parametrize("command", ["watch", "report"])
def test_a_run_that_was_moved_names_its_checkpoint_where_it_lies_now(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(write_run(tmp_path / "old_place", runtime="local"), tmp_path / "after")
    assert main([command, str(tmp_path / "after"), "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    found = (result if command == "watch" else result["runs"][0])["checkpoint"]
    assert found == str(tmp_path / "after/checkpoints/update_000002")
    assert "old_place" not in out + err
