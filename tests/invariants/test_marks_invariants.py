"""I10: marks lie over a rollout. Whatever marks it, no token, log-probability, version, reward or time changes; only key weights do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.rollouts import (
    CharacterTokenizer,
    LoopUserCode,
    ScriptedEnvironment,
    ScriptedSampler,
    ScriptedWeights,
    one_step_user_code,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_worker,
)
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.config import MarkSettings
from headrace.marks import TrajectoryView
from headrace.rollout import user_call
from headrace.rollout.marking import Marker
from headrace.rollout.roll_out import Phase, RolloutProgress, roll_out
from headrace.types import Completion, EndReason, SampleRequest, StepRecord, Task, Trajectory


class MeasuringSampler(ScriptedSampler):
    """Delivers entropies too."""

    async def sample(self, request: SampleRequest) -> Completion:
        completion = await super().sample(request)
        return dataclasses.replace(completion, entropies=tuple(-logprob for logprob in completion.logprobs))


async def marks_by_length(trajectory: TrajectoryView) -> object:
    return [len(step.action) % 2 for step in trajectory.steps]


RULES = ["observation:[13]", "observation:.", "action:a", "action:^.$", "tool:abc", "reward:nonzero", "reward:negative"]
MARKS = st.fixed_dictionaries(
    {
        "environment": st.booleans(),
        "rules": st.lists(st.sampled_from(RULES), max_size=4, unique=True),
        "function": st.sampled_from([None, "task:marks"]),
        "entropy_fraction": st.sampled_from([0.0, 0.2, 0.9]),
    }
)
TASKS = st.builds(
    scripted_task,
    st.sampled_from("abc"),
    answers=st.integers(1, 6),
    wait_seconds=st.sampled_from([0.0071, 0.0133, 1.0]),  # no ties with decode steps: a marking function takes turns of the loop, which decide them
    reward=st.sampled_from([0.0, 1.0, -1.0]),
    key_steps=st.lists(st.integers(0, 5), max_size=3),
    fail_at=st.none() | st.integers(0, 5),
)


def rolled_out(tasks: list[Task], marks: dict[str, Any], publish_seconds: float) -> dict[Any, Trajectory]:
    async def main() -> dict[Any, Trajectory]:
        weights = ScriptedWeights()
        worker = scripted_worker(
            # a slot for each: one that somebody waits for changes hands a turn later, too
            MeasuringSampler(max_running=4, weights=weights),
            user_code=LoopUserCode(make_environment=ScriptedEnvironment, mark=marks_by_length),
            settings=scripted_settings(marks=marks, rollout={"max_steps": 5, "max_tokens": 60}),
        )
        found: dict[Any, Trajectory] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.start([rollout_request(member=member, task=task) for member, task in enumerate(tasks)])
            await asyncio.sleep(publish_seconds)
            await worker.announce(weights.publish(1))
            while len(found) < len(tasks):
                for finished in (await worker.next_report()).finished:
                    found[finished.summary.key] = Trajectory.from_bytes(finished.payload)
            await worker.stop()
        return found

    return run_virtual(main())


def unmarked(trajectory: Trajectory) -> Trajectory:
    steps = tuple(dataclasses.replace(step, key_weight=0.0) for step in trajectory.steps)
    return dataclasses.replace(trajectory, steps=steps)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tasks=st.lists(TASKS, min_size=1, max_size=4), marks=MARKS, publish_seconds=st.sampled_from([0.015, 0.061, 0.507]))
def test_any_marks_change_nothing_but_key_weights(tasks: list[Task], marks: dict[str, Any], publish_seconds: float) -> None:
    plain = rolled_out(tasks, {"environment": False}, publish_seconds)
    marked = rolled_out(tasks, marks, publish_seconds)
    assert {key: unmarked(trajectory) for key, trajectory in marked.items()} == plain
    assert all(step.key_weight == 0.0 for trajectory in plain.values() for step in trajectory.steps)


@pytest.mark.parametrize("marks", [{}, {"environment": False}, {"rules": ["observation:never", "action:never", "tool:never"]}])
def test_without_marks_a_run_has_the_same_events_bit_for_bit(marks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_call, "BLOCKING_SECONDS", float("inf"))  # of the real clock: a busy machine is no event

    def lines(**sections: Any) -> list[dict[str, Any]]:
        tasks = [scripted_task("a", answers=3, wait_seconds=[0.5, 3.0], reward=1.0), scripted_task("b", answers=5, fail_at=3, action_tokens=[2, 7])]
        run = ScriptedRun(settings=run_settings(num_updates=5, num_samplers=2, **sections), tasks=tasks)
        run_virtual(run.run())
        return [{name: value for name, value in line.items() if name != "run_id"} for line in run.log.lines]

    plain, with_settings = lines(), lines(marks=marks)
    assert len(plain) > 30
    assert with_settings == plain


def run_one(task: Task, marks: dict[str, Any], *, code: LoopUserCode | None = None, sampler: ScriptedSampler | None = None, cut_in: Phase | None = None) -> Any:
    """(trajectory, sampler)"""

    async def main() -> Any:
        user_code = code or LoopUserCode(make_environment=ScriptedEnvironment)
        engine = sampler or MeasuringSampler()
        progress = RolloutProgress()
        progress.on_wait = lambda: progress.cut() if progress.phase is cut_in else None
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run(lambda: "environment"))
            trajectory = await roll_out(
                rollout_request(task=task),
                sampler=engine,
                tokenizer=CharacterTokenizer(),
                user_code=user_code,
                settings=scripted_settings(rollout={"max_steps": 8}).rollout,
                progress=progress,
                marker=Marker(MarkSettings(**marks), user_code.mark),
            )
            running.cancel()
        assert engine.generated_tokens == trajectory.num_action_tokens + trajectory.discarded_tokens
        return trajectory, engine

    return run_virtual(main())


def weights(steps: tuple[StepRecord, ...]) -> list[float]:
    return [step.key_weight for step in steps]


def test_a_step_gets_the_largest_weight_of_its_markers() -> None:
    async def marks(trajectory: TrajectoryView) -> object:
        return [0.25, 0.25, 3.0, 0.25]

    task = scripted_task("t", answers=4, reward=1.0, key_steps=[0, 2], key_weight=2.5)
    code = LoopUserCode(make_environment=ScriptedEnvironment, mark=marks)
    trajectory, _ = run_one(task, {"rules": ["observation:1", "reward:positive"], "function": "task:marks"}, code=code)
    assert weights(trajectory.steps) == [2.5, 1.0, 3.0, 1.0]
    trajectory, _ = run_one(task, {"environment": False, "function": "task:marks"}, code=code)
    assert weights(trajectory.steps) == [0.25, 0.25, 3.0, 0.25]


def test_only_marks_known_before_the_action_are_told_to_the_sampler() -> None:
    task = scripted_task("t", answers=3, reward=1.0, key_steps=[0])
    trajectory, sampler = run_one(task, {"environment": False, "rules": ["observation:1", "reward:positive"]})
    assert [request.key_weight for request in sampler.requests] == [0.0, 1.0, 0.0]
    assert weights(trajectory.steps) == [0.0, 1.0, 1.0]


def test_the_marking_function_sees_what_was_shown_drawn_and_rewarded() -> None:
    seen: list[TrajectoryView] = []

    async def marks(trajectory: TrajectoryView) -> object:
        seen.append(trajectory)
        return [0.0] * len(trajectory.steps)

    async def reward(task: Task, answer: str) -> object:
        return 0.5

    code = LoopUserCode(make_environment=ScriptedEnvironment, reward=reward, mark=marks)
    task = scripted_task("t", answers=3, reward=1.0, key_steps=[1], key_weight=2.5)
    trajectory, _ = run_one(task, {"environment": False, "function": "task:marks", "entropy_fraction": 0.1}, code=code)
    (view,) = seen
    assert view.task is task and view.end_reason is EndReason.DONE and view.reward == trajectory.reward == 1.5
    assert [step.observation for step in view.steps] == ["0?", "1?", "2?"]
    assert [step.reward for step in view.steps] == [0.0, 0.0, 1.5]
    assert [step.key for step in view.steps] == [0.0, 2.5, 0.0]
    taken = 0
    for step, record in zip(view.steps, trajectory.steps, strict=True):
        assert step.tokens == trajectory.tokens[record.action_start : record.action_end]
        assert step.logprobs == trajectory.sampler_logprobs[taken : taken + len(step.tokens)] == tuple(-entropy for entropy in step.entropies or ())
        assert step.action == CharacterTokenizer().decode(step.tokens, skip_special_tokens=True)
        taken += len(step.tokens)


def test_the_reward_of_a_one_step_task_is_that_of_its_step() -> None:
    code = one_step_user_code(lambda task, answer: 1.0)
    assert weights(run_one(scripted_task("t"), {"rules": ["reward:positive"]}, code=code)[0].steps) == [1.0]
    assert weights(run_one(scripted_task("t"), {"rules": ["reward:negative"]}, code=code)[0].steps) == [0.0]
    assert weights(run_one(scripted_task("t"), {"rules": ["observation:^task t$"]}, code=code)[0].steps) == [1.0]


def _raises() -> object:
    raise LookupError("no such door")


@pytest.mark.parametrize(("answer", "told"), [(_raises, "LookupError: no such door"), (lambda: [1.0], "returned 1 weights for 3 steps")])
def test_a_marking_function_that_fails_fails_the_rollout_with_its_name_and_keeps_its_tokens(answer: Callable[[], object], told: str) -> None:
    async def marks(trajectory: TrajectoryView) -> object:
        return answer()

    code = LoopUserCode(make_environment=ScriptedEnvironment, mark=marks)
    trajectory, _ = run_one(scripted_task("t", answers=3, reward=1.0), {"function": "task:marks"}, code=code)
    assert trajectory.end_reason is EndReason.MARK_ERROR and trajectory.failed
    assert "marks.function 'task:marks'" in trajectory.error and told in trajectory.error
    assert len(trajectory.steps) == 3


def test_a_marking_function_that_hangs_is_ended_at_its_limit() -> None:
    async def marks(trajectory: TrajectoryView) -> object:
        await asyncio.Event().wait()
        return []

    code = LoopUserCode(make_environment=ScriptedEnvironment, mark=marks, limit_seconds=3.0)
    trajectory, _ = run_one(scripted_task("t"), {"function": "task:marks"}, code=code)
    assert trajectory.end_reason is EndReason.MARK_ERROR
    assert "gave no answer in 3 s (rollout.max_environment_seconds)" in str(trajectory.error)


def test_a_rollout_cut_while_it_waits_for_its_marks_is_cancelled() -> None:
    async def marks(trajectory: TrajectoryView) -> object:
        await asyncio.Event().wait()
        return []

    code = LoopUserCode(make_environment=ScriptedEnvironment, mark=marks)
    trajectory, _ = run_one(scripted_task("t"), {"function": "task:marks"}, code=code, cut_in=Phase.MARKS)
    assert trajectory.end_reason is EndReason.CANCELLED


def test_entropy_marks_with_a_sampler_that_measures_none_name_what_is_missing() -> None:
    trajectory, _ = run_one(scripted_task("t"), {"entropy_fraction": 0.5}, sampler=ScriptedSampler())
    assert trajectory.end_reason is EndReason.SAMPLER_ERROR and "marks.entropy_fraction" in str(trajectory.error)
