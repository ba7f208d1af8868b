"""Members that aged go back to their workers before they are trained: who is asked, when, and what the ledger says meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.pool_runs import TASK, Bench, finished, groups_of, pool_settings, version
from headrace.clock import run_virtual
from headrace.errors import InvariantError
from headrace.types import EndReason, RetireReason, RolloutKey


class VerifyingBench(Bench):
    """Batches of one group of two; both members are delivered by worker `w`."""

    def __init__(self, **pool: Any) -> None:
        super().__init__(pool_settings(pool={"groups_per_batch": 1, "max_staleness": 8, "verify": "key_steps", **pool}))

    def worker_at(self, number: int, worker: str = "w") -> None:
        self.pool.observe(sampler_version=version(number))
        self.pool.observe_worker(worker, version=version(number))

    def deliver(self, index: int, *, worker: str = "w", **tokens: Any) -> None:
        for key in self.groups[index].keys:
            one = finished(key, reward=float(key.member), **tokens)
            self.report(one.summary.num_action_tokens, worker)
            self.pool.add(one, worker=worker)

    def report(self, tokens: int, worker: str = "w") -> None:
        self.generated += tokens
        self.pool.ledger.report_generated(worker, self.generated)

    def ledger(self, unit: str) -> dict[str, Any]:
        self.pool.ledger.check()
        return {name: count for name, count in self.pool.ledger.snapshot(at_update=0, lineage=0)[unit].items() if count}

    async def advance_to(self, number: int) -> None:
        """So many updates on fresh groups, one after another; group 0 stays out."""
        for at in range(number):
            key_group = len(self.groups)
            self.groups.append(self._reserve(at))
            self.deliver(key_group, versions={at: 1})
            self.learn(await self.take(at), at)

    def _reserve(self, learner: int) -> Any:
        return self.pool.reserve_now(TASK, learner_version=version(learner), sampler_version=version(learner))


def begun(**pool: Any) -> VerifyingBench:
    bench = VerifyingBench(**pool)
    bench.groups.append(bench._reserve(0))
    return bench


def test_an_aged_group_is_held_back_until_its_worker_has_checked_it() -> None:
    async def main() -> None:
        b = begun(verify_after=1)
        await b.advance_to(2)
        b.worker_at(2)
        b.deliver(0, versions={0: 2}, key_versions={0: 3})
        assert await b.try_take(2) is None, "key tokens two updates old are due at verify_after 1"
        keys = b.groups[0].keys
        assert b.pool.due_for_verification() == {"w": keys}
        assert b.pool.due_for_verification() == {}
        assert "2 rollouts being verified" in b.pool.waiting_text(version(2))
        for key in keys:
            result = b.pool.add(finished(key, versions={0: 2}, key_versions={2: 3}, reward=float(key.member), round=1), worker="w")
            assert result.verified and result.retry is None and result.group_complete is (key.member == 1)
            if key.member == 0:
                assert await b.try_take(2) is None, "the other one is still with its worker"
        assert [member.summary.round for member in (await b.take(2)).members] == [1, 1]

    run_virtual(main())


def test_tokens_and_key_steps_under_verification_are_in_flight_and_come_back_or_are_refreshed() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, versions={0: 2}, key_versions={0: 3})
        assert b.ledger("key_steps") == {"offered": 2, "pooled": 2}
        first, second = b.groups[0].keys
        b.pool.due_for_verification()
        assert b.ledger("tokens")["in_flight"] == 10 and b.ledger("trajectories")["in_flight"] == 2
        assert b.ledger("key_steps") == {"offered": 2, "in_flight": 2}
        assert "pooled" not in b.ledger("tokens")
        b.pool.add(finished(first, versions={0: 2}, key_versions={1: 3}, round=1), worker="w")
        b.report(4)  # the redrawn token and three more
        b.pool.add(finished(second, versions={0: 2, 1: 1}, key_versions={1: 3}, reward=1.0, round=1, refreshed=3, refreshed_key_steps=1), worker="w")
        assert b.ledger("tokens")["pooled"] == 5 + 6 and b.ledger("tokens")["skipped"] == {"refreshed": 3}
        assert b.ledger("key_steps") == {"offered": 3, "skipped": {"refreshed": 1}, "pooled": 2}
        b.learn(await b.take(1), 1)
        assert b.ledger("key_steps") == {"offered": 3, "skipped": {"refreshed": 1}, "trained": 2}
        assert "in_flight" not in b.ledger("tokens")

    run_virtual(main())


def test_nobody_waits_for_a_member_that_is_sampled_again_and_its_old_reward_stays_in_the_baseline() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        assert set(b.pool.due_for_verification()["w"]) == set(b.groups[0].keys)
        first, second = b.groups[0].keys
        b.pool.add(finished(first, versions={}, key_versions={1: 3}, round=1), worker="w")
        b.pool.rejected([second])
        other = len(b.groups)
        b.groups.append(b._reserve(1))
        b.deliver(other, versions={1: 1})
        selection = await b.take(1)
        assert [member.summary.key for member in selection.members] == [first, b.groups[other].keys[0]]
        assert selection.group_rewards[0] == (0.0, 1.0)
        b.learn(selection, 1)
        b.report(3)
        late = finished(second, versions={}, key_versions={2: 3}, round=1, refreshed=3, refreshed_key_steps=1, reward=0.5)
        assert b.pool.add(late, worker="w").verified
        selection = await b.take(2)
        assert second in [member.summary.key for member in selection.members]
        assert selection.group_rewards[0] == (0.0, 0.5)
        b.learn(selection, 2)
        b.ledger("key_steps")

    run_virtual(main())


def test_a_group_waits_while_any_of_its_members_is_still_being_checked() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        b.pool.due_for_verification()
        first, second = b.groups[0].keys
        assert await b.try_take(1) is None
        b.pool.rejected([second])
        b.pool.rejected([RolloutKey(0, 0, 1), RolloutKey(77, 0, 0)])  # an attempt that is not out, a group that is not there
        assert await b.try_take(1) is None
        b.pool.rejected([first])  # nobody is left to be served
        assert await b.try_take(1) is None

    run_virtual(main())


def test_a_rollout_that_fails_after_its_cut_fails_as_usual_and_is_tried_again() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        b.pool.due_for_verification()
        first, second = b.groups[0].keys
        b.pool.add(finished(first, versions={}, key_versions={1: 3}, round=1), worker="w")
        b.report(1)
        failed = finished(second, versions={}, key_versions={1: 1}, end=EndReason.ENVIRONMENT_ERROR, round=1, refreshed=3, refreshed_key_steps=1)
        retry = b.pool.add(failed, worker="w").retry
        assert retry == second._replace(attempt=1)
        assert b.ledger("tokens")["failed"] == {"environment_error": 1}
        assert b.ledger("key_steps") == {"offered": 3, "skipped": {"refreshed": 1}, "failed": {"environment_error": 1}, "pooled": 1}
        assert await b.try_take(1) is None
        b.report(2)
        b.pool.add(finished(retry, versions={1: 2}, reward=1.0), worker="w")
        b.learn(await b.take(1), 1)

    run_virtual(main())


def test_the_old_trajectory_is_served_when_its_worker_is_lost_over_it() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        b.pool.due_for_verification()
        b.report(5)  # drawn after a cut, never delivered
        assert b.pool.worker_lost("w", []) == ()
        assert b.ledger("tokens")["failed"] == {"worker_lost": 5}
        b.pool.observe_worker("w", version=version(1))  # its successor knows nothing of them
        assert b.pool.due_for_verification() == {}
        selection = await b.take(1)
        assert [member.summary.round for member in selection.members] == [0, 0]
        with pytest.raises(InvariantError, match="came back twice"):  # an answer after all
            b.pool.add(finished(b.groups[0].keys[0], key_versions={1: 3}, versions={}, round=1), worker="w")
        b.learn(selection, 1)
        assert b.ledger("key_steps") == {"offered": 2, "trained": 2}

    run_virtual(main())


def test_rounds_are_limited_and_what_is_older_then_is_served() -> None:
    async def main() -> None:
        b = begun(verify_after=0, verify_rounds=2)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        for turn in (1, 2):
            assert b.pool.due_for_verification() == {"w": b.groups[0].keys}
            for key in b.groups[0].keys:  # it could not be checked: as old as before
                b.pool.add(finished(key, key_versions={0: 3}, versions={}, reward=float(key.member), round=turn), worker="w")
        assert b.pool.due_for_verification() == {}
        assert groups_of(await b.take(1)) == [0]

    run_virtual(main())


def test_nobody_is_asked_before_the_workers_weights_can_help() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(2)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        assert b.pool.due_for_verification() == {}, "weights of version 1 would leave the tokens one update old"
        assert await b.try_take(2) is None
        change = b.pool.next_change()
        b.worker_at(2)
        assert change.is_set()
        assert b.pool.due_for_verification() == {"w": b.groups[0].keys}

    run_virtual(main())


def test_only_what_is_about_to_be_served_is_checked() -> None:
    """Nobody is asked for aged groups while what is fresh before them fills the next batch; then the first of them is."""

    async def main() -> None:
        b = VerifyingBench(verify_after=1, max_key_staleness=8)
        b.groups += [b._reserve(0) for _ in range(4)]
        await b.advance_to(1)
        b.worker_at(1)
        for _ in range(2):
            b.groups.append(b._reserve(1))
            b.deliver(len(b.groups) - 1, versions={1: 1})
        taken = await b.take(1)
        for index in range(3):
            b.deliver(index, key_versions={0: 3}, versions={})
        assert b.pool.due_for_verification() == {}, "a fresh group is before them"
        b.learn(taken, 1)
        b.learn(await b.take(2), 2)
        b.worker_at(3)
        assert b.groups[0].keys[0] in b.pool.due_for_verification()["w"]

    run_virtual(main())


@pytest.mark.parametrize(("verify", "due"), [("key_steps", False), ("all", True), ("off", False)])
def test_unmarked_tokens_are_checked_only_under_verify_all(verify: str, due: bool) -> None:
    async def main() -> None:
        b = begun(verify=verify, verify_after=1)
        await b.advance_to(2)
        b.worker_at(2)
        b.deliver(0, versions={0: 3})
        assert bool(b.pool.due_for_verification()) is due

    run_virtual(main())


def test_an_expired_group_that_verification_can_make_new_is_not_dropped() -> None:
    async def main() -> None:
        b = begun(verify="all", verify_after=1, max_staleness=2, on_expiry="drop_group")
        await b.advance_to(3)
        b.worker_at(3)
        b.deliver(0, versions={0: 3})
        assert await b.try_take(3) is None
        assert b.pool.due_for_verification() == {"w": b.groups[0].keys}
        for key in b.groups[0].keys:
            b.pool.add(finished(key, versions={3: 3}, reward=float(key.member), round=1), worker="w")
        assert groups_of(await b.take(3)) == [0]

    run_virtual(main())


def test_workers_are_told_once_what_left_the_pool() -> None:
    async def main() -> None:
        b = begun(verify_after=8)
        b.worker_at(0)
        b.deliver(0, versions={0: 3})
        selection = await b.take(0)
        assert b.pool.take_forgotten() == {}
        b.learn(selection, 0)
        assert b.pool.take_forgotten() == {"w": list(b.groups[0].keys)}
        assert b.pool.take_forgotten() == {}

    run_virtual(main())


def test_an_answer_of_the_same_round_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        b = begun(verify_after=0)
        await b.advance_to(1)
        b.worker_at(1)
        b.deliver(0, key_versions={0: 3}, versions={})
        b.pool.due_for_verification()
        key: RolloutKey = b.groups[0].keys[0]
        with pytest.raises(InvariantError, match="came back from verification 1 as of round 0"):
            b.pool.add(finished(key, key_versions={0: 3}, versions={}), worker="w")
        assert b.ledger("trajectories")["in_flight"] == 2
        b.pool.add(finished(key, key_versions={1: 3}, versions={}, round=1), worker="w")
        assert RetireReason.FAILED not in b.retired.values()

    run_virtual(main())


def test_while_one_of_the_group_is_out_the_others_are_checked_again_only_at_twice_the_age() -> None:
    async def main() -> None:
        b = begun(verify_after=1, verify_rounds=8)
        await b.advance_to(2)
        b.worker_at(2)
        b.deliver(0, key_versions={0: 3}, versions={})
        first, second = b.groups[0].keys
        assert b.pool.due_for_verification() == {"w": (first, second)}
        b.pool.add(finished(first, key_versions={2: 3}, versions={}, round=1), worker="w")  # the other one was cut: it stays out
        asked = []
        for number in range(3, 9):
            b.pool.observe(learner_version=version(number))
            b.worker_at(number)
            if b.pool.due_for_verification():
                asked.append(number)
                b.pool.add(finished(first, key_versions={number: 3}, versions={}, round=1 + len(asked)), worker="w")
        assert asked == [5], "age 3 is over twice verify_after; the next time only an age over four times it is enough"
        b.pool.add(finished(second, key_versions={8: 3}, versions={}, reward=1.0, round=1), worker="w")
        assert b.pool.due_for_verification() == {"w": (first,)}, "nobody is out: what is older than verify_after is checked"

    run_virtual(main())
