"""Verification in the rollout worker under scripted roles: what is kept, what is checked, where a rollout goes on, and what a failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fakes.rollouts import (
    LoopUserCode,
    ScriptedEnvironment,
    ScriptedSampler,
    one_step_user_code,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_worker,
)
from headrace.clock import now, run_virtual
from headrace.errors import InvariantError, WorkerLostError
from headrace.roles import Environment
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import Action, EndReason, Observation, Outcome, RolloutKey, StopReason, Task, Trajectory, VerifyRequest, WorkerReport

KEY = RolloutKey(0, 0, 0)
END = 0


class Snapshots(ScriptedEnvironment):
    """ScriptedEnvironment that can go back; `taken` counts snapshots."""

    taken = 0

    def snapshot(self) -> int:
        type(self).taken += 1
        return self._answered

    def restore(self, snapshot: int) -> None:
        self._answered = snapshot


class Replayable(ScriptedEnvironment):
    replayable = True


@contextlib.asynccontextmanager
async def running(worker: RolloutWorkerCore) -> AsyncIterator[RolloutWorkerCore]:
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        yield worker
        await worker.stop()


async def finished(worker: RolloutWorkerCore, count: int = 1) -> list[Trajectory]:
    found: list[Trajectory] = []
    while len(found) < count:
        found += [Trajectory.from_bytes(each.payload) for each in (await worker.next_report()).finished]
    return found


def worker_with(
    sampler: ScriptedSampler, make: Callable[[], Environment] | None = Snapshots, *, code: LoopUserCode | None = None, **sections: Any
) -> RolloutWorkerCore:
    settings = scripted_settings(**{**sections, "pool": {"verify": "all", "verify_rounds": 2, **sections.get("pool", {})}})
    return scripted_worker(sampler, user_code=code or LoopUserCode(make_environment=make), settings=settings)


def token_of(step: int, index: int = 0) -> Callable[[VerifyRequest], int | None]:
    """A rejection of that token of that step, in the first round."""

    def reject(request: VerifyRequest) -> int | None:
        starts = {checked: start for checked, start, _ in request.checked}
        return starts[step] + index if request.round == 1 and step in starts else None

    return reject


def verified_once(
    task: Task, sampler: ScriptedSampler, make: Callable[[], Environment] | None = Snapshots, *, publish: int | None = 1, **options: Any
) -> tuple[Trajectory, Trajectory]:
    """(as it was delivered first, as it was delivered after a verification)"""

    async def main() -> tuple[Trajectory, Trajectory]:
        async with running(worker_with(sampler, make, **options)) as worker:
            await worker.start([rollout_request(task=task)])
            (first,) = await finished(worker)
            if publish is not None:
                await worker.announce(sampler.weights.publish(publish))
                await asyncio.sleep(1.0)
            await worker.verify([KEY])
            (second,) = await finished(worker)
            assert sampler.generated_tokens == second.num_action_tokens + second.discarded_tokens + second.refreshed_tokens
            await worker.forget([KEY])
            assert sampler.kept.keys == frozenset()
            return first, second

    return run_virtual(main())


def unchanged(first: Trajectory, second: Trajectory) -> bool:
    return (first.tokens, first.steps, first.sampler_logprobs, first.reward, first.end_reason) == (
        second.tokens,
        second.steps,
        second.sampler_logprobs,
        second.reward,
        second.end_reason,
    )


# Nothing rejected


def test_accepted_tokens_get_the_newest_version_in_the_side_table_and_nothing_else_changes() -> None:
    first, second = verified_once(scripted_task("t", answers=4, key_steps=[1], reward=1.0), ScriptedSampler())
    assert unchanged(first, second)
    assert (first.round, second.round, second.refreshed_tokens, second.refreshed_key_steps) == (0, 1, 0, 0)
    assert first.verified_spans == ()
    assert [(span.start, span.end) for span in second.verified_spans] == [(step.action_start, step.action_end) for step in second.steps]
    assert {count.version.number for count in first.summary().versions} == {0}
    assert {count.version.number for count in second.summary().versions} == {1}
    assert second.summary().seconds == first.summary().seconds


def test_tokens_that_random_cuts_leave_count_as_new_and_keep_the_log_probabilities_they_were_drawn_with() -> None:
    """They are no draws of the newest weights: the ratio of the loss has to be the true one."""
    logprobs = {}
    for rule in ("accept", "random_cuts"):
        sampler = ScriptedSampler(action_tokens=lambda request: 2, reject=token_of(2))
        first, second = verified_once(scripted_task("t", answers=4, key_steps=[2]), sampler, pool={"verify_rule": rule})
        assert [span.version.number for span in second.verified_spans] == [1, 1]
        logprobs[rule] = second.verified_logprobs
        drawn = first.sampler_logprobs[:4]
    assert logprobs["random_cuts"] == pytest.approx(drawn)
    assert logprobs["accept"] != pytest.approx(drawn)


def test_only_key_steps_are_kept_snapshotted_and_checked_where_only_they_are_verified() -> None:
    sampler = ScriptedSampler()
    Snapshots.taken = 0
    _, second = verified_once(scripted_task("t", answers=5, key_steps=[1, 3]), sampler, pool={"verify": "key_steps"})
    assert [request.keep_distribution for request in sampler.requests] == [False, True, False, True, False]
    assert Snapshots.taken == 2
    assert [step for step, _, _ in sampler.verified[0].checked] == [1, 3]
    assert {(count.version.number, count.key > 0) for count in second.summary().versions} == {(0, False), (1, True)}


def test_every_distribution_is_kept_where_a_step_may_be_marked_after_its_action() -> None:
    sampler = ScriptedSampler()
    options: dict[str, Any] = {"pool": {"verify": "key_steps"}, "marks": {"rules": ["action:a"]}}
    verified_once(scripted_task("t", answers=4, key_steps=[2]), sampler, **options)
    assert all(request.keep_distribution for request in sampler.requests)


def test_a_newer_verification_of_a_token_replaces_the_older_one() -> None:
    async def main() -> None:
        sampler = ScriptedSampler()
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=3))])
            await finished(worker)
            for number in (1, 2):
                await worker.announce(sampler.weights.publish(number))
                await asyncio.sleep(1.0)
                await worker.verify([KEY])
                (trajectory,) = await finished(worker)
                assert trajectory.round == number
                assert {span.version.number for span in trajectory.verified_spans} == {number}
                assert len(trajectory.verified_logprobs) == trajectory.num_action_tokens

    run_virtual(main())


def test_without_verification_nothing_is_kept_and_no_snapshot_is_taken() -> None:
    async def main() -> None:
        sampler = ScriptedSampler()
        Snapshots.taken = 0
        async with running(worker_with(sampler, pool={"verify": "off"})) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=3, key_steps=[1]))])
            (trajectory,) = await finished(worker)
            assert (trajectory.round, Snapshots.taken) == (0, 0)
            assert not any(request.keep_distribution for request in sampler.requests)
            with pytest.raises(InvariantError, match="cannot be"):
                await worker.verify([KEY])

    run_virtual(main())


def test_evaluation_rollouts_keep_nothing() -> None:
    async def main() -> None:
        sampler = ScriptedSampler()
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=3), evaluation=True)])
            (trajectory,) = await finished(worker)
            assert trajectory.round == 0
            assert not any(request.keep_distribution for request in sampler.requests)
            assert sampler.kept.keys == frozenset()

    run_virtual(main())


# Rejected


@pytest.mark.parametrize("make", [Snapshots, Replayable])
def test_a_rollout_goes_on_from_the_redrawn_token_in_the_middle_of_an_action(make: Callable[[], Environment]) -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 3, reject=token_of(2, 1))
    first, second = verified_once(scripted_task("t", answers=5, key_steps=[0, 2, 4], reward=1.0), sampler, make)
    cut = first.steps[2].action_start + 1
    assert second.tokens[:cut] == first.tokens[:cut]
    assert second.tokens[cut] != first.tokens[cut]
    assert [step.action_end - step.action_start for step in second.steps] == [3] * 5
    assert (second.end_reason, second.reward, second.round) == (EndReason.DONE, 1.0, 1)
    assert second.refreshed_tokens == 2 + 3 + 3
    assert second.refreshed_key_steps == 2  # the one that was cut in its middle is offered anew
    assert [(span.version.number, span.start, span.end) for span in second.steps[2].version_spans] == [(0, cut - 1, cut), (1, cut, cut + 2)]
    assert max(span.end for span in second.verified_spans) == cut
    assert [step.version_spans[0].version.number for step in second.steps] == [0, 0, 0, 1, 1]
    goes_on = sampler.requests[5]
    assert (goes_on.step, goes_on.drawn_tokens, goes_on.round, tuple(goes_on.tokens)) == (2, 2, 1, second.tokens[: cut + 1])
    for request, step in zip(sampler.requests[6:], second.steps[3:], strict=True):
        assert tuple(request.tokens) == second.tokens[: step.action_start]  # I4


def test_the_time_from_a_rejection_until_the_rollout_is_back_is_told_and_is_less_the_later_the_cut() -> None:
    tails = []
    for step in (1, 3):
        first, second = verified_once(scripted_task("t", answers=5), ScriptedSampler(reject=token_of(step)))
        assert first.refresh_seconds == 0.0
        assert second.refresh_seconds == second.summary().refresh_seconds == Trajectory.from_bytes(second.to_bytes()).refresh_seconds
        tails.append(second.refresh_seconds)
    assert 0.0 < tails[1] < tails[0] <= second.summary().seconds
    _, accepted = verified_once(scripted_task("t", answers=5), ScriptedSampler())
    assert accepted.refresh_seconds == 0.0


def test_a_redrawn_stop_token_ends_the_action_at_once() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 3, reject=token_of(1, 1), redraw=lambda request, index: END)
    _, second = verified_once(scripted_task("t", answers=3), sampler)
    step = second.steps[1]
    assert (step.action_end - step.action_start, step.stop_reason, second.tokens[step.action_end - 1]) == (2, StopReason.STOP, END)
    assert [request.step for request in sampler.requests[3:]] == [2]
    assert second.refreshed_tokens == 2 + 3


def test_an_action_that_the_redrawn_token_fills_is_not_sampled_further() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 16, reject=token_of(0, 15))
    _, second = verified_once(scripted_task("t", answers=2), sampler)
    assert second.steps[0].stop_reason is StopReason.MAX_TOKENS
    assert [request.step for request in sampler.requests[2:]] == [1]


def test_one_step_tasks_go_on_in_place_and_are_graded_again() -> None:
    answers: list[str] = []

    def reward(task: Task, answer: str) -> float:
        answers.append(answer)
        return float(len(answers))

    sampler = ScriptedSampler(action_tokens=lambda request: 5, reject=token_of(0, 2))
    first, second = verified_once(Task(id="one", data={"prompt": "what?"}), sampler, code=one_step_user_code(reward))
    assert (first.reward, second.reward) == (1.0, 2.0)
    assert answers[0][:2] == answers[1][:2] and answers[0] != answers[1]
    assert (second.num_action_tokens, second.refreshed_tokens) == (5, 3)


def test_a_rollout_can_be_cut_again_in_its_next_round_also_behind_its_first_cut() -> None:
    def reject(request: VerifyRequest) -> int | None:
        return request.checked[1 if request.round == 1 else 3][1] + 1

    async def main() -> None:
        sampler = ScriptedSampler(action_tokens=lambda request: 2, reject=reject)
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=5))])
            await finished(worker)
            total = 0
            for number, refreshed in ((1, 1 + 2 + 2 + 2), (2, 1 + 2)):
                await worker.announce(sampler.weights.publish(number))
                await asyncio.sleep(1.0)
                await worker.verify([KEY])
                (trajectory,) = await finished(worker)
                assert (trajectory.round, trajectory.refreshed_tokens) == (number, refreshed)
                total += refreshed
                assert sampler.generated_tokens == trajectory.num_action_tokens + total
            assert [step.version_spans[-1].version.number for step in trajectory.steps] == [0, 1, 1, 2, 2]
            assert sampler.kept.keys == frozenset()  # that was the last round

    run_virtual(main())


def test_a_mark_that_the_old_action_earned_is_not_the_new_ones_and_kept_steps_keep_theirs() -> None:
    task = scripted_task("t", answers=4, key_steps=[0])
    plain, _ = verified_once(task, ScriptedSampler(action_tokens=lambda request: 3))
    earned = [plain.tokens[step.action_start : step.action_end - 1] for step in plain.steps[:3]]
    rules = [f"action:^{''.join(map(chr, text))}$" for text in earned[1:]]
    first, second = verified_once(task, ScriptedSampler(action_tokens=lambda request: 3, reject=token_of(2)), marks={"rules": rules})
    assert [step.key_weight for step in first.steps] == [1.0, 1.0, 1.0, 0.0]
    assert [step.key_weight for step in second.steps] == [1.0, 1.0, 0.0, 0.0]
    assert second.refreshed_key_steps == 1


def test_entropy_marks_see_whole_actions_also_where_a_token_was_redrawn() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 4, reject=token_of(1, 2), entropy=lambda request, position: float(request.step == 1))
    _, second = verified_once(scripted_task("t", answers=8), sampler, marks={"entropy_fraction": 0.2})
    assert second.end_reason is EndReason.DONE
    assert [step.key_weight for step in second.steps] == [0.0, 1.0, *[0.0] * 6]


def test_what_an_earlier_round_said_of_cut_tokens_is_gone_with_them() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(action_tokens=lambda request: 2, reject=lambda request: request.checked[1][1] + 1 if request.round == 2 else None)
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=4))])
            await finished(worker)
            for number in (1, 2):
                await worker.announce(sampler.weights.publish(number))
                await asyncio.sleep(1.0)
                await worker.verify([KEY])
                (trajectory,) = await finished(worker)
            cut = trajectory.steps[1].action_end - 1
            assert trajectory.round == 2
            assert {(span.version.number, span.end <= cut) for span in trajectory.verified_spans} == {(2, True)}
            assert len(trajectory.verified_logprobs) == 3

    run_virtual(main())


def test_a_reward_that_fails_after_the_cut_leaves_nothing_of_the_old_one() -> None:
    calls: list[str] = []

    def reward(task: Task, answer: str) -> float:
        calls.append(answer)
        if len(calls) > 1:
            raise RuntimeError("no second time")
        return 5.0

    first, second = verified_once(Task(id="one", data={"prompt": "what?"}), ScriptedSampler(reject=token_of(0)), code=one_step_user_code(reward))
    assert (first.reward, second.reward, second.end_reason) == (5.0, 0.0, EndReason.REWARD_ERROR)


def test_a_refreshed_rollout_has_the_time_and_the_steps_that_were_left_to_it_and_not_the_ones_in_the_pool() -> None:
    """Each step waits 10 s of 32; the cut in step 1 leaves 22 s, for two more answers."""

    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=0.001, reject=token_of(1))
        async with running(worker_with(sampler, rollout={"max_seconds": 32.0, "max_steps": 64})) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=9, wait_seconds=10.0))])
            (first,) = await finished(worker)
            assert (len(first.steps), first.end_reason) == (4, EndReason.MAX_SECONDS)
            await asyncio.sleep(500.0)
            began = now()
            await worker.verify([KEY])
            (second,) = await finished(worker)
            assert (len(second.steps), second.end_reason) == (4, EndReason.MAX_SECONDS)
            assert now() - began == pytest.approx(22.0, abs=0.2)
            assert second.summary().seconds == pytest.approx(32.0, abs=0.2)
            assert second.wait_seconds == pytest.approx(32.0, abs=0.2)

    run_virtual(main())


# Failures


class Forgetful(Snapshots):
    def restore(self, snapshot: int) -> None:
        raise RuntimeError("the disk is gone")


class Liar(Replayable):
    """Answers differently the second time."""

    made = 0

    async def reset(self, task: Task) -> Observation:
        type(self).made += 1
        return await super().reset(task)

    async def step(self, action: Action) -> Outcome | tuple[Observation | None, float, bool]:
        observation, reward, done = await super().step(action)
        return (None if observation is None else Observation(text=f"{self.made}{observation.text}")), reward, done


@pytest.mark.parametrize(("make", "told"), [(Forgetful, "Forgetful.restore raised RuntimeError: the disk is gone"), (Liar, "Liar says that it is replayable")])
def test_an_environment_that_cannot_go_back_is_named_and_the_old_trajectory_stands(
    make: Callable[[], Environment], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = ScriptedSampler(reject=token_of(2))
    Liar.made = 0
    first, second = verified_once(scripted_task("t", answers=4, reward=1.0), sampler, make)
    assert unchanged(first, second)
    assert (second.round, second.refreshed_tokens, second.discarded_tokens) == (2, 0, 1)  # the redrawn token was drawn for nothing
    assert second.verified_spans == ()
    assert told in caplog.text


def test_the_report_names_the_environment_that_broke_its_promise() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(reject=token_of(2))
        Liar.made = 0
        async with running(worker_with(sampler, Liar)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=4))])
            await finished(worker)
            await worker.verify([KEY])
            await finished(worker)
            worker.report_soon()
            assert "Liar says that it is replayable" in str((await worker.next_report()).longest_wait)

    run_virtual(main())


def test_a_sampler_that_cannot_verify_leaves_the_old_trajectory() -> None:
    def reject(request: VerifyRequest) -> int | None:
        raise RuntimeError("out of memory")

    first, second = verified_once(scripted_task("t", answers=3), ScriptedSampler(reject=reject))
    assert unchanged(first, second)
    assert (second.round, second.discarded_tokens) == (2, 0)


def test_a_rollout_whose_distributions_do_not_fit_says_at_once_that_it_cannot_be_verified() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(can_keep=lambda key: key.member == 0)
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(member=member, task=scripted_task("t", answers=3)) for member in range(2)])
            found = {trajectory.key.member: trajectory.round for trajectory in await finished(worker, 2)}
            assert found == {0: 0, 1: 2}
            assert sampler.kept.keys == {KEY}

    run_virtual(main())


def test_a_rollout_whose_environment_cannot_go_back_is_never_verified_and_keeps_nothing() -> None:
    async def main() -> None:
        sampler = ScriptedSampler()
        async with running(worker_with(sampler, ScriptedEnvironment)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=3))])
            (trajectory,) = await finished(worker)
            assert trajectory.round == 2
            assert not any(request.keep_distribution for request in sampler.requests)

    run_virtual(main())


class FailsLater(Snapshots):
    """Goes back, and fails from then on."""

    def restore(self, snapshot: int) -> None:
        super().restore(snapshot)
        self._data = {**self._data, "fail_at": 2}


def test_a_refreshed_rollout_that_fails_is_a_failed_rollout_as_any_other() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 2, reject=token_of(1))
    _, second = verified_once(scripted_task("t", answers=4), sampler, FailsLater)
    assert (second.end_reason, second.round, second.refreshed_tokens) == (EndReason.ENVIRONMENT_ERROR, 1, 6)
    assert "scripted failure at step 2" in str(second.error)


def test_a_failed_rollout_is_forgotten_by_the_worker_itself() -> None:
    async def main() -> None:
        sampler = ScriptedSampler()
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=4, fail_at=2))])
            (trajectory,) = await finished(worker)
            assert (trajectory.failed, trajectory.round) == (True, 0)
            assert sampler.kept.keys == frozenset()

    run_virtual(main())


@pytest.mark.parametrize(("after_seconds", "drawn"), [(0.5, 0), (2.5, 2), (3.5, 3), (6.0, 3), (13.5, 5)])
def test_a_cancelled_verification_leaves_the_old_trajectory_and_counts_what_it_drew(after_seconds: float, drawn: int) -> None:
    """A second a token: checked until 1, redrawn and two more until 3, 10 s in the environment, the next action from 13 on, two tokens a second."""

    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=1.0, action_tokens=lambda request: 3, reject=token_of(1))
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=3, wait_seconds=10.0, reward=1.0))])
            (first,) = await finished(worker)
            began = sampler.generated_tokens
            await worker.verify([KEY])
            await asyncio.sleep(after_seconds)
            await worker.cancel([KEY])
            (second,) = await finished(worker)
            assert unchanged(first, second)
            assert (second.round, second.refreshed_tokens) == (2, 0)
            assert second.discarded_tokens == sampler.generated_tokens - began
            assert sampler.kept.keys == frozenset()

    run_virtual(main())


def test_stopping_in_the_middle_of_verifications_is_clean() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=1.0, reject=lambda request: token_of(1)(request) if request.key.member else None)
        worker = worker_with(sampler)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.start([rollout_request(member=member, task=scripted_task("t", answers=4)) for member in range(4)])
            await finished(worker, 4)
            await worker.verify([RolloutKey(0, member, 0) for member in range(4)])
            await asyncio.sleep(2.5)
            await worker.stop()
            trajectories = await finished(worker, 3)
            assert sampler.num_running == 0
            with pytest.raises(WorkerLostError):
                await worker.verify([KEY])
        assert {trajectory.end_reason for trajectory in trajectories} == {EndReason.DONE}

    run_virtual(main())


# What the worker says meanwhile


def test_verifications_are_in_flight_with_heartbeat_and_text() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=5.0, max_running=4, action_tokens=lambda request: 1)
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(task=scripted_task("X", answers=2))])
            await finished(worker)
            await worker.verify([KEY])
            reports: list[WorkerReport] = []
            while not reports or not reports[-1].finished:
                reports.append(await worker.next_report())
            assert len(reports) >= 5
            assert [report.in_flight for report in reports[:-1]] == [1] * (len(reports) - 1)
            assert reports[-1].in_flight == 0
            assert any("waits 2 s for verification" in str(report.longest_wait) for report in reports)
            assert reports[1].room == 3

    run_virtual(main())


def test_parked_rollouts_are_reported_and_hold_no_slot() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(max_running=2, seconds_per_token=1.0, action_tokens=lambda request: 9)
        async with running(worker_with(sampler)) as worker:
            await worker.start([rollout_request(member=member, task=scripted_task("t", answers=2)) for member in range(2)])
            await asyncio.sleep(2.5)
            sampler.park(KEY)
            worker.report_soon()
            report = await worker.next_report()
            assert (report.parked, report.room, report.in_flight) == ((KEY,), 1, 2)
            sampler.unpark(KEY)
            assert len(await finished(worker, 2)) == 2

    run_virtual(main())


def test_a_rollout_that_is_being_verified_is_not_verified_twice() -> None:
    async def main() -> None:
        async with running(worker_with(ScriptedSampler())) as worker:
            await worker.start([rollout_request(task=scripted_task("t", answers=2))])
            await finished(worker)
            await worker.verify([KEY])
            with pytest.raises(InvariantError, match="it runs"):
                await worker.verify([KEY])
            await finished(worker)

    run_virtual(main())


def test_each_step_sees_its_own_observation_only_where_the_context_is_the_observation() -> None:
    sampler = ScriptedSampler(extends=False, action_tokens=lambda request: 3, reject=token_of(2, 1))
    first, second = verified_once(scripted_task("t", answers=4), sampler, rollout={"context": "observation", "max_steps": 64})
    assert not any(request.keep_cache for request in sampler.requests if request.drawn_tokens == 0)
    for trajectory, requests in ((first, sampler.requests[:4]), (second, [*sampler.requests[:2], *sampler.requests[4:]])):
        starts = [0, *(step.action_end for step in trajectory.steps)]
        for index, (request, step) in enumerate(zip(requests, trajectory.steps, strict=True)):
            context = trajectory.tokens[starts[index] : step.action_start + request.drawn_tokens]
            assert tuple(request.tokens) == context  # I4
            assert context[0] == 1  # each prompt is a first one
    assert sampler.verified[0].context_starts == tuple([0, *(step.action_end for step in first.steps)][:4])
    assert second.refreshed_tokens == 2 + 3
