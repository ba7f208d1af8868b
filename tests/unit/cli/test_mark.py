"""headrace mark: shares, agreement and examples of rules on a recorded scripted run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from rich.console import Console

from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.cli.main import main
from headrace.cli.mark import picture
from headrace.clock import run_virtual
from headrace.config import RecordTrajectories
from headrace.marks import StepView
from headrace.runtime import trajectory_store
from headrace.runtime.trajectory_store import TrajectoryStore

RECIPE = """
[model]
path = "m"
[task]
module = "{module}"
source = "task:tasks"
environment = "task:Environment"
[rollout]
group_size = 2
stop_strings = ["\\u0000"]
"""
TASK_PY = """
def tasks():
    yield {"id": "steps", "data": {"key": [1]}}

class Environment:
    async def reset(self, task): ...
    async def step(self, action): ...

def marks(trajectory):
    return [index in trajectory.task.data.get("key", ()) for index in range(len(trajectory.steps))]

async def heavy(trajectory):
    return [step.key + step.reward for step in trajectory.steps]

def short(trajectory):
    return [1.0]

def broken(trajectory):
    raise LookupError("no such door")
"""


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Observations are `0?`, `1?`, ...; `steps` answers four of them, the environment marks the second."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "task.py").write_text(TASK_PY)
    (directory / "config.toml").write_text(RECIPE.format(module=directory / "task.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory_store, "MAX_ROWS", 7)
        store = TrajectoryStore(directory / "trajectories", record=RecordTrajectories.ALL)
        tasks = [
            scripted_task("steps", answers=4, key_steps=[1], reward=1.0, kind="long", action_tokens=[2, 3, 1, 2]),
            scripted_task("short", answers=1, reward=0.25, action_tokens=[5]),
            scripted_task("broken", fail_at=0),
        ]
        run_virtual(ScriptedRun(settings=run_settings(num_updates=10, max_staleness=4), tasks=tasks, recorder=store).run())
        store.close()
    write_tokenizer(directory / "checkpoints" / "update_000010")
    return directory


def write_tokenizer(model: Path) -> None:
    """Token n is the character of code point n; 0 ends and 1 begins, both special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    tokenizer = Tokenizer(models.WordLevel({chr(code) if code > 1 else f"<{code}>": code for code in range(128)}, unk_token="<1>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<0>", special=True), AddedToken("<1>", special=True)])
    tokenizer.save(str(model / "tokenizer.json"))


def asked(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["mark", str(directory), "--json", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def good_rows(directory: Path) -> list[dict[str, Any]]:
    rows = [row for path in sorted((directory / "trajectories").glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]
    return [row for row in rows if row["end"] != "environment_error"]


def test_a_rule_that_finds_what_the_environment_marks_agrees_with_the_record(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run_directory, capsys, "--rule", r"observation:^1\?")
    rows = good_rows(run_directory)
    long = [row for row in rows if row["task_id"] == "steps"]
    assert len(long) > 5 and len(rows) > len(long)
    assert (found["trajectories"], found["marked_trajectories"]) == (len(rows), len(long))
    assert found["failed_left_out"] > 0
    whole = found["all"]
    assert whole["steps"] == sum(row["steps"] for row in rows)
    assert whole["tokens"] == sum(row["action_tokens"] for row in rows)
    assert (whole["marked_steps"], whole["marked_tokens"]) == (len(long), 3 * len(long))
    assert (whole["recorded_steps"], whole["recorded_tokens"]) == (len(long), 3 * len(long))
    assert whole["marked_share"] == len(long) / whole["steps"] and whole["marked_token_share"] == 3 * len(long) / whole["tokens"]
    assert (whole["found_share"], whole["agreed_share"]) == (1.0, 1.0)


def test_shares_are_given_by_position_and_kind(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run_directory, capsys, "--rule", "observation:[12]")
    rows = good_rows(run_directory)
    num_long = sum(row["task_id"] == "steps" for row in rows)
    assert [(each["position"], each["steps"], each["marked_steps"], each["recorded_steps"]) for each in found["by_position"]] == [
        ("0", len(rows), 0, 0),
        ("1", num_long, num_long, num_long),
        ("2 to 3", 2 * num_long, num_long, 0),
    ]
    assert [(each["kind"], each["marked_share"]) for each in found["by_kind"]] == [("default", 0.0), ("long", 0.5)]
    assert (found["all"]["found_share"], found["all"]["agreed_share"]) == (1.0, 0.5)


def test_several_markers_are_counted_each_and_together(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run_directory, capsys, "--rule", "observation:1", "--rule", "reward:positive", "--rule", "tool:none", "--rule", "observation:[13]")
    rows = good_rows(run_directory)
    num_long = sum(row["task_id"] == "steps" for row in rows)
    assert {each["marker"]: each["steps"] for each in found["markers"]} == {
        "observation:1": num_long,
        "reward:positive": len(rows),
        "tool:none": 0,
        "observation:[13]": 2 * num_long,
    }
    assert found["all"]["marked_steps"] == len(rows) + num_long


def test_texts_are_without_special_tokens(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(run_directory, capsys, "--rule", r"observation:^0\?$")["all"]["marked_steps"] == len(good_rows(run_directory))
    assert asked(run_directory, capsys, "--rule", "action:[^a-z]")["all"]["marked_steps"] == 0


def test_the_recipes_function_is_tried_with_its_tasks(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_long = sum(row["task_id"] == "steps" for row in good_rows(run_directory))
    found = asked(run_directory, capsys, "--function", "task:marks")
    assert (found["all"]["marked_steps"], found["all"]["agreed_share"]) == (num_long, 1.0)
    assert any("`key`" in note for note in found["not_shown"])
    found = asked(run_directory, capsys, "--function", "task:heavy")
    assert found["all"]["marked_steps"] == num_long + len(good_rows(run_directory))


def test_an_advantage_is_told_against_the_recorded_members(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run_directory, capsys, "--min-advantage", "0.5")
    assert found["markers"] == [{"marker": "advantage >= 0.5", "steps": 0, "share": 0.0}], "members of a scripted group have equal rewards"
    assert any("entropies are not recorded" in note for note in found["not_shown"])


@pytest.mark.parametrize(("record", "is_said"), [("", True), ('[run]\nrecord_trajectories = "all"\n', False)])
def test_a_record_of_trained_trajectories_only_is_said_to_be_one(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str, is_said: bool
) -> None:
    (tmp_path / "config.toml").write_text(record)
    (tmp_path / "trajectories").symlink_to(run_directory / "trajectories")
    notes = asked(tmp_path, capsys, "--rule", "reward:positive")["not_shown"]
    assert any("what the learner got" in note for note in notes) is is_said


def test_examples_are_the_newest_with_a_mark_one_a_group(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(run_directory, capsys, "--rule", "observation:[12]", "--limit", "2")
    long = [row for row in good_rows(run_directory) if row["task_id"] == "steps"]
    assert [example["group"] for example in found["examples"]] == sorted({row["group"] for row in long})[-2:]
    for example in found["examples"]:
        assert (example["marked_steps"], example["recorded_key_steps"], example["steps"]) == ([1, 2], [1], 4)
        assert example["text"].startswith("0?")


def test_the_picture_shows_what_is_marked_and_what_only_the_record_has() -> None:
    row = {"group": 3, "member": 1, "task_id": "t", "reward": 1.0, "key_steps": [0, 1]}
    steps = [StepView(observation=f"{index}?", action=action) for index, action in enumerate("abcd")]
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(row, steps, {1, 2}))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0?‹a›1?«b»2?«c»3?d" in shown and "group 3.1" in shown and "4 steps, 2 marked, 2 recorded as key" in shown


def test_people_are_told_the_same_in_words(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mark", str(run_directory), "--rule", "observation:[12]", "--rule", "reward:negative"]) == 0
    out = capsys.readouterr().out
    for text in ("Of the recorded key steps 100.0 % are marked; of the marked steps 50.0 %", "reward:negative", "2 to 3", "long", "failed ones left out", "«"):
        assert text in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], ("Nothing says what to mark", "--rule KIND:ARGUMENT")),
        (["--rule", "observation:[1", "--rule", "tols:x"], ("no regular expression", "'tols'", "Did you mean 'tool:x'?")),
        (["--function", "task:mark"], ("'mark'", "Did you mean 'task:marks'?")),
        (["--function", "task:short"], ("returned 1 weights for 4 steps", "group 0.0, task 'steps'")),
        (["--function", "task:broken"], ("LookupError: no such door (line 19 of task.py)", "task 'short'; the recipe's source has no such task")),
        (["--min-advantage", "0"], ("above 0",)),
        (["--min-advantage", "much"], ("a finite number",)),
        (["--limit", "0"], ("at least 1",)),
    ],
)
def test_wrong_use_is_named(run_directory: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: tuple[str, ...]) -> None:
    assert main(["mark", str(run_directory), *options]) == 2
    shown = capsys.readouterr().err
    assert all(text in shown for text in says) and "Traceback" not in shown


def test_a_run_without_a_record_or_without_a_tokenizer_says_so(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert main(["mark", str(tmp_path), "--rule", "tool:x"]) == 2
    assert "holds no recorded trajectories" in capsys.readouterr().err
    (tmp_path / "trajectories").symlink_to(run_directory / "trajectories")
    assert main(["mark", str(tmp_path), "--rule", "tool:x"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    found = asked(tmp_path, capsys, "--rule", "reward:positive")
    assert found["all"]["marked_steps"] == len(good_rows(run_directory)) and found["examples"][0]["text"] is None
