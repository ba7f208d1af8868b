"""Which groups make the next batch. Pure functions over the groups that still wait for one.

| selection    | on_expiry   | the batch is                                                                             |
|--------------|-------------|------------------------------------------------------------------------------------------|
| oldest_first | skip_tokens | the first groups in reservation order; waits for stragglers, not for late members         |
| ready_first  | skip_tokens | the first groups in order of completion; never waits for one group while others are there |
| either       | drop_group  | the same, after groups over the bound have left (the pool drops them)                    |
| either       | wait        | the same, if afterwards every group that stays can still be taken in time; else the most |
|              |             | urgent ones, and it waits for them                                                       |

A batch holds an exact number of slots (trajectories). With a quorum groups come in pieces: what is there of one that has the quorum,
and late members one by one; the last piece of a batch may be split.

Key steps (DESIGN section 6, "serve first what ages most"): under ready_first a group with key tokens that are within
max_key_staleness in this batch and would be over it in the next one moves up by as many ranks as a batch has groups. So a
group can be overtaken by at most one batch's worth of groups that became ready after it, whatever is marked: nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from headrace.config import Advantage, OnExpiry, SelectionRule, Settings
from headrace.pool import admission
from headrace.pool.group import Group
from headrace.pool.verification import Verification


def has_signal(rewards: Collection[float], advantage: Advantage) -> bool:
    """Whether the survivors of a group have any advantage other than 0.

    Group-relative advantages vanish when all rewards are equal or fewer than two members survived; without a baseline the
    advantage is the reward itself.
    """
    if advantage is Advantage.NONE:
        return any(reward != 0 for reward in rewards)
    return len(set(rewards)) > 1


@dataclass(frozen=True, slots=True)
class Piece:
    """What a batch takes of one group."""

    group: Group
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """The selection rule of a run."""

    rule: SelectionRule
    on_expiry: OnExpiry
    groups_per_batch: int
    slots_per_batch: int
    updates_per_batch: int
    take_bound: int
    max_key_staleness: int
    verification: Verification

    @classmethod
    def of(cls, settings: Settings, verification: Verification) -> Chooser:
        return cls(
            rule=settings.pool.selection,
            on_expiry=settings.pool.on_expiry,
            groups_per_batch=settings.pool.groups_per_batch,
            slots_per_batch=settings.batch_trajectories,
            updates_per_batch=settings.updates_per_batch,
            take_bound=admission.take_bound(settings, settings.max_staleness),
            max_key_staleness=settings.pool.max_key_staleness,
            verification=verification,
        )

    def deadline(self, group: Group) -> float:
        return admission.deadline(group.oldest_possible, self.take_bound)

    def expired(self, group: Group, version: int) -> bool:
        """What came back of the group holds an unmarked token that the batch at `version` would find over the bound.

        Never where that would lose a key step (it is served, and its stale unmarked tokens are skipped), nor where verification is
        about to make the tokens new again.
        """
        if not group.ready or admission.deadline(group.oldest_unmarked, self.take_bound) >= version:
            return False
        return not group.has_key_steps and not self.verification.due(group, version)

    def choose(self, groups: Sequence[Group], *, version: int, slots: int) -> list[Piece] | None:
        """`slots` of `groups` (in reservation order) for a batch trained from `version`, or None: wait."""
        servable = {group.group_id for group in groups if group.ready and not self.verification.due(group, version)}
        ready = [group for group in groups if group.group_id in servable]
        if sum(group.ready_slots for group in ready) < slots:
            return None
        head = _fill(self._by_age(groups) if self.rule is SelectionRule.OLDEST_FIRST else self._by_rank(ready, version), servable, slots)
        if self.on_expiry is not OnExpiry.WAIT:
            return head
        return self._choose_in_time(groups, head, ready, servable, version=version, slots=slots)

    def about_to_be_served(self, groups: Sequence[Group], *, version: int, slots: int, is_fresh: Callable[[Group], bool]) -> list[Group]:
        """What may be needed for the next `slots`: in serving order, up to where the fresh groups among them would fill these.

        Groups that are verified, or due for it, do not count: how long a cut rollout takes to be sampled again is not known, and a
        learner that waits for the slowest of a fixed few would stand idle while others could be made ready.
        """
        prepared = [group for group in groups if group.prepared]
        orders = [self._by_age(groups) if self.rule is SelectionRule.OLDEST_FIRST else self._by_rank(prepared, version)]
        if self.on_expiry is OnExpiry.WAIT:
            orders.append(sorted(prepared, key=lambda group: (self.deadline(group), group.completion)))
        chosen: dict[int, Group] = {}
        for order in orders:
            filled = 0
            for group in order:
                if filled >= slots:
                    break
                if is_fresh(group):
                    filled += group.waiting_slots - (len(group.in_flight) if group.prepared else 0)
                chosen[group.group_id] = group
        return [group for group in chosen.values() if group.prepared]

    def _by_age(self, groups: Sequence[Group]) -> list[Group]:
        """Reservation order; nobody waits for late members."""
        return [group for group in groups if not group.released or group.finished or group.verifying]

    def _by_rank(self, groups: Sequence[Group], version: int) -> list[Group]:
        """Order of completion, and those whose key tokens age out now one batch ahead."""

        def rank(group: Group) -> tuple[int, bool, int]:
            late = any(version <= number + self.max_key_staleness < version + self.updates_per_batch for number in group.key_versions)
            return group.completion - (self.groups_per_batch if late else 0), not late, group.completion

        return sorted(groups, key=rank)

    def _choose_in_time(
        self, groups: Sequence[Group], head: list[Piece] | None, ready: list[Group], servable: Collection[int], *, version: int, slots: int
    ) -> list[Piece] | None:
        """`on_expiry = wait`: serve only what leaves everybody else a place in time.

        When the most urgent groups of all are there they are always served: waiting could not help. So take never blocks for
        ever once everything in flight has come back.
        """
        candidates = [head]
        if self.rule is SelectionRule.READY_FIRST:
            candidates.append(_fill(sorted(ready, key=lambda group: (self.deadline(group), group.completion)), servable, slots))
        for candidate in candidates:
            if candidate is not None and self.leaves_time(groups, candidate, version=version):
                return candidate
        return self._most_urgent(groups, servable, slots)

    def _most_urgent(self, groups: Sequence[Group], servable: Collection[int], slots: int) -> list[Piece] | None:
        """By deadline, waiting for whoever is out and due no later than what would be served in their place."""
        waits_for_elders = self.rule is SelectionRule.OLDEST_FIRST
        units: list[tuple[float, bool, int, bool, Group]] = []
        for group in groups:
            deadline, there = self.deadline(group), group.group_id in servable
            if there:
                units.append((deadline, False, group.group_id, False, group))
            if group.waiting_slots > (group.ready_slots if there else 0):
                units.append((deadline, not waits_for_elders, group.group_id, True, group))
        pieces: list[Piece] = []
        for _, _, _, out, group in sorted(units, key=lambda unit: unit[:4]):
            if out:
                return None
            pieces.append(Piece(group, min(group.ready_slots, slots)))
            slots -= pieces[-1].slots
            if not slots:
                return pieces
        return None

    def leaves_time(self, groups: Sequence[Group], taken: Sequence[Piece], *, version: int) -> bool:
        """Whether all that is not `taken` can still be taken in time after this batch."""
        served = {piece.group.group_id: piece.slots for piece in taken}
        due = ((self.deadline(group), group.waiting_slots - served.get(group.group_id, 0)) for group in groups)
        return self._feasible(due, version + self.updates_per_batch)

    def admits(self, groups: Sequence[Group], *, sampler_version: int, next_version: int, slots: int) -> bool:
        """`on_expiry = wait`: whether one more group of so many slots, sampled from `sampler_version` on, leaves every group a place in time."""
        due = [(max(self.deadline(group), next_version), group.waiting_slots) for group in groups]  # what is late still takes a place, now
        return self._feasible([*due, (admission.deadline(sampler_version, self.take_bound), slots)], next_version)

    def _feasible(self, due: Iterable[tuple[float, int]], next_version: int) -> bool:
        return admission.feasible(
            ((deadline, slots) for deadline, slots in due if slots),
            next_version=next_version,
            updates_per_batch=self.updates_per_batch,
            slots_per_batch=self.slots_per_batch,
        )


def _fill(order: Iterable[Group], servable: Collection[int], slots: int) -> list[Piece] | None:
    """The first `slots` in order, or None when one of their groups is not there."""
    pieces: list[Piece] = []
    for group in order:
        if group.group_id not in servable:
            return None
        pieces.append(Piece(group, min(group.ready_slots, slots)))
        slots -= pieces[-1].slots
        if not slots:
            return pieces
    return None
