"""Which members are checked under newer weights before they are trained (DESIGN section 6). Costs nothing when it is off.

A member is *due* when a checked token of it will be older than `verify_after` in the next batch and its rounds are not used up. A
group with a due member is not served. Its members are sent to the workers that delivered them as soon as it is about to be served
and the worker's weights are new enough to help; they are in flight then, with the limits of any rollout: a worker that does not answer
is named after limits.report_seconds, a batch that does not come together after limits.batch_seconds. What was delivered before is
kept and stands when the worker is lost. A member comes back with its round raised, so it is due `verify_rounds` times at most.

Members that wait for one that is out age meanwhile. They are checked again while they wait, so that the tails of those that are cut
are sampled beside its own, but each time only at twice the age of the last: at every update it would use up rounds and forwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.config import Settings, Verify
from headrace.pool.group import Group
from headrace.types import PolicyVersion, RolloutKey, TrajectorySummary


class Verification:
    """The rule of a run, and what the workers can do."""

    def __init__(self, settings: Settings) -> None:
        self.on = settings.pool.verify is not Verify.OFF
        self._all = settings.pool.verify is Verify.ALL
        self._after = settings.pool.verify_after
        self._rounds = settings.pool.verify_rounds
        self._versions: dict[str, PolicyVersion] = {}
        self._forgotten: dict[str, list[RolloutKey]] = {}

    def due(self, group: Group, version: int) -> bool:
        """Whether the group is held back from a batch trained from `version`."""
        return self.on and any(self._is_due(group, member, version) for member in group.finished)

    def send(self, groups: Iterable[Group], version: int) -> list[tuple[str, Group, int]]:
        """(worker, group, member) of those that can be asked now."""
        return [
            (group.workers[member], group, member)
            for group in groups
            for member in sorted(group.finished)
            if self._is_due(group, member, version)
            and version - self._versions[group.workers[member]].number <= self._after
            and self._pays(group, member, version)
        ]

    def _pays(self, group: Group, member: int, version: int) -> bool:
        """Its group waits for nobody else, or it is old enough to be checked before they are back."""
        if not (group.being_checked or group.in_flight):
            return True
        summary = group.finished[member].summary
        return self._is_old(summary, version, self._after * 2**summary.round)

    def _is_due(self, group: Group, member: int, version: int) -> bool:
        summary = group.finished[member].summary
        return summary.round < self._rounds and group.workers[member] in self._versions and self._is_old(summary, version, self._after)

    def _is_old(self, summary: TrajectorySummary, version: int, after: int) -> bool:
        return any((count.key or (self._all and count.unmarked)) and version - count.version.number > after for count in summary.versions)

    def worker_is(self, worker: str, version: PolicyVersion) -> bool:
        """Its weights in use; True when they are newer than known."""
        if self._versions.get(worker) == version:
            return False
        self._versions[worker] = version
        return True

    def worker_lost(self, worker: str) -> None:
        """Nothing that it delivered can be verified; a successor of its name kept none of it."""
        self._versions.pop(worker, None)
        self._forgotten.pop(worker, None)

    def left(self, worker: str, key: RolloutKey) -> None:
        """A member left the pool: its worker may forget it."""
        if self.on and worker in self._versions:
            self._forgotten.setdefault(worker, []).append(key)

    def take_forgotten(self) -> dict[str, list[RolloutKey]]:
        """Since the last call."""
        forgotten, self._forgotten = self._forgotten, {}
        return forgotten
