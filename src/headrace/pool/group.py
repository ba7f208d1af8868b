"""What the pool holds of one group: who is out, who came back, who is with the learner, how old its tokens are."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types import EndReason, FinishedRollout, RetireReason, RolloutKey, Task, TrajectorySummary


@dataclass(slots=True, kw_only=True)
class Group:
    """A view over its members. Every member is in exactly one of `in_flight`, `verifying`, `finished`, `taken`, or has left: retired
    after a batch, or failed for good.

    Batches count *slots*, one an issued member: a member that failed for good fills one in the batch in which its group is served
    next (`lost`), so failures cannot starve the learner.
    """

    group_id: int
    task: Task
    size: int
    """Issued members."""
    quorum: int
    """Good members at which it may be served; `size`: only when nobody is out."""
    sampler_version: int
    """No token of the group is older: the oldest weights in use when it was reserved."""
    in_flight: dict[int, int]
    """Member -> attempt."""
    issued_seconds: dict[int, float]
    """Member -> when the attempt in flight, or the verification, was handed out."""
    finished: dict[int, FinishedRollout] = field(default_factory=dict)
    """Back and not taken."""
    verifying: dict[int, FinishedRollout] = field(default_factory=dict)
    """With their worker again; what it delivered before is kept and stands if the worker is lost."""
    redrawing: set[int] = field(default_factory=set)
    """Of `verifying`: rejected, and sampled again from there, which lasts. The others are served meanwhile; these are late."""
    taken: dict[int, FinishedRollout] = field(default_factory=dict)
    """With the learner."""
    taken_slots: int = 0
    """Of the batches that the learner has."""
    lost: int = 0
    """Failed for good and counted in no batch yet."""
    losses: dict[int, int] = field(default_factory=dict)
    """Member -> attempts that ended with their worker, which is not the task's fault."""
    workers: dict[int, str] = field(default_factory=dict)
    """Member -> the worker that delivered it and can verify it."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Of every good member known, those trained already included; of a member that is verified as it had been delivered."""
    marked: set[int] = field(default_factory=set)
    """Members that are key as a whole (marks.min_advantage)."""
    signal: bool = False
    """The rewards known give some advantage."""
    released: bool = False
    """Some members were served: those still out are late, and served as they come."""
    reasons: dict[RetireReason, str] = field(default_factory=dict)
    """How members retired -> why the first of them was skipped."""
    oldest_unmarked: int | None = None
    """Version of the oldest unmarked token in `finished` and `verifying`; None without one."""
    key_versions: frozenset[int] = frozenset()
    """Of the key tokens in `finished` and `verifying`."""
    completion: int = -1
    """Rank in the order in which groups became ready; -1 before."""

    @property
    def ready(self) -> bool:
        """May be served: somebody is there, nobody is being checked, and nobody is out unless a quorum with signal is there.

        A quorum without signal waits for the others: they may bring it. Nobody waits for members that are redrawn: where the policy has
        just changed its mind many are, and what the others say of it would reach the learner too late.
        """
        return bool(self.finished) and not self.being_checked and self._enough

    @property
    def being_checked(self) -> bool:
        """Some member is verified, and nothing of it has been rejected yet."""
        return len(self.verifying) > len(self.redrawing)

    @property
    def prepared(self) -> bool:
        """Ready, or would be if those that are being verified were back."""
        return bool(self.finished or self.verifying) and self._enough

    @property
    def _enough(self) -> bool:
        return not self.in_flight or self.released or (self.signal and len(self.rewards) >= self.quorum)

    @property
    def waiting(self) -> bool:
        """Some member still has to be served."""
        return bool(self.in_flight or self.verifying or self.finished)

    @property
    def ready_slots(self) -> int:
        """What it fills of a batch as it is."""
        return len(self.finished) + self.lost

    @property
    def waiting_slots(self) -> int:
        """What it will fill of batches to come, at most."""
        return len(self.in_flight) + len(self.verifying) + len(self.finished) + self.lost

    @property
    def oldest_possible(self) -> int | None:
        """Lower bound on the version of every unmarked token that is not taken yet."""
        if not self.in_flight:
            return self.oldest_unmarked
        return self.sampler_version if self.oldest_unmarked is None else min(self.sampler_version, self.oldest_unmarked)

    @property
    def has_key_steps(self) -> bool:
        """Among the members that are there."""
        return bool(self.marked & self.finished.keys()) or any(one.summary.num_key_steps for one in self.finished.values())

    def key_steps(self, member: int, summary: TrajectorySummary) -> int:
        return summary.num_steps if member in self.marked else summary.num_key_steps

    def accept(self, finished: FinishedRollout, worker: str) -> None:
        """A good trajectory came back."""
        member = finished.summary.key.member
        self.finished[member] = finished
        self.workers[member] = worker
        self.rewards[member] = finished.summary.reward
        self._see(member, finished)

    def send_back(self, member: int, time: float) -> FinishedRollout:
        """It is verified: its worker has it again. What its reward marked stays marked, so that no deadline moves forward."""
        finished = self.verifying[member] = self.finished.pop(member)
        self.issued_seconds[member] = time
        return finished

    def back_from_verification(self, member: int) -> FinishedRollout:
        """What it had delivered before."""
        self.redrawing.discard(member)
        return self.verifying.pop(member)

    def take(self, slots: int) -> tuple[int, ...]:
        """At most so many slots go to the learner: finished members in order, then lost ones. Returns the members."""
        members = tuple(sorted(self.finished)[:slots])
        for member in members:
            self.taken[member] = self.finished.pop(member)
        self.lost -= min(self.lost, slots - len(members))
        self.taken_slots += slots
        self.leave()
        return members

    def leave(self) -> None:
        """Some or all of `finished` left: what comes later has a rank of its own."""
        self.released = True
        if not self.finished:
            self.completion = -1
        self.refresh()

    def refresh(self) -> None:
        """Reads the versions anew: a member left, or one is key now."""
        self.oldest_unmarked, self.key_versions = None, frozenset()
        for members in (self.finished, self.verifying):
            for member, finished in members.items():
                self._see(member, finished)

    def _see(self, member: int, finished: FinishedRollout) -> None:
        key = member in self.marked
        for count in finished.summary.versions:
            number = count.version.number
            if count.unmarked and not key and (self.oldest_unmarked is None or number < self.oldest_unmarked):
                self.oldest_unmarked = number
            if (count.key or key) and number not in self.key_versions:
                self.key_versions |= {number}


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
