"""The random numbers of an action do not depend on who shares the batch, on when it arrives, or on where its cache lies."""

from __future__ import annotations

import asyncio

from fakes.sampling import beside, make_sampler, request, turns
from headrace.clock import run_virtual
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion

NUM_TOKENS = 30


async def crowd(sampler: TransformersSampler, number: int) -> Completion:
    """One action among others that come and go."""

    async def other(index: int) -> None:
        await turns(index % 9)
        await sampler.sample(request([index % 20] * (1 + index % 40), group=100 + index, max_action_tokens=1 + index % 13, temperature=0.7))

    async with asyncio.TaskGroup() as group:
        for index in range(number):
            group.create_task(other(index))
        await turns(number % 5)
        return await sampler.sample(request([4, 5, 6], group=1, seed=11, max_action_tokens=NUM_TOKENS))


def test_an_action_is_the_same_alone_and_in_any_crowd() -> None:
    alone = run_virtual(beside(sampler := make_sampler(), crowd(sampler, 0)))
    for number, max_running in ((3, 64), (40, 64), (40, 5)):
        shared = run_virtual(beside(sampler := make_sampler(max_running=max_running), crowd(sampler, number)))
        assert shared.tokens == alone.tokens


def test_seed_group_member_attempt_and_step_each_make_another_action() -> None:
    sampler = make_sampler()

    async def main() -> set[tuple[int, ...]]:
        requests = [
            request([1], max_action_tokens=NUM_TOKENS),
            request([1], seed=1, max_action_tokens=NUM_TOKENS),
            request([1], group=1, max_action_tokens=NUM_TOKENS),
            request([1], member=1, max_action_tokens=NUM_TOKENS),
            request([1], step=1, max_action_tokens=NUM_TOKENS),
        ]
        return {completion.tokens for completion in await asyncio.gather(*map(sampler.sample, requests))}

    assert len(run_virtual(beside(sampler, main()))) == 5
