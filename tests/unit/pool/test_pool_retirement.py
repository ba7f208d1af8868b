"""Add and retire: exactly once each, and every token and key step accounted for (I5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fakes.pool_runs import TASK, finished, learned, pool_settings, version
from headrace.clock import run_virtual
from headrace.errors import InvariantError
from headrace.pool.pool import ExperiencePool
from headrace.types import RetireReason, RolloutKey
from headrace.updates import MemberOutcome, Selection, UpdateResult

SETTINGS = pool_settings(pool={"max_staleness": 1, "groups_per_batch": 1})


def reserved(pool: ExperiencePool) -> tuple[RolloutKey, ...]:
    reservation = pool.reserve_now(TASK, learner_version=version(0), sampler_version=version(0))
    assert reservation is not None
    return reservation.keys


async def taken(pool: ExperiencePool) -> Selection:
    """Two members of 3 unmarked and 2 key tokens in 2 key steps."""
    for key in reserved(pool):
        pool.add(finished(key, versions={0: 3}, key_versions={0: 2}, key_steps=2, reward=float(key.member)), worker="w")
    pool.ledger.report_generated("w", 10)
    return await pool.take(learner_version=version(0))


def result_of(selection: Selection, *outcomes: MemberOutcome, refused: str | None = None, after: int = 1) -> UpdateResult:
    result = learned(selection, trained_from=0, settings=SETTINGS)
    return replace(result, outcomes=outcomes, refused=refused, version_after=version(after))


def spent(key: RolloutKey, trained: int, steps: int, *, over: int = 0, skipped: dict[str, int] | None = None) -> MemberOutcome:
    skipped = skipped or {}
    return MemberOutcome(
        key=key,
        trained_tokens=trained,
        skipped_tokens=skipped,
        trained_key_steps=steps,
        over_bound_key_steps=over,
        skipped_key_steps={"masked": 2 - steps} if steps < 2 else {},
    )


def test_a_member_added_twice_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        key = reserved(pool)[0]
        pool.ledger.report_generated("w", 3)
        pool.add(finished(key), worker="w")
        before = pool.ledger.snapshot(at_update=0, lineage=0)
        with pytest.raises(InvariantError, match="came back twice"):
            pool.add(finished(key), worker="w")
        assert pool.ledger.snapshot(at_update=0, lineage=0) == before

    run_virtual(main())


@pytest.mark.parametrize("key", [RolloutKey(7, 0, 0), RolloutKey(0, 2, 0), RolloutKey(0, 0, 1)])
def test_a_rollout_that_was_never_reserved_is_refused(key: RolloutKey) -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        reserved(pool)
        with pytest.raises(InvariantError, match="never reserved"):
            pool.add(finished(key))

    run_virtual(main())


def test_a_selection_retires_once() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        selection = await taken(pool)
        result = learned(selection, trained_from=0, settings=SETTINGS)
        pool.retire(selection, result)
        with pytest.raises(InvariantError, match="retired already"):
            pool.retire(selection, result)
        pool.ledger.check()

    run_virtual(main())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: None, "without a result"),
        (lambda s: replace(result_of(s), selection_id=9), "selection 9"),
        (lambda s: result_of(s, spent(s.members[0].summary.key, 5, 2)), "says nothing"),
        (lambda s: result_of(s, *[spent(s.members[0].summary.key, 5, 2)] * 2), "twice"),
        (lambda s: result_of(s, *[spent(m.summary.key, 5, 2) for m in s.members], spent(RolloutKey(5, 0, 0), 5, 2)), "does not hold"),
        (lambda s: result_of(s, *[spent(m.summary.key, 4, 2) for m in s.members]), "5 action tokens"),
        (lambda s: result_of(s, *[spent(m.summary.key, 6, 2, skipped={"stale": -1}) for m in s.members]), "5 action tokens"),
        (lambda s: result_of(s, *[spent(m.summary.key, 5, 3) for m in s.members]), "2 key steps"),
    ],
)
def test_a_result_that_leaves_anything_open_is_refused_and_the_batch_stays_out(spoil: Callable[[Selection], UpdateResult | None], message: str) -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        selection = await taken(pool)
        with pytest.raises(InvariantError, match=message):
            pool.retire(selection, spoil(selection))
        assert pool.statistics().taken_groups == 1
        pool.ledger.check()

    run_virtual(main())


def test_tokens_and_key_steps_are_booked_as_the_outcomes_say() -> None:
    async def main() -> None:
        retired: dict[RolloutKey, RetireReason] = {}
        pool = ExperiencePool(SETTINGS, on_retire=lambda retirement: retired.update({retirement.key: retirement.reason}))
        selection = await taken(pool)
        first, second = (member.summary.key for member in selection.members)
        pool.retire(selection, result_of(selection, spent(first, 3, 2, over=1, skipped={"stale": 2}), spent(second, 0, 0, skipped={"stale": 2, "masked": 3})))
        pool.ledger.check()
        ledger = pool.ledger.snapshot(at_update=1, lineage=0)
        assert retired == {first: RetireReason.TRAINED, second: RetireReason.SKIPPED}
        assert ledger["tokens"]["trained"] == 3 and ledger["tokens"]["skipped"] == {"stale": 4, "masked": 3}
        assert ledger["trajectories"]["trained"] == 1 and ledger["trajectories"]["skipped"] == {"masked": 1}
        assert ledger["groups"]["trained"] == 1
        assert ledger["key_steps"] == {
            "offered": 4, "trained": 2, "over_bound": 1, "skipped": {"masked": 2}, "void": 0, "pooled": 0, "in_flight": 0, "failed": {},
        }  # fmt: skip

    run_virtual(main())


@pytest.mark.parametrize("says_trained", [True, False])
def test_a_refused_update_trains_nothing_and_frees_its_admission(says_trained: bool) -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        selection = await taken(pool)
        outcomes = [spent(member.summary.key, 4, 2, skipped={"stale": 1}) for member in selection.members] if says_trained else []
        pool.retire(selection, result_of(selection, *outcomes, refused="the gradient is not finite", after=0))
        pool.ledger.check()
        ledger = pool.ledger.snapshot(at_update=0, lineage=0)
        assert ledger["tokens"]["trained"] == 0
        assert ledger["tokens"]["skipped"] == ({"refused": 8, "stale": 2} if says_trained else {"refused": 10})
        assert ledger["key_steps"]["skipped"] == {"refused": 4}
        assert ledger["trajectories"]["skipped"] == {"refused": 2} and ledger["groups"]["skipped"] == {"refused": 1}
        assert pool.outstanding_groups == 0

    run_virtual(main())


def test_a_partly_refused_batch_counts_what_was_trained() -> None:
    async def main() -> None:
        pool = ExperiencePool(SETTINGS)
        selection = await taken(pool)
        first, second = (member.summary.key for member in selection.members)
        pool.retire(selection, result_of(selection, spent(first, 5, 2), spent(second, 0, 0, skipped={"refused": 5}), refused="one of two", after=1))
        assert pool.ledger.snapshot(at_update=1, lineage=0)["tokens"]["trained"] == 5

    run_virtual(main())


def test_a_trajectory_without_action_tokens_retires_as_skipped_empty() -> None:
    async def main() -> None:
        pool = ExperiencePool(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 0}))
        first, second = reserved(pool)
        pool.add(finished(first, versions={}, reward=1.0))
        pool.add(finished(second, versions={0: 2}))
        selection = await pool.take(learner_version=version(0))
        pool.retire(selection, learned(selection, trained_from=0, settings=SETTINGS))
        assert pool.ledger.snapshot(at_update=1, lineage=0)["trajectories"]["skipped"] == {"empty": 1}

    run_virtual(main())
