"""Evaluation: one pinned version for rollouts and scores, and the recipe's own metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.rollouts import (
    CharacterTokenizer,
    ScriptedSampler,
    ScriptedWeights,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_user_code,
)
from headrace.clock import now, run_virtual
from headrace.errors import RecipeError, WaitTimeoutError
from headrace.recipe import RecipeCode
from headrace.rollout.evaluation import EvaluationRecord, EvaluatorCore
from headrace.rollout.roll_out import UserCode
from headrace.statistics import interval95
from headrace.types import EndReason, PolicyVersion, RolloutRequest, Task

RECIPE = """
import asyncio
from headrace.types import Observation, Task

class One:
    async def reset(self, task):
        return Observation(text="?")
    async def step(self, action):
        await asyncio.sleep(3.0)
        return None, float(task_reward), True
task_reward = 0.5

async def evaluate(policy, tasks):
    before = policy.version
    scores = await policy.score([policy.tokenizer.encode("abc"), [1]])
    await asyncio.sleep(10.0)
    return {"success": len(tasks) / 10, "tokens": len(scores[0]), "empty": len(scores[1]), "version": policy.version.number}
async def leaving(policy, tasks):
    raise SystemExit(0)
async def cancelling(policy, tasks):
    waiting = asyncio.ensure_future(asyncio.sleep(1))
    waiting.cancel()
    await waiting
async def raising(policy, tasks):
    raise ValueError("no metric")
async def per_task(policy, tasks):
    return {"success": [0.0, 1.0, 1.0, 0.0], "single": [0.5]}
async def empty_list(policy, tasks):
    return {"success": []}
async def number(policy, tasks):
    return 0.5
async def nan(policy, tasks):
    return {"success": float("nan")}
def plain(policy, tasks):
    return {}
"""


def make_recipe(directory: Path) -> RecipeCode:
    (directory / "task.py").write_text(RECIPE)
    return RecipeCode(directory / "task.py", {})


def requests(count: int, **task: Any) -> list[RolloutRequest]:
    return [rollout_request(group_id=group_id, task=scripted_task(f"e{group_id}", **task), evaluation=True) for group_id in range(count)]


def evaluate_with(sampler: ScriptedSampler, code: RecipeCode | UserCode, use: Callable[[EvaluatorCore], Awaitable[Any]], **task: Any) -> Any:
    async def main() -> Any:
        settings = scripted_settings(task=task, limits={"apply_seconds": 30.0})
        evaluator = EvaluatorCore(sampler=sampler, code=code, settings=settings, tokenizer=CharacterTokenizer())
        async with asyncio.TaskGroup() as group:
            running = group.create_task(evaluator.run())
            try:
                return await use(evaluator)
            finally:
                running.cancel()

    return run_virtual(main())


def test_every_token_of_an_evaluation_is_of_the_pinned_version_although_new_weights_arrive() -> None:
    weights = ScriptedWeights(number=4)
    sampler = ScriptedSampler(weights=weights, seconds_per_token=0.5, max_running=2)

    async def use(evaluator: EvaluatorCore) -> EvaluationRecord:
        async with asyncio.TaskGroup() as group:
            evaluating = group.create_task(evaluator.evaluate(PolicyVersion(0, 4), requests(6, answers=3, wait_seconds=1.0, reward=1.0), []))
            for number in range(5, 9):
                await asyncio.sleep(1.3)
                weights.publish(number)
                sampler.wake()
        return evaluating.result()

    record = evaluate_with(sampler, scripted_user_code(), use)
    assert record.version == PolicyVersion(0, 4)
    assert {count.version for finished in record.finished for count in finished.summary.versions} == {PolicyVersion(0, 4)}
    assert [finished.summary.key.group_id for finished in record.finished] == list(range(6))
    assert sampler.generated_tokens == 0


def test_weights_move_on_between_two_evaluations_and_the_same_requests_can_come_again() -> None:
    weights = ScriptedWeights(number=0)
    sampler = ScriptedSampler(weights=weights)

    async def use(evaluator: EvaluatorCore) -> Sequence[EvaluationRecord]:
        first = await evaluator.evaluate(PolicyVersion(0, 0), requests(3), [])
        weights.publish(2)
        second = await evaluator.evaluate(PolicyVersion(0, 1), requests(3), [])
        return first, second

    first, second = evaluate_with(sampler, scripted_user_code(), use)
    assert (first.version.number, second.version.number) == (0, 2)
    assert [item.summary.num_action_tokens for item in first.finished] == [item.summary.num_action_tokens for item in second.finished]


def test_an_evaluation_waits_for_weights_of_its_version_and_names_that_wait() -> None:
    weights = ScriptedWeights(number=0)
    sampler = ScriptedSampler(weights=weights)

    async def use(evaluator: EvaluatorCore) -> None:
        with pytest.raises(WaitTimeoutError, match="waits for weights of version 3, its sampler has 0 after 30 s"):
            await evaluator.evaluate(PolicyVersion(0, 3), requests(1), [])
        assert now() == 30.0
        weights.publish(3)
        assert (await evaluator.evaluate(PolicyVersion(0, 3), requests(1), [])).version.number == 3

    evaluate_with(sampler, scripted_user_code(), use)


def test_the_recipes_evaluate_function_runs_beside_the_rollouts_on_the_same_version(tmp_path: Path) -> None:
    async def use(evaluator: EvaluatorCore) -> EvaluationRecord:
        return await evaluator.evaluate(PolicyVersion(0, 7), requests(4), [scripted_task("a"), scripted_task("b")])

    sampler = ScriptedSampler(weights=ScriptedWeights(number=7))
    record = evaluate_with(sampler, make_recipe(tmp_path), use, environment="task:One", evaluate="task:evaluate")
    assert record.metrics == {"success": 0.2, "tokens": 3.0, "empty": 0.0, "version": 7.0}
    assert [finished.summary.reward for finished in record.finished] == [0.5] * 4


def test_values_of_each_task_become_a_mean_with_its_interval(tmp_path: Path) -> None:
    async def use(evaluator: EvaluatorCore) -> Any:
        return await evaluator.evaluate(PolicyVersion(0, 0), requests(1), [])

    record = evaluate_with(ScriptedSampler(), make_recipe(tmp_path), use, environment="task:One", evaluate="task:per_task")
    assert record.metrics == {"success": 0.5, "single": 0.5}
    assert record.intervals95 == {"success": interval95([0, 1, 1, 0])}


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raising", "raised ValueError: no metric (task.py:"),
        ("leaving", "raised SystemExit"),
        ("cancelling", "raised CancelledError"),
        ("number", "returned a float"),
        ("nan", "returned 'success': nan"),
        ("empty_list", "returned 'success': []"),
        ("plain", "not an async function"),
    ],
)
def test_a_wrong_evaluate_function_is_named(tmp_path: Path, function: str, told: str) -> None:
    async def use(evaluator: EvaluatorCore) -> None:
        await evaluator.evaluate(PolicyVersion(0, 0), requests(2), [])

    with pytest.raises((RecipeError, ExceptionGroup)) as caught:
        evaluate_with(ScriptedSampler(), make_recipe(tmp_path), use, environment="task:One", evaluate=f"task:{function}")
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert isinstance(error, RecipeError)
    assert told in str(error) and f"task:{function}" in str(error)


def test_a_failed_evaluation_lets_go_of_the_weights(tmp_path: Path) -> None:
    weights = ScriptedWeights()
    sampler = ScriptedSampler(weights=weights)

    async def use(evaluator: EvaluatorCore) -> None:
        with pytest.raises(RecipeError):
            await evaluator.evaluate(PolicyVersion(0, 0), requests(2), [])
        weights.publish(1)
        sampler.wake()
        await sampler.applied(PolicyVersion(0, 1))
        assert sampler.num_running == 0

    evaluate_with(sampler, make_recipe(tmp_path), use, environment="task:One", evaluate="task:raising")


def test_weights_that_are_being_applied_when_the_pin_comes_are_not_mixed_in() -> None:
    weights = ScriptedWeights()
    sampler = ScriptedSampler(weights=weights, apply_seconds=2.0)

    async def use(evaluator: EvaluatorCore) -> EvaluationRecord:
        weights.publish(1)
        sampler.wake()
        await asyncio.sleep(1.0)
        return await evaluator.evaluate(PolicyVersion(0, 0), requests(2, answers=3), [])

    record = evaluate_with(sampler, scripted_user_code(), use)
    assert record.version == PolicyVersion(0, 0)


def test_a_failing_task_is_in_the_result_and_fails_nothing_else() -> None:
    tasks: list[Task] = [scripted_task("good", reward=1.0), scripted_task("bad", fail_at=0)]

    async def use(evaluator: EvaluatorCore) -> EvaluationRecord:
        wanted = [rollout_request(group_id=index, task=task, evaluation=True) for index, task in enumerate(tasks)]
        return await evaluator.evaluate(PolicyVersion(0, 0), wanted, tasks)

    record = evaluate_with(ScriptedSampler(), scripted_user_code(), use)
    assert [finished.summary.end_reason for finished in record.finished] == [EndReason.DONE, EndReason.ENVIRONMENT_ERROR]
