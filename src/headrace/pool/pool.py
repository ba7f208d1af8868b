"""The experience pool: reserve -> add -> take -> retire, per member. What was started, what came back, what may be trained.

* A member takes its place in the admission when its group is reserved and gives it back when it is retired, exactly once each (I5).
  Admission never exceeds `admission.max_outstanding_groups` (parked and late members: see there).
* Batches count *issued* members: a group that lost a member still fills its place, so failures cannot starve the learner.
* With a quorum a group may be served before its last members are back; those are served as they come, the group retires after the last.
* `take` under drop_group or wait returns no unmarked token over max_staleness, except beside key steps; under skip_tokens the learner's
  own check, made against its version at that moment, is what guarantees I6.
* The bound in effect may be lowered and raised again (`bound_staleness`), never over the setting. It holds from the next batch on: what is
  there already and over it is skipped, or dropped under drop_group. Under wait what cannot be in time any more is served and skipped.
* No key step is dropped: a group that holds one is not expired or refilled but served. Without signal it fills the batch as filtered,
  not trained (its gradient is 0), and its key steps count as skipped.filtered.
* Members that are due for verification go back to their workers first (pool/verification.py).
* Nothing here holds a lock or a thread: every change happens between two awaits, so a cancelled reserve or take loses nothing.

Payloads stay opaque bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from headrace.clock import now
from headrace.config import OnExpiry, Settings
from headrace.errors import HeadraceError, InvariantError
from headrace.pool import admission
from headrace.pool.group import Group
from headrace.pool.journal import Consumed, Delivered, Journal, Reported, Reserved, Retired, SentBack, SourcePlace, WorkerLost
from headrace.pool.ledger import Spent
from headrace.pool.members import AddResult, Members, Retirement
from headrace.pool.outcomes import account
from headrace.pool.pacing import Pace, Paced
from headrace.pool.selection import Chooser, Piece
from headrace.pool.statistics import PoolStatistics, describe_wait, measure
from headrace.pool.verification import Verification
from headrace.types import FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task
from headrace.updates import SelectedMember, Selection, UpdateResult


class PoolClosedError(HeadraceError):
    """The pool serves no more: it was closed, or it is draining and nothing is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReservation:
    """A place in the admission, for all members of one task."""

    group_id: int
    task: Task
    keys: tuple[RolloutKey, ...]
    """[group_size] attempt 0 of each member."""


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
        self.max_staleness = settings.max_staleness
        """The bound in effect, updates."""
        self._max_outstanding = admission.max_outstanding_groups(settings, self.max_staleness)
        self._spares_long_ones = admission.spares_long_ones(settings, self.max_staleness)
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
        self.members = Members(settings, self._verification, on_retire=self._note, on_change=self._wake)
        self._taken: dict[int, _Taken] = {}
        self._parked: dict[str, frozenset[RolloutKey]] = {}  # by worker
        self.next_selection = 0
        self._learner_version = self._sampler_version = PolicyVersion(0, 0)
        self._reward_means: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._draining: str | None = None
        self._closed: str | None = None
        self.ledger = self.members.ledger

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
        group_id = self.members.next_group
        self.members.open(group_id, task, self._group_size, sampler_version=self._sampler_version.number)
        if self.journal is not None:
            self.place = self._source_place()
            self.journal.append(Reserved(group_id=group_id, task=task, size=self._group_size, place=self.place))
        return GroupReservation(group_id=group_id, task=task, keys=tuple(RolloutKey(group_id, member, 0) for member in range(self._group_size)))

    def has_room(self) -> bool:
        """Whether admission lets one more group start now."""
        return self._has_room(self._limit_groups())

    def _limit_groups(self) -> int:
        return self._max_outstanding if self._pace is None else min(self._max_outstanding, self._pace.limit_groups)

    def _has_room(self, limit_groups: int) -> bool:
        if self._closed or self._draining or len(self.members.groups) >= admission.MAX_OUTSTANDING * self._max_outstanding:
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
        groups = self.members.groups.values()
        if self._settings.pool.quorum is None and not self._verification.on and not any(self._parked.values()):
            return len(groups) * self._group_size  # whole groups only: the usual case, without looking at each
        if not self._spares_long_ones:
            return sum(group.taken_slots + group.waiting_slots for group in groups)
        parked = frozenset[RolloutKey]().union(*self._parked.values())
        return sum(admission.counted_slots(group, parked) for group in groups)

    def _waiting(self) -> list[Group]:
        """In reservation order: those that some batch to come will hold."""
        return [group for group in self.members.groups.values() if group.waiting]

    @property
    def outstanding_groups(self) -> int:
        """Started and not retired."""
        return len(self.members.groups)

    def observe(self, *, learner_version: PolicyVersion | None = None, sampler_version: PolicyVersion | None = None) -> None:
        """Tells the pool of newer versions; neither falls. Under on_expiry = wait newer samplers give room, so call it when they report."""
        before = self._learner_version, self._sampler_version
        self._learner_version = max(self._learner_version, learner_version or self._learner_version)
        self._sampler_version = max(self._sampler_version, sampler_version or self._sampler_version)
        if before != (self._learner_version, self._sampler_version):
            self._wake()

    def rejected(self, keys: Iterable[RolloutKey]) -> None:
        """Rollouts that are verified and are sampled again from a rejected token: nobody waits for them."""
        for key in keys:
            self.members.rejected(key)

    def observe_worker(self, worker: str, *, version: PolicyVersion, parked: Collection[RolloutKey] = ()) -> None:
        """What a worker reports: its weights, which it can verify under, and its parked rollouts, which give room to others."""
        changed = self._verification.on and self._verification.worker_is(worker, version)
        if self._parked.get(worker, frozenset()) != (now_parked := frozenset(parked)):
            self._parked[worker], changed = now_parked, True
        if changed:
            self._wake()

    def bound_staleness(self, max_staleness: int) -> None:
        """From now on this bound is in effect. ValueError when it is over the setting, or under what one batch needs."""
        if not self._updates_per_batch - 1 <= max_staleness <= self._settings.max_staleness:
            raise ValueError(f"the staleness bound in effect is {self._updates_per_batch - 1} to {self._settings.max_staleness}, not {max_staleness}.")
        self.max_staleness = max_staleness
        self._max_outstanding = admission.max_outstanding_groups(self._settings, max_staleness)
        self._spares_long_ones = admission.spares_long_ones(self._settings, max_staleness)
        self._chooser = replace(self._chooser, take_bound=admission.take_bound(self._settings, max_staleness))
        self._wake()

    @property
    def waits_for_acknowledgements(self) -> bool:
        """Where one batch is all that may be out, its trajectories begin only after every sampler has taken up the update before."""
        return self.max_staleness < self._updates_per_batch

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
        self.members.group_of(finished.summary.key)
        if self.journal is not None:
            self.journal.append(Delivered(worker=worker, generated_tokens=self.ledger.reported(worker), finished=finished))
        return self.members.add(finished, worker)

    def worker_lost(self, worker: str, keys: Sequence[RolloutKey]) -> tuple[AddResult, ...]:
        """A worker died with these rollouts in flight: what it drew for them becomes failed.worker_lost, they are tried again, which does
        not count as an attempt of theirs up to MAX_LOSSES times.

        What it was verifying is served as it had been delivered, whether `keys` names it or not; nothing it delivered is verified any more.
        """
        if self.journal is not None:
            self.journal.append(WorkerLost(worker=worker, generated_tokens=self.ledger.reported(worker), keys=tuple(keys)))
        self._parked.pop(worker, None)
        return self.members.worker_lost(worker, keys)

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
                for group in [group for group in self.members.groups.values() if self._chooser.expired(group, version)]:
                    self.members.drop(group, RetireReason.EXPIRED)
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
            if not self.members.has_signal(group):
                filtered += [one.summary.key for one in finished]
                continue
            members += [SelectedMember(summary=one.summary, payload=one.payload, marked=one.summary.key.member in group.marked) for one in finished]
            if group.in_flight or len(group.rewards) > len(finished):
                known[group.group_id] = tuple(group.rewards[member] for member in sorted(group.rewards))
        selection = Selection(
            id=self.next_selection,
            learner_version=learner_version,
            members=tuple(members),
            filtered=tuple(filtered),
            group_rewards=known,
            max_staleness=self.max_staleness,
            max_key_staleness=self._settings.pool.max_key_staleness,
        )
        self.next_selection += 1
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
            self.members.retire_piece(piece, members, spent)
        if result is not None:
            self.observe(learner_version=result.version_after)
        self._judge_pace(spent)
        self._wake()

    def _note(self, left: Retirement) -> None:
        if self.journal is not None:
            self.journal.append(Retired(key=left.key, reason=left.reason))
        if self._on_retire is not None:
            self._on_retire(left)

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
        self.members.retrying = False
        self._wake()

    # --- for people -------------------------------------------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Levels now, and staleness of what is pooled against the version the next batch is trained from."""
        return measure(
            list(self.members.groups.values()),
            max_groups=self._limit_groups(),
            version=self._next_version(),
            num_delivered=self.members.num_delivered,
            seconds=0.0 if self.members.first_seconds is None else now() - self.members.first_seconds,
        )

    def waiting_text(self, learner_version: PolicyVersion) -> str:
        """Why take waits: "3 of 8 groups ready; the oldest rollout has been out for 41 s"."""
        version, waiting = max(learner_version.number, self._next_version()), self._waiting()
        slots = self._batch_slots(waiting)
        return describe_wait(waiting, self._chooser, slots=slots, group_size=self._group_size, version=version, time=now())

    def _wake(self) -> None:
        """Everybody who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
