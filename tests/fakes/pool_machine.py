"""A random schedule over the pool, for hypothesis: samplers, learner and publishing keep their own contracts; the pool must keep its own.

Subclasses set `pool_rules` (selection, on_expiry, no_signal) and may add rules.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes.pool_runs import finished, outcome, pool_settings, version
from headrace.clock import VirtualClockLoop
from headrace.config import Advantage, Settings
from headrace.errors import InvariantError
from headrace.pool.members import MAX_LOSSES, Retirement
from headrace.pool.pool import ExperiencePool, PoolClosedError
from headrace.types import EndReason, FinishedRollout, RetireReason, RolloutKey, Task
from headrace.updates import MemberOutcome, Selection, UpdateResult

WORKERS = ("a", "b")
FAILED_ENDS = [EndReason.ENVIRONMENT_ERROR, EndReason.REWARD_ERROR, EndReason.PROMPT_TOO_LONG, EndReason.CANCELLED]

# (mode, max_staleness, minibatches); random choice alone would spend most runs on the small bounds, where nothing expires
BOUNDS = [("async", 1, 1), ("async", 2, 1), ("async", 3, 2), ("async", 4, 1), ("async", 2, 2), ("async", 0, 1), ("sync", 8, 2)]


@dataclass(frozen=True, slots=True)
class Step:
    marked: bool
    tokens: tuple[tuple[int, int], ...]
    """(version, tokens)"""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.tokens)


@dataclass(slots=True)
class Out:
    """A rollout in flight: the worker that has it and what it drew so far."""

    worker: str
    steps: list[Step] = field(default_factory=list)
    discarded: int = 0
    round: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    def versions(self, marked: bool) -> Counter[int]:
        counts: Counter[int] = Counter()
        for step in self.steps:
            if step.marked is marked:
                counts.update(dict(step.tokens))
        return counts

    def finished(self, key: RolloutKey, **more: Any) -> FinishedRollout:
        return finished(
            key,
            versions=self.versions(False),
            key_versions=self.versions(True),
            key_steps=sum(step.marked for step in self.steps),
            steps=len(self.steps),
            discarded=self.discarded,
            round=self.round,
            **more,
        )


class PoolMachine(RuleBasedStateMachine):
    """The schedule is random; samplers, learner and publishing keep their own contracts."""

    pool_rules: tuple[str, str, str]
    marks: Mapping[str, Any] = {}
    more_members = 0

    def more_pool_settings(self, group_size: int) -> dict[str, Any]:
        return {}

    def look_after_the_pool(self) -> None:
        """What has to happen beside returning rollouts so that a batch can be served."""

    @initialize(bound=st.sampled_from(BOUNDS), groups=st.sampled_from([2, 1, 3]), size=st.sampled_from([2, 1, 3]), attempts=st.integers(1, 3))
    def begin(self, bound: tuple[str, int, int], groups: int, size: int, attempts: int) -> None:
        selection, on_expiry, no_signal = self.pool_rules
        mode, max_staleness, minibatches = bound
        groups, size = max(groups, minibatches), size + self.more_members
        self.settings: Settings = pool_settings(
            run={"mode": mode},
            pool={
                "groups_per_batch": groups,
                "max_staleness": max_staleness,
                "selection": selection,
                "on_expiry": on_expiry,
                "no_signal": no_signal,
                **self.more_pool_settings(size),
            },
            marks=self.marks,
            rollout={"group_size": size, "max_attempts": attempts},
            learner={"num_minibatches": minibatches, "advantage": Advantage.MEAN if size > 1 else Advantage.NONE},
        )
        self.loop = VirtualClockLoop()
        self.rewards: dict[int, dict[int, float]] = {}  # of every good member, as it was last delivered
        self.retired: dict[RolloutKey, RetireReason] = {}
        self.pool = ExperiencePool(self.settings, on_retire=self._note)
        self.learner = self.sampler = 0
        self.out: dict[RolloutKey, Out] = {}
        self.members: set[tuple[int, int]] = set()
        self.generated = dict.fromkeys(WORKERS, 0)
        self.waiting: list[tuple[Selection, int]] = []  # taken, with the version it will be trained from
        self.served: set[tuple[int, int]] = set()
        self.last_added: FinishedRollout | None = None
        self.was_tightened = False
        """What was admitted before may be late: nobody could have known."""
        self.apply()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self._drain()
        finally:
            self.loop.close()

    def _note(self, retirement: Retirement) -> None:
        assert retirement.key[:2] not in {key[:2] for key in self.retired}, f"{retirement.key} retired twice"
        self.retired[retirement.key] = retirement.reason

    # --- what happens -----------------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["long", "short"]), worker=st.sampled_from(WORKERS), most=st.integers(1, 12))
    def reserve(self, kind: str, worker: str, most: int) -> None:
        for _ in range(most):
            if self._reserve_one(kind, worker) is None:
                break

    @rule(data=st.data(), tokens=st.integers(1, 3), marked=st.booleans())
    @precondition(lambda self: self.out)
    def draw(self, data: st.DataObject, tokens: int, marked: bool) -> None:
        self._draw(data.draw(st.sampled_from(sorted(self.out))), tokens, marked)

    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), discarded=st.integers(0, 1))
    @precondition(lambda self: self.out)
    def finish(self, data: st.DataObject, reward: float, discarded: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.out)))
        self.generated[self.out[key].worker] += discarded
        self.out[key].discarded += discarded
        self._finish(key, reward, EndReason.DONE)

    @rule(num_rounds=st.sampled_from([5, 3, 1]), num_stuck=st.sampled_from([1, 2, 0]), draws=st.sampled_from(["unmarked", "marked"]), at_once=st.booleans())
    @precondition(lambda self: not self.waiting)
    def rounds(self, num_rounds: int, num_stuck: int, draws: str, at_once: bool) -> None:
        """Admission is used up, everybody draws, all but the oldest groups come back, a batch is learned if there is one; repeated."""
        for _ in range(num_rounds):
            while self._reserve_one("short", WORKERS[len(self.out) % 2]) is not None:
                pass
            stuck = sorted({key.group_id for key in self.out})[:num_stuck]
            for key in sorted(self.out):
                self._draw(key, 1, draws == "marked" and key.group_id not in stuck)
                if key.group_id not in stuck:
                    self._finish(key, float(key.member + 1), EndReason.DONE)
            if self._take():
                self._learn("no")
            if at_once:
                self.apply()

    @rule(data=st.data(), end=st.sampled_from(FAILED_ENDS))
    @precondition(lambda self: self.out)
    def fail(self, data: st.DataObject, end: EndReason) -> None:
        self._finish(data.draw(st.sampled_from(sorted(self.out))), 0.0, end)

    @rule()
    @precondition(lambda self: self.last_added is not None)
    def add_again(self) -> None:
        assert self.last_added is not None
        with pytest.raises(InvariantError):
            self.pool.add(self.last_added, worker="a")

    @rule(worker=st.sampled_from(WORKERS))
    @precondition(lambda self: self.out)
    def lose_worker(self, worker: str) -> None:
        keys = sorted(key for key, out in self.out.items() if out.worker == worker)
        self._run(self._lose(worker, keys))

    @rule()
    @precondition(lambda self: len(self.waiting) < 2)
    def take(self) -> None:
        self._take()

    @rule(refused=st.sampled_from(["no", "no", "no", "no", "partly", "wholly"]), at_once=st.booleans())
    @precondition(lambda self: self.waiting)
    def learn(self, refused: str, at_once: bool) -> None:
        self._learn(refused)
        if at_once:
            self.apply()

    @rule()
    def apply(self) -> None:
        """Every sampler takes up the newest weights."""
        self.sampler = self.learner
        self.pool.observe(sampler_version=version(self.sampler))

    @rule()
    def everything_comes_back_and_a_batch_is_served(self) -> None:
        """No deadlock: with nothing in flight, reserving what admission allows and finishing it always leads to a batch."""
        while self.waiting:
            self._learn("no")
        self.apply()
        for _ in range(40):
            for key in sorted(self.out):
                self._finish(key, float(key.member + 1) if key.member else 0.0 if self.settings.rollout.group_size > 1 else 1.0, EndReason.DONE)
            self.look_after_the_pool()
            if self._take():
                return
            assert self._reserve_one("short", "a") is not None, f"deadlock: {self.pool.waiting_text(version(self.learner))}, and admission is full"
        raise AssertionError("no batch after 40 rounds")

    def bound(self, share: float) -> None:
        """A governor tightens or loosens."""
        least = self.settings.updates_per_batch - 1
        max_staleness = least + round(share * (self.settings.max_staleness - least))
        self.was_tightened |= max_staleness < self.pool.max_staleness

        async def bound() -> None:
            self.pool.bound_staleness(max_staleness)

        self._run(bound())

    # --- what must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def ledger_closes(self) -> None:
        if hasattr(self, "pool"):
            self.pool.ledger.check()
            assert (
                self.pool.ledger.snapshot(at_update=self.learner, lineage=0)["tokens"]["in_flight"]
                == sum(out.num_tokens + out.discarded for out in self.out.values()) + self.tokens_under_verification()
            )

    def tokens_under_verification(self) -> int:
        return 0

    @invariant()
    def admission_is_never_exceeded(self) -> None:
        if hasattr(self, "pool"):
            retired = {key[:2] for key in self.retired}
            open_groups = {group for group, member in self.members if (group, member) not in retired}
            batches = (self.settings.max_staleness + 1) // self.settings.updates_per_batch
            bound = batches * self.settings.batch_trajectories
            assert len(open_groups) * self.settings.rollout.group_size <= bound <= (self.settings.max_staleness + 1) * self.settings.batch_trajectories
            assert self.pool.outstanding_groups == len(open_groups)

    # --- how --------------------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def _reserve_one(self, kind: str, worker: str) -> Any:
        async def reserve() -> Any:
            return self.pool.reserve_now(Task(id="t", data={}, kind=kind), learner_version=version(self.learner), sampler_version=version(self.sampler))

        reservation = self._run(reserve())
        if reservation is not None:
            self.out.update({key: Out(worker) for key in reservation.keys})
            self.members |= {(key.group_id, key.member) for key in reservation.keys}
        return reservation

    def _draw(self, key: RolloutKey, tokens: int, marked: bool) -> None:
        out = self.out[key]
        out.steps.append(Step(marked, ((self.sampler, tokens),)))
        self.generated[out.worker] += tokens
        self.pool.ledger.report_generated(out.worker, self.generated[out.worker])

    def _finish(self, key: RolloutKey, reward: float, end: EndReason) -> None:
        out = self.out.pop(key)
        self.pool.ledger.report_generated(out.worker, self.generated[out.worker])
        done = out.finished(key, reward=reward, end=end)

        async def add() -> Any:
            return self.pool.add(done, worker=out.worker)

        result = self._run(add())
        self.last_added = done
        if end is EndReason.DONE:
            self.rewards.setdefault(key.group_id, {})[key.member] = reward
            self.came_back(key, out)
        if result.retry is not None:
            assert result.retry == key._replace(attempt=key.attempt + 1) and result.retry.attempt < self.settings.rollout.max_attempts + MAX_LOSSES
            self.out[result.retry] = Out(out.worker)

    def came_back(self, key: RolloutKey, out: Out) -> None:
        """For subclasses."""

    async def _lose(self, worker: str, keys: list[RolloutKey]) -> None:
        results = self.pool.worker_lost(worker, keys)
        self.generated[worker] = 0
        for key, result in zip(keys, results, strict=True):
            del self.out[key]
            if result.retry is not None:
                self.out[result.retry] = Out(worker)

    def _take(self) -> bool:
        async def take() -> Selection | None:
            try:
                async with asyncio.timeout(1):  # virtual: a take that waits is cancelled, which must lose nothing
                    return await self.pool.take(learner_version=version(self.learner))
            except TimeoutError:
                return None

        selection = self._run(take())
        if selection is None:
            return False
        before = [trained_from + self.settings.updates_per_batch for taken, trained_from in self.waiting if taken.members]
        trained_from = max([self.learner, *before])
        self._check_selection(selection, trained_from)
        self.waiting.append((selection, trained_from))
        return True

    def _check_selection(self, selection: Selection, trained_from: int) -> None:
        keys = [member.summary.key for member in selection.members]
        assert keys == sorted(keys)
        served = [key[:2] for key in (*keys, *selection.filtered)]
        assert served, "an empty batch"
        assert len(set(served)) == len(served) and not self.served & set(served), "a member was served twice"
        self.served |= set(served)
        assert selection.max_staleness == self.pool.max_staleness
        if self.settings.pool.on_expiry == "drop_group" or (self.settings.pool.on_expiry == "wait" and not self.was_tightened):
            last = trained_from + self.settings.updates_per_batch - 1
            key_groups = {member.summary.key.group_id for member in selection.members if member.num_key_steps}
            for member in selection.members:
                for count in member.summary.versions:
                    if self.settings.pool.on_expiry == "drop_group" and member.summary.key.group_id in key_groups:
                        continue  # a key step is never dropped: the learner leaves out what is stale beside it
                    if member.marked:
                        continue
                    assert not count.unmarked or last - count.version.number <= selection.max_staleness, f"{member.summary} expires at {last}"

    def _learn(self, refused: str) -> None:
        selection, trained_from = self.waiting.pop(0)
        if not selection.members:
            self.pool.retire(selection, None)
            return
        updates = {"no": self.settings.updates_per_batch, "partly": self.settings.updates_per_batch - 1, "wholly": 0}[refused]
        last = self.learner + self.settings.updates_per_batch - 1
        assert self.learner <= trained_from, "the pool counted fewer updates than were made"
        outcomes: list[MemberOutcome] = [
            outcome(member, last_version=last, max_staleness=selection.max_staleness, max_key_staleness=selection.max_key_staleness)
            for member in selection.members
        ]
        result = UpdateResult(
            selection_id=selection.id,
            version_before=version(self.learner),
            version_after=version(self.learner + updates),
            outcomes=tuple(outcomes),
            statistics=None,
            refused=None if refused == "no" else "scripted",
            seconds=0.0,
            busy_seconds=0.0,
        )
        self.learner += updates
        if self.pool.waits_for_acknowledgements:
            self.sampler = self.learner
            self.pool.observe(sampler_version=version(self.sampler))
        self.pool.retire(selection, result)
        for one in outcomes:
            trained = one.trained_tokens and updates
            assert self.retired[one.key] is (RetireReason.TRAINED if trained else RetireReason.SKIPPED)

    def _return_everything(self) -> None:
        while self.out:
            for key in sorted(self.out):
                self._finish(key, float(key.member), EndReason.DONE)

    def _drain(self) -> None:
        """The end of a run: everything that was ever reserved retires exactly once, and the ledger holds no level any more."""
        self.pool.drain("the end")
        assert self._reserve_one("short", "a") is None
        self._return_everything()
        while self.waiting:
            self._learn("no")
        self.apply()
        self.look_after_the_pool()

        async def exhausted() -> bool:
            try:
                selection = await self.pool.take(learner_version=version(self.learner))
            except PoolClosedError:
                return True
            self._check_selection(selection, self.learner)
            self.waiting.append((selection, self.learner))
            return False

        while not self._run(exhausted()):
            self._learn("no")
            self.apply()
            self.look_after_the_pool()
        assert {key[:2] for key in self.retired} == self.members
        ledger = self.pool.ledger.snapshot(at_update=self.learner, lineage=0)
        assert ledger["closes"]
        for unit in ("tokens", "trajectories", "groups", "key_steps"):
            assert ledger[unit]["pooled"] == ledger[unit]["in_flight"] == 0
        assert (
            Counter(self.retired.values())
            == Counter({RetireReason(reason): sum(kind[reason] for kind in ledger["kinds"].values()) for reason in map(str, RetireReason)}) - Counter()
        )
