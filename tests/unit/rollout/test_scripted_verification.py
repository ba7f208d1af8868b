"""The scripted sampler verifies what it drew, as its script says, and refuses what roles.Sampler forbids."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from fakes.rollouts import ScriptedSampler, ScriptedWeights
from fakes.verification import ContractViolation
from headrace.clock import run_virtual
from headrace.errors import HeadraceError
from headrace.types import PolicyVersion, RolloutKey, SampleRequest, SamplingParameters, VerifyRequest

KEY = RolloutKey(1, 0, 0)


def first_request(**changes: object) -> SampleRequest:
    request = SampleRequest(
        key=KEY, step=0, seed=0, tokens=(1, 2), sampling=SamplingParameters(max_action_tokens=9, stop_tokens=(0,)), keep_distribution=True, keep_cache=True
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def verify_request(tokens: tuple[int, ...], *checked: tuple[int, int, int], number: int = 1) -> VerifyRequest:
    return VerifyRequest(key=KEY, round=number, seed=0, tokens=tokens, checked=checked, sampling=SamplingParameters(max_action_tokens=9))


def beside(sampler: ScriptedSampler, main: Callable[[], Awaitable[None]]) -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sampler.run(lambda: "admission"))
            await main()
            running.cancel()

    run_virtual(both())


def test_without_a_script_every_checked_token_stands_under_the_newest_version() -> None:
    weights = ScriptedWeights()
    sampler = ScriptedSampler(weights=weights, action_tokens=lambda request: 4)

    async def main() -> None:
        first = await sampler.sample(first_request())
        sampler.release(KEY)
        sampler.wake()
        update = weights.publish(3)
        await sampler.applied(update.version)
        result = await sampler.verify(verify_request((1, 2, *first.tokens), (0, 2, 6)))
        assert result.rejected is None
        assert [(span.start, span.end, span.version) for span in result.accepted] == [(2, 6, PolicyVersion(0, 3))]
        assert len(result.logprobs) == 4
        assert sampler.generated_tokens == 4

    beside(sampler, main)


def test_a_rejected_rollout_goes_on_after_its_redrawn_token_in_the_next_round() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 4, reject=lambda request: 4 if request.round == 1 else None)

    async def main() -> None:
        first = await sampler.sample(first_request())
        sampler.release(KEY)
        result = await sampler.verify(verify_request((1, 2, *first.tokens), (0, 2, 6)))
        assert result.rejected == 4 and result.redrawn_token not in (first.tokens[2], -1)
        assert sampler.generated_tokens == 5
        begun = (1, 2, *first.tokens[:2], result.redrawn_token)
        rest = await sampler.sample(first_request(tokens=begun, drawn_tokens=3, round=1))
        assert len(rest.tokens) == 1
        sampler.release(KEY)
        again = await sampler.verify(verify_request((*begun, *rest.tokens), (0, 2, 6), number=2))
        assert again.rejected is None

    beside(sampler, main)


def test_wrong_use_of_verification_is_a_contract_violation() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 4)

    async def main() -> None:
        first = await sampler.sample(first_request())
        tokens = (1, 2, *first.tokens)
        with pytest.raises(ContractViolation, match="before its rollout has ended"):
            await sampler.verify(verify_request(tokens, (0, 2, 6)))
        sampler.release(KEY)
        with pytest.raises(ContractViolation, match="in round 2 after 0"):
            await sampler.verify(verify_request(tokens, (0, 2, 6), number=2))
        with pytest.raises(ContractViolation, match="not the ones"):
            await sampler.verify(verify_request((1, 2, 3, 3, 3, 3), (0, 2, 6)))
        sampler.forget(KEY)
        with pytest.raises(ContractViolation, match="forgotten"):
            await sampler.verify(verify_request(tokens, (0, 2, 6)))

    beside(sampler, main)


def test_what_did_not_fit_cannot_be_verified_and_says_so() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 4, can_keep=lambda key: False)

    async def main() -> None:
        first = await sampler.sample(first_request())
        sampler.release(KEY)
        assert not sampler.can_verify(KEY)
        with pytest.raises(HeadraceError, match="not kept"):
            await sampler.verify(verify_request((1, 2, *first.tokens), (0, 2, 6)))

    beside(sampler, main)


def test_a_parked_action_waits_and_is_named_until_it_is_unparked() -> None:
    sampler = ScriptedSampler(action_tokens=lambda request: 4, seconds_per_token=1.0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(sampler.sample(first_request()))
            await asyncio.sleep(1.5)
            sampler.park(KEY)
            assert sampler.parked == (KEY,) and sampler.num_running == 1
            await asyncio.sleep(10)
            assert not drawing.done()
            sampler.unpark(KEY)
        assert sampler.parked == () and len(drawing.result().tokens) == 4

    beside(sampler, main)
