# ruff: noqa: E501  (one row of the table a line)
"""Wrong task files and Python that can be seen to be wrong before anything starts: exit 2, the place is named, no run directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.recipe import RecipeCode
from headrace.runtime.preflight import check_reward
from wrong_input.rig import ENVIRONMENT, TASKS, Wrong, assert_ended_as_said, ids, run_row, scripted_runtime

__all__ = ["scripted_runtime"]

KIND = "RecipeError"
LINE = '{"id": "new", "prompt": "ab?"}'
WORDS = json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", "vocab": {"ab": 0, "?": 1}, "unk_token": "?"}})
FUNCTION = ("task.source=task:tasks",)

ROWS = [
    # what is sure before anything is started
    Wrong(did="every prompt longer than the context", kind=KIND, files={"tasks.jsonl": TASKS.replace("ab?", "ab?" * 20)}, says=("task 't", "60 tokens", "rollout.max_tokens is 32", "shorten")),
    Wrong(did="every chat longer than the context", kind=KIND, overrides=("model.path=path",), files={"path/config.json": "{}", "path/tokenizer.json": WORDS, "tasks.jsonl": TASKS.replace('"ab?"', '[{"role": "user", "content": "' + "ab " * 40 + '"}]').replace("prompt", "messages")}, says=("task 't", "40 tokens", "rollout.max_tokens is 32")),
    Wrong(did="a context beyond the positions of the model in a directory", overrides=("model.path=path", "rollout.max_tokens=128"), files={"path/config.json": '{"max_position_embeddings": 64}'}, says=("rollout.max_tokens is 128", "64 positions", "path/config.json", "Lower rollout.max_tokens")),
    Wrong(did="a reward that returns nothing", kind=KIND, task="def reward(task, answer):\n    pass\n", says=("task.py", "'task:reward' returns nothing", "a finite number")),
    Wrong(did="a reward that is a text", kind=KIND, task="def reward(task, answer):\n    if answer:\n        return '1.0'\n    return ''\n", says=("'task:reward' returns a text, not a number",)),
    Wrong(did="a reward that is a tuple", kind=KIND, task="async def reward(task, answer):\n    return 1.0, {'length': 3}\n", says=("'task:reward' returns a tuple",)),
    Wrong(did="a reward with other arguments", kind=KIND, task="def reward(answer):\n    return 1.0\n", says=("'task:reward' cannot be called with (task, answer)", "too many positional arguments")),
    Wrong(did="a marking function that is not there", kind=KIND, overrides=("marks.function=task:mark",), task="def marks(trajectory):\n    return []\n", says=("'mark'", "Did you mean 'task:marks'?")),
    Wrong(did="a marking function with other arguments", kind=KIND, overrides=("marks.function=task:marks",), task="def marks(task, steps):\n    return []\n", says=("'task:marks' cannot be called with (trajectory)", "missing a required argument")),
    # the JSONL file
    Wrong(did="the task file does not exist", files={"tasks.jsonl": None}, says=("task.source", "'tasks.jsonl'", "No such file", "relative to the recipe")),
    Wrong(did="the task file is a directory", overrides=("task.source=.",), says=("task.source", "Is a directory")),
    Wrong(did="the task file is empty", kind=KIND, files={"tasks.jsonl": ""}, says=("tasks.jsonl", "no tasks", "at least one")),
    Wrong(did="a line is not JSON", kind=KIND, files={"tasks.jsonl": TASKS + "{'id': 'x'}\n"}, says=("tasks.jsonl, line 13", "not JSON", "one JSON object a line")),
    Wrong(did="a line holds NaN", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "x", "prompt": "a", "value": NaN}\n'}, says=("line 13", "NaN")),
    Wrong(did="a line is a list", kind=KIND, files={"tasks.jsonl": TASKS + "[1]\n"}, says=("line 13", "a list where a task belongs")),
    Wrong(did="a line without an id", kind=KIND, files={"tasks.jsonl": TASKS + '{"prompt": "ab?"}\n'}, says=("line 13", "'id' is missing")),
    Wrong(did="an id twice", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "t3", "prompt": "b?"}\n'}, says=("line 13", "'t3'", "already used (line 4)")),
    Wrong(did="an id that is a list", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": [1], "prompt": "b?"}\n'}, says=("line 13", "'id' is [1]")),
    Wrong(did="keys beside data", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "x", "data": {}, "prompt": "a"}\n'}, says=("line 13", "'prompt' stands beside 'data'")),
    Wrong(did="the task file is not UTF-8", kind=KIND, files={"tasks.jsonl": TASKS.encode() + b'{"id": "\xe4"}\n'}, says=("tasks.jsonl, line 13", "not UTF-8", "Save the file as UTF-8")),
    Wrong(did="no task is left to train on", files={"tasks.jsonl": LINE}, says=("1 tasks", "evaluation.num_tasks", "none is left", "task.evaluation_source")),
    # what one-step tasks need
    Wrong(did="a task without a prompt", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "bare"}\n'}, says=("task 'bare' has no 'prompt'", "task.environment")),
    Wrong(did="an empty prompt", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "void", "prompt": ""}\n'}, says=("task 'void' has no 'prompt'", "not empty")),
    Wrong(did="many tasks without a prompt", kind=KIND, files={"tasks.jsonl": "".join(f'{{"id": "u{i}"}}\n' for i in range(9))}, says=("'u0', 'u1', 'u2', 'u3', 'u4' and 4 more have",)),
    Wrong(did="characters missing from the alphabet", kind=KIND, files={"tasks.jsonl": TASKS + '{"id": "odd", "prompt": "ab!"}\n'}, says=("task 'odd'", "'!'", "model.characters", "Add")),
    # task.py
    Wrong(did="task.py has a syntax error", kind=KIND, task="def broken(:\n", says=("task.py", "SyntaxError", "line 7", "Correct that line")),
    Wrong(did="task.py imports what is not there", kind=KIND, task="import no_such_package\n", says=("task.py", "ModuleNotFoundError", "line 7", "Install what provides 'no_such_package'")),
    Wrong(did="task.py raises when imported", kind=KIND, task="value = {}['missing']\n", says=("task.py", "KeyError: 'missing'", "line 7")),
    Wrong(did="task.py calls exit when imported", kind=KIND, task="raise SystemExit(3)\n", says=("task.py", "SystemExit: 3", "line 7")),
    Wrong(did="a dot for the colon", kind=KIND, overrides=("task.reward=task.reward",), says=("'task.reward' is not of the form", "Write 'task:reward'.")),
    Wrong(did="the reward is not there", kind=KIND, overrides=("task.reward=task:rewrad",), says=("no function or class 'rewrad'", "Did you mean 'task:reward'?")),
    Wrong(did="the reward is not a function", kind=KIND, task="number = 3\n", overrides=("task.reward=task:number",), says=("no function or class 'number'",)),
    Wrong(did="the reward names another module", kind=KIND, overrides=("task.reward=grader:reward",), says=("'grader:reward'", "Write 'task:reward'")),
    Wrong(did="the environment is not there", kind=KIND, overrides=ENVIRONMENT, says=("no function or class 'Environment'",)),
    Wrong(did="an environment without step", kind=KIND, task="class Environment:\n    async def reset(self, task): ...\n", overrides=ENVIRONMENT, says=("'task:Environment'", "no method 'step'", "reset(task) and step(action)")),
    Wrong(did="an environment factory that is async", kind=KIND, task="async def Environment(): ...\n", overrides=ENVIRONMENT, says=("async function", "plain `def`")),
    Wrong(did="an environment factory that raises", kind=KIND, task="def Environment():\n    raise OSError('no sandbox')\n", overrides=ENVIRONMENT, says=("'task:Environment'", "no sandbox", "task.py:8")),
    Wrong(did="evaluate is not async", kind=KIND, task="def evaluate(policy, tasks):\n    return {}\n", overrides=("task.evaluate=task:evaluate",), says=("task:evaluate", "not an async function", "async def evaluate")),
    Wrong(did="evaluate is not there", kind=KIND, overrides=("task.evaluate=task:evaluate",), says=("no function or class 'evaluate'",)),
    Wrong(did="demonstrations are not there", kind=KIND, overrides=("warm_start.demonstrations=task:demos", "warm_start.num_updates=3"), says=("no function or class 'demos'",)),
    # task.source as a function
    Wrong(did="the source function raises", kind=KIND, task="def tasks():\n    return [1 / 0]\n", overrides=FUNCTION, says=("task:tasks", "ZeroDivisionError", "line 8 of task.py")),
    Wrong(did="the source function raises half-way", kind=KIND, task=f"def tasks():\n    yield {LINE}\n    raise OSError('gone')\n", overrides=FUNCTION, says=("task number 2", "OSError: gone", "line 9 of task.py")),
    Wrong(did="the source function returns nothing", kind=KIND, task="def tasks():\n    pass\n", overrides=FUNCTION, says=("task:tasks", "returned a NoneType", "Return a list")),
    Wrong(did="the source function yields nothing", kind=KIND, task="def tasks():\n    return []\n", overrides=FUNCTION, says=("task:tasks", "no tasks")),
    Wrong(did="the source function is async", kind=KIND, task="async def tasks():\n    return []\n", overrides=FUNCTION, says=("task:tasks", "is async", "plain `def`")),
    Wrong(did="the source function wants arguments", kind=KIND, task="def tasks(path):\n    return []\n", overrides=FUNCTION, says=("task:tasks", "path")),
    Wrong(did="the source function yields what is not JSON", kind=KIND, task="def tasks():\n    yield {'id': 'a', 'prompt': 'a', 'x': {1, 2}}\n", overrides=FUNCTION, says=("task number 1", "'x'", "not JSON")),
    Wrong(did="the source function never ends", kind=KIND, task="import time\ndef tasks():\n    while True:\n        time.sleep(0.01)\n", overrides=(*FUNCTION, "limits.startup_seconds=0.3"), says=("task:tasks", "0.3 s", "limits.startup_seconds", "loop without end")),
    Wrong(did="the source function yields for ever", kind=KIND, task=f"def tasks():\n    while True:\n        yield {LINE}\n", overrides=FUNCTION, says=("task number 2", "'new'", "already used")),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_wrong_tasks_or_code(row: Wrong, scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    assert_ended_as_said(row, run_row(row, capsys))


def test_the_same_recipe_without_the_mistake_trains(scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    """The rows above fail for the reason that they name."""
    row = Wrong(did="nothing wrong", exit=0, says=())
    ended = run_row(row, capsys)
    assert_ended_as_said(row, ended)
    assert ended.result["num_updates"] == 3
    assert Path("run/checkpoints/update_000003").is_dir()


def test_a_few_prompts_that_are_too_long_are_told_of_and_the_run_goes_on(
    scripted_runtime: Callable[[], None], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    row = Wrong(did="one long prompt", exit=0, says=(), files={"tasks.jsonl": TASKS + json.dumps({"id": "long", "prompt": "ab?" * 20}) + "\n"})
    assert_ended_as_said(row, run_row(row, capsys))
    told = [record.getMessage() for record in caplog.records if "leaves no room" in record.getMessage()]
    assert told == [
        "wrong: the prompt of task 'long' (task.source) has 60 tokens and leaves no room for an answer: rollout.max_tokens is 32. "
        "So it is with 1 of the first 11 tasks: their rollouts will fail."
    ]


@pytest.mark.parametrize(
    "body",
    ["return len(answer)", "return answer == task.data['answer']", "return task and 1.0 or None", "raise OSError('no judge')", "return [1.0][0]"],
)
def test_a_reward_that_may_be_a_number_is_not_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "task.py").write_text(f"def reward(task, answer, scale=1.0):\n    def name():\n        return 'text'\n    {body}\n")
    check_reward(RecipeCode(tmp_path / "task.py", {"scale": 2.0}), "task:reward")
