"""Where each member of each started group is, and how it moves: out, back, being verified, with the learner, left. Pure bookkeeping.

Every change of the pool's contents is made here, at once with its entry in the ledger. Admission, waiting, versions and the journal
are the pool's (pool/pool.py); what the journal holds is played on this again (pool/restoring.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from headrace.clock import now
from headrace.config import NoSignal, Settings
from headrace.errors import InvariantError
from headrace.pool.group import Group, lost_rollout
from headrace.pool.ledger import Contents, Ledger, Spent
from headrace.pool.selection import Piece, has_signal
from headrace.pool.verification import Verification
from headrace.types import EndReason, FinishedRollout, RetireReason, RolloutKey, Task, TrajectorySummary

# Trying again cannot help: the same prompt stays too long, the run has ended.
_NOT_RETRIED = frozenset({EndReason.PROMPT_TOO_LONG, EndReason.CANCELLED})

MAX_LOSSES = 3
"""Attempts at one member that may end with their worker and count for nothing: one that kills every worker must end, too."""

_BEST_FIRST = (RetireReason.TRAINED, RetireReason.SKIPPED, RetireReason.FILTERED, RetireReason.EXPIRED, RetireReason.VOID)


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


class Members:
    """`on_retire` hears of every member that leaves, `on_change` of everything that may let somebody who waits go on."""

    def __init__(self, settings: Settings, verification: Verification, *, on_retire: Callable[[Retirement], None], on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._verification = verification
        self.on_retire = on_retire
        self._on_change = on_change
        self.groups: dict[int, Group] = {}
        """By id, in reservation order, not retired yet."""
        self.next_group = self.next_completion = 0
        self.num_delivered = 0
        self.first_seconds: float | None = None
        """When the first group was opened."""
        self.retrying = True
        """Whether failed rollouts are tried again."""
        self.ledger = Ledger(self._contents)

    def open(self, group_id: int, task: Task, size: int, *, sampler_version: int) -> None:
        """A group starts: all of its members are out. `sampler_version`: no token of it will be older."""
        time = now()
        self.next_group = group_id + 1
        self.first_seconds = time if self.first_seconds is None else self.first_seconds
        self.groups[group_id] = Group(
            group_id=group_id,
            task=task,
            size=size,
            quorum=min(size, self._settings.pool.quorum or size),
            sampler_version=sampler_version,
            in_flight=dict.fromkeys(range(size), 0),
            issued_seconds=dict.fromkeys(range(size), time),
        )
        self.ledger.reserved(task.kind, size)

    def group_of(self, key: RolloutKey) -> Group:
        """Of a rollout that is out. InvariantError for any other."""
        group = self.groups.get(key.group_id)
        if group is not None and (
            group.in_flight.get(key.member) == key.attempt or (key.member in group.verifying and group.verifying[key.member].summary.key == key)
        ):
            return group
        raise InvariantError(f"rollout {tuple(key)} is not in flight: it came back twice, or was never reserved.")

    # --- coming back ------------------------------------------------------------------------------------------------------

    def add(self, finished: FinishedRollout, worker: str) -> AddResult:
        """Out -> back, or tried again, or failed for good."""
        summary = finished.summary
        group, member = self.group_of(summary.key), summary.key.member
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
            group.back_from_verification(member)
            del group.rewards[member]
            group.refresh()
        del group.issued_seconds[member]
        retry = None
        if not summary.failed:
            group.accept(finished, worker)
            self.num_delivered += before is None
        elif self._may_retry(group, summary):
            retry = summary.key._replace(attempt=summary.key.attempt + 1)
            group.in_flight[member] = retry.attempt
            group.issued_seconds[member] = now()
            self.ledger.retried()
        else:
            group.lost += 1
            self.ledger.member_failed(group.task.kind)
            self.note(summary.key, group.task.kind, RetireReason.FAILED)
        complete = self._settle(group, str(summary.end_reason))
        return AddResult(task=group.task, retry=retry, group_complete=complete, verified=before is not None)

    def rejected(self, key: RolloutKey) -> None:
        """A member that is verified is sampled again: the others of its group need not wait for it."""
        group = self.groups.get(key.group_id)
        if group is not None and key.member in group.verifying and group.verifying[key.member].summary.key == key:
            group.redrawing.add(key.member)
            self._settle(group, "")

    def worker_lost(self, worker: str, keys: Sequence[RolloutKey]) -> tuple[AddResult, ...]:
        """`keys` and whatever it was verifying; in the order of `keys`."""
        restored = [(group, member) for group in self.groups.values() for member in sorted(group.verifying) if group.workers[member] == worker]
        for group, member in restored:
            finished = group.back_from_verification(member)
            del group.issued_seconds[member]
            self.ledger.restored(finished.summary, worker)
            group.accept(finished, worker)
        self.ledger.worker_lost(worker)
        self._verification.worker_lost(worker)
        for group in self.groups.values():
            group.workers = {member: "" if name == worker else name for member, name in group.workers.items()}
        stand = {group.finished[member].summary.key: group for group, member in restored}
        results = {key: self.add(lost_rollout(key, self.group_of(key).task), worker) for key in keys if key not in stand}
        for key, group in stand.items():
            results[key] = AddResult(task=group.task, retry=None, group_complete=self._settle(group, ""), verified=True)
        return tuple(results[key] for key in keys)

    def _may_retry(self, group: Group, summary: TrajectorySummary) -> bool:
        if not self.retrying or summary.end_reason in _NOT_RETRIED:
            return False
        losses = group.losses.get(summary.key.member, 0)
        if summary.end_reason is EndReason.WORKER_LOST:
            group.losses[summary.key.member] = losses = losses + 1
            return losses <= MAX_LOSSES
        return summary.key.attempt + 1 - min(losses, MAX_LOSSES) < self._settings.rollout.max_attempts

    def _settle(self, group: Group, end: str) -> bool:
        """After a member came back: the group may be ready now, or leave. True when none of its members is out."""
        complete = not group.in_flight and not group.verifying
        if complete or group.redrawing or group.quorum < group.size:
            group.signal = self.has_signal(group)
        if group.ready and group.completion < 0:
            group.completion = self.next_completion
            self.next_completion += 1
        if complete and not group.finished:
            self._leave_if_done(group, end)
        elif complete and self._settings.pool.no_signal is NoSignal.REFILL and not group.signal and not group.has_key_steps:
            self.drop(group, RetireReason.FILTERED)
        elif group.ready:
            self._mark(group)
        if complete or group.ready:
            self._on_change()
        return complete

    def has_signal(self, group: Group) -> bool:
        """Whether training on it can teach anything, as far as is known."""
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

    # --- leaving ----------------------------------------------------------------------------------------------------------

    def drop(self, group: Group, reason: RetireReason) -> None:
        """What came back of a group leaves without having been taken."""
        for member in sorted(group.finished):
            summary = group.finished.pop(member).summary
            self.ledger.dropped(summary, reason, group.key_steps(member, summary))
            self._retired(group, member, summary, reason)
        group.lost = 0
        group.leave()
        self._leave_if_done(group)
        self._on_change()

    def retire_piece(self, piece: Piece, members: Sequence[int], spent: dict[RolloutKey, Spent]) -> None:
        """With the learner -> left, as the outcomes say; without signal: filtered."""
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

    def _leave_if_done(self, group: Group, end: str = "") -> None:
        """The group retires after its last member; `end` is why the last one failed, where none was any good."""
        if group.waiting or group.taken:
            return
        del self.groups[group.group_id]
        best = next((reason for reason in _BEST_FIRST if reason in group.reasons), RetireReason.FAILED)
        self.ledger.group_retired(best, group.reasons.get(best, end))

    def _retired(self, group: Group, member: int, summary: TrajectorySummary, reason: RetireReason, skipped: str = "") -> None:
        group.reasons.setdefault(reason, skipped)
        self._verification.left(group.workers[member], summary.key)
        self.note(summary.key, summary.task_kind, reason)

    def note(self, key: RolloutKey, kind: str, reason: RetireReason) -> None:
        """Tells that a member left."""
        self.on_retire(Retirement(key=key, task_kind=kind, reason=reason))

    # --- for the ledger ---------------------------------------------------------------------------------------------------

    def _contents(self) -> Contents:
        groups = self.groups.values()
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
