"""The loop: when it waits and what for, what it gathers, where the time goes."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fakes.sampling import beside, make_sampler, request, turns
from headrace.clock import now, run_virtual
from headrace.sampler.activity import ActivityMeter
from headrace.sampler.gather import GatherTarget
from headrace.types import Completion, RolloutKey, SamplingParameters, VerifyRequest


def test_an_idle_sampler_sets_no_timer_and_names_what_it_waits_for() -> None:
    """Under the virtual clock polling would show as time that moves in small steps."""
    sampler = make_sampler()
    reasons = iter(["admission", "environment", "admission"])
    reason = next(reasons)

    async def main() -> None:
        nonlocal reason
        await asyncio.sleep(10)
        reason = next(reasons)
        sampler.wake()
        await asyncio.sleep(7)

    asked = 0

    def waiting_for() -> str:
        nonlocal asked
        asked += 1
        return reason

    async def both() -> None:
        await main()
        activity = sampler.take_activity()
        assert activity.idle_seconds["admission"] == 10.0
        assert activity.environment_seconds == 7.0 == pytest.approx(activity.idle_seconds["environment"] + activity.idle_seconds.get("rollouts", 0.0))
        assert activity.seconds == 17.0
        assert activity.busy_seconds == 0.0

    run_virtual(beside(sampler, both(), waiting_for))
    assert asked <= 4


def test_busy_and_idle_seconds_sum_to_the_wall_time_between_two_takes() -> None:
    sampler = make_sampler()

    async def main() -> None:
        start = now()
        sampler.take_activity()
        await asyncio.gather(*(sampler.sample(request([1, 2], group=group, max_action_tokens=10)) for group in range(5)))
        await asyncio.sleep(0.05)
        await sampler.score([[1, 2, 3]])
        first = sampler.take_activity()
        elapsed = now() - start
        assert first.seconds == pytest.approx(elapsed, rel=0.02, abs=0.002)
        assert first.busy_seconds + sum(first.idle_seconds.values()) == pytest.approx(first.seconds)
        assert sum(first.running_seconds.values()) == pytest.approx(first.busy_seconds)
        assert first.idle_seconds["admission"] >= 0.045
        assert first.sampled_tokens == 50
        assert first.decode_steps == 10
        assert set(first.running_seconds) == {5, 1}
        second = sampler.take_activity()
        assert (second.decode_steps, second.sampled_tokens, second.prefill_tokens) == (0, 0, 0)

    asyncio.run(beside(sampler, main()))


def test_time_in_new_weights_is_idle_for_weights() -> None:
    times = iter([0.0, 1.0, 1.5, 3.5, 4.0])
    meter = ActivityMeter(lambda: next(times))
    meter.start()
    meter.idle("gather")
    meter.applied()
    meter.busy(8, 1.5)
    activity = meter.take(decode_steps=1, prefill_tokens=0, sampled_tokens=8, applied_updates=1)
    assert activity.idle_seconds == {"admission": 1.0, "weights": 0.5, "gather": 0.5, "bookkeeping": 0.5}
    assert activity.running_seconds == {8: 1.5}
    assert activity.apply_seconds == 0.5
    assert activity.seconds == 4.0


def test_busy_is_the_models_work_and_what_a_step_takes_beside_it_is_bookkeeping() -> None:
    times = iter([0.0, 1.0, 3.0, 4.0, 4.0])
    meter = ActivityMeter(lambda: next(times))
    meter.start()
    meter.idle("gather")
    meter.busy(4, 1.25, tokens=4, context_tokens=40)
    meter.verified(2, 3.0)  # no more than the stretch: two clocks
    activity = meter.take(decode_steps=1, prefill_tokens=0, sampled_tokens=4, applied_updates=0)
    assert activity.busy_seconds == 2.25 and activity.verify_seconds == 1.0
    assert activity.idle_seconds == {"admission": 1.0, "bookkeeping": 0.75}
    assert activity.step_seconds == 3.0
    assert activity.decode_work[0][4] == 2.0  # whole steps are what takes time


def test_a_wait_in_which_this_thread_had_the_processor_was_the_rollouts_python() -> None:
    times, processor = iter([0.0, 0.0, 10.0, 12.0, 15.0]), iter([1.0, 1.5, 2.0, 2.25])
    meter = ActivityMeter(lambda: next(times), lambda: next(processor))
    meter.start()
    meter.idle("environment")
    meter.idle("gather")
    meter.idle("rollouts", between="gather")
    activity = meter.take(decode_steps=0, prefill_tokens=0, sampled_tokens=0, applied_updates=0)
    assert activity.idle_seconds == {"environment": 9.5, "gather": 1.75, "rollouts": 3.75}
    assert (activity.environment_seconds, activity.gap_seconds) == (10.0, 5.0)
    assert activity.seconds == 15.0


def test_busy_seconds_of_real_steps_are_less_than_the_steps_and_the_rest_has_a_name() -> None:
    sampler = make_sampler()

    async def main() -> None:
        sampler.take_activity()
        await asyncio.gather(*(sampler.sample(request([1, 2], group=group, max_action_tokens=10)) for group in range(5)))
        await sampler.score([[1, 2, 3]])
        activity = sampler.take_activity()
        assert 0 < activity.busy_seconds < activity.step_seconds
        assert activity.busy_seconds + activity.idle_seconds["bookkeeping"] >= activity.step_seconds
        assert activity.idle_seconds["rollouts"] > 0
        assert set(activity.idle_seconds) <= {"bookkeeping", "rollouts", "admission", "gather"}

    asyncio.run(beside(sampler, main()))


def test_answers_that_trickle_in_are_gathered_into_one_step_while_environments_are_awaited() -> None:
    sampler = make_sampler(gather_seconds=0.01, max_running=8)
    steps: list[int] = []

    async def late(index: int) -> Completion:
        await asyncio.sleep(0.001 * index)
        return await sampler.sample(request([1, 2], group=index))

    async def main() -> None:
        await asyncio.gather(*map(late, range(1, 6)))
        steps.append(sampler._engine.decode_steps)
        await asyncio.gather(*map(late, range(11, 21)))  # 10 requests for 8 slots: the first 8 fill the batch before the limit
        steps.append(sampler._engine.decode_steps)

    run_virtual(beside(sampler, main(), lambda: "environment"))
    assert steps == [1, 3]


def test_nothing_is_gathered_when_no_environment_is_awaited() -> None:
    sampler = make_sampler(gather_seconds=1.0)

    async def main() -> float:
        start = now()
        await sampler.sample(request([1, 2], max_action_tokens=5))
        return now() - start

    assert run_virtual(beside(sampler, main(), lambda: "admission")) == 0.0


def test_gathering_pays_up_to_arrivals_within_the_fixed_part_of_a_step() -> None:
    """Steps of 2 ms + 0.1 ms a token, 5000 arrivals a second: worth waiting below 10 rows."""
    target, time = GatherTarget(), 0.0
    for step in range(400):
        tokens = 5 + step % 7
        seconds = 0.002 + 0.0001 * tokens
        time += seconds
        for _ in range(round(5000 * time) - round(5000 * (time - seconds))):
            target.arrive()
        target.observe_step(tokens, seconds, time)
    assert target.fixed_seconds == pytest.approx(0.002, rel=0.01)
    assert target.rows == pytest.approx(10, rel=0.1)


def test_without_arrivals_nothing_is_waited_for() -> None:
    target = GatherTarget()
    for step in range(400):
        target.observe_step(3, 0.002, 0.002 * step)
    assert target.rows == 0.0


def test_capacity_is_a_batch_the_engine_can_run_and_leaves_the_sampler_usable() -> None:
    sampler = make_sampler(max_running=12)
    before = run_virtual(beside(sampler, sampler.sample(request([1, 2], max_action_tokens=5))))
    capacity, rate = sampler.measure_capacity()
    assert 1 <= capacity <= 12
    assert rate > 0
    assert run_virtual(beside(sampler, sampler.sample(request([1, 2], max_action_tokens=5)))).tokens == before.tokens


def test_many_turns_do_not_change_how_a_request_is_served() -> None:
    """A request that arrives in the middle of others' actions starts with the next step."""
    sampler = make_sampler()

    async def main() -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(sampler.sample(request([1], group=1, max_action_tokens=50)))
            await turns(10)
            before = sampler._engine.decode_steps
            await sampler.sample(request([2], group=2))
            return sampler._engine.decode_steps - before

    assert run_virtual(beside(sampler, main())) == 1


def test_what_verification_and_parking_cost_is_in_the_activity() -> None:
    sampler = make_sampler(max_running=1, long_share=0.5)
    prompt = (1, 2, 3)

    async def main() -> None:
        for group in range(16):
            await sampler.sample(request([1], group=group, max_action_tokens=2))
            sampler.release(RolloutKey(group, 0, 0))
        kept = dataclasses.replace(request(prompt, group=50, max_action_tokens=10), keep_distribution=True)
        completion = await sampler.sample(kept)
        sampler.release(kept.key)
        sampler.take_activity()
        checked = ((0, 3, 13),)
        tokens = (*prompt, *completion.tokens)
        await sampler.verify(VerifyRequest(key=kept.key, round=1, seed=0, tokens=tokens, checked=checked, sampling=SamplingParameters()))
        activity = sampler.take_activity()
        assert activity.verify_tokens == 12 and activity.decode_steps == 0
        assert 0 < activity.verify_seconds == activity.busy_seconds
        assert (activity.num_parked, activity.num_unkept) == (0, 0)
        again = sampler.take_activity()
        assert (again.verify_tokens, again.verify_seconds) == (0, 0.0)

    asyncio.run(beside(sampler, main()))
