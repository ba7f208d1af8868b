# ruff: noqa: E501  (one row of the table a line)
"""Environments, rewards and evaluate functions that go wrong while the run runs: it ends with 1 and names the task, or goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.event_log import read_events
from wrong_input.rig import ENVIRONMENT, TASKS, Wrong, assert_ended_as_said, environment, ids, run_row, scripted_runtime

__all__ = ["scripted_runtime"]

FAILS: dict[str, Any] = {"exit": 1, "kind": "NoProgressError"}
SOON = (*ENVIRONMENT, "rollout.max_environment_seconds=0.3")
UNSAMPLED = ("evaluation.samples_per_task=0", "task.evaluate=task:evaluate", "evaluation.metric=exact")
EVALUATE = "async def evaluate(policy, tasks):\n    return {'exact': 0.5}\n"

ROWS = [
    Wrong(did="an environment that always raises", **FAILS, overrides=ENVIRONMENT, task=environment("step: raise RuntimeError('no tool')"), says=("task 't", "environment_error", "RuntimeError: no tool (task.py:", "in step")),
    Wrong(did="an environment that raises in reset", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return {}['key']"), says=("task 't", "KeyError: 'key' (task.py:", "in reset")),
    Wrong(did="a plain environment that raises", **FAILS, overrides=ENVIRONMENT, task=environment("step: raise RuntimeError('no tool')", plain=True), says=("task 't", "RuntimeError: no tool (task.py:")),
    Wrong(did="a constructor that raises", **FAILS, overrides=ENVIRONMENT, task=environment() + "    def __init__(self):\n        raise OSError('no sandbox')\n", says=("making the environment failed", "OSError: no sandbox")),
    Wrong(did="reset returns nothing", **FAILS, overrides=ENVIRONMENT, task=environment("reset: pass"), says=("reset returned None", "where an Observation belongs")),
    Wrong(did="reset returns a text", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return 'ab?'"), says=("reset returned 'ab?' (str)", "where an Observation belongs")),
    Wrong(did="an observation whose text is a number", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return Observation(text=3)"), says=("text is 3 (int)",)),
    Wrong(did="an empty first observation", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return Observation(text='')"), says=("the prompt is empty",)),
    Wrong(did="a mark below 0", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return Observation(text='ab?', key=-1)"), says=("key is -1 (int)", "a weight >= 0")),
    Wrong(did="step returns no observation", **FAILS, overrides=ENVIRONMENT, task=environment("step: return None, 0.0, False"), says=("step 0 returned no observation although it is not done",)),
    Wrong(did="step returns two values", **FAILS, overrides=ENVIRONMENT, task=environment("step: return None, 1.0"), says=("step returned (None, 1.0) (tuple)", "(observation, reward, done)")),
    Wrong(did="done is a number", **FAILS, overrides=ENVIRONMENT, task=environment("step: return None, 1.0, 1"), says=("done = 1 (int)", "True or False")),
    Wrong(did="a step's reward is a text", **FAILS, overrides=ENVIRONMENT, task=environment("step: return None, 'good', True"), says=("reward_error", "'good' (str)", "not a number")),
    Wrong(did="observations outside the alphabet", **FAILS, overrides=ENVIRONMENT, task=environment("reset: return Observation(text='xyz')"), says=("'xyz'", "model.characters")),
    Wrong(did="an environment that fails in training only", **FAILS, overrides=(*ENVIRONMENT, *UNSAMPLED), task=environment("step: raise RuntimeError('no tool')") + EVALUATE, says=("64 rollouts in a row failed", "task 't", "RuntimeError: no tool", "run.max_failed_rollouts_in_a_row")),
    Wrong(did="an environment that hangs", **FAILS, overrides=SOON, task=environment("step: await asyncio.sleep(3600)"), says=("Environment.step", "0.3 s", "rollout.max_environment_seconds")),
    Wrong(did="a plain environment that hangs", **FAILS, overrides=SOON, task=environment("step: time.sleep(3600)", plain=True), says=("Environment.step", "0.3 s", "rollout.max_environment_seconds")),
    Wrong(did="a plain environment that ends its process", **FAILS, overrides=ENVIRONMENT, task=environment("step: os._exit(3)", plain=True), says=("Environment.step", "exit code 3")),
    Wrong(did="an environment that calls exit", **FAILS, overrides=ENVIRONMENT, task=environment("step: exit(3)"), says=("Environment.step", "exit(3)")),
    Wrong(did="a reward that always raises", **FAILS, task="def reward(task, answer):\n    return float(answer)\n", says=("task 't", "reward_error", "ValueError", "(task.py:8 in reward)")),
    Wrong(did="a reward that is NaN", **FAILS, task="def reward(task, answer):\n    return float('nan')\n", says=("the reward function returned the reward nan",)),
    Wrong(did="a reward that is infinite", **FAILS, task="def reward(task, answer):\n    return float('inf')\n", says=("the reward function returned the reward inf",)),
    Wrong(did="a reward that is a list", **FAILS, task="def reward(task, answer):\n    return [1.0] * len(answer)\n", says=("the reward function returned [", "(list) as reward, not a number")),
    Wrong(did="a reward that hangs", **FAILS, overrides=("rollout.max_environment_seconds=0.3",), task="import time\ndef reward(task, answer):\n    time.sleep(3600)\n    return 0.0\n", says=("reward gave no answer in 0.3 s", "rollout.max_environment_seconds")),
    Wrong(did="a marking function that raises", **FAILS, overrides=("marks.function=task:marks",), task="def marks(trajectory):\n    return [1 / trajectory.steps[0].key]\n", says=("task 't", "mark_error", "marks.function 'task:marks'", "ZeroDivisionError", "(task.py:8 in marks)")),
    Wrong(did="a marking function that returns one weight too many", **FAILS, overrides=("marks.function=task:marks",), task="async def marks(trajectory):\n    return [1.0, 0.0]\n", says=("mark_error", "marks.function 'task:marks' returned 2 weights for 1 steps")),
    Wrong(did="a marking function that hangs", **FAILS, overrides=("marks.function=task:marks", "rollout.max_environment_seconds=0.3"), task="import time\nasync def reward(task, answer):\n    return float(len(answer))\ndef marks(trajectory):\n    time.sleep(3600)\n", says=("mark_error", "marks gave no answer in 0.3 s", "rollout.max_environment_seconds")),
    Wrong(did="rewards that are all equal", **FAILS, overrides=("run.max_empty_batches=3",), task="async def reward(task, answer):\n    return 0.5\n", says=("3 batches in a row", "different rewards", "0.5", "rollout.temperature")),
    Wrong(did="a metric that evaluate does not return", kind="RecipeError", exit=2, starts=True, overrides=("evaluation.metric=accuracy",), says=("evaluation.metric", "'accuracy'", "returned reward", "task.evaluate")),
    Wrong(did="evaluate raises", kind="RecipeError", exit=2, starts=True, overrides=("task.evaluate=task:evaluate",), task="async def evaluate(policy, tasks):\n    return tasks[99]\n", says=("task.evaluate 'task:evaluate'", "IndexError", "task.py:8")),
    Wrong(did="evaluate returns a number", kind="RecipeError", exit=2, starts=True, overrides=("task.evaluate=task:evaluate",), task="async def evaluate(policy, tasks):\n    return 0.5\n", says=("task:evaluate", "returned a float", "dictionary")),
    Wrong(did="evaluate returns rubbish in a dictionary", kind="RecipeError", exit=2, starts=True, overrides=("task.evaluate=task:evaluate",), task="async def evaluate(policy, tasks):\n    return {'accuracy': 'high'}\n", says=("task:evaluate", "'accuracy': 'high'", "finite numbers")),
    Wrong(did="evaluate hangs", kind="WaitTimeoutError", exit=1, overrides=("task.evaluate=task:evaluate", "limits.evaluate_seconds=0.5"), task="import asyncio\nasync def evaluate(policy, tasks):\n    await asyncio.sleep(3600)\n", says=("evaluation of version 0", "0.5 s", "limits.evaluate_seconds")),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_wrong_user_code(row: Wrong, scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    assert_ended_as_said(row, run_row(row, capsys))


LONG, BAD = "long", "bad"


def test_a_task_that_always_fails_is_named_and_the_run_finishes(scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Case 4: one task's environment always raises, one prompt is longer than the context. Their groups alone are larger than the
    number of failures in a row that would end a run in which every task fails."""
    row = Wrong(
        did="two bad tasks",
        exit=0,
        says=(f"task {BAD}, ", "rollouts: environment_error", "no such word", f"task {LONG}, ", "33 tokens", "rollout.max_tokens"),
        files={"tasks.jsonl": TASKS + "".join(f'{{"id": "{name}"}}\n' for name in (BAD, LONG))},
        overrides=(*ENVIRONMENT, "rollout.group_size=40", "run.max_failed_rollouts_in_a_row=20", "run.num_updates=12", "task.shuffle=false"),
        task=environment(
            "step: return Outcome(None, len(action.text) / 4, True)",
            f"reset: if task.id == '{BAD}': raise KeyError('no such word')\nreturn Observation(text='ab?' * (11 if task.id == '{LONG}' else 1))",
        ),
    )
    ended = run_row(row, capsys)
    assert_ended_as_said(row, ended)
    assert {one["task"]: one["reason"] for one in ended.result["failures"]} == {BAD: "environment_error", LONG: "prompt_too_long"}
    failed = [event for event in read_events(Path("run/events.jsonl")) if event["event"] == "rollout_failed" and event["reason"] != "cancelled"]
    attempts = {name: {event["attempt"] for event in failed if event["task_id"] == name} for name in (BAD, LONG)}
    assert attempts == {BAD: {0, 1}, LONG: {0}}, "rollout.max_attempts, and none where another attempt could not help"
    assert len(failed) >= 40 and ended.result["num_updates"] == 12 and ended.result["ledger"]["closes"]
    assert ended.people.count(f"task {BAD} failed: ") == 1, "named once while it runs, not once a rollout"
