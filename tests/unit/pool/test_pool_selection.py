"""Take: which groups make a batch, in which order, when it waits, and what expiry does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.pool_runs import TASK, Bench, finished, groups_of, pool_settings, version
from headrace.clock import run_virtual
from headrace.config import Advantage
from headrace.pool.pool import ExperiencePool, PoolClosedError
from headrace.pool.selection import has_signal
from headrace.types import EndReason, RetireReason, RolloutKey


def bench(**pool: Any) -> Bench:
    return Bench(pool_settings(pool=pool))


def test_oldest_first_waits_for_the_straggler() -> None:
    async def main() -> None:
        b = bench(selection="oldest_first", max_staleness=2)
        b.fill()
        b.finish(1, 2, 3, 4)
        assert await b.try_take(0) is None
        b.finish(0)
        assert groups_of(await b.take(0)) == [0, 1]

    run_virtual(main())


def test_ready_first_serves_in_order_of_completion() -> None:
    async def main() -> None:
        b = bench(selection="ready_first", max_staleness=2)
        b.fill()
        b.finish(4, 1, 3)
        assert groups_of(await b.take(0)) == [1, 4]
        assert await b.try_take(0) is None
        b.finish(0)
        assert groups_of(await b.take(0)) == [0, 3]

    run_virtual(main())


def test_members_are_ordered_by_group_and_member_whatever_the_order_of_arrival() -> None:
    async def main() -> None:
        b = bench(max_staleness=2)
        b.fill()
        b.finish(5, 2, backwards=True)
        selection = await b.take(0)
        assert [member.summary.key[:2] for member in selection.members] == [(2, 0), (2, 1), (5, 0), (5, 1)]
        assert [member.payload for member in selection.members] == [repr(tuple(member.summary.key)).encode() for member in selection.members]
        assert (selection.max_staleness, selection.max_key_staleness, selection.learner_version) == (2, 2, version(0))

    run_virtual(main())


def test_in_sync_the_selection_carries_the_bound_that_sync_implies() -> None:
    async def main() -> None:
        b = Bench(pool_settings(run={"mode": "sync"}, learner={"num_minibatches": 2}, pool={"max_staleness": 8}))
        b.fill()
        b.finish(0, 1)
        assert (await b.take(0)).max_staleness == 1

    run_virtual(main())


def test_a_batch_is_never_served_twice() -> None:
    async def main() -> None:
        b = bench(max_staleness=1)
        b.fill()
        b.finish(0, 1, 2, 3)
        first, second = await b.take(0), await b.take(0)
        assert first.id != second.id
        assert groups_of(first) == [0, 1] and groups_of(second) == [2, 3]
        assert await b.try_take(0) is None

    run_virtual(main())


def test_a_cancelled_take_loses_nothing() -> None:
    async def main() -> None:
        b = bench(max_staleness=1)
        b.fill()
        b.finish(0)
        assert await b.try_take(0) is None
        b.finish(1)
        selection = await b.take(0)
        assert selection.id == 0 and groups_of(selection) == [0, 1]
        assert b.pool.statistics().taken_groups == 2 and b.retired == {}

    run_virtual(main())


# --- expiry ------------------------------------------------------------------------------------------------------------------


async def age_group_0(b: Bench, updates: int, **tokens: Any) -> None:
    """Group 0 is out while the learner makes `updates` updates with everybody else, then comes back."""
    b.fill()
    done = 1
    for number in range(updates):
        b.fill(learner=number)
        b.finish(done, done + 1, versions={number: 3})
        done += 2
        b.learn(await b.take(number), number)
    b.fill(learner=updates)
    b.finish(0, **tokens)
    b.finish(done, versions={updates: 3})


def test_skip_tokens_serves_a_wholly_expired_trajectory_and_it_ends_as_skipped() -> None:
    async def main() -> None:
        b = bench(on_expiry="skip_tokens", max_staleness=1)
        await age_group_0(b, 2, versions={0: 3})
        selection = await b.take(2)
        assert 0 in groups_of(selection)
        b.learn(selection, 2)
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.SKIPPED}
        assert b.pool.ledger.snapshot(at_update=3, lineage=0)["groups"]["skipped"] == {"stale": 1}

    run_virtual(main())


def test_skip_tokens_trains_a_trajectory_whose_tail_is_fresh() -> None:
    async def main() -> None:
        b = bench(on_expiry="skip_tokens", max_staleness=1)
        await age_group_0(b, 2, versions={0: 3, 2: 1})
        b.learn(await b.take(2), 2)
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.TRAINED}
        assert b.pool.ledger.snapshot(at_update=3, lineage=0)["tokens"]["skipped"] == {"stale": 6}

    run_virtual(main())


def test_drop_group_expires_the_group_and_gives_its_place_back() -> None:
    async def main() -> None:
        b = bench(on_expiry="drop_group", max_staleness=1)
        await age_group_0(b, 2, versions={0: 1, 2: 2})
        before = b.pool.outstanding_groups
        assert await b.try_take(2) is None
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.EXPIRED}
        assert b.pool.outstanding_groups == before - 1 and b.pool.has_room()

    run_virtual(main())


def test_drop_group_keeps_a_group_that_is_exactly_at_the_bound() -> None:
    async def main() -> None:
        b = bench(on_expiry="drop_group", max_staleness=1)
        await age_group_0(b, 2, versions={1: 3})
        assert 0 in groups_of(await b.take(2))

    run_virtual(main())


@pytest.mark.parametrize("old_member", [0, 1])
def test_drop_group_goes_by_the_oldest_token_of_any_member(old_member: int) -> None:
    async def main() -> None:
        b = bench(on_expiry="drop_group", max_staleness=1, no_signal="train")
        b.fill()
        for number in range(2):
            b.finish(2 * number + 1, 2 * number + 2, versions={number: 3})
            b.learn(await b.take(number), number)
            b.fill(learner=number + 1)
        for key in b.groups[0].keys:
            b.pool.add(finished(key, versions={0: 1, 2: 2} if key.member == old_member else {2: 3}))
        assert await b.try_take(2) is None
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.EXPIRED}

    run_virtual(main())


def test_drop_group_keeps_a_group_whose_old_tokens_are_all_marked() -> None:
    async def main() -> None:
        b = bench(on_expiry="drop_group", max_staleness=1)
        await age_group_0(b, 2, versions={2: 2}, key_versions={0: 1})
        assert 0 in groups_of(await b.take(2))

    run_virtual(main())


def test_drop_group_counts_the_age_at_the_last_minibatch() -> None:
    async def main() -> None:
        b = Bench(pool_settings(pool={"on_expiry": "drop_group", "max_staleness": 4}, learner={"num_minibatches": 2}))
        b.fill()
        b.finish(2, 3)
        b.learn(await b.take(0), 0)
        b.finish(1, versions={0: 3})
        b.fill(learner=2)
        b.finish(4, versions={2: 3})
        b.learn(await b.take(2), 2)  # group 1 is 2 old, 3 in the second minibatch
        b.fill(learner=4)
        b.finish(0, versions={0: 3})
        b.finish(5, versions={2: 3})
        assert await b.try_take(4) is None  # group 0 would be 4 old in the first minibatch, 5 in the second
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.EXPIRED}

    run_virtual(main())


def test_the_bound_counts_from_the_version_after_a_batch_that_is_still_out() -> None:
    async def main() -> None:
        b = bench(on_expiry="drop_group", max_staleness=1)
        b.fill()
        b.finish(0, 1, 2)
        await b.take(0)
        b.fill()
        b.pool.observe(learner_version=version(1))
        b.finish(3)
        # the first batch is out: whatever comes next is trained at 1, where version 0 is just within the bound
        assert groups_of(await b.take(0)) == [2, 3]
        assert b.retired == {}

        c = bench(on_expiry="drop_group", max_staleness=1)
        c.fill(learner=1)
        c.finish(0, 1, versions={1: 3})
        c.finish(2, 3, versions={0: 3})
        await c.take(1)
        assert await c.try_take(1) is None  # trained at 2, version 0 would be over it although the learner is at 1 now
        assert {c.retired[key] for key in (*c.groups[2].keys, *c.groups[3].keys)} == {RetireReason.EXPIRED}

    run_virtual(main())


@pytest.mark.parametrize("selection", ["oldest_first", "ready_first"])
def test_wait_holds_the_learner_for_a_group_that_would_expire(selection: str) -> None:
    async def main() -> None:
        b = bench(on_expiry="wait", selection=selection, max_staleness=1)
        b.fill()
        assert len(b.groups) == 4
        b.finish(1, 2)
        if selection == "ready_first":
            b.learn(await b.take(0), 0)  # groups 0 and 3 must then be taken at 1: one batch, so this is still in time
            b.fill(learner=1)
            b.finish(4, 5, versions={1: 3})
            assert await b.try_take(1) is None  # both are ready, but 0 and 3 would be 2 old
            assert "2 of 2 groups ready, but 2 groups would expire" in b.pool.waiting_text(version(1))
            b.finish(0, 3)
            assert groups_of(await b.take(1)) == [0, 3]
        else:
            assert await b.try_take(0) is None
            b.finish(0)
            assert groups_of(await b.take(0)) == [0, 1]

    run_virtual(main())


def test_wait_serves_others_first_while_there_is_time() -> None:
    async def main() -> None:
        b = bench(on_expiry="wait", max_staleness=3)
        b.fill()
        b.finish(5, 6)
        assert groups_of(await b.take(0)) == [5, 6]

    run_virtual(main())


@pytest.mark.parametrize("selection", ["oldest_first", "ready_first"])
def test_wait_is_not_blocked_for_ever_by_groups_that_are_all_due_now(selection: str) -> None:
    """The caller's sampler_version was wrong, so more is due than one batch holds: served all the same, waiting cannot help."""

    async def main() -> None:
        b = bench(on_expiry="wait", selection=selection, max_staleness=1)
        b.fill(learner=5)
        b.finish(0, 1, 2, 3, versions={4: 3})
        b.learn(await b.take(5), 5)
        b.learn(await b.take(6), 6)
        assert set(b.retired.values()) == {RetireReason.TRAINED, RetireReason.SKIPPED}

    run_virtual(main())


def test_wait_is_not_blocked_for_ever_by_groups_that_came_back_too_old() -> None:
    """Tokens older than the reservation said (a broken promise of the caller): served, so that the learner can skip them."""

    async def main() -> None:
        b = bench(on_expiry="wait", max_staleness=1)
        b.fill(learner=5)
        b.finish(0, 1, 2, 3, versions={1: 3})
        first = await b.take(5)
        b.learn(first, 5)
        assert {b.retired[member.summary.key] for member in first.members} == {RetireReason.SKIPPED}
        assert not b.pool.has_room()  # the late ones fill the next batch, and what the samplers (at 5) draw must be taken then
        b.pool.observe(sampler_version=version(6))
        assert b.pool.has_room()
        b.learn(await b.take(6), 6)
        b.pool.ledger.report_generated("w", 24)
        b.pool.ledger.check()

    run_virtual(main())


# --- no signal ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "advantage", "expected"),
    [
        ([1.0, 1.0], Advantage.MEAN, False),
        ([1.0, 0.0], Advantage.MEAN_STD, True),
        ([1.0], Advantage.LEAVE_ONE_OUT, False),
        ([1.0], Advantage.NONE, True),
        ([1.0, 1.0], Advantage.NONE, True),
        ([0.0, 0.0], Advantage.NONE, False),
    ],
)
def test_signal_is_a_difference_of_rewards_or_without_baseline_a_reward(rewards: list[float], advantage: Advantage, expected: bool) -> None:
    assert has_signal(rewards, advantage) is expected


def test_filter_fills_the_batch_with_groups_that_are_not_trained() -> None:
    async def main() -> None:
        b = bench(no_signal="filter", max_staleness=0)
        b.fill()
        b.finish(0, rewards=(1.0, 1.0))
        b.finish(1)
        selection = await b.take(0)
        assert selection.filtered == b.groups[0].keys
        assert [member.summary.key for member in selection.members] == list(b.groups[1].keys)
        assert b.pool.reward_mean(selection) == 0.75
        b.learn(selection, 0)
        assert b.pool.reward_mean(selection) == 0.75
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.FILTERED}
        assert b.pool.ledger.snapshot(at_update=1, lineage=0)["groups"]["filtered"] == 1

    run_virtual(main())


def test_a_batch_of_filtered_groups_only_is_served_without_members_and_can_retire() -> None:
    async def main() -> None:
        b = bench(no_signal="filter", max_staleness=0)
        b.fill()
        b.finish(0, 1, rewards=(0.0, 0.0))
        selection = await b.take(0)
        assert selection.members == () and len(selection.filtered) == 4
        b.pool.retire(selection, None)
        b.fill()
        assert len(b.groups) == 4

    run_virtual(main())


def test_refill_replaces_a_group_without_signal_at_once() -> None:
    async def main() -> None:
        b = bench(no_signal="refill", max_staleness=0)
        b.fill()
        b.finish(0, rewards=(1.0, 1.0))
        assert {b.retired[key] for key in b.groups[0].keys} == {RetireReason.FILTERED}
        b.fill()
        b.finish(1, 2)
        selection = await b.take(0)
        assert groups_of(selection) == [1, 2] and selection.filtered == ()

    run_virtual(main())


def test_train_keeps_groups_without_signal() -> None:
    async def main() -> None:
        b = bench(no_signal="train", max_staleness=0)
        b.fill()
        b.finish(0, 1, rewards=(1.0, 1.0))
        selection = await b.take(0)
        assert len(selection.members) == 4 and selection.filtered == ()

    run_virtual(main())


# --- failures ----------------------------------------------------------------------------------------------------------------


def test_a_failed_member_leaves_its_group_which_still_fills_its_place() -> None:
    """Case 13: survivors, baseline and denominators are those of the group without it; no deadlock at max_staleness 0."""

    async def main() -> None:
        b = Bench(pool_settings(rollout={"group_size": 3, "max_attempts": 1}, pool={"max_staleness": 0}))
        b.fill()
        b.finish(1, rewards=(0.0, 1.0, 1.0))
        first, second, third = b.groups[0].keys
        b.pool.add(finished(first, reward=4.0))
        assert b.pool.add(finished(second, reward=100.0, end=EndReason.REWARD_ERROR)).retry is None
        assert b.retired == {second: RetireReason.FAILED}
        assert b.pool.add(finished(third, reward=2.0)).group_complete
        selection = await b.take(0)
        assert [member.summary.key for member in selection.members if member.summary.key.group_id == 0] == [first, third]
        assert b.pool.reward_mean(selection) == (0 + 1 + 1 + 4 + 2) / 5

    run_virtual(main())


def test_a_group_left_with_one_member_carries_no_signal() -> None:
    async def main() -> None:
        b = Bench(pool_settings(rollout={"max_attempts": 1}, pool={"max_staleness": 0}))
        b.fill()
        b.finish(1)
        survivor, failing = b.groups[0].keys
        b.pool.add(finished(survivor, reward=1.0))
        b.pool.add(finished(failing, end=EndReason.SAMPLER_ERROR))
        assert (await b.take(0)).filtered == (survivor,)

    run_virtual(main())


def test_a_failure_is_retried_until_its_attempts_are_used_up() -> None:
    async def main() -> None:
        b = Bench(pool_settings(rollout={"max_attempts": 3}, pool={"max_staleness": 0}))
        b.fill()
        key = b.groups[0].keys[0]
        for attempt in (1, 2):
            retry = b.pool.add(finished(key, end=EndReason.ENVIRONMENT_ERROR)).retry
            assert retry == RolloutKey(0, 0, attempt) and b.pool.members.group_of(retry).task is TASK
            key = retry
        assert b.pool.add(finished(key, end=EndReason.ENVIRONMENT_ERROR)).retry is None
        trajectories = b.pool.ledger.snapshot(at_update=0, lineage=0)["trajectories"]
        assert trajectories["generated"] == 6 and trajectories["failed"] == {"environment_error": 3} and trajectories["in_flight"] == 3

    run_virtual(main())


@pytest.mark.parametrize("end", [EndReason.PROMPT_TOO_LONG, EndReason.CANCELLED])
def test_what_cannot_go_better_is_not_retried(end: EndReason) -> None:
    async def main() -> None:
        b = bench(max_staleness=0)
        b.fill()
        assert b.pool.add(finished(b.groups[0].keys[0], end=end)).retry is None

    run_virtual(main())


def test_a_group_that_failed_wholly_gives_its_place_back_at_once() -> None:
    async def main() -> None:
        b = Bench(pool_settings(rollout={"max_attempts": 1}, pool={"max_staleness": 0}))
        b.fill()
        for key in b.groups[0].keys:
            b.pool.add(finished(key, end=EndReason.ENVIRONMENT_ERROR))
        b.fill()
        b.finish(1, 2)
        assert groups_of(await b.take(0)) == [1, 2]
        assert b.pool.ledger.snapshot(at_update=0, lineage=0)["groups"]["failed"] == {"environment_error": 1}

    run_virtual(main())


# --- the end -----------------------------------------------------------------------------------------------------------------


def test_draining_serves_the_rest_in_a_smaller_batch_and_then_says_so() -> None:
    async def main() -> None:
        b = bench(max_staleness=1)
        b.fill()
        b.finish(0, 1, 2)
        b.pool.drain("no more tasks")
        b.learn(await b.take(0), 0)
        assert await b.try_take(1) is None  # group 3 is still out and joins group 2
        b.finish(3)
        b.learn(await b.take(1), 1)
        with pytest.raises(PoolClosedError, match="no more tasks"):
            await b.pool.take(learner_version=version(2))

    run_virtual(main())


def test_closing_wakes_take_and_leaves_what_is_there_in_the_ledger() -> None:
    async def main() -> None:
        b = bench(max_staleness=0)
        b.fill()
        b.finish(0)
        b.pool.ledger.report_generated("w", 6 + 4)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_closed(b.pool))
            await asyncio.sleep(1)
            b.pool.close("interrupted")
        assert "interrupted" in waiting.result()
        assert b.pool.add(finished(b.groups[1].keys[0], versions={0: 1}, end=EndReason.ENVIRONMENT_ERROR)).retry is None
        ledger = b.pool.ledger.snapshot(at_update=0, lineage=0)
        assert ledger["closes"]
        assert (ledger["groups"]["pooled"], ledger["groups"]["in_flight"]) == (1, 1)
        assert (ledger["tokens"]["pooled"], ledger["tokens"]["in_flight"], ledger["tokens"]["failed"]) == (6, 3, {"environment_error": 1})

    async def _closed(pool: ExperiencePool) -> str:
        with pytest.raises(PoolClosedError) as caught:
            await pool.take(learner_version=version(0))
        return str(caught.value)

    run_virtual(main())


# --- for people --------------------------------------------------------------------------------------------------------------


def test_waiting_text_says_how_many_are_there_and_how_long_the_oldest_is_out() -> None:
    async def main() -> None:
        b = bench(selection="oldest_first", groups_per_batch=3, max_staleness=0)
        b.fill()
        await asyncio.sleep(41)
        b.finish(1)
        assert b.pool.waiting_text(version(0)) == "1 of 3 groups ready; the oldest rollout has been out for 41 s"
        b.finish(0, 2)
        assert b.pool.waiting_text(version(0)) == "3 of 3 groups ready; no rollout is out"

    run_virtual(main())


def test_statistics_show_levels_and_the_age_of_what_is_pooled() -> None:
    async def main() -> None:
        b = bench(max_staleness=3)
        b.fill()
        await asyncio.sleep(4)
        b.finish(0, 1, versions={0: 3})
        b.learn(await b.take(0), 0)
        b.fill(learner=1)
        b.finish(2, versions={0: 2, 1: 1})
        b.pool.add(finished(b.groups[3].keys[0], versions={1: 6}))
        shown = b.pool.statistics()
        assert (shown.max_groups, shown.outstanding_groups, shown.ready_groups, shown.waiting_groups, shown.taken_groups) == (8, 8, 1, 7, 0)
        assert (shown.rollouts_in_flight, shown.pooled_trajectories, shown.pooled_tokens) == (13, 3, 12)
        assert (shown.staleness_mean, shown.staleness_max) == (4 / 12, 1)
        assert (shown.delivered_per_second, shown.retired_per_second) == (7 / 4, 1.0)

    run_virtual(main())
