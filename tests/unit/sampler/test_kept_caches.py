"""Multi-step rollouts: what is kept between steps, what is given up, and that neither changes what is drawn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fakes.sampling import beside, make_sampler, request, turns
from fakes.tiny_models import VOCABULARY
from headrace.clock import run_virtual
from headrace.errors import ModelError
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, RolloutKey


async def rollout(sampler: TransformersSampler, group: int, *, keep: bool, num_steps: int = 6, **sampling: Any) -> list[Completion]:
    """Observations of one to twelve tokens, waits of unlike length between the steps."""
    chooser = random.Random(group)
    context = [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 12))]
    completions = []
    for step in range(num_steps):
        completion = await sampler.sample(request(context, group=group, step=step, keep=keep, max_action_tokens=chooser.randint(1, 3), **sampling))
        completions.append(completion)
        context += completion.tokens
        context += [chooser.randrange(VOCABULARY) for _ in range(chooser.choice((1, 1, 2, 3, 12)))]
        await turns(chooser.randint(0, 12))
    sampler.release(RolloutKey(group, 0, 0))
    return completions


async def rollouts(sampler: TransformersSampler, number: int, **kwargs: Any) -> list[list[Completion]]:
    return await asyncio.gather(*(rollout(sampler, group, **kwargs) for group in range(number)))


def slots_for(sampler: TransformersSampler, number: int) -> int:
    return number * sampler._model.slot_bytes


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_kept_evicted_and_recomputed_caches_give_what_no_cache_gives(kind: str) -> None:
    plain = make_sampler(kind)
    expected = run_virtual(beside(plain, rollouts(plain, 24, keep=False)))
    roomy = make_sampler(kind)
    kept = run_virtual(beside(roomy, rollouts(roomy, 24, keep=True)))
    tight = make_sampler(kind, max_running=3, kv_memory_bytes=slots_for(plain, 5))
    evicted = run_virtual(beside(tight, rollouts(tight, 24, keep=True)))
    assert tight.num_slots == 5
    assert roomy._engine.slots.num_evicted == 0
    assert tight._engine.slots.num_evicted > 20
    computed = [sampler.take_activity().prefill_tokens for sampler in (roomy, tight, plain)]
    assert computed[0] < computed[1] < computed[2]
    for one, two, three in zip(expected, kept, evicted, strict=True):
        for a, b, c in zip(one, two, three, strict=True):
            assert a.tokens == b.tokens == c.tokens
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
            assert c.logprobs == pytest.approx(a.logprobs, abs=1e-4)
    for sampler in (plain, roomy, tight):
        assert sampler._engine.slots.num_free == sampler.num_slots


def test_a_continued_rollout_computes_only_what_its_cache_lacks() -> None:
    sampler = make_sampler()

    async def main() -> list[int]:
        context, computed = [1] * 30, []
        for step in range(4):
            completion = await sampler.sample(request(context, step=step, keep=True))
            computed.append(sampler._engine.last_step_tokens)
            context = [*context, *completion.tokens, 5, 6]
        return computed

    assert run_virtual(beside(sampler, main())) == [30, 3, 3, 3]  # the last action token was drawn, never computed


def test_a_context_that_does_not_continue_the_kept_one_is_computed_anew() -> None:
    sampler = make_sampler()

    async def main() -> tuple[Completion, Completion]:
        await sampler.sample(request([1, 2, 3, 4], step=0, keep=True))
        changed = await sampler.sample(request([1, 2, 9, 4, 5, 6], step=1, keep=True))
        fresh = await sampler.sample(request([1, 2, 9, 4, 5, 6], member=0, step=1))
        return changed, fresh

    changed, fresh = run_virtual(beside(sampler, main()))
    assert changed.tokens == fresh.tokens
    assert changed.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_the_least_recently_used_idle_cache_is_given_up_first_and_running_ones_never() -> None:
    size = make_sampler()._model.slot_bytes
    sampler = make_sampler(kv_memory_bytes=3 * size)

    async def step(group: int, number: int, tokens: list[int]) -> int:
        await sampler.sample(request(tokens, group=group, step=number, keep=True))
        return sampler._engine.last_step_tokens

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sampler.sample(request([1], group=9, max_action_tokens=60)))
            await turns(2)
            for rollout_group in (1, 2):
                await step(rollout_group, 0, [1] * 10)
            first = await sampler.sample(request([1] * 10, group=1, step=0, keep=True))  # 1 is used again: now 2 is the older one
            await step(3, 0, [1] * 10)  # takes the place of 2
            kept = sampler._engine.slots
            assert kept.num_evicted == 1
            assert {key.group_id for key in kept._kept} == {1, 3}
            assert len(first.tokens) == 1
            assert len((await running).tokens) == 60

    run_virtual(beside(sampler, main()))


def test_rollouts_that_wait_for_their_environment_hold_no_decode_slot() -> None:
    sampler = make_sampler(max_running=2)

    async def main() -> int:
        await asyncio.gather(*(sampler.sample(request([1, 2], group=group, keep=True)) for group in range(20)))
        assert sampler.num_running == 0
        assert sampler._engine.slots.num_kept == 20
        both = await asyncio.gather(*(sampler.sample(request([3, 4], group=100 + group, max_action_tokens=4)) for group in range(2)))
        return sum(len(completion.tokens) for completion in both)

    assert run_virtual(beside(sampler, main())) == 8


def test_release_frees_the_slot_also_while_the_action_is_running() -> None:
    sampler = make_sampler()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sampler.sample(request([1], group=1, keep=True, max_action_tokens=9)))
            await turns(3)
            sampler.release(RolloutKey(1, 0, 0))
            await running
        await sampler.sample(request([1], group=2, keep=True))
        sampler.release(RolloutKey(2, 0, 0))
        sampler.release(RolloutKey(3, 0, 0))  # unknown: ignored

    run_virtual(beside(sampler, main()))
    assert sampler._engine.slots.num_free == sampler.num_slots


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_the_cache_stays_within_its_memory_and_serves_more_rollouts_than_fit(slots: int) -> None:
    budget = slots_for(make_sampler(), slots) + 17
    sampler = make_sampler(max_running=4, kv_memory_bytes=budget)
    layers = sampler._engine.cache.layers
    assert sum(tensor.numel() * tensor.element_size() for layer in layers for tensor in (layer.keys, layer.values)) <= budget
    assert sampler.num_slots == slots
    assert sampler.max_running == min(4, slots)
    assert len(run_virtual(beside(sampler, rollouts(sampler, 12, keep=True)))) == 12


def test_memory_for_less_than_one_sequence_is_refused_with_both_sizes() -> None:
    size = make_sampler()._model.slot_bytes
    with pytest.raises(ModelError, match=rf"kv_memory_bytes is {size - 1}, .* takes {size} bytes"):
        make_sampler(kv_memory_bytes=size - 1)
