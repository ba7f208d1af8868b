"""sampler.apply on the real engine: which weights draw a token, who waits for an update, and what that costs."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from fakes.sampling import beside, make_sampler, request, turns, version_of_each_token
from fakes.tiny_models import perturbed
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.config import Apply, UpdateMode
from headrace.sampler.applying import DrainedSlots
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest

OLD, NEW = PolicyVersion(0, 1), PolicyVersion(0, 2)


def updated_sampler(weights: FakeWeights, **settings: object) -> TransformersSampler:
    sampler = make_sampler(weights=weights, **settings)
    weights.publish(sampler._model.parameters, OLD)
    return sampler


def publish(sampler: TransformersSampler, weights: FakeWeights) -> None:
    weights.publish(perturbed(dict(weights.history[OLD]), seed=1), NEW)
    sampler.wake()


def key_request(*, group: int, max_action_tokens: int) -> SampleRequest:
    return dataclasses.replace(request([1, 2], group=group, max_action_tokens=max_action_tokens), key_weight=1.0)


@pytest.mark.parametrize("mode", UpdateMode)
def test_an_update_waits_for_the_next_key_step_which_is_begun_with_it(mode: UpdateMode) -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=Apply.KEY_STEPS, update_mode=mode, max_apply_delay_seconds=1e9)

    async def main() -> tuple[Completion, Completion]:
        async with asyncio.TaskGroup() as group:
            plain = group.create_task(sampler.sample(request([1, 2], group=1, max_action_tokens=60)))
            await turns(10)
            publish(sampler, weights)
            await turns(20)
            assert sampler.version == OLD
            key = group.create_task(sampler.sample(key_request(group=2, max_action_tokens=5)))
        return plain.result(), key.result()

    plain, key = run_virtual(beside(sampler, main()))
    assert set(version_of_each_token(key)) == {NEW}
    expected = {UpdateMode.KEEP: {OLD, NEW}, UpdateMode.WAIT: {OLD}, UpdateMode.ABORT: {NEW}}
    assert set(version_of_each_token(plain)) == expected[mode]
    assert len(plain.tokens) == 60


def test_an_update_waits_no_longer_for_a_key_step_than_it_may() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=Apply.KEY_STEPS, max_apply_delay_seconds=0.0)

    async def main() -> Completion:
        async with asyncio.TaskGroup() as group:
            plain = group.create_task(sampler.sample(request([1, 2], group=1, max_action_tokens=60)))
            await turns(10)
            publish(sampler, weights)
        return plain.result()

    assert set(version_of_each_token(run_virtual(beside(sampler, main())))) == {OLD, NEW}


@pytest.mark.parametrize(
    ("settings", "drained"),
    [
        ({"apply": Apply.ROLLOUT_START}, 3),
        ({"update_mode": UpdateMode.WAIT}, 3),
        ({"update_mode": UpdateMode.ABORT}, 0),
        ({"apply": Apply.KEY_STEPS, "max_apply_delay_seconds": 1e9}, 0),
        ({}, 0),
    ],
)
def test_slots_count_as_drained_while_somebody_waits_for_one_until_new_weights_are_there(settings: dict[str, object], drained: int) -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, max_running=4, **settings)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(sampler.sample(request([1, 2], group=1, max_action_tokens=60)))
            await turns(10)
            assert sampler._engine.num_drained_slots == 0
            publish(sampler, weights)
            await turns(10)
            assert sampler._engine.num_drained_slots == 0  # nobody waits for a slot
            others = [group.create_task(sampler.sample(request([1, 2], group=number, max_action_tokens=60))) for number in range(2, 8)]
            await turns(10)
            assert sampler._engine.num_drained_slots == drained  # six wait for three
            await first
            sampler.release(RolloutKey(1, 0, 0))
            await asyncio.gather(*others)
        assert sampler._engine.num_drained_slots == 0
        assert (sampler.take_activity().drained_slot_seconds > 0) == (drained > 0)

    asyncio.run(beside(sampler, main()))


def test_drained_slots_are_integrated_over_time() -> None:
    slots = DrainedSlots()
    for time, empty in ((1.0, 0), (2.0, 3), (4.0, 1), (4.5, 0), (9.0, 0)):
        slots.note(time, empty)
    assert slots.slot_seconds == 3 * 2.0 + 1 * 0.5


@pytest.mark.parametrize("apply", Apply)
def test_an_update_is_taken_up_at_once_when_nothing_runs(apply: Apply) -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=apply, max_apply_delay_seconds=1e9)

    async def main() -> None:
        await sampler.sample(request([1, 2], group=1, max_action_tokens=3))
        sampler.release(RolloutKey(1, 0, 0))
        publish(sampler, weights)
        await sampler.applied(NEW)

    run_virtual(beside(sampler, main()))


def test_at_rollout_start_begun_rollouts_go_on_and_new_ones_wait_for_the_update() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=Apply.ROLLOUT_START)

    async def begun() -> list[Completion]:
        completions, context = [], [1, 2]
        for step in range(3):
            completions.append(await sampler.sample(request(context, group=1, step=step, keep=True, max_action_tokens=5)))
            context += [*completions[-1].tokens, 3]
            await asyncio.sleep(1.0)
        sampler.release(RolloutKey(1, 0, 0))
        return completions

    async def main() -> tuple[list[Completion], Completion]:
        async with asyncio.TaskGroup() as group:
            old = group.create_task(begun())
            await asyncio.sleep(0.1)
            publish(sampler, weights)
            await turns(2)
            new = group.create_task(sampler.sample(request([1, 2], group=2, max_action_tokens=5)))
            await asyncio.sleep(2.2)
            assert not new.done()
            sampler.take_activity()
            await asyncio.sleep(0.25)
            activity = sampler.take_activity()
            assert activity.idle_seconds == {"weights": 0.25}  # it could decode, but for the update
        return old.result(), new.result()

    old, new = run_virtual(beside(sampler, main(), lambda: "environment"))
    assert {version for completion in old for version in version_of_each_token(completion)} == {OLD}
    assert set(version_of_each_token(new)) == {NEW}


def test_at_rollout_start_a_held_sampler_begins_rollouts_although_there_is_an_update() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=Apply.ROLLOUT_START)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sampler.sample(request([1, 2], group=1, max_action_tokens=30)))
            await turns(5)
            publish(sampler, weights)
            await turns(2)
            sampler.hold_weights(True)
            other = await sampler.sample(request([1, 2], group=2, max_action_tokens=5))
            assert set(version_of_each_token(other)) == {OLD}
            sampler.hold_weights(False)
        for number in (1, 2):
            sampler.release(RolloutKey(number, 0, 0))
        await sampler.applied(NEW)

    run_virtual(beside(sampler, main()))
