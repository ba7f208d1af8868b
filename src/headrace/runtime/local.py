"""The local runtime: every role a process on this machine, devices pinned to cores on CPU.

run_local       prepares the model, starts roles, drives the conductor, ends every process however it goes
evaluate_local  the evaluator alone, on a checkpoint
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import headrace
from headrace import events as ev
from headrace.conductor import Conductor, Roles
from headrace.config import Placement, Settings
from headrace.config_loading import ResolvedSettings
from headrace.errors import ModelError, WaitTimeoutError, WorkerLostError, first_error
from headrace.evaluation import evaluated, evaluation_requests
from headrace.recipe import RecipeCode
from headrace.roles import EvaluationResult
from headrace.runtime import hosts
from headrace.runtime.preflight import check_chats, read_recipe
from headrace.runtime.processes import Alive, RoleProcess, refuse_start_while_importing, watched
from headrace.runtime.resumption import Resumption, find_resumption, open_journal, set_aside
from headrace.runtime.run_record import RunRecord, run_record
from headrace.supervision import Restart
from headrace.tasks.source import ListTaskSource
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, SamplingParameters, Task, WorkerReport
from headrace.updates import AdapterLayout, Selection, UpdateResult, WeightUpdate
from headrace.weights.channel import SharedMemoryChannel

EventSubscriber = Callable[[dict[str, Any]], None]
StartupProgress = Callable[[str, float], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    run_directory: Path
    checkpoint: Path | None
    """The last one, a Hugging Face directory."""
    startup_seconds: float


class LocalRole:
    """A role in a process of its own, which another one may replace."""

    def __init__(self, make: Callable[[bool], RoleProcess], settings: Settings) -> None:
        """`make(again)` makes the process; `again` is True for a successor."""
        self._make = make
        self._settings = settings
        self.process = make(False)

    @property
    def name(self) -> str:
        return self.process.name

    async def restart(self) -> None:
        """Ends the process at once, starts its successor and waits until that is up."""
        await self.process.stop(0.0)
        self.process = self._make(True)
        await _limited_hello(self.process, self._settings)


class LocalWorker:
    """roles.RolloutWorker over the wire."""

    def __init__(self, role: LocalRole) -> None:
        self.name = role.name
        self._role = role

    async def start(self, requests: Sequence[RolloutRequest]) -> None:
        self._role.process.post(("start", (tuple(requests),)))

    async def next_report(self) -> WorkerReport:
        report = await self._role.process.receive()
        assert isinstance(report, WorkerReport)
        return report

    async def announce(self, update: WeightUpdate) -> None:
        self._role.process.post(("announce", (update,)))

    async def verify(self, keys: Sequence[RolloutKey]) -> None:
        self._role.process.post(("verify", (tuple(keys),)))

    async def forget(self, keys: Sequence[RolloutKey]) -> None:
        self._role.process.post(("forget", (tuple(keys),)))

    async def cancel(self, keys: Sequence[RolloutKey]) -> None:
        self._role.process.post(("cancel", (tuple(keys),)))

    async def stop(self) -> None:
        self._role.process.let_end()
        self._role.process.post(("stop", ()))


class LocalLearner:
    """roles.Learner over the wires of all ranks: each gets every call, rank 0 answers."""

    def __init__(self, ranks: Sequence[RoleProcess], version: PolicyVersion) -> None:
        self._ranks = ranks
        self._version = version

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def learn(self, selection: Selection) -> UpdateResult:
        result: UpdateResult = await self._call(self._ranks, "learn", selection)
        self._version = result.version_after
        return result

    async def publish(self) -> WeightUpdate:
        update: WeightUpdate = await self._call(self._ranks[:1], "publish")
        return update

    async def save(self, directory: Path) -> None:
        await self._call(self._ranks[:1], "save", directory)

    async def stop(self) -> None:
        """Ending the processes is the runtime's work."""

    async def _call(self, ranks: Sequence[RoleProcess], method: str, *arguments: Any) -> Any:
        for rank in ranks:
            await rank.send((method, arguments))
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(rank.receive()) for rank in ranks]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return answers[0].result()


class LocalEvaluator:
    """roles.Evaluator over the wire. Raises WorkerLostError also when its process shows no sign of life for limits.report_seconds."""

    def __init__(self, role: LocalRole, settings: Settings) -> None:
        self._role = role
        self._limit_seconds = settings.limits.report_seconds

    async def evaluate(self, version: PolicyVersion, requests: Sequence[RolloutRequest], tasks: Sequence[Task]) -> EvaluationResult:
        await self._role.process.send((version, tuple(requests), tuple(tasks)))
        while isinstance(answer := await self._sign_of_life(), Alive):
            pass
        result: EvaluationResult = answer
        return result

    async def _sign_of_life(self) -> Any:
        try:
            async with asyncio.timeout(self._limit_seconds) as timeout:
                return await self._role.process.receive()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise WorkerLostError(
                f"conductor waits for a sign of life from {self._role.name}: no answer in {self._limit_seconds:g} s.",
                remedy="It may be blocked by the recipe's Python: use `await` for waits, or a plain `def`; limits.report_seconds is the limit.",
            ) from None


@dataclass(frozen=True, slots=True)
class CoreLayout:
    """Which core each device is, on CPU: device i of a split run is core i, samplers first; colocated roles share."""

    cores: tuple[int, ...]
    settings: Settings

    @classmethod
    def of(cls, settings: Settings) -> CoreLayout:
        pinned = settings.run.pin_devices and settings.model.device == "cpu" and hasattr(os, "sched_getaffinity")
        return cls(tuple(sorted(os.sched_getaffinity(0))) if pinned else (), settings)

    def sampler(self, index: int) -> int | None:
        return self.cores[index % len(self.cores)] if self.cores else None

    def learner(self, rank: int) -> int | None:
        first = 0 if self.settings.run.placement is Placement.COLOCATED else self.settings.run.num_samplers
        return self.cores[(first + rank) % len(self.cores)] if self.cores else None


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
    it is that of a run that is over, which goes on from its newest whole checkpoint.
    """
    refuse_start_while_importing()
    started = time.perf_counter()
    settings = resolved.anchored()
    code = RecipeCode(resolved.task_module, settings.task.options)
    training, tasks = await read_recipe(settings, code)
    source = ListTaskSource(training, seed=settings.run.seed, shuffle=settings.task.shuffle)
    with run_record(settings, run_directory, clock=asyncio.get_running_loop().time, subscribers=subscribers, goes_on=resume) as record:
        resumption = find_resumption(run_directory, settings) if resume else None
        async with _roles(settings, code, progress, evaluate, resumption) as roles:
            check_chats([*training, *tasks], roles.has_chat_template)
            sampling, evaluation_sampling = sampling_parameters(settings, roles.end_tokens)
            begins = _run_started(resolved, settings, run_directory, roles.devices, time.perf_counter() - started)
            if resumption is None:
                record.begin(begins)
            journal = record.keep(open_journal(run_directory, settings, resumption))
            conductor = Conductor(
                settings,
                Roles(source=source, workers=roles.workers, learner=roles.learner, evaluator=roles.evaluator, restart=roles.restart),
                sampling=sampling,
                evaluation_sampling=evaluation_sampling,
                evaluation_tasks=tasks,
                events=record.log,
                checkpoint_directory=record.directory.checkpoints,
                recorder=record.store,
                journal=journal,
                restore=None if resumption is None else resumption.restore,
            )
            if resumption is not None:
                record.begin(resumption.event(begins, conductor))
                set_aside(run_directory, resumption)
            with _noting_the_end(record, conductor, run_directory):
                async with watched(roles.irreplaceable):
                    await conductor.run()
            return RunOutcome(run_directory=run_directory, checkpoint=conductor.checkpoints.last, startup_seconds=begins.startup_seconds)


@contextlib.contextmanager
def _noting_the_end(record: RunRecord, conductor: Conductor, run_directory: Path) -> Iterator[None]:
    """The version reached; after a loss, how to go on."""
    try:
        yield
    except WorkerLostError as error:
        if conductor.checkpoints.last is not None:
            error.remedy = f"Go on from {conductor.checkpoints.last.name}: headrace resume {run_directory}. {error.remedy or ''}".rstrip()
        raise
    finally:
        record.final_version = conductor.learner.version


async def evaluate_local(resolved: ResolvedSettings, checkpoint: Path, *, progress: StartupProgress = lambda what, fraction: None) -> ev.Evaluated:
    """Evaluates a checkpoint (a Hugging Face directory) on the recipe's evaluation tasks."""
    refuse_start_while_importing()
    settings = resolved.anchored()
    code = RecipeCode(resolved.task_module, settings.task.options)
    _, tasks = await read_recipe(settings, code)
    progress("starting the evaluator", 0.0)
    evaluator = LocalRole(lambda again: RoleProcess("evaluator", hosts.host_evaluator, (checkpoint, settings, code, None), core=None), settings)
    try:
        hello = await _limited_hello(evaluator.process, settings)
        check_chats(tasks, hello["has_chat_template"])
        _, sampling = sampling_parameters(settings, hello["end_tokens"])
        requests = evaluation_requests(settings, tasks, sampling)
        started = time.perf_counter()
        async with asyncio.timeout(settings.limits.evaluate_seconds):
            result = await LocalEvaluator(evaluator, settings).evaluate(PolicyVersion(0, 0), requests, tasks)
        return evaluated(settings, result, time.perf_counter() - started)
    finally:
        await evaluator.process.stop(settings.limits.stop_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalRoles:
    workers: Sequence[LocalWorker]
    learner: LocalLearner
    evaluator: LocalEvaluator | None
    end_tokens: tuple[int, ...]
    has_chat_template: bool
    devices: list[dict[str, Any]]
    irreplaceable: Sequence[RoleProcess]
    """Those whose end is the end of the run."""
    restart: Restart | None = None


@contextlib.asynccontextmanager
async def _roles(settings: Settings, code: RecipeCode, progress: StartupProgress, evaluate: bool, resumption: Resumption | None) -> AsyncIterator[_LocalRoles]:
    """All role processes, up and answering; ended, by force if need be, when the context is left."""
    ranks: list[RoleProcess] = []
    replaceable: dict[str, LocalRole] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as meeting_place, contextlib.ExitStack() as stack:
        try:
            model, parameter_bytes, adapters = await _prepare(settings, code, progress)
            channel = stack.enter_context(contextlib.closing(SharedMemoryChannel(parameter_bytes)))
            layout = CoreLayout.of(settings)
            address = f"file://{meeting_place}/ranks"
            restored = None if resumption is None else (resumption.checkpoint, resumption.start.lineage)
            ranks += [
                RoleProcess(f"learner-{rank}", hosts.host_learner, (model, settings, channel, rank, address, restored), core=layout.learner(rank))
                for rank in range(settings.run.num_learner_ranks)
            ]

            def worker(index: int, again: bool) -> RoleProcess:
                name, core = f"sampler-{index}", layout.sampler(index)
                return RoleProcess(name, hosts.host_worker, (name, model, settings, code, channel, adapters, not again), core=core)

            def evaluator(again: bool) -> RoleProcess:
                return RoleProcess("evaluator", hosts.host_evaluator, (model, settings, code, channel, adapters), core=None)

            workers = [LocalRole(partial(worker, index), settings) for index in range(settings.run.num_samplers)]
            evaluators = [LocalRole(evaluator, settings)] if evaluate else []
            replaceable.update((role.name, role) for role in (*workers, *evaluators))
            progress("starting samplers and learner", 0.0)
            facts = await _hellos([*ranks, *(role.process for role in replaceable.values())], settings)
            restarts = settings.limits.max_restarts > 0
            yield _LocalRoles(
                workers=[LocalWorker(role) for role in workers],
                learner=LocalLearner(ranks, facts[ranks[0].name]["version"]),
                evaluator=LocalEvaluator(evaluators[0], settings) if evaluators else None,
                end_tokens=facts[workers[0].name]["end_tokens"],
                has_chat_template=facts[workers[0].name]["has_chat_template"],
                devices=_devices(settings, facts),
                irreplaceable=ranks if restarts else [*ranks, *(role.process for role in replaceable.values())],
                restart=(lambda name: replaceable[name].restart()) if restarts else None,
            )
        finally:
            await _stop_all([*ranks, *(role.process for role in replaceable.values())], settings.limits.stop_seconds)


async def _prepare(settings: Settings, code: RecipeCode, progress: StartupProgress) -> tuple[Path, int, AdapterLayout | None]:
    """The model directory to start from, made in a process of its own; the bytes of an update, and the adapters if only they are trained."""
    progress("loading torch and transformers", 0.0)
    preparation = RoleProcess("preparation", hosts.host_preparation, (settings, code, cache_directory()), core=None)
    try:
        await _limited_hello(preparation, settings)
        while isinstance(message := await _limited(preparation.receive(), "preparation said nothing", settings), tuple):
            progress(*message)
        return message["directory"], message["parameter_bytes"], message["adapters"]
    finally:
        await preparation.stop(settings.limits.stop_seconds)


async def _hellos(processes: Sequence[RoleProcess], settings: Settings) -> dict[str, dict[str, Any]]:
    """What each says of itself, once all are up."""
    try:
        async with asyncio.TaskGroup() as group:
            hellos = {process.name: group.create_task(_limited_hello(process, settings)) for process in processes}
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return {name: task.result() for name, task in hellos.items()}


async def _limited_hello(process: RoleProcess, settings: Settings) -> dict[str, Any]:
    return await _limited(process.hello(), f"{process.name} did not start", settings)


async def _limited(awaitable: Awaitable[T], what_failed: str, settings: Settings) -> T:
    limit = settings.limits.startup_seconds
    try:
        async with asyncio.timeout(limit):
            return await awaitable
    except TimeoutError:
        raise WaitTimeoutError(
            f"{what_failed} within {limit:g} s.", remedy="'headrace doctor' looks for the cause; limits.startup_seconds is the limit."
        ) from None


async def _stop_all(processes: Sequence[RoleProcess], limit_seconds: float) -> None:
    """Ends every process, also when this is itself cancelled: a second Ctrl-C does not leave one behind."""
    stopping = [process.stop(limit_seconds) for process in processes]
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.shield(asyncio.gather(*stopping, return_exceptions=True))


def cache_directory() -> Path:
    """Warm-started models; HEADRACE_CACHE or the user's cache folder."""
    base = os.environ.get("HEADRACE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "headrace")
    path = Path(base) / "models"
    path.mkdir(parents=True, exist_ok=True)
    return path


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


def _devices(settings: Settings, facts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    measured = [{key: facts[f"sampler-{index}"][key] for key in ("capacity", "saturated_tokens_per_second")} for index in range(settings.run.num_samplers)]
    if settings.run.placement is Placement.COLOCATED:
        return [{"name": f"device-{index}", "role": "colocated", **speed} for index, speed in enumerate(measured)]
    samplers = [{"name": f"sampler-{index}", "role": "sampler", **speed} for index, speed in enumerate(measured)]
    return samplers + [{"name": f"learner-{rank}", "role": "learner", "capacity": 1} for rank in range(settings.run.num_learner_ranks)]


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
    )
