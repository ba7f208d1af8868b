# ruff: noqa: E501  (one row of the table a line)
"""Wrong commands, recipes and settings: nothing is started, exit 2, one message with everything that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wrong_input.rig import RECIPE, Wrong, assert_ended_as_said, command, ids, make_recipe, run_row

ROWS = [
    Wrong(did="recipe.toml is missing", files={"recipe.toml": None}, says=("'wrong'", "recipe.toml", "shipped name: ", "door")),
    Wrong(did="recipe.toml is not TOML", files={"recipe.toml": "[run\nname = 1"}, says=("wrong/recipe.toml", "not valid TOML", "line 1")),
    Wrong(did="recipe.toml is not UTF-8", files={"recipe.toml": b'[run]\nname = "\xff"'}, says=("wrong/recipe.toml", "not UTF-8", "Save it as UTF-8")),
    Wrong(did="recipe.toml is empty", files={"recipe.toml": ""}, says=("model.path", "task.source", "nothing grades")),
    Wrong(did="a key twice", edits=(('name = "wrong"', 'name = "wrong"\nname = "again"'),), says=("not valid TOML", "line 4")),
    Wrong(did="a text where a number belongs", edits=(("group_size = 4", 'group_size = "4"'),), says=("wrong/recipe.toml", "rollout.group_size", '"4"', "a whole number, at least 1", "default is 8")),
    Wrong(did="a number that is not whole", edits=(("group_size = 4", "group_size = 4.5"),), says=("rollout.group_size", "4.5", "a whole number")),
    Wrong(did="true where a number belongs", edits=(("group_size = 4", "group_size = true"),), says=("rollout.group_size", "true", "a whole number")),
    Wrong(did="a number out of range", overrides=("learner.learning_rate=-1",), says=("command line", "learner.learning_rate", "-1", "above 0")),
    Wrong(did="not a number", overrides=("learner.learning_rate=nan",), says=("learner.learning_rate", "nan", "a finite number")),
    Wrong(did="a section that is a value", files={"recipe.toml": "rollout = 3\n" + RECIPE.replace("[rollout]\ngroup_size = 4\nmax_steps = 3\nmax_tokens = 32\nmax_action_tokens = 4\n", "")}, says=("'rollout'", "a section", "[rollout]")),
    Wrong(did="a misspelt key", overrides=("pool.max_stalness=3",), says=("unknown key 'pool.max_stalness'", "Did you mean 'pool.max_staleness'?")),
    Wrong(did="a key in the wrong section", overrides=("run.max_staleness=3",), says=("unknown key 'run.max_staleness'", "Did you mean 'pool.max_staleness'?")),
    Wrong(did="a misspelt section", edits=(("[pool]", "[pol]"),), says=("wrong/recipe.toml", "unknown section '[pol]'", "Did you mean '[pool]'?")),
    Wrong(did="a misspelt choice", overrides=("run.mode=asink",), says=("run.mode", '"asink"', "sync, async", "Did you mean 'async'?")),
    Wrong(did="an override without a value", overrides=("run.seed",), says=("'run.seed'", "section.key=value", "pool.max_staleness=4")),
    Wrong(did="an override without a section", overrides=("seed=3",), says=("unknown key 'seed'", "Did you mean 'run.seed'?")),
    Wrong(did="several mistakes at once", overrides=("run.seed=-1", "run.mod=sync", "rollout.temperature=0"), says=("run.seed", "Did you mean 'run.mode'?", "rollout.temperature", "above 0")),
    Wrong(did="a group of one with a group-relative advantage", overrides=("rollout.group_size=1",), says=("rollout.group_size", "is 1", "mean_std", "at least 2", "learner.advantage = 'none'")),
    Wrong(did="a rule that is no regular expression", overrides=("marks.rules=['observation:[1-4']",), says=("command line", "marks.rules", "'observation:[1-4' is no regular expression", "unterminated character set")),
    Wrong(did="a rule of an unknown kind", overrides=("marks.rules=['tools:search']",), says=("marks.rules", "'tools' is no kind of rule", "Did you mean 'tool:search'?")),
    Wrong(did="top_p in training", overrides=("rollout.top_p=0.9",), says=("rollout.top_p", "0.9", "without a record", "evaluation.top_p")),
    Wrong(did="top_k in training", overrides=("rollout.top_k=40",), says=("rollout.top_k", "40", "evaluation.top_k")),
    Wrong(did="max_staleness below the minibatches", overrides=("pool.max_staleness=1", "learner.num_minibatches=2", "learner.num_epochs=2"), says=("pool.max_staleness", "is 1", "4 updates", "at least 3")),
    Wrong(
        did="a copy in memory without a journal",
        overrides=("checkpoint.memory_copy=true", "checkpoint.every_seconds=0"),
        says=("checkpoint.memory_copy", "the journal", "Set checkpoint.every_updates"),
    ),
    Wrong(did="more minibatches than groups", overrides=("learner.num_minibatches=3",), says=("learner.num_minibatches", "only 2 groups", "more groups")),
    Wrong(did="asynchronous on shared devices", overrides=("run.placement=colocated",), says=("run.placement", "cannot sample and learn at once", "run.mode = 'sync'")),
    Wrong(did="an action as long as the trajectory", overrides=("rollout.max_action_tokens=32",), says=("rollout.max_action_tokens", "32", "below rollout.max_tokens")),
    Wrong(did="a context beyond the positions of a model from scratch", overrides=("rollout.max_tokens=128",), says=("rollout.max_tokens", "128", "at most model.architecture.max_position_embeddings (64)", "Lower it")),
    Wrong(did="half of decoupled PPO", overrides=("learner.loss=decoupled_ppo",), says=("learner.correction", "belong together", "both or neither")),
    Wrong(did="sampled steps under ratios of trajectories", overrides=("learner.unmarked_fraction=0.5", "learner.loss=gspo"), says=("learner.unmarked_fraction", "needs all its steps", "Use 1")),
    Wrong(did="no task.py", files={"task.py": None}, says=("task.module", "'task.py'", "Create it")),
    Wrong(did="evaluation of nothing", overrides=("evaluation.samples_per_task=0",), says=("evaluation.samples_per_task", "task.evaluate")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "headrace.runtime.local", None)  # importing it would raise


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_wrong_recipe_or_setting(row: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    assert_ended_as_said(row, run_row(row, capsys))


COMMANDS: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("an unknown command", ("rnu", "wrong"), ("rnu", "'run'")),
    ("no recipe", ("run",), ("RECIPE", "headrace run --help")),
    ("a recipe that does not exist", ("run", "dor"), ("'dor'", "Did you mean 'door'?")),
    ("an unknown option", ("run", "wrong", "--run-directory", "x"), ("--run-directory", "headrace run --help")),
    ("an option without its value", ("run", "wrong", "--run-dir"), ("--run-dir", "headrace run --help")),
    ("the run directory is a file", ("run", "wrong", "--run-dir", "wrong/task.py"), ("'wrong/task.py'", "is not a directory", "--run-dir")),
    (
        "the run directory lies below a file",
        ("run", "wrong", "--run-dir", "wrong/task.py/run"),
        ("'wrong/task.py/run'", "'wrong/task.py' is not a directory", "--run-dir"),
    ),
    ("the run directory holds something else", ("run", "wrong", "--run-dir", "wrong"), ("'wrong'", "not empty", "is no run", "--run-dir")),
    ("evaluating what does not exist", ("eval", "nothing"), ("'nothing'", "does not exist", "run directory")),
    ("evaluating a file", ("eval", "wrong/task.py"), ("'wrong/task.py'", "Hugging Face")),
    ("evaluating a directory without a model", ("eval", "wrong"), ("'wrong'", "no config.json")),
    ("evaluating a model without a recipe", ("eval", "model"), ("'model'", "Give --recipe")),
    ("evaluating a run without a checkpoint", ("eval", "early"), ("'early'", "no checkpoint")),
    ("evaluating a run whose only checkpoint is half written", ("eval", "half"), ("'half'", "no checkpoint")),
]


@pytest.mark.parametrize(("arguments", "says"), [(arguments, says) for _, arguments, says in COMMANDS], ids=[name for name, *_ in COMMANDS])
def test_wrong_command(arguments: tuple[str, ...], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    row = Wrong(did=" ".join(arguments), says=says)
    make_recipe(Path("wrong"), row)
    for directory, file in (("model", "config.json"), ("early/checkpoints", None), ("half/checkpoints/.update_000003.partial", "config.json")):
        Path(directory).mkdir(parents=True)
        if file:
            Path(directory, file).write_text("{}")
    before = sorted(Path().rglob("*"))
    assert_ended_as_said(row, command(capsys, *arguments))
    assert sorted(Path().rglob("*")) == before


MODEL = """{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
"intermediate_size": 18944, "vocab_size": 152064}"""

OPTIONS: list[tuple[tuple[str, ...], str | None, object, str | None, str]] = [  # command, key, value, limit, what it says
    (("rnu", "wrong"), "COMMAND", "rnu", "run, resume", "Did you mean 'run'?"),
    (("run", "wrong", "--dry-rum"), "--dry-rum", "--dry-rum", None, "Did you mean '--dry-run'?"),
    (("run", "wrong", "--dry"), "--dry", "--dry", None, "Unknown argument '--dry'"),
    (("plan", "profile.json", "--gpu", "4"), "--gpu", "--gpu", None, "Did you mean '--gpus'?"),
    (("plan", "profile.json", "--gpus=x"), "--gpus", "x", "a whole number, at least 1", "--gpus is 'x'"),
    (("plan", "profile.json"), "--gpus", None, None, "required: --gpus"),
    (("run",), "RECIPE", None, None, "required: RECIPE."),
    (("profile",), "RUN|RECIPE|MODEL", None, None, "required: RUN|RECIPE|MODEL."),
    (("run", "wrong", "--run-dir"), "--run-dir", None, None, "expected one argument"),
    (("run", "wrong", "--log", "tensorbord"), "--log", "tensorbord", "tensorboard, wandb", "Did you mean 'tensorboard'?"),
    (("compare", "wrong", "--target", "nan"), "--target", "nan", "a finite number", "--target is 'nan'"),
    (("compare", "wrong", "--devices", "1"), "--devices", "1", "a whole number, at least 2", "--devices is '1'"),
    (("trajectories", "run", "--min-staleness", "-1"), "--min-staleness", "-1", "a whole number, at least 0", "--min-staleness is '-1'"),
    (("trajectories", "run", "--min-reward", "nan"), "--min-reward", "nan", "a finite number", "--min-reward is 'nan'"),
    (("profile", "run", "--updates", "3"), "--updates", 3, None, "'run' is a run"),
    (("profile", "model/config.json", "--device", "H100", "--updates", "3"), "--updates", 3, None, "nothing is run"),
    (("profile", "model/config.json"), "--device", None, None, "Add --device"),
    (("profile", "model"), "--device", None, None, "Add --device"),
    (("profile", "model/config.json", "--device", "H100", "--tensor-parallel", "3"), "--tensor-parallel", 3, "a divisor of 28", "28 attention heads"),
    (("simulate", "plan.json", "--failures", "1"), "--failures", "1", "a number, at least 0 and below 1", "--failures is '1'"),
]


@pytest.mark.parametrize(("arguments", "key", "value", "limit", "says"), OPTIONS, ids=[" ".join(row[0]) for row in OPTIONS])
def test_wrong_options_name_the_option_its_value_and_what_it_may_be(
    arguments: tuple[str, ...], key: str | None, value: object, limit: str | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe(Path("wrong"), Wrong(did="nothing", says=()))
    for name, text in (("model/config.json", MODEL), ("run/events.jsonl", "")):
        Path(name).parent.mkdir()
        Path(name).write_text(text)
    ended = command(capsys, *arguments)
    error = ended.error
    assert (ended.code, error["kind"], error["key"], error["value"]) == (2, "ConfigError", key, value), ended.people
    assert (error["limit"] or "").startswith(limit or "") and (limit is not None or error["limit"] is None)
    assert says in ended.people and error["remedy"] and "Traceback" not in ended.people and "_count" not in ended.people
