"""Evaluations, as the conductor asks for them and writes them down."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import events as ev
from headrace.config import Settings
from headrace.errors import NoProgressError, RecipeError
from headrace.roles import EvaluationResult
from headrace.statistics import interval95, mean_with_interval
from headrace.types import RolloutKey, RolloutRequest, SamplingParameters, Task


def evaluation_requests(settings: Settings, tasks: Sequence[Task], sampling: SamplingParameters) -> list[RolloutRequest]:
    """The sampled rollouts of one evaluation; the same random streams each time, so that evaluations compare."""
    return [
        RolloutRequest(key=RolloutKey(index, sample, 0), task=task, seed=settings.run.seed, sampling=sampling, evaluation=True)
        for index, task in enumerate(tasks)
        for sample in range(settings.evaluation.samples_per_task)
    ]


def evaluated(settings: Settings, result: EvaluationResult, seconds: float) -> ev.Evaluated:
    """The event of one evaluation: the configured metric with its 95 % interval, and every other number beside it.

    Failed rollouts have no reward: they are counted beside the mean. Raises NoProgressError when there is no other.
    """
    rewards = [finished.summary.reward for finished in result.finished if not finished.summary.failed]
    failed = [finished.summary for finished in result.finished if finished.summary.failed]
    first = f"task '{failed[0].task_id}': {failed[0].end_reason}: {failed[0].error}" if failed else None
    if failed and not rewards:
        raise NoProgressError(
            f"All {len(failed)} rollouts of an evaluation failed; the first was {first}.",
            remedy="Mend the environment, the reward or the tasks: see the error.",
        )
    failed = [finished.summary for finished in result.finished if finished.summary.failed]
    first = f"task '{failed[0].task_id}': {failed[0].end_reason}: {failed[0].error}" if failed else None
    if failed and not rewards:
        raise NoProgressError(
            f"All {len(failed)} rollouts of an evaluation failed; the first was {first}.",
            remedy="Mend the environment, the reward or the tasks: see the error.",
        )
    metrics = dict(result.metrics)
    mean, interval = mean_with_interval(rewards)[0], interval95(rewards)
    if rewards:
        metrics.setdefault("reward", mean)
    metric = settings.evaluation.metric
    if metric not in metrics:
        raise RecipeError(
            f"evaluation.metric is '{metric}', but the evaluation returned {', '.join(sorted(metrics)) or 'nothing'}.",
            remedy="Name one of those, or return it from task.evaluate.",
        )
    if metric != "reward":
        mean = metrics[metric]
        interval = result.intervals95.get(metric, (mean, mean))
    return ev.Evaluated(
        role="evaluator", version=result.version.number, lineage=result.version.lineage, mean=mean, interval95=list(interval),
        num_rollouts=len(rewards), metrics=metrics, seconds=seconds, num_failed=len(failed), failure=first,
    )  # fmt: skip
