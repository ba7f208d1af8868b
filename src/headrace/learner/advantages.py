"""Group advantages and what a token's loss is divided by. Shapes: _G members of one group, _S trajectories, _A action tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.config import Advantage, LossScale

STD_EPSILON = 1e-6
"""Reward units: keeps equal rewards at advantage 0."""


def group_advantages(rewards_G: Sequence[float], advantage: Advantage, known_K: Sequence[float] | None = None) -> NDArray[np.float64]:
    """[G] advantages of members of one group; failed members are already absent, so their reward is in no baseline.

    `known_K`: rewards of every good member known by now, those of `rewards_G` included (pool.quorum); baseline and scale are taken over
    them. None: `rewards_G` is the whole group.

    - mean_std: (r - mean) / (population std + 1e-6). Shao et al., DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1.2.
    - mean: r - mean. Liu et al., Dr. GRPO, arXiv 2503.20783, section 3.2.
    - leave_one_out: r - mean of the others. Kool et al. 2019; Ahmadian et al. (RLOO), arXiv 2402.14740, section 3.2.
    - none: r.

    One member alone has no one to compare with: 0, except under `none`.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if advantage is Advantage.NONE:
        return rewards
    known = rewards if known_K is None else np.asarray(known_K, dtype=np.float64)
    centred: NDArray[np.float64] = rewards - known.mean()
    match advantage:
        case Advantage.MEAN_STD:
            return centred / (float(known.std()) + STD_EPSILON)
        case Advantage.MEAN:
            return centred
        case Advantage.LEAVE_ONE_OUT:
            return centred * (len(known) / max(len(known) - 1, 1))


def token_coefficients(trained_tokens_S: NDArray[np.int64], loss_scale: LossScale, max_tokens: int) -> NDArray[np.float64]:
    """[S] what the loss of each trained token of a trajectory is multiplied by, so that the sum over tokens is the batch's loss.

    "Trained" counts tokens that are sampled out too (learner.unmarked_fraction): divided by the number that happened to be drawn, the
    gradient would be biased.

    Computed over the whole minibatch, before it is cut into ranks and micro-batches: the gradient cannot depend on the cut (I8).

    - token: 1 / trained tokens of the minibatch (Yu et al., DAPO, arXiv 2503.14476, section 3.3).
    - sequence: 1 / (trajectories x trained tokens of this trajectory) (GRPO, arXiv 2402.03300, equation 3).
    - constant: 1 / (trajectories x max_tokens), whatever was really sampled (Dr. GRPO, arXiv 2503.20783, section 3.2).

    Trajectories without trained tokens count nowhere. Tokens that a correction masks later do count: a mask is a weight of 0 on
    a sample, not a smaller sample.
    """
    trained_trajectories = max(int((trained_tokens_S > 0).sum()), 1)
    match loss_scale:
        case LossScale.TOKEN:
            return np.full(len(trained_tokens_S), 1.0 / max(int(trained_tokens_S.sum()), 1))
        case LossScale.SEQUENCE:
            return 1.0 / (trained_trajectories * np.maximum(trained_tokens_S, 1))
        case LossScale.CONSTANT:
            return np.full(len(trained_tokens_S), 1.0 / (trained_trajectories * max_tokens))
