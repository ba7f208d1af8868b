"""The rollout worker under the virtual clock: what makes a report, what it offers, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fakes.rollouts import (
    LoopUserCode,
    ScriptedSampler,
    ScriptedWeights,
    rollout_request,
    scripted_settings,
    scripted_task,
    scripted_user_code,
    scripted_worker,
)
from headrace.clock import now, run_virtual
from headrace.errors import InvariantError, WorkerLostError
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import EndReason, PolicyVersion, RolloutKey, RolloutRequest, Trajectory, WorkerReport


@contextlib.asynccontextmanager
async def running(worker: RolloutWorkerCore) -> AsyncIterator[RolloutWorkerCore]:
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        await worker.next_report()  # the first one
        yield worker
        await worker.stop()


async def until(worker: RolloutWorkerCore, condition: Callable[[WorkerReport], bool]) -> WorkerReport:
    while not condition(report := await worker.next_report()):
        pass
    return report


def requests(count: int, group_id: int = 0, **task: Any) -> list[RolloutRequest]:
    return [rollout_request(group_id=group_id, member=member, task=scripted_task(f"t{group_id}-{member}", **task)) for member in range(count)]


def test_the_first_report_comes_at_once_and_offers_the_whole_batch() -> None:
    async def main() -> None:
        worker = scripted_worker(ScriptedSampler(max_running=5))
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            report = await worker.next_report()
            assert (report.room, report.in_flight, report.generated_tokens, now()) == (5, 0, 0, 0.0)
            await worker.stop()

    run_virtual(main())


def test_an_idle_worker_sends_nothing() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler())) as worker:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000.0):
                    await worker.next_report()

    run_virtual(main())


def test_sampler_waits_for_admission_once_its_last_rollout_has_ended_and_a_last_report_says_so() -> None:
    """Not for the environment that it waited for before. 0.5 s of decode, 3 s in the environment, then nothing to do."""

    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler(seconds_per_token=0.5, action_tokens=lambda request: 1))) as worker:
            await worker.start(requests(1, answers=1, wait_seconds=3.2))
            idle: dict[str, float] = {}
            last: WorkerReport | None = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(100.0):
                    while True:
                        last = await worker.next_report()
                        for reason, seconds in last.activity.idle_seconds.items() if last.activity else ():
                            idle[reason] = idle.get(reason, 0.0) + seconds
            assert last is not None and (last.in_flight, last.activity is None) == (0, False)
            assert idle == pytest.approx({"environment": 3.2, "admission": pytest.approx(0.8, abs=0.5)})  # up to the last heartbeat

    run_virtual(main())


def test_an_idle_worker_reports_when_its_host_asks_for_a_sign_of_life() -> None:
    """While the learner takes minutes over a batch nothing runs here, and nobody may take that for death."""

    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler(max_running=5))) as worker:
            asyncio.get_running_loop().call_later(7.0, worker.report_soon)
            report = await worker.next_report()
            assert (now(), report.in_flight, report.room) == (7.0, 0, 5)

    run_virtual(main())


def test_rollouts_that_finish_together_share_a_report_and_each_is_reported_once() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(max_running=8, action_tokens=lambda request: 3)
        async with running(scripted_worker(sampler)) as worker:
            await worker.start(requests(8, answers=2))
            report = await until(worker, lambda report: bool(report.finished))
            assert sorted(finished.summary.key.member for finished in report.finished) == list(range(8))
            assert report.in_flight == 0

    run_virtual(main())


def test_a_finished_payload_holds_the_trajectory_of_its_summary() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler())) as worker:
            await worker.start(requests(1, answers=3, key_steps=[1], reward=1.0))
            (finished,) = (await until(worker, lambda report: bool(report.finished))).finished
            assert Trajectory.from_bytes(finished.payload).summary() == finished.summary
            assert (finished.summary.reward, finished.summary.num_key_steps) == (1.0, 1)

    run_virtual(main())


def test_a_heartbeat_comes_each_second_while_rollouts_run_and_names_the_longest_wait() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler(action_tokens=lambda request: 2))) as worker:
            await worker.start([rollout_request(group_id=3, member=1, task=scripted_task("X", answers=9, wait_seconds=[0.0, 0.0, 41.5]))])
            reports = []
            while now() < 41.0:
                reports.append(await worker.next_report())
            assert [report.in_flight for report in reports] == [1] * len(reports)
            assert len(reports) <= 41 + 3
            assert reports[-1].longest_wait == "group 3 member 1, step 2 of task X: waits 40.9 s for its environment"

    run_virtual(main())


def test_applied_weights_are_acknowledged_although_nothing_runs() -> None:
    async def main() -> None:
        weights = ScriptedWeights()
        sampler = ScriptedSampler(weights=weights, apply_seconds=2.0)
        async with running(scripted_worker(sampler)) as worker:
            await asyncio.sleep(1.0)
            await worker.announce(weights.publish(1))
            report = await worker.next_report()
            assert (report.version, now()) == (PolicyVersion(0, 1), 3.0)

    run_virtual(main())


def test_announcing_returns_at_once_and_the_newest_of_several_updates_is_acknowledged() -> None:
    async def main() -> None:
        weights = ScriptedWeights()
        async with running(scripted_worker(ScriptedSampler(weights=weights, apply_seconds=2.0))) as worker:
            for number in (1, 2, 3):
                await worker.announce(weights.publish(number))
            assert now() == 0.0
            report = await until(worker, lambda report: report.version.number == 3)
            assert report.finished == ()

    run_virtual(main())


def test_a_worker_whose_sampler_takes_up_no_weights_acknowledges_none() -> None:
    async def main() -> None:
        weights = ScriptedWeights()
        async with running(scripted_worker(ScriptedSampler(weights=weights, applies=False))) as worker:
            await worker.announce(weights.publish(1))
            await worker.start(requests(2, answers=3))
            report = await until(worker, lambda report: report.in_flight == 0)
            assert report.version == PolicyVersion(0, 0)

    run_virtual(main())


def test_room_opens_for_rollouts_that_wait_so_that_the_batch_stays_full() -> None:
    """The number of rollouts in flight is not the number of slots: 4 slots, waits 9 times as long as decoding."""

    async def main() -> None:
        sampler = ScriptedSampler(max_running=4, seconds_per_token=0.1, action_tokens=lambda request: 2)
        busy = slots = 0.0
        async with running(scripted_worker(sampler)) as worker:
            await worker.start(requests(4, group_id=0, answers=1000, wait_seconds=1.8))
            group_id, most = 1, 0
            while now() < 60.0:
                report = await worker.next_report()
                most = max(most, report.in_flight)
                if report.room:
                    await worker.start(requests(report.room, group_id=group_id, answers=1000, wait_seconds=1.8))
                    group_id += 1
                if report.activity is not None and now() > 20.0:
                    for batch, seconds in report.activity.running_seconds.items():
                        busy += batch * seconds
                    slots += 4 * report.activity.seconds
            assert most > 20
        assert busy / slots > 0.9

    run_virtual(main())


def test_an_environment_that_answers_within_the_gathering_time_opens_no_room() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(max_running=2, seconds_per_token=1.0)
        settings = scripted_settings(sampler={"gather_seconds": 0.5, "queue_share": 0.0})
        async with running(scripted_worker(sampler, settings=settings)) as worker:
            await worker.start(requests(2, answers=1000, wait_seconds=0.4))
            while now() < 50.0:
                assert (await worker.next_report()).room == 0

    run_virtual(main())


def test_a_reset_keeps_its_slot_for_a_second_so_that_one_hole_is_not_filled_twice() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler(max_running=2))) as worker:
            await worker.start(requests(2, answers=1, reset_seconds=10.0))
            rooms = []
            while now() < 3.0:
                rooms.append(((await worker.next_report()).room, now()))
            assert rooms[0][0] == 0
            assert rooms[-1][0] == 2

    run_virtual(main())


def test_a_queue_of_ready_rollouts_keeps_the_batch_full_although_answers_come_in_bursts() -> None:
    def mean_running(queue_share: float) -> float:
        async def main() -> float:
            sampler = ScriptedSampler(max_running=8, seconds_per_token=0.1, action_tokens=lambda request: 1 + request.key.group_id % 4)
            settings = scripted_settings(sampler={"queue_share": queue_share})
            group_id, running_seconds = 0, 0.0
            async with running(scripted_worker(sampler, settings=settings)) as worker:
                await worker.start(requests(8, group_id=1000, answers=20, wait_seconds=0.5))
                while now() < 60.0:
                    report = await worker.next_report()
                    if report.activity:
                        running_seconds += sum(int(count) * seconds for count, seconds in report.activity.running_seconds.items())
                    for _ in range(report.room):
                        await worker.start(requests(1, group_id=group_id, answers=20, wait_seconds=0.3 + 0.7 * (group_id % 3)))
                        group_id += 1
            return running_seconds / now()

        return run_virtual(main())

    empty, empty_with_queue = 8 - mean_running(0.0), 8 - mean_running(0.5)
    assert empty > 0.7 and empty_with_queue < 0.5 * empty, (empty, empty_with_queue)


def test_the_queue_of_ready_rollouts_is_bounded_by_its_share() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler(max_running=4), settings=scripted_settings(sampler={"queue_share": 0.5}))) as worker:
            await worker.start(requests(5, answers=1000))
            assert (await until(worker, lambda report: report.in_flight == 5)).room == 1
            await worker.start(requests(1, group_id=1, answers=1000))
            assert (await until(worker, lambda report: report.in_flight == 6)).room == 0

    run_virtual(main())


def test_max_in_flight_bounds_waiting_rollouts_too() -> None:
    async def main() -> None:
        settings = scripted_settings(sampler={"max_in_flight": 3})
        async with running(scripted_worker(ScriptedSampler(max_running=2), settings=settings)) as worker:
            await worker.start(requests(2, answers=9, wait_seconds=100.0))
            report = await until(worker, lambda report: report.room > 0)
            assert (report.room, report.in_flight) == (1, 2)

    run_virtual(main())


def test_cancelled_rollouts_are_reported_as_finished_and_others_go_on() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=1.0, action_tokens=lambda request: 5)
        async with running(scripted_worker(sampler)) as worker:
            await worker.start(requests(3, answers=1))
            await asyncio.sleep(2.5)
            await worker.cancel([RolloutKey(0, 1, 0), RolloutKey(9, 9, 0)])
            cancelled = await until(worker, lambda report: bool(report.finished))
            assert now() == pytest.approx(2.5)
            (finished,) = cancelled.finished
            assert (finished.summary.key.member, finished.summary.end_reason) == (1, EndReason.CANCELLED)
            assert finished.summary.discarded_tokens == 2
            rest = await until(worker, lambda report: bool(report.finished))
            assert {item.summary.end_reason for item in rest.finished} == {EndReason.DONE}
            assert rest.generated_tokens == 2 + 5 + 5

    run_virtual(main())


def test_a_rollout_cancelled_before_it_began_is_reported_too() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler())) as worker:
            await worker.start(requests(1))
            await worker.cancel([RolloutKey(0, 0, 0)])
            (finished,) = (await worker.next_report()).finished
            assert finished.summary.end_reason is EndReason.CANCELLED

    run_virtual(main())


def test_stopping_ends_every_rollout_and_leaves_them_to_the_last_report() -> None:
    async def main() -> None:
        worker = scripted_worker(ScriptedSampler(seconds_per_token=1.0))
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.start(requests(3, answers=5, wait_seconds=3.0))
            await asyncio.sleep(4.5)
            await worker.stop()
            assert now() == pytest.approx(4.5)
            last = await until(worker, lambda report: bool(report.finished))
            assert len(last.finished) == 3
            assert (last.room, last.in_flight) == (0, 0)
            delivered = sum(item.summary.num_action_tokens + item.summary.discarded_tokens for item in last.finished)
            assert last.generated_tokens == delivered > 0
            with pytest.raises(WorkerLostError, match="worker-0 has ended"):
                await worker.next_report()
            with pytest.raises(WorkerLostError):
                await worker.start(requests(1, group_id=5))

    run_virtual(main())


def test_a_worker_can_be_stopped_twice_and_before_it_runs() -> None:
    async def main() -> None:
        worker = scripted_worker(ScriptedSampler())
        await worker.stop()
        await worker.run()
        await worker.stop()

    run_virtual(main())


def test_a_sampler_that_dies_takes_the_worker_with_it_and_whoever_waits_for_a_report_learns_why() -> None:
    class Dying(ScriptedSampler):
        async def run(self, waiting_for: Any) -> None:
            await asyncio.sleep(5.0)
            raise RuntimeError("out of memory")

    async def main() -> None:
        worker = scripted_worker(Dying())
        lost: list[WorkerLostError] = []

        async def read() -> None:
            try:
                await until(worker, lambda report: False)
            except WorkerLostError as error:
                lost.append(error)

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read())
                await worker.start(requests(2, answers=9, wait_seconds=1.0))
                try:
                    await worker.run()
                finally:
                    await asyncio.wait([reading])

        with pytest.raises(ExceptionGroup) as caught:
            await serve()
        assert caught.group_contains(RuntimeError, match="out of memory")
        assert "out of memory" in str(lost[0])

    run_virtual(main())


def test_cancelling_a_worker_ends_its_rollouts_and_closes_the_user_code() -> None:
    closed: list[bool] = []

    class Closing(LoopUserCode):
        async def close(self) -> None:
            closed.append(True)

    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=1.0)
        code = scripted_user_code()
        code.__class__ = Closing
        worker = scripted_worker(sampler, user_code=code)
        async with asyncio.TaskGroup() as group:
            run = group.create_task(worker.run())
            await worker.start(requests(3, answers=5, wait_seconds=3.0))
            await asyncio.sleep(2.5)
            run.cancel()
        assert (sampler.num_running, closed) == (0, [True])
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_starting_a_key_twice_is_refused() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler())) as worker:
            await worker.start(requests(1, wait_seconds=5.0))
            with pytest.raises(InvariantError):
                await worker.start(requests(1))

    run_virtual(main())


def test_evaluation_rollouts_are_not_counted_as_generated() -> None:
    async def main() -> None:
        async with running(scripted_worker(ScriptedSampler())) as worker:
            await worker.start([rollout_request(group_id=7, task=scripted_task("e", answers=3), evaluation=True)])
            report = await until(worker, lambda report: bool(report.finished))
            assert report.finished[0].summary.num_action_tokens > 0
            assert report.generated_tokens == 0

    run_virtual(main())


def test_activity_is_aggregated_and_loses_no_second() -> None:
    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=0.1)
        total, tokens, count = 0.0, 0, 0
        async with running(scripted_worker(sampler)) as worker:
            await worker.start(requests(4, answers=20, wait_seconds=0.35))
            while True:
                report = await worker.next_report()
                if report.activity is not None:
                    count += 1
                    total += report.activity.seconds
                    tokens += report.activity.sampled_tokens
                if not report.in_flight:
                    break
            left, seconds = sampler.take_activity(), now()
            assert total + left.seconds == pytest.approx(seconds)
            assert tokens + left.sampled_tokens == report.generated_tokens
            assert count <= now() + 1

    run_virtual(main())


def test_the_same_requests_give_the_same_trajectories_whoever_shares_the_batch() -> None:
    def payloads(max_running: int, extra: int) -> dict[RolloutKey, tuple[int, ...]]:
        async def main() -> dict[RolloutKey, tuple[int, ...]]:
            found: dict[RolloutKey, tuple[int, ...]] = {}
            async with running(scripted_worker(ScriptedSampler(max_running=max_running))) as worker:
                await worker.start(requests(extra, group_id=1, answers=7))
                await worker.start(requests(4, group_id=0, answers=5, wait_seconds=[0.3, 0.0]))
                while len(found) < extra + 4:
                    for finished in (await worker.next_report()).finished:
                        found[finished.summary.key] = Trajectory.from_bytes(finished.payload).tokens
            return {key: tokens for key, tokens in found.items() if key.group_id == 0}

        return run_virtual(main())

    assert payloads(8, 0) == payloads(2, 5)


def test_long_rollouts_beyond_their_share_leave_room_for_short_work() -> None:
    """Else a burst of them would fill every slot, and nothing short would be there for which they could be parked."""

    async def main() -> None:
        sampler = ScriptedSampler(max_running=4, seconds_per_token=0.2)
        sampler.most_long = 1
        async with running(scripted_worker(sampler)) as worker:
            started = requests(4, answers=1000)
            await worker.start(started)
            await until(worker, lambda report: report.in_flight == 4 and report.room == 0)
            sampler.told_long = {request.key for request in started[:3]}
            report = await until(worker, lambda report: report.room > 0)
            assert report.room == 2, "one short rollout and one long one keep their slots"
            await worker.start(requests(2, group_id=1, answers=1000))
            assert (await until(worker, lambda report: report.in_flight == 6)).room == 0

    run_virtual(main())
