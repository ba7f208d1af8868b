"""What every command promises: one JSON object on stdout however it ends, exit codes, no traceback for our own errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import headrace
from fakes.made_events import evaluated, run_started, statistics, updated, window
from headrace import events as ev
from headrace.cli import doctor, evaluate, run
from headrace.cli.main import main
from headrace.config_loading import load_settings, plain_values
from headrace.errors import ConfigError, HeadraceError
from headrace.event_log import EventLog
from headrace.manifest import write_manifest
from headrace.sandbox import Protections, SandboxEnd, SandboxResult

RECIPE = """
[run]
name = "tiny"
[model]
architecture = {model_type = "qwen2"}
characters = "abc"
[task]
source = "task:tasks"
reward = "task:reward"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return code, json.loads(captured.out), captured.err


def fake_runtime(monkeypatch: pytest.MonkeyPatch, behaviour: Any, **more: Any) -> None:
    """Stands where runtime/local does; `behaviour(emit)` is the run."""

    async def run_local(resolved: Any, run_directory: Path, *, subscribers: Any = (), progress: Any = None, resume: bool = False) -> None:
        os.makedirs(run_directory, exist_ok=True)
        progress("starting", 0.5)
        log = EventLog(run_directory / "events.jsonl", lambda: 0.0)
        for subscriber in subscribers:
            log.subscribe(subscriber)
        try:
            behaviour(log.emit)
        finally:
            log.close()

    module = types.ModuleType("headrace.runtime.local")
    module.run_local = run_local  # type: ignore[attr-defined]
    for name, value in more.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "headrace.runtime.local", module)


def short_run(emit: Any) -> None:
    print("a print of the recipe's own code")
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 8}]
    for event in (run_started(devices), evaluated(0, 0.2), window("start"), updated(1, numbers=statistics({0: 4})), window("end"), evaluated(1, 0.6)):
        emit(event)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"
    code, result, _ = json_of(capsys, "version")
    assert code == 0
    assert result["headrace"] == headrace.__version__
    assert [result[key] for key in ("schema", "command", "status", "error")] == [1, "version", "done", None]


def test_config_prints_every_value_and_where_it_came_from(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "recipe.toml", "pool.max_staleness=3"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "." in line.split()[0]}
    settings = load_settings(recipe).settings
    assert set(plain_values(settings)) <= set(rows)
    assert rows["pool.max_staleness"].split()[1:] == ["3", "command", "line"]
    assert rows["run.name"].split()[1:] == ["tiny", "recipe.toml"]
    assert rows["run.seed"].split()[1:] == ["0", "default"]


def test_config_in_a_pipe_is_not_wider_than_120_columns(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "recipe.toml", "model.characters=" + "§" * 200]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()[1:]) <= 120  # the first is the recipe's path
    assert out.count("§") == 200, "folded, not cut"


def test_config_object_holds_values_and_origins(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, people = json_of(capsys, "config", "recipe.toml", "pool.max_staleness=3")
    assert code == 0
    assert result["settings"]["pool.max_staleness"] == {"value": 3, "origin": "command line"}
    assert result["settings"]["model.path"] == {"value": None, "origin": "default"}
    assert result["recipe"] == str(recipe)
    assert "pool.max_staleness" in people


def test_wrong_setting_ends_with_2_and_one_message(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, people = json_of(capsys, "run", "recipe.toml", "pool.max_stalness=3")
    assert code == 2
    assert people == "ConfigError: command line: unknown key 'pool.max_stalness'. Did you mean 'pool.max_staleness'?\n"
    assert result["status"] == "failed" and result["command"] == "run"
    assert result["error"]["key"] == "pool.max_stalness"
    assert set(result["error"]) == {"kind", "message", "file", "key", "value", "limit", "remedy"}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [["confg"], ["run"], [], ["run", "recipe.toml", "--no-such"], ["version", "extra"], ["config", "no-such-recipe"], ["run", "recipe.toml", "--run-dir"]],
)
def test_wrong_usage_ends_with_2_also_as_json(recipe: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, result, people = json_of(capsys, *arguments)
    assert code == 2
    assert result["error"]["kind"] == "ConfigError"
    assert result["error"]["remedy"] and "Traceback" not in people


def test_overrides_may_stand_before_and_after_options(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _ = json_of(capsys, "run", "--dry-run", "recipe.toml", "run.seed=1", "--run-dir", "x", "run.num_updates=2")
    assert code == 0
    assert result["settings"]["run.seed"]["value"] == 1
    assert result["settings"]["run.num_updates"]["value"] == 2


def test_dry_run_starts_nothing_and_leaves_nothing(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.runtime.local", None)  # importing it would raise
    code, result, _ = json_of(capsys, "run", "recipe.toml", "--dry-run")
    assert code == 0 and "run.mode" in result["settings"]
    assert sorted(path.name for path in Path().iterdir()) == ["recipe.toml", "task.py"]


def test_run_reports_the_summary_of_its_events(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runtime(monkeypatch, short_run)
    code, result, people = json_of(capsys, "run", "recipe.toml")
    assert code == 0 and result["status"] == "done"
    assert Path(result["run_dir"]).parent == (Path.cwd() / "runs")
    assert Path(result["run_dir"]).name.startswith("tiny-")
    assert result["num_updates"] == 1
    assert result["evaluation"]["before"]["mean"] == 0.2 and result["evaluation"]["after"]["mean"] == 0.6
    assert "a print of the recipe's own code" in people, "stdout is kept for the object"
    assert "mean reward of a batch" in people


def test_failed_run_still_tells_where_it_lies_and_what_it_did(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(emit: Any) -> None:
        short_run(emit)
        raise HeadraceError("the sampler did not answer.", remedy="Look at it.")

    fake_runtime(monkeypatch, fail)
    code, result, people = json_of(capsys, "run", "recipe.toml", "--run-dir", "here")
    assert code == 1
    assert (result["status"], result["error"]["remedy"], result["num_updates"]) == ("failed", "Look at it.", 1)
    assert result["run_dir"] == str(Path("here").resolve())
    assert "HeadraceError: the sampler did not answer. Look at it." in people and "Traceback" not in people


def test_ctrl_c_ends_with_130_and_status_interrupted(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(emit: Any) -> None:
        short_run(emit)
        raise KeyboardInterrupt

    fake_runtime(monkeypatch, interrupted)
    code, result, people = json_of(capsys, "run", "recipe.toml")
    assert code == 130
    assert result["status"] == "interrupted" and result["num_updates"] == 1
    assert "Traceback" not in people


def test_unexpected_error_shows_its_traceback_and_an_object(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(emit: Any) -> None:
        raise ZeroDivisionError("a bug")

    fake_runtime(monkeypatch, bug)
    code, result, people = json_of(capsys, "run", "recipe.toml")
    assert code == 1
    assert result["error"]["kind"] == "ZeroDivisionError" and result["status"] == "failed"
    assert "Traceback" in people


def test_run_directory_in_use_is_refused_before_anything_starts(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.runtime.local", None)
    Path("used").mkdir()
    Path("used/events.jsonl").write_text("kept")
    code, result, _ = json_of(capsys, "run", "recipe.toml", "--run-dir", "used")
    assert code == 2 and result["error"]["key"] == "--run-dir"
    assert Path("used/events.jsonl").read_text() == "kept"


def test_default_run_directories_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.time, "strftime", lambda form: "20300101-000000")
    names = []
    for _ in range(3):
        directory = run.choose_run_directory(None, "door")
        directory.mkdir(parents=True)
        names.append(directory.name)
    assert names == ["door-20300101-000000", "door-20300101-000000-2", "door-20300101-000000-3"]


def make_checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory.resolve()


def test_eval_takes_the_newest_whole_checkpoint_of_a_run(recipe: Path) -> None:
    make_checkpoint(Path("r/checkpoints/update_000009"))
    newest = make_checkpoint(Path("r/checkpoints/update_000010"))
    Path("r/checkpoints/update_000011").mkdir()  # without config.json: not whole
    assert evaluate.find_checkpoint(Path("r")) == (newest, Path("r").resolve())
    assert evaluate.find_checkpoint(newest) == (newest, Path("r").resolve())
    alone = make_checkpoint(Path("model"))
    assert evaluate.find_checkpoint(Path("model")) == (alone, None)
    with pytest.raises(ConfigError, match="does not exist"):
        evaluate.find_checkpoint(Path("nothing"))
    Path("empty/checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        evaluate.find_checkpoint(Path("empty"))


def test_eval_prints_mean_and_interval(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def evaluate_local(resolved: Any, checkpoint: Path, *, progress: Any = None) -> ev.Evaluated:
        seen.append((resolved.recipe, checkpoint))
        return evaluated(0, 0.5)

    fake_runtime(monkeypatch, short_run, evaluate_local=evaluate_local)
    checkpoint = make_checkpoint(Path("model"))
    code, result, people = json_of(capsys, "eval", "model", "--recipe", "recipe.toml")
    assert code == 0 and seen == [(recipe, checkpoint)]
    assert result["evaluation"]["mean"] == 0.5 and result["evaluation"]["interval95"] == [0.4, 0.6]
    assert "0.5000" in people
    assert main(["eval", "model"]) == 2, "without a run directory the recipe has to be named"
    write_manifest(checkpoint)
    assert main(["eval", "model", "--recipe", "recipe.toml"]) == 0
    (checkpoint / "config.json").write_text("{ }")
    assert main(["eval", "model", "--recipe", "recipe.toml"]) == 1 and len(seen) == 2
    assert "config.json is damaged" in capsys.readouterr().err


def test_closed_pipe_is_no_error(recipe: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-m", "headrace.cli", "config", "recipe.toml"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert process.returncode == 0
    assert process.stderr == ""


def test_json_is_alone_on_stdout_of_a_real_process_even_when_a_child_prints(recipe: Path) -> None:
    code = (
        "import os, sys\n"
        "from headrace.cli import config\n"
        "real = config.execute\n"
        "def noisy(arguments, output):\n"
        "    os.system('echo from a child')\n"
        "    print('from python')\n"
        "    return real(arguments, output)\n"
        "config.execute = noisy\n"
        "from headrace.cli.main import main\n"
        "sys.exit(main(['config', 'recipe.toml', '--json']))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(process.stdout)["status"] == "done"
    assert "from a child" in process.stderr and "from python" in process.stderr


def test_doctor_fails_with_1_and_names_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_in_process", lambda limit: {"process": "ended with exit code -9 (EOFError)"})
    code, result, people = json_of(capsys, "doctor")
    assert code == 1 and result["status"] == "failed"
    failed = {check["name"]: check for check in result["checks"] if check["status"] == "fail"}
    assert {"forkserver", "matmul", "model"} <= set(failed)
    assert all(check["remedy"] and check["remedy"] in people for check in failed.values())


def sandboxed(end: SandboxEnd, protections: Protections) -> SandboxResult:
    return SandboxResult(end=end, exit_code=0 if end is SandboxEnd.EXITED else None, stdout="", stderr="", protections=protections)


def test_doctor_passes_on_a_sound_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = {
        "process": {"seconds": 1.0},
        "devices": {"accelerators": [], "mps": False, "threads": 1},
        "matmul": {"gigaflops_per_second": 50.0},
        "model": {"seconds": 0.01, "loss": 3.0},
    }
    monkeypatch.setattr(doctor, "probe_in_process", lambda limit: sound)
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 8 * doctor.GIBIBYTE)
    code, result, _ = json_of(capsys, "doctor")
    assert code == 0 and result["error"] is None
    assert "cpu only" in next(check["found"] for check in result["checks"] if check["name"] == "devices")


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (doctor.check_python((3, 10, 0)), "fail"),
        (doctor.check_cores(1), "warn"),
        (doctor.check_cores(2), "ok"),
        (doctor.check_memory(doctor.GIBIBYTE), "fail"),
        (doctor.check_memory(3 * doctor.GIBIBYTE), "warn"),
        (doctor.check_memory(None), "warn"),
        (doctor.check_disk("disk", Path("/no/such/directory")), "fail"),
        (doctor.check_shared_memory(Path("/no/such/directory")), "warn"),
        (doctor.check_sandbox(sandboxed(SandboxEnd.NOT_STARTED, Protections())), "warn"),
        (doctor.check_sandbox(sandboxed(SandboxEnd.EXITED, Protections(privileges=True))), "warn"),
        (doctor.check_sandbox(sandboxed(SandboxEnd.EXITED, Protections(network=True, processes=True, privileges=True, number=True, proc=True))), "ok"),
        (doctor.check_package("no-such-package-at-all"), "fail"),
        (doctor.check_package("torch"), "ok"),
    ],
)
def test_each_doctor_check_tells_good_from_bad(check: doctor.Check, status: str) -> None:
    assert check.status == status
    assert check.found and (status == "ok" or check.remedy)


def test_probe_process_answers_every_question() -> None:
    results = doctor.probe_in_process(120.0)
    assert [check.status for check in doctor.check_processes(results)] == ["ok"] * 4, results


def test_eval_says_the_metric_once(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def evaluate_local(resolved: Any, checkpoint: Path, *, progress: Any = None) -> ev.Evaluated:
        return ev.Evaluated(
            role="evaluator", version=1, lineage=0, mean=0.25, interval95=[0.1, 0.4], num_rollouts=8, metrics={"reward": 0.25, "length": 3.0}, seconds=1.0,
            num_failed=0, failure=None,
        )  # fmt: skip

    fake_runtime(monkeypatch, short_run, evaluate_local=evaluate_local)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert main(["eval", str(tmp_path / "model"), "--recipe", "recipe.toml"]) == 0
    out = capsys.readouterr().out
    assert out.count("reward") == 1 and "length  3.0000" in out
