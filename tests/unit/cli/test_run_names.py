"""A run is given by its path or by its name below runs/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.made_events import evaluated, run_started, statistics, updated, window
from headrace.cli.main import main
from headrace.event_log import EventLog

DEVICES = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]


def write_run(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "config.toml").touch()
    times = iter(range(100))
    log = EventLog(directory / "events.jsonl", lambda: float(next(times)))
    for event in (run_started(DEVICES), evaluated(0, 0.2), window("start"), updated(1, numbers=statistics({1: 10})), window("end")):
        log.emit(event)
    log.close()


@pytest.mark.parametrize("command", ["report", "watch", "trajectories"])
def test_a_run_is_found_by_its_name_below_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/door-20261130-120000")
    code = main([command, "door-20261130-120000", "--json"])
    out, err = capsys.readouterr()
    if command == "trajectories":  # the run is found, and holds none
        assert code == 2 and "door-20261130-120000' holds no recorded trajectories" in err
    else:
        assert code == 0 and json.loads(out)["status"] == "done", err
    assert (tmp_path / "runs/door-20261130-120000/report.html").exists() == (command == "report")


@pytest.mark.parametrize("command", ["report", "watch", "trajectories", "eval"])
def test_a_run_that_is_not_there_is_told_with_those_that_are(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "other"]) == 2
    assert "no run below runs/" in capsys.readouterr().err
    for number in range(7):
        (tmp_path / f"runs/door-{number}").mkdir(parents=True)
        (tmp_path / f"runs/door-{number}/config.toml").touch()
    (tmp_path / "runs/no_run").mkdir()
    assert main([command, "other"]) == 2
    error = capsys.readouterr().err
    assert "'other' does not exist. Below runs/ there is door-" in error and "and 2 older ones" in error and "no_run" not in error
    assert main([command, "runs/doro-3"]) == 2
    assert "Did you mean 'door-3'?" in capsys.readouterr().err


def test_eval_takes_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/door-1/checkpoints").mkdir(parents=True)
    assert main(["eval", "door-1"]) == 2
    assert "'runs/door-1' holds no checkpoint" in capsys.readouterr().err
