"""Records of learning: a batch on its way to the learner, what became of it, and the weights that come out. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.types import PolicyVersion, RolloutKey, TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedMember:
    summary: TrajectorySummary
    payload: bytes
    marked: bool = False
    """The whole member is key, each of its steps (marks.min_advantage); decided when its group was complete."""

    @property
    def num_key_steps(self) -> int:
        return self.summary.num_steps if self.marked else self.summary.num_key_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A batch: what the pool gives the learner. Ordered by (group_id, member), whatever the order of arrival."""

    id: int
    learner_version: PolicyVersion
    """The version that the learner is about to update from, at take."""
    members: tuple[SelectedMember, ...]
    filtered: tuple[RolloutKey, ...] = ()
    """Members of groups without signal: they fill the batch and are not trained."""
    group_rewards: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """group_id -> rewards of every good member known by now, those included that were trained before or come later than this batch
    (quorum). Baselines use them; a group that is not named here is whole."""
    max_staleness: int = 0
    """Updates. The learner weighs unmarked tokens over it with 0, against its version at that moment (I6)."""
    max_key_staleness: int = 0
    """Updates. Key tokens over it are trained through PPO-clip on their sampler log-probs and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """What an update did with one member. Tokens count once however many epochs were run."""

    key: RolloutKey
    trained_tokens: int
    skipped_tokens: Mapping[str, int]
    """By reason: `stale`, `masked`, ..."""
    trained_key_steps: int = 0
    over_bound_key_steps: int = 0
    """Part of trained_key_steps."""
    skipped_key_steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatistics:
    """Numbers of one selection's updates, means over trained tokens unless said otherwise."""

    loss: float
    gradient_norm: float
    learning_rate: float
    entropy: float
    kl_sampler_learner: float
    """mean of sampler_logprob - learner_logprob (k1 estimate of KL(sampler || learner))."""
    ratio_mean: float
    ratio_variance: float
    ratio_max: float
    effective_sample_size: float
    """(sum r)^2 / (n sum r^2), fraction 0 to 1."""
    clipped_fraction: float
    masked_fraction: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: Mapping[int, int]
    """updates -> trained tokens"""
    key_staleness_mean: float | None
    """None without key tokens."""
    key_staleness_max: int | None
    trained_tokens: int
    trained_trajectories: int
    padded_tokens: int
    """Forward tokens, padding included."""
    reference_kl: float | None = None
    key_staleness_histogram: Mapping[int, int] = field(default_factory=dict)
    """updates -> trained tokens of key steps"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What learn() returns."""

    selection_id: int
    version_before: PolicyVersion
    version_after: PolicyVersion
    """Equal to version_before when every update of the selection was refused."""
    outcomes: tuple[MemberOutcome, ...]
    statistics: UpdateStatistics | None
    """None when nothing was trained."""
    refused: str | None
    """Why an update was refused (non-finite gradient), None otherwise."""
    seconds: float
    """Wall time inside the learner."""
    busy_seconds: float
    """Seconds in forward, backward and optimizer, mean over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeight:
    """One matrix of the model that a LoRA adapter changes: W = W0 + scale * B A (arXiv 2106.09685, section 4.1)."""

    name: str
    """Of the parameter, in the model without adapters."""
    rows: int
    """Outputs of the layer: B is [rows, rank]."""
    columns: int
    """Inputs of the layer: A is [rank, columns]."""
    transposed: bool
    """The parameter is stored as [columns, rows] (GPT-2)."""

    @property
    def a_name(self) -> str:
        """Under which A is published."""
        return f"{self.name}.lora_A"

    @property
    def b_name(self) -> str:
        return f"{self.name}.lora_B"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """What the learner publishes and the samplers merge when only LoRA adapters are trained."""

    rank: int
    scale: float
    """lora_alpha / rank"""
    weights: tuple[AdaptedWeight, ...]

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Published name -> shape, in the order in which the tensors are published."""
        result = {}
        for weight in self.weights:
            result[weight.a_name] = (self.rank, weight.columns)
            result[weight.b_name] = (weight.rows, self.rank)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Announces published weights."""

    version: PolicyVersion
    num_bytes: int
    publish_seconds: float
