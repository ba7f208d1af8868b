"""Evaluation on one pinned policy version, with a sampler of its own: it never disturbs or biases the rollouts (case 17)."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.config import Settings
from headrace.errors import HeadraceError, InvariantError, RecipeError, WaitTimeoutError
from headrace.recipe import RecipeCode
from headrace.roles import Sampler, Tokenizer
from headrace.rollout.render import ShortTextCache
from headrace.rollout.roll_out import UserCode, roll_out
from headrace.rollout.user_call import describe_exception, shorten
from headrace.rollout.user_code import RecipeUserCode
from headrace.statistics import interval95, mean_with_interval
from headrace.types import FinishedRollout, PolicyVersion, RolloutRequest, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """roles.EvaluationResult: what one evaluation found."""

    version: PolicyVersion
    """Every token was drawn, and every sequence scored, by these weights."""
    finished: tuple[FinishedRollout, ...]
    """In the order of the requests."""
    metrics: Mapping[str, float]
    """What the recipe's `evaluate` returned; means of what it returned as lists."""
    intervals95: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(low, high) of those means."""


@dataclass(frozen=True, slots=True)
class PinnedPolicy:
    """roles.ScorePolicy: what a recipe's `evaluate(policy, tasks)` gets."""

    version: PolicyVersion
    tokenizer: Tokenizer
    sampler: Sampler

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Sampler.score."""
        return await self.sampler.score(sequences)


def resolve_evaluate(code: RecipeCode, settings: Settings) -> Callable[..., Any] | None:
    """The recipe's evaluate function; None where it has none. Raises RecipeError when it cannot be used."""
    if settings.task.evaluate is None:
        return None
    function = code.resolve(settings.task.evaluate)
    if not inspect.iscoroutinefunction(function):
        raise RecipeError(
            f"{code.path}: task.evaluate '{settings.task.evaluate}' is not an async function.", remedy="Write `async def evaluate(policy, tasks)`."
        )
    return function


class EvaluatorCore:
    """Implements roles.Evaluator in the loop that awaits `run()`. Evaluations run one after another."""

    def __init__(self, *, sampler: Sampler, code: RecipeCode | UserCode, settings: Settings, tokenizer: Tokenizer) -> None:
        self._sampler = sampler
        self._user_code: UserCode = RecipeUserCode(code, settings) if isinstance(code, RecipeCode) else code
        self._evaluate = resolve_evaluate(code, settings) if isinstance(code, RecipeCode) else None
        self._settings = settings
        self._tokenizer = ShortTextCache(tokenizer)
        self._one_evaluation = asyncio.Lock()
        self._num_running = 0

    async def run(self) -> None:
        """Steps the sampler until cancelled; ends the user's processes."""
        try:
            await self._sampler.run(lambda: "environment" if self._num_running else "admission")
        finally:
            await self._user_code.close()

    async def evaluate(self, version: PolicyVersion, requests: Sequence[RolloutRequest], tasks: Sequence[Task]) -> EvaluationRecord:
        """Pins the newest weights (at least `version`), runs the requests and the recipe's evaluate function.

        Raises RecipeError when that function fails, WaitTimeoutError when the weights do not arrive within limits.apply_seconds.
        """
        async with self._one_evaluation:
            await self._wait_for(version)
            self._sampler.hold_weights(True)
            try:
                pinned = self._sampler.version
                async with asyncio.TaskGroup() as group:
                    rollouts = [group.create_task(self._run_one(request)) for request in requests]
                    scoring = group.create_task(self._metrics(pinned, tasks))
            except BaseExceptionGroup as failures:
                raise _first_error(failures) from failures
            finally:
                self._sampler.hold_weights(False)
            finished = tuple(rollout.result() for rollout in rollouts)
            _check_pinned(pinned, finished)
            metrics, intervals = scoring.result()
            return EvaluationRecord(version=pinned, finished=finished, metrics=metrics, intervals95=intervals)

    async def _wait_for(self, version: PolicyVersion) -> None:
        limit = self._settings.limits.apply_seconds
        self._sampler.wake()
        try:
            async with asyncio.timeout(limit):
                await self._sampler.applied(version)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the evaluation waits for weights of version {version}, its sampler has {self._sampler.version} after {limit:g} s.",
                remedy="Raise limits.apply_seconds if that is too short.",
            ) from error

    async def _run_one(self, request: RolloutRequest) -> FinishedRollout:
        self._num_running += 1
        try:
            trajectory = await roll_out(request, sampler=self._sampler, tokenizer=self._tokenizer, user_code=self._user_code, settings=self._settings.rollout)
        finally:
            self._num_running -= 1
        return FinishedRollout(summary=trajectory.summary(), payload=trajectory.to_bytes())

    async def _metrics(self, pinned: PolicyVersion, tasks: Sequence[Task]) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        if self._evaluate is None:
            return {}, {}
        name = self._settings.task.evaluate
        try:
            found = await self._evaluate(PinnedPolicy(pinned, self._tokenizer, self._sampler), list(tasks))
        except HeadraceError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the evaluation was cancelled, not something that the recipe awaits
            raise RecipeError(f"task.evaluate '{name}' raised {describe_exception(error)}.") from error
        return _checked_metrics(found, str(name))


def _checked_metrics(found: Any, name: str) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(metrics, 95 % intervals of those given as lists)"""
    if not isinstance(found, Mapping):
        raise RecipeError(f"task.evaluate '{name}' returned a {type(found).__name__}.", remedy="Return a dictionary {name: number or list of numbers}.")
    metrics: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for key, value in found.items():
        numbers = _numbers(value)
        if not isinstance(key, str) or not numbers or not all(map(math.isfinite, numbers)):
            raise RecipeError(
                f"task.evaluate '{name}' returned {shorten(f'{key!r}: {value!r}')}.", remedy="Return names with finite numbers, or lists of them."
            )
        metrics[key] = mean_with_interval(numbers)[0]
        if len(numbers) > 1:
            intervals[key] = interval95(numbers)
    return metrics, intervals


def _numbers(value: Any) -> list[float]:
    """A number or a list of numbers; empty for anything else."""
    try:
        return [float(one) for one in value] if isinstance(value, list | tuple) else [float(value)]
    except (TypeError, ValueError):
        return []


def _check_pinned(pinned: PolicyVersion, finished: Sequence[FinishedRollout]) -> None:
    for rollout in finished:
        for count in rollout.summary.versions:
            if count.version != pinned:
                raise InvariantError(f"an evaluation pinned to version {pinned} holds tokens of version {count.version} ({rollout.summary.key}).")


def _first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The recipe's or headrace's own error where there is one: the others followed from it."""
    errors: list[BaseException] = list(failures.exceptions)
    return next((error for error in errors if isinstance(error, HeadraceError)), errors[0])
