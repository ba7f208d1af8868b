"""Losses, corrections and advantages against numbers computed by hand, or by plain float64 numpy written here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.config import Advantage, Correction, Loss, LossScale, RatioLevel
from headrace.learner import losses
from headrace.learner.advantages import group_advantages, token_coefficients
from headrace.learner.corrections import TokenCorrection, correction_weights

# Two trajectories: tokens 0 to 2 and tokens 3, 4. Ratios p / p_anchor: 1.5, 0.5, 1 and 1.25, 2.
RATIOS = [1.5, 0.5, 1.0, 1.25, 2.0]
ANCHOR = [math.log(0.2), math.log(0.4), math.log(0.3), math.log(0.4), math.log(0.1)]
PROBABILITIES = [0.3, 0.2, 0.3, 0.5, 0.2]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0, -2.0]
ROWS = [0, 0, 0, 1, 1]


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    learner = torch.tensor([math.log(p) for p in PROBABILITIES], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor(ANCHOR, dtype=torch.float64)
    return learner, anchor, torch.tensor(ADVANTAGES, dtype=torch.float64), torch.tensor(ROWS), torch.ones(5, dtype=torch.bool)


def loss_and_gradient(loss: Loss) -> tuple[list[float], list[float], list[bool]]:
    """Gradient of the plain sum with respect to each token's log-prob."""
    learner, anchor, advantages, rows, included = tensors()
    result = losses.policy_loss(loss, learner, anchor, advantages, rows, included, clip_low=0.2, clip_high=0.28)
    result.loss_N.sum().backward()
    assert learner.grad is not None
    return result.loss_N.tolist(), learner.grad.tolist(), result.clipped_N.tolist()


@pytest.mark.parametrize("loss", [Loss.REINFORCE, Loss.RLOO])
def test_reinforce_is_minus_advantage_times_logprob(loss: Loss) -> None:
    values, gradient, clipped = loss_and_gradient(loss)
    assert values == pytest.approx([1.2039728043, 1.6094379124, 1.2039728043, -1.3862943611, -3.2188758249])
    assert gradient == pytest.approx([-1, -1, -1, 2, 2])
    assert not any(clipped)


@pytest.mark.parametrize("loss", [Loss.PPO_CLIP, Loss.GRPO, Loss.DR_GRPO, Loss.DECOUPLED_PPO])
def test_clipped_loss_takes_the_pessimistic_side(loss: Loss) -> None:
    values, gradient, clipped = loss_and_gradient(loss)
    # A = 1: min(1.5, 1.28), min(0.5, 0.8), 1; A = -2: min(-2.5, -2.5), min(-4, -2.56)
    assert values == pytest.approx([-1.28, -0.5, -1.0, 2.5, 4.0])
    assert gradient == pytest.approx([0.0, -0.5, -1.0, 2.5, 4.0])
    assert clipped == [True, False, False, False, False]


def test_ppo_clip_stops_pushing_down_what_is_already_unlikely() -> None:
    learner = torch.tensor([math.log(0.1)], dtype=torch.float64, requires_grad=True)
    result = losses.ppo_clip(
        learner, torch.tensor([math.log(0.2)], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64), clip_low=0.2, clip_high=0.28
    )
    result.loss_N.sum().backward()
    assert result.loss_N.item() == pytest.approx(0.8)
    assert learner.grad is not None and learner.grad.item() == 0.0
    assert result.clipped_N.tolist() == [True]


def test_gspo_uses_the_geometric_mean_of_the_whole_trajectory() -> None:
    values, gradient, clipped = loss_and_gradient(Loss.GSPO)
    first, second = (1.5 * 0.5 * 1.0) ** (1 / 3), (1.25 * 2.0) ** (1 / 2)  # 0.9086, 1.5811
    assert values == pytest.approx([-first] * 3 + [2 * second] * 2)
    assert gradient == pytest.approx([-first] * 3 + [2 * second] * 2)  # three tokens, each a third of the log of s, summed
    assert clipped == [False] * 5


def test_gspo_clips_whole_trajectories() -> None:
    learner, anchor, _, rows, included = tensors()
    positive = torch.ones(5, dtype=torch.float64)
    result = losses.gspo(learner, anchor, positive, rows, included, clip_low=0.05, clip_high=0.28)
    result.loss_N.sum().backward()
    first = 0.75 ** (1 / 3)
    assert result.loss_N.tolist() == pytest.approx([-first] * 3 + [-1.28] * 2)
    assert result.clipped_N.tolist() == [False, False, False, True, True]
    assert learner.grad is not None and learner.grad.tolist() == pytest.approx([-first] * 3 + [0.0] * 2)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    values, gradient, clipped = loss_and_gradient(Loss.CISPO)
    weights = [1.28, 0.8, 1.0, 1.25, 1.28]
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)])
    assert values == pytest.approx([-w * a * math.log(p) for w, a, p in zip(weights, ADVANTAGES, PROBABILITIES, strict=True)])
    assert clipped == [True, True, False, False, True]


def test_topr_tapers_only_negative_trajectories() -> None:
    _, gradient, clipped = loss_and_gradient(Loss.TOPR)
    assert gradient == pytest.approx([-1, -1, -1, 2, 2])  # positive: 1; negative: the product 2.5 is cut to 1
    assert clipped == [False, False, False, True, True]
    learner, anchor, _, rows, included = tensors()
    result = losses.topr(learner, anchor, -torch.ones(5, dtype=torch.float64), rows, included)
    result.loss_N.sum().backward()
    assert learner.grad is not None and learner.grad.tolist() == pytest.approx([0.75, 0.75, 0.75, 1.0, 1.0])


def test_k3_is_the_ratio_minus_its_log_minus_one() -> None:
    learner = torch.tensor([math.log(0.5), math.log(0.2)], dtype=torch.float64, requires_grad=True)
    values = losses.kl_k3(learner, torch.tensor([math.log(0.25), math.log(0.2)], dtype=torch.float64))
    values.sum().backward()
    assert values.tolist() == pytest.approx([0.5 + math.log(2) - 1, 0.0])
    assert learner.grad is not None and learner.grad.tolist() == pytest.approx([1 - 0.5, 0.0])


def correct(correction: Correction, level: RatioLevel, *, cap: float = 1.4, floor: float = 0.6) -> TokenCorrection:
    learner, sampler, _, rows, included = tensors()
    return correction_weights(correction, level, learner, sampler, rows, included, cap=cap, floor=floor)


def test_no_correction_weighs_one() -> None:
    assert correct(Correction.NONE, RatioLevel.TOKEN).weight_N.tolist() == [1.0] * 5


def test_truncated_caps_the_ratio() -> None:
    token = correct(Correction.TRUNCATED, RatioLevel.TOKEN)
    assert token.weight_N.tolist() == pytest.approx([1.4, 0.5, 1.0, 1.25, 1.4])
    assert token.capped_N.tolist() == [True, False, False, False, True]
    assert correct(Correction.TRUNCATED, RatioLevel.SEQUENCE).weight_N.tolist() == pytest.approx([0.75] * 3 + [1.4] * 2)


def test_masked_drops_what_is_out_of_bounds() -> None:
    token = correct(Correction.MASKED, RatioLevel.TOKEN)
    assert token.weight_N.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.25, 0.0])
    assert token.kept_N.tolist() == [False, False, True, True, False]
    assert correct(Correction.MASKED, RatioLevel.SEQUENCE).weight_N.tolist() == pytest.approx([0.75] * 3 + [0.0] * 2)


def test_sequence_masked_drops_whole_trajectories() -> None:
    token = correct(Correction.SEQUENCE_MASKED, RatioLevel.TOKEN)  # geometric means .909 and 1.581
    assert token.weight_N.tolist() == pytest.approx([1.5, 0.5, 1.0, 0.0, 0.0])
    assert correct(Correction.SEQUENCE_MASKED, RatioLevel.TOKEN, cap=1.6, floor=0.95).weight_N.tolist() == pytest.approx([0, 0, 0, 1.25, 2.0])
    assert correct(Correction.SEQUENCE_MASKED, RatioLevel.SEQUENCE).weight_N.tolist() == pytest.approx([0.75] * 3 + [0.0] * 2)
    assert correct(Correction.SEQUENCE_MASKED, RatioLevel.SEQUENCE, cap=3.0).weight_N.tolist() == pytest.approx([0.75] * 3 + [2.5] * 2)


def test_decoupled_weighs_the_whole_ratio() -> None:
    assert correct(Correction.DECOUPLED, RatioLevel.TOKEN).weight_N.tolist() == pytest.approx(RATIOS)
    assert correct(Correction.DECOUPLED, RatioLevel.SEQUENCE).weight_N.tolist() == pytest.approx([0.75] * 3 + [2.5] * 2)


def test_corrections_carry_no_gradient() -> None:
    for correction in Correction:
        for level in RatioLevel:
            assert not correct(correction, level).weight_N.requires_grad


def test_a_trajectory_ratio_leaves_out_excluded_tokens() -> None:
    learner, sampler, advantages, rows, _ = tensors()
    included = torch.tensor([True, False, True, True, True])
    weights = correction_weights(Correction.TRUNCATED, RatioLevel.SEQUENCE, learner, sampler, rows, included, cap=10.0, floor=0.0).weight_N
    assert weights.tolist() == pytest.approx([1.5] * 3 + [2.5] * 2)
    gspo = losses.gspo(learner, sampler, advantages, rows, included, clip_low=0.9, clip_high=9.0).loss_N
    assert gspo.tolist() == pytest.approx([-math.sqrt(1.5)] * 3 + [2 * math.sqrt(2.5)] * 2)


def test_one_absurd_token_gives_a_large_finite_number() -> None:
    learner = torch.zeros(2, requires_grad=True)
    anchor = torch.tensor([-500.0, 0.0])
    for loss in Loss:
        rows, included = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
        value = losses.policy_loss(loss, learner, anchor, torch.tensor([-1.0, 1.0]), rows, included, clip_low=0.2, clip_high=0.28).loss_N.sum()
        (gradient,) = torch.autograd.grad(value, learner)
        assert math.isfinite(value.item()) and torch.isfinite(gradient).all(), loss


def test_group_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 3.0]  # mean 1, population variance 1.5
    deviation = math.sqrt(1.5)
    assert group_advantages(rewards, Advantage.MEAN_STD) == pytest.approx([0, -1 / deviation, -1 / deviation, 2 / deviation], abs=1e-5)
    assert group_advantages(rewards, Advantage.MEAN) == pytest.approx([0, -1, -1, 2])
    assert group_advantages(rewards, Advantage.LEAVE_ONE_OUT) == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])  # 3 - (1 + 0 + 0) / 3
    assert group_advantages(rewards, Advantage.NONE) == pytest.approx(rewards)


@pytest.mark.parametrize("advantage", [Advantage.MEAN_STD, Advantage.MEAN, Advantage.LEAVE_ONE_OUT])
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 7, [-1e6] * 3])
def test_a_group_without_difference_has_advantage_zero(advantage: Advantage, rewards: list[float]) -> None:
    assert np.abs(group_advantages(rewards, advantage)).max() < 1e-4


def test_token_coefficients_by_hand() -> None:
    trained = np.array([3, 0, 1])
    assert (token_coefficients(trained, LossScale.TOKEN, 100) * trained).tolist() == pytest.approx([3 / 4, 0, 1 / 4])
    assert (token_coefficients(trained, LossScale.SEQUENCE, 100) * trained).tolist() == pytest.approx([1 / 2, 0, 1 / 2])
    assert (token_coefficients(trained, LossScale.CONSTANT, 100) * trained).tolist() == pytest.approx([3 / 200, 0, 1 / 200])


def test_losses_bring_their_papers_advantage_and_scale_only_at_the_defaults() -> None:
    assert losses.resolve_advantage(Loss.DR_GRPO, Advantage.MEAN_STD) is Advantage.MEAN
    assert losses.resolve_advantage(Loss.DR_GRPO, Advantage.LEAVE_ONE_OUT) is Advantage.LEAVE_ONE_OUT
    assert losses.resolve_advantage(Loss.PPO_CLIP, Advantage.MEAN_STD) is Advantage.MEAN_STD
    assert losses.resolve_loss_scale(Loss.GRPO, LossScale.TOKEN) is LossScale.SEQUENCE
    assert losses.resolve_loss_scale(Loss.GRPO, LossScale.CONSTANT) is LossScale.CONSTANT
    assert losses.resolve_loss_scale(Loss.RLOO, LossScale.TOKEN) is LossScale.CONSTANT
    assert losses.resolve_loss_scale(Loss.PPO_CLIP, LossScale.TOKEN) is LossScale.TOKEN


def test_members_known_but_not_in_the_batch_count_in_baseline_and_scale() -> None:
    known = [1.0, 0.0, 0.0, 3.0]  # mean 1, population variance 1.5; the batch holds the first and the last
    deviation = math.sqrt(1.5)
    assert group_advantages([1.0, 3.0], Advantage.MEAN_STD, known) == pytest.approx([0, 2 / deviation], abs=1e-5)
    assert group_advantages([1.0, 3.0], Advantage.MEAN, known) == pytest.approx([0, 2])
    assert group_advantages([3.0], Advantage.LEAVE_ONE_OUT, known) == pytest.approx([3 - 1 / 3])  # its own reward is one of the four
    assert group_advantages([0.0], Advantage.LEAVE_ONE_OUT, known) == pytest.approx([-4 / 3])
    assert group_advantages([1.0, 3.0], Advantage.NONE, known) == pytest.approx([1, 3])


@pytest.mark.parametrize("advantage", list(Advantage))
def test_a_group_known_as_a_whole_has_the_same_advantages_bit_for_bit(advantage: Advantage) -> None:
    generator = np.random.default_rng(0)
    for size in (1, 2, 5, 8, 16, 33):
        rewards = generator.normal(size=size).tolist()
        whole = group_advantages(rewards, advantage)
        assert group_advantages(rewards, advantage, rewards).tolist() == whole.tolist()
        one_by_one = [float(group_advantages([reward], advantage, rewards)[0]) for reward in rewards]
        assert one_by_one == whole.tolist()
