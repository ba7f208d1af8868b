"""run --log: TensorBoard with the real package, the others with fakes that check what they get; none can break or hold up a run."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import evaluated, lines_of, run_started, statistics, updated
from headrace import events as ev
from headrace.cli.main import LOGS, main
from headrace.errors import ConfigError
from headrace.report.adapters.log import SafeLog, numbers_of, require

SETTINGS = {"run.seed": 3, "model.path": None, "learner.betas": [0.9, 0.95]}


def run_lines(status: str = "done") -> list[dict[str, Any]]:
    """An evaluation of version 1 comes after the numbers of version 2, as it does in a run."""
    tokens = dict.fromkeys(("generated", "trained", "filtered", "expired", "pooled", "in_flight"), 10)
    return lines_of(
        [
            (0.0, run_started([])),
            (1.0, updated(1, reward=0.25, numbers=statistics({0: 5}))),
            (1.1, ev.LedgerClosed(ledger={"at_update": 1, "tokens": tokens})),
            (2.0, updated(2, reward=0.5)),
            (3.0, evaluated(1, 0.4)),
            (4.0, ev.RunFinished(status=status, error=None, version=2, lineage=0)),
        ]
    )


def feed(name: str, directory: Path, lines: list[dict[str, Any]]) -> list[str]:
    """What the log said to people."""
    said: list[str] = []
    log = SafeLog(name, directory=directory, settings=SETTINGS, say=said.append)
    for line in lines:
        log.on_event(line)
    log.close()
    return said


@pytest.fixture
def adapters() -> Iterator[None]:
    """Adapters are imported anew, so that each test's fake package is the one they see."""
    yield
    for name in LOGS:
        sys.modules.pop(f"headrace.report.adapters.{name}", None)


def fake_package(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path, adapters: None) -> None:
    assert feed("tensorboard", tmp_path, run_lines()) == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert [(one.step, one.value) for one in found.Scalars("evaluation/mean")] == [(1, pytest.approx(0.4))]
    assert [one.value for one in found.Scalars("train/entropy")] == [1.0], "an update without statistics has none"
    assert [one.value for one in found.Scalars("tokens/trained")] == [10.0]
    text = found.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert "| run.seed | 3 |" in text
    assert "| model.path | null |" in text


def test_wandb_gets_the_version_as_its_axis_because_its_own_step_must_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: None) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls.append(("axis", (name, step_metric)))

        def log(self, numbers: dict[str, float], step: int | None = None) -> None:
            assert step is None, "wandb drops what is logged at an earlier step"
            calls.append(("log", numbers))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def init(*, project: str, name: str, dir: str, config: dict[str, Any]) -> Run:
        calls.append(("init", (project, name, dir, config)))
        return Run()

    fake_package(monkeypatch, "wandb", init=init)
    assert feed("wandb", tmp_path, run_lines("failed")) == []
    assert calls[0] == ("init", ("headrace", tmp_path.name, str(tmp_path), SETTINGS))
    assert ("axis", ("*", "version")) in calls
    logged = [numbers for kind, numbers in calls if kind == "log"]
    assert [numbers["version"] for numbers in logged] == [1, 1, 2, 1]
    assert logged[-1]["evaluation/mean"] == 0.4
    assert calls[-1] == ("finish", 1)


def test_mlflow_run_is_started_logged_and_ended_with_its_status_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: None) -> None:
    """MLflow's active run belongs to the thread that started it."""
    calls: list[tuple[str, Any]] = []
    threads: set[int] = set()

    def note(kind: str, value: Any) -> None:
        threads.add(threading.get_ident())
        calls.append((kind, value))

    fake_package(
        monkeypatch,
        "mlflow",
        start_run=lambda *, run_name: note("start", run_name),
        log_params=lambda values: note("params", values),
        log_metrics=lambda numbers, *, step: note("metrics", (step, numbers)),
        end_run=lambda *, status: note("end", status),
    )
    assert feed("mlflow", tmp_path, run_lines("interrupted")) == []
    assert [kind for kind, _ in calls] == ["start", "params", "metrics", "metrics", "metrics", "metrics", "end"]
    assert calls[1][1]["learner.betas"] == "[0.9, 0.95]"
    assert calls[2][1][0] == 1 and calls[2][1][1]["train/reward"] == 0.25
    assert calls[-1] == ("end", "KILLED")
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_trackio_gets_numbers_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: None) -> None:
    calls: list[tuple[str, Any]] = []
    fake_package(
        monkeypatch,
        "trackio",
        init=lambda *, project, name, config: calls.append(("init", (project, name, config))),
        log=lambda numbers, *, step: calls.append(("log", (step, numbers))),
        finish=lambda: calls.append(("finish", None)),
    )
    assert feed("trackio", tmp_path, run_lines()) == []
    assert calls[0] == ("init", ("headrace", tmp_path.name, SETTINGS))
    assert [value[0] for kind, value in calls if kind == "log"] == [1, 1, 2, 1]
    assert calls[-1] == ("finish", None)


def test_a_logger_that_raises_is_named_once_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: None) -> None:
    logged: list[int] = []

    def broken(numbers: Any, *, step: int) -> None:
        logged.append(step)
        raise ConnectionError("no route to host")

    fake_package(monkeypatch, "trackio", init=lambda **_: None, log=broken, finish=lambda: logged.append(-1))
    said = feed("trackio", tmp_path, run_lines())
    assert said == ["--log trackio failed and is off from here on: ConnectionError: no route to host"]
    assert logged == [1]


def test_a_logger_that_hangs_holds_neither_the_run_nor_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: None) -> None:
    released = threading.Event()
    fake_package(monkeypatch, "trackio", init=lambda **_: None, log=lambda numbers, *, step: released.wait(30), finish=lambda: None)
    said: list[str] = []
    log = SafeLog("trackio", directory=tmp_path, settings={}, say=said.append)
    for line in run_lines():
        log.on_event(line)  # would wait for ever if it were written here
    log.close(limit_seconds=0.05)
    assert "has not taken everything after 0.05 s" in said[0]
    released.set()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_wrong_usage_and_the_message_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    with pytest.raises(ConfigError, match=f"pip install {name}") as caught:
        require(name)
    assert caught.value.exit_code == 2


def test_run_refuses_a_missing_logger_before_it_makes_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    assert main(["run", "door", "--run-dir", str(tmp_path / "run"), "--log", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_unknown_logger_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "door", "--log", "tensorbord"]) == 2
    assert "tensorboard" in capsys.readouterr().err


def test_events_without_numbers_are_passed_over() -> None:
    assert numbers_of({"event": "worker_active", "time": 0.0}) is None
    assert numbers_of({"event": "group_reserved", "time": 0.0}) is None


def test_numbers_that_an_update_does_not_have_are_left_out() -> None:
    found = numbers_of(lines_of([(0.0, updated(1, numbers=statistics({0: 1})))])[0])
    assert found is not None
    assert "train/key_staleness_mean" not in found[0]
    assert found[0]["train/staleness_max"] == 0.0
