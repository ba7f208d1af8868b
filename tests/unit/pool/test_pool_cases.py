"""Cases 1, 2, 5, 8 and 14 of what users report, on whole small runs under the virtual clock."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fakes.pool_runs import SmallRun, finished, learned, pool_settings, version
from headrace.clock import now, run_virtual
from headrace.config import Settings
from headrace.pool.pool import ExperiencePool
from headrace.types import EndReason, RetireReason, Task
from headrace.updates import Selection

SELECTIONS = ["oldest_first", "ready_first"]
EXPIRIES = ["skip_tokens", "drop_group", "wait"]
RULES = list(itertools.product(SELECTIONS, EXPIRIES))


def tasks(count: int, **kinds: dict[str, Any]) -> list[Task]:
    """Kinds in turn."""
    names = list(kinds)
    return [Task(id=str(index), data=kinds[names[index % len(names)]], kind=names[index % len(names)]) for index in range(count)]


def keys_of(selection: Selection) -> list[Any]:
    return [*(member.summary.key for member in selection.members), *selection.filtered]


def check_ended_well(run: SmallRun) -> dict[str, Any]:
    """I5 and I7, no empty and no repeated batch."""
    ledger = run.pool.ledger.snapshot(at_update=run.learner_version, lineage=0)
    assert ledger["closes"]
    for unit in ("tokens", "trajectories", "groups"):
        assert ledger[unit]["pooled"] == ledger[unit]["in_flight"] == 0
    assert len({retirement.key for retirement in run.retired}) == len(run.retired)
    served = [key for selection in run.selections for key in keys_of(selection)]
    assert len(set(served)) == len(served)
    assert all(keys_of(selection) for selection in run.selections)
    return ledger


@pytest.mark.parametrize(("selection", "on_expiry"), RULES)
def test_case_1_slow_tasks_keep_their_share_and_nothing_is_generated_again(selection: str, on_expiry: str) -> None:
    """1 s against 60 s, max_staleness 2. The exception is drop_group under ready_first: its bias is reported by kind."""
    settings = pool_settings(pool={"groups_per_batch": 4, "max_staleness": 2, "selection": selection, "on_expiry": on_expiry}, rollout={"group_size": 4})
    offered = tasks(120, fast={"seconds": 1.0, "tokens": 4}, slow={"seconds": 60.0, "tokens": 60})

    async def main() -> dict[str, Any]:
        run = SmallRun(settings, learn_seconds=0.5)
        await run.run(offered)
        assert run.started == {"fast": 240, "slow": 240}
        return check_ended_well(run)["kinds"]

    kinds = run_virtual(main())
    trained = {kind: counts["trained"] for kind, counts in kinds.items()}
    if (selection, on_expiry) == ("ready_first", "drop_group"):
        assert trained["fast"] == 240
        assert trained["slow"] + kinds["slow"]["expired"] == 240 and kinds["slow"]["expired"] > 0
    else:
        assert abs(trained["slow"] / sum(trained.values()) - 0.5) <= 0.02
    slow = kinds["slow"]
    assert slow["trained_tokens"] + sum(slow["skipped_tokens"].values()) == 60 * (slow["trained"] + slow["skipped"])
    assert (sum(slow["skipped_tokens"].values()) > 0) is ((selection, on_expiry) == ("ready_first", "skip_tokens"))


@pytest.mark.parametrize(("selection", "on_expiry"), RULES)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_case_2_rollouts_slower_than_the_bound_still_make_progress(selection: str, on_expiry: str, max_staleness: int) -> None:
    settings = pool_settings(pool={"max_staleness": max_staleness, "selection": selection, "on_expiry": on_expiry})
    offered = tasks(200, a={"seconds": 100.0, "tokens": 10}, b={"seconds": 130.0, "tokens": 10}, c={"seconds": 700.0, "tokens": 10})

    async def main() -> None:
        run = SmallRun(settings, learn_seconds=0.1)
        await run.run(offered)
        ledger = check_ended_well(run)
        trained = ledger["groups"]["trained"]
        assert trained + ledger["groups"]["expired"] == 200
        assert run.learner_version == len(run.selections) >= 50
        if on_expiry != "drop_group":
            assert trained == 200

    run_virtual(main())


def traced(settings: Settings) -> list[tuple[Any, ...]]:
    async def main() -> list[tuple[Any, ...]]:
        run = SmallRun(settings, learn_seconds=3.0, apply_seconds=500.0)
        await run.run(tasks(24, a={"seconds": 1.0, "tokens": 3}, b={"seconds": 7.0, "tokens": 5, "fail_attempts": 1}))
        assert len(run.selections) == 12
        assert all(drawn == {learner: total} for learner, drawn, total in _draws(run))
        return run.trace

    return run_virtual(main())


def _draws(run: SmallRun) -> list[tuple[int, dict[int, int], int]]:
    drawn = {entry[1]: entry[2] for entry in run.trace if entry[0] == "finished"}
    return [(entry[1], drawn[key], sum(drawn[key].values())) for entry in run.trace if entry[0] == "taken" for key in entry[2]]


@pytest.mark.parametrize(("selection", "on_expiry"), RULES)
def test_case_5_max_staleness_0_equals_sync_event_for_event_although_updates_take_long(selection: str, on_expiry: str) -> None:
    rules = {"selection": selection, "on_expiry": on_expiry}
    asynchronous = traced(pool_settings(run={"mode": "async"}, pool={"max_staleness": 0, **rules}))
    synchronous = traced(pool_settings(run={"mode": "sync"}, pool={"max_staleness": 8, **rules}))
    assert len(asynchronous) > 100
    assert asynchronous == synchronous


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_case_8_after_a_pause_everything_is_filled_at_one_instant(max_staleness: int) -> None:
    settings = pool_settings(pool={"groups_per_batch": 16, "max_staleness": max_staleness})

    async def main() -> None:
        pool = ExperiencePool(settings)
        bound = 16 * (max_staleness + 1)
        groups = 0
        for update in range(3):
            start = now()
            keys = []
            while (reservation := pool.reserve_now(Task(id="a", data={}), learner_version=version(update), sampler_version=version(update))) is not None:
                keys += reservation.keys
            groups += len(keys) // 2
            assert now() == start and pool.outstanding_groups == bound
            for key in keys:
                pool.add(finished(key, versions={update: 1}, reward=float(key.member)))
            selection = await pool.take(learner_version=version(update))
            pool.retire(selection, learned(selection, trained_from=update, settings=settings))
        assert groups == bound + 2 * 16

    run_virtual(main())


def test_case_14_one_failed_rollout_takes_nobody_with_it() -> None:
    """Members of group 3 fail once, and those of group 5 for good: one attempt more, one member less, nothing else."""
    settings = pool_settings(pool={"groups_per_batch": 2, "max_staleness": 1}, rollout={"group_size": 4, "max_attempts": 2})
    offered = [Task(id=str(index), data={"seconds": 1.0, "tokens": 2, "fail_attempts": {3: 1, 5: 2}.get(index, 0)}) for index in range(20)]

    async def main() -> None:
        run = SmallRun(settings)
        await run.run(offered)
        ledger = check_ended_well(run)
        assert ledger["groups"]["trained"] == 20
        assert ledger["trajectories"]["failed"] == {str(EndReason.ENVIRONMENT_ERROR): 3} and ledger["trajectories"]["trained"] == 79
        assert ledger["tokens"]["failed"] == {str(EndReason.ENVIRONMENT_ERROR): 6} and ledger["tokens"]["trained"] == 158
        failed = [retirement.key for retirement in run.retired if retirement.reason is RetireReason.FAILED]
        assert failed == [(5, 0, 1)]

    run_virtual(main())
