"""Reserve: how much may be in flight, who is woken, what a cancelled wait leaves behind."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from fakes.pool_runs import TASK, finished, learned, pool_settings, version
from headrace.clock import run_virtual
from headrace.errors import HeadraceError
from headrace.pool.admission import feasible, max_outstanding_groups, take_bound
from headrace.pool.pool import ExperiencePool, GroupReservation, PoolClosedError
from headrace.types import EndReason, RolloutKey


def fill(pool: ExperiencePool, *, learner: int = 0, sampler: int = 0) -> list[GroupReservation]:
    reservations = []
    while (reservation := pool.reserve_now(TASK, learner_version=version(learner), sampler_version=version(sampler))) is not None:
        reservations.append(reservation)
    return reservations


def finish(pool: ExperiencePool, reservation: GroupReservation, versions: dict[int, int] | None = None) -> None:
    for key in reservation.keys:
        pool.add(finished(key, versions=versions, reward=float(key.member)))


@pytest.mark.parametrize(
    ("max_staleness", "minibatches", "batches"),
    [(0, 1, 1), (1, 1, 2), (8, 1, 9), (1, 2, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2), (5, 2, 3), (3, 4, 1), (7, 4, 2)],
)
def test_admission_lets_out_as_many_batches_as_can_be_trained_in_time(max_staleness: int, minibatches: int, batches: int) -> None:
    settings = pool_settings(pool={"groups_per_batch": 5, "max_staleness": max_staleness}, learner={"num_minibatches": minibatches})
    assert max_outstanding_groups(settings, settings.max_staleness) == 5 * batches
    # in order, the last batch let out at version 0 is trained last at version batches * k - 1; one batch more would be over
    assert batches * minibatches - 1 <= max_staleness < (batches + 1) * minibatches - 1

    async def main() -> None:
        assert len(fill(ExperiencePool(settings))) == 5 * batches

    run_virtual(main())


@pytest.mark.parametrize("learner", [{}, {"num_minibatches": 2}, {"num_minibatches": 2, "num_epochs": 3}])
def test_sync_lets_out_exactly_one_batch_whatever_pool_max_staleness_says(learner: dict[str, int]) -> None:
    settings = pool_settings(run={"mode": "sync"}, pool={"groups_per_batch": 3, "max_staleness": 8}, learner=learner)
    assert max_outstanding_groups(settings, settings.max_staleness) == 3
    assert take_bound(settings, settings.max_staleness) == 0


def test_a_group_is_reserved_whole_with_rising_identifiers_and_attempt_0() -> None:
    async def main() -> None:
        pool = ExperiencePool(pool_settings(rollout={"group_size": 3}, pool={"max_staleness": 0}))
        reservations = fill(pool)
        assert [reservation.keys for reservation in reservations] == [tuple(RolloutKey(group, member, 0) for member in range(3)) for group in range(2)]

    run_virtual(main())


def test_admission_is_freed_by_retirement_and_not_by_take() -> None:
    async def main() -> None:
        settings = pool_settings(pool={"max_staleness": 0})
        pool = ExperiencePool(settings)
        for reservation in fill(pool):
            finish(pool, reservation)
        selection = await pool.take(learner_version=version(0))
        assert fill(pool) == []
        pool.retire(selection, learned(selection, trained_from=0, settings=settings))
        assert [reservation.group_id for reservation in fill(pool)] == [2, 3]

    run_virtual(main())


@pytest.mark.parametrize("trains", [True, False])
def test_a_waiting_reserve_is_woken_by_retirement_even_if_no_version_rises(trains: bool) -> None:
    async def main() -> None:
        settings = pool_settings(pool={"max_staleness": 0})
        pool = ExperiencePool(settings)
        for reservation in fill(pool):
            for key in reservation.keys:
                pool.add(finished(key, reward=float(key.member) if trains else 0.0))
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.reserve(TASK, learner_version=version(0), sampler_version=version(0)))
            selection = await pool.take(learner_version=version(0))
            await asyncio.sleep(1)
            assert not waiting.done()
            pool.retire(selection, learned(selection, trained_from=0, settings=settings) if trains else None)
        assert waiting.result().group_id == 2

    run_virtual(main())


def test_a_waiting_reserve_is_woken_when_a_group_fails_wholly() -> None:
    async def main() -> None:
        pool = ExperiencePool(pool_settings(pool={"max_staleness": 0}, rollout={"max_attempts": 1}))
        keys = fill(pool)[0].keys
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.reserve(TASK, learner_version=version(0), sampler_version=version(0)))
            await asyncio.sleep(1)
            for key in keys:
                pool.add(finished(key, end=EndReason.ENVIRONMENT_ERROR))
        assert waiting.result().group_id == 2

    run_virtual(main())


def test_a_cancelled_reserve_takes_no_place_and_no_identifier() -> None:
    async def main() -> None:
        settings = pool_settings(pool={"max_staleness": 0})
        pool = ExperiencePool(settings)
        for reservation in fill(pool):
            finish(pool, reservation)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await pool.reserve(TASK, learner_version=version(0), sampler_version=version(0))
        selection = await pool.take(learner_version=version(0))
        pool.retire(selection, learned(selection, trained_from=0, settings=settings))
        assert [reservation.group_id for reservation in fill(pool)] == [2, 3]
        assert pool.ledger.snapshot(at_update=1, lineage=0)["groups"]["generated"] == 4

    run_virtual(main())


@pytest.mark.parametrize("end", ["drain", "close"])
def test_reserve_raises_once_the_pool_takes_no_more(end: str) -> None:
    async def main() -> None:
        pool = ExperiencePool(pool_settings(pool={"max_staleness": 0}))
        fill(pool)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_raises(pool))
            await asyncio.sleep(1)
            getattr(pool, end)("the run is over")
        assert "the run is over" in waiting.result()
        fresh = ExperiencePool(pool_settings(pool={"max_staleness": 0}))
        getattr(fresh, end)("the run is over")
        assert fill(fresh) == [] and not fresh.has_room()

    async def _raises(pool: ExperiencePool) -> str:
        with pytest.raises(PoolClosedError) as caught:
            await pool.reserve(TASK, learner_version=version(0), sampler_version=version(0))
        assert isinstance(caught.value, HeadraceError)
        return str(caught.value)

    run_virtual(main())


def test_feasible_agrees_with_trying_every_schedule() -> None:
    """Groups (of 3 slots) of 1 a batch or 2, up to 4 groups, k of 1 or 2: earliest-deadline-first counting against brute force."""

    def schedulable(deadlines: tuple[int, ...], updates: int, groups: int) -> bool:
        return any(all(2 + updates * (position // groups) <= limit for position, limit in enumerate(order)) for order in itertools.permutations(deadlines))

    verdicts = set()
    for count, updates, groups in itertools.product(range(1, 5), (1, 2), (1, 2)):
        for deadlines in itertools.combinations_with_replacement(range(1, 8), count):
            expected = schedulable(deadlines, updates, groups)
            verdicts.add(expected)
            assert feasible([(limit, 3) for limit in deadlines], next_version=2, updates_per_batch=updates, slots_per_batch=3 * groups) is expected
    assert verdicts == {True, False}


def test_under_wait_lagging_samplers_get_less_room_until_they_catch_up() -> None:
    async def main() -> None:
        settings = pool_settings(pool={"max_staleness": 2, "on_expiry": "wait"})
        pool = ExperiencePool(settings)
        first = fill(pool)
        assert len(first) == 6
        for reservation in first:
            finish(pool, reservation)
        for number in range(3):
            selection = await pool.take(learner_version=version(number))
            pool.retire(selection, learned(selection, trained_from=number, settings=settings))
        # the learner is at 3, the samplers still at 1: tokens drawn now must be taken at 3, so there is room for one batch only
        assert len(fill(pool, learner=3, sampler=1)) == 2
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(pool.reserve(TASK, learner_version=version(3), sampler_version=version(1)))
            await asyncio.sleep(1)
            assert not waiting.done()
            pool.observe(sampler_version=version(3))
        assert waiting.result().group_id == 8
        assert len(fill(pool, learner=3, sampler=3)) == 3

    run_virtual(main())
