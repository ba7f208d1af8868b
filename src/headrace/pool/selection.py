"""Which groups make the next batch. Pure functions over the groups that are not taken yet.

| selection    | on_expiry   | the batch is                                                                             |
|--------------|-------------|------------------------------------------------------------------------------------------|
| oldest_first | skip_tokens | the first groups in reservation order; waits for stragglers                              |
| ready_first  | skip_tokens | the first groups in order of completion; never waits for one group while others are there |
| either       | drop_group  | the same, after groups over the bound have left (the pool drops them)                    |
| either       | wait        | the same, if afterwards every group that stays can still be taken in time; else the most |
|              |             | urgent ones, and it waits for them                                                       |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from headrace.config import Advantage, OnExpiry, SelectionRule, Settings
from headrace.pool import admission
from headrace.pool.group import Group


def has_signal(rewards: Collection[float], advantage: Advantage) -> bool:
    """Whether the survivors of a group have any advantage other than 0.

    Group-relative advantages vanish when all rewards are equal or fewer than two members survived; without a baseline the
    advantage is the reward itself.
    """
    if advantage is Advantage.NONE:
        return any(reward != 0 for reward in rewards)
    return len(set(rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """The selection rule of a run."""

    rule: SelectionRule
    on_expiry: OnExpiry
    groups_per_batch: int
    updates_per_batch: int
    take_bound: int

    @classmethod
    def of(cls, settings: Settings) -> Chooser:
        return cls(
            rule=settings.pool.selection,
            on_expiry=settings.pool.on_expiry,
            groups_per_batch=settings.pool.groups_per_batch,
            updates_per_batch=settings.updates_per_batch,
            take_bound=admission.take_bound(settings),
        )

    def deadline(self, group: Group) -> float:
        return admission.deadline(group.oldest_possible, self.take_bound)

    def expired(self, group: Group, version: int) -> bool:
        """The group came back and holds an unmarked token that the batch at `version` would find over the bound."""
        return group.ready and self.deadline(group) < version

    def choose(self, groups: Sequence[Group], *, version: int, count: int) -> list[Group] | None:
        """`count` groups out of `groups` (in reservation order) for a batch trained from `version`, or None: wait."""
        if sum(group.ready for group in groups) < count:
            return None
        ready = sorted((group for group in groups if group.ready), key=lambda group: group.completion)
        head = list(groups[:count]) if self.rule is SelectionRule.OLDEST_FIRST else ready[:count]
        if self.on_expiry is not OnExpiry.WAIT:
            return head if all(group.ready for group in head) else None
        return self._choose_in_time(groups, head, ready, version=version, count=count)

    def _choose_in_time(self, groups: Sequence[Group], head: list[Group], ready: list[Group], *, version: int, count: int) -> list[Group] | None:
        """`on_expiry = wait`: serve only what leaves everybody else a place in time.

        When the most urgent groups of all are there they are always served: waiting could not help. So take never blocks for
        ever once everything in flight has come back.
        """
        candidates = [head]
        if self.rule is SelectionRule.READY_FIRST:
            candidates.append(sorted(ready, key=lambda group: (self.deadline(group), group.completion))[:count])
        for candidate in candidates:
            if all(group.ready for group in candidate) and self.leaves_time(groups, candidate, version=version):
                return candidate
        waits_for_elders = self.rule is SelectionRule.OLDEST_FIRST
        urgent = sorted(groups, key=lambda group: (self.deadline(group), not (group.ready or waits_for_elders), group.group_id))[:count]
        return urgent if all(group.ready for group in urgent) else None

    def leaves_time(self, groups: Sequence[Group], taken: Sequence[Group], *, version: int) -> bool:
        """Whether all groups but `taken` can still be taken in time after this batch."""
        identifiers = {group.group_id for group in taken}
        deadlines = (self.deadline(group) for group in groups if group.group_id not in identifiers)
        return self._feasible(deadlines, version + self.updates_per_batch)

    def admits(self, groups: Sequence[Group], *, sampler_version: int, next_version: int) -> bool:
        """Whether one more group, sampled from `sampler_version` on, leaves every group a place in time."""
        if self.on_expiry is not OnExpiry.WAIT:
            return True
        deadlines = [max(self.deadline(group), next_version) for group in groups]  # what is late still takes a place, now
        return self._feasible([*deadlines, admission.deadline(sampler_version, self.take_bound)], next_version)

    def _feasible(self, deadlines: Iterable[float], next_version: int) -> bool:
        return admission.feasible(
            deadlines,
            next_version=next_version,
            updates_per_batch=self.updates_per_batch,
            groups_per_batch=self.groups_per_batch,
        )
