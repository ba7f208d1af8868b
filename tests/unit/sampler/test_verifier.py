"""The queue of rollouts to verify, over a served model and without a loop: what it reads, replaces, counts and refuses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fakes.sampling import plain_model, request
from fakes.tiny_models import CONTEXT, VOCABULARY, perturbed, tiny_model
from headrace.errors import HeadraceError
from headrace.sampler.distributions import DistributionStore
from headrace.sampler.model import ServedModel
from headrace.sampler.sampling import stream_key, uniforms
from headrace.sampler.verification import ACCEPT, REDRAW, Verifier, accepts, budget_beside, redraw
from headrace.types import PolicyVersion, RolloutKey, SamplingParameters, VerifyRequest, VerifyResult, VersionSpan

NEW = PolicyVersion(0, 7)
KEY = RolloutKey(1, 0, 0)
TOKENS = tuple(int(token) for token in torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(3)))
CHECKED = ((0, 4, 9), (1, 12, 20), (2, 25, 40))


def make_verifier(num_rows: int = 10_000, kv_memory_bytes: int = 2**26) -> tuple[Verifier, DistributionStore, ServedModel]:
    model = ServedModel(str(tiny_model("qwen2")), max_context_tokens=CONTEXT, device="cpu", dtype="float32")
    store = DistributionStore(VOCABULARY, memory_bytes=4 * VOCABULARY * num_rows, device=torch.device("cpu"))
    return Verifier(model, store, max_context_tokens=CONTEXT, kv_memory_bytes=kv_memory_bytes), store, model


def fill(store: DistributionStore, logprobs_TV: torch.Tensor, checked: Sequence[tuple[int, int, int]] = CHECKED, key: RolloutKey = KEY) -> None:
    """Keeps rows [start, end) of these as what the tokens were drawn from."""
    for step, start, end in checked:
        store.begin(dataclasses.replace(request([1], group=key.group_id, member=key.member, step=step), keep_distribution=True))
        store.add([(key, step)] * (end - start), logprobs_TV[start:end])


def plain_logprobs(tokens: Sequence[int] = TOKENS, temperature: float = 1.0, change: Callable[[Any], None] = lambda model: None) -> torch.Tensor:
    """[T, V]; row t is what token t is drawn from, by transformers; row 0 means nothing."""
    model = plain_model()
    change(model)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double()
    return torch.log_softmax(torch.cat([logits[:1], logits[:-1]]) / temperature, -1)


def verify(verifier: Verifier, *requests: VerifyRequest, budget: int = 10_000) -> list[VerifyResult | BaseException]:
    async def main() -> list[VerifyResult | BaseException]:
        futures = []
        for each in requests:
            futures.append(asyncio.get_running_loop().create_future())
            verifier.add(each, futures[-1])
        while verifier.has_work:
            assert verifier.step(NEW, budget) > 0
        return await asyncio.gather(*futures, return_exceptions=True)

    return asyncio.run(main())


def chi_square_p_value(counts: Sequence[int], probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * sum(counts)
    statistic = ((torch.tensor(counts).double() - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def wanted(**changes: Any) -> VerifyRequest:
    base = VerifyRequest(key=KEY, round=1, seed=5, tokens=TOKENS, checked=CHECKED, sampling=SamplingParameters())
    return dataclasses.replace(base, **changes)


def expected_result(old_TV: torch.Tensor, new_TV: torch.Tensor, asked: VerifyRequest) -> VerifyResult:
    """The rule token by token, as a person would write it down."""
    spans: list[VersionSpan] = []
    logprobs: list[float] = []
    for step, start, end in asked.checked:
        for token in range(start, end):
            new, old = (table[token, asked.tokens[token]][None] for table in (new_TV, old_TV))
            accept, again = (uniforms([stream_key(asked.seed, asked.key, step, asked.round, purpose)], [token - start]) for purpose in (ACCEPT, REDRAW))
            if not accepts(new, old, accept, asked.lenience)[0]:
                redrawn = int(redraw(new_TV[token][None], old_TV[token][None], again))
                return VerifyResult(
                    version=NEW,
                    accepted=tuple(spans),
                    logprobs=tuple(logprobs),
                    rejected=token,
                    redrawn_token=redrawn,
                    redrawn_logprob=float(new_TV[token, redrawn]),
                )
            if spans and spans[-1].end == token:
                spans[-1] = VersionSpan(version=NEW, start=spans[-1].start, end=token + 1)
            else:
                spans.append(VersionSpan(version=NEW, start=token, end=token + 1))
            logprobs.append(float(new))
    return VerifyResult(version=NEW, accepted=tuple(spans), logprobs=tuple(logprobs))


def assert_same(result: VerifyResult | BaseException, expected: VerifyResult) -> None:
    assert isinstance(result, VerifyResult), result
    assert dataclasses.replace(result, logprobs=(), redrawn_logprob=0.0) == dataclasses.replace(expected, logprobs=(), redrawn_logprob=0.0)
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert result.redrawn_logprob == pytest.approx(expected.redrawn_logprob, abs=1e-4)


@pytest.mark.parametrize("budget", [10_000, 16, 7])
@pytest.mark.parametrize("scale", [0.0, 0.05, 0.5])
def test_a_rollout_is_judged_token_by_token_whatever_the_budget_of_a_step(scale: float, budget: int) -> None:
    verifier, store, _ = make_verifier()
    new_TV = plain_logprobs()
    for seed in range(6):
        noise = scale * torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        old_TV = torch.log_softmax(new_TV + noise, -1)
        fill(store, old_TV)
        asked = wanted(seed=seed)
        expected = expected_result(old_TV.float().double(), new_TV, asked)
        assert (expected.rejected is None) == (scale == 0.0) or scale == 0.05
        assert_same(verify(verifier, asked, budget=budget)[0], expected)
        store.forget(KEY)
    assert (verifier.num_verified, store.num_used) == (6, 0)


def test_many_rollouts_are_verified_in_one_forward_each_as_if_alone() -> None:
    verifier, store, _ = make_verifier()
    new_TV = plain_logprobs()
    asked, expected = [], []
    for member in range(70):  # more than there are slots
        key, noise = RolloutKey(1, member, 0), 0.1 * torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(member), dtype=torch.float64)
        checked = CHECKED[: 1 + member % 3]
        old_TV = torch.log_softmax(new_TV + noise, -1)
        fill(store, old_TV, checked, key)
        asked.append(wanted(key=key, checked=checked))
        expected.append(expected_result(old_TV.float().double(), new_TV, asked[-1]))
    for result, right in zip(verify(verifier, *asked), expected, strict=True):
        assert_same(result, right)
    assert 0 < verifier.num_cut == verifier.redrawn_tokens < 70
    assert verifier.accepted_tokens == sum(len(right.logprobs) for right in expected)


def test_accepted_tokens_are_kept_with_the_distribution_that_accepted_them_and_what_was_cut_is_dropped() -> None:
    verifier, store, _ = make_verifier()
    new_TV = plain_logprobs()
    old_TV = new_TV.clone()
    rejected = 15
    old_TV[rejected] = -30.0
    old_TV[rejected, TOKENS[rejected]] = 0.0  # drawn from a distribution that could give nothing else
    fill(store, old_TV)
    (result,) = verify(verifier, wanted())
    assert isinstance(result, VerifyResult) and result.rejected == rejected
    assert [(span.start, span.end) for span in result.accepted] == [(4, 9), (12, 15)]
    rows = store.rows_of(KEY, 0) + store.rows_of(KEY, 1)
    assert len(rows) == 5 + 4 == store.num_used and store.rows_of(KEY, 2) == []
    assert torch.allclose(store.read(rows), new_TV[[*range(4, 9), *range(12, 16)]], atol=1e-4)
    assert store.can_verify(KEY)


def test_each_action_is_checked_after_its_own_context_where_the_policy_saw_only_that() -> None:
    verifier, store, _ = make_verifier()
    starts = (0, 9, 20)
    new_TV = plain_logprobs()
    for start, (_, first, end) in zip(starts, CHECKED, strict=True):
        new_TV[first:end] = plain_logprobs(TOKENS[start:end])[first - start :]
    assert not torch.allclose(new_TV, plain_logprobs())
    old_TV = torch.log_softmax(new_TV + 0.05 * torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64), -1)
    for budget in (10_000, 8):
        fill(store, old_TV)
        asked = wanted(context_starts=starts)
        assert_same(verify(verifier, asked, budget=budget)[0], expected_result(old_TV.float().double(), new_TV, asked))
        store.forget(KEY)


def test_the_temperature_of_the_request_is_part_of_the_distribution() -> None:
    verifier, store, _ = make_verifier()
    fill(store, plain_logprobs(temperature=0.5))
    (result,) = verify(verifier, wanted(sampling=SamplingParameters(temperature=0.5)))
    assert isinstance(result, VerifyResult) and result.rejected is None
    assert result.logprobs[0] == pytest.approx(float(plain_logprobs(temperature=0.5)[4, TOKENS[4]]), abs=1e-4)


def test_rounds_and_purposes_have_random_numbers_of_their_own() -> None:
    streams = [stream_key(0, KEY, 1, *more) for more in ((), *((number, purpose) for number in (1, 2, 3) for purpose in (0, ACCEPT, REDRAW)))]
    assert len(set(streams)) == len(streams)
    drawn = np.array([uniforms([stream] * 50, range(50)) for stream in streams])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"key": RolloutKey(9, 9, 9)}, "not kept"),
        ({"checked": ()}, "0 actions"),
        ({"checked": ((0, 4, 8),)}, "4 tokens, 5"),
        ({"checked": ((1, 12, 20), (0, 4, 9))}, "not in order"),
        ({"checked": ((2, 25, 41),)}, "cannot be checked"),
        ({"context_starts": (0,)}, "3 actions to check with 1"),
        ({"sampling": SamplingParameters(temperature=0.0)}, "whole distribution"),
        ({"lenience": 0.5}, "lenience"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone_and_says_why(changes: dict[str, Any], says: str) -> None:
    verifier, store, _ = make_verifier()
    fill(store, plain_logprobs())
    with pytest.raises(HeadraceError, match=says):
        verify(verifier, wanted(**changes))
    assert not verifier.has_work and store.num_used == 28


def test_weights_that_give_no_finite_logit_fail_the_request_and_its_rollout_is_verified_no_more() -> None:
    verifier, store, model = make_verifier()
    fill(store, plain_logprobs())
    for parameter in model.parameters.values():
        parameter.fill_(float("nan"))
    (result,) = verify(verifier, wanted())
    assert isinstance(result, HeadraceError) and "not finite" in str(result)
    assert not store.can_verify(KEY) and store.num_used == 0


def test_a_cancelled_verification_that_had_begun_gives_its_rollout_up_and_one_that_had_not_does_not() -> None:
    verifier, store, _ = make_verifier()
    other = RolloutKey(2, 0, 0)
    fill(store, plain_logprobs())
    fill(store, plain_logprobs(), key=other)

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        verifier.add(wanted(), futures[0])
        verifier.add(wanted(key=other), futures[1])
        verifier.step(NEW, 10)
        assert verifier.half_done
        for future in futures:
            future.cancel()
        verifier.drop(KEY)
        verifier.drop(other)
        verifier.drop(RolloutKey(3, 0, 0))
        assert verifier.step(NEW, 10) == 0
        assert not verifier.has_work and not verifier.half_done

    asyncio.run(main())
    assert not store.can_verify(KEY) and store.can_verify(other)
    assert_same(verify(verifier, wanted(key=other))[0], expected_result(plain_logprobs(), plain_logprobs(), wanted(key=other)))


def test_no_rollout_is_begun_while_new_weights_wait_for_the_half_done_one() -> None:
    verifier, store, model = make_verifier()
    other = RolloutKey(2, 0, 0)
    fill(store, plain_logprobs())
    fill(store, plain_logprobs(), key=other)

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
        verifier.add(wanted(), futures[0])
        verifier.add(wanted(key=other), futures[1])
        verifier.step(NEW, 10)
        verifier.closing = True
        while verifier.half_done:
            verifier.step(NEW, 10)
        assert futures[0].done() and not futures[1].done() and verifier.has_work
        assert verifier.step(NEW, 10) == 0
        for name, tensor in perturbed(model.parameters, seed=1).items():
            model.parameters[name].copy_(tensor)
        verifier.closing = False
        while verifier.has_work:
            verifier.step(PolicyVersion(0, 8), 10)
        assert futures[1].result().version == PolicyVersion(0, 8)

    asyncio.run(main())


def test_beside_a_decode_step_only_so_many_tokens_are_verified_and_alone_as_many_as_a_prompt_may_have() -> None:
    assert budget_beside(0, 4096) == 4096
    assert budget_beside(100, 4096) == 400
    assert budget_beside(1, 4096) == 256
    assert budget_beside(500, 1000) == 1000


@pytest.mark.parametrize("budget", [10_000, 7])
def test_random_cuts_cut_the_rollouts_that_the_rule_would_cut_at_uniform_places_with_draws_of_the_new_weights(budget: int) -> None:
    verifier, store, _ = make_verifier(num_rows=40_000)
    new_TV = plain_logprobs()
    places = [token for _, start, end in CHECKED for token in range(start, end)]
    asked = [wanted(key=RolloutKey(group, 0, 0)) for group in range(400 if budget > 7 else 8)]
    noise = 0.06 * torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old_TV = torch.log_softmax(new_TV + noise, -1)
    by_rule, at_random = [], []
    for random_cuts, results in ((False, by_rule), (True, at_random)):
        for first in range(0, len(asked), 200):
            part = [dataclasses.replace(one, random_cuts=random_cuts) for one in asked[first : first + 200]]
            for one in part:
                fill(store, old_TV, key=one.key)
            results.extend(verify(verifier, *part, budget=budget))
            for one in part:
                store.forget(one.key)
    cut = 0
    counts = [0] * len(places)
    for rule, control in zip(by_rule, at_random, strict=True):
        assert isinstance(rule, VerifyResult) and isinstance(control, VerifyResult)
        assert (control.rejected is None) == (rule.rejected is None)
        stands = [token for span in control.accepted for token in range(span.start, span.end)]
        assert stands == (places if control.rejected is None else [token for token in places if token < control.rejected])
        assert control.logprobs == pytest.approx([float(new_TV[token, TOKENS[token]]) for token in stands], abs=1e-4)
        if control.rejected is not None:
            cut += 1
            counts[places.index(control.rejected)] += 1
            assert control.redrawn_logprob == pytest.approx(float(new_TV[control.rejected, control.redrawn_token]), abs=1e-4)
    assert 0 < cut < len(asked)
    assert verifier.num_verified == 2 * len(asked) and verifier.num_cut == verifier.redrawn_tokens == 2 * cut
    assert verifier.accepted_tokens == sum(len(result.logprobs) for result in (*by_rule, *at_random) if isinstance(result, VerifyResult))
    if budget > 7:
        assert chi_square_p_value(counts, torch.full((len(places),), 1 / len(places))) > 1e-3


@pytest.mark.parametrize("random_cuts", [False, True])
def test_what_stands_is_distributed_as_new_draws_by_the_rule_and_not_with_random_cuts(random_cuts: bool) -> None:
    """One token of every rollout, drawn by old weights: chi-square against the new ones."""
    verifier, store, _ = make_verifier()
    new_TV = plain_logprobs(TOKENS[:5])
    noise = torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    old_TV = torch.log_softmax(new_TV + noise, -1)
    drawn = torch.multinomial(old_TV[4].exp(), 1000, replacement=True, generator=torch.Generator().manual_seed(3)).tolist()
    counts = [0] * VOCABULARY
    asked = []
    for group, token in enumerate(drawn):
        asked.append(wanted(key=RolloutKey(group, 0, 0), tokens=(*TOKENS[:4], token), checked=((0, 4, 5),), random_cuts=random_cuts))
        fill(store, old_TV, asked[-1].checked, asked[-1].key)
    for token, result in zip(drawn, verify(verifier, *asked), strict=True):
        assert isinstance(result, VerifyResult)
        counts[token if result.rejected is None else result.redrawn_token] += 1
    p_value = chi_square_p_value(counts, new_TV[4].exp())
    assert p_value < 1e-6 if random_cuts else p_value > 1e-3


def test_the_kept_distributions_end_at_the_random_cut() -> None:
    verifier, store, _ = make_verifier()
    new_TV = plain_logprobs()
    fill(store, torch.log_softmax(new_TV + torch.randn(new_TV.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64), -1))
    result = verify(verifier, wanted(random_cuts=True))[0]
    assert isinstance(result, VerifyResult) and result.rejected is not None
    kept = [row for step, _, _ in CHECKED for row in store.rows_of(KEY, step)]
    assert len(kept) == store.num_used == len(result.logprobs) + 1
    assert torch.allclose(store.read(kept), new_TV[[token for _, start, end in CHECKED for token in range(start, end) if token <= result.rejected]], atol=1e-4)
