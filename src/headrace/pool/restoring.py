"""The pool's state at a checkpoint, and the pool of a run that goes on from one (DESIGN section 9, I12). Pure bookkeeping.

pool_state    what the pool and its ledger hold, as JSON values; payloads stay in the journal
restore_pool  that state, everything that was written down since played again, and then what going back to the checkpoint undoes:

* what was taken, trained or dropped since is in the pool again;
* a trajectory that holds a token above the checkpoint's version is void;
* a rollout in flight is lost, with its worker's remainder of drawn tokens (failed.worker_lost);
* a group of which something is left has its void and lost members rolled out again (attempt + 1, whatever rollout.max_attempts says).
  All of these were within the admission at the checkpoint, so they start at once;
* a group of which nothing is left goes, and its task is offered again before any new one, through the admission.

Where the run had been restored before, the same cut is played, so any number of crashes may lie between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace.clock import now
from headrace.errors import CheckpointError, InvariantError
from headrace.pool.group import Group, lost_rollout
from headrace.pool.journal import (
    Consumed,
    Delivered,
    Record,
    Reported,
    Reserved,
    Restored,
    SentBack,
    SourcePlace,
    WorkerLost,
    summary_from_json,
    summary_to_json,
)
from headrace.types import FinishedRollout, PolicyVersion, RetireReason, RolloutKey, Task, TrajectorySummary

if TYPE_CHECKING:
    from headrace.pool.pool import ExperiencePool

SCHEMA = 1

Held = Mapping[tuple[RolloutKey, int], bytes]
"""(key, round) -> payload of a delivered rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredPool:
    """What a restore did, and what the pool does not hold itself."""

    position: int
    """Of the task source."""
    again: tuple[Task, ...]
    """Tasks of groups that are undone, to be offered before any other."""
    in_flight: tuple[tuple[Task, tuple[RolloutKey, ...]], ...]
    """By group; to be rolled out at once."""
    pooled: tuple[FinishedRollout, ...]
    num_void: int
    """Trajectories undone."""
    num_lost: int
    """Rollouts that were in flight."""


def pool_state(pool: ExperiencePool, again: Sequence[Task]) -> dict[str, Any]:
    """While no batch is out. `again`: tasks to be offered again that had not been given out at the newest reservation."""
    if pool._taken:
        raise InvariantError("the pool's state was asked for while a batch is out.")
    return {
        "schema": SCHEMA,
        "next_group": pool.members.next_group,
        "next_selection": pool.next_selection,
        "next_completion": pool.members.next_completion,
        "num_delivered": pool.members.num_delivered,
        "position": pool.place.position,
        "again": [asdict(task) for task in again],
        "ledger": pool.ledger.state(),
        "groups": [_group_state(group) for group in pool.members.groups.values()],
    }


def held_rollouts(state: Mapping[str, Any]) -> list[tuple[RolloutKey, int]]:
    """(key, round) of the rollouts whose payload this state needs from the journal."""
    texts = [text for group in state["groups"] for name in ("finished", "verifying") for text in group[name]]
    return [(summary.key, summary.round) for summary in map(summary_from_json, texts)]


def restore_pool(
    pool: ExperiencePool,
    state: Mapping[str, Any],
    held: Held,
    records: Iterable[Record],
    *,
    version: PolicyVersion,
    lineage: int,
    learning_rate_factor: float = 1.0,
) -> RestoredPool:
    """Fills a new pool. `version`: the checkpoint's; `lineage`: of the run from now on; `records`: what was written down since the state was
    taken, in order. Payloads that `held` lacks are lost: their trajectories are void, too. `learning_rate_factor`: written down.

    Raises CheckpointError when the records do not fit the state, LedgerError when they do not add up.
    """
    if state["schema"] != SCHEMA:
        raise CheckpointError(f"the run's state has schema {state['schema']}, this headrace reads {SCHEMA}.")
    restoring = _Restoring(pool, state, held)
    try:
        with _unheard(pool):
            for record in records:
                restoring.play(record)
    except (InvariantError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"the journal does not fit the checkpoint: {error}", remedy="Move pool.sqlite away: the run goes on from the checkpoint without what it held."
        ) from error
    restoring.cut(version)
    if pool.journal is not None:  # last: a crash before it finds the cut not made, and makes it again
        pool.journal.append(Restored(version=version, lineage=lineage, learning_rate_factor=learning_rate_factor))
    pool.observe(learner_version=PolicyVersion(lineage, version.number), sampler_version=PolicyVersion(lineage, version.number))
    pool.ledger.check()
    groups = pool.members.groups.values()
    return RestoredPool(
        position=restoring.position,
        again=tuple(restoring.again),
        in_flight=tuple((group.task, tuple(RolloutKey(group.group_id, *item) for item in group.in_flight.items())) for group in groups if group.in_flight),
        pooled=tuple(finished for group in groups for finished in group.finished.values()),
        num_void=restoring.num_void,
        num_lost=restoring.num_lost,
    )


class _Restoring:
    def __init__(self, pool: ExperiencePool, state: Mapping[str, Any], held: Held) -> None:
        self._pool = pool
        self.position: int = state["position"]
        self.again = deque(Task(**task) for task in state["again"])
        self.num_void = self.num_lost = 0
        self._without_payload: set[RolloutKey] = set()
        members = pool.members
        members.next_group, pool.next_selection = state["next_group"], state["next_selection"]
        members.next_completion, members.num_delivered = state["next_completion"], state["num_delivered"]
        pool.ledger.restore(state["ledger"])
        for each in state["groups"]:
            group = self._group(each, held)
            members.groups[group.group_id] = group
        pool.place = SourcePlace(self.position, len(self.again))

    def play(self, record: Record) -> None:
        """What happened, once more."""
        pool, members = self._pool, self._pool.members
        match record:
            case Reserved():
                members.open(record.group_id, record.task, record.size, sampler_version=0)  # the cut sets it
                pool.place = record.place
                self.position = record.place.position
                while len(self.again) > record.place.num_again:
                    self.again.popleft()
            case Reported():
                pool.ledger.report_generated(record.worker, record.generated_tokens)
            case Delivered():
                pool.ledger.report_generated(record.worker, record.generated_tokens)
                members.add(record.finished, record.worker)
            case SentBack():
                for key in record.keys:
                    group = pool.members.groups[key.group_id]
                    pool.ledger.sent_back(group.send_back(key.member, now()).summary, group.workers[key.member])
            case WorkerLost():
                pool.ledger.report_generated(record.worker, record.generated_tokens)
                members.worker_lost(record.worker, record.keys)
            case Consumed():
                pool.next_selection = max(pool.next_selection, record.selection_id + 1)
            case Restored():
                self.cut(record.version)
            case _:
                pass  # undone, or a mark

    def cut(self, version: PolicyVersion) -> None:
        """Goes back to `version`: see the head of this file."""
        pool, self.num_void, self.num_lost = self._pool, 0, 0
        for group in pool.members.groups.values():
            for member in sorted(group.verifying):  # as it had been delivered
                finished = group.finished[member] = group.back_from_verification(member)
                group.rewards[member] = finished.summary.reward
                pool.ledger.restored(finished.summary, group.workers[member])
        for worker in pool.ledger.workers:
            pool.ledger.worker_lost(worker)
        for group in list(pool.members.groups.values()):
            self._cut_group(group, version)
        self._without_payload.clear()
        pool.place = SourcePlace(self.position, len(self.again))

    def _cut_group(self, group: Group, version: PolicyVersion) -> None:
        void = [group.finished[member].summary for member in sorted(group.finished) if self._is_void(group.finished[member].summary, version)]
        lost = [RolloutKey(group.group_id, member, attempt) for member, attempt in sorted(group.in_flight.items())]
        goes = len(void) == len(group.finished) and not group.released
        self.num_void, self.num_lost = self.num_void + len(void), self.num_lost + len(lost)
        for summary in void:
            self._void(group, summary, for_good=goes)
        for key in lost:
            self._pool.ledger.rollout_lost(lost_rollout(key, group.task).summary)
        group.in_flight.clear()
        group.issued_seconds.clear()
        if goes:
            self._undo(group, void, lost)
            return
        for key in (*(summary.key for summary in void), *lost):
            group.in_flight[key.member] = key.attempt + 1
            group.issued_seconds[key.member] = now()
            group.losses[key.member] = group.losses.get(key.member, 0) + 1
            self._pool.ledger.retried()
        group.workers = dict.fromkeys(group.workers, "")
        group.sampler_version = version.number
        group.signal = (not group.in_flight or group.quorum < group.size) and self._pool.members.has_signal(group)
        group.refresh()

    def _is_void(self, summary: TrajectorySummary, version: PolicyVersion) -> bool:
        return summary.key in self._without_payload or any(count.version > version for count in summary.versions)

    def _void(self, group: Group, summary: TrajectorySummary, *, for_good: bool) -> None:
        member = summary.key.member
        self._pool.ledger.void(summary, group.key_steps(member, summary), for_good=for_good)
        del group.finished[member], group.rewards[member]
        group.marked.discard(member)

    def _undo(self, group: Group, void: Sequence[TrajectorySummary], lost: Sequence[RolloutKey]) -> None:
        """Nothing of it is left."""
        pool = self._pool
        for summary in void:
            pool.members.note(summary.key, summary.task_kind, RetireReason.VOID)
        for key in lost:
            pool.ledger.member_failed(group.task.kind)
            pool.members.note(key, group.task.kind, RetireReason.FAILED)
        del pool.members.groups[group.group_id]
        pool.ledger.group_retired(*((RetireReason.VOID, "") if void else (RetireReason.FAILED, "worker_lost")))
        self.again.append(group.task)

    def _group(self, state: Mapping[str, Any], held: Held) -> Group:
        finished, verifying = ({one.summary.key.member: one for one in self._held(state[name], held)} for name in ("finished", "verifying"))
        in_flight = dict(state["in_flight"])
        group = Group(
            group_id=state["group_id"],
            task=Task(**state["task"]),
            size=state["size"],
            quorum=state["quorum"],
            sampler_version=state["sampler_version"],
            in_flight=in_flight,
            issued_seconds=dict.fromkeys((*in_flight, *verifying), now()),
            finished=finished,
            verifying=verifying,
            lost=state["lost"],
            losses=dict(state["losses"]),
            workers=dict(state["workers"]),
            rewards=dict(state["rewards"]),
            marked=set(state["marked"]),
            signal=state["signal"],
            released=state["released"],
            reasons={RetireReason(reason): detail for reason, detail in state["reasons"]},
            completion=state["completion"],
        )
        group.refresh()
        return group

    def _held(self, texts: Iterable[str], held: Held) -> Iterator[FinishedRollout]:
        for summary in map(summary_from_json, texts):
            payload = held.get((summary.key, summary.round))
            if payload is None:
                self._without_payload.add(summary.key)
            yield FinishedRollout(summary=summary, payload=payload or b"")


def _group_state(group: Group) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task": asdict(group.task),
        "size": group.size,
        "quorum": group.quorum,
        "sampler_version": group.sampler_version,
        "in_flight": list(group.in_flight.items()),
        "finished": [summary_to_json(one.summary) for one in group.finished.values()],
        "verifying": [summary_to_json(one.summary) for one in group.verifying.values()],
        "lost": group.lost,
        "losses": list(group.losses.items()),
        "workers": list(group.workers.items()),
        "rewards": list(group.rewards.items()),
        "marked": sorted(group.marked),
        "signal": group.signal,
        "released": group.released,
        "reasons": [(str(reason), detail) for reason, detail in group.reasons.items()],
        "completion": group.completion,
    }


@contextmanager
def _unheard(pool: ExperiencePool) -> Iterator[None]:
    """What is played again was told before."""
    journal, on_retire = pool.journal, pool.members.on_retire
    pool.journal, pool.members.on_retire = None, lambda _: None
    try:
        yield
    finally:
        pool.journal, pool.members.on_retire = journal, on_retire
