"""`headrace new`: what it makes runs and tests as it is; what it refuses, and that it then changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.cli.new import KINDS
from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.recipe import RecipeCode
from headrace.rollout.user_code import RecipeUserCode
from headrace.tasks.source import split_tasks

FILES = {"README.md", "recipe.toml", "task.py", "tasks.jsonl", "test_task.py"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_task_has_settings_tasks_and_code_that_fit_together(here: Path, kind: str) -> None:
    assert main(["new", "my_task", "--kind", kind]) == 0
    assert {path.name for path in Path("my_task").iterdir()} == FILES
    assert not [text for text in contents(here).values() if "{{" in text]
    resolved = load_settings("my_task")
    code = RecipeCode(resolved.task_module, resolved.settings.task.options)
    training, evaluation = split_tasks(resolved.settings, code)
    assert resolved.settings.run.name == "my_task" and len(training) > len(evaluation) > 0
    assert RecipeUserCode(code, resolved.settings).has_reward == (kind == "one_step")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_tasks_own_tests_pass_and_bite(here: Path, kind: str) -> None:
    main(["new", "my_task", "--kind", kind])
    command = [sys.executable, "-m", "pytest", "my_task", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(here)]
    fine = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert fine.returncode == 0, fine.stdout
    task = Path("my_task/task.py")
    task.write_text(task.read_text().replace("Outcome(None, 1.0", "Outcome(None, 0.5").replace("right / max", "0.5 * right / max"))
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1, wrong.stdout


def test_new_says_what_it_made_and_what_comes_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my_task", "--json"]) == 0
    captured = capsys.readouterr()
    made = json.loads(captured.out)
    assert (made["status"], made["kind"], set(made["files"])) == ("done", "one_step", FILES)
    assert Path(made["directory"]) == here / "my_task"
    assert made["next"] == ["headrace run my_task", "pytest my_task"]
    assert all(command in captured.err for command in made["next"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my task", "Try 'my_task'."),
        ("9lives", "Try 'task_9lives'."),
        ("x" * 65, f"Try '{'x' * 64}'."),
        ("../../..", "is not a name for a task"),
        ("", "is not a name for a task"),
        ("-", "is not a name for a task"),
        ("schön", "is not a name for a task"),
        ("door", "Try 'my_door'."),
        ("used", "exists already"),
        ("file", "exists already"),
        ("broken_link", "exists already"),
        ("nowhere/my_task", "there is no directory 'nowhere'"),
        ("file/my_task", "there is no directory 'file'"),
    ],
)
def test_a_refused_name_ends_with_2_and_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    Path("used").mkdir()
    Path("used/mine.txt").write_text("kept")
    Path("file").write_text("kept")
    Path("broken_link").symlink_to("nothing")
    before = contents(here), sorted(os.listdir(here))
    assert main(["new", "--json", "--", name]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["kind"] == "ConfigError" and says in captured.err and error["remedy"] in captured.err
    assert (contents(here), sorted(os.listdir(here))) == before


def test_an_unknown_kind_names_the_known_ones(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my_task", "--kind", "two_step"]) == 2
    said = capsys.readouterr().err
    assert all(kind in said for kind in KINDS)
    assert not os.listdir(here)


def test_a_write_that_fails_half_way_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.name == "tasks.jsonl":
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["new", "my_task"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not os.listdir(here)


def test_templates_are_data_that_the_wheel_ships(here: Path) -> None:
    """Hatch ships every file of the package folder that git does not ignore."""
    for kind in KINDS:
        folder = resources.files("headrace").joinpath("templates", kind)
        assert {path.name.removesuffix(".template") for path in folder.iterdir()} == FILES


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_task_learns_as_it_is(here: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(here / "cache"))
    main(["new", "my_task", "--kind", kind])
    capsys.readouterr()
    assert main(["run", "my_task", "--json", "--run-dir", "run"]) == 0
    result = json.loads(capsys.readouterr().out)
    before, after = result["evaluation"]["before"], result["evaluation"]["after"]
    assert after["interval95"][0] > before["interval95"][1] + 0.2
    assert any(event["event"] == "checkpoint_saved" for event in read_events(Path("run/events.jsonl")))
