"""The local runtime: every role a process on this machine, devices pinned to cores on CPU.

run_local       prepares the model, starts roles, drives the conductor, ends every process however it goes
evaluate_local  the evaluator alone, on a checkpoint
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from headrace import clock
from headrace import events as ev
from headrace.conductor import Conductor, Roles
from headrace.config import Settings
from headrace.config_loading import ResolvedSettings
from headrace.errors import HeadraceError, ModelError, WorkerLostError
from headrace.evaluation import evaluated, evaluation_requests
from headrace.learner.state_memory import StateMemory
from headrace.recipe import RecipeCode
from headrace.restoration import Restoration, Return
from headrace.runtime import hosts
from headrace.runtime.journal import RunJournal
from headrace.runtime.local_roles import (
    LocalEvaluator,
    LocalRole,
    LocalRoles,
    Prepared,
    StartupProgress,
    cache_directory,
    limited_hello,
    local_roles,
    prepare,
)
from headrace.runtime.preflight import check_chats, read_recipe
from headrace.runtime.processes import RoleProcess, refuse_start_while_importing, watched
from headrace.runtime.resumption import Resumption, find_resumption, open_journal, set_aside
from headrace.runtime.run_record import RunRecord, run_record
from headrace.tasks.source import ListTaskSource
from headrace.types import PolicyVersion, SamplingParameters, Task

__all__ = ["RunOutcome", "StartupProgress", "cache_directory", "evaluate_local", "run_local", "sampling_parameters"]

EventSubscriber = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    run_directory: Path
    checkpoint: Path | None
    """The last one, a Hugging Face directory."""
    startup_seconds: float


async def run_local(
    resolved: ResolvedSettings,
    run_directory: Path,
    *,
    subscribers: Sequence[EventSubscriber] = (),
    progress: StartupProgress = lambda what, fraction: None,
    evaluate: bool = True,
    resume: bool = False,
) -> RunOutcome:
    """Runs a recipe to its end. Raises HeadraceError; cancelling it (Ctrl-C) ends everything cleanly.

    The run directory must be new or empty; a run that ends before its first event, because it cannot start, leaves none. With `resume`
    it is that of a run that is over, which goes on from its newest whole checkpoint. So does a run whose learner is lost, by itself.
    """
    refuse_start_while_importing()
    started = time.perf_counter()
    settings = resolved.anchored()
    code = RecipeCode(resolved.task_module, settings.task.options)
    training, tasks = await read_recipe(settings, code)
    with (
        contextlib.ExitStack() as stack,
        run_record(settings, run_directory, clock=asyncio.get_running_loop().time, subscribers=subscribers, goes_on=resume) as record,
    ):
        resumption = find_resumption(run_directory, settings) if resume else None
        run = _Run(
            resolved=resolved, settings=settings, code=code, training=training, tasks=tasks, evaluate=evaluate, record=record,
            prepared=await prepare(settings, code, progress), progress=progress, started=started, resumption=resumption,
            restoration=Restoration(settings, record.log),
            memory=stack.enter_context(contextlib.closing(StateMemory())) if settings.checkpoint.memory_copy else None,
        )  # fmt: skip
        try:
            await run.restoration.survive(run.live)
        except HeadraceError as error:
            run.say_how_to_go_on(error)
            raise
        return run.outcome()


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run, over as many lives as it takes."""

    resolved: ResolvedSettings
    settings: Settings
    code: RecipeCode
    training: Sequence[Task]
    tasks: Sequence[Task]
    evaluate: bool
    record: RunRecord
    prepared: Prepared
    progress: StartupProgress
    started: float
    """When the command began (time.perf_counter)."""
    resumption: Resumption | None
    """What the next life goes on from."""
    restoration: Restoration
    memory: StateMemory | None
    begins: ev.RunStarted | None = None
    """Line 1, and what every later life keeps of it."""
    conductor: Conductor | None = None

    async def live(self, back: Return | None) -> None:
        """See restoration.Live. Every life has processes, journal and conductor of its own."""
        directory = self.record.directory.path
        if back is not None:
            self.record.begin_again()
            copied = None if self.conductor is None else self.conductor.checkpoints.copied
            self.resumption = await asyncio.to_thread(find_resumption, directory, self.settings, back, copied)  # it reads whole checkpoints
        self.progress("starting samplers and learner", 0.0)
        async with local_roles(
            self.settings,
            self.code,
            self.prepared,
            evaluate=self.evaluate,
            resumption=self.resumption,
            memory=self.memory,
            measures=self.begins is None,
        ) as roles:
            self._note_start(roles)
            journal = self.record.keep(open_journal(directory, self.settings, self.resumption))
            self.conductor = conductor = self._conductor(roles, journal)
            self._note_resumption(conductor, back)
            for event in roles.start_events:
                self.record.log.emit(event)
            can_go_back = partial(self._can_go_back, conductor, journal)
            self.restoration.took_up(reached=lambda: conductor.learner.version.number, can_go_back=can_go_back)
            try:
                async with watched(roles.irreplaceable):
                    await conductor.run()
            finally:
                self.record.final_version = conductor.learner.version

    def outcome(self) -> RunOutcome:
        assert self.conductor is not None and self.begins is not None
        checkpoint = self.conductor.checkpoints.last
        return RunOutcome(run_directory=self.record.directory.path, checkpoint=checkpoint, startup_seconds=self.begins.startup_seconds)

    def say_how_to_go_on(self, error: HeadraceError) -> None:
        """After a loss."""
        lost = error.learner_lost or isinstance(error, WorkerLostError)
        if lost and self.conductor is not None and self.conductor.checkpoints.last is not None:
            how = f"Go on from {self.conductor.checkpoints.last.name}: headrace resume {self.record.directory.path}."
            error.remedy = f"{how} {error.remedy or ''}".rstrip()

    def _can_go_back(self, conductor: Conductor, journal: RunJournal) -> bool:
        """To a checkpoint, or to the start: the journal knows everything since."""
        return journal.keeps_records or conductor.checkpoints.last is not None

    def _note_start(self, roles: LocalRoles) -> None:
        """Line 1 is said once, after everything that can be wrong with what was given."""
        if self.begins is not None:
            return
        check_chats([*self.training, *self.tasks], roles.has_chat_template)
        sampling_parameters(self.settings, roles.end_tokens)
        seconds = time.perf_counter() - self.started
        self.begins = _run_started(self.resolved, self.settings, self.record.directory.path, roles.devices, seconds)
        if self.resumption is None:
            self.record.begin(self.begins)

    def _conductor(self, roles: LocalRoles, journal: RunJournal) -> Conductor:
        settings = self.settings
        sampling, evaluation_sampling = sampling_parameters(settings, roles.end_tokens)
        source = ListTaskSource(self.training, seed=settings.run.seed, shuffle=settings.task.shuffle)
        return Conductor(
            settings,
            Roles(source=source, workers=roles.workers, learner=roles.learner, evaluator=roles.evaluator, restart=roles.restart),
            sampling=sampling,
            evaluation_sampling=evaluation_sampling,
            evaluation_tasks=self.tasks,
            events=self.record.log,
            checkpoint_directory=self.record.directory.checkpoints,
            recorder=self.record.store,
            journal=journal,
            restore=None if self.resumption is None else self.resumption.restore,
        )

    def _note_resumption(self, conductor: Conductor, back: Return | None) -> None:
        if self.resumption is None:
            return
        assert self.begins is not None
        begins = self.begins if back is None else dataclasses.replace(self.begins, startup_seconds=clock.now() - back.since_seconds)
        event = self.resumption.event(begins, conductor, back)
        if self.record.has_begun:
            self.record.log.emit(event)
        else:
            self.record.begin(event)
        set_aside(self.record.directory.path, self.resumption)


async def evaluate_local(resolved: ResolvedSettings, checkpoint: Path, *, progress: StartupProgress = lambda what, fraction: None) -> ev.Evaluated:
    """Evaluates a checkpoint (a Hugging Face directory) on the recipe's evaluation tasks."""
    refuse_start_while_importing()
    settings = resolved.anchored()
    code = RecipeCode(resolved.task_module, settings.task.options)
    _, tasks = await read_recipe(settings, code)
    progress("starting the evaluator", 0.0)
    evaluator = LocalRole(lambda again: RoleProcess("evaluator", hosts.host_evaluator, (checkpoint, settings, code, None), core=None), settings)
    try:
        hello = await limited_hello(evaluator.process, settings)
        check_chats(tasks, hello["has_chat_template"])
        _, sampling = sampling_parameters(settings, hello["end_tokens"])
        requests = evaluation_requests(settings, tasks, sampling)
        started = time.perf_counter()
        async with asyncio.timeout(settings.limits.evaluate_seconds):
            result = await LocalEvaluator(evaluator, settings).evaluate(PolicyVersion(0, 0), requests, tasks)
        return evaluated(settings, result, time.perf_counter() - started)
    finally:
        await evaluator.process.stop(settings.limits.stop_seconds)


def sampling_parameters(settings: Settings, end_tokens: tuple[int, ...]) -> tuple[SamplingParameters, SamplingParameters]:
    """(training, evaluation). Raises ModelError when nothing but the token limit could end an action although the end token should."""
    rollout, evaluation = settings.rollout, settings.evaluation
    if rollout.stop_at_end_token and not end_tokens and not rollout.stop_strings:
        raise ModelError(
            "rollout.stop_at_end_token is true, but the model's tokenizer has no end token: no action would end before rollout.max_action_tokens.",
            remedy="Give the tokenizer an eos_token, name rollout.stop_strings, or set rollout.stop_at_end_token = false.",
        )
    stop_tokens = end_tokens if rollout.stop_at_end_token else ()
    training = SamplingParameters(
        temperature=rollout.temperature, max_action_tokens=rollout.max_action_tokens, stop_tokens=stop_tokens, stop_strings=tuple(rollout.stop_strings)
    )
    return training, SamplingParameters(
        temperature=evaluation.temperature,
        max_action_tokens=rollout.max_action_tokens,
        stop_tokens=stop_tokens,
        stop_strings=tuple(rollout.stop_strings),
        top_k=evaluation.top_k,
        top_p=evaluation.top_p,
    )


def _run_started(resolved: ResolvedSettings, settings: Settings, run_directory: Path, devices: list[dict[str, Any]], startup_seconds: float) -> ev.RunStarted:
    return ev.RunStarted(
        run_id=run_directory.name,
        headrace=headrace.__version__,
        runtime="local",
        clock="monotonic",
        wall_time=datetime.now(UTC).isoformat(timespec="seconds"),
        mode=settings.run.mode,
        placement=settings.run.placement,
        seed=settings.run.seed,
        lineage=0,
        resumed_from_update=None,
        devices=devices,
        recipe=resolved.name,
        num_updates=settings.run.num_updates,
        startup_seconds=startup_seconds,
        promised=None if resolved.promised is None else dict(resolved.promised),
    )
