"""Verification through the sampler: what is kept while drawing, checked beside decoding, and how an action goes on in its middle."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest
import torch

from fakes.sampling import beside, make_sampler, plain_model, request, turns, version_of_each_token
from fakes.tiny_models import VOCABULARY, perturbed, tiny_tokenizer
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.config import Apply, UpdateMode
from headrace.errors import HeadraceError
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, SampleRequest, SamplingParameters, VerifyRequest, VerifyResult

T = TypeVar("T")

OLD, NEW = PolicyVersion(0, 1), PolicyVersion(0, 2)
PROMPT = (1, 2, 3)


def updated_sampler(weights: FakeWeights, **settings: object) -> TransformersSampler:
    sampler = make_sampler(weights=weights, **settings)
    weights.publish(sampler._model.parameters, OLD)
    return sampler


async def update(sampler: TransformersSampler, weights: FakeWeights, scale: float = 0.005) -> None:
    weights.publish(perturbed(dict(weights.history[OLD]), seed=1, scale=scale), NEW)
    sampler.wake()
    await sampler.applied(NEW)


def kept_request(group: int = 1, tokens: Sequence[int] = PROMPT, step: int = 0, max_action_tokens: int = 30, **changes: object) -> SampleRequest:
    made = request(tokens, group=group, step=step, keep=True, max_action_tokens=max_action_tokens)
    return dataclasses.replace(made, keep_distribution=True, **changes)  # type: ignore[arg-type]


def verify_request(tokens: Sequence[int], *checked: tuple[int, int, int], group: int = 1, number: int = 1) -> VerifyRequest:
    return VerifyRequest(key=RolloutKey(group, 0, 0), round=number, seed=0, tokens=tuple(tokens), checked=checked, sampling=SamplingParameters())


async def two_steps(sampler: TransformersSampler, group: int) -> tuple[list[int], list[tuple[int, int, int]], list[float]]:
    tokens, checked, logprobs = list(PROMPT), [], []
    for step in range(2):
        completion = await sampler.sample(kept_request(group, tokens, step, max_action_tokens=12))
        checked.append((step, len(tokens), len(tokens) + 12))
        tokens += [*completion.tokens, 5]
        logprobs += completion.logprobs
    sampler.release(RolloutKey(group, 0, 0))
    return tokens[:-1], checked, logprobs


def plain_logprobs(parameters: dict[str, torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """[T, V]; row t is what token t is drawn from."""
    model = plain_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        logits = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double()
    return torch.log_softmax(torch.cat([logits[:1], logits[:-1]]), -1)


def test_what_was_drawn_stands_under_the_same_weights_and_is_partly_redrawn_under_others() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights)

    async def main() -> None:
        rollouts = await asyncio.gather(*(two_steps(sampler, group) for group in range(12)))
        for group, (tokens, checked, logprobs) in enumerate(rollouts):
            assert sampler.can_verify(RolloutKey(group, 0, 0))
            same = await sampler.verify(verify_request(tokens, *checked, group=group))
            assert same.rejected is None and same.version == OLD
            assert same.logprobs == pytest.approx(logprobs, abs=1e-4)
        await update(sampler, weights)
        before = sampler.generated_tokens
        results = await asyncio.gather(*(sampler.verify(verify_request(t, *c, group=g, number=2)) for g, (t, c, _) in enumerate(rollouts)))
        cut = [result for result in results if result.rejected is not None]
        assert 0 < len(cut) < 12 and sampler.generated_tokens - before == len(cut)
        for (tokens, _, _), result in zip(rollouts, results, strict=True):
            exact = plain_logprobs(weights.history[NEW], tokens)
            standing = [index for span in result.accepted for index in range(span.start, span.end)]
            assert result.version == NEW
            assert list(result.logprobs) == pytest.approx([float(exact[index, tokens[index]]) for index in standing], abs=1e-4)
            if result.rejected is not None:
                assert result.redrawn_token != tokens[result.rejected]
                assert result.redrawn_logprob == pytest.approx(float(exact[result.rejected, result.redrawn_token]), abs=1e-4)
        for group in range(12):
            sampler.forget(RolloutKey(group, 0, 0))
            assert not sampler.can_verify(RolloutKey(group, 0, 0))
        assert sampler._engine.distributions.num_used == 0

    run_virtual(beside(sampler, main()))


def test_an_action_goes_on_after_its_redrawn_token_and_can_be_verified_again() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights)

    async def main() -> None:
        for group in range(20):
            first = await sampler.sample(kept_request(group))
            sampler.release(RolloutKey(group, 0, 0))
            if group == 0:
                await update(sampler, weights)
            start = len(PROMPT)
            result = await sampler.verify(verify_request((*PROMPT, *first.tokens), (0, start, start + 30), group=group))
            if result.rejected is None or result.rejected == start + 29:
                continue
            begun = (*PROMPT, *first.tokens[: result.rejected - start], result.redrawn_token)
            rest = await sampler.sample(kept_request(group, begun, drawn_tokens=len(begun) - start, round=1))
            assert len(begun) + len(rest.tokens) == start + 30  # max_action_tokens counts what the action had
            again = await sampler.verify(verify_request((*begun, *rest.tokens), (0, start, start + 30), group=group, number=2))
            assert again.rejected is None and again.accepted[0].end == start + 30
            return
        raise AssertionError("nothing was cut")

    run_virtual(beside(sampler, main()))


def test_an_action_that_goes_on_takes_its_own_random_numbers_and_looks_back_for_stop_strings() -> None:
    sampler = make_sampler()

    async def main() -> None:
        whole = await sampler.sample(kept_request(1, max_action_tokens=30))
        begun = (*PROMPT, *whole.tokens[:10])
        same_round = await sampler.sample(request(begun, group=1, max_action_tokens=20))
        later_round = await sampler.sample(dataclasses.replace(request(begun, group=1, max_action_tokens=30), drawn_tokens=10, round=1))
        assert len(later_round.tokens) == 20 and later_round.tokens != whole.tokens[10:] != same_round.tokens
        again = await sampler.sample(dataclasses.replace(request(begun, group=1, max_action_tokens=30), drawn_tokens=10, round=1))
        assert again.tokens == later_round.tokens
        text = tiny_tokenizer().decode([*whole.tokens[:10], *later_round.tokens])
        stop = text[8:12]  # begins in what the action had already
        assert text.index(stop) == 8
        ends = dataclasses.replace(request(begun, group=1, max_action_tokens=30, stop_strings=(stop,)), drawn_tokens=10, round=1)
        assert (await sampler.sample(ends)).tokens == later_round.tokens[:2]
        for drawn_tokens in (-1, 13, 30):
            with pytest.raises(HeadraceError, match="of an action of at most"):
                await sampler.sample(dataclasses.replace(request(begun, group=1, max_action_tokens=30), drawn_tokens=drawn_tokens))

    run_virtual(beside(sampler, main()))


def test_what_an_abort_throws_away_or_a_cancelled_request_drew_is_not_kept() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, update_mode=UpdateMode.ABORT)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(sampler.sample(kept_request(1)))
            cancelled = group.create_task(sampler.sample(kept_request(2)))
            await turns(10)
            cancelled.cancel()
            await update(sampler, weights)
        completion = drawing.result()
        assert completion.discarded_tokens > 0
        assert sampler._engine.distributions.num_used == 30
        result = await sampler.verify(verify_request((*PROMPT, *completion.tokens), (0, 3, 33)))
        assert result.rejected is None and result.logprobs == pytest.approx(completion.logprobs, abs=1e-4)

    run_virtual(beside(sampler, main()))


def test_a_rollout_that_does_not_fit_cannot_be_verified_and_changes_no_token() -> None:
    sampler, roomy = make_sampler(verify_memory_bytes=4 * VOCABULARY * 40), make_sampler()

    async def main(engine: TransformersSampler) -> list[Completion]:
        return await asyncio.gather(*(engine.sample(kept_request(group)) for group in range(2)))

    tight, free = run_virtual(beside(sampler, main(sampler))), run_virtual(beside(roomy, main(roomy)))
    assert [completion.tokens for completion in tight] == [completion.tokens for completion in free]
    assert [sampler.can_verify(RolloutKey(group, 0, 0)) for group in range(2)] == [True, False]
    assert sampler._engine.distributions.num_unkept == 1


def test_decoding_goes_on_beside_a_long_queue_of_verifications() -> None:
    sampler = make_sampler()

    async def main() -> None:
        rollouts = await asyncio.gather(*(sampler.sample(kept_request(group, max_action_tokens=60)) for group in range(200)))
        for group in range(200):
            sampler.release(RolloutKey(group, 0, 0))
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(sampler.sample(request([1, 2], group=500, max_action_tokens=20)))
            group.create_task(sampler.sample(request([1, 2], group=501, max_action_tokens=40)))
            checks = [
                group.create_task(sampler.verify(verify_request((*PROMPT, *rollout.tokens), (0, 3, 63), group=number)))
                for number, rollout in enumerate(rollouts)
            ]
            await drawing
            waiting = sum(not check.done() for check in checks)
            assert waiting > 100  # 12,400 tokens, at most 256 beside each of its steps
        assert all(check.result().rejected is None for check in checks)

    run_virtual(beside(sampler, main()))


def test_the_newest_weights_are_taken_up_for_a_verification_where_updates_wait_for_key_steps() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights, apply=Apply.KEY_STEPS, max_apply_delay_seconds=1e9)

    async def main() -> tuple[VerifyResult, Completion]:
        first = await sampler.sample(kept_request(1))
        sampler.release(RolloutKey(1, 0, 0))
        async with asyncio.TaskGroup() as group:
            other = group.create_task(sampler.sample(request([1, 2], group=2, max_action_tokens=80)))
            await turns(5)
            weights.publish(perturbed(dict(weights.history[OLD]), seed=1), NEW)
            await turns(5)
            assert sampler.version == OLD
            result = await sampler.verify(verify_request((*PROMPT, *first.tokens), (0, 3, 33)))
        return result, other.result()

    result, other = run_virtual(beside(sampler, main()))
    assert result.version == NEW
    assert set(version_of_each_token(other)) == {OLD, NEW}


def test_every_verification_is_by_one_version_while_weights_keep_changing() -> None:
    weights = FakeWeights()
    sampler = updated_sampler(weights)

    async def main() -> list[VerifyResult]:
        rollouts = await asyncio.gather(*(sampler.sample(kept_request(group, max_action_tokens=60)) for group in range(20)))
        for group in range(20):
            sampler.release(RolloutKey(group, 0, 0))
        base = dict(weights.history[OLD])

        async def publish() -> None:
            for number in range(2, 30):
                await turns(1)
                weights.publish(perturbed(base, seed=number, scale=0.003), PolicyVersion(0, number))

        async with asyncio.TaskGroup() as group:
            group.create_task(sampler.sample(request([1, 2], group=500, max_action_tokens=80)))  # so that a job takes more than one step
            group.create_task(publish())
            checks = [
                group.create_task(sampler.verify(verify_request((*PROMPT, *rollout.tokens), (0, 3, 63), group=number)))
                for number, rollout in enumerate(rollouts)
            ]
        for rollout, check in zip(rollouts, checks, strict=True):
            exact = plain_logprobs(weights.history[check.result().version], (*PROMPT, *rollout.tokens))
            standing = [index for span in check.result().accepted for index in range(span.start, span.end)]
            assert list(check.result().logprobs) == pytest.approx([float(exact[index, rollout.tokens[index - 3]]) for index in standing], abs=1e-4)
        return [check.result() for check in checks]

    results = run_virtual(beside(sampler, main()))
    assert len({result.version for result in results}) > 3


def test_a_verification_that_is_refused_or_cancelled_leaves_the_sampler_at_work() -> None:
    sampler = make_sampler()

    async def main() -> None:
        first = await sampler.sample(kept_request(1))
        tokens = (*PROMPT, *first.tokens)
        with pytest.raises(HeadraceError, match="not kept"):
            await sampler.verify(verify_request(tokens, (0, 3, 33), group=7))
        with pytest.raises(HeadraceError, match=f"token {VOCABULARY}"):
            await sampler.verify(verify_request((*tokens[:-1], VOCABULARY), (0, 3, 33)))
        checking = asyncio.create_task(sampler.verify(verify_request(tokens, (0, 3, 33))))
        await turns(0)
        checking.cancel()
        await turns(3)
        assert len((await sampler.sample(request([1], group=2, max_action_tokens=5))).tokens) == 5

    run_virtual(beside(sampler, main()))


def test_entropies_are_measured_when_asked_for_and_are_those_of_the_distributions_drawn_from() -> None:
    sampler, silent = make_sampler(measures_entropy=True), make_sampler()
    wanted = request(PROMPT, max_action_tokens=20)
    measured, plain = (run_virtual(beside(each, each.sample(wanted))) for each in (sampler, silent))
    assert plain.entropies is None and measured.tokens == plain.tokens
    exact = plain_logprobs(dict(sampler._model.parameters), (*PROMPT, *measured.tokens))[3:]
    assert measured.entropies == pytest.approx((-(exact.exp() * exact).sum(-1)).tolist(), abs=1e-4)


@pytest.mark.slow
def test_verified_rollouts_of_a_model_are_distributed_as_fresh_ones() -> None:
    """50,000 rollouts of two tokens, drawn by old weights, verified by new ones, gone on where they were cut: chi-square over both tokens."""
    weights = FakeWeights()
    sampler = updated_sampler(weights, max_running=256, kv_memory_bytes=2**28, verify_memory_bytes=2**28)
    number = 50_000

    async def in_portions(work: Callable[[int], Awaitable[T]]) -> list[T]:
        return [each for first in range(0, number, 1000) for each in await asyncio.gather(*map(work, range(first, first + 1000)))]

    async def main() -> list[tuple[int, int]]:
        async def draw(group: int) -> Completion:
            completion = await sampler.sample(kept_request(group, max_action_tokens=2))
            sampler.release(RolloutKey(group, 0, 0))
            return completion

        drawn = await in_portions(draw)
        await update(sampler, weights, scale=0.1)

        async def after(group: int) -> tuple[int, int]:
            tokens = drawn[group].tokens
            result = await sampler.verify(verify_request((*PROMPT, *tokens), (0, 3, 5), group=group))
            if result.rejected is None:
                return tokens[0], tokens[1]
            if result.rejected == 4:
                return tokens[0], result.redrawn_token
            rest = await sampler.sample(kept_request(group, (*PROMPT, result.redrawn_token), max_action_tokens=2, drawn_tokens=1, round=1))
            sampler.release(RolloutKey(group, 0, 0))
            return result.redrawn_token, rest.tokens[0]

        return await in_portions(after)

    pairs = run_virtual(beside(sampler, main()))
    counts = torch.bincount(torch.tensor([first * VOCABULARY + second for first, second in pairs]), minlength=VOCABULARY**2).double()
    for version, same in ((NEW, True), (OLD, False)):
        first = plain_logprobs(weights.history[version], (*PROMPT, 0))[3]
        second = torch.stack([plain_logprobs(weights.history[version], (*PROMPT, token, 0))[4] for token in range(VOCABULARY)])
        expected = (first[:, None] + second).exp().flatten() * number
        rare = expected < 5  # together one cell
        observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
        wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        p_value = float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64), statistic / 2))
        assert (p_value > 1e-3) == same, (version, p_value)
