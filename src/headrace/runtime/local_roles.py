"""The role processes of the local runtime, and the conductor's side of each: workers, learner and evaluator over wires.

prepare      the model directory to start from, made in a process of its own
local_roles  all role processes of one life of a run, up and answering; ended when the context is left
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from headrace import events as ev
from headrace.clock import Waits
from headrace.config import Placement, Settings
from headrace.errors import WaitTimeoutError, WorkerLostError, first_error
from headrace.learner.state_memory import StateMemory
from headrace.recipe import RecipeCode
from headrace.restoration import LEARNER
from headrace.roles import EvaluationResult
from headrace.runtime import hosts
from headrace.runtime.processes import Alive, RoleProcess
from headrace.runtime.resumption import Resumption
from headrace.supervision import BACK_OFF_SECONDS, Restart, Supervision
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, Task, WorkerReport
from headrace.updates import AdapterLayout, Selection, UpdateResult, WeightUpdate
from headrace.weights.channel import SharedMemoryChannel

StartupProgress = Callable[[str, float], None]
T = TypeVar("T")


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
        await self.replace(again=True)
        await limited_hello(self.process, self._settings)

    async def replace(self, *, again: bool) -> None:
        """Ends the process at once and makes its successor, which nobody has started."""
        await self.process.stop(0.0)
        self.process = self._make(again)


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

    async def copy(self) -> int:
        num_bytes: int = await self._call(self._ranks[:1], "copy")
        return num_bytes

    async def stop(self) -> None:
        """Ending the processes is the runtime's work: from now on they may end."""
        for rank in self._ranks:
            rank.let_end()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    model: Path
    """The directory to start from."""
    parameter_bytes: int
    """Of an update."""
    adapters: AdapterLayout | None
    """If only they are trained."""


async def prepare(settings: Settings, code: RecipeCode, progress: StartupProgress) -> Prepared:
    """Makes or finds the model, in a process of its own; one that is killed is begun again as a role that is lost while it starts."""
    losses = 0
    while True:
        progress("loading torch and transformers", 0.0)
        preparation = RoleProcess("preparation", hosts.host_preparation, (settings, code, cache_directory()), core=None)
        try:
            return await _prepared(preparation, settings, progress)
        except WorkerLostError as error:
            losses += 1
            if not preparation.fell_silent or losses > settings.limits.max_restarts:
                raise
            progress(f"begun again: {error.message}", 0.0)
        finally:
            await preparation.stop(settings.limits.stop_seconds)
        await asyncio.sleep(BACK_OFF_SECONDS * 2 ** (losses - 1))


async def _prepared(preparation: RoleProcess, settings: Settings, progress: StartupProgress) -> Prepared:
    await limited_hello(preparation, settings)
    while isinstance(message := await _limited(preparation.receive(), "preparation said nothing", settings), tuple):
        progress(*message)
    return Prepared(model=message["directory"], parameter_bytes=message["parameter_bytes"], adapters=message["adapters"])


class Starting:
    """Brings roles up. One that is lost before it is up, and did not say why, is started again as one that is lost later (supervision.py)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.events: list[ev.Event] = []
        """What to say of it once the run has an event log that begins."""

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    async def role(self, role: LocalRole) -> dict[str, Any]:
        """What the role says of itself."""
        return (await self._up(role.name, lambda: [role.process], lambda: role.replace(again=False)))[0]

    async def ranks(self, ranks: list[RoleProcess], make: Callable[[], list[RoleProcess]]) -> dict[str, Any]:
        """What rank 0 says. They meet while they start, so all of them are made anew when one is lost."""

        async def replace() -> None:
            await _stop_all(ranks, 0.0)
            ranks[:] = make()

        return (await self._up(LEARNER, lambda: ranks, replace))[0]

    async def _up(self, name: str, processes: Callable[[], Sequence[RoleProcess]], replace: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
        try:
            return await self._hellos(processes())
        except WorkerLostError as error:
            if not any(process.fell_silent for process in processes()):
                raise
            supervision = Supervision(self._settings, self, Waits(), (lambda _: replace()) if self._settings.limits.max_restarts else None)
            supervision.lost(name, error)
        return await supervision.restarted(name, lambda: self._hellos(processes()))

    async def _hellos(self, processes: Sequence[RoleProcess]) -> list[dict[str, Any]]:
        """Once all are up."""
        return await _all([limited_hello(process, self._settings) for process in processes])


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRoles:
    workers: Sequence[LocalWorker]
    learner: LocalLearner
    evaluator: LocalEvaluator | None
    end_tokens: tuple[int, ...]
    has_chat_template: bool
    devices: list[dict[str, Any]]
    irreplaceable: Sequence[RoleProcess]
    """Those whose end is the end of the run."""
    restart: Restart | None = None
    start_events: Sequence[ev.Event] = ()
    """Roles that were lost while they started, and came up after all."""


@contextlib.asynccontextmanager
async def local_roles(
    settings: Settings, code: RecipeCode, prepared: Prepared, *,
    evaluate: bool, resumption: Resumption | None, memory: StateMemory | None = None, measures: bool = True,
) -> AsyncIterator[LocalRoles]:  # fmt: skip
    """All role processes, up and answering; ended, by force if need be, when the context is left. `measures`: samplers, their capacity."""
    model, adapters = prepared.model, prepared.adapters
    ranks: list[RoleProcess] = []
    replaceable: dict[str, LocalRole] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as meeting_place, contextlib.ExitStack() as stack:
        try:
            channel = stack.enter_context(contextlib.closing(SharedMemoryChannel(prepared.parameter_bytes)))
            layout, meetings = CoreLayout.of(settings), count()
            start = None if resumption is None else resumption.learner_start

            def learners() -> list[RoleProcess]:
                address = f"file://{meeting_place}/ranks-{next(meetings)}"
                arguments = [(model, settings, channel, rank, address, start, memory) for rank in range(settings.run.num_learner_ranks)]
                return [
                    RoleProcess(f"learner-{rank}", hosts.host_learner, each, core=layout.learner(rank), is_learner=True) for rank, each in enumerate(arguments)
                ]

            ranks += learners()

            def worker(index: int, again: bool) -> RoleProcess:
                name, core = f"sampler-{index}", layout.sampler(index)
                return RoleProcess(name, hosts.host_worker, (name, model, settings, code, channel, adapters, measures and not again), core=core)

            def evaluator(again: bool) -> RoleProcess:
                return RoleProcess("evaluator", hosts.host_evaluator, (model, settings, code, channel, adapters), core=None)

            workers = [LocalRole(partial(worker, index), settings) for index in range(settings.run.num_samplers)]
            evaluators = [LocalRole(evaluator, settings)] if evaluate else []
            replaceable.update((role.name, role) for role in (*workers, *evaluators))
            starting = Starting(settings)
            learner, *others = await _all([starting.ranks(ranks, learners), *map(starting.role, replaceable.values())])
            facts = dict(zip(replaceable, others, strict=True))
            restarts = settings.limits.max_restarts > 0
            yield LocalRoles(
                workers=[LocalWorker(role) for role in workers],
                learner=LocalLearner(ranks, learner["version"]),
                evaluator=LocalEvaluator(evaluators[0], settings) if evaluators else None,
                end_tokens=facts[workers[0].name]["end_tokens"],
                has_chat_template=facts[workers[0].name]["has_chat_template"],
                devices=_devices(settings, facts),
                irreplaceable=ranks if restarts else [*ranks, *(role.process for role in replaceable.values())],
                restart=(lambda name: replaceable[name].restart()) if restarts else None,
                start_events=starting.events,
            )
        finally:
            await _stop_all([*ranks, *(role.process for role in replaceable.values())], settings.limits.stop_seconds)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, once all are there. Raises the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


async def limited_hello(process: RoleProcess, settings: Settings) -> dict[str, Any]:
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


def _devices(settings: Settings, facts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    measured = [_speed(facts[f"sampler-{index}"]) for index in range(settings.run.num_samplers)]
    if settings.run.placement is Placement.COLOCATED:
        return [{"name": f"device-{index}", "role": "colocated", **speed} for index, speed in enumerate(measured)]
    samplers = [{"name": f"sampler-{index}", "role": "sampler", **speed} for index, speed in enumerate(measured)]
    return samplers + [{"name": f"learner-{rank}", "role": "learner", "capacity": 1} for rank in range(settings.run.num_learner_ranks)]


def _speed(facts: dict[str, Any]) -> dict[str, Any]:
    """What a sampler says of its speed; a recording failure only where there is one."""
    told = {key: facts[key] for key in ("capacity", "saturated_tokens_per_second")}
    return {**told, **({"recording_failure": facts["recording_failure"]} if facts.get("recording_failure") else {})}
