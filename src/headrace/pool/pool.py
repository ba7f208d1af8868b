"""The experience pool: reserve -> add -> take -> retire, per member. What was started, what came back, what may be trained.

* A group takes its place in the admission when it is reserved and gives it back when its last member is retired, exactly once
  each (I5). Admission never exceeds `admission.max_outstanding_groups`.
* Batches count *issued* members: a group that lost a member still fills its place, so failures cannot starve the learner.
* `take` under drop_group or wait returns no unmarked token over max_staleness; under skip_tokens the learner's own check, made
  against its version at that moment, is what guarantees I6.
* Nothing here holds a lock or a thread: every change happens between two awaits, so a cancelled reserve or take loses nothing.

Payloads stay opaque bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.clock import now
from headrace.config import NoSignal, OnExpiry, Settings
from headrace.errors import HeadraceError, InvariantError
from headrace.pool import admission
from headrace.pool.group import Group, lost_rollout
from headrace.pool.ledger import Contents, Ledger, Spent
from headrace.pool.outcomes import account
from headrace.pool.selection import Chooser, has_signal
from headrace.pool.statistics import PoolStatistics, describe_wait, measure
from headrace.types import EndReason, FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task, TrajectorySummary
from headrace.updates import SelectedMember, Selection, UpdateResult

# Trying again cannot help: the same prompt stays too long, the run has ended.
_NOT_RETRIED = frozenset({EndReason.PROMPT_TOO_LONG, EndReason.CANCELLED})


class PoolClosedError(HeadraceError):
    """The pool serves no more: it was closed, or it is draining and nothing is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReservation:
    """A place in the admission, for all members of one task."""

    group_id: int
    task: Task
    keys: tuple[RolloutKey, ...]
    """[group_size] attempt 0 of each member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddResult:
    """What the pool made of one finished rollout."""

    task: Task
    retry: RolloutKey | None
    """Roll this out again; None: the member came back for good, or failed for good."""
    group_complete: bool
    """No member of its group is out any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """One member left the pool."""

    key: RolloutKey
    task_kind: str
    reason: RetireReason


@dataclass(slots=True, kw_only=True)
class _Taken:
    """A batch that the learner has."""

    selection: Selection
    groups: list[Group]
    trains_from: int
    """Number of the version it is trained from: with an earlier batch still out, the version after that one."""


class ExperiencePool:
    """One event loop, no threads. `on_retire` hears of every retirement."""

    def __init__(self, settings: Settings, *, on_retire: Callable[[Retirement], None] | None = None) -> None:
        self._settings = settings
        self._group_size = settings.rollout.group_size
        self._updates_per_batch = settings.updates_per_batch
        self._max_outstanding = admission.max_outstanding_groups(settings)
        self._chooser = Chooser.of(settings)
        self._on_retire = on_retire
        self._open: dict[int, Group] = {}  # in reservation order, not taken yet
        self._taken: dict[int, _Taken] = {}
        self._next_group = self._next_selection = self._next_completion = 0
        self._learner_version = self._sampler_version = PolicyVersion(0, 0)
        self._reward_means: dict[int, float] = {}
        self._num_delivered = 0
        self._first_seconds: float | None = None
        self._changed = asyncio.Event()
        self._draining: str | None = None
        self._closed: str | None = None
        self.ledger = Ledger(self._contents)

    # --- reserve ----------------------------------------------------------------------------------------------------------

    async def reserve(self, task: Task, *, learner_version: PolicyVersion, sampler_version: PolicyVersion) -> GroupReservation:
        """Waits until admission has room for one more group. Raises PoolClosedError once the pool drains or is closed.

        `sampler_version` is the oldest version that any sampler still uses; no token of the group may be older. `observe`
        may raise both versions while this waits.
        """
        while (reservation := self.reserve_now(task, learner_version=learner_version, sampler_version=sampler_version)) is None:
            if reason := self._closed or self._draining:
                raise PoolClosedError(f"the experience pool takes no more reservations: {reason}.")
            await self._changed.wait()
        return reservation

    def reserve_now(self, task: Task, *, learner_version: PolicyVersion, sampler_version: PolicyVersion) -> GroupReservation | None:
        """The same without waiting: None when admission is full or the pool takes no more (case 8: fill everything at once)."""
        self.observe(learner_version=learner_version, sampler_version=sampler_version)
        if not self.has_room():
            return None
        group_id, time = self._next_group, now()
        self._next_group += 1
        self._first_seconds = time if self._first_seconds is None else self._first_seconds
        self._open[group_id] = Group(
            group_id=group_id,
            task=task,
            size=self._group_size,
            sampler_version=self._sampler_version.number,
            in_flight=dict.fromkeys(range(self._group_size), 0),
            issued_seconds=dict.fromkeys(range(self._group_size), time),
        )
        self.ledger.reserved(task.kind, self._group_size)
        return GroupReservation(group_id=group_id, task=task, keys=tuple(RolloutKey(group_id, member, 0) for member in range(self._group_size)))

    def has_room(self) -> bool:
        """Whether admission lets one more group start now."""
        if self._closed or self._draining or self.outstanding_groups >= self._max_outstanding:
            return False
        return self._chooser.admits(list(self._open.values()), sampler_version=self._sampler_version.number, next_version=self._next_version())

    @property
    def outstanding_groups(self) -> int:
        """Started and not retired."""
        return len(self._open) + sum(len(taken.groups) for taken in self._taken.values())

    def observe(self, *, learner_version: PolicyVersion | None = None, sampler_version: PolicyVersion | None = None) -> None:
        """Tells the pool of newer versions; neither falls. Under on_expiry = wait newer samplers give room, so call it when they report."""
        before = self._learner_version, self._sampler_version
        self._learner_version = max(self._learner_version, learner_version or self._learner_version)
        self._sampler_version = max(self._sampler_version, sampler_version or self._sampler_version)
        if before != (self._learner_version, self._sampler_version):
            self._wake()

    # --- add --------------------------------------------------------------------------------------------------------------

    def add(self, finished: FinishedRollout, *, worker: str = "") -> AddResult:
        """Takes in a finished rollout; `worker` delivered it (needed for `worker_lost` to know what it still owed).

        A failed one is tried again while attempts are left, else it leaves its group for good. Raises InvariantError for a
        rollout that was never reserved or came back already.
        """
        summary = finished.summary
        group = self._group_of(summary.key)
        self.ledger.delivered(summary, worker)
        task = group.task
        del group.in_flight[summary.key.member], group.issued_seconds[summary.key.member]
        retry = None
        if not summary.failed:
            group.accept(finished)
            self._num_delivered += 1
        elif self._may_retry(summary):
            retry = summary.key._replace(attempt=summary.key.attempt + 1)
            group.in_flight[retry.member] = retry.attempt
            group.issued_seconds[retry.member] = now()
            self.ledger.retried()
        else:
            self.ledger.member_failed(task.kind)
            self._note(summary.key, task.kind, RetireReason.FAILED)
        complete = not group.in_flight
        if complete:
            self._complete(group, summary)
        return AddResult(task=task, retry=retry, group_complete=complete)

    def worker_lost(self, worker: str, keys: Sequence[RolloutKey]) -> tuple[AddResult, ...]:
        """A worker died with these rollouts in flight: what it drew for them becomes failed.worker_lost, they are tried again."""
        self.ledger.worker_lost(worker)
        return tuple(self.add(lost_rollout(key, self.task_of(key)), worker=worker) for key in keys)

    def task_of(self, key: RolloutKey) -> Task:
        """Of a rollout in flight. InvariantError for any other."""
        return self._group_of(key).task

    def _group_of(self, key: RolloutKey) -> Group:
        group = self._open.get(key.group_id)
        if group is None or group.in_flight.get(key.member) != key.attempt:
            raise InvariantError(f"rollout {tuple(key)} is not in flight: it came back twice, or was never reserved.")
        return group

    def _may_retry(self, summary: TrajectorySummary) -> bool:
        return self._closed is None and summary.end_reason not in _NOT_RETRIED and summary.key.attempt + 1 < self._settings.rollout.max_attempts

    def _complete(self, group: Group, last: TrajectorySummary) -> None:
        """Nobody of the group is out any more: it is ready, or leaves at once."""
        group.completion = self._next_completion
        self._next_completion += 1
        if not group.finished:
            del self._open[group.group_id]
            self.ledger.group_retired(RetireReason.FAILED, str(last.end_reason))
        elif self._settings.pool.no_signal is NoSignal.REFILL and not self._has_signal(group):
            self._drop(group, RetireReason.FILTERED)
        self._wake()

    def _has_signal(self, group: Group) -> bool:
        return has_signal([finished.summary.reward for finished in group.finished.values()], self._settings.learner.advantage)

    def _drop(self, group: Group, reason: RetireReason) -> None:
        """A complete group leaves without having been taken."""
        del self._open[group.group_id]
        for finished in group.finished.values():
            self.ledger.dropped(finished.summary, reason)
            self._note(finished.summary.key, finished.summary.task_kind, reason)
        self.ledger.group_retired(reason)
        self._wake()

    # --- take -------------------------------------------------------------------------------------------------------------

    async def take(self, *, learner_version: PolicyVersion) -> Selection:
        """Waits for the next batch under the selection and expiry rules. Its members may be empty when no group carries signal.

        While the pool drains, the last batch may be smaller; raises PoolClosedError when nothing is left or the pool is closed.
        """
        self.observe(learner_version=learner_version)
        while True:
            if self._closed:
                raise PoolClosedError(f"the experience pool serves no more batches: {self._closed}.")
            version = self._next_version()
            if self._settings.pool.on_expiry is OnExpiry.DROP_GROUP:
                for group in [group for group in self._open.values() if self._chooser.expired(group, version)]:
                    self._drop(group, RetireReason.EXPIRED)
            if self._draining and not self._open:
                raise PoolClosedError(f"the experience pool is drained: {self._draining}.")
            groups = self._chooser.choose(list(self._open.values()), version=version, count=self._batch_groups())
            if groups is not None:
                return self._select(groups, version, learner_version)
            await self._changed.wait()

    def _batch_groups(self) -> int:
        count = self._settings.pool.groups_per_batch
        return min(count, len(self._open)) if self._draining else count

    def _next_version(self) -> int:
        """Number of the version the next batch will be trained from."""
        after = (taken.trains_from + self._updates_per_batch for taken in self._taken.values() if taken.selection.members)
        return max(self._learner_version.number, *after, 0)

    def _select(self, groups: Iterable[Group], version: int, learner_version: PolicyVersion) -> Selection:
        chosen = sorted(groups, key=lambda group: group.group_id)
        members: list[SelectedMember] = []
        filtered: list[RolloutKey] = []
        rewards: list[float] = []
        for group in chosen:
            del self._open[group.group_id]
            finished = [group.finished[member] for member in sorted(group.finished)]
            rewards += [one.summary.reward for one in finished]
            if self._settings.pool.no_signal is NoSignal.FILTER and not self._has_signal(group):
                filtered += [one.summary.key for one in finished]
            else:
                members += [SelectedMember(summary=one.summary, payload=one.payload) for one in finished]
        selection = Selection(
            id=self._next_selection,
            learner_version=learner_version,
            members=tuple(members),
            filtered=tuple(filtered),
            max_staleness=self._settings.max_staleness,
            max_key_staleness=self._settings.pool.max_key_staleness,
        )
        self._next_selection += 1
        self._taken[selection.id] = _Taken(selection=selection, groups=chosen, trains_from=version)
        self._reward_means[selection.id] = sum(rewards) / len(rewards)
        return selection

    def reward_mean(self, selection: Selection) -> float:
        """Over a batch, filtered groups included; of one that is out, or was the last to be retired."""
        return self._reward_means[selection.id]

    # --- retire -----------------------------------------------------------------------------------------------------------

    def retire(self, selection: Selection, result: UpdateResult | None) -> None:
        """The batch leaves as its outcomes say, which frees its admission. `result` is None only for a batch without members.

        Raises InvariantError, and changes nothing, for a batch that is not out or a result that does not account for every token.
        """
        taken = self._taken.get(selection.id)
        if taken is None:
            raise InvariantError(f"selection {selection.id} is not out: it was retired already, or never taken.")
        spent = account(taken.selection, result)
        del self._taken[selection.id]
        self._reward_means = {key: mean for key, mean in self._reward_means.items() if key in self._taken or key == selection.id}
        for group in taken.groups:
            self._retire_group(group, spent)
        if result is not None:
            self.observe(learner_version=result.version_after)
        self._wake()

    def _retire_group(self, group: Group, spent: dict[RolloutKey, Spent]) -> None:
        reasons: dict[RetireReason, str] = {}
        for member in sorted(group.finished):
            summary = group.finished[member].summary
            member_spent = spent.get(summary.key)
            if member_spent is None:
                reason = RetireReason.FILTERED
                self.ledger.dropped(summary, reason)
            else:
                reason = member_spent.reason
                self.ledger.learned(summary, member_spent)
            reasons.setdefault(reason, member_spent.main_skip_reason if member_spent else "")
            self._note(summary.key, summary.task_kind, reason)
        best = next(reason for reason in (RetireReason.TRAINED, RetireReason.SKIPPED, RetireReason.FILTERED) if reason in reasons)
        self.ledger.group_retired(best, reasons[best])

    def _note(self, key: RolloutKey, kind: str, reason: RetireReason) -> None:
        if self._on_retire is not None:
            self._on_retire(Retirement(key=key, task_kind=kind, reason=reason))

    # --- the end ----------------------------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """No new group; what is in flight comes back and is served, the last batch as small as it is."""
        self._draining = reason
        self._wake()

    def close(self, reason: str) -> None:
        """Nothing waits any longer and nothing is tried again; what is in flight or pooled stays in the ledger as that."""
        self._closed = reason
        self._wake()

    # --- for people -------------------------------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Levels now, and staleness of what is pooled against the version the next batch is trained from."""
        taken = [group for taken in self._taken.values() for group in taken.groups]
        return measure(
            list(self._open.values()),
            taken,
            max_groups=self._max_outstanding,
            version=self._next_version(),
            num_delivered=self._num_delivered,
            seconds=0.0 if self._first_seconds is None else now() - self._first_seconds,
        )

    def waiting_text(self, learner_version: PolicyVersion) -> str:
        """Why take waits: "3 of 8 groups ready; the oldest rollout has been out for 41 s"."""
        version = max(learner_version.number, self._next_version())
        return describe_wait(list(self._open.values()), self._chooser, count=self._batch_groups(), version=version, time=now())

    def _contents(self) -> Contents:
        groups = [*self._open.values(), *(group for taken in self._taken.values() for group in taken.groups)]
        finished = [one.summary for group in groups for one in group.finished.values()]
        in_flight = sum(bool(group.in_flight) for group in groups)
        return Contents(
            groups_in_flight=in_flight,
            groups_pooled=len(groups) - in_flight,
            trajectories_in_flight=sum(len(group.in_flight) for group in groups),
            trajectories_pooled=len(finished),
            tokens_pooled=sum(summary.num_action_tokens for summary in finished),
            key_steps_pooled=sum(summary.num_key_steps for summary in finished),
        )

    def _wake(self) -> None:
        """Everybody who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
