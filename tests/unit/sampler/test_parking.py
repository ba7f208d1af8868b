"""Long rollouts leave their decode slots to short work and go on later, with the tokens they would have had anyway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.sampling import beside, make_sampler, request, turns, version_of_each_token
from fakes.tiny_models import perturbed
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.config import UpdateMode
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey

NUM_LONG, NUM_SHORT = 4, 30
LONG_TOKENS = 80


async def short(sampler: TransformersSampler, group: int) -> Completion:
    completion = await sampler.sample(request([group % 20, 3], group=group, max_action_tokens=4))
    sampler.release(RolloutKey(group, 0, 0))
    return completion


async def long(sampler: TransformersSampler, group: int) -> Completion:
    completion = await sampler.sample(request([group % 20, 3], group=group, max_action_tokens=LONG_TOKENS))
    sampler.release(RolloutKey(group, 0, 0))
    return completion


async def mixture(sampler: TransformersSampler, seen: list[tuple[int, int]] | None = None) -> list[Completion]:
    """Long rollouts hold every slot when a crowd of short ones comes."""
    for group in range(100, 120):  # what is short becomes known
        await short(sampler, group)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(long(sampler, index)) for index in range(NUM_LONG)]
        await turns(40)
        tasks += [group.create_task(short(sampler, 10 + index)) for index in range(NUM_SHORT)]
        await turns(3)
        while not all(task.done() for task in tasks[NUM_LONG:]):
            if seen is not None:
                seen.append((sum(task.done() for task in tasks[NUM_LONG:]), len(sampler.parked)))
            await turns(1)
    return [task.result() for task in tasks]


def run(share: float, weights: FakeWeights | None = None, **settings: Any) -> tuple[list[Completion], list[tuple[int, int]], TransformersSampler]:
    sampler = make_sampler(weights=weights, max_running=4, long_share=share, **settings)
    seen: list[tuple[int, int]] = []
    return run_virtual(beside(sampler, mixture(sampler, seen))), seen, sampler


def test_tokens_are_the_same_with_and_without_parking() -> None:
    parked, seen, sampler = run(0.5)
    free, _, other = run(1.0)
    assert sampler._engine.admission.num_parked >= 2 and other._engine.admission.num_parked == 0
    assert max(number for _, number in seen) >= 2
    assert [completion.tokens for completion in parked] == [completion.tokens for completion in free]
    assert all(one.logprobs == pytest.approx(two.logprobs, abs=1e-5) for one, two in zip(parked, free, strict=True))


def test_short_work_passes_parked_rollouts_and_does_not_wait_for_long_ones() -> None:
    """In decode steps: with sharing the short ones are through long before the long ones; without they wait for them."""
    steps = {}
    for share in (0.5, 1.0):
        _, seen, sampler = run(share)
        steps[share] = len(seen)
        assert sampler.parked == ()
    assert steps[0.5] <= NUM_SHORT * 4 / 2 + 10
    assert steps[0.5] < steps[1.0]


@pytest.mark.parametrize("num_slots", [4, 6, 20])
def test_parked_rollouts_give_their_cache_to_others_where_memory_is_short(num_slots: int) -> None:
    reference, _, sampler = run(0.5)
    tight, _, _ = run(0.5, kv_memory_bytes=num_slots * sampler._model.slot_bytes)
    assert [completion.tokens for completion in tight] == [completion.tokens for completion in reference]


@pytest.mark.parametrize("mode", UpdateMode)
def test_parked_rollouts_obey_the_update_mode_and_go_on_under_newer_weights(mode: UpdateMode) -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, max_running=4, long_share=0.25, update_mode=mode)
    base = {name: tensor.clone() for name, tensor in sampler._model.parameters.items()}

    async def main() -> list[Completion]:
        async def publish() -> None:
            while len(sampler.parked) < 2:
                await turns(1)
            weights.publish(perturbed(base, seed=1), PolicyVersion(0, 1))

        async with asyncio.TaskGroup() as group:
            group.create_task(publish())
            result = group.create_task(mixture(sampler))
        return result.result()

    completions = run_virtual(beside(sampler, main()))
    versions = [version_of_each_token(completion) for completion in completions[:NUM_LONG]]
    assert all(each == sorted(each) for each in versions)
    mixed = sum(len(set(each)) == 2 for each in versions)
    if mode is UpdateMode.KEEP:
        assert mixed >= 3
    else:
        assert mixed == 0  # they finished first, or were drawn again from their beginning
    assert sum(completion.discarded_tokens > 0 for completion in completions[:NUM_LONG]) == (NUM_LONG if mode is UpdateMode.ABORT else 0)


def test_a_parked_rollout_can_be_cancelled_and_its_tokens_are_accounted_for() -> None:
    sampler = make_sampler(max_running=2, long_share=0.5)

    async def main() -> None:
        for group in range(100, 120):
            await short(sampler, group)
        drawn = sampler.generated_tokens
        tasks = [asyncio.create_task(long(sampler, index)) for index in range(2)]
        await turns(40)
        async with asyncio.TaskGroup() as group:
            group.create_task(short(sampler, 50))
            while not sampler.parked:
                await turns(1)
            (key,) = sampler.parked
            tasks[key.group_id].cancel()
            await turns(2)
            assert sampler.parked == ()
        lost = sampler.release(key)
        (other,) = [task for number, task in enumerate(tasks) if number != key.group_id]
        await other
        assert lost > 30
        assert sampler.generated_tokens - drawn == lost + LONG_TOKENS + 4

    run_virtual(beside(sampler, main()))
