"""The architecture in one file: who does what, as protocols. Siblings of layer 2 meet here and in types, never directly.

    TaskSource -> RolloutWorker (Sampler <-> Environment, per step) -> ExperiencePool -> Learner -> WeightWriter -> WeightReader
                                            ^------------------- Conductor moves all of it -------------------^

A protocol exists only where two implementations do: local processes, in-process hosting for tests, Ray, the simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headrace.types import (
    Action,
    Completion,
    FinishedRollout,
    Observation,
    Outcome,
    PolicyVersion,
    RetireReason,
    RolloutKey,
    RolloutRequest,
    SampleRequest,
    Task,
    VerifyRequest,
    VerifyResult,
    WorkerActivity,
    WorkerReport,
)
from headrace.updates import Selection, UpdateResult, WeightUpdate


class TaskSource(Protocol):
    """Tasks in a seeded order, epoch after epoch."""

    position: int
    """Tasks handed out so far; setting it resumes there."""

    def next(self) -> Task:
        """Raises StopIteration only when a limited number of epochs is used up."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Single-use, async. A failure raised here becomes an end reason, never a crash."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: Action) -> Outcome | tuple[Observation | None, float, bool]: ...


@runtime_checkable
class SnapshotEnvironment(Environment, Protocol):
    """An environment that can go back, so that a verified rollout can go on from the middle (DESIGN section 6)."""

    def snapshot(self) -> Any:
        """The state as it is now, between two steps; called right after reset and after each step. Must not change later."""
        ...

    def restore(self, snapshot: Any) -> None: ...


class ReplayableEnvironment(Environment, Protocol):
    """Without snapshots: one whose answers follow from the task and the actions alone is replayed from `reset`."""

    replayable: bool
    """True promises that."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that headrace uses."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class Sampler(Protocol):
    """Continuous batching: many `sample` calls run at once, one decode step serves them all.

    Takes up published weights between two decode steps by itself.
    """

    max_running: int
    """Decode slots."""
    most_long: int
    """Of them, what long rollouts may hold while short work waits."""
    max_context_tokens: int

    @property
    def version(self) -> PolicyVersion:
        """Weights in use."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that hold or wait for a decode slot."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Cumulative, evaluation left out; discarded tokens included."""
        ...

    async def sample(self, request: SampleRequest) -> Completion:
        """Raises PromptTooLongError-like HeadraceError for one request only; others go on (case 14)."""
        ...

    def release(self, key: RolloutKey) -> int:
        """The rollout takes no further step: its KV cache is free. Unknown keys are ignored.

        Returns the tokens drawn for it that no completion delivered, because its `sample` call was cancelled or failed (0
        otherwise): they are in `generated_tokens`, so somebody has to account for them (I7).
        """
        ...

    async def applied(self, version: PolicyVersion) -> None:
        """Returns as soon as weights of at least `version` are in use."""
        ...

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        """Accepts each checked token in order with probability min(1, lenience x new / old), old being the distribution it was drawn
        from; redraws the first rejected one. A batched prefill beside the decode steps. Raises HeadraceError for this request only."""
        ...

    def can_verify(self, key: RolloutKey) -> bool:
        """Whether every distribution asked for with `keep_distribution` was kept (memory is limited)."""
        ...

    def forget(self, key: RolloutKey) -> None:
        """The rollout is never verified again: its distributions are free. Unknown keys are ignored."""
        ...

    @property
    def long_rollouts(self) -> frozenset[RolloutKey]:
        """Those that are long by now (DESIGN section 7). They leave slots beyond `most_long` to short work at once, so it may be started."""
        ...

    @property
    def parked(self) -> tuple[RolloutKey, ...]:
        """Long rollouts whose action waits so that short work can run."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token given those before it, temperature 1, under the weights in use; [len - 1] each."""
        ...

    def wake(self) -> None:
        """New weights were announced: take them up even when nothing is running."""
        ...

    def hold_weights(self, held: bool) -> None:
        """True pins the weights in use (evaluation) until False."""
        ...

    def take_activity(self) -> WorkerActivity:
        """Decode work since the last call."""
        ...

    async def run(self, waiting_for: WaitingFor) -> None:
        """Steps the engine until cancelled. `waiting_for()` names why there is nothing to run: `environment` or `admission`."""
        ...


class WaitingFor(Protocol):
    def __call__(self) -> str: ...


class RolloutWorker(Protocol):
    """A sampler and the rollouts it serves. In the local runtime a process, in tests an object in the same loop."""

    name: str

    async def start(self, requests: Sequence[RolloutRequest]) -> None:
        """Begin these rollouts. Returns at once."""
        ...

    async def next_report(self) -> WorkerReport:
        """Waits for the next message: finished rollouts, more room, an acknowledgement or a heartbeat."""
        ...

    async def announce(self, update: WeightUpdate) -> None:
        """New weights are published. Returns at once; the worker's reports acknowledge."""
        ...

    async def verify(self, keys: Sequence[RolloutKey]) -> None:
        """Check these finished rollouts under the newest weights; each is reported as finished again, with its round raised. Returns at once."""
        ...

    async def forget(self, keys: Sequence[RolloutKey]) -> None:
        """These left the pool: what was kept to verify them is free."""
        ...

    async def cancel(self, keys: Sequence[RolloutKey]) -> None:
        """End these rollouts as CANCELLED; they are reported as finished."""
        ...

    async def stop(self) -> None: ...


class ScorePolicy(Protocol):
    """What a recipe's `evaluate` function gets: one pinned policy version."""

    version: PolicyVersion
    tokenizer: Tokenizer

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See Sampler.score."""
        ...


class Evaluator(Protocol):
    """Holds its own copy of the weights of one version; never disturbs the rollouts (case 17)."""

    async def evaluate(self, version: PolicyVersion, requests: Sequence[RolloutRequest], tasks: Sequence[Task]) -> EvaluationResult:
        """Pins the newest weights (at least `version`), runs the requests and the recipe's `evaluate(policy, tasks)`."""
        ...


class EvaluationResult(Protocol):
    @property
    def version(self) -> PolicyVersion: ...

    @property
    def finished(self) -> tuple[FinishedRollout, ...]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def intervals95(self) -> Mapping[str, tuple[float, float]]:
        """95 % intervals (low, high) of those metrics that are means."""
        ...


class Learner(Protocol):
    """On one or several ranks; the gradient does not depend on their number (I8)."""

    @property
    def version(self) -> PolicyVersion: ...

    async def learn(self, selection: Selection) -> UpdateResult: ...

    async def publish(self) -> WeightUpdate:
        """Makes the newest weights readable by every sampler. Never waits for a reader."""
        ...

    async def save(self, directory: Path) -> None:
        """A Hugging Face directory plus optimizer state, whole or absent."""
        ...

    async def copy(self) -> int:
        """The same into memory that outlives it (checkpoint.memory_copy); its size in bytes."""
        ...

    async def stop(self) -> None:
        """It is not needed any more: its end is no loss."""
        ...


class WeightReader(Protocol):
    """A sampler's end of the weight channel."""

    def newest_version(self) -> PolicyVersion | None:
        """Cheap (a memory read): called between any two decode steps. None before the first publish."""
        ...

    def load_into(self, parameters: Mapping[str, Any]) -> PolicyVersion:
        """Copies the newest whole set of weights into these tensors, in place, and returns its version.

        The tensors never hold a mixture: data is staged, verified, then copied. Raises WaitTimeoutError when no whole set
        could be read in time.
        """
        ...


class WeightWriter(Protocol):
    """The learner's end of the weight channel."""

    def publish(self, parameters: Mapping[str, Any], version: PolicyVersion) -> WeightUpdate:
        """Versions must rise strictly (I1); ValueError otherwise."""
        ...


class EventSink(Protocol):
    """Where roles and conductor put events; watch and report only read what comes out."""

    def emit(self, event: Any) -> None: ...


class TrajectoryRecorder(Protocol):
    """Keeps what was sampled, for people and notebooks. Returns at once, changes nothing, cannot fail a run."""

    def finished(self, rollout: FinishedRollout) -> None:
        """A worker delivered it; the pool has not seen it yet."""
        ...

    def learned(self, selection: Selection, result: UpdateResult) -> None:
        """The learner is done with a batch whose members retire next."""
        ...

    def retired(self, key: RolloutKey, reason: RetireReason) -> None:
        """A member left the pool."""
        ...
