"""Many checkpoints of one run evaluated by one process, after the run: what `headrace compare` draws its curves from.

evaluate_checkpoints   one after another, each loaded as any other tool would load it
start_model            the directory of the weights that a run's training starts from
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace import events as ev
from headrace.config import Settings
from headrace.config_loading import ResolvedSettings
from headrace.errors import HeadraceError, WaitTimeoutError, first_error
from headrace.evaluation import evaluated, evaluation_requests
from headrace.recipe import RecipeCode
from headrace.roles import EvaluationResult
from headrace.runtime import hosts, local, local_roles
from headrace.runtime.preflight import read_recipe
from headrace.runtime.processes import Failed, Hello, RoleProcess, refuse_start_while_importing
from headrace.runtime.wire import AsyncWire
from headrace.types import PolicyVersion, Task

Checkpoint = tuple[int, Path]
"""(number of its policy version, Hugging Face directory)"""


async def evaluate_checkpoints(
    resolved: ResolvedSettings,
    checkpoints: Sequence[Checkpoint],
    *,
    on_evaluated: Callable[[ev.Evaluated], None] = lambda event: None,
    progress: local.StartupProgress = lambda what, fraction: None,
) -> list[ev.Evaluated]:
    """Evaluates each on the recipe's evaluation tasks, with the same random streams; `on_evaluated` as soon as one is done.

    Raises WaitTimeoutError when one takes longer than limits.evaluate_seconds.
    """
    refuse_start_while_importing()
    settings = resolved.anchored()
    code = RecipeCode(resolved.task_module, settings.task.options)
    _, tasks = await read_recipe(settings, code)
    process = RoleProcess("evaluator", host_checkpoints, (settings, code, tasks), core=None)
    found: list[ev.Evaluated] = []
    try:
        await local_roles.limited_hello(process, settings)
        for index, (number, directory) in enumerate(checkpoints):
            progress(f"evaluating update {number}", index / len(checkpoints))
            await process.send((number, directory))
            found.append(await _answer(process, number, settings))
            on_evaluated(found[-1])
        return found
    finally:
        await process.stop(settings.limits.stop_seconds)


async def start_model(resolved: ResolvedSettings, *, progress: local.StartupProgress = lambda what, fraction: None) -> Path:
    """The directory of the model that training starts from; made and cached when it has to be (warm start)."""
    refuse_start_while_importing()
    settings = resolved.anchored()
    return (await local_roles.prepare(settings, RecipeCode(resolved.task_module, settings.task.options), progress)).model


async def _answer(process: RoleProcess, number: int, settings: Settings) -> ev.Evaluated:
    limit = settings.limits.evaluate_seconds
    try:
        async with asyncio.timeout(limit) as timeout:
            event: ev.Evaluated = await process.receive()
            return event
    except TimeoutError:
        if not timeout.expired():
            raise
        remedy = "Lower evaluation.num_tasks or raise limits.evaluate_seconds."
        raise WaitTimeoutError(f"The evaluation of update {number} has not ended after {limit:g} s.", remedy=remedy) from None


def host_checkpoints(end: socket.socket, settings: Settings, code: RecipeCode, tasks: Sequence[Task]) -> None:
    """Runs in the evaluator's process: answers (number, checkpoint) with the event of its evaluation."""

    async def serve() -> None:
        wire = await AsyncWire.open(end)
        await wire.send(Hello(facts={}))
        while True:
            number, checkpoint = await wire.receive()
            try:
                await wire.send(await _evaluate_one(number, checkpoint, settings, code, tasks))
            except HeadraceError as error:
                await wire.send(Failed(error=error))

    hosts._serve(serve())


async def _evaluate_one(number: int, checkpoint: Path, settings: Settings, code: RecipeCode, tasks: Sequence[Task]) -> ev.Evaluated:
    from headrace.rollout.evaluation import EvaluatorCore
    from headrace.rollout.render import end_tokens

    sampler, tokenizer = hosts._make_sampler(checkpoint, settings, None, None)
    evaluator = EvaluatorCore(sampler=sampler, code=code, settings=settings, tokenizer=tokenizer)
    _, sampling = local.sampling_parameters(settings, end_tokens(tokenizer))
    requests = evaluation_requests(settings, tasks, sampling)
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(evaluator.run())
            result: EvaluationResult = await evaluator.evaluate(PolicyVersion(0, 0), requests, tasks)
            running.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return dataclasses.replace(evaluated(settings, result, time.perf_counter() - started), version=number)
