"""What is computed a second time for the same rollout is counted, by cause: weights that came, an aborted action, too little memory."""

from __future__ import annotations

import asyncio

from fakes.sampling import beside, make_sampler, request, turns
from fakes.tiny_models import perturbed
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.config import UpdateMode
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import Completion, PolicyVersion, RolloutKey, WorkerActivity

OLD, NEW = PolicyVersion(0, 1), PolicyVersion(0, 2)
SHORT, FILLER = [1, 2, 3, 4], [7, 8]


async def two_steps(sampler: TransformersSampler, between: object, *, continues: bool = True) -> None:
    """A rollout that waits for its environment while `between` is awaited; then one token of its own and two of the answer are new."""
    completion = await sampler.sample(request(SHORT, group=1, keep=True))
    await between  # type: ignore[misc]
    context = [*SHORT, *completion.tokens, 5, 6] if continues else [9, *SHORT, *completion.tokens, 5, 6]
    await sampler.sample(request(context, group=1, step=1, keep=True))


def work(sampler: TransformersSampler) -> tuple[int, int]:
    activity = sampler.take_activity()
    return activity.recomputed_tokens, activity.evicted_tokens


def updated(**settings: object) -> tuple[TransformersSampler, FakeWeights]:
    weights = FakeWeights()
    sampler = make_sampler(weights=weights, **settings)
    weights.publish(sampler._model.parameters, OLD)
    return sampler, weights


async def publish(sampler: TransformersSampler, weights: FakeWeights) -> None:
    weights.publish(perturbed(dict(weights.history[OLD]), seed=1), NEW)
    sampler.wake()
    await sampler.applied(NEW)


def test_nothing_is_recomputed_while_caches_are_kept() -> None:
    sampler, weights = updated()
    run_virtual(beside(sampler, two_steps(sampler, publish(sampler, weights))))
    assert work(sampler) == (0, 0)


def test_a_kept_cache_that_weights_made_void_counts_as_recomputed_not_as_evicted() -> None:
    sampler, weights = updated(recompute_kv=True)
    run_virtual(beside(sampler, two_steps(sampler, publish(sampler, weights))))
    assert work(sampler) == (4, 0)
    assert work(sampler) == (0, 0), "since the last report"


def running_through_an_update(**settings: object) -> tuple[Completion, WorkerActivity]:
    sampler, weights = updated(**settings)

    async def main() -> Completion:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(sampler.sample(request(SHORT, group=1, max_action_tokens=20)))
            while sampler._engine.drawn_tokens < 6:
                await turns(1)
            await publish(sampler, weights)
        return running.result()

    return run_virtual(beside(sampler, main())), sampler.take_activity()


def test_an_action_whose_cache_is_computed_again_under_new_weights_counts_all_of_it() -> None:
    completion, activity = running_through_an_update(recompute_kv=True)
    computed_before = len(SHORT) + completion.version_spans[0].end - 1  # the last drawn token never was
    assert (activity.recomputed_tokens, activity.evicted_tokens) == (computed_before, 0)
    assert computed_before > len(SHORT)


def test_an_aborted_action_counts_its_context_and_none_of_the_tokens_drawn_anew() -> None:
    completion, activity = running_through_an_update(update_mode=UpdateMode.ABORT)
    assert completion.discarded_tokens >= 6
    assert (activity.recomputed_tokens, activity.evicted_tokens) == (len(SHORT), 0)


def crowded(*, num_others: int, continues: bool = True) -> tuple[int, int]:
    size = make_sampler()._model.slot_bytes
    sampler = make_sampler(kv_memory_bytes=3 * size)

    async def others() -> None:
        for group in range(num_others):
            await sampler.sample(request(FILLER, group=10 + group, keep=True))

    run_virtual(beside(sampler, two_steps(sampler, others(), continues=continues)))
    assert sampler.take_activity().kv_slots == 3
    return sampler._engine.recomputed_tokens, sampler._engine.evicted_tokens


def test_a_cache_that_gave_way_for_want_of_memory_counts_as_evicted_when_its_rollout_returns() -> None:
    assert crowded(num_others=2) == (0, 0)
    assert crowded(num_others=3) == (4, 4)


def test_a_context_that_does_not_continue_the_evicted_one_is_new_work() -> None:
    assert crowded(num_others=3, continues=False) == (0, 0)


def test_a_cache_that_weights_had_made_void_before_it_gave_way_does_not_count_as_evicted() -> None:
    weights = FakeWeights()
    size = make_sampler()._model.slot_bytes
    sampler = make_sampler(weights=weights, recompute_kv=True, kv_memory_bytes=2 * size)
    weights.publish(sampler._model.parameters, OLD)

    async def others() -> None:
        await publish(sampler, weights)
        for group in range(2):
            await sampler.sample(request(FILLER, group=10 + group, keep=True))

    run_virtual(beside(sampler, two_steps(sampler, others())))
    assert sampler._engine.slots.num_evicted >= 1
    assert work(sampler) == (4, 0)


def test_a_rollout_that_was_released_leaves_nothing_to_remember() -> None:
    size = make_sampler()._model.slot_bytes
    sampler = make_sampler(kv_memory_bytes=size)

    async def main() -> None:
        for group in range(5):
            await sampler.sample(request(FILLER, group=group, keep=True))
        assert len(sampler._engine.slots._evicted) == 4
        for group in range(5):
            sampler.release(RolloutKey(group, 0, 0))

    run_virtual(beside(sampler, main()))
    assert not sampler._engine.slots._evicted
