"""Weights change while actions are drawn: every token belongs to exactly one version and states the truth about it.

I1, I2, I3 and cases 10 and 11 on the real engine. The reference is independent of it: plain transformers forward and
DynamicCache, one sequence at a time, with the weights and the keys and values that the recorded version spans say.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fakes.sampling import Replay, beside, make_sampler, request, turns, version_of_each_token
from fakes.tiny_models import SERVED, VOCABULARY, perturbed
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.config import UpdateMode
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, check_spans

NUM_UPDATES = 20
NUM_REQUESTS = 24


class Updates:
    """Publishes 20 unlike sets of weights while the sampler decodes."""

    def __init__(self, sampler: TransformersSampler, weights: FakeWeights) -> None:
        self.base = {name: tensor.clone() for name, tensor in sampler._model.parameters.items()}
        self.weights = weights
        self.history = weights.history
        self.history[PolicyVersion(0, 0)] = self.base

    async def publish(self, number: int = NUM_UPDATES, every: int = 2) -> None:
        for update in range(1, number + 1):
            await turns(every)
            self.weights.publish(perturbed(self.base, update), PolicyVersion(0, update))


async def rollout(sampler: TransformersSampler, group: int, num_steps: int) -> list[tuple[list[int], Completion]]:
    chooser = random.Random(group)
    await turns(chooser.randint(0, 20))
    context = [chooser.randrange(VOCABULARY) for _ in range(chooser.choice((1, 3, 12, 25)))]
    steps = []
    for step in range(num_steps):
        completion = await sampler.sample(request(context, group=group, step=step, keep=num_steps > 1, max_action_tokens=chooser.randint(1, 12)))
        steps.append((list(context), completion))
        context += [*completion.tokens, *(chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 3)))]
        await turns(chooser.randint(0, 6))
    sampler.release(RolloutKey(group, 0, 0))
    return steps


def run_with_updates(kind: str = "qwen2", **settings: Any) -> tuple[Updates, list[list[tuple[list[int], Completion]]], TransformersSampler]:
    weights = FakeWeights()
    sampler = make_sampler(kind, weights=weights, max_running=16, **settings)
    updates = Updates(sampler, weights)

    async def main() -> list[list[tuple[list[int], Completion]]]:
        async with asyncio.TaskGroup() as group:
            group.create_task(updates.publish())
            tasks = [group.create_task(rollout(sampler, index, num_steps=1 + index % 4)) for index in range(NUM_REQUESTS)]
        return [task.result() for task in tasks]

    rollouts = run_virtual(beside(sampler, main()))
    assert weights.loads == sorted(set(weights.loads))  # I1: what a sampler holds only rises
    return updates, rollouts, sampler


def check_records(rollouts: list[list[tuple[list[int], Completion]]]) -> None:
    """I2, I3: spans tile, versions never fall (along the rollout too), one finite log-probability <= 0 a token."""
    for steps in rollouts:
        versions = [version for _, completion in steps for version in version_of_each_token(completion)]
        assert versions == sorted(versions)
        for _, completion in steps:
            check_spans(completion.version_spans, 0, len(completion.tokens))
            assert len(completion.logprobs) == len(completion.tokens)
            assert all(-1e9 < logprob <= 0 for logprob in completion.logprobs)


@pytest.mark.parametrize(("kind", "recompute"), [*((kind, False) for kind in SERVED), ("qwen2", True), ("gemma2", True)])
def test_with_20_updates_in_flight_each_logprob_is_that_of_the_weights_and_cache_that_drew_the_token(kind: str, recompute: bool) -> None:
    updates, rollouts, sampler = run_with_updates(kind, recompute_kv=recompute)
    check_records(rollouts)
    assert len(updates.weights.loads) == NUM_UPDATES
    spans = sum(len(completion.version_spans) for steps in rollouts for _, completion in steps)
    assert spans > 2 * sum(map(len, rollouts)), "updates must fall into the middle of actions"
    replay, opposite_differs = Replay(kind, updates.history), 0
    for steps in rollouts:
        cache, cached = (None, 0) if recompute else (DynamicCache(), 0)
        for context, completion in steps:
            expected, cached = replay.logprobs(context, completion, cache=cache, cached=cached)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            if len(completion.version_spans) > 1:
                other, _ = replay.logprobs(context, completion, cache=DynamicCache() if recompute else None)
                opposite_differs += max(abs(a - b) for a, b in zip(other, completion.logprobs, strict=True)) > 1e-3
    assert opposite_differs > 10, "a cache of older weights and a recomputed one must be told apart here"
    assert sampler._engine.slots.num_free == sampler.num_slots


def test_spans_are_exact_a_shift_by_one_token_would_be_seen() -> None:
    updates, rollouts, _ = run_with_updates()
    replay, seen = Replay("qwen2", updates.history), 0
    for steps in rollouts:
        context, completion = steps[0]
        if len(completion.version_spans) < 2:
            continue
        first, second = completion.version_spans[:2]
        shifted = Completion(
            tokens=completion.tokens[: first.end + 1],
            logprobs=completion.logprobs[: first.end + 1],
            version_spans=(type(first)(version=first.version, start=0, end=first.end + 1),),
            stop_reason=completion.stop_reason,
        )
        assert second.version > first.version
        expected, _ = replay.logprobs(context, shifted, cache=DynamicCache())
        seen += abs(expected[-1] - completion.logprobs[first.end]) > 1e-3
    assert seen >= 5


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_wait_and_abort_draw_each_action_by_one_version_and_read_no_older_cache(mode: str) -> None:
    updates, rollouts, sampler = run_with_updates(update_mode=UpdateMode(mode))
    check_records(rollouts)
    replay = Replay("qwen2", updates.history)
    discarded = 0
    for steps in rollouts:
        for context, completion in steps:
            assert len(completion.version_spans) == 1
            expected, _ = replay.logprobs(context, completion, cache=None)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            discarded += completion.discarded_tokens
    drawn = sum(len(completion.tokens) for steps in rollouts for _, completion in steps)
    assert sampler.generated_tokens == drawn + discarded
    assert (discarded > 0) == (mode == "abort")
    assert len(updates.weights.loads) >= 4


def test_wait_starts_no_action_until_the_running_ones_are_done_and_then_applies() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, update_mode=UpdateMode.WAIT)
    updates = Updates(sampler, weights)

    async def main() -> tuple[Completion, Completion]:
        async with asyncio.TaskGroup() as group:
            old = group.create_task(sampler.sample(request([1], group=1, max_action_tokens=30)))
            await turns(4)
            weights.publish(perturbed(updates.base, 1), PolicyVersion(0, 1))
            await turns(2)
            new = group.create_task(sampler.sample(request([1], group=2, max_action_tokens=2)))
            await turns(10)
            assert not new.done() and not old.done()
        return old.result(), new.result()

    old, new = run_virtual(beside(sampler, main()))
    assert {span.version.number for span in old.version_spans} == {0}
    assert {span.version.number for span in new.version_spans} == {1}


def test_an_aborted_action_is_drawn_again_from_the_same_random_numbers() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, update_mode=UpdateMode.ABORT)
    updates = Updates(sampler, weights)

    async def main() -> tuple[Completion, Completion]:
        undisturbed = await sampler.sample(request([1], max_action_tokens=20))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(sampler.sample(request([1], max_action_tokens=20)))
            await turns(8)
            weights.publish(updates.base, PolicyVersion(0, 1))  # the same weights under a new name
        return undisturbed, task.result()

    undisturbed, aborted = run_virtual(beside(sampler, main()))
    assert aborted.tokens == undisturbed.tokens
    assert aborted.discarded_tokens > 0
    assert undisturbed.discarded_tokens == 0


def test_an_update_is_taken_up_without_traffic_once_announced() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights)
    updates = Updates(sampler, weights)

    async def main() -> PolicyVersion:
        await turns(3)
        weights.publish(updates.base, PolicyVersion(0, 4))
        sampler.wake()
        await turns(3)
        return sampler.version

    assert run_virtual(beside(sampler, main())) == PolicyVersion(0, 4)


def test_held_weights_stay_until_they_are_let_go() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights)
    updates = Updates(sampler, weights)

    async def main() -> list[PolicyVersion]:
        seen = []
        sampler.hold_weights(True)
        weights.publish(updates.base, PolicyVersion(0, 1))
        sampler.wake()
        completion = await sampler.sample(request([1], max_action_tokens=5))
        seen.append(completion.version_spans[0].version)
        sampler.hold_weights(False)
        await turns(3)
        seen.append(sampler.version)
        return seen

    assert run_virtual(beside(sampler, main())) == [PolicyVersion(0, 0), PolicyVersion(0, 1)]


def test_a_later_lineage_is_newer_whatever_its_number_and_an_older_one_is_never_loaded() -> None:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights)
    updates = Updates(sampler, weights)

    async def main() -> list[PolicyVersion]:
        seen = []
        for version in (PolicyVersion(0, 0), PolicyVersion(0, 9), PolicyVersion(1, 3)):
            weights.publish(updates.base, version)
            sampler.wake()
            await turns(3)
            seen.append(sampler.version)
        return seen

    assert run_virtual(beside(sampler, main())) == [PolicyVersion(0, 0), PolicyVersion(0, 9), PolicyVersion(1, 3)]
    assert weights.loads == [PolicyVersion(0, 0), PolicyVersion(0, 9), PolicyVersion(1, 3)]


def test_recomputing_caches_makes_progress_under_an_update_every_step() -> None:
    """Prompts of 60 tokens take four steps at 16 tokens a step: updates wait for the recomputation they would undo."""
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, recompute_kv=True, max_prefill_tokens=16)
    updates = Updates(sampler, weights)

    async def main() -> Completion:
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(updates.publish(number=10_000, every=1))
            completion = await sampler.sample(request([1] * 60, max_action_tokens=8))
            publishing.cancel()
        return completion

    completion = run_virtual(beside(sampler, main()))
    assert len(completion.tokens) == 8
    assert len(completion.version_spans) > 1
    torch.testing.assert_close(
        torch.tensor(Replay("qwen2", updates.history).logprobs([1] * 60, completion, cache=None)[0]), torch.tensor(completion.logprobs), atol=1e-4, rtol=0
    )
