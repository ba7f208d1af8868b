"""I2, I3, I4 and I7 over random runs with verification: whatever is rejected, fails, is cut or gets new weights, each rollout that is
verified comes back once as a consistent trajectory, and at every report generated = delivered + in flight, token for token."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.rollouts import (
    LoopUserCode,
    ScriptedEnvironment,
    ScriptedSampler,
    ScriptedWeights,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_worker,
)
from headrace.clock import run_virtual
from headrace.errors import WorkerLostError
from headrace.types import PolicyVersion, RolloutKey, SampleRequest, Task, Trajectory, VerifyRequest, WorkerReport

WAITS = st.sampled_from([0.0, 0.001, 0.02, 0.5, 3.0])
MAX_ROUNDS = 3


class Snapshots(ScriptedEnvironment):
    def snapshot(self) -> int:
        return self._answered

    def restore(self, snapshot: int) -> None:
        if self._data["reset_seconds"] == 0.02:
            raise RuntimeError("scripted failure to go back")
        self._answered = snapshot


class Replayable(ScriptedEnvironment):
    replayable = True


@dataclass(frozen=True)
class Plan:
    """One random run."""

    tasks: list[Task]
    environment: type[ScriptedEnvironment]
    sampler: dict[str, Any]
    pool: dict[str, Any]
    rollout: dict[str, Any]
    sampler_failures: dict[tuple[int, int, int], int]
    """(member, step, round) -> tokens after which the action is lost"""
    rejections: dict[tuple[int, int], float]
    """(member, round) -> where in the checked tokens, 0 to 1; above 1: the verification fails"""
    redrawn_ends: bool
    publish_seconds: list[float]
    verify_seconds: float
    cancel_seconds: dict[int, list[float]]
    stop_seconds: float


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tasks = [
        scripted_task(
            f"t{member}",
            answers=draw(st.integers(1, 6)),
            wait_seconds=draw(st.lists(WAITS, min_size=1, max_size=3)),
            reset_seconds=draw(WAITS),
            reward=draw(st.sampled_from([0.0, 1.0, math.nan])),
            key_steps=draw(st.lists(st.integers(0, 5), max_size=3)),
            fail_at=draw(st.none() | st.integers(0, 5)),
            hang_at=draw(st.none() | st.integers(0, 5)),
        )
        for member in range(draw(st.integers(1, 4)))
    ]
    markov = draw(st.booleans())
    return Plan(
        tasks=tasks,
        environment=draw(st.sampled_from([Snapshots, Replayable, ScriptedEnvironment])),
        sampler={"max_running": draw(st.integers(1, 4)), "apply_seconds": draw(st.sampled_from([0.0, 0.013])), "extends": not markov},
        pool={"verify": draw(st.sampled_from(["all", "key_steps"])), "verify_rounds": MAX_ROUNDS},
        rollout={
            "max_steps": draw(st.integers(1, 6)),
            "max_tokens": draw(st.sampled_from([20, 60, 500])),
            "max_seconds": draw(st.sampled_from([0.5, 2.0, 100.0])),
            "max_action_tokens": 8,
            "context": "observation" if markov else "trajectory",
        },
        sampler_failures=draw(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2)), st.integers(0, 4), max_size=2)),
        rejections=draw(st.dictionaries(st.tuples(st.integers(0, 3), st.integers(1, MAX_ROUNDS)), st.floats(0.0, 1.2), max_size=8)),
        redrawn_ends=draw(st.booleans()),
        publish_seconds=draw(st.lists(st.floats(0.001, 3.0), max_size=6)),
        verify_seconds=draw(WAITS),
        cancel_seconds=draw(st.dictionaries(st.integers(0, 3), st.lists(st.floats(0.0, 5.0), min_size=1, max_size=2), max_size=2)),
        stop_seconds=draw(st.sampled_from([0.1, 1.0, 5.0, 1000.0])),
    )


@dataclass(frozen=True)
class Result:
    delivered: list[Trajectory]
    requests: list[SampleRequest]
    kept_at_end: frozenset[RolloutKey]


class Run:
    """A worker, its sampler, and the count that must close."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights = ScriptedWeights()
        self.sampler = ScriptedSampler(
            weights=self.weights,
            fail=lambda request: plan.sampler_failures.get((request.key.member, request.step, request.round)),
            reject=self.reject,
            redraw=(lambda request, index: 0) if plan.redrawn_ends else None,
            **plan.sampler,
        )
        code = LoopUserCode(make_environment=plan.environment, limit_seconds=4.0)
        self.worker = scripted_worker(self.sampler, user_code=code, settings=scripted_settings(pool=plan.pool, rollout=plan.rollout))
        self.in_flight = {RolloutKey(0, member, 0) for member in range(len(plan.tasks))}
        self.delivered: list[Trajectory] = []
        self.newest: dict[RolloutKey, Trajectory] = {}
        self.refreshed: dict[RolloutKey, int] = defaultdict(int)

    def reject(self, request: VerifyRequest) -> int | None:
        where = self.plan.rejections.get((request.key.member, request.round))
        if where is None:
            return None
        if where > 1:
            raise RuntimeError("scripted failure of a verification")
        checked = [index for _, start, end in request.checked for index in range(start, end)]
        return checked[min(len(checked) - 1, int(where * len(checked)))]

    def note(self, report: WorkerReport) -> list[RolloutKey]:
        """Checks the report; gives what may be verified."""
        due = []
        for finished in report.finished:
            trajectory = Trajectory.from_bytes(finished.payload)
            assert trajectory.summary() == finished.summary
            key = trajectory.key
            self.in_flight.remove(key)
            self.delivered.append(trajectory)
            if key in self.newest:
                assert trajectory.round > self.newest[key].round
            self.newest[key] = trajectory
            self.refreshed[key] += trajectory.refreshed_tokens
            if not trajectory.failed and trajectory.round < MAX_ROUNDS:
                due.append(key)
        counted = sum(self.num_delivered(key) for key in self.newest.keys() - self.in_flight)
        assert report.generated_tokens == counted + sum(map(self.sampler.num_generated, self.in_flight))
        assert report.in_flight == len(self.in_flight)
        assert 0 <= report.room <= self.sampler.max_running
        return due

    def num_delivered(self, key: RolloutKey) -> int:
        newest = self.newest[key]
        return newest.num_action_tokens + newest.discarded_tokens + self.refreshed[key]

    async def read(self) -> None:
        try:
            while True:
                due = self.note(await self.worker.next_report())
                if due:
                    await asyncio.sleep(self.plan.verify_seconds)
                    with contextlib.suppress(WorkerLostError):  # stopped meanwhile
                        await self.worker.verify(due)
                        self.in_flight |= set(due)
        except WorkerLostError:
            assert not self.in_flight

    async def whole(self) -> Result:
        plan = self.plan

        async def publish() -> None:
            for number, seconds in enumerate(plan.publish_seconds, start=1):
                await asyncio.sleep(seconds)
                await self.worker.announce(self.weights.publish(number))

        async def cancel(member: int, seconds: list[float]) -> None:
            for each in seconds:
                await asyncio.sleep(each)
                await self.worker.cancel([RolloutKey(0, member, 0)])

        async with asyncio.TaskGroup() as group:
            group.create_task(self.worker.run())
            requests = [rollout_request(member=member, task=task, max_action_tokens=8) for member, task in enumerate(plan.tasks)]
            await self.worker.start(requests)
            group.create_task(self.read())
            group.create_task(publish())
            for member, seconds in plan.cancel_seconds.items():
                group.create_task(cancel(member, seconds))
            await asyncio.sleep(plan.stop_seconds)
            await self.worker.stop()
        assert self.sampler.num_running == 0
        kept = self.sampler.kept.keys
        await self.worker.forget([request.key for request in requests])
        assert self.sampler.kept.keys == frozenset()
        return Result(self.delivered, self.sampler.requests, kept)


def run_plan(plan: Plan) -> Result:
    return run_virtual(Run(plan).whole())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_verified_rollout_comes_back_once_and_consistent_and_the_count_closes(plan: Plan) -> None:
    result = run_plan(plan)
    assert {trajectory.key.member for trajectory in result.delivered} == set(range(len(plan.tasks)))
    for trajectory in result.delivered:
        check_trajectory(trajectory, [request for request in result.requests if request.key == trajectory.key], plan)
    assert result.kept_at_end <= {trajectory.key for trajectory in result.delivered if not trajectory.failed}


def check_trajectory(trajectory: Trajectory, requests: list[SampleRequest], plan: Plan) -> None:
    markov = plan.rollout["context"] == "observation"
    assert len(trajectory.steps) <= plan.rollout["max_steps"]
    assert (trajectory.error is not None) == trajectory.failed
    assert trajectory.round <= MAX_ROUNDS
    begin = 0
    newest = PolicyVersion(0, 0)
    for index, step in enumerate(trajectory.steps):
        context_start = begin if markov else 0
        asked = [request for request in requests if request.step == index and not request.drawn_tokens]
        assert any(tuple(request.tokens) == trajectory.tokens[context_start : step.action_start] for request in asked)  # I4
        assert step.action_end - context_start <= plan.rollout["max_tokens"]
        assert step.action_end - step.action_start <= 8
        assert all(not request.keep_cache for request in asked) or not markov
        spans = step.version_spans
        assert [spans[0].start, *(span.end for span in spans)] == [*(span.start for span in spans), step.action_end]  # I2
        for span in spans:
            assert span.version >= newest
            newest = span.version
        effective = trajectory.effective_spans(step)
        assert [span.version for span in effective] == sorted(span.version for span in effective)
        assert all(said.version >= drawn.version for said in effective for drawn in spans if drawn.start <= said.start < drawn.end)
        begin = step.action_end
    assert all(math.isfinite(logprob) and logprob <= 0.0 for logprob in (*trajectory.sampler_logprobs, *trajectory.verified_logprobs))  # I3
    if not trajectory.failed:
        assert trajectory.steps and trajectory.steps[-1].action_end == len(trajectory.tokens)
    verified = [index for span in trajectory.verified_spans for index in range(span.start, span.end)]
    assert verified == sorted(set(verified))
    assert set(verified) <= {index for step in trajectory.steps for index in range(step.action_start, step.action_end)}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_the_same_run_gives_the_same_trajectories_twice(plan: Plan) -> None:
    """I11 for this role."""
    first, second = run_plan(plan), run_plan(plan)
    assert [trajectory.to_bytes() for trajectory in first.delivered] == [trajectory.to_bytes() for trajectory in second.delivered]
