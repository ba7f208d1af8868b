"""Policy losses, one value a token, as pure functions. Lower is better; the caller sums them with `token_coefficients`.

Shapes: _N trained tokens of a micro-batch, in any order; `row_N` names the trajectory of each.
learner_logprobs carry the gradient. anchor_logprobs are what the ratio is taken against: the sampler's, or under a correction
the proximal policy's (the weights before the batch's first update), so that no ratio is counted twice.

With equal log-probs every loss has the gradient of the plain policy gradient, -A grad log p (I9).

How `learner.loss`, `learner.advantage` and `learner.loss_scale` combine. Four losses are, in their papers, a loss together with an
advantage or a scale. They bring these along where the setting stands at its default (mean_std, token); any other value rules:

| loss | advantage | loss_scale |
|---|---|---|
| grpo | mean_std | sequence |
| dr_grpo | mean | constant |
| rloo | leave_one_out | constant (the paper's sum over the answer, divided by max_tokens) |
| gspo | mean_std | sequence |

Nothing is lost for grpo and dr_grpo: with mean_std and token they would be ppo_clip, and rloo would be reinforce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import Advantage, Loss, LossScale
from headrace.learner.sequences import ratio, sequence_mean, sequence_ratio

ROUNDING = 1e-3
"""Of a trajectory's ratio: what float32 log-probabilities of sampler and learner may differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    loss_N: Tensor
    """[N] with gradient."""
    clipped_N: Tensor
    """[N] bool; True: the ratio was clipped, and the clip changed the token's gradient."""


def reinforce(learner_logprobs_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """-A log p. Williams 1992, Simple statistical gradient-following algorithms, section 4."""
    return TokenLoss(loss_N=-advantages_N * learner_logprobs_N, clipped_N=torch.zeros_like(advantages_N, dtype=torch.bool))


def rloo(learner_logprobs_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """REINFORCE whose baseline is the mean reward of the other members. Ahmadian et al., arXiv 2402.14740, section 3.2."""
    return reinforce(learner_logprobs_N, advantages_N)


def ppo_clip(learner_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = p / p_anchor.

    Schulman et al., arXiv 1707.06347, equation 7; two bounds: Yu et al. (DAPO), arXiv 2503.14476, section 3.1.
    """
    ratio_N = ratio(learner_logprobs_N, anchor_logprobs_N)
    plain_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return TokenLoss(loss_N=-torch.minimum(plain_N, bounded_N), clipped_N=(bounded_N < plain_N).detach())


def grpo(learner_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """The clipped loss, averaged inside each trajectory, then over trajectories; advantages are the group's z-scores.

    Shao et al., DeepSeekMath, arXiv 2402.03300, equation 3. Its KL term is `learner.kl_coefficient` (equation 4, k3).
    """
    return ppo_clip(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)


def dr_grpo(learner_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """GRPO without its two biases: divided by a constant, not by the answer's length; advantages not divided by the group's std.

    Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2.
    """
    return ppo_clip(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)


def decoupled_ppo(learner_logprobs_N: Tensor, proximal_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """The clipped loss around the proximal policy; the correction `decoupled` weighs it by p_proximal / p_sampler.

    Hilton et al., arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298, section 5.2.
    """
    return ppo_clip(learner_logprobs_N, proximal_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)


def gspo(
    learner_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    row_N: Tensor,
    included_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(s A, clip(s) A) at every token of a trajectory, s = exp(mean over its tokens of log p - log p_anchor).

    Zheng et al., Group sequence policy optimization, arXiv 2507.18071, equations 5 to 7. The paper's clip range is far narrower
    (3e-4, 4e-4): s hardly moves.
    """
    log_ratio_N = sequence_mean(learner_logprobs_N - anchor_logprobs_N, row_N, included_N)
    return ppo_clip(log_ratio_N, torch.zeros_like(log_ratio_N), advantages_N, clip_low=clip_low, clip_high=clip_high)


def cispo(learner_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log p: the weight is clipped, every token keeps its gradient.

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5. `clipped_N`: where the weight was clipped.
    """
    ratio_N = ratio(learner_logprobs_N.detach(), anchor_logprobs_N)
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(loss_N=-weight_N * advantages_N * learner_logprobs_N, clipped_N=weight_N != ratio_N)


def topr(learner_logprobs_N: Tensor, anchor_logprobs_N: Tensor, advantages_N: Tensor, row_N: Tensor, included_N: Tensor) -> TokenLoss:
    """-w A log p, w = 1 where A >= 0, else the trajectory's ratio cut to [0, 1]: what is already unlikely is not pushed down further.

    Le Roux et al., Tapered off-policy REINFORCE, arXiv 2503.14286, section 3 (canonical TOPR: a+ = b+ = 1, a- = 0, b- = 1).
    """
    ratio_N = sequence_ratio(learner_logprobs_N.detach(), anchor_logprobs_N, row_N, included_N)
    negative_N = advantages_N < 0
    weight_N = torch.where(negative_N, ratio_N.clamp(max=1.0), torch.ones_like(ratio_N))
    # at staleness 0 half of all ratios lie above 1 by rounding alone
    return TokenLoss(loss_N=-weight_N * advantages_N * learner_logprobs_N, clipped_N=negative_N & (ratio_N > 1 + ROUNDING))


def policy_loss(
    loss: Loss,
    learner_logprobs_N: Tensor,
    anchor_logprobs_N: Tensor,
    advantages_N: Tensor,
    row_N: Tensor,
    included_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The loss of that name; `included_N` says which tokens make up the ratio of a whole trajectory (gspo, topr)."""
    match loss:
        case Loss.REINFORCE:
            return reinforce(learner_logprobs_N, advantages_N)
        case Loss.RLOO:
            return rloo(learner_logprobs_N, advantages_N)
        case Loss.PPO_CLIP:
            return ppo_clip(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.GRPO:
            return grpo(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.DR_GRPO:
            return dr_grpo(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.DECOUPLED_PPO:
            return decoupled_ppo(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.GSPO:
            return gspo(learner_logprobs_N, anchor_logprobs_N, advantages_N, row_N, included_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.CISPO:
            return cispo(learner_logprobs_N, anchor_logprobs_N, advantages_N, clip_low=clip_low, clip_high=clip_high)
        case Loss.TOPR:
            return topr(learner_logprobs_N, anchor_logprobs_N, advantages_N, row_N, included_N)


def kl_k3(learner_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """[N] p_ref / p - log(p_ref / p) - 1 >= 0, an estimate of KL(learner || reference) with gradient.

    Schulman, Approximating KL divergence (2020), estimator k3; GRPO, arXiv 2402.03300, equation 4.
    """
    difference_N = reference_logprobs_N - learner_logprobs_N
    return torch.expm1(difference_N.clamp(max=20.0)) - difference_N


PAPER_ADVANTAGE = {Loss.GRPO: Advantage.MEAN_STD, Loss.DR_GRPO: Advantage.MEAN, Loss.RLOO: Advantage.LEAVE_ONE_OUT, Loss.GSPO: Advantage.MEAN_STD}
PAPER_SCALE = {Loss.GRPO: LossScale.SEQUENCE, Loss.DR_GRPO: LossScale.CONSTANT, Loss.RLOO: LossScale.CONSTANT, Loss.GSPO: LossScale.SEQUENCE}


def resolve_advantage(loss: Loss, advantage: Advantage) -> Advantage:
    """The advantage in force: see the table at the top of this module."""
    return PAPER_ADVANTAGE.get(loss, advantage) if advantage is Advantage.MEAN_STD else advantage


def resolve_loss_scale(loss: Loss, loss_scale: LossScale) -> LossScale:
    """The scale in force: see the table at the top of this module."""
    return PAPER_SCALE.get(loss, loss_scale) if loss_scale is LossScale.TOKEN else loss_scale
