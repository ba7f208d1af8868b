"""Simulated runs for tests: time models in closed form, and the same run over scripted roles."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fakes.rollouts import LoopUserCode, ScriptedEnvironment
from fakes.runs import CycledTasks, RecordingLog, ScriptedRun
from headrace.config import Settings
from headrace.roles import Environment
from headrace.runtime.simulated import simulated_conductor, simulated_roles
from headrace.runtime.time_model import PlannedRollout, PlannedStep, TimeModel
from headrace.types import Observation, RolloutKey, RolloutRequest, Task

SECONDS = {"seconds_per_token": 0.0503, "learn_seconds": 1.017, "publish_seconds": 0.0231, "apply_seconds": 0.0117}
"""Nothing happens by chance at the same moment as something else."""


def member_waits(key: RolloutKey, waits: Sequence[float]) -> list[float]:
    """Each rollout's own, so that no two of them end at the same moment."""
    factor = 1.0 + 0.0137 * ((13 * key.group_id + 5 * key.member + 3 * key.attempt) % 29) / 29
    return [wait * factor for wait in waits]


def scripted_plan(request: RolloutRequest, version: int) -> PlannedRollout:
    """What a MemberEnvironment makes of its task; the first prompt has a begin token."""
    data = request.task.data
    waits, lengths = member_waits(request.key, data["wait_seconds"]), data["action_tokens"]
    steps = tuple(PlannedStep(len(f"{step}?") + (step == 0), lengths[step % len(lengths)], waits[step % len(waits)]) for step in range(data["answers"]))
    return PlannedRollout(steps=steps, reward=data["reward"])


def scripted_times(**changes: Any) -> TimeModel:
    """The time that scripted roles take."""
    values: dict[str, Any] = {
        "plan_rollout": scripted_plan,
        "step_seconds": lambda running: SECONDS["seconds_per_token"],
        "learn_seconds": lambda tokens, ranks: SECONDS["learn_seconds"],
        "publish_seconds": SECONDS["publish_seconds"],
        "pause_seconds": SECONDS["apply_seconds"],
        "update_bytes": 8,
    }
    return TimeModel(**{**values, **changes})


class MemberEnvironment(ScriptedEnvironment):
    """Waits as long as its rollout's key says."""

    def __init__(self, key: RolloutKey) -> None:
        super().__init__()
        self._key = key

    async def reset(self, task: Task) -> Observation:
        return await super().reset(replace(task, data={**task.data, "wait_seconds": member_waits(self._key, task.data["wait_seconds"])}))


class MemberUserCode(LoopUserCode):
    def open_environment(self, key: RolloutKey) -> Environment | None:
        self._make_environment = lambda: MemberEnvironment(key)
        return super().open_environment(key)


class MemberRun(ScriptedRun):
    """Scripted roles whose rollouts all wait a little differently."""

    def build(self) -> None:
        super().build()
        for worker in self.workers:
            worker._user_code = MemberUserCode()


async def simulated_lines(settings: Settings, tasks: Sequence[Task], model: TimeModel) -> list[dict[str, Any]]:
    """Events of a simulated run over these tasks."""
    log = RecordingLog()
    roles = simulated_roles(settings, model, source=CycledTasks(tasks))
    await simulated_conductor(settings, roles, log).run()
    return log.lines


async def scripted_lines(settings: Settings, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Events of the same run over scripted roles: real rollouts, token by token."""
    run = MemberRun(settings=settings, tasks=tasks, max_running=settings.sampler.max_running, **SECONDS)
    await run.run()
    return run.log.lines


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Without texts for people and what only one of the two knows; what happens at one moment in an order of its own."""
    return sorted((_line(line) for line in lines), key=lambda text: (json.loads(text)["time"], text))


def _line(line: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in line.items() if name not in ("longest_wait", "statistics", "waits")}
    if "transfer_seconds" in kept:
        kept["transfer_seconds"] = round(kept["transfer_seconds"], 6)
    if line["event"] == "worker_active":
        activity = line["activity"]
        idle = {reason: round(seconds, 3) for reason, seconds in sorted(activity["idle_seconds"].items()) if seconds > 1e-6}
        running = {count: round(seconds, 3) for count, seconds in sorted(activity["running_seconds"].items())}
        counters = {name: activity[name] for name in ("decode_steps", "sampled_tokens", "applied_updates")}
        kept["activity"] = {"idle_seconds": idle, "running_seconds": running, **counters}
    return json.dumps(kept, sort_keys=True)


def random_times(*, failures: float = 0.0, **changes: Any) -> TimeModel:
    """Rollouts by chance, of 1 to 5 steps with a heavy tail of tokens; steps get longer with batch and context."""

    def plan(request: RolloutRequest, version: int) -> PlannedRollout:
        stream = random.Random(repr((request.seed, *request.key)))
        steps = tuple(
            PlannedStep(stream.randint(1, 30), min(400, int(stream.paretovariate(1.2) * 10)), stream.expovariate(2.0)) for _ in range(stream.randint(1, 5))
        )
        return PlannedRollout(steps=steps, reward=float(stream.random() < 0.5), fails=stream.random() < failures)

    values: dict[str, Any] = {
        "plan_rollout": plan,
        "step_seconds": lambda running: 0.02 + 0.003 * running,
        "seconds_per_context_token": 1e-6,
        "observation_seconds": lambda tokens: 1e-4 * tokens,
        "gap_seconds": lambda running: 0.001,
        "learn_seconds": lambda tokens, ranks: 0.5 + tokens / 2000 / ranks,
        "handover_seconds": 0.01,
        "publish_seconds": 0.05,
        "transfer_seconds": 0.1,
        "pause_seconds": 0.02,
        "report_seconds": 0.01,
        "capacity": 6,
    }
    return TimeModel(**{**values, **changes})
