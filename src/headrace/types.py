"""Records that cross roles, and the words of the project as types. Standard library only.

The data goes forward once: Task -> RolloutRequest -> (SampleRequest <-> Completion, per step) -> Trajectory -> Selection ->
UpdateResult. Tokens stay plain integers until learner/batch turns them into tensors.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class PolicyVersion(NamedTuple):
    """Names one set of weights. Compares by lineage first: a later lineage is newer whatever its number."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return str(self.number) if self.lineage == 0 else f"{self.lineage}:{self.number}"


class RolloutKey(NamedTuple):
    """Identity of one attempt at one member of a group."""

    group_id: int
    member: int
    attempt: int


class EndReason(StrEnum):
    """Why a rollout ended. A failure is data: FAILURES leave the group and its baseline, the others are trained."""

    DONE = "done"  # the environment said so, or a one-step task got its answer
    MAX_STEPS = "max_steps"
    MAX_TOKENS = "max_tokens"  # the trajectory's token limit or the model's context
    MAX_SECONDS = "max_seconds"
    ENVIRONMENT_ERROR = "environment_error"
    REWARD_ERROR = "reward_error"
    MARK_ERROR = "mark_error"  # the recipe's marks.function failed: what is key is not known
    PROMPT_TOO_LONG = "prompt_too_long"
    SAMPLER_ERROR = "sampler_error"
    WORKER_LOST = "worker_lost"
    CANCELLED = "cancelled"  # the run ended first


FAILURES = frozenset(
    {
        EndReason.ENVIRONMENT_ERROR,
        EndReason.REWARD_ERROR,
        EndReason.MARK_ERROR,
        EndReason.PROMPT_TOO_LONG,
        EndReason.SAMPLER_ERROR,
        EndReason.WORKER_LOST,
        EndReason.CANCELLED,
    }
)


class StopReason(StrEnum):
    """Why the sampler ended one action."""

    STOP = "stop"  # a stop token or stop string; stop tokens are part of the action and have a log-probability
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"  # the slot's context window is full


class RetireReason(StrEnum):
    """How one member leaves the pool. Every reservation ends in exactly one retirement (I5)."""

    TRAINED = "trained"  # some of its tokens had weight in an update
    SKIPPED = "skipped"  # selected, but none of its tokens had weight (the reason is with the tokens)
    EXPIRED = "expired"  # its group was dropped for staleness
    FILTERED = "filtered"  # its group carried no signal
    FAILED = "failed"
    VOID = "void"  # sampled by weights that a restore has undone


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem with what grades it."""

    id: str
    """Unique within a task source."""
    data: Mapping[str, Any]
    """What the recipe's environment or reward reads; JSON values only. One-step tasks need the key `prompt` (a text) or `messages` (a chat)."""
    kind: str = "default"
    """Label under which statistics are kept apart (long and short, easy and hard)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment shows; it becomes tokens at one place only, rollout/render."""

    text: str = ""
    """Appended to the context before the next action is sampled."""
    key: float = 0.0
    """Mark of the *action that answers it*: 0 is unmarked, > 0 is a key step of that weight. True counts as 1."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Instead of `text`: {role, content} each, new ones only, rendered by the tokenizer's chat template. A rollout speaks in one of the two ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy answered, as the environment sees it."""

    text: str
    """Decoded tokens, without the stop string or special tokens."""
    tokens: tuple[int, ...]
    """Exactly the sampled tokens, a stop token included."""
    stop_reason: StopReason


class Outcome(NamedTuple):
    """What Environment.step returns; a plain tuple (observation, reward, done) works as well."""

    observation: Observation | None
    """The next observation; None only when done."""
    reward: float
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, end) of a trajectory (or of a completion) were drawn by one policy version."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How actions are drawn. Temperature is part of the distribution on both sides (DESIGN section 4)."""

    temperature: float = 1.0
    """0 is greedy (evaluation only: its log-probability is that of the temperature-1 distribution)."""
    max_action_tokens: int = 1
    """Tokens, limit of one action."""
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_k: int = 0
    """0 is off; evaluation only."""
    top_p: float = 1.0
    """1 is off; evaluation only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Work for a rollout worker: one member of one group."""

    key: RolloutKey
    task: Task
    seed: int
    """The run's seed; the random stream of each action is keyed by (seed, group_id, member, attempt, step)."""
    sampling: SamplingParameters
    evaluation: bool = False
    """True: never enters the pool; the ledger keeps it apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One action to draw. `tokens` extends the context of the same `key`'s previous request, which a KV cache may still hold."""

    key: RolloutKey
    step: int
    seed: int
    tokens: Sequence[int]
    """[context] the whole context; the prompt of step 0 or everything up to and including the newest observation."""
    sampling: SamplingParameters
    drawn_tokens: int = 0
    """How many of the last `tokens` belong to this action already (a verified rollout goes on in the middle of an action). They count
    against `sampling.max_action_tokens` and for stop strings; the completion holds only what comes after them."""
    round: int = 0
    """Verifications of the rollout so far; part of the random stream's name when > 0."""
    keep_distribution: bool = False
    """True: the sampler keeps the distribution each token was drawn from until `forget`, so that it can be verified."""
    keep_cache: bool = False
    """True when another step may follow: the sampler keeps the KV cache within its memory budget until `release`."""
    key_weight: float = 0.0
    """Mark of this action, for samplers that take up weights at key steps."""
    evaluation: bool = False
    """True: its tokens do not count in Sampler.generated_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One drawn action."""

    tokens: tuple[int, ...]
    """[action]"""
    logprobs: tuple[float, ...]
    """[action] natural log, <= 0, under the distribution really drawn from."""
    version_spans: tuple[VersionSpan, ...]
    """Tile [0, action) in order, versions never falling (I2)."""
    stop_reason: StopReason
    discarded_tokens: int = 0
    """Tokens drawn and thrown away by `abort` updates before this action; they count as failed.aborted."""
    entropies: tuple[float, ...] | None = None
    """[action] nats, of the distributions drawn from; None unless the sampler was told to measure them."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(f"completion has {len(self.tokens)} tokens but {len(self.logprobs)} log-probabilities")
        check_spans(self.version_spans, 0, len(self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """A finished rollout to check under the weights in use (DESIGN section 6)."""

    key: RolloutKey
    round: int
    """1 for the first verification; part of the random streams' names."""
    seed: int
    tokens: Sequence[int]
    """[T] of the trajectory."""
    checked: Sequence[tuple[int, int, int]]
    """(step, start, end) of the actions to check, in order; indices into `tokens`."""
    context_starts: Sequence[int] = ()
    """[checked] where in `tokens` the context of each action begins (rollout.context = observation); empty: all at 0."""
    sampling: SamplingParameters
    lenience: float = 1.0
    random_cuts: bool = False
    """A control: what would be rejected anywhere is cut at a random checked token (pool.verify_rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What one forward under the newest weights said."""

    version: PolicyVersion
    """The weights that checked."""
    accepted: tuple[VersionSpan, ...]
    """Token spans of the trajectory that stand, all of `version`; in order, up to the first rejection."""
    logprobs: tuple[float, ...]
    """[accepted tokens] under `version`."""
    rejected: int | None = None
    """Index of the first rejected token; None: every checked token stands."""
    redrawn_token: int = -1
    """What stands in its place, drawn from the normalised max(0, new - old)."""
    redrawn_logprob: float = 0.0
    """Under `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One observation and the action sampled for it, inside a trajectory. Indices are into Trajectory.tokens."""

    action_start: int
    """The observation ends here."""
    action_end: int
    version_spans: tuple[VersionSpan, ...]
    """Tile [action_start, action_end)."""
    key_weight: float
    """0 unmarked."""
    reward: float
    stop_reason: StopReason
    wait_seconds: float = 0.0
    """How long the environment took to answer this action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout. What the sampler saw is exactly `tokens`; nothing is tokenised again (I4)."""

    key: RolloutKey
    task_id: str
    task_kind: str
    tokens: tuple[int, ...]
    """[T] prompt, actions and observations in the order in which the sampler saw them."""
    sampler_logprobs: tuple[float, ...]
    """[num_action_tokens] in order of the action tokens."""
    steps: tuple[StepRecord, ...]
    reward: float
    end_reason: EndReason
    error: str | None = None
    """What happened, when end_reason is a failure."""
    started_seconds: float = 0.0
    """Clock of the worker."""
    finished_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Total time in the environment."""
    discarded_tokens: int = 0
    """Sampled and thrown away by `abort` updates since the rollout began, in all rounds; not in `tokens`."""
    temperature: float = 1.0
    """Both sides divide logits by it."""
    verified_spans: tuple[VersionSpan, ...] = ()
    """Side table: action tokens that newer weights accepted, with those weights' version; ascending, disjoint. Staleness and ratio
    use it; `steps` keep the version that drew each token."""
    verified_logprobs: tuple[float, ...] = ()
    """[tokens of verified_spans] in order."""
    round: int = 0
    """Verifications so far."""
    refreshed_tokens: int = 0
    """Tokens cut off by the last verification; they were delivered before and are replaced: skipped.refreshed."""
    refreshed_key_steps: int = 0
    """Key steps of which the last verification cut any token off; also those that go on from the redrawn token, which are offered anew."""
    refresh_seconds: float = 0.0
    """From the last verification's rejection until the rollout had ended again; 0 where nothing was rejected."""

    def __post_init__(self) -> None:
        total, previous = 0, 0
        for index, step in enumerate(self.steps):
            if not previous <= step.action_start <= step.action_end <= len(self.tokens):
                raise ValueError(f"step {index} of {self.key} spans [{step.action_start}, {step.action_end}) of {len(self.tokens)} tokens")
            check_spans(step.version_spans, step.action_start, step.action_end)
            total += step.action_end - step.action_start
            previous = step.action_end
        if total != len(self.sampler_logprobs):
            raise ValueError(f"{self.key}: {total} action tokens but {len(self.sampler_logprobs)} log-probabilities")
        if not all(math.isfinite(value) and value <= 0.0 for value in (*self.sampler_logprobs, *self.verified_logprobs)):
            raise ValueError(f"{self.key}: a log-probability is not finite or above 0")
        if sum(span.end - span.start for span in self.verified_spans) != len(self.verified_logprobs):
            raise ValueError(f"{self.key}: {len(self.verified_logprobs)} verified log-probabilities for the spans {self.verified_spans}")

    @property
    def num_action_tokens(self) -> int:
        return len(self.sampler_logprobs)

    @property
    def failed(self) -> bool:
        return self.end_reason in FAILURES

    def to_bytes(self) -> bytes:
        """Data, not code: a length-prefixed JSON header, then tokens (int32) and log-probabilities (float32), little-endian."""
        header = {
            "key": list(self.key),
            "task_id": self.task_id,
            "task_kind": self.task_kind,
            "steps": [
                [s.action_start, s.action_end, [[*v.version, v.start, v.end] for v in s.version_spans], s.key_weight, s.reward, s.stop_reason, s.wait_seconds]
                for s in self.steps
            ],
            "reward": self.reward,
            "end_reason": self.end_reason,
            "error": self.error,
            "times": [self.started_seconds, self.finished_seconds, self.wait_seconds],
            "discarded_tokens": self.discarded_tokens,
            "temperature": self.temperature,
            "verified": [[*v.version, v.start, v.end] for v in self.verified_spans],
            "refresh": [self.round, self.refreshed_tokens, self.refreshed_key_steps, self.refresh_seconds],
            "counts": [len(self.tokens), len(self.sampler_logprobs), len(self.verified_logprobs)],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        logprobs = array("f", self.sampler_logprobs + self.verified_logprobs)
        return struct.pack("<I", len(text)) + text + array("i", self.tokens).tobytes() + logprobs.tobytes()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Trajectory:
        (size,) = struct.unpack_from("<I", payload)
        header = json.loads(payload[4 : 4 + size])
        num_tokens, num_logprobs, num_verified = header["counts"]
        tokens, logprobs = array("i"), array("f")
        tokens.frombytes(payload[4 + size : 4 + size + 4 * num_tokens])
        logprobs.frombytes(payload[4 + size + 4 * num_tokens :])
        if len(logprobs) != num_logprobs + num_verified:
            raise ValueError(f"trajectory payload holds {len(logprobs)} log-probabilities, its header says {num_logprobs} + {num_verified}")
        steps = tuple(
            StepRecord(
                action_start=start,
                action_end=end,
                version_spans=tuple(VersionSpan(version=PolicyVersion(a, b), start=c, end=d) for a, b, c, d in spans),
                key_weight=key_weight,
                reward=reward,
                stop_reason=StopReason(stop),
                wait_seconds=wait,
            )
            for start, end, spans, key_weight, reward, stop, wait in header["steps"]
        )
        started, finished, wait = header["times"]
        verification_round, refreshed_tokens, refreshed_key_steps, *refresh_seconds = header["refresh"]  # the last one is not in older checkpoints
        return cls(
            key=RolloutKey(*header["key"]),
            task_id=header["task_id"],
            task_kind=header["task_kind"],
            tokens=tuple(tokens),
            sampler_logprobs=tuple(logprobs[:num_logprobs]),
            steps=steps,
            reward=header["reward"],
            end_reason=EndReason(header["end_reason"]),
            error=header["error"],
            started_seconds=started,
            finished_seconds=finished,
            wait_seconds=wait,
            discarded_tokens=header["discarded_tokens"],
            temperature=header["temperature"],
            verified_spans=tuple(VersionSpan(version=PolicyVersion(a, b), start=c, end=d) for a, b, c, d in header["verified"]),
            verified_logprobs=tuple(logprobs[num_logprobs:]),
            round=verification_round,
            refreshed_tokens=refreshed_tokens,
            refreshed_key_steps=refreshed_key_steps,
            refresh_seconds=refresh_seconds[0] if refresh_seconds else 0.0,
        )

    def effective_spans(self, step: StepRecord) -> list[VersionSpan]:
        """Tile the action with the versions that staleness counts from: the verifying one where a token was verified."""
        verified = [span for span in self.verified_spans if span.end > step.action_start and span.start < step.action_end]
        if not verified:
            return list(step.version_spans)
        result: list[VersionSpan] = []
        for span in step.version_spans:
            position = span.start
            for newer in verified:
                start, end = max(newer.start, position), min(newer.end, span.end)
                if start >= end:
                    continue
                if start > position:
                    result.append(VersionSpan(version=span.version, start=position, end=start))
                result.append(VersionSpan(version=newer.version, start=start, end=end))
                position = end
            if position < span.end:
                result.append(VersionSpan(version=span.version, start=position, end=span.end))
        return result

    def summary(self) -> TrajectorySummary:
        counts: dict[PolicyVersion, list[int]] = {}
        for step in self.steps:
            for span in self.effective_spans(step):
                counts.setdefault(span.version, [0, 0])[1 if step.key_weight > 0 else 0] += span.end - span.start
        return TrajectorySummary(
            key=self.key,
            task_id=self.task_id,
            task_kind=self.task_kind,
            reward=self.reward,
            end_reason=self.end_reason,
            error=self.error,
            num_tokens=len(self.tokens),
            num_action_tokens=self.num_action_tokens,
            num_steps=len(self.steps),
            num_key_steps=sum(step.key_weight > 0 for step in self.steps),
            discarded_tokens=self.discarded_tokens,
            versions=tuple(VersionCount(version=v, unmarked=c[0], key=c[1]) for v, c in sorted(counts.items())),
            seconds=self.finished_seconds - self.started_seconds,
            wait_seconds=self.wait_seconds,
            round=self.round,
            refreshed_tokens=self.refreshed_tokens,
            refreshed_key_steps=self.refreshed_key_steps,
            refresh_seconds=self.refresh_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCount:
    """Action tokens of one trajectory drawn by one version."""

    version: PolicyVersion
    unmarked: int
    key: int
    """Tokens of key steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What the pool, the conductor and the event log know of a trajectory; its payload stays opaque bytes."""

    key: RolloutKey
    task_id: str
    task_kind: str
    reward: float
    end_reason: EndReason
    error: str | None
    num_tokens: int
    num_action_tokens: int
    num_steps: int
    num_key_steps: int
    discarded_tokens: int
    versions: tuple[VersionCount, ...]
    """Ascending; a verified token counts for the version that verified it."""
    seconds: float
    wait_seconds: float
    round: int = 0
    """Verifications so far."""
    refreshed_tokens: int = 0
    """Delivered before, cut off by the last verification and replaced."""
    refreshed_key_steps: int = 0
    """See Trajectory.refreshed_key_steps."""
    refresh_seconds: float = 0.0
    """See Trajectory.refresh_seconds."""

    @property
    def failed(self) -> bool:
        return self.end_reason in FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRollout:
    """A finished trajectory on its way to the pool."""

    summary: TrajectorySummary
    payload: bytes
    """Trajectory.to_bytes()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """Decode work of one worker since its last report, aggregated (DESIGN section 2, CONTRACTS events)."""

    seconds: float
    """Allocated wall time covered."""
    busy_seconds: float
    """In the model's work: forward, logits, drawing tokens, log-probabilities, verification. Without the Python around it."""
    running_seconds: Mapping[int, float]
    """Running sequences -> busy seconds of decode at that batch."""
    idle_seconds: Mapping[str, float]
    """By reason: `bookkeeping`, `rollouts`, `environment`, `admission`, `weights`, `gather`; with busy_seconds they sum to `seconds`."""
    decode_steps: int
    prefill_tokens: int
    sampled_tokens: int
    apply_seconds: float
    """Part of idle_seconds["weights"]: taking up new weights."""
    applied_updates: int
    apply_delay_seconds: float = 0.0
    """Sum over the applied updates: how long each waited for a key step or for rollouts in flight (sampler.apply)."""
    drained_slot_seconds: float = 0.0
    """Decode slots x seconds that stayed empty while somebody waited for one, because new weights had to come first (update_mode, apply)."""
    verify_seconds: float = 0.0
    """Part of busy_seconds: verifying rollouts."""
    verify_tokens: int = 0
    """Computed for it."""
    num_parked: int = 0
    """Times that a long rollout gave its decode slot to short work in the middle of an action."""
    num_unkept: int = 0
    """Rollouts whose distributions did not fit or were given up: they cannot be verified."""
    decode_work: Sequence[tuple[int, int, int, int, float]] = ()
    """Steps alike in running batch and context, as sums: (steps, sequences, tokens computed, context tokens read, seconds of the whole steps)."""
    recomputed_tokens: int = 0
    """Whose keys and values had been computed for the same rollout before: for want of memory, or because weights came (sampler.recompute_kv, update_mode)."""
    evicted_tokens: int = 0
    """Part of recomputed_tokens: for want of memory (sampler.kv_memory_bytes)."""
    kv_slots: int = 0
    """Sequences that sampler.kv_memory_bytes holds; 0: not known."""
    step_seconds: float = 0.0
    """Of whole steps: busy_seconds and the bookkeeping around the model's work."""
    gap_seconds: float = 0.0
    """Between two steps while somebody could be served: gathering a fuller batch, handing out answers, the rollouts' Python."""
    environment_seconds: float = 0.0
    """While nobody could be, as all rollouts in flight were with their environments; their Python included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One message of a rollout worker. Counters are cumulative since the worker started, so that a lost report loses nothing."""

    worker: str
    version: PolicyVersion
    """Weights in use: an acknowledgement of every update up to it."""
    finished: tuple[FinishedRollout, ...]
    room: int
    """Rollouts it would start now."""
    in_flight: int
    generated_tokens: int
    """Cumulative action tokens drawn for training rollouts, discarded ones included."""
    longest_wait: str | None
    """Text for people: the oldest rollout, what it waits for and how long."""
    activity: WorkerActivity | None
    parked: tuple[RolloutKey, ...] = ()
    """Long rollouts that wait for short work to leave them a slot (DESIGN section 7)."""
    rejected: tuple[RolloutKey, ...] = ()
    """Rollouts whose verification rejected a token since the last report: they are sampled again from there."""


def check_spans(spans: Sequence[VersionSpan], start: int, end: int) -> None:
    """I2: spans tile [start, end) in order and their versions never fall. Raises ValueError."""
    position = start
    for index, span in enumerate(spans):
        if span.start != position or span.end <= span.start:
            raise ValueError(f"version span {index} is [{span.start}, {span.end}), expected to start at {position}")
        if index and span.version < spans[index - 1].version:
            raise ValueError(f"version falls from {spans[index - 1].version} to {span.version} inside one action")
        position = span.end
    if position != end:
        raise ValueError(f"version spans end at {position}, the action at {end}")
