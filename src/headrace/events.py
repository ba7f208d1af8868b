"""What is written down of a run: typed records, one JSON line each (CONTRACTS, events.jsonl). The file itself: event_log.py.

Every line has `event`, `time` (seconds since line 1) and `role`. Watch, report, profile and progress only read: without them no event changes (I14).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from headrace.types import PolicyVersion, TrajectorySummary, WorkerActivity, WorkerReport
from headrace.updates import Selection, UpdateResult, UpdateStatistics, WeightUpdate

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base: `name` is the line's `event`."""

    name: ClassVar[str] = ""
    role: str = "conductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Line 1."""

    name: ClassVar[str] = "run_started"
    run_id: str
    headrace: str
    runtime: str
    clock: str
    """monotonic | virtual"""
    wall_time: str | None
    mode: str
    placement: str
    seed: int
    lineage: int
    resumed_from_update: int | None
    devices: list[dict[str, Any]]
    """{name, role, capacity}, and of samplers saturated_tokens_per_second, and recording_failure where there is one"""
    schema: int = SCHEMA
    recipe: str = ""
    num_updates: int = 0
    startup_seconds: float = 0.0
    promised: dict[str, Any] | None = None  # what a plan or a profile said of it (planner/promise.py)


class ResumeCause(StrEnum):
    COMMAND = "command"
    LEARNER_LOST = "learner_lost"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(RunStarted):
    """The run goes on from a checkpoint, under a new lineage; `startup_seconds` are those of this start."""

    name: ClassVar[str] = "run_resumed"
    checkpoint: str
    """Empty: none."""
    pooled: int
    """Trajectories that are in the pool again."""
    void: int
    """Trajectories sampled by weights that are undone."""
    lost: int
    """Rollouts that were in flight."""
    again: int
    """Tasks of which nothing is left, to be offered again."""
    passed_over: list[str]
    """Newer checkpoints that are not whole, and why."""
    from_memory: bool = False
    """From the copy of a lost learner's state, without a checkpoint."""
    cause: ResumeCause = ResumeCause.COMMAND
    """Why: `headrace resume`, or within the run."""
    reason: str = ""
    """What made the run go back, for people; empty for the command."""
    undone_updates: int = 0
    """Updates above the checkpoint that the journal knows of."""
    seconds: float = 0.0
    """Since the run stood still; 0 for the command."""
    learning_rate_factor: float = 1.0
    """What rollbacks have multiplied the learning rate by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReserved(Event):
    name: ClassVar[str] = "group_reserved"
    group_id: int
    task_id: str
    task_kind: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFinished(Event):
    """One a trajectory (<= 300 bytes). `role` is the worker."""

    name: ClassVar[str] = "rollout_finished"
    group: int
    member: int
    attempt: int
    kind: str
    reward: float
    end: str
    steps: int
    keys: int
    tokens: int
    """Action tokens."""
    versions: list[int]
    """[oldest, newest] number; empty when no token was drawn."""
    seconds: float
    wait_seconds: float
    total_tokens: int = 0
    """Prompt, actions and observations."""

    @classmethod
    def of(cls, summary: TrajectorySummary, *, role: str) -> RolloutFinished:
        key, numbers = summary.key, [count.version.number for count in summary.versions]
        return cls(
            role=role, group=key.group_id, member=key.member, attempt=key.attempt, kind=summary.task_kind, reward=summary.reward, end=summary.end_reason,
            steps=summary.num_steps, keys=summary.num_key_steps, tokens=summary.num_action_tokens, versions=[numbers[0], numbers[-1]] if numbers else [],
            seconds=summary.seconds, wait_seconds=summary.wait_seconds, total_tokens=summary.num_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVerified(RolloutFinished):
    """A rollout that had finished before came back from a verification: its numbers now. `role` is the worker."""

    name: ClassVar[str] = "rollout_verified"
    round: int = 0
    """Verifications so far."""
    refreshed: int = 0
    """Tokens that were cut off."""
    refreshed_keys: int = 0
    """Key steps cut."""
    refresh_seconds: float = 0.0
    """From the rejection until the rollout had ended again."""

    @classmethod
    def of(cls, summary: TrajectorySummary, *, role: str) -> RolloutVerified:
        base = RolloutFinished.of(summary, role=role)
        numbers = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        return cls(
            **numbers, round=summary.round, refreshed=summary.refreshed_tokens, refreshed_keys=summary.refreshed_key_steps,
            refresh_seconds=summary.refresh_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationAsked(Event):
    """`role` is the worker: it checks so many finished rollouts under its weights before they are trained."""

    name: ClassVar[str] = "verification_asked"
    rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailed(Event):
    """Names the task and the error, beside RolloutFinished."""

    name: ClassVar[str] = "rollout_failed"
    group: int
    member: int
    attempt: int
    task_id: str
    reason: str
    error: str
    retried: bool

    @classmethod
    def of(cls, summary: TrajectorySummary, *, role: str, retried: bool) -> RolloutFailed:
        return cls(
            role=role, group=summary.key.group_id, member=summary.key.member, attempt=summary.key.attempt, task_id=summary.task_id,
            reason=summary.end_reason, error=summary.error or "", retried=retried,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTaken(Event):
    name: ClassVar[str] = "selection_taken"
    selection: int
    learner_version: int
    lineage: int
    trajectories: int
    filtered: int
    wait_seconds: float
    """How long the learner waited for it."""

    @classmethod
    def of(cls, selection: Selection, *, wait_seconds: float) -> SelectionTaken:
        return cls(
            selection=selection.id, learner_version=selection.learner_version.number, lineage=selection.learner_version.lineage,
            trajectories=len(selection.members), filtered=len(selection.filtered), wait_seconds=wait_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Event):
    """One a selection: what the learner did. `role` is the learner."""

    name: ClassVar[str] = "updated"
    selection: int
    version: int
    lineage: int
    reward_mean: float
    """Over the batch, filtered groups included."""
    seconds: float
    busy_seconds: float
    refused: str | None
    statistics: UpdateStatistics | None
    transfer_seconds: float = 0.0
    """Of the batch to the learner and of the result back, outside `seconds`."""
    finished_seconds_ago: float = 0.0
    """Before this line: publishing, and waiting for samplers where that is waited for, lie between."""

    @classmethod
    def of(cls, selection: Selection, result: UpdateResult, *, reward_mean: float, away_seconds: float, finished_seconds_ago: float) -> Updated:
        """`away_seconds`: from sending the batch to getting the result."""
        version = result.version_after
        return cls(
            role="learner", selection=selection.id, version=version.number, lineage=version.lineage, reward_mean=reward_mean, seconds=result.seconds,
            busy_seconds=result.busy_seconds, refused=result.refused, statistics=result.statistics,
            transfer_seconds=max(0.0, away_seconds - result.seconds), finished_seconds_ago=finished_seconds_ago,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished(Event):
    name: ClassVar[str] = "weights_published"
    version: int
    lineage: int
    bytes: int
    seconds: float

    @classmethod
    def of(cls, update: WeightUpdate) -> WeightsPublished:
        return cls(version=update.version.number, lineage=update.version.lineage, bytes=update.num_bytes, seconds=update.publish_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsApplied(Event):
    """`role` is the worker."""

    name: ClassVar[str] = "weights_applied"
    version: int
    lineage: int

    @classmethod
    def of(cls, report: WorkerReport) -> WeightsApplied:
        return cls(role=report.worker, version=report.version.number, lineage=report.version.lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAcknowledged(Event):
    """Every sampler uses these weights; where that is waited for (sync and max_staleness 0)."""

    name: ClassVar[str] = "weights_acknowledged"
    version: int
    lineage: int
    wait_seconds: float
    """How long the learner waited for the last one."""

    @classmethod
    def of(cls, version: PolicyVersion, *, wait_seconds: float) -> WeightsAcknowledged:
        return cls(version=version.number, lineage=version.lineage, wait_seconds=wait_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActive(Event):
    """Aggregated decode work of one worker (about one a second, see clock.periodic_seconds)."""

    name: ClassVar[str] = "worker_active"
    in_flight: int
    activity: WorkerActivity
    longest_wait: str | None = None
    """For people: its oldest rollout, what that waits for and how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLevels(Event):
    """About one a second, see clock.periodic_seconds: what is out, what is pooled, and who waits. The fields of pool.statistics.PoolStatistics."""

    name: ClassVar[str] = "pool"
    max_groups: int
    outstanding_groups: int
    waiting_groups: int
    ready_groups: int
    taken_groups: int
    rollouts_in_flight: int
    pooled_trajectories: int
    pooled_tokens: int
    staleness_mean: float
    staleness_max: int
    delivered_per_second: float
    retired_per_second: float
    waits: list[tuple[str, float]]
    """[who waits for whom, seconds so far], of those that outlast a worker's heartbeat."""

    @classmethod
    def of(cls, statistics: Any, *, waits: Sequence[tuple[str, float]]) -> PoolLevels:
        """`statistics` is a PoolStatistics: layer 1 knows its fields, not its class."""
        lasting = [(name[:_MAX_TEXT], round(seconds, 1)) for name, seconds in waits if seconds >= _LASTING_SECONDS]
        return cls(**{name: getattr(statistics, name) for name in _LEVELS}, waits=lasting[:_MAX_WAITS])


_LEVELS = tuple(field.name for field in dataclasses.fields(PoolLevels) if field.name not in ("role", "waits"))
_LASTING_SECONDS = 1.5
_MAX_WAITS = 4
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced(Event):
    """A judgement of the pace (pool.pace_key_steps): how many groups may be outstanding from now on, and why."""

    name: ClassVar[str] = "paced"
    limit_groups: int
    max_groups: int
    """Without pace."""
    over_share: float
    """Of the key steps judged, those trained over max_key_staleness."""
    reason: str
    wait_seconds: float
    """What pace has cost so far: workers had room and admission without pace too."""

    @classmethod
    def of(cls, paced: Any, *, wait_seconds: float) -> Paced:
        """`paced` is a pool.pacing.Paced."""
        return cls(limit_groups=paced.limit_groups, max_groups=paced.max_groups, over_share=paced.over_share, reason=paced.reason, wait_seconds=wait_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Governed(Event):
    """What the governor did, and why (docs/governor.md)."""

    name: ClassVar[str] = "governed"
    action: str
    """tightened | loosened | refused | held_back | failed"""
    reason: str
    version: int
    lineage: int
    max_staleness: int
    """In effect from now on."""
    effective_sample_size: float | None = None
    """Of the update that decided; None where none was made."""
    kl_sampler_learner: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerClosed(Event):
    name: ClassVar[str] = "ledger"
    ledger: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    name: ClassVar[str] = "evaluated"
    version: int
    lineage: int
    mean: float
    interval95: list[float]
    num_rollouts: int
    """Without the failed ones, which have no reward."""
    metrics: dict[str, float]
    seconds: float
    num_failed: int = 0
    failure: str | None = None
    """Task and error of the first failed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    name: ClassVar[str] = "checkpoint_saved"
    version: int
    lineage: int
    path: str
    seconds: float
    best: str | None = None
    """Directory name of the best one that is there; None while nothing is known of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopied(Event):
    """The learner's state is in memory (checkpoint.memory_copy); it stood still for `seconds`."""

    name: ClassVar[str] = "state_copied"
    version: int
    lineage: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted(Event):
    """Ctrl-C or SIGTERM, where a last checkpoint takes a while; with `failure` when it could not be saved."""

    name: ClassVar[str] = "interrupted"
    limit_seconds: float
    """For a last checkpoint."""
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Who waits for whom, when it lasts."""

    name: ClassVar[str] = "waiting"
    waits: list[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLost(Event):
    """`role` ended, broke down or gave no sign of life in the middle of the run."""

    name: ClassVar[str] = "role_lost"
    error: str
    rollouts: int
    """In flight there: begun again elsewhere."""
    losses: int
    """Within limits.restart_window_seconds, this one included."""
    restarted: bool
    """False: it ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRestarted(Event):
    """`role` works again; a worker under the newest weights."""

    name: ClassVar[str] = "role_restarted"
    seconds: float
    """Since it was found lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWindow(Event):
    """The training window: from the first rollout to the last update."""

    name: ClassVar[str] = "timed_window"
    phase: str
    """start | end"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoriesRecorded(Event):
    """What lies in trajectories/ when the run ends."""

    name: ClassVar[str] = "trajectories_recorded"
    trajectories: int
    files: int
    lost: int
    """Not written: the disk was slower than the run, or full."""
    failure: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    name: ClassVar[str] = "run_finished"
    status: str
    """done | failed | interrupted"""
    error: dict[str, Any] | None
    version: int
    lineage: int
