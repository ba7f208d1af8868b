"""Pace: the number of outstanding groups follows how old key steps are when they are trained; and what else gives or takes room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakes.pool_runs import TASK, Bench, finished, pool_settings, version
from headrace.clock import now, run_virtual
from headrace.pool.pacing import JUDGED_BATCHES, Pace
from headrace.pool.pool import ExperiencePool
from headrace.types import RolloutKey


def pace(**changes: int) -> Pace:
    return Pace(**{"max_groups": 34, "groups_per_batch": 2, "updates_per_batch": 1, "max_key_staleness": 1, **changes})


def judge(controller: Pace, share: float) -> int:
    """Batches until the next judgement, all with this share over the bound."""
    for number in range(1, 100):
        if controller.retired(trained=100, over=round(100 * share)) is not None:
            return number
    raise AssertionError("never judged")


def test_it_tightens_to_its_least_and_loosens_to_the_admission_bound() -> None:
    controller = pace()
    assert controller.limit_groups == controller.max_groups == 34
    limits = []
    for _ in range(8):
        judge(controller, 0.5)
        limits.append(controller.limit_groups)
    assert limits == [19, 11, 7, 5, 4, 4, 4, 4], "the room above (max_key_staleness + 1) batches is halved"
    for _ in range(40):
        judge(controller, 0.0)
    assert controller.limit_groups == 34


def test_it_leaves_the_limit_alone_between_half_the_goal_and_the_goal() -> None:
    controller = pace()
    judge(controller, 0.5)
    for share in (0.05, 0.03):
        judge(controller, share)
        assert controller.limit_groups == 19


def test_a_change_is_judged_only_when_what_was_outstanding_before_has_left() -> None:
    controller = pace()
    assert judge(controller, 0.5) == JUDGED_BATCHES
    assert judge(controller, 0.5) == 17 + JUDGED_BATCHES
    assert judge(controller, 0.5) == 10 + JUDGED_BATCHES


def test_batches_without_key_steps_are_not_judged() -> None:
    controller = pace()
    assert all(controller.retired(trained=0, over=0) is None for _ in range(100))
    assert controller.limit_groups == 34


@pytest.mark.parametrize(("changes", "least"), [({"max_key_staleness": 0}, 2), ({"max_key_staleness": 3, "updates_per_batch": 2}, 4), ({"max_groups": 2}, 2)])
def test_the_least_is_what_max_key_staleness_can_be_met_with(changes: dict[str, int], least: int) -> None:
    controller = pace(**changes)
    for _ in range(10):
        judge(controller, 1.0)
    assert controller.limit_groups == controller.least_groups == least


def test_the_pool_lets_fewer_groups_out_and_counts_what_that_costs() -> None:
    async def main() -> None:
        heard: list[Any] = []
        settings = pool_settings(pool={"groups_per_batch": 1, "max_staleness": 7, "pace_key_steps": True, "max_key_staleness": 0})
        b = Bench(settings)
        b.pool = ExperiencePool(settings, on_pace=lambda paced, seconds: heard.append((paced, seconds)))
        b.fill()
        assert len(b.groups) == 8
        for number in range(JUDGED_BATCHES):
            b.finish(number, key_versions={number - 5: 1}, versions={})
            b.learn(await b.take(number), number)
            b.fill(learner=number + 1)
        assert heard[0][0].limit_groups == 4 and heard[0][0].over_share == 1.0 and "over max_key_staleness" in heard[0][0].reason
        assert b.pool.outstanding_groups == 7, "nothing is reserved until there are fewer than 4"
        assert b.pool.statistics().max_groups == 4
        async with asyncio.TaskGroup() as group:
            reserving = group.create_task(b.pool.reserve(TASK, learner_version=version(2), sampler_version=version(2)))
            await asyncio.sleep(30.0)
            assert not reserving.done()
            for number in range(2, 6):
                b.finish(number, key_versions={number: 1}, versions={})
                b.learn(await b.take(number), number)
        assert now() == 30.0 and b.pool.pace_wait_seconds == 30.0

    run_virtual(main())


def test_without_pace_waiting_for_admission_costs_pace_nothing() -> None:
    async def main() -> None:
        b = Bench(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 0}))
        b.fill()
        async with asyncio.TaskGroup() as group:
            group.create_task(b.pool.reserve(TASK, learner_version=version(0), sampler_version=version(0)))
            await asyncio.sleep(9.0)
            b.finish(0)
            b.learn(await b.take(0), 0)
        assert b.pool.pace_wait_seconds == 0.0

    run_virtual(main())


# --- parked and late members ----------------------------------------------------------------------------------------------


def parked_bench(**pool: Any) -> Bench:
    bench = Bench(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 1, **pool}))
    bench.fill()
    assert len(bench.groups) == 2
    return bench


def park(bench: Bench, *keys: RolloutKey) -> int:
    """Groups that start after these are reported as parked."""
    before = len(bench.groups)
    bench.pool.observe_worker("w", version=version(0), parked=keys)
    bench.fill()
    return len(bench.groups) - before


def test_a_group_all_of_whose_members_that_are_out_are_parked_gives_its_place_away() -> None:
    async def main() -> None:
        b = parked_bench()
        first, second = b.groups[0].keys
        assert park(b, first) == 0, "its other member runs"
        b.pool.add(finished(second))
        assert park(b, first) == 1
        assert park(b) == 0

    run_virtual(main())


@pytest.mark.parametrize("pool", [{"selection": "oldest_first"}, {"max_staleness": 0}])
def test_parked_members_count_where_everything_out_is_needed(pool: dict[str, Any]) -> None:
    async def main() -> None:
        b = Bench(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 1, **pool}))
        b.fill()
        assert park(b, *(key for group in b.groups for key in group.keys)) == 0

    run_virtual(main())


def test_everything_together_stays_within_four_bounds() -> None:
    async def main() -> None:
        b = parked_bench()
        while park(b, *(key for group in b.groups for key in group.keys)):
            assert len(b.groups) <= 8
        assert len(b.groups) == 8

    run_virtual(main())


def test_a_parked_group_counts_again_when_it_is_ready() -> None:
    async def main() -> None:
        b = parked_bench()
        keys = b.groups[0].keys
        assert park(b, *keys) == 1
        for key in keys:
            b.pool.add(finished(key, reward=float(key.member)))
        b.learn(await b.take(0), 0)
        assert park(b) == 0, "two groups run beside it"

    run_virtual(main())


def test_late_members_give_their_place_away_until_they_are_back() -> None:
    async def main() -> None:
        b = Bench(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 1, "quorum": 2}, rollout={"group_size": 3}))
        b.fill()
        for group in b.groups:
            for key in group.keys[:2]:
                b.pool.add(finished(key, reward=float(key.member)))
        b.fill()
        assert len(b.groups) == 2
        first = await b.take(0)  # all of group 0 that is there, one of group 1
        b.fill()
        assert len(b.groups) == 2, "what the learner has counts"
        b.learn(first, 0)
        b.fill(learner=1)
        assert len(b.groups) == 3, "one member waits to be served, two are late: room for a group more"
        for group in b.groups[:2]:
            b.pool.add(finished(group.keys[2], reward=2.0))
        b.fill(learner=1)
        assert len(b.groups) == 3, "three members wait, three run"

    run_virtual(main())
