"""A group is served at its quorum; late members are served as they come, against everybody known; the group retires after its last."""

from __future__ import annotations

from typing import Any

from fakes.pool_runs import TASK, Bench, finished, groups_of, pool_settings, version
from headrace.clock import run_virtual
from headrace.types import EndReason, RetireReason, RolloutKey
from headrace.updates import Selection


def quorum_bench(quorum: int = 3, group_size: int = 4, attempts: int = 1, **pool: Any) -> Bench:
    settings = pool_settings(
        pool={"groups_per_batch": 1, "max_staleness": 3, "quorum": quorum, **pool}, rollout={"group_size": group_size, "max_attempts": attempts}
    )
    bench = Bench(settings)
    bench.fill()
    return bench


def add(bench: Bench, index: int, member: int, reward: float, **tokens: Any) -> None:
    bench.add(finished(RolloutKey(bench.groups[index].group_id, member, 0), reward=reward, **tokens))


def members_of(selection: Selection) -> list[tuple[int, int]]:
    return [member.summary.key[:2] for member in selection.members]


def test_a_batch_is_filled_with_pieces_and_late_members_are_trained_against_all() -> None:
    async def main() -> None:
        b = quorum_bench()
        for member, reward in enumerate((0.0, 1.0, 2.0)):
            add(b, 0, member, reward)
        assert await b.try_take(0) is None, "three of four slots"
        for member in range(4):
            add(b, 1, member, float(member))
        first = await b.take(0)
        assert members_of(first) == [(0, 0), (0, 1), (0, 2), (1, 0)], "a batch holds exactly its trajectories"
        assert first.group_rewards == {0: (0.0, 1.0, 2.0), 1: (0.0, 1.0, 2.0, 3.0)}
        b.learn(first, 0)
        b.pool.ledger.check()
        add(b, 0, 3, 5.0)
        second = await b.take(1)
        assert members_of(second) == [(0, 3), (1, 1), (1, 2), (1, 3)]
        assert second.group_rewards == {0: (0.0, 1.0, 2.0, 5.0), 1: (0.0, 1.0, 2.0, 3.0)}
        b.learn(second, 1)
        groups = b.pool.ledger.snapshot(at_update=2, lineage=0)["groups"]
        assert groups["trained"] == 2 and groups["pooled"] == 0
        assert all(reason is RetireReason.TRAINED for reason in b.retired.values()) and len(b.retired) == 8

    run_virtual(main())


def test_a_whole_group_needs_no_rewards_beside_it() -> None:
    async def main() -> None:
        b = quorum_bench()
        for member in range(4):
            add(b, 0, member, float(member))
        assert (await b.take(0)).group_rewards == {}

    run_virtual(main())


def test_a_quorum_without_signal_waits_for_the_members_that_may_bring_it() -> None:
    async def main() -> None:
        b = quorum_bench()
        for index in (0, 1):
            for member in range(3):
                add(b, index, member, 0.0)
        assert await b.try_take(0) is None
        add(b, 0, 3, 1.0)
        assert members_of(await b.take(0)) == [(0, 0), (0, 1), (0, 2), (0, 3)]

    run_virtual(main())


def test_a_failed_member_is_in_no_baseline_and_takes_a_slot_once() -> None:
    """Case 13."""

    async def main() -> None:
        b = quorum_bench(quorum=2)
        add(b, 0, 0, 0.0)
        add(b, 0, 1, 9.0, end=EndReason.ENVIRONMENT_ERROR)
        add(b, 0, 2, 1.0)
        assert await b.try_take(0) is None, "two members and a lost one: three slots"
        add(b, 1, 0, 3.0)
        add(b, 1, 1, 4.0)
        first = await b.take(0)
        assert members_of(first) == [(0, 0), (0, 2), (1, 0)]
        assert first.group_rewards == {0: (0.0, 1.0), 1: (3.0, 4.0)}
        b.learn(first, 0)
        add(b, 0, 3, 2.0)
        add(b, 1, 2, 5.0, end=EndReason.ENVIRONMENT_ERROR)
        add(b, 1, 3, 6.0)
        second = await b.take(1)
        assert members_of(second) == [(0, 3), (1, 1), (1, 3)]
        assert second.group_rewards == {0: (0.0, 1.0, 2.0), 1: (3.0, 4.0, 6.0)}

    run_virtual(main())


def test_case_14_the_last_late_member_may_fail_and_its_group_still_retires_as_trained() -> None:
    async def main() -> None:
        b = quorum_bench(quorum=2, group_size=3, groups_per_batch=2)
        for index in (0, 1, 2):
            add(b, index, 0, 0.0)
            add(b, index, 1, 1.0)
        b.learn(await b.take(0), 0)
        before = b.pool.outstanding_groups
        add(b, 0, 2, 0.0, end=EndReason.SAMPLER_ERROR)
        assert b.pool.outstanding_groups == before - 1
        ledger = b.pool.ledger.snapshot(at_update=1, lineage=0)
        assert ledger["closes"] and ledger["groups"]["trained"] == 1 and ledger["groups"]["failed"] == {}
        assert ledger["trajectories"]["failed"] == {"sampler_error": 1}

    run_virtual(main())


def test_oldest_first_waits_for_a_quorum_and_for_no_late_member() -> None:
    async def main() -> None:
        b = quorum_bench(quorum=2, group_size=2, selection="oldest_first")
        add(b, 0, 0, 0.0)
        for index in (1, 2):
            b.finish(index)
        assert await b.try_take(0) is None
        add(b, 0, 1, 1.0)
        assert groups_of(await b.take(0)) == [0]
        c = quorum_bench(quorum=2, group_size=3, selection="oldest_first")
        for member, reward in ((0, 0.0), (1, 1.0)):
            add(c, 0, member, reward)
        for member in range(3):
            add(c, 1, member, float(member))
        assert members_of(await c.take(0)) == [(0, 0), (0, 1), (1, 0)]
        for member in range(3):
            add(c, 2, member, float(member))
        assert members_of(await c.take(1)) == [(1, 1), (1, 2), (2, 0)], "member 2 of group 0 is late"

    run_virtual(main())


def test_draining_waits_for_late_members_too() -> None:
    async def main() -> None:
        b = Bench(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 1, "quorum": 2}, rollout={"group_size": 3}))
        b.groups.append(b.pool.reserve_now(TASK, learner_version=version(0), sampler_version=version(0)))  # type: ignore[arg-type]
        add(b, 0, 0, 0.0)
        add(b, 0, 1, 1.0)
        b.pool.drain("the end")
        assert await b.try_take(0) is None
        add(b, 0, 2, 1.0)
        assert members_of(await b.take(0)) == [(0, 0), (0, 1), (0, 2)]

    run_virtual(main())
