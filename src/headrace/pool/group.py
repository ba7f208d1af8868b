"""What the pool holds of one group: who is out, who came back, how old its tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types import EndReason, FinishedRollout, RolloutKey, Task, TrajectorySummary


@dataclass(slots=True, kw_only=True)
class Group:
    """A view over its members; every member is in exactly one of `in_flight`, `finished`, or failed for good."""

    group_id: int
    task: Task
    size: int
    """Issued members; the group fills this much of a batch whatever becomes of them."""
    sampler_version: int
    """No token of the group is older: the oldest weights in use when it was reserved."""
    in_flight: dict[int, int]
    """Member -> attempt."""
    issued_seconds: dict[int, float]
    """Member -> when the attempt in flight was handed out."""
    finished: dict[int, FinishedRollout] = field(default_factory=dict)
    oldest_unmarked: int | None = None
    """Version of the oldest unmarked token that came back; None without one."""
    completion: int = -1
    """Rank in the order in which groups became complete; -1 before."""

    @property
    def ready(self) -> bool:
        """Nobody is out and somebody survived."""
        return not self.in_flight and bool(self.finished)

    @property
    def oldest_possible(self) -> int | None:
        """Lower bound on the version of every unmarked token the group holds or may still get."""
        if not self.in_flight:
            return self.oldest_unmarked
        return self.sampler_version if self.oldest_unmarked is None else min(self.sampler_version, self.oldest_unmarked)

    def keys_in_flight(self) -> list[RolloutKey]:
        return [RolloutKey(self.group_id, member, attempt) for member, attempt in self.in_flight.items()]

    def accept(self, finished: FinishedRollout) -> None:
        """A good trajectory came back."""
        unmarked = [count.version.number for count in finished.summary.versions if count.unmarked]
        if unmarked:
            oldest = min(unmarked)
            self.oldest_unmarked = oldest if self.oldest_unmarked is None else min(oldest, self.oldest_unmarked)
        self.finished[finished.summary.key.member] = finished


def lost_rollout(key: RolloutKey, task: Task) -> FinishedRollout:
    """Stands for a rollout that will never be delivered."""
    summary = TrajectorySummary(
        key=key,
        task_id=task.id,
        task_kind=task.kind,
        reward=0.0,
        end_reason=EndReason.WORKER_LOST,
        error="its worker was lost",
        num_tokens=0,
        num_action_tokens=0,
        num_steps=0,
        num_key_steps=0,
        discarded_tokens=0,
        versions=(),
        seconds=0.0,
        wait_seconds=0.0,
    )
    return FinishedRollout(summary=summary, payload=b"")
