"""What compare runs and evaluates, over a scripted runtime: in which order, what a cut comparison does again, and what it never does twice."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import active, run_started, updated, window
from fakes.plan_profiles import plain_profile
from headrace import events as ev
from headrace.cli.main import main
from headrace.compare import Arm, Plan, common_capacity, make_arms, run_comparison
from headrace.errors import CheckpointError, HeadraceError
from headrace.event_log import EventLog, read_events
from headrace.planner.distributions import Distribution
from headrace.planner.profile import save_profile
from headrace.report.comparison import time_to_reward

RECIPE = """
[run]
name = "tiny"
num_updates = 4
[model]
architecture = {model_type = "qwen2"}
characters = "abc"
[task]
source = "task:tasks"
reward = "task:reward"
evaluate = "task:evaluate"
"""
TOKENS = dict.fromkeys(("generated", "trained", "filtered", "expired", "pooled", "in_flight"), 10)


class Runtime:
    """Stands where runtime/local and runtime/local_evaluation do; remembers what it was asked, and may fail once."""

    def __init__(self, start_model: Path) -> None:
        self.start = start_model
        self.trained: list[str] = []
        self.promised: dict[str, Any] = {}
        self.evaluated: list[tuple[str, int, int]] = []
        self.capacities: dict[str, int] = {}
        self.fail_training: str | None = None
        self.fail_evaluation_after: int | None = None

    async def run_local(self, resolved: Any, directory: Path, *, subscribers: Any, progress: Any, evaluate: bool) -> None:
        assert not evaluate, "evaluations lie outside the run"
        settings = resolved.settings
        os.makedirs(directory)  # fails where a cut run was left
        self.trained.append(directory.name)
        self.promised[directory.name] = resolved.promised
        seconds = iter(range(10_000))
        log = EventLog(directory / "events.jsonl", lambda: float(next(seconds)))
        for subscriber in subscribers:
            log.subscribe(subscriber)
        devices = [{"name": "sampler-0", "role": "sampler", "capacity": self.capacities.get(directory.name, 8)}]
        log.emit(run_started([*devices, {"name": "learner-0", "role": "learner", "capacity": 1}], num_updates=4))
        log.emit(ev.WeightsPublished(version=0, lineage=0, bytes=1, seconds=0.0))
        log.emit(window("start"))
        for version in range(1, settings.run.num_updates + 1):
            if directory.name == self.fail_training and version == 3:
                self.fail_training = None
                log.emit(ev.RunFinished(status="failed", error=None, version=2, lineage=0))
                raise HeadraceError("the sampler was lost")
            log.emit(updated(version))
            log.emit(ev.WeightsPublished(version=version, lineage=0, bytes=1, seconds=0.0))
            self._save(log, directory, version)
        log.emit(active("sampler-0", 9.0, running={4: 9.0}))
        log.emit(ev.LedgerClosed(ledger={"at_update": 4, "tokens": TOKENS}))
        log.emit(window("end"))
        log.emit(ev.RunFinished(status="done", error=None, version=4, lineage=0))
        log.close()

    def _save(self, log: EventLog, directory: Path, version: int) -> None:
        path = directory / "checkpoints" / f"update_{version:06d}"
        path.mkdir(parents=True)
        log.emit(ev.CheckpointSaved(version=version, lineage=0, path=str(path), seconds=0.01))

    async def evaluate_checkpoints(
        self, resolved: Any, checkpoints: list[tuple[int, Path]], *, on_evaluated: Callable[[ev.Evaluated], None] = lambda event: None, progress: Any = None
    ) -> list[ev.Evaluated]:
        found = []
        for version, path in checkpoints:
            assert path.is_dir(), path
            if self.fail_evaluation_after == len(self.evaluated):
                self.fail_evaluation_after = None
                raise KeyboardInterrupt
            name = path.name if version == 0 else path.parents[1].name
            self.evaluated.append((name, version, resolved.settings.run.seed))
            mean = 0.1 + 0.2 * min(version, 3)
            found.append(ev.Evaluated(version=version, lineage=0, mean=mean, interval95=[mean, mean], num_rollouts=9, metrics={}, seconds=0.1))
            on_evaluated(found[-1])
        return found

    async def start_model(self, resolved: Any, *, progress: Any = None) -> Path:
        return self.start


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    from headrace.runtime import local, local_evaluation

    (tmp_path / "start").mkdir()
    fake = Runtime(tmp_path / "start")
    monkeypatch.setattr(local, "run_local", fake.run_local)
    monkeypatch.setattr(local_evaluation, "evaluate_checkpoints", fake.evaluate_checkpoints)
    monkeypatch.setattr(local_evaluation, "start_model", fake.start_model)
    return fake


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    recipe = tmp_path / "tiny"
    recipe.mkdir()
    (recipe / "task.py").write_text("")
    (recipe / "recipe.toml").write_text(RECIPE)

    def make(*overrides: str, seeds: int = 1, arms: tuple[Arm, ...] = ()) -> Plan:
        return Plan(
            recipe=str(recipe),
            overrides=overrides,
            arms=make_arms(str(recipe), overrides, arms, None),
            num_seeds=seeds,
            evaluate_every=None,
            directory=tmp_path / "out",
        )

    return make


def run(plan: Plan, stream: io.StringIO | None = None) -> Any:
    return asyncio.run(run_comparison(plan, stream or io.StringIO()))


def checkpoints(plan: Plan, name: str) -> list[str]:
    return sorted(path.name for path in (plan.directory / "runs" / name / "checkpoints").iterdir())


def test_every_checkpoint_and_the_start_are_evaluated_after_the_run(plan: Callable[..., Plan], runtime: Runtime) -> None:
    measured = run(plan(seeds=2))
    assert runtime.trained == ["sync-0", "async-0", "async-1", "sync-1"]
    assert [version for name, version, seed in runtime.evaluated if name in ("start", "sync-0") and seed == 0][:5] == [0, 1, 2, 3, 4]
    points = measured["async"][1].curve
    assert [point.version for point in points] == [0, 1, 2, 3, 4]
    assert [point.mean for point in points] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.7])
    lines = list(read_events(plan().directory / "runs" / "sync-0" / "events.jsonl"))
    assert [line["event"] for line in lines][-5:] == ["evaluated"] * 5
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_sampled_evaluations_are_repeated_with_other_streams_to_show_their_noise(plan: Callable[..., Plan], runtime: Runtime) -> None:
    measured = run(plan())
    repeats = [(version, seed) for name, version, seed in runtime.evaluated if name == "sync-0" and seed != 0]
    assert [version for version, _ in repeats] == [2, 3, 4]
    assert len(measured["sync"][0].repeat_differences) == 3


def test_exact_evaluations_are_not_repeated(plan: Callable[..., Plan], runtime: Runtime) -> None:
    measured = run(plan("evaluation.metric=success"))
    assert {seed for _, _, seed in runtime.evaluated} == {0}
    assert measured["sync"][0].repeat_differences == ()


def test_only_the_last_checkpoint_is_kept_once_all_are_evaluated(plan: Callable[..., Plan], runtime: Runtime) -> None:
    run(plan())
    assert checkpoints(plan(), "sync-0") == ["update_000004"]
    assert runtime.start.is_dir(), "the model that training starts from is not ours"


def test_a_finished_comparison_runs_nothing_again(plan: Callable[..., Plan], runtime: Runtime) -> None:
    first = run(plan())
    trained, evaluated = list(runtime.trained), list(runtime.evaluated)
    stream = io.StringIO()
    assert run(plan(), stream) == first
    assert (runtime.trained, runtime.evaluated) == (trained, evaluated)
    assert "2 of 2 runs are there already" in stream.getvalue()


def test_more_seeds_add_runs_to_those_that_are_there(plan: Callable[..., Plan], runtime: Runtime) -> None:
    run(plan())
    run(plan(seeds=2))
    assert runtime.trained == ["sync-0", "async-0", "async-1", "sync-1"]


def test_a_run_that_was_cut_starts_again_from_nothing(plan: Callable[..., Plan], runtime: Runtime) -> None:
    runtime.fail_training = "async-0"
    with pytest.raises(HeadraceError, match="the sampler was lost"):
        run(plan())
    assert checkpoints(plan(), "async-0") == ["update_000001", "update_000002"]
    measured = run(plan())
    assert runtime.trained == ["sync-0", "async-0", "async-0"]
    assert len(measured["async"][0].curve) == 5
    assert [seed for name, version, seed in runtime.evaluated if (name, version) == ("async-0", 1)] == [0]


def test_evaluations_that_were_cut_go_on_where_they_stopped(plan: Callable[..., Plan], runtime: Runtime) -> None:
    runtime.fail_evaluation_after = 3  # of sync-0: 0, 1, 2
    with pytest.raises(KeyboardInterrupt):
        run(plan())
    events = plan().directory / "runs" / "sync-0" / "events.jsonl"
    with events.open("ab") as file:
        file.write(b'{"event":"evaluated","ver')  # killed in the middle of a line
    assert len(checkpoints(plan(), "sync-0")) == 4, "nothing is removed before all are evaluated"
    measured = run(plan())
    assert runtime.trained == ["sync-0", "async-0"]
    assert [version for name, version, seed in runtime.evaluated if (name, seed) == ("sync-0", 0)] == [1, 2, 3, 4], "none twice"
    assert [point.version for point in measured["sync"][0].curve] == [0, 1, 2, 3, 4]
    assert sum(line["event"] == "evaluated" for line in read_events(events)) == 5


def test_a_checkpoint_that_vanished_before_its_evaluation_is_named(plan: Callable[..., Plan], runtime: Runtime) -> None:
    runtime.fail_evaluation_after = 1
    with pytest.raises(KeyboardInterrupt):
        run(plan())
    shutil.rmtree(plan().directory / "runs" / "sync-0" / "checkpoints" / "update_000002")
    with pytest.raises(CheckpointError, match=r"checkpoint of update 2 is not there and not evaluated\. Remove .*sync-0"):
        run(plan())


def test_one_capacity_counts_for_all_arms(plan: Callable[..., Plan], runtime: Runtime) -> None:
    """Measured 4, 8, 16 and 16; each device runs 4 sequences all the time. The arm with few slots has no say."""
    runtime.capacities = {"sync-0": 8, "sync-1": 16, "async-0": 16, "async-1": 16, "small-0": 4, "small-1": 4}
    small = plan(seeds=2, arms=(Arm(name="small", settings=("sampler.max_running=4",)),))
    measured = run(small)
    assert common_capacity(small) == 16
    assert len({round(run.occupancy, 6) for runs in measured.values() for run in runs}) == 1


def test_progress_says_which_run_and_when_it_is_all_done(plan: Callable[..., Plan], runtime: Runtime) -> None:
    stream = io.StringIO()
    run(plan(seeds=2), stream)
    text = stream.getvalue()
    assert "[1/4] sync, seed 0\n" in text
    assert "[4/4] sync, seed 1; about 0 s to finish everything" in text
    assert "checkpoint " not in text, "twenty lines that say nothing"


def test_curves_of_a_comparison_give_times(plan: Callable[..., Plan], runtime: Runtime) -> None:
    measured = run(plan())
    points = measured["sync"][0].curve
    assert time_to_reward(points, 0.6) == points[4].seconds
    assert json.dumps([point.seconds for point in points])


def compare(plan: Plan, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    code = main(["compare", plan.recipe, "pool.groups_per_batch=2", "rollout.group_size=2", "--seeds", "1", "--run-dir", str(plan.directory), "--json", *words])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_a_profile_promises_every_run_of_the_command_before_it_starts(
    plan: Callable[..., Plan], runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(plain_profile(answers=Distribution.lognormal(30.0, 10.0)), tmp_path / "profile.json")
    code, _, people = compare(plan(), capsys, "--profile", str(tmp_path / "profile.json"))
    assert code == 0, people
    assert {name: promised["by"] for name, promised in runtime.promised.items()} == {"sync-0": "profile.json", "async-0": "profile.json"}
    assert runtime.promised["sync-0"]["finish_seconds"] != runtime.promised["async-0"]["finish_seconds"]


def test_settings_that_the_simulation_does_not_know_are_only_noted(
    plan: Callable[..., Plan], runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(plain_profile(answers=Distribution.lognormal(30.0, 10.0)), tmp_path / "profile.json")
    code, _, people = compare(plan(), capsys, "--profile", str(tmp_path / "profile.json"), "--arm", "async", "sampler.update_mode=wait")
    assert code == 0, people
    assert "no promise for async, seed 0" in people and "sampler.update_mode" in people
    assert runtime.promised["async-0"] is None and runtime.promised["sync-0"] is not None


@pytest.mark.parametrize("content", [None, "{", '{"schema": 1}'])
def test_a_wrong_profile_ends_the_command_before_anything_starts(
    plan: Callable[..., Plan], runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "profile.json").write_text(content)
    code, result, people = compare(plan(), capsys, "--profile", str(tmp_path / "profile.json"))
    assert (code, result["error"]["file"]) == (2, str(tmp_path / "profile.json")), people
    assert not runtime.trained and not plan().directory.exists()
