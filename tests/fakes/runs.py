"""Whole runs of the real conductor and the real pool over scripted roles, in one loop under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.learner import START, ScriptedLearner
from fakes.rollouts import (
    END_TOKEN,
    LoopUserCode,
    ScriptedEnvironment,
    ScriptedSampler,
    ScriptedWeights,
    action_tokens_of_task,
    scripted_settings,
    scripted_task,
    scripted_worker,
)
from headrace import clock
from headrace.checkpointing import Restore
from headrace.conductor import Conductor, Roles
from headrace.config import Settings
from headrace.event_log import EventLog
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, SampleRequest, SamplingParameters, Task, VerifyRequest
from headrace.updates import Selection


class CycledTasks:
    """roles.TaskSource over a list, again and again."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self.position = 0

    def next(self) -> Task:
        self.position += 1
        return self._tasks[(self.position - 1) % len(self._tasks)]


class RecordingLog(EventLog):
    """Keeps every line as a dict."""

    def __init__(self) -> None:
        super().__init__(None, clock.now)
        self.lines: list[dict[str, Any]] = []
        self.subscribe(self.lines.append)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == name]


def run_settings(
    *,
    mode: str = "async",
    num_updates: int = 6,
    groups: int = 2,
    group_size: int = 2,
    max_staleness: int = 2,
    num_samplers: int = 1,
    **sections: Mapping[str, Any],
) -> Settings:
    """Small runs: 2 groups of 2 a batch."""
    parts: dict[str, dict[str, Any]] = {
        "run": {"mode": mode, "num_updates": num_updates, "num_samplers": num_samplers},
        "pool": {"groups_per_batch": groups, "max_staleness": max_staleness, "no_signal": "train"},
        "rollout": {"group_size": group_size, "max_steps": 64, "max_tokens": 2048, "max_action_tokens": 16},
    }
    for name, section in sections.items():
        parts.setdefault(name, {}).update(section)
    return scripted_settings(**parts)


class ReplayableScriptedEnvironment(ScriptedEnvironment):
    """Its answers follow from the task and the number of actions."""

    replayable = True


class MemberTasks(dict[RolloutKey, Task]):
    """Which task each rollout has, noted as workers are given requests: the samplers' scripts ask."""


@dataclass(kw_only=True)
class ScriptedRun:
    """One run: build it inside the loop, then await `run()`. Everything it did can be looked at afterwards."""

    settings: Settings
    tasks: Sequence[Task] = ()
    learn_seconds: float = 1.0
    publish_seconds: float = 0.0
    apply_seconds: float = 0.0
    seconds_per_token: float = 0.05
    max_running: int = 64
    applies: bool = True
    refuse: Callable[[int], bool] = lambda selection_id: False
    measured: Callable[[Selection], Mapping[str, Any]] = lambda selection: {}
    fail: Callable[[SampleRequest], int | None] = lambda request: None
    reject: Callable[[VerifyRequest], int | None] = lambda request: None
    evaluator: Any = None
    recorder: Any = None
    evaluation_tasks: Sequence[Task] = ()
    journal: Any = None
    restore: Restore | None = None
    start: PolicyVersion = START
    """Where the learner starts."""
    checkpoint_directory: Path | None = None
    log: RecordingLog = field(init=False)
    learner: ScriptedLearner = field(init=False)
    conductor: Conductor = field(init=False)
    workers: list[RolloutWorkerCore] = field(init=False)
    samplers: list[ScriptedSampler] = field(init=False)
    started: list[tuple[float, RolloutKey]] = field(default_factory=list)

    def build(self) -> None:
        self.log = RecordingLog()
        weights = ScriptedWeights()
        member_tasks = MemberTasks()
        self.samplers = [
            ScriptedSampler(
                max_running=self.max_running,
                seconds_per_token=self.seconds_per_token,
                apply_seconds=self.apply_seconds,
                weights=weights,
                action_tokens=action_tokens_of_task(member_tasks),
                applies=self.applies,
                fail=self.fail,
                reject=self.reject,
            )
            for _ in range(self.settings.run.num_samplers)
        ]
        self.workers = [
            scripted_worker(sampler, name=f"sampler-{index}", settings=self.settings, user_code=LoopUserCode(make_environment=ReplayableScriptedEnvironment))
            for index, sampler in enumerate(self.samplers)
        ]
        for worker in self.workers:
            self._note_starts(worker, member_tasks)
        self.learner = ScriptedLearner(
            self.settings,
            lambda version: void(weights.publish(version.number, version.lineage)),
            learn_seconds=self.learn_seconds,
            publish_seconds=self.publish_seconds,
            refuse=self.refuse,
            measured=self.measured,
            version=self.start,
        )
        self.conductor = Conductor(
            self.settings,
            Roles(source=CycledTasks(self.tasks or [scripted_task("t", reward=1.0)]), workers=self.workers, learner=self.learner, evaluator=self.evaluator),
            sampling=SamplingParameters(max_action_tokens=16, stop_tokens=(END_TOKEN,)),
            evaluation_sampling=SamplingParameters(max_action_tokens=16, stop_tokens=(END_TOKEN,)),
            evaluation_tasks=self.evaluation_tasks,
            events=self.log,
            checkpoint_directory=self.checkpoint_directory,
            recorder=self.recorder,
            journal=self.journal,
            restore=self.restore,
        )

    async def run(self) -> None:
        self.build()
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.run())
                await self.conductor.run()
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        finally:
            self.log.close()

    def _note_starts(self, worker: RolloutWorkerCore, member_tasks: MemberTasks) -> None:
        start = worker.start

        async def noted(requests: Sequence[RolloutRequest]) -> None:
            for request in requests:
                member_tasks[request.key] = request.task
                self.started.append((clock.now(), request.key))
            await start(requests)

        worker.start = noted  # type: ignore[method-assign]


def void(value: object) -> None:
    """Drops a result."""


def version_numbers(versions: Sequence[PolicyVersion]) -> list[int]:
    return [version.number for version in versions]
