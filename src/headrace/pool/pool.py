"""The experience pool: reserve -> add -> take -> retire, per member. What was started, what came back, what may be trained.

* A member takes its place in the admission when its group is reserved and gives it back when it is retired, exactly once each (I5).
  Admission never exceeds `admission.max_outstanding_groups` (parked and late members: see there).
* Batches count *issued* members: a group that lost a member still fills its place, so failures cannot starve the learner.
* With a quorum a group may be served before its last members are back; those are served as they come, the group retires after the last.
* `take` under drop_group or wait returns no unmarked token over max_staleness, except beside key steps; under skip_tokens the learner's
  own check, made against its version at that moment, is what guarantees I6.
* No key step is dropped: a group that holds one is not expired or refilled but served. Without signal it fills the batch as filtered,
  not trained (its gradient is 0), and its key steps count as skipped.filtered.
* Members that are due for verification go back to their workers first (pool/verification.py).
* Nothing here holds a lock or a thread: every change happens between two awaits, so a cancelled reserve or take loses nothing.

Payloads stay opaque bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from headrace.clock import now
from headrace.config import NoSignal, OnExpiry, Settings
from headrace.errors import HeadraceError, InvariantError
from headrace.pool import admission
from headrace.pool.group import Group, lost_rollout
from headrace.pool.journal import Consumed, Delivered, Journal, Reported, Reserved, Retired, SentBack, SourcePlace, WorkerLost
from headrace.pool.ledger import Contents, Ledger, Spent
from headrace.pool.outcomes import account
from headrace.pool.pacing import Pace, Paced
from headrace.pool.selection import Chooser, Piece, has_signal
from headrace.pool.statistics import PoolStatistics, describe_wait, measure
from headrace.pool.verification import Verification
from headrace.types import EndReason, FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task, TrajectorySummary
from headrace.updates import SelectedMember, Selection, UpdateResult

# Trying again cannot help: the same prompt stays too long, the run has ended.
_NOT_RETRIED = frozenset({EndReason.PROMPT_TOO_LONG, EndReason.CANCELLED})

MAX_LOSSES = 3
"""Attempts at one member that may end with their worker and count for nothing: one that kills every worker must end, too."""


_BEST_FIRST = (RetireReason.TRAINED, RetireReason.SKIPPED, RetireReason.FILTERED, RetireReason.EXPIRED, RetireReason.VOID)


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
    verified: bool = False
    """It had been delivered before and came back from a verification."""


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
    pieces: list[tuple[Piece, tuple[int, ...]]]
    """With the members that each holds."""
    trains_from: int
    """Number of the version it is trained from: with an earlier batch still out, the version after that one."""


class ExperiencePool:
    """One event loop, no threads. `on_retire` hears of every retirement, `on_pace` of every judgement of the pace."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_retire: Callable[[Retirement], None] | None = None,
        on_pace: Callable[[Paced, float], None] | None = None,
        journal: Journal | None = None,
        source_place: Callable[[], SourcePlace] = lambda: SourcePlace(0, 0),
    ) -> None:
        """`on_pace` also gets the seconds that `reserve` has waited because of the pace so far. `journal`: where everything that happens
        is written down, with where the task source stands; None: nowhere."""
        self._settings = settings
        self._group_size = settings.rollout.group_size
        self._updates_per_batch = settings.updates_per_batch
        self._max_outstanding = admission.max_outstanding_groups(settings)
        self._spares_long_ones = admission.spares_long_ones(settings)
        self._verification = Verification(settings)
        self._chooser = Chooser.of(settings, self._verification)
        self._pace: Pace | None = None
        if settings.pool.pace_key_steps:
            self._pace = Pace(
                max_groups=self._max_outstanding,
                groups_per_batch=settings.pool.groups_per_batch,
                updates_per_batch=settings.updates_per_batch,
                max_key_staleness=settings.pool.max_key_staleness,
            )
        self.pace_wait_seconds = 0.0
        self._on_retire, self._on_pace = on_retire, on_pace
        self.journal, self._source_place = journal, source_place
        self.place = SourcePlace(0, 0)
        """Of the task source at the newest reservation."""
        self._groups: dict[int, Group] = {}  # in reservation order, not retired yet
        self._taken: dict[int, _Taken] = {}
        self._parked: dict[str, frozenset[RolloutKey]] = {}  # by worker
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
            started, paced = now(), self._pace is not None and self._has_room(self._max_outstanding)
            await self._changed.wait()
            self.pace_wait_seconds += now() - started if paced else 0.0
        return reservation

    def reserve_now(self, task: Task, *, learner_version: PolicyVersion, sampler_version: PolicyVersion) -> GroupReservation | None:
        """The same without waiting: None when admission is full or the pool takes no more (case 8: fill everything at once)."""
        self.observe(learner_version=learner_version, sampler_version=sampler_version)
        if not self.has_room():
            return None
        group_id = self._next_group
        self._open(group_id, task, self._group_size)
        if self.journal is not None:
            self.place = self._source_place()
            self.journal.append(Reserved(group_id=group_id, task=task, size=self._group_size, place=self.place))
        return GroupReservation(group_id=group_id, task=task, keys=tuple(RolloutKey(group_id, member, 0) for member in range(self._group_size)))

    def _open(self, group_id: int, task: Task, size: int) -> None:
        time = now()
        self._next_group = group_id + 1
        self._first_seconds = time if self._first_seconds is None else self._first_seconds
        self._groups[group_id] = Group(
            group_id=group_id,
            task=task,
            size=size,
            quorum=min(size, self._settings.pool.quorum or size),
            sampler_version=self._sampler_version.number,
            in_flight=dict.fromkeys(range(size), 0),
            issued_seconds=dict.fromkeys(range(size), time),
        )
        self.ledger.reserved(task.kind, size)

    def has_room(self) -> bool:
        """Whether admission lets one more group start now."""
        return self._has_room(self._max_outstanding if self._pace is None else self._pace.limit_groups)

    def _has_room(self, limit_groups: int) -> bool:
        if self._closed or self._draining or len(self._groups) >= admission.MAX_OUTSTANDING * self._max_outstanding:
            return False
        size, counted = self._group_size, self._counted_slots()
        # less than a batch cannot be served: then only the admission bound itself, which is two batches or has whole groups only, holds
        limit = limit_groups if counted >= self._settings.batch_trajectories else self._max_outstanding
        if counted + size > limit * size:
            return False
        if self._settings.pool.on_expiry is not OnExpiry.WAIT:
            return True
        return self._chooser.admits(self._waiting(), sampler_version=self._sampler_version.number, next_version=self._next_version(), slots=size)

    def _counted_slots(self) -> int:
        """Started and not retired, trajectories."""
        groups = self._groups.values()
        if self._settings.pool.quorum is None and not any(self._parked.values()):
            return len(groups) * self._group_size  # whole groups only: the usual case, without looking at each
        if not self._spares_long_ones:
            return sum(group.taken_slots + group.waiting_slots for group in groups)
        parked = frozenset[RolloutKey]().union(*self._parked.values())
        return sum(admission.counted_slots(group, parked) for group in groups)

    def _waiting(self) -> list[Group]:
        """In reservation order: those that some batch to come will hold."""
        return [group for group in self._groups.values() if group.waiting]

    @property
    def outstanding_groups(self) -> int:
        """Started and not retired."""
        return len(self._groups)

    def observe(self, *, learner_version: PolicyVersion | None = None, sampler_version: PolicyVersion | None = None) -> None:
        """Tells the pool of newer versions; neither falls. Under on_expiry = wait newer samplers give room, so call it when they report."""
        before = self._learner_version, self._sampler_version
        self._learner_version = max(self._learner_version, learner_version or self._learner_version)
        self._sampler_version = max(self._sampler_version, sampler_version or self._sampler_version)
        if before != (self._learner_version, self._sampler_version):
            self._wake()

    def observe_worker(self, worker: str, *, version: PolicyVersion, parked: Collection[RolloutKey] = ()) -> None:
        """What a worker reports: its weights, which it can verify under, and its parked rollouts, which give room to others."""
        changed = self._verification.on and self._verification.worker_is(worker, version)
        if self._parked.get(worker, frozenset()) != (now_parked := frozenset(parked)):
            self._parked[worker], changed = now_parked, True
        if changed:
            self._wake()

    # --- add --------------------------------------------------------------------------------------------------------------

    def report_generated(self, worker: str, cumulative_tokens: int) -> None:
        """Ledger.report_generated, written down."""
        self.ledger.report_generated(worker, cumulative_tokens)
        if self.journal is not None:
            self.journal.append(Reported(worker=worker, generated_tokens=cumulative_tokens))

    def add(self, finished: FinishedRollout, *, worker: str = "") -> AddResult:
        """Takes in a finished rollout; `worker` delivered it (needed for `worker_lost` to know what it still owed).

        A failed one is tried again while attempts are left, else it leaves its group for good. Raises InvariantError for a
        rollout that was never reserved or came back already.
        """
        self._group_of(finished.summary.key)
        if self.journal is not None:
            self.journal.append(Delivered(worker=worker, generated_tokens=self.ledger.reported(worker), finished=finished))
        return self._add(finished, worker)

    def _add(self, finished: FinishedRollout, worker: str) -> AddResult:
        summary = finished.summary
        group, member = self._group_of(summary.key), summary.key.member
        before = group.verifying.get(member)
        if before is None:
            self.ledger.delivered(summary, worker)
            del group.in_flight[member]
        else:
            if not summary.failed and summary.round <= before.summary.round:
                raise InvariantError(f"rollout {tuple(summary.key)} came back from verification {before.summary.round + 1} as of round {summary.round}.")
            key_steps_before = group.key_steps(member, before.summary)
            if summary.failed:
                group.marked.discard(member)
            key_steps = group.key_steps(member, summary)
            self.ledger.redelivered(summary, before.summary, worker, key_steps=key_steps, key_steps_before=key_steps_before)
            del group.verifying[member]
            group.refresh()
        del group.issued_seconds[member]
        retry = None
        if not summary.failed:
            group.accept(finished, worker)
            self._num_delivered += before is None
        elif self._may_retry(group, summary):
            retry = summary.key._replace(attempt=summary.key.attempt + 1)
            group.in_flight[member] = retry.attempt
            group.issued_seconds[member] = now()
            self.ledger.retried()
        else:
            group.lost += 1
            self.ledger.member_failed(group.task.kind)
            self._note(summary.key, group.task.kind, RetireReason.FAILED)
        complete = self._settle(group, str(summary.end_reason))
        return AddResult(task=group.task, retry=retry, group_complete=complete, verified=before is not None)

    def worker_lost(self, worker: str, keys: Sequence[RolloutKey]) -> tuple[AddResult, ...]:
        """A worker died with these rollouts in flight: what it drew for them becomes failed.worker_lost, they are tried again, which does
        not count as an attempt of theirs up to MAX_LOSSES times.

        What it was verifying is served as it had been delivered, whether `keys` names it or not; nothing it delivered is verified any more.
        """
        if self.journal is not None:
            self.journal.append(WorkerLost(worker=worker, generated_tokens=self.ledger.reported(worker), keys=tuple(keys)))
        return self._worker_lost(worker, keys)

    def _worker_lost(self, worker: str, keys: Sequence[RolloutKey]) -> tuple[AddResult, ...]:
        restored = [(group, member) for group in self._groups.values() for member in sorted(group.verifying) if group.workers[member] == worker]
        for group, member in restored:
            finished = group.verifying.pop(member)
            del group.issued_seconds[member]
            self.ledger.restored(finished.summary, worker)
            group.accept(finished, worker)
        self.ledger.worker_lost(worker)
        self._verification.worker_lost(worker)
        self._parked.pop(worker, None)
        for group in self._groups.values():
            group.workers = {member: "" if name == worker else name for member, name in group.workers.items()}
        stand = {group.finished[member].summary.key: group for group, member in restored}
        results = {key: self._add(lost_rollout(key, self.task_of(key)), worker) for key in keys if key not in stand}
        for key, group in stand.items():
            results[key] = AddResult(task=group.task, retry=None, group_complete=self._settle(group, ""), verified=True)
        return tuple(results[key] for key in keys)

    def task_of(self, key: RolloutKey) -> Task:
        """Of a rollout in flight. InvariantError for any other."""
        return self._group_of(key).task

    def _group_of(self, key: RolloutKey) -> Group:
        group = self._groups.get(key.group_id)
        if group is not None and (
            group.in_flight.get(key.member) == key.attempt or (key.member in group.verifying and group.verifying[key.member].summary.key == key)
        ):
            return group
        raise InvariantError(f"rollout {tuple(key)} is not in flight: it came back twice, or was never reserved.")

    def _may_retry(self, group: Group, summary: TrajectorySummary) -> bool:
        if self._closed is not None or summary.end_reason in _NOT_RETRIED:
            return False
        losses = group.losses.get(summary.key.member, 0)
        if summary.end_reason is EndReason.WORKER_LOST:
            group.losses[summary.key.member] = losses = losses + 1
            return losses <= MAX_LOSSES
        return summary.key.attempt + 1 - min(losses, MAX_LOSSES) < self._settings.rollout.max_attempts

    def _settle(self, group: Group, end: str) -> bool:
        """After a member came back: the group may be ready now, or leave. True when none of its members is out."""
        complete = not group.in_flight and not group.verifying
        if complete or group.quorum < group.size:
            group.signal = self._has_signal(group)
        if group.ready and group.completion < 0:
            group.completion = self._next_completion
            self._next_completion += 1
        if complete and not group.finished:
            self._leave_if_done(group, end)
        elif complete and self._settings.pool.no_signal is NoSignal.REFILL and not group.signal and not group.has_key_steps:
            self._drop(group, RetireReason.FILTERED)
        elif group.ready:
            self._mark(group)
        if complete or group.ready:
            self._wake()
        return complete

    def _has_signal(self, group: Group) -> bool:
        return self._settings.pool.no_signal is NoSignal.TRAIN or has_signal(group.rewards.values(), self._settings.learner.advantage)

    def _mark(self, group: Group) -> None:
        """marks.min_advantage: every step of a member whose reward lies that far from the mean of its group is key."""
        least = self._settings.marks.min_advantage
        if least is None or (deviation := pstdev(group.rewards.values())) == 0:
            return
        mean = fmean(group.rewards.values())
        for member, finished in group.finished.items():
            if member not in group.marked and abs(finished.summary.reward - mean) >= least * deviation:
                group.marked.add(member)
                self.ledger.marked(finished.summary.num_steps - finished.summary.num_key_steps)
        group.refresh()

    def _drop(self, group: Group, reason: RetireReason) -> None:
        """What came back of a group leaves without having been taken."""
        for member in sorted(group.finished):
            summary = group.finished.pop(member).summary
            self.ledger.dropped(summary, reason, group.key_steps(member, summary))
            self._retired(group, member, summary, reason)
        group.lost = 0
        group.leave()
        self._leave_if_done(group)
        self._wake()

    def _leave_if_done(self, group: Group, end: str = "") -> None:
        """The group retires after its last member; `end` is why the last one failed, where none was any good."""
        if group.waiting or group.taken:
            return
        del self._groups[group.group_id]
        best = next((reason for reason in _BEST_FIRST if reason in group.reasons), RetireReason.FAILED)
        self.ledger.group_retired(best, group.reasons.get(best, end))

    # --- verify -----------------------------------------------------------------------------------------------------------

    def due_for_verification(self) -> dict[str, tuple[RolloutKey, ...]]:
        """Worker -> finished rollouts that it must check now, because they are about to be served: they are in flight again."""
        if not self._verification.on or self._closed:
            return {}
        version = self._next_version()
        groups = self._chooser.about_to_be_served(
            self._waiting(),
            version=version,
            slots=self._settings.batch_trajectories,
            is_fresh=lambda group: group.ready and not self._verification.due(group, version),
        )
        due: dict[str, tuple[RolloutKey, ...]] = {}
        for worker, group, member in self._verification.send(groups, version):
            summary = group.send_back(member, now()).summary
            self.ledger.sent_back(summary, worker)
            due[worker] = (*due.get(worker, ()), summary.key)
        if due and self.journal is not None:
            self.journal.append(SentBack(keys=tuple(key for keys in due.values() for key in keys)))
        return due

    def take_forgotten(self) -> dict[str, list[RolloutKey]]:
        """Worker -> what it delivered that has left the pool since the last call: nobody will ask to verify it again."""
        return self._verification.take_forgotten()

    def next_change(self) -> asyncio.Event:
        """Set when next anything becomes ready, leaves, or is seen of newer weights. Get it before looking, so that nothing is missed."""
        return self._changed

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
                for group in [group for group in self._groups.values() if self._chooser.expired(group, version)]:
                    self._drop(group, RetireReason.EXPIRED)
            waiting = self._waiting()
            if self._draining and not waiting:
                raise PoolClosedError(f"the experience pool is drained: {self._draining}.")
            pieces = self._chooser.choose(waiting, version=version, slots=self._batch_slots(waiting))
            if pieces is not None:
                return self._select(pieces, version, learner_version)
            await self._changed.wait()

    def _batch_slots(self, waiting: Sequence[Group]) -> int:
        slots = self._settings.batch_trajectories
        return min(slots, sum(group.waiting_slots for group in waiting)) if self._draining else slots

    def _next_version(self) -> int:
        """Number of the version the next batch will be trained from."""
        after = (taken.trains_from + self._updates_per_batch for taken in self._taken.values() if taken.selection.members)
        return max(self._learner_version.number, *after, 0)

    def _select(self, pieces: Sequence[Piece], version: int, learner_version: PolicyVersion) -> Selection:
        members: list[SelectedMember] = []
        filtered: list[RolloutKey] = []
        rewards: list[float] = []
        known: dict[int, tuple[float, ...]] = {}
        taken: list[tuple[Piece, tuple[int, ...]]] = []
        for piece in sorted(pieces, key=lambda piece: piece.group.group_id):
            group = piece.group
            taken.append((piece, group.take(piece.slots)))
            finished = [group.taken[member] for member in taken[-1][1]]
            rewards += [one.summary.reward for one in finished]
            if not self._has_signal(group):
                filtered += [one.summary.key for one in finished]
                continue
            members += [SelectedMember(summary=one.summary, payload=one.payload, marked=one.summary.key.member in group.marked) for one in finished]
            if group.in_flight or len(group.rewards) > len(finished):
                known[group.group_id] = tuple(group.rewards[member] for member in sorted(group.rewards))
        selection = Selection(
            id=self._next_selection,
            learner_version=learner_version,
            members=tuple(members),
            filtered=tuple(filtered),
            group_rewards=known,
            max_staleness=self._settings.max_staleness,
            max_key_staleness=self._settings.pool.max_key_staleness,
        )
        self._next_selection += 1
        self._taken[selection.id] = _Taken(selection=selection, pieces=taken, trains_from=version)
        self._reward_means[selection.id] = sum(rewards) / len(rewards)
        if self._verification.on:
            self._wake()  # the next batch may be due
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
        if self.journal is not None:
            keys = tuple(member.summary.key for member in selection.members) + selection.filtered
            before, after = (None, None) if result is None else (result.version_before, result.version_after)
            self.journal.append(Consumed(selection_id=selection.id, version_before=before, version_after=after, keys=keys))
        for piece, members in taken.pieces:
            self._retire_piece(piece, members, spent)
        if result is not None:
            self.observe(learner_version=result.version_after)
        self._judge_pace(spent)
        self._wake()

    def _retire_piece(self, piece: Piece, members: Sequence[int], spent: dict[RolloutKey, Spent]) -> None:
        group = piece.group
        for member in members:
            summary = group.taken.pop(member).summary
            member_spent = spent.get(summary.key)
            if member_spent is None:
                self.ledger.dropped(summary, RetireReason.FILTERED, group.key_steps(member, summary))
                self._retired(group, member, summary, RetireReason.FILTERED)
            else:
                self.ledger.learned(summary, member_spent)
                self._retired(group, member, summary, member_spent.reason, member_spent.main_skip_reason)
        group.taken_slots -= piece.slots
        self._leave_if_done(group)

    def _retired(self, group: Group, member: int, summary: TrajectorySummary, reason: RetireReason, skipped: str = "") -> None:
        group.reasons.setdefault(reason, skipped)
        self._verification.left(group.workers[member], summary.key)
        self._note(summary.key, summary.task_kind, reason)

    def _note(self, key: RolloutKey, kind: str, reason: RetireReason) -> None:
        if self.journal is not None:
            self.journal.append(Retired(key=key, reason=reason))
        if self._on_retire is not None:
            self._on_retire(Retirement(key=key, task_kind=kind, reason=reason))

    def _judge_pace(self, spent: dict[RolloutKey, Spent]) -> None:
        if self._pace is None:
            return
        trained, over = sum(one.trained_key_steps for one in spent.values()), sum(one.over_bound_key_steps for one in spent.values())
        judgement = self._pace.retired(trained=trained, over=over)
        if judgement is not None and self._on_pace is not None:
            self._on_pace(judgement, self.pace_wait_seconds)

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
        return measure(
            list(self._groups.values()),
            max_groups=self._max_outstanding if self._pace is None else self._pace.limit_groups,
            version=self._next_version(),
            num_delivered=self._num_delivered,
            seconds=0.0 if self._first_seconds is None else now() - self._first_seconds,
        )

    def waiting_text(self, learner_version: PolicyVersion) -> str:
        """Why take waits: "3 of 8 groups ready; the oldest rollout has been out for 41 s"."""
        version, waiting = max(learner_version.number, self._next_version()), self._waiting()
        count = -(-self._batch_slots(waiting) // self._group_size)
        return describe_wait(waiting, self._chooser, count=count, version=version, time=now())

    def _contents(self) -> Contents:
        groups = self._groups.values()
        pooled = [(group, member, one.summary) for group in groups for held in (group.finished, group.taken) for member, one in held.items()]
        in_flight = sum(bool(group.in_flight or group.verifying) for group in groups)
        return Contents(
            groups_in_flight=in_flight,
            groups_pooled=len(groups) - in_flight,
            trajectories_in_flight=sum(len(group.in_flight) + len(group.verifying) for group in groups),
            trajectories_pooled=len(pooled),
            tokens_pooled=sum(summary.num_action_tokens for _, _, summary in pooled),
            key_steps_pooled=sum(group.key_steps(member, summary) for group, member, summary in pooled),
            key_steps_in_flight=sum(group.key_steps(member, one.summary) for group in groups for member, one in group.verifying.items()),
        )

    def _wake(self) -> None:
        """Everybody who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
