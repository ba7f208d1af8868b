"""Key steps in the pool: what is served first, what is never dropped, members marked by their reward."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fakes.pool_runs import Bench, finished, groups_of, learned, pool_settings, version
from headrace.clock import run_virtual
from headrace.types import RetireReason, RolloutKey


def bench(rollout: dict[str, Any] | None = None, marks: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **pool: Any) -> Bench:
    made = Bench(pool_settings(pool=pool, rollout=rollout or {}, marks=marks or {}, learner=learner or {}))
    made.reports = True
    return made


def test_a_group_whose_key_tokens_age_out_now_moves_up_one_batch() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=2, max_staleness=8, max_key_staleness=1)
        b.fill()
        b.finish(0, 1, versions={0: 3})
        b.learn(await b.take(0), 0)
        b.finish(2, versions={0: 3})
        b.finish(3, versions={0: 3})
        b.finish(4, key_versions={1: 3}, versions={})  # good for one batch more
        b.finish(5, key_versions={0: 3}, versions={})  # over max_key_staleness after the next batch
        b.finish(6, key_versions={0: 3}, versions={})
        first = await b.take(1)
        assert groups_of(first) == [2, 5]
        b.learn(first, 1)
        assert groups_of(await b.take(2)) == [3, 4], "group 4 ages out now, nothing is late twice for group 6"

    run_virtual(main())


def test_key_tokens_that_are_over_their_bound_already_move_nobody_up() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=8, max_key_staleness=0)
        b.fill()
        b.finish(0, versions={0: 3})
        b.learn(await b.take(0), 0)
        b.finish(1, versions={0: 3})
        b.finish(2, key_versions={0: 3}, versions={})
        assert groups_of(await b.take(1)) == [1]

    run_virtual(main())


async def _overtaken(draw: random.Random) -> int:
    per_batch = draw.choice([1, 2, 4])
    b = bench(groups_per_batch=per_batch, max_staleness=20, max_key_staleness=draw.choice([0, 1, 3]))
    ready: list[int] = []
    served: list[list[int]] = []
    out: list[int] = []
    for number in range(40):
        known = len(b.groups)
        b.fill(learner=number)
        out += range(known, len(b.groups))
        draw.shuffle(out)
        for _ in range(min(len(out), draw.choice([per_batch, per_batch, per_batch + 1]))):
            index = out.pop()
            ready.append(b.groups[index].group_id)
            age = draw.randint(0, min(number, 4))
            b.finish(index, versions={number: 1}, key_versions={number - age: 1} if draw.random() < 0.7 else {})
        selection = await b.take(number)
        served.append(groups_of(selection))
        b.learn(selection, number)
    overtaken = 0
    for at, batch in enumerate(served):
        for rank in map(ready.index, batch):
            before = sum(ready.index(other) > rank for earlier in served[:at] for other in earlier)
            assert before <= per_batch
            overtaken += before
    return overtaken


def test_no_group_is_overtaken_by_more_than_one_batch_of_groups() -> None:
    """Random marks, ages and completions: of the groups that became ready later, at most groups_per_batch are served before any group."""
    assert sum(run_virtual(_overtaken(random.Random(seed))) for seed in range(12)) > 50


def test_without_marks_the_order_is_that_of_completion() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=8, max_key_staleness=0)
        b.fill()
        for index in (3, 1, 2):
            b.finish(index, versions={0: 3})
        order = []
        for number in range(3):
            selection = await b.take(number)
            order += groups_of(selection)
            b.learn(selection, number)
        assert order == [3, 1, 2]

    run_virtual(main())


@pytest.mark.parametrize("on_expiry", ["skip_tokens", "drop_group"])
def test_a_group_with_key_steps_is_served_however_old_its_other_tokens_are(on_expiry: str) -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=1, on_expiry=on_expiry)
        b.fill()
        for number in range(3):
            b.fill(learner=number)
            b.finish(len(b.groups) - 1, versions={number: 1})
            b.learn(await b.take(number), number)
        b.finish(0, versions={0: 4}, key_versions={0: 2})
        selection = await b.take(3)
        assert groups_of(selection) == [0]
        b.learn(selection, 3)
        ledger = b.pool.ledger.snapshot(at_update=4, lineage=0)
        assert ledger["key_steps"]["trained"] == ledger["key_steps"]["over_bound"] == 2
        assert ledger["tokens"]["skipped"] == {"stale": 8}

    run_virtual(main())


@pytest.mark.parametrize("no_signal", ["filter", "refill"])
def test_a_group_without_signal_keeps_its_key_steps_in_the_books_as_filtered(no_signal: str) -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=2, no_signal=no_signal)
        b.fill()
        b.finish(0, rewards=(1.0, 1.0), versions={0: 1}, key_versions={0: 1})
        selection = await b.take(0)
        assert not selection.members and len(selection.filtered) == 2
        b.pool.retire(selection, None)
        ledger = b.pool.ledger.snapshot(at_update=0, lineage=0)
        assert ledger["closes"] and ledger["key_steps"]["skipped"] == {"filtered": 2} and ledger["key_steps"]["trained"] == 0

    run_virtual(main())


def test_refill_still_replaces_a_group_without_signal_and_without_key_steps() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=2, no_signal="refill")
        b.fill()
        b.finish(0, rewards=(1.0, 1.0))
        assert set(b.retired.values()) == {RetireReason.FILTERED}

    run_virtual(main())


def test_a_reward_far_from_its_groups_mean_makes_every_step_of_its_rollout_key() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=4, rollout={"group_size": 5}, marks={"min_advantage": 1.5})
        b.fill()
        for member, reward in enumerate((0.0, 0.0, 0.0, 0.0, 1.0)):  # 2 and 0.5 population standard deviations from the mean
            b.add(finished(RolloutKey(0, member, 0), reward=reward, versions={0: 4, 1: 2}, key_versions={0: 1}, steps=7))
            offered = b.pool.ledger.snapshot(at_update=0, lineage=0)["key_steps"]["offered"]
            assert offered == (member + 1 if member < 4 else 4 + 7), "decided when the group is complete"
        selection = await b.take(1)
        assert [member.marked for member in selection.members] == [False] * 4 + [True]
        assert [member.num_key_steps for member in selection.members] == [1, 1, 1, 1, 7]
        b.learn(selection, 1)
        key_steps = b.pool.ledger.snapshot(at_update=2, lineage=0)["key_steps"]
        assert (key_steps["offered"], key_steps["trained"], key_steps["pooled"]) == (11, 11, 0)
        b.pool.ledger.check()

    run_virtual(main())


def test_a_member_that_is_key_as_a_whole_is_never_expired() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=1, on_expiry="drop_group", marks={"min_advantage": 1.0})
        b.fill()
        for number in range(3):
            b.fill(learner=number)
            index = len(b.groups) - 1
            b.finish(index, versions={number: 1})
            selection = await b.take(number)
            b.pool.retire(selection, learned(selection, trained_from=number, settings=b.settings))
        b.finish(0, versions={0: 4})
        selection = await b.take(3)
        assert groups_of(selection) == [0] and all(member.marked for member in selection.members)

    run_virtual(main())


def test_versions_of_the_learner_do_not_matter_to_groups_without_tokens() -> None:
    async def main() -> None:
        b = bench(groups_per_batch=1, max_staleness=1, on_expiry="drop_group")
        b.fill()
        b.finish(0, versions={})
        b.pool.observe(learner_version=version(9))
        assert groups_of(await b.take(9)) == [0]

    run_virtual(main())
