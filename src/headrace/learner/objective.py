"""What one micro-batch adds to the loss: policy loss x correction + KL to the reference - entropy bonus. Shapes: _N trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.config import Advantage, Correction, Loss, LossScale, RatioLevel, Settings
from headrace.learner.batch import MicroBatch
from headrace.learner.corrections import correction_weights
from headrace.learner.forward import Scores
from headrace.learner.losses import kl_k3, policy_loss, ppo_clip, resolve_advantage, resolve_loss_scale

WITHOUT_RATIO = frozenset({Loss.REINFORCE, Loss.RLOO})
"""Losses that have no ratio of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The learner's settings, resolved: what `learner.loss` brings along is filled in (losses.py)."""

    loss: Loss
    correction: Correction
    ratio_level: RatioLevel
    ratio_cap: float
    ratio_floor: float
    clip_low: float
    clip_high: float
    advantage: Advantage
    loss_scale: LossScale
    max_tokens: int
    """What `loss_scale = constant` divides by: rollout.max_tokens."""
    kl_coefficient: float
    entropy_coefficient: float

    @classmethod
    def from_settings(cls, settings: Settings) -> Objective:
        learner = settings.learner
        return cls(
            loss=learner.loss,
            correction=learner.correction,
            ratio_level=learner.ratio_level,
            ratio_cap=learner.ratio_cap,
            ratio_floor=learner.ratio_floor,
            clip_low=learner.clip_low,
            clip_high=learner.clip_high,
            advantage=resolve_advantage(learner.loss, learner.advantage),
            loss_scale=resolve_loss_scale(learner.loss, learner.loss_scale),
            max_tokens=settings.rollout.max_tokens,
            kl_coefficient=learner.kl_coefficient,
            entropy_coefficient=learner.entropy_coefficient,
        )

    @property
    def starts_from_proximal(self) -> bool:
        """The loss has a ratio and a correction stands beside it: the loss covers learner / proximal, the correction proximal /
        sampler. Without a correction the loss's ratio covers learner / sampler."""
        return self.correction is not Correction.NONE and self.loss not in WITHOUT_RATIO


class ObjectiveTerms(NamedTuple):
    loss: Tensor
    """Scalar with gradient: this micro-batch's part of the minibatch's loss."""
    kept_N: Tensor
    """[N] bool; False: masked by the correction."""
    clipped_N: Tensor
    """[N] bool; clipped by the loss or capped by the correction."""
    reference_kl_N: Tensor | None


def evaluate_objective(
    objective: Objective,
    micro_batch: MicroBatch,
    scores: Scores,
    *,
    proximal_logprobs_N: Tensor | None = None,
    reference_logprobs_N: Tensor | None = None,
) -> ObjectiveTerms:
    """The loss of one micro-batch. `proximal_logprobs_N` None: the weights have not moved since the batch's first update.

    Key tokens always stay in the loss (DESIGN section 6): one over max_key_staleness, or one that the correction would mask, goes
    through PPO-clip on its sampler log-prob, whatever the loss. Those over the bound are in no trajectory's ratio either.
    """
    learner_N, sampler_N, advantages_N = scores.logprobs_N, micro_batch.sampler_logprobs_N, micro_batch.advantages_N
    start_N = learner_N.detach() if proximal_logprobs_N is None or not objective.starts_from_proximal else proximal_logprobs_N
    anchor_N = start_N if objective.starts_from_proximal else sampler_N
    included_N = ~micro_batch.over_bound_N
    correction = correction_weights(
        objective.correction, objective.ratio_level, start_N, sampler_N, micro_batch.row_N, included_N, cap=objective.ratio_cap, floor=objective.ratio_floor
    )
    clips = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    policy = policy_loss(objective.loss, learner_N, anchor_N, advantages_N, micro_batch.row_N, included_N, **clips)
    loss_N, kept_N, clipped_N = policy.loss_N * correction.weight_N, correction.kept_N, policy.clipped_N | correction.capped_N
    if micro_batch.has_keys:
        safe_N = micro_batch.over_bound_N | (micro_batch.key_N & ~kept_N)
        safe = ppo_clip(learner_N, sampler_N, advantages_N, **clips)
        loss_N = torch.where(safe_N, safe.loss_N, loss_N)
        clipped_N = torch.where(safe_N, safe.clipped_N, clipped_N)
        kept_N = kept_N | micro_batch.key_N
    reference_kl_N = None
    if reference_logprobs_N is not None:
        reference_kl_N = kl_k3(learner_N, reference_logprobs_N)
        loss_N = loss_N + objective.kl_coefficient * reference_kl_N
    if objective.entropy_coefficient:
        loss_N = loss_N - objective.entropy_coefficient * scores.entropy_N
    loss = (loss_N * kept_N * micro_batch.coefficient_N).sum()
    return ObjectiveTerms(loss, kept_N, clipped_N & kept_N, None if reference_kl_N is None else reference_kl_N.detach())
