"""One request: how it ends, how it fails, and that the others do not notice (case 14)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
import torch

from fakes.sampling import beside, make_sampler, request, turns
from fakes.tiny_models import CONTEXT, LETTERS, VOCABULARY, tiny_tokenizer
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.errors import HeadraceError
from headrace.sampler.rows import PromptTooLongError
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest, StopReason


def sample(sampler: TransformersSampler, *requests: SampleRequest) -> list[Completion | BaseException]:
    async def all_of_them() -> list[Completion | BaseException]:
        return await asyncio.gather(*map(sampler.sample, requests), return_exceptions=True)

    return run_virtual(beside(sampler, all_of_them()))


def completion_of(sampler: TransformersSampler, only: SampleRequest) -> Completion:
    (result,) = sample(sampler, only)
    assert isinstance(result, Completion), result
    return result


def test_a_stop_token_ends_the_action_and_belongs_to_it_with_its_logprob() -> None:
    sampler = make_sampler()
    free = completion_of(sampler, request([1, 2], max_action_tokens=40))
    assert free.stop_reason is StopReason.MAX_TOKENS
    stop = free.tokens[20]
    first = free.tokens.index(stop)
    stopped = completion_of(sampler, request([1, 2], max_action_tokens=40, stop_tokens=(stop,)))
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.logprobs == pytest.approx(free.logprobs[: first + 1])
    assert stopped.stop_reason is StopReason.STOP


def test_a_stop_string_across_tokens_ends_the_action_at_its_last_letter() -> None:
    sampler = make_sampler()
    free = completion_of(sampler, request([1, 2], max_action_tokens=40))
    text = tiny_tokenizer().decode(list(free.tokens))
    stop = text[21:24]
    end = text.index(stop) + 3
    stopped = completion_of(sampler, request([1, 2], max_action_tokens=40, stop_strings=("<never>", stop)))
    assert stopped.tokens == free.tokens[: len(tiny_tokenizer().encode(text[:end]))]
    assert stopped.stop_reason is StopReason.STOP


def test_the_context_is_used_to_its_last_token() -> None:
    result = completion_of(make_sampler(), request([1] * 10, max_action_tokens=1000))
    assert len(result.tokens) == CONTEXT - 10
    assert result.stop_reason is StopReason.CONTEXT


def test_a_prompt_longer_than_the_context_fails_alone_and_names_the_limit() -> None:
    sampler = make_sampler()
    good, bad, longest = sample(sampler, request([1, 2], group=1, max_action_tokens=9), request([1] * CONTEXT, group=2), request([1] * (CONTEXT - 1), group=3))
    assert isinstance(good, Completion) and len(good.tokens) == 9
    assert isinstance(bad, PromptTooLongError) and str(CONTEXT) in str(bad)
    assert isinstance(longest, Completion) and len(longest.tokens) == 1


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request([]), "empty"),
        (request([1, VOCABULARY]), f"token {VOCABULARY}"),
        (request([-1]), "token -1"),
        (request([1], temperature=-1.0), "temperature"),
        (request([1], temperature=float("nan")), "temperature"),
        (request([1], top_p=0.0), "top_p"),
        (request([1], max_action_tokens=0), "max_action_tokens"),
    ],
)
def test_a_request_that_makes_no_sense_fails_alone_with_a_message(bad: SampleRequest, says: str) -> None:
    good, failed = sample(make_sampler(), request([1, 2], group=1, max_action_tokens=3), bad)
    assert isinstance(good, Completion)
    assert isinstance(failed, HeadraceError) and says in str(failed)


def test_a_tokenizer_that_raises_fails_only_the_request_that_needed_it() -> None:
    class Broken:
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [LETTERS.index(letter) for letter in text]

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            raise RuntimeError("broken tokenizer")

    sampler = make_sampler(tokenizer=Broken())
    good, bad = sample(sampler, request([1], group=1, max_action_tokens=9), request([1], group=2, max_action_tokens=9, stop_strings=("a",)))
    assert isinstance(good, Completion) and len(good.tokens) == 9
    assert isinstance(bad, RuntimeError)


def test_weights_that_are_not_finite_fail_requests_with_a_message_and_leave_nothing_behind_in_the_cache() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, kv_memory_bytes=2**17)
    parameters = {name: tensor.clone() for name, tensor in sampler._model.parameters.items()}
    reference = completion_of(sampler, request([1, 2, 3], max_action_tokens=8))
    weights.publish({name: torch.full_like(tensor, float("nan")) for name, tensor in parameters.items()}, PolicyVersion(0, 1))
    results = sample(sampler, *(request([1] * 20, group=group, max_action_tokens=5) for group in range(sampler.num_slots)))
    assert all(isinstance(result, HeadraceError) and "not finite" in str(result) and "weights 1" in str(result) for result in results)
    weights.publish(parameters, PolicyVersion(0, 2))
    for group in range(sampler.num_slots):
        again = completion_of(sampler, request([1, 2, 3], max_action_tokens=8))
        assert again.tokens == reference.tokens, group
        assert again.logprobs == pytest.approx(reference.logprobs, abs=1e-5)


def test_a_cancelled_request_gives_its_slots_back() -> None:
    sampler = make_sampler(max_running=2, kv_memory_bytes=2**17)

    async def main() -> Completion:
        hopeless = [asyncio.ensure_future(sampler.sample(request([1], group=g, max_action_tokens=90, keep=True))) for g in range(8)]
        await turns(4)
        for task in hopeless:
            task.cancel()
        await asyncio.gather(*hopeless, return_exceptions=True)
        assert sampler.num_running == 0
        return await sampler.sample(request([1], group=9, max_action_tokens=3))

    assert len(run_virtual(beside(sampler, main())).tokens) == 3
    assert sampler._engine.slots.num_free == sampler.num_slots


def test_when_the_sampler_ends_nobody_is_left_waiting() -> None:
    sampler = make_sampler()

    async def main() -> list[BaseException | Completion]:
        running = asyncio.ensure_future(sampler.run(lambda: "admission"))
        waiting = [asyncio.ensure_future(sampler.sample(request([1], group=g, max_action_tokens=90))) for g in range(3)]
        scoring = asyncio.ensure_future(sampler.score([[1] * 90] * 500))
        await turns(4)
        running.cancel()
        return await asyncio.gather(*waiting, scoring, running, return_exceptions=True)

    assert all(isinstance(result, asyncio.CancelledError) for result in run_virtual(main()))


def test_generated_tokens_count_what_was_drawn() -> None:
    sampler = make_sampler()
    sample(sampler, request([1], group=1, max_action_tokens=5), request([2], group=2, max_action_tokens=7))
    assert sampler.generated_tokens == 12


def test_tokens_of_evaluations_are_kept_apart_from_generated_ones() -> None:
    sampler = make_sampler()
    sample(sampler, request([1], group=1, max_action_tokens=5), dataclasses.replace(request([2], group=2, max_action_tokens=7), evaluation=True))
    assert sampler.generated_tokens == 5
    assert sampler.take_activity().sampled_tokens == 12


def test_release_states_the_tokens_that_a_cancelled_action_had_drawn() -> None:
    sampler = make_sampler()

    async def main() -> tuple[int, int]:
        task = asyncio.ensure_future(sampler.sample(request([1], group=1, max_action_tokens=90)))
        await turns(9)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sampler.release(RolloutKey(1, 0, 0)), sampler.release(RolloutKey(1, 0, 0))

    lost, again = run_virtual(beside(sampler, main()))
    assert lost == sampler.generated_tokens > 0
    assert again == 0
