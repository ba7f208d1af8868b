"""Off-policy corrections: a detached weight on each token's loss, apart from the loss itself.

Shapes: _N trained tokens of a micro-batch. `current` is the policy whose gradient is taken (or, for losses with a ratio of their
own, the proximal policy that their ratio starts from); the ratio is current / sampler. Equal log-probs give exactly 1 (I9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import Correction, RatioLevel
from headrace.learner.sequences import ratio, sequence_mean, sequence_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCorrection:
    weight_N: Tensor
    """[N] >= 0; 0 where masked."""
    kept_N: Tensor
    """[N] bool; False: the token leaves the loss."""
    capped_N: Tensor
    """[N] bool; True: the ratio was above the cap and was lowered to it."""


def correction_weights(
    correction: Correction,
    level: RatioLevel,
    current_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    row_N: Tensor,
    included_N: Tensor,
    *,
    cap: float,
    floor: float,
) -> TokenCorrection:
    """The weight of each token; `included_N` says which tokens make up the ratio of a whole trajectory.

    With r the ratio of a token (`token`) or the product of its trajectory's ratios (`sequence`):

    - none: 1.
    - truncated: min(r, cap). Espeholt et al., IMPALA, arXiv 1802.01561, section 4.1; Ionides 2008.
    - masked: r where floor <= r <= cap, else the token leaves the loss. IcePop (Ling team 2025); token-level masked importance
      sampling.
    - sequence_masked: whole trajectories stay or leave. `token`: by the geometric mean of their token ratios, kept tokens weigh
      their own ratio (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556, section 3.1); `sequence`: by the product,
      which is then also the weight.
    - decoupled: r, uncapped. Hilton et al., Batch size-invariance for policy optimization, arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298,
      section 5.2.
    """
    current, sampler = current_logprobs_N.detach(), sampler_logprobs_N.detach()
    always = torch.ones_like(current, dtype=torch.bool)
    never = ~always
    if correction is Correction.NONE:
        return TokenCorrection(weight_N=torch.ones_like(current), kept_N=always, capped_N=never)
    ratio_N = ratio(current, sampler) if level is RatioLevel.TOKEN else sequence_ratio(current, sampler, row_N, included_N)
    match correction:
        case Correction.TRUNCATED:
            return TokenCorrection(weight_N=ratio_N.clamp(max=cap), kept_N=always, capped_N=ratio_N > cap)
        case Correction.DECOUPLED:
            return TokenCorrection(weight_N=ratio_N, kept_N=always, capped_N=never)
        case Correction.MASKED:
            kept_N = (ratio_N >= floor) & (ratio_N <= cap)
        case Correction.SEQUENCE_MASKED:
            judged_N = ratio_N if level is RatioLevel.SEQUENCE else torch.exp(sequence_mean(current - sampler, row_N, included_N))
            kept_N = (judged_N >= floor) & (judged_N <= cap)
    return TokenCorrection(weight_N=ratio_N * kept_N, kept_N=kept_N, capped_N=never)
