"""Which checkpoints stay (headrace/retention.py), and what a run's own directory holds in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.journal import MemoryJournal
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.retention import Retention


def settings(keep: int = 2, every_updates: int = 10) -> Settings:
    return run_settings(checkpoint={"keep": keep}, evaluation={"every_updates": every_updates})


def path(number: int) -> Path:
    return Path(f"/run/checkpoints/update_{number:06d}")


def save(retention: Retention, number: int) -> list[Path]:
    retention.state(number)
    return retention.saved(path(number))


def test_the_newest_stay_and_the_best_by_evaluation_besides() -> None:
    retention = Retention(settings(keep=2))
    gone = []
    for number, mean in ((10, 0.2), (20, 0.9), (30, 0.3), (40, 0.4), (50, 0.5)):
        retention.evaluated(number, mean)
        gone += save(retention, number)
    assert gone == [path(10), path(30)] and retention.kept == [path(20), path(40), path(50)] and retention.best == path(20)
    retention.evaluated(60, 0.95)
    assert save(retention, 60) == [path(20), path(40)], "once a better one is there the old best goes"


def test_a_checkpoint_between_evaluations_counts_by_the_one_before() -> None:
    retention = Retention(settings(keep=1))
    retention.evaluated(0, 0.1)
    save(retention, 7)
    retention.evaluated(10, 0.8)
    save(retention, 14)
    retention.evaluated(20, 0.5)
    assert save(retention, 21) == [], "update 14 is as good as evaluation 10 was, the best one"
    assert retention.best == path(14) and retention.kept == [path(14), path(21)]


def test_an_evaluation_that_comes_after_the_checkpoint_counts_for_it() -> None:
    retention = Retention(settings(keep=1))
    save(retention, 10)
    assert retention.best is None
    retention.evaluated(10, 0.7)
    assert retention.best == path(10)


def test_without_evaluations_the_training_reward_since_the_checkpoint_before_decides() -> None:
    retention = Retention(settings(keep=1, every_updates=0))
    retention.evaluated(0, 1.0)
    for number, rewards in ((2, (0.0, 0.2)), (4, (0.9, 0.7)), (6, (0.3, 0.9)), (8, (0.5, 0.5))):
        for mean in rewards:
            retention.updated(mean)
        save(retention, number)
    assert retention.kept == [path(4), path(8)] and retention.best == path(4)


def test_what_is_known_at_a_checkpoint_is_known_when_the_run_goes_on_from_it() -> None:
    first = Retention(settings(keep=1))
    for number in (10, 20, 30):
        first.evaluated(number, {10: 0.9, 20: 0.1, 30: 0.2}[number])
        state = first.state(number)
        first.saved(path(number))
    first.evaluated(40, 1.0)  # of weights that are undone
    second = Retention(settings(keep=1), first.kept, state)
    assert second.best == path(10)
    second.evaluated(40, 0.3)
    assert save(second, 40) == [path(30)] and second.kept == [path(10), path(40)]


@given(
    keep=st.integers(1, 4), every=st.sampled_from([0, 10]), scores=st.lists(st.one_of(st.none(), st.floats(-1, 1, allow_nan=False)), min_size=1, max_size=30)
)
def test_newest_and_best_are_always_there_and_what_is_known_stays_small(keep: int, every: int, scores: list[float | None]) -> None:
    retention = Retention(settings(keep=keep, every_updates=every))
    there: list[Path] = []
    for index, score in enumerate(scores):
        number = 10 * (index + 1)
        if score is not None:
            retention.evaluated(number, score)
            retention.updated(score)
        state = retention.state(number)
        gone = retention.saved(path(number))
        there = [one for one in (*there, path(number)) if one not in gone]
        assert there == retention.kept and len(there) <= keep + 1
        assert there[-keep:] == [path(10 * (one + 1)) for one in range(max(0, index + 1 - keep), index + 1)]
        assert retention.best is None or retention.best in there
        assert len(state["rewards"]) <= keep + 2
        assert all(one[0] >= 10 for one in state["evaluations"])


class ScoringEvaluator:
    async def evaluate(self, version: Any, requests: Any, tasks: Any) -> Any:
        from headrace.rollout.evaluation import EvaluationRecord

        return EvaluationRecord(version=version, finished=(), metrics={"score": {4: 1.0}.get(version.number, 0.1)})


async def at_once(function: Any, *arguments: Any, **options: Any) -> Any:
    """asyncio.to_thread where there are no threads."""
    return function(*arguments, **options)


def test_a_run_keeps_its_best_checkpoint_and_says_which_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.checkpointing.asyncio.to_thread", at_once)
    made = run_settings(num_updates=12, checkpoint={"every_updates": 2, "keep": 1}, evaluation={"every_updates": 4, "metric": "score"})
    tasks = [scripted_task(f"t{index}", reward=float(index % 2)) for index in range(4)]
    run = ScriptedRun(
        settings=made, tasks=tasks, journal=MemoryJournal(), checkpoint_directory=tmp_path, evaluator=ScoringEvaluator(), evaluation_tasks=tasks[:2]
    )
    run_virtual(run.run())
    assert [one.name for one in run.conductor.checkpoints.retention.kept] == ["update_000004", "update_000012"]
    assert run.log.named("checkpoint_saved")[-1]["best"] == "update_000004"
    assert run.journal.states[-1][1]["retention"]["evaluations"] == [[4, 1.0], [8, 0.1]]
