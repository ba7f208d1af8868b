"""The ledger closes, and says so when it does not (I7)."""

from __future__ import annotations

import pytest

from fakes.pool_runs import TASK, finished, learned, pool_settings, version
from headrace.clock import run_virtual
from headrace.errors import LedgerError
from headrace.pool.members import MAX_LOSSES
from headrace.pool.pool import ExperiencePool, GroupReservation
from headrace.types import EndReason, RolloutKey

SETTINGS = pool_settings(pool={"groups_per_batch": 1, "max_staleness": 1}, rollout={"max_attempts": 2})


def reserved(pool: ExperiencePool) -> GroupReservation:
    reservation = pool.reserve_now(TASK, learner_version=version(0), sampler_version=version(0))
    assert reservation is not None
    return reservation


def test_classes_at_every_stage_sum_to_what_was_generated() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        ledger = pool.ledger

        def tokens() -> dict[str, object]:
            ledger.check()
            snapshot = ledger.snapshot(at_update=3, lineage=0)
            assert snapshot["closes"] and (snapshot["at_update"], snapshot["lineage"]) == (3, 0)
            return {name: count for name, count in snapshot["tokens"].items() if count}

        first, second = reserved(pool).keys
        assert tokens() == {}
        ledger.report_generated("a", 2)
        ledger.report_generated("b", 7)
        assert tokens() == {"generated": 9, "in_flight": 9}
        ledger.report_generated("a", 6)
        pool.add(finished(first, versions={0: 4}, discarded=2, reward=1.0), worker="a")
        assert tokens() == {"generated": 13, "failed": {"aborted": 2}, "pooled": 4, "in_flight": 7}
        retry = pool.add(finished(second, versions={0: 3}, end=EndReason.REWARD_ERROR), worker="b").retry
        assert tokens() == {"generated": 13, "failed": {"aborted": 2, "reward_error": 3}, "pooled": 4, "in_flight": 4}
        assert retry is not None
        pool.add(finished(retry, versions={0: 4}), worker="b")
        assert tokens() == {"generated": 13, "failed": {"aborted": 2, "reward_error": 3}, "pooled": 8}
        selection = await pool.take(learner_version=version(0))
        assert tokens() == {"generated": 13, "failed": {"aborted": 2, "reward_error": 3}, "pooled": 8}
        pool.retire(selection, learned(selection, trained_from=0, settings=SETTINGS))
        assert tokens() == {"generated": 13, "trained": 8, "failed": {"aborted": 2, "reward_error": 3}}
        assert ledger.snapshot(at_update=1, lineage=0)["trajectories"]["generated"] == 3

    run_virtual(main())


def test_a_trajectory_lost_on_its_way_is_named() -> None:
    """A worker drew it, nobody delivered it, and no rollout is out that could still do so."""

    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        for key in reserved(pool).keys:
            pool.add(finished(key), worker="a")
        pool.ledger.report_generated("a", 6 + 5)
        assert not pool.ledger.snapshot(at_update=0, lineage=0)["closes"]
        with pytest.raises(LedgerError, match="5 in_flight although no rollout is"):
            pool.ledger.check()

    run_virtual(main())


def test_a_trajectory_lost_inside_the_pool_is_named() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        pool.ledger.report_generated("a", 6)
        for key in reserved(pool).keys:
            pool.add(finished(key), worker="a")
        pool.ledger.check()
        del pool.members.groups[0].finished[1]  # the planted fault
        with pytest.raises(LedgerError, match=r"tokens: 6 generated, the classes sum to 3 \(3 lost\).*trajectories: 2 generated, the classes sum to 1"):
            pool.ledger.check()

    run_virtual(main())


def test_a_doubled_trajectory_is_named() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        pool.ledger.report_generated("a", 6)
        for key in reserved(pool).keys:
            pool.add(finished(key), worker="a")
        double = finished(RolloutKey(0, 2, 0))
        pool.members.groups[0].finished[2] = double  # the planted fault: past the check of add
        with pytest.raises(LedgerError, match=r"the classes sum to 9 \(3 counted twice\)"):
            pool.ledger.check()
        pool.ledger.delivered(double.summary, "a")
        with pytest.raises(LedgerError, match=r"tokens: in_flight is -3"):
            pool.ledger.check()

    run_virtual(main())


def test_a_delivery_without_a_report_is_not_hidden_by_another_workers_tokens_in_flight() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        pool.ledger.report_generated("a", 50)
        pool.ledger.report_generated("b", 2)
        pool.add(finished(reserved(pool).keys[0]), worker="b")
        with pytest.raises(LedgerError, match="worker b delivered 1 more than it reported"):
            pool.ledger.check()

    run_virtual(main())


def test_a_workers_counter_never_falls() -> None:
    pool = ExperiencePool(SETTINGS)
    pool.ledger.report_generated("a", 5)
    with pytest.raises(LedgerError, match="its counter fell"):
        pool.ledger.report_generated("a", 4)


def test_what_a_dead_worker_owed_becomes_worker_lost_and_its_rollouts_are_tried_again() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        first, second = reserved(pool).keys
        third, fourth = reserved(pool).keys
        pool.ledger.report_generated("a", 10)
        pool.ledger.report_generated("b", 3)
        pool.add(finished(first, versions={0: 4}), worker="a")
        again = [result.retry for result in pool.worker_lost("a", [second, third])]
        assert again == [second._replace(attempt=1), third._replace(attempt=1)]
        pool.ledger.check()
        snapshot = pool.ledger.snapshot(at_update=0, lineage=0)
        assert snapshot["tokens"]["failed"] == {"worker_lost": 6} and snapshot["tokens"]["in_flight"] == 3
        assert snapshot["trajectories"]["failed"] == {"worker_lost": 2} and snapshot["trajectories"]["in_flight"] == 3
        pool.ledger.report_generated("a", 4)  # a successor of the same name counts from 0
        pool.add(finished(third._replace(attempt=1), versions={0: 4}), worker="a")
        pool.add(finished(fourth, versions={0: 3}), worker="b")
        pool.ledger.check()
        assert pool.ledger.snapshot(at_update=0, lineage=0)["tokens"]["generated"] == 17

    run_virtual(main())


def test_evaluation_is_shown_apart_and_changes_no_sum() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        before = pool.ledger.snapshot(at_update=0, lineage=0)
        pool.ledger.add_evaluation([finished(RolloutKey(0, 0, 0), discarded=1).summary])
        after = pool.ledger.snapshot(at_update=0, lineage=0)
        assert after.pop("evaluation") == {"tokens": 4, "trajectories": 1}
        assert before.pop("evaluation") == {"tokens": 0, "trajectories": 0}
        assert after == before
        pool.ledger.check()

    run_virtual(main())


def test_failed_key_steps_are_booked_by_reason() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        key = reserved(pool).keys[0]
        pool.ledger.report_generated("a", 2)
        pool.add(finished(key, versions={}, key_versions={0: 2}, end=EndReason.ENVIRONMENT_ERROR), worker="a")
        pool.ledger.check()
        key_steps = pool.ledger.snapshot(at_update=0, lineage=0)["key_steps"]
        assert key_steps["offered"] == 1 and key_steps["failed"] == {"environment_error": 1}

    run_virtual(main())


def test_attempts_that_end_with_their_worker_do_not_count_but_are_bounded() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        key, other = reserved(pool).keys
        for _ in range(MAX_LOSSES):
            (result,) = pool.worker_lost("a", [key])
            assert result.retry is not None
            key = result.retry
        key_after_failure = pool.add(finished(key, versions={}, end=EndReason.ENVIRONMENT_ERROR), worker="a").retry
        assert key_after_failure is not None, "the first failure of the task's own: rollout.max_attempts is 2"
        assert pool.add(finished(key_after_failure, versions={}, end=EndReason.ENVIRONMENT_ERROR), worker="a").retry is None
        for _ in range(MAX_LOSSES):
            (result,) = pool.worker_lost("a", [other])
            assert result.retry is not None
            other = result.retry
        assert pool.worker_lost("a", [other])[0].retry is None, "one that kills every worker ends, too"
        pool.ledger.check()
        snapshot = pool.ledger.snapshot(at_update=0, lineage=0)
        assert snapshot["trajectories"]["failed"] == {"environment_error": 2, "worker_lost": 2 * MAX_LOSSES + 1}
        assert snapshot["groups"]["failed"] == {"worker_lost": 1}

    run_virtual(main())
