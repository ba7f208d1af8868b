"""The simulated runtime: the real conductor and the real pool over roles that only take time, under a clock that jumps.

simulate        one whole run, with a run directory (watch, report and trace work on it) or without
check_settings  what cannot be simulated is refused

Deterministic: the same settings and the same time model give the same events. Cost grows with completions and updates, not with tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headrace
from headrace import clock
from headrace import events as ev
from headrace.conductor import Conductor, Roles
from headrace.config import Apply, Placement, RecordTrajectories, Settings, UpdateMode, Verify
from headrace.errors import ConfigError, Problem
from headrace.event_log import EventLog
from headrace.roles import EventSink, TaskSource, TrajectoryRecorder
from headrace.runtime.run_record import run_record
from headrace.runtime.simulated_cores import take_seats
from headrace.runtime.simulated_learner import SimulatedLearner
from headrace.runtime.simulated_worker import SimulatedWorker
from headrace.runtime.time_model import TimeModel
from headrace.types import PolicyVersion, SamplingParameters, Task

EventSubscriber = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How a simulated run ended."""

    version: PolicyVersion
    """Reached."""
    seconds: float
    """Virtual."""
    preempted: int
    """Actions thrown out because a KV cache was full."""


class SimulatedTasks:
    """roles.TaskSource without an end: each task is another one."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Task:
        self.position += 1
        return Task(id=f"simulated-{self.position}", data={}, kind="simulated")


def check_settings(settings: Settings, model: TimeModel) -> None:
    """Raises ConfigError naming every setting that the simulation does not know, or for which the model lacks what was to be measured."""
    pool, sampler = settings.pool, settings.sampler
    wanted = (("sampler.update_mode", sampler.update_mode, UpdateMode.KEEP), ("sampler.apply", sampler.apply, Apply.EVERY_STEP))
    problems = [
        Problem(key=key, value=str(value), limit=str(known), message=f"'{key}' is '{value}', which the simulation does not know.", remedy=f"Set {key}={known}.")
        for key, value, known in wanted
        if value != known
    ]
    if pool.verify is not Verify.OFF and model.rejects is None:
        message = (
            f"'pool.verify' is '{pool.verify}', and the profile's run made no verification of that kind: what it accepts and takes is not known ('checks')."
        )
        problems.append(
            Problem(key="pool.verify", value=str(pool.verify), limit="off", message=message, remedy=_PROFILE_WITH.format(f"pool.verify={pool.verify}"))
        )
    needs_marks = pool.pace_key_steps or pool.verify is Verify.KEY_STEPS
    if needs_marks and model.key_step_share == 0:
        key, value = ("pool.pace_key_steps", "True") if pool.pace_key_steps else ("pool.verify", str(pool.verify))
        message = f"'{key}' is '{value}', and the profile's run marked no step ('key_step_share' is 0)."
        problems.append(Problem(key=key, value=value, limit="off, or a profile with key steps", message=message, remedy=_PROFILE_WITH.format("marks")))
    if problems:
        raise ConfigError(problems)


_PROFILE_WITH = "Profile a run with {} (headrace profile RUN), or leave it off."


def simulate(
    settings: Settings, model: TimeModel, *, run_directory: Path | None = None, name: str = "simulated", subscribers: Sequence[EventSubscriber] = ()
) -> Simulation:  # fmt: skip
    """A whole run of `settings`, its time taken from `model`. Raises HeadraceError as a real run does; the virtual clock must not be running.

    Where the model knows nothing of rewards, pool.no_signal should be `train`: no group is filtered for them then.
    """
    check_settings(settings, model)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"record_trajectories": RecordTrajectories.NONE})})
    return clock.run_virtual(_simulate(settings, model, run_directory, name, subscribers))


async def _simulate(settings: Settings, model: TimeModel, run_directory: Path | None, name: str, subscribers: Sequence[EventSubscriber]) -> Simulation:
    with _log(settings, run_directory, subscribers) as (log, note_end):
        log.emit(run_started(settings, model, name=name, run_id=name if run_directory is None else run_directory.name))
        roles = simulated_roles(settings, model)
        conductor = simulated_conductor(settings, roles, log)
        try:
            await conductor.run()
        finally:
            note_end(conductor.learner.version)
        workers = [worker for worker in roles.workers if isinstance(worker, SimulatedWorker)]
        return Simulation(version=conductor.learner.version, seconds=clock.now(), preempted=sum(worker.engine.preempted for worker in workers))


def simulated_roles(settings: Settings, model: TimeModel, *, source: TaskSource | None = None) -> Roles:
    """Made in the loop that they live in."""
    seats, learner_seats = take_seats(settings, model.num_cores)
    workers = [SimulatedWorker(f"sampler-{index}", settings=settings, model=model, seat=seat) for index, seat in enumerate(seats)]
    return Roles(source=source or SimulatedTasks(), workers=workers, learner=SimulatedLearner(settings, model, learner_seats), evaluator=None)


def simulated_conductor(settings: Settings, roles: Roles, events: EventSink, *, recorder: TrajectoryRecorder | None = None) -> Conductor:
    """The conductor of every run, without evaluations and checkpoints."""
    sampling = SamplingParameters(max_action_tokens=settings.rollout.max_action_tokens)
    return Conductor(
        settings,
        roles,
        sampling=sampling,
        evaluation_sampling=sampling,
        evaluation_tasks=(),
        events=events,
        checkpoint_directory=None,
        recorder=recorder,
    )


def run_started(settings: Settings, model: TimeModel, *, name: str, run_id: str) -> ev.RunStarted:
    """Line 1 of a simulated run."""
    speed = {"capacity": model.capacity, "saturated_tokens_per_second": model.saturated_tokens_per_second}
    if settings.run.placement is Placement.COLOCATED:
        devices: list[dict[str, Any]] = [{"name": f"device-{index}", "role": "colocated", **speed} for index in range(settings.run.num_samplers)]
    else:
        devices = [{"name": f"sampler-{index}", "role": "sampler", **speed} for index in range(settings.run.num_samplers)]
        devices += [{"name": f"learner-{rank}", "role": "learner", "capacity": 1} for rank in range(settings.run.num_learner_ranks)]
    return ev.RunStarted(
        run_id=run_id,
        headrace=headrace.__version__,
        runtime="simulated",
        clock="virtual",
        wall_time=None,
        mode=settings.run.mode,
        placement=settings.run.placement,
        seed=settings.run.seed,
        lineage=0,
        resumed_from_update=None,
        devices=devices,
        recipe=name,
        num_updates=settings.run.num_updates,
    )


@contextlib.contextmanager
def _log(
    settings: Settings, run_directory: Path | None, subscribers: Sequence[EventSubscriber]
) -> Iterator[tuple[EventSink, Callable[[PolicyVersion], None]]]:  # fmt: skip
    """Where events go, and what to tell the version that was reached."""
    if run_directory is None:
        with contextlib.closing(EventLog(None, clock.now)) as log:
            for subscriber in subscribers:
                log.subscribe(subscriber)
            yield log, lambda version: None
        return
    with run_record(settings, run_directory, clock=clock.now, subscribers=subscribers) as record:
        record.has_begun = True

        def note_end(version: PolicyVersion) -> None:
            record.final_version = version

        yield record.log, note_end
