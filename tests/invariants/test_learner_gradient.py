"""I8: the gradient is that of the whole unbatched loss, however rows are cut into micro-batches and ranks.
I9: equal log-probs make every correction 1 and the gradient the plain policy gradient."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.learner_material import (
    action_logprobs,
    action_positions,
    full_logprobs,
    make_selection,
    make_settings,
    make_trajectory,
    mixed_trajectories,
    save_model,
    with_logprobs,
)
from headrace.config import Advantage, Correction, Loss, LossScale
from headrace.learner.core import LearnerRank, init_ranks, shutdown_ranks
from headrace.types import Trajectory
from headrace.updates import Selection

NO_CLIP = 1e9  # of the gradient norm, so that the gradient can be read off after the step
VERSION = 6
MAX_STALENESS, MAX_KEY_STALENESS = 3, 1


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def stale_trajectories(path: Path) -> list[Trajectory]:
    """Versions 1 to 6 inside the actions, key steps fresh and old, sampler log-probs near the model's (ratios on both sides of 1)."""
    generator = np.random.default_rng(5)
    model, result = load(path), []
    for group in range(3):
        for member in range(4):
            steps = []
            for index in range(int(generator.integers(1, 4))):
                action = int(generator.integers(2, 9))
                split = int(generator.integers(1, action))
                old = int(generator.integers(1, 6))
                steps.append((int(generator.integers(1, 7)), action, [(old, split), (VERSION, action - split)], float(index == 1)))
            trajectory = make_trajectory(
                generator, group=group, member=member, reward=float(generator.normal()), steps=steps, temperature=0.7 if group == 1 else 1.0
            )
            with torch.no_grad():
                near = action_logprobs(model, trajectory).numpy() + generator.normal(0, 0.4, trajectory.num_action_tokens)
            result.append(with_logprobs(trajectory, near))
    return result


def learner_at(path: Path, version: int, **learner: Any) -> LearnerRank:
    rank = LearnerRank(path, make_settings(learner={"max_gradient_norm": NO_CLIP, **learner}), device="cpu", parameter_dtype=torch.float64)
    rank._version = rank._version._replace(number=version)
    return rank


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative to each parameter's gradient norm."""
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def expected_gradient(
    path: Path,
    trajectories: Sequence[Trajectory],
    loss: str,
    correction: str = "none",
    level: str = "token",
    advantage: str = "mean_std",
    scale: str = "token",
    kl: float = 0.0,
    entropy: float = 0.0,
    reference: Any = None,
) -> dict[str, torch.Tensor]:
    """Autograd of the unbatched loss: one trajectory and one token at a time, no padding, written without the learner's code."""
    model = load(path)
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.key.group_id, []).append(trajectory.reward)
    rows = []
    for trajectory in trajectories:
        group = np.array(rewards[trajectory.key.group_id])
        centred = trajectory.reward - group.mean()
        value = {
            "mean_std": centred / (group.std() + 1e-6),
            "mean": centred,
            "leave_one_out": centred * len(group) / (len(group) - 1),
            "none": trajectory.reward,
        }
        rows.append((trajectory, float(value[advantage])))
    kept = {id(trajectory): [token for token in tokens_of(trajectory) if token[4]] for trajectory in trajectories}
    num_tokens, num_rows = sum(map(len, kept.values())), sum(bool(tokens) for tokens in kept.values())
    total = torch.zeros((), dtype=torch.float64)
    for trajectory, a in rows:
        tokens = kept[id(trajectory)]
        table = full_logprobs(model, trajectory)
        with torch.no_grad():
            reference_table = full_logprobs(reference, trajectory) if reference else None
        p = {index: table[position - 1, trajectory.tokens[position]] for index, position, *_ in tokens}
        q = {index: trajectory.sampler_logprobs[index] for index, *_ in tokens}
        in_ratio = [index for index, _, _, _, _, over in tokens if not over]
        log_s = sum((p[index] - q[index] for index in in_ratio), start=torch.zeros((), dtype=torch.float64))
        for index, position, _, key, _, over in tokens:
            r = torch.exp(p[index] - q[index])
            whole = math.exp(log_s.item())
            if correction == "none":
                weight, anchor = 1.0, q[index]
            else:
                c = r.item() if level == "token" else whole
                judged = math.exp(log_s.item() / max(len(in_ratio), 1)) if (correction, level) == ("sequence_masked", "token") else c
                weight = {"truncated": min(c, 2.0), "decoupled": c}.get(correction, c if 0.0 <= judged <= 2.0 else 0.0)
                anchor = p[index].item()
            own = torch.exp(p[index] - anchor)
            if loss in ("reinforce", "rloo"):
                value = -a * p[index]
            elif loss == "cispo":
                value = -own.detach().clamp(0.8, 1.28) * a * p[index]
            elif loss == "topr":
                value = -(min(whole if correction == "none" else 1.0, 1.0) if a < 0 else 1.0) * a * p[index]
            elif loss == "gspo":
                s = torch.exp(sum((p[i] - (q[i] if correction == "none" else p[i].item()) for i in in_ratio), start=torch.zeros(())) / max(len(in_ratio), 1))
                value = -torch.minimum(s * a, s.clamp(0.8, 1.28) * a)
            else:
                value = -torch.minimum(own * a, own.clamp(0.8, 1.28) * a)
            value = weight * value
            if over or (key and weight == 0.0):
                value, weight = -torch.minimum(r * a, r.clamp(0.8, 1.28) * a), 1.0
            if reference_table is not None:
                ref = reference_table[position - 1, trajectory.tokens[position]]
                value = value + kl * (torch.exp(ref - p[index]) - (ref - p[index]) - 1)
            if entropy:
                value = value + entropy * (table[position - 1].exp() * table[position - 1]).sum()
            share = {"token": 1 / num_tokens, "sequence": 1 / (num_rows * len(tokens)), "constant": 1 / (num_rows * 64)}[scale]
            total = total + (value * share if weight else 0.0)
    total.backward()
    return gradients(model)


def tokens_of(trajectory: Trajectory) -> list[tuple[int, int, int, bool, bool, bool]]:
    """(index, position, staleness, key, trained, over the key bound) of every action token."""
    result = []
    for step in trajectory.steps:
        for span in step.version_spans:
            for position in range(span.start, span.end):
                age, key = VERSION - span.version.number, step.key_weight > 0
                result.append((len(result), position, age, key, key or age <= MAX_STALENESS, key and age > MAX_KEY_STALENESS))
    return result


def aged_selection(trajectories: Sequence[Trajectory]) -> Selection:
    return make_selection(trajectories, version=VERSION, max_staleness=MAX_STALENESS, max_key_staleness=MAX_KEY_STALENESS)


PAPERS = {"grpo": ("mean_std", "sequence"), "dr_grpo": ("mean", "constant"), "rloo": ("leave_one_out", "constant"), "gspo": ("mean_std", "sequence")}
CASES = [(loss.value, "none", "token") for loss in Loss if loss is not Loss.DECOUPLED_PPO]
CASES += [("decoupled_ppo", "decoupled", "token"), ("decoupled_ppo", "decoupled", "sequence"), ("gspo", "truncated", "token"), ("topr", "masked", "token")]
CASES += [(loss, c, level) for loss in ("reinforce", "ppo_clip") for c in ("truncated", "masked", "sequence_masked") for level in ("token", "sequence")]


@pytest.mark.parametrize(("loss", "correction", "level"), CASES)
def test_gradient_is_that_of_the_unbatched_loss(model_path: Path, loss: str, correction: str, level: str) -> None:
    trajectories = stale_trajectories(model_path)
    rank = learner_at(model_path, VERSION, loss=loss, correction=correction, ratio_level=level, micro_batch_tokens=48)
    result = rank.learn(aged_selection(trajectories))
    advantage, scale = PAPERS.get(loss, ("mean_std", "token"))
    expected = expected_gradient(model_path, trajectories, loss, correction, level, advantage, scale)
    assert result.refused is None
    assert largest_difference(gradients(rank.model), expected) < 1e-5


@pytest.mark.parametrize("advantage", list(Advantage))
@pytest.mark.parametrize("scale", list(LossScale))
def test_every_advantage_and_scale_with_kl_and_entropy_has_the_unbatched_gradient(
    model_path: Path, tmp_path: Path, advantage: Advantage, scale: LossScale
) -> None:
    trajectories = stale_trajectories(model_path)
    rank = learner_at(model_path, VERSION, advantage=advantage, loss_scale=scale, kl_coefficient=0.3, entropy_coefficient=0.05)
    reference = load(save_model(tmp_path / "other", seed=1))  # the learner stands away from it, where the KL has a gradient
    assert rank._reference is not None
    rank._reference.model.load_state_dict(reference.state_dict())
    rank.learn(aged_selection(trajectories))
    expected = expected_gradient(model_path, trajectories, "ppo_clip", advantage=advantage, scale=scale, kl=0.3, entropy=0.05, reference=reference)
    assert largest_difference(gradients(rank.model), expected) < 1e-5


def test_a_masked_token_leaves_the_kl_and_the_entropy_bonus_too(model_path: Path, tmp_path: Path) -> None:
    trajectories = stale_trajectories(model_path)
    rank = learner_at(model_path, VERSION, loss="reinforce", correction="masked", kl_coefficient=0.3, entropy_coefficient=0.05)
    reference = load(save_model(tmp_path / "other", seed=1))
    assert rank._reference is not None
    rank._reference.model.load_state_dict(reference.state_dict())
    statistics = rank.learn(aged_selection(trajectories)).statistics
    expected = expected_gradient(model_path, trajectories, "reinforce", "masked", kl=0.3, entropy=0.05, reference=reference)
    assert statistics is not None and statistics.masked_fraction > 0
    assert largest_difference(gradients(rank.model), expected) < 1e-5


def test_gradient_does_not_depend_on_micro_batches(model_path: Path) -> None:
    trajectories = stale_trajectories(model_path)
    found = []
    for budget in (16, 40, 100, 100_000):
        rank = learner_at(model_path, VERSION, micro_batch_tokens=budget)
        rank.learn(aged_selection(trajectories))
        found.append(gradients(rank.model))
    assert all(largest_difference(other, found[0]) < 1e-10 for other in found[1:])


ALLOWED_PAIRS = [(loss, c) for loss in Loss for c in Correction if (loss is Loss.DECOUPLED_PPO) == (c is Correction.DECOUPLED)]


@pytest.mark.parametrize(("loss", "correction"), ALLOWED_PAIRS)
def test_equal_logprobs_give_the_plain_policy_gradient(model_path: Path, loss: Loss, correction: Correction) -> None:
    model = load(model_path)
    trajectories = [with_logprobs(t, action_logprobs(model, t).tolist()) for t in mixed_trajectories(3, keys=True, temperature=0.8)]
    rank = learner_at(model_path, 0, loss=loss, correction=correction, micro_batch_tokens=64)
    statistics = rank.learn(make_selection(trajectories)).statistics
    advantage, scale = PAPERS.get(loss, ("mean_std", "token"))
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(t.num_action_tokens for t in trajectories)
    for t in trajectories:
        rewards = np.array([other.reward for other in trajectories if other.key.group_id == t.key.group_id])
        centred = t.reward - rewards.mean()
        a = {"mean_std": centred / (rewards.std() + 1e-6), "mean": centred, "leave_one_out": centred * 4 / 3}[advantage]
        share = {"token": 1 / num_tokens, "sequence": 1 / (12 * t.num_action_tokens), "constant": 1 / (12 * 64)}[scale]
        total = total - share * a * action_logprobs(model, t).sum()
    total.backward()
    assert largest_difference(gradients(rank.model), gradients(model)) < 1e-5  # log-probs travel as float32
    assert statistics is not None
    assert (statistics.ratio_mean, statistics.ratio_max, statistics.effective_sample_size) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    assert statistics.clipped_fraction == statistics.masked_fraction == 0.0


def test_without_marks_no_token_is_a_key_and_every_weight_is_one(model_path: Path) -> None:
    """I10, learner side: marking steps of fresh trajectories changes neither gradient nor trained tokens."""
    results = []
    for keys in (False, True):
        rank = learner_at(model_path, 0)
        result = rank.learn(make_selection(mixed_trajectories(3, keys=keys)))
        results.append((gradients(rank.model), [outcome.trained_tokens for outcome in result.outcomes]))
    assert largest_difference(results[1][0], results[0][0]) == 0.0
    assert results[0][1] == results[1][1] == [t.num_action_tokens for t in mixed_trajectories(3)]


# Two real processes: both ranks' gradients, weights and results for several settings, computed in one session.
RANK_SETTINGS: list[dict[str, Any]] = [
    {},
    {"loss": "gspo", "kl_coefficient": 0.1},
    {"loss": "decoupled_ppo", "correction": "decoupled", "num_minibatches": 2, "num_epochs": 2},
    {"loss": "reinforce", "correction": "masked", "ratio_cap": 1.3, "ratio_floor": 0.8, "loss_scale": "sequence"},
]


def run_rank(rank: int, world_size: int, address: str, path: Path, out: Any) -> None:
    torch.set_num_threads(1)
    init_ranks(rank, world_size, address, timeout_seconds=60)
    results = []
    for settings in RANK_SETTINGS:
        results.append(learn_twice(path, rank, world_size, settings))
    shutdown_ranks()
    out.put((rank, results))
    out.close()


def learn_twice(path: Path, rank: int, world_size: int, learner: dict[str, Any]) -> Any:
    """Gradient of the last update, weights, and results; plain arrays, because they cross processes. The second selection trains
    one row only, so that one of two ranks has nothing to do."""
    settings = make_settings(learner={"max_gradient_norm": NO_CLIP, "micro_batch_tokens": 48, **learner})
    member = LearnerRank(path, settings, rank=rank, world_size=world_size, device="cpu", parameter_dtype=torch.float64)
    member._version = member._version._replace(number=VERSION)
    trajectories = stale_trajectories(path)
    results = [member.learn(aged_selection(trajectories)), member.learn(aged_selection([trajectories[0], trajectories[1]]))]
    return (
        {name: tensor.numpy() for name, tensor in gradients(member.model).items()},
        {name: tensor.detach().numpy() for name, tensor in member.model.named_parameters()},
        results,
    )


def test_two_ranks_have_the_gradient_and_the_weights_of_one(model_path: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.learner.core", "fakes.learner_material"])
    out = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, 2, f"file://{tmp_path}/ranks", model_path, out)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        alone = [learn_twice(model_path, 0, 1, settings) for settings in RANK_SETTINGS]
        together = dict(out.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    for index, (gradient, weights, results) in enumerate(alone):
        for rank in range(2):
            other_gradient, other_weights, other_results = together[rank][index]
            for name in weights:
                assert np.abs(other_gradient[name] - gradient[name]).max() <= 1e-10 * max(np.abs(gradient[name]).max(), 1e-6), (index, rank, name)
                assert np.abs(other_weights[name] - weights[name]).max() < 1e-8, (index, rank, name)
            for result, other in zip(results, other_results, strict=True):
                assert other.outcomes == result.outcomes
                assert other.version_after == result.version_after
                assert statistics_of(other) == pytest.approx(statistics_of(result), rel=1e-6)
                assert other.statistics.staleness_histogram == result.statistics.staleness_histogram
        assert all((together[0][index][1][name] == together[1][index][1][name]).all() for name in weights)


def statistics_of(result: Any) -> dict[str, float]:
    """Without padding, which the cut does change."""
    s = result.statistics
    names = ["loss", "gradient_norm", "entropy", "kl_sampler_learner", "ratio_mean", "ratio_variance", "ratio_max", "effective_sample_size"]
    names += ["clipped_fraction", "masked_fraction", "staleness_mean", "staleness_max", "trained_tokens", "trained_trajectories"]
    return {name: getattr(s, name) for name in names}


def test_action_positions_of_the_material_are_those_of_its_steps() -> None:
    assert all(len(action_positions(t)) == t.num_action_tokens for t in mixed_trajectories(1))
