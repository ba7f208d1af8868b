"""The engine gives what plain transformers gives, whoever shares the batch."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from fakes.sampling import beside, make_sampler, plain_model, request, turns
from fakes.tiny_models import SERVED, VOCABULARY
from headrace.clock import run_virtual
from headrace.types import Completion


def mixed_work(number: int, seed: int) -> list[tuple[list[int], int, int]]:
    """(prompt, action tokens, turns before it arrives)"""
    chooser = random.Random(seed)
    return [
        ([chooser.randrange(VOCABULARY) for _ in range(chooser.choice((1, 2, 3, 9, 17, 40, 60)))], chooser.randint(1, 16), chooser.randint(0, 30))
        for _ in range(number)
    ]


def greedy_completions(kind: str, work: list[tuple[list[int], int, int]], **settings: int) -> list[Completion]:
    sampler = make_sampler(kind, **settings)

    async def one(index: int) -> Completion:
        prompt, length, arrival = work[index]
        await turns(arrival)
        return await sampler.sample(request(prompt, group=index, temperature=0.0, max_action_tokens=length))

    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(*map(one, range(len(work))))

    return run_virtual(beside(sampler, all_of_them()))


@pytest.mark.parametrize("kind", SERVED)
def test_greedy_tokens_of_mixed_requests_with_random_arrivals_equal_generate(kind: str) -> None:
    work = mixed_work(64 if kind == "qwen2" else 20, seed=1)
    model = plain_model(kind)
    for (prompt, length, _), completion in zip(work, greedy_completions(kind, work, max_running=24), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        assert len(completion.tokens) == length
        for position, (ours, theirs) in enumerate(zip(completion.tokens, expected.tolist(), strict=True)):
            if ours != theirs:  # from here on the two continue different texts
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*prompt, *completion.tokens[:position]]])).logits[0, -1]
                assert abs(float(logits[ours] - logits[theirs])) <= 1e-4
                break


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("max_prefill_tokens", [4096, 16])
def test_tokens_and_logprobs_are_those_of_the_plain_forward_however_prompts_are_cut(kind: str, max_prefill_tokens: int) -> None:
    """Sliding windows of 7 tokens are narrower than the prompts; soft caps bite."""
    work = mixed_work(64, seed=3)
    model = plain_model(kind)
    for (prompt, _, _), completion in zip(work, greedy_completions(kind, work, max_running=24, max_prefill_tokens=max_prefill_tokens), strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
        drawn = ids[0, len(prompt) :, None]
        assert float((logits.amax(-1) - logits.gather(-1, drawn)[:, 0]).max()) <= 1e-4
        logprobs = torch.log_softmax(logits, -1).gather(-1, drawn)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_scores_equal_the_plain_forward_and_do_not_disturb_sampling(kind: str) -> None:
    sampler = make_sampler(kind, max_prefill_tokens=128)
    sequences = [prompt for prompt, _, _ in mixed_work(40, seed=2)] + [[3]]

    async def both() -> tuple[list[list[float]], Completion, Completion]:
        alone = await sampler.sample(request([1, 2, 3], max_action_tokens=40))
        scores, completion = await asyncio.gather(sampler.score(sequences), sampler.sample(request([1, 2, 3], max_action_tokens=40)))
        return scores, alone, completion

    scores, alone, shared = run_virtual(beside(sampler, both()))
    assert shared.tokens == alone.tokens
    model = plain_model(kind)
    for sequence, ours in zip(sequences, scores, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(model(input_ids=torch.tensor([sequence])).logits[0, :-1].double(), -1)
        expected = expected.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0] if len(sequence) > 1 else torch.zeros(0, dtype=torch.float64)
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), expected, atol=1e-4, rtol=0)


def test_scoring_goes_on_step_by_step_beside_decoding() -> None:
    """Many sequences to score take several turns; the action in progress gets a token in each of them."""
    sampler = make_sampler(max_prefill_tokens=64)
    finished: list[str] = []

    async def scoring() -> None:
        await sampler.score([[1] * 60] * 50)
        finished.append("scores")

    async def sampling() -> None:
        await sampler.sample(request([1, 2], max_action_tokens=20))
        finished.append("action")

    async def both() -> None:
        await asyncio.gather(scoring(), sampling())

    run_virtual(beside(sampler, both()))  # 50 forwards against 20 tokens
    assert finished == ["action", "scores"]


def test_a_long_prompt_does_not_stop_the_decoding_of_others() -> None:
    """80 prompt tokens at 16 a step: those in the middle of an action get a token in every one of these steps."""
    sampler = make_sampler(max_prefill_tokens=16)

    async def both() -> tuple[int, Completion]:
        async with asyncio.TaskGroup() as group:
            decoding = group.create_task(sampler.sample(request([1], group=1, max_action_tokens=60)))
            await turns(5)
            before = sampler.generated_tokens
            long = await sampler.sample(request([2] * 80, group=2, max_action_tokens=1))
            tokens = sampler.generated_tokens - before
            await decoding
        return tokens, long

    tokens, long = run_virtual(beside(sampler, both()))
    assert len(long.tokens) == 1
    assert tokens >= 5
