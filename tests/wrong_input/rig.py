"""The table's columns, and how a row is tried: the real command line, in this process, over scripted sampler and learner.

Nothing is started, so a row takes milliseconds; everything between the command line and the user's code is real: settings, tasks,
preflight, run directory, conductor, pool, rollout worker, evaluator, user-code processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fakes.learner import ScriptedLearner
from fakes.rollouts import END_TOKEN, CharacterTokenizer, ScriptedSampler, ScriptedWeights
from headrace.cli.main import main
from headrace.config import Settings
from headrace.config_loading import load_settings
from headrace.errors import first_error
from headrace.event_log import read_events
from headrace.recipe import RecipeCode
from headrace.rollout.evaluation import EvaluatorCore
from headrace.rollout.worker import RolloutWorkerCore
from headrace.runtime import local
from headrace.runtime.local_roles import LocalRoles

RECIPE = """
[run]
name = "wrong"
num_updates = 3
[model]
characters = "abc?"
architecture = {model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 16, max_position_embeddings = 64}
[task]
source = "tasks.jsonl"
reward = "task:reward"
[rollout]
group_size = 4
max_steps = 3
max_tokens = 32
max_action_tokens = 4
[pool]
groups_per_batch = 2
[evaluation]
num_tasks = 2
"""

TASK = """
from headrace.types import Observation, Outcome, Task


def reward(task, answer):
    return len(answer) / 4
"""

TASKS = "".join(json.dumps({"id": f"t{index}", "prompt": "ab?"}) + "\n" for index in range(12))


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One row: what the user did -> how the command ends, and what it says."""

    did: str
    says: tuple[str, ...]
    """Texts of the message: file, key, value, limit, remedy, as far as they apply."""
    exit: int = 2
    kind: str = "ConfigError"
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    """Files of the recipe that are other than RECIPE, TASK and TASKS; None: not there."""
    edits: tuple[tuple[str, str], ...] = ()
    """(old, new) in recipe.toml"""
    task: str | None = None
    """Python to add to task.py."""
    overrides: tuple[str, ...] = ()
    starts: bool = False
    """It can only be seen while the run runs, so there is a run directory, whole."""


def ids(rows: list[Wrong]) -> list[str]:
    return [row.did for row in rows]


def environment(*methods: str, plain: bool = False) -> str:
    """An environment of which these methods are wrong: `reset: CODE` or `step: CODE`, the others are fine."""
    bodies = {"reset": "return Observation(text='ab?')", "step": "return Outcome(None, 1.0, True)"}
    bodies |= dict(method.split(": ", 1) for method in methods)
    word = "def" if plain else "async def"
    lines = ["import asyncio, time, os", "class Environment:"]
    for name, argument in (("reset", "task"), ("step", "action")):
        lines.append(f"    {word} {name}(self, {argument}):")
        lines += [f"        {line}" for line in bodies[name].split("\n")]
    return "\n".join(lines) + "\n"


ENVIRONMENT = ("task.environment=task:Environment", "task.reward=none")


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    result: dict[str, Any]
    people: str

    @property
    def error(self) -> dict[str, Any]:
        return self.result["error"] or {}


def make_recipe(directory: Path, row: Wrong) -> None:
    recipe = RECIPE
    for old, new in row.edits:
        assert old in recipe, f"the row changes {old!r}, which is not in the recipe"
        recipe = recipe.replace(old, new)
    files: dict[str, str | bytes | None] = {"recipe.toml": recipe, "task.py": TASK + (row.task or ""), "tasks.jsonl": TASKS, **row.files}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if content is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix != ".pyc"}


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Runs the command line here, with --json."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1, "one object on stdout however it ends"
    return Ended(code=code, result=json.loads(captured.out), people=captured.err)


def run_row(row: Wrong, capsys: pytest.CaptureFixture[str]) -> Ended:
    """`headrace run wrong --run-dir run OVERRIDES` in the working directory."""
    make_recipe(Path("wrong"), row)
    return command(capsys, "run", "wrong", "--run-dir", "run", *row.overrides)


def assert_ended_as_said(row: Wrong, ended: Ended, run_directory: Path = Path("run")) -> None:
    assert ended.code == row.exit, ended.people
    assert ended.result["status"] == ("failed" if row.exit else "done")
    assert "Traceback" not in ended.people
    if row.exit:
        assert ended.error["kind"] == row.kind, ended.error
        assert f"{row.kind}: " in ended.people, "people read it too"
        assert len(ended.error["message"]) < 3000
    missing = [text for text in row.says if text not in ended.people]
    assert not missing, f"{missing} not in:\n{ended.people}"
    if row.exit == 2 and not row.starts:
        assert not run_directory.exists(), "wrong input starts nothing and leaves nothing"
    else:
        assert_whole(run_directory, ended)


def assert_whole(run_directory: Path, ended: Ended) -> None:
    """Nothing is lost: settings load back, every event reads back, the last says how the run ended."""
    load_settings(run_directory / "config.toml")
    events = list(read_events(run_directory / "events.jsonl"))
    assert events[0]["event"] == "run_started"
    assert events[-1]["event"] == "run_finished" and events[-1]["status"] == ended.result["status"]
    assert (events[-1]["error"] or {}).get("message") == ended.error.get("message")


async def nothing_prepared(*arguments: Any) -> None:
    pass


@contextlib.asynccontextmanager
async def scripted_roles(settings: Settings, code: RecipeCode, prepared: Any, **options: Any) -> AsyncIterator[Any]:
    """Stands where runtime/local starts processes: real worker and evaluator over scripted samplers and learner."""
    weights = ScriptedWeights()

    def sampler() -> ScriptedSampler:
        return ScriptedSampler(weights=weights, seconds_per_token=0.0005, max_context_tokens=settings.rollout.max_tokens, max_running=64)

    tokenizer = StrictTokenizer(settings.model.characters)
    worker = RolloutWorkerCore(name="sampler-0", sampler=sampler(), code=code, settings=settings, tokenizer=tokenizer)
    evaluator = EvaluatorCore(sampler=sampler(), code=code, settings=settings, tokenizer=tokenizer)
    learner = SavingLearner(settings, lambda version: weights.publish(version.number, version.lineage), learn_seconds=0.002)
    devices = [{"name": "sampler-0", "role": "sampler", "capacity": 64}, {"name": "learner-0", "role": "learner", "capacity": 1}]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(worker.run()), group.create_task(evaluator.run())]
            try:
                yield LocalRoles(
                    workers=[worker],  # type: ignore[list-item]
                    learner=learner,  # type: ignore[arg-type]
                    evaluator=evaluator,  # type: ignore[arg-type]
                    end_tokens=(END_TOKEN,),
                    has_chat_template=False,
                    devices=devices,
                    irreplaceable=[],
                )
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


class StrictTokenizer(CharacterTokenizer):
    """Refuses characters outside the alphabet, as the real one of models from scratch does."""

    def __init__(self, characters: str | None) -> None:
        self._characters = None if characters is None else set(characters)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._characters is not None and (strange := set(text) - self._characters):
            raise ValueError(f"no token for {strange}")
        return super().encode(text, add_special_tokens=False)


class SavingLearner(ScriptedLearner):
    async def save(self, directory: Path) -> None:
        await asyncio.to_thread(directory.mkdir)
        await super().save(directory)


@pytest.fixture
def scripted_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "prepare", nothing_prepared)
    monkeypatch.setattr(local, "local_roles", scripted_roles)
    return lambda: None
