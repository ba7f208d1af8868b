"""The shipped recipes as whole runs, small, and the loop in one file."""

from __future__ import annotations

import asyncio
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from end_to_end.conftest import LETTERS
from headrace.config_loading import load_settings, shipped_recipes
from headrace.event_log import read_events
from headrace.report.summary import summarize
from headrace.runtime.local import run_local

ONE_FILE_LOOP = Path(__file__).parents[2] / "recipes" / "one_file_loop.py"
SMALL = ["warm_start.num_updates=2", "warm_start.batch_size=4", "pool.groups_per_batch=2", "rollout.group_size=4", "pool.no_signal=train"]
QUICK = {"door": ["task.options.tool_seconds=0"], "arithmetic": ["rollout.max_action_tokens=24", "evaluation.temperature=0"]}
METRICS = {"door": "success_probability", "arithmetic": "work_probability"}


@pytest.fixture
def one_file_loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_loop", ONE_FILE_LOOP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", QUICK)
def test_a_shipped_recipe_runs_evaluates_and_leaves_a_checkpoint(name: str, model_cache: Path, tmp_path: Path) -> None:
    settings = load_settings(name, [*SMALL, *QUICK[name], "run.num_updates=2", "evaluation.num_tasks=8"])
    outcome = asyncio.run(run_local(settings, tmp_path / "run"))
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event["version"] for event in events if event["event"] == "updated"] == [1, 2]
    evaluation = summarize(events)["evaluation"]
    for when in ("before", "after"):
        assert 0 <= evaluation[when]["metrics"][METRICS[name]] < 0.5
        assert 0 <= evaluation[when]["metrics"]["reward"] <= 1
    assert outcome.checkpoint is not None and (outcome.checkpoint / "config.json").is_file()


def test_the_recipes_tested_here_are_all_that_train_a_model_from_scratch() -> None:
    from_scratch = {name for name, path in shipped_recipes().items() if load_settings(path).settings.model.architecture is not None}
    assert from_scratch == set(QUICK)


def test_the_loop_in_one_file_learns_on_policy(one_file_loop: ModuleType, model_cache: Path) -> None:
    loop = one_file_loop.Loop(str(LETTERS), ["learner.learning_rate=1e-2"])
    learn, results = loop.learner.learn, []
    loop.learner.learn = lambda selection: results.append(learn(selection)) or results[-1]
    rewards = asyncio.run(one_file_loop.train(loop, 12))
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert loop.sampler.version == loop.learner.version == (0, 12)
    for result in results:
        assert result.statistics.staleness_max == 0
        assert abs(result.statistics.ratio_max - 1) < 2e-4


@pytest.mark.parametrize("name", QUICK)
def test_the_loop_in_one_file_runs_shipped_recipes(name: str, model_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(ONE_FILE_LOOP), name, "--updates", "2", *SMALL, *QUICK[name]])
    runpy.run_path(str(ONE_FILE_LOOP), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["update", "1"], ["update", "2"]]
    assert all(0 <= float(line.split()[3]) <= 1 for line in lines)


def test_the_loop_in_one_file_says_what_is_wrong_and_stops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(ONE_FILE_LOOP), "door", "pool.max_stalness=3"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ONE_FILE_LOOP), run_name="__main__")
    assert ended.value.code == 2, "wrong configuration, as with every command"
    assert "Did you mean 'pool.max_staleness'" in capsys.readouterr().err


def test_the_loop_in_one_file_stops_when_every_rollout_fails(one_file_loop: ModuleType, model_cache: Path) -> None:
    loop = one_file_loop.Loop(str(LETTERS), ["rollout.max_tokens=2", "rollout.max_action_tokens=1"])
    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(one_file_loop.train(loop, 1))
    assert caught.group_contains(one_file_loop.NoProgressError, match="every rollout failed; the first with prompt_too_long")


def test_the_loop_in_one_file_stays_short_enough_to_read() -> None:
    assert len(ONE_FILE_LOOP.read_text().splitlines()) <= 150
