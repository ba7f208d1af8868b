"""Marks, verification, quorum, parked and late members and pace over random schedules, on top of what holds without them.

No key step is ever lost: each one that was offered ends as trained, cut by a verification (and offered anew), filtered without
gradient, refused by the learner, or failed with its rollout; never expired. None enters a batch over its bound uncounted. Every
reservation ends in exactly one retirement, the ledger closes after every event, and once everything in flight is back and checked a
batch can always be served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from fakes.pool_machine import WORKERS, Out, PoolMachine, Step
from fakes.pool_runs import version
from headrace.errors import InvariantError
from headrace.types import EndReason, FinishedRollout, RolloutKey
from headrace.updates import Selection

ANSWERS = ["stands", "cut", "gives up", "fails", ""]
"""What a verification may come to; none yet."""
MODES = {
    "verify": {"verify": "all", "verify_after": 1, "verify_rounds": 2},
    "verify_key_steps": {"verify": "key_steps", "verify_after": 0, "verify_rounds": 3},
    "quorum": {"quorum": True},
    "paced": {"pace_key_steps": True, "max_key_staleness": 0},
    "everything": {"quorum": True, "verify": "key_steps", "verify_after": 1, "pace_key_steps": True, "max_key_staleness": 1},
}


@dataclass(slots=True)
class Checked:
    """A rollout that its worker verifies."""

    before: Out
    fresh_tokens: int = 0
    """Drawn since, reported, not delivered."""


class KeyStepMachine(PoolMachine):
    mode: dict[str, Any]
    more_members = 1

    def more_pool_settings(self, group_size: int) -> dict[str, Any]:
        self.delivered: dict[RolloutKey, Out] = {}
        self.checked: dict[RolloutKey, Checked] = {}
        self.late: set[int] = set()
        quorum = max(group_size - 1, min(2, group_size)) if self.mode.get("quorum") else None
        return {**self.mode, "quorum": quorum}

    def came_back(self, key: RolloutKey, out: Out) -> None:
        self.delivered[key] = out

    # --- what happens besides ---------------------------------------------------------------------------------------------

    @rule(parked=st.integers(0, 3))
    def park(self, parked: int) -> None:
        for worker in WORKERS:
            keys = sorted(key for key, out in self.out.items() if out.worker == worker)[:parked]
            self.pool.observe_worker(worker, version=version(self.sampler), parked=keys)

    @rule()
    def apply(self) -> None:
        super().apply()  # type: ignore[misc]
        for worker in WORKERS:
            self.pool.observe_worker(worker, version=version(self.sampler))

    @rule(
        num_rounds=st.integers(1, 5),
        stragglers=st.booleans(),
        parks=st.booleans(),
        shift=st.integers(0, 4),
        loses=st.booleans(),
    )
    @precondition(lambda self: not self.waiting)
    def whole_rounds(self, num_rounds: int, stragglers: bool, parks: bool, shift: int, loses: bool) -> None:
        """Everybody draws marked and unmarked steps, one member a group stays out, what is asked is answered but for some."""
        for turn in range(num_rounds):
            while self._reserve_one("short", WORKERS[len(self.out) % 2]) is not None:
                pass
            out = sorted(self.out)
            newest = max((key.group_id for key in out), default=0)
            for key in out:
                self._draw(key, 1, key.member % 2 == 0)
                self._draw(key, 2, key.member % 2 == 1)
                if not stragglers or key.member or (key.group_id < newest - 2 and turn % 2):
                    self._finish(key, float((key.group_id + key.member) % 3), EndReason.DONE)
            if parks:
                self.park(2)
            self._ask()
            for index, key in enumerate(sorted(self.checked)):
                if how := ANSWERS[(index + turn + shift) % len(ANSWERS)]:
                    self._answer(key, how, float(key.member % 2))
            if loses and turn % 2:
                self._run(self._lose("a", sorted(key for key, out in self.out.items() if out.worker == "a")))
            if self._take():
                self._learn("no")
            self.apply()

    @rule()
    def ask(self) -> None:
        self._ask()

    @rule(data=st.data(), tokens=st.integers(1, 2))
    @precondition(lambda self: self.checked)
    def draw_under_verification(self, data: st.DataObject, tokens: int) -> None:
        self._draw_checked(data.draw(st.sampled_from(sorted(self.checked))), tokens)

    @rule(data=st.data(), how=st.sampled_from(["stands", "cut", "cut", "gives up", "fails"]), reward=st.sampled_from([0.0, 1.0]))
    @precondition(lambda self: self.checked)
    def answer(self, data: st.DataObject, how: str, reward: float) -> None:
        self._answer(data.draw(st.sampled_from(sorted(self.checked))), how, reward)

    @rule()
    @precondition(lambda self: self.checked)
    def a_worker_that_verified_nothing_is_refused(self) -> None:
        key = min(self.checked)
        before = self.checked[key].before
        with pytest.raises(InvariantError, match="came back from verification"):
            self._run(self._add(before.finished(key), before.worker))

    # --- how --------------------------------------------------------------------------------------------------------------

    def _ask(self) -> bool:
        async def due() -> dict[str, tuple[RolloutKey, ...]]:
            return self.pool.due_for_verification()

        asked = self._run(due())
        after, rounds = self.settings.pool.verify_after, self.settings.pool.verify_rounds
        for worker, keys in asked.items():
            for key in keys:
                before = self.delivered.pop(key)
                assert before.worker == worker, "only who delivered a rollout can verify it"
                assert before.round < rounds
                checked = before.versions(True) + (before.versions(False) if self.settings.pool.verify == "all" else before.versions(True))
                assert min(checked) < self.sampler, "newer weights would change nothing"
                assert self.sampler - min(checked) >= after - self.settings.updates_per_batch
                self.checked[key] = Checked(before)
                del self.rewards[key.group_id][key.member]
        return bool(asked)

    def _draw_checked(self, key: RolloutKey, tokens: int) -> None:
        checked = self.checked[key]
        checked.fresh_tokens += tokens
        self.generated[checked.before.worker] += tokens
        self.pool.ledger.report_generated(checked.before.worker, self.generated[checked.before.worker])

    def _answer(self, key: RolloutKey, how: str, reward: float) -> None:
        checked, more = self.checked[key], {}
        before = checked.before
        after = Out(before.worker, list(before.steps), before.discarded, before.round + 1)
        everything = self.settings.pool.verify == "all"
        if how in ("cut", "fails"):
            self._draw_checked(key, 1)
            place = next(index for index, step in enumerate(before.steps) if step.marked or everything)
            cut = before.steps[place:]
            after.steps = [*before.steps[:place], Step(cut[0].marked, ((self.sampler, checked.fresh_tokens),))]
            more = {"refreshed": sum(step.num_tokens for step in cut), "refreshed_key_steps": sum(step.marked for step in cut)}
        else:
            if how == "gives up":
                after.round = self.settings.pool.verify_rounds
            else:
                after.steps = [Step(s.marked, ((self.sampler, s.num_tokens),)) if s.marked or everything else s for s in before.steps]
            after.discarded += checked.fresh_tokens
        end = EndReason.ENVIRONMENT_ERROR if how == "fails" else EndReason.DONE
        del self.checked[key]
        result = self._run(self._add(after.finished(key, reward=reward, end=end, **more), after.worker))
        assert result.verified
        if end is EndReason.DONE:
            self.rewards.setdefault(key.group_id, {})[key.member] = reward
            self.delivered[key] = after
        elif result.retry is not None:
            self.out[result.retry] = Out(after.worker)

    async def _add(self, done: FinishedRollout, worker: str) -> Any:
        return self.pool.add(done, worker=worker)

    async def _lose(self, worker: str, keys: list[RolloutKey]) -> None:
        restored = sorted(key for key, checked in self.checked.items() if checked.before.worker == worker)
        await super()._lose(worker, keys)
        self.delivered = {key: out for key, out in self.delivered.items() if out.worker != worker}  # nobody can verify these any more
        for key in restored:
            self.checked.pop(key)
            if key.group_id in self.pool.members.groups:
                self.rewards[key.group_id][key.member] = self.pool.members.groups[key.group_id].rewards[key.member]
        self.pool.observe_worker(worker, version=version(self.sampler))  # a successor of its name

    def look_after_the_pool(self) -> None:
        """Until nothing more is asked: bounded, because each verification raises its round."""
        for _ in range(20):
            while self.checked:
                self._answer(min(self.checked), "cut", float(min(self.checked).member))
            if not self._ask():
                return
        raise AssertionError("verification never ends")

    def tokens_under_verification(self) -> int:
        return sum(checked.before.num_tokens + checked.fresh_tokens for checked in self.checked.values())

    def _return_everything(self) -> None:
        super()._return_everything()
        self.apply()
        self.look_after_the_pool()
        super()._return_everything()

    # --- what must hold ---------------------------------------------------------------------------------------------------

    def _check_selection(self, selection: Selection, trained_from: int) -> None:
        super()._check_selection(selection, trained_from)
        assert len(selection.members) + len(selection.filtered) <= self.settings.batch_trajectories
        assert not {member.summary.key for member in selection.members} & self.checked.keys()
        here: dict[int, int] = {}
        for member in selection.members:
            here[member.summary.key.group_id] = here.get(member.summary.key.group_id, 0) + 1
        for group_id, number in here.items():
            known = tuple(reward for _, reward in sorted(self.rewards[group_id].items()))
            if group_id in selection.group_rewards:
                assert selection.group_rewards[group_id] == known, "a baseline leaves out a good member"
            else:
                assert number == len(known), "a group in pieces was taken for a whole one"
        if self.mode.get("verify"):
            self._check_ages(selection, trained_from)

    def _check_ages(self, selection: Selection, trained_from: int) -> None:
        """What could be verified was, before it is trained."""
        for member in selection.members:
            summary = member.summary
            if summary.round >= self.settings.pool.verify_rounds or summary.key not in self.delivered:
                continue
            for count in summary.versions:
                if count.key or (self.settings.pool.verify == "all" and count.unmarked):
                    assert trained_from - count.version.number <= self.settings.pool.verify_after, summary

    @invariant()
    def admission_is_never_exceeded(self) -> None:
        """Parked and late ones are let past it, up to 4 bounds in all."""
        if not hasattr(self, "pool"):
            return
        retired = {key[:2] for key in self.retired}
        open_groups = {group for group, member in self.members if (group, member) not in retired}
        batches = (self.settings.max_staleness + 1) // self.settings.updates_per_batch
        bound = batches * self.settings.batch_trajectories
        spared = self.settings.pool.selection == "ready_first" and batches > 1
        assert len(open_groups) * self.settings.rollout.group_size <= bound * (4 if spared else self.settings.rollout.group_size)
        if not spared:
            assert sum((group, member) not in retired for group, member in self.members) <= bound
        assert self.pool.outstanding_groups == len(open_groups)

    def _drain(self) -> None:
        super()._drain()
        key_steps = self.pool.ledger.snapshot(at_update=0, lineage=0)["key_steps"]
        assert set(key_steps["skipped"]) <= {"refreshed", "filtered", "refused"}, "a key step was lost"
        assert not self.checked
        forgotten = [key for keys in self.pool.take_forgotten().values() for key in keys]
        assert len(set(forgotten)) == len(forgotten)


@pytest.mark.parametrize(
    "rules",
    [
        ("ready_first", "skip_tokens", "filter"),
        ("ready_first", "drop_group", "refill"),
        ("oldest_first", "wait", "train"),
        ("ready_first", "wait", "filter"),
        ("oldest_first", "skip_tokens", "refill"),
    ],
)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_no_key_step_is_lost_and_nothing_blocks_under_any_schedule(mode: str, rules: tuple[str, str, str]) -> None:
    marks = {"min_advantage": 1.0} if rules[2] == "filter" else {}
    machine = type("Machine", (KeyStepMachine,), {"pool_rules": rules, "mode": MODES[mode], "marks": marks})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
