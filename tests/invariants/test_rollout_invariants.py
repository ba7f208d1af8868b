"""I2, I3, I4, I7 and case 16 over random rollouts: whatever waits, fails, is cut or gets new weights, each started request
ends in exactly one consistent trajectory, and at every report generated = delivered + in flight, token for token."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.rollouts import (
    ScriptedSampler,
    ScriptedWeights,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_user_code,
    scripted_worker,
)
from headrace.clock import now, run_virtual
from headrace.errors import WorkerLostError
from headrace.types import EndReason, RolloutKey, SampleRequest, Task, Trajectory, WorkerReport

WAITS = st.sampled_from([0.0, 0.001, 0.02, 0.5, 3.0])


@dataclass(frozen=True)
class Plan:
    """One random run."""

    tasks: list[Task]
    sampler: dict[str, Any]
    sampler_failures: dict[tuple[int, int], int]
    """(member, step) -> tokens after which the action is lost"""
    limits: dict[str, Any]
    publish_seconds: list[float]
    cancel_seconds: dict[int, float]
    stop_seconds: float


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 6))
    tasks = [
        scripted_task(
            f"t{member}",
            answers=draw(st.integers(1, 8)),
            wait_seconds=draw(st.lists(WAITS, min_size=1, max_size=4)),
            reset_seconds=draw(WAITS),
            reward=draw(st.sampled_from([0.0, 1.0, -2.5, math.nan])),
            key_steps=draw(st.lists(st.integers(0, 7), max_size=3)),
            fail_at=draw(st.none() | st.integers(-1, 5)),
            hang_at=draw(st.none() | st.integers(0, 5)),
        )
        for member in range(count)
    ]
    return Plan(
        tasks=tasks,
        sampler={
            "max_running": draw(st.integers(1, 4)),
            "max_context_tokens": draw(st.sampled_from([12, 40, 1000])),
            "apply_seconds": draw(st.sampled_from([0.0, 0.013])),
            "abort": draw(st.booleans()),
        },
        sampler_failures=draw(st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.integers(0, 4), max_size=3)),
        limits={
            "max_steps": draw(st.integers(1, 8)),
            "max_tokens": draw(st.sampled_from([20, 60, 500])),
            "max_seconds": draw(st.sampled_from([0.2, 2.0, 100.0])),
        },
        publish_seconds=draw(st.lists(st.floats(0.001, 3.0), max_size=6)),
        cancel_seconds=draw(st.dictionaries(st.integers(0, 5), st.floats(0.0, 3.0), max_size=2)),
        stop_seconds=draw(st.sampled_from([0.1, 1.0, 1000.0])),
    )


@dataclass(frozen=True)
class Result:
    trajectories: list[Trajectory]
    requests: list[SampleRequest]
    versions: list[Any]


def run_plan(plan: Plan) -> Result:
    async def main() -> Result:
        weights = ScriptedWeights()
        sampler = ScriptedSampler(weights=weights, fail=lambda request: plan.sampler_failures.get((request.key.member, request.step)), **plan.sampler)
        code = scripted_user_code(limit_seconds=4.0)
        worker = scripted_worker(sampler, user_code=code, settings=scripted_settings(rollout=plan.limits | {"max_action_tokens": 8}))
        found: list[Trajectory] = []
        versions: list[Any] = []
        started = {RolloutKey(0, member, 0) for member in range(len(plan.tasks))}

        def check(report: WorkerReport) -> None:
            """The ledger's identity, in flight counted independently by the fake: completed actions plus the running one."""
            found.extend(Trajectory.from_bytes(finished.payload) for finished in report.finished)
            versions.append(report.version)
            delivered = sum(trajectory.num_action_tokens + trajectory.discarded_tokens for trajectory in found)
            running = started - {trajectory.key for trajectory in found}
            assert report.generated_tokens == delivered + sum(sampler.num_generated(key) for key in running)
            assert report.in_flight == len(running)
            assert 0 <= report.room <= sampler.max_running

        async def read() -> None:
            try:
                while True:
                    check(await worker.next_report())
            except WorkerLostError:
                return

        async def publish() -> None:
            for number, seconds in enumerate(plan.publish_seconds, start=1):
                await asyncio.sleep(seconds)
                await worker.announce(weights.publish(number))

        async def cancel(member: int, seconds: float) -> None:
            await asyncio.sleep(seconds)
            await worker.cancel([RolloutKey(0, member, 0)])

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.start([rollout_request(member=member, task=task, max_action_tokens=8) for member, task in enumerate(plan.tasks)])
            group.create_task(read())
            group.create_task(publish())
            for member, seconds in plan.cancel_seconds.items():
                group.create_task(cancel(member, seconds))
            await asyncio.sleep(plan.stop_seconds)
            await worker.stop()
        assert now() < 1100.0
        assert sampler.num_running == 0
        return Result(found, sampler.requests, versions)

    return run_virtual(main())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_started_request_ends_in_exactly_one_consistent_trajectory_and_the_count_closes(plan: Plan) -> None:
    result = run_plan(plan)
    assert Counter(trajectory.key.member for trajectory in result.trajectories) == Counter(range(len(plan.tasks)))
    assert result.versions == sorted(result.versions)
    for trajectory in result.trajectories:
        requests = [request for request in result.requests if request.key == trajectory.key]
        check_trajectory(trajectory, requests, plan)


def check_trajectory(trajectory: Trajectory, requests: list[SampleRequest], plan: Plan) -> None:
    assert len(requests) - 1 <= len(trajectory.steps) <= len(requests)
    assert len(trajectory.steps) <= plan.limits["max_steps"]
    assert len(trajectory.tokens) <= min(plan.limits["max_tokens"], plan.sampler["max_context_tokens"])
    assert math.isfinite(trajectory.reward)
    assert (trajectory.error is not None) == trajectory.failed
    newest = None
    for step, request in zip(trajectory.steps, requests, strict=False):
        assert tuple(request.tokens) == trajectory.tokens[: step.action_start]  # I4
        assert step.key_weight == request.key_weight
        spans = step.version_spans
        assert [spans[0].start, *(span.end for span in spans)] == [*(span.start for span in spans), step.action_end]  # I2
        for span in spans:
            assert newest is None or span.version >= newest
            newest = span.version
    assert len(trajectory.sampler_logprobs) == sum(step.action_end - step.action_start for step in trajectory.steps)  # I3
    assert all(math.isfinite(logprob) and logprob <= 0.0 for logprob in trajectory.sampler_logprobs)
    if not trajectory.failed:
        assert trajectory.steps and trajectory.steps[-1].action_end == len(trajectory.tokens)
    if trajectory.end_reason is EndReason.PROMPT_TOO_LONG:
        assert not trajectory.steps  # later on it is the token limit
    if trajectory.end_reason is EndReason.CANCELLED:
        assert plan.stop_seconds < 1000.0 or trajectory.key.member in plan.cancel_seconds


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_the_same_run_gives_the_same_trajectories_twice(plan: Plan) -> None:
    """I11 for this role."""
    first, second = run_plan(plan), run_plan(plan)
    assert [trajectory.to_bytes() for trajectory in first.trajectories] == [trajectory.to_bytes() for trajectory in second.trajectories]
