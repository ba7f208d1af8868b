"""I8: the gradient is that of the whole unbatched loss, however rows are cut into micro-batches and ranks.
I9: equal log-probs make every correction 1 and the gradient the plain policy gradient."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.learner_gradient import (
    NO_CLIP,
    PAPERS,
    VERSION,
    aged_selection,
    expected_gradient,
    gradients,
    largest_difference,
    learner_at,
    load,
    stale_trajectories,
)
from fakes.learner_material import action_logprobs, action_positions, make_selection, make_settings, mixed_trajectories, save_model, with_logprobs
from headrace.config import Advantage, Correction, Loss, LossScale
from headrace.learner.core import LearnerRank, init_ranks, shutdown_ranks


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


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
RANK_SETTINGS: list[dict[str, dict[str, Any]]] = [
    {},
    {"learner": {"loss": "gspo", "kl_coefficient": 0.1}},
    {"learner": {"loss": "decoupled_ppo", "correction": "decoupled", "num_minibatches": 2, "num_epochs": 2}},
    {"learner": {"loss": "reinforce", "correction": "masked", "ratio_cap": 1.3, "ratio_floor": 0.8, "loss_scale": "sequence"}},
    {"learner": {"unmarked_fraction": 0.5, "staleness_slope": 0.4, "num_epochs": 2}},
    {"learner": {"unmarked_fraction": 0.5, "loss_scale": "sequence"}, "rollout": {"context": "observation"}},
    {"learner": {"loss": "reinforce", "correction": "truncated", "ratio_level": "sequence"}, "rollout": {"context": "observation"}},
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


def learn_twice(path: Path, rank: int, world_size: int, sections: dict[str, dict[str, Any]]) -> Any:
    """Gradient of the last update, weights, and results; plain arrays, because they cross processes. The second selection trains
    one row only, so that one of two ranks has nothing to do."""
    learner = {"max_gradient_norm": NO_CLIP, "micro_batch_tokens": 48, **sections.get("learner", {})}
    settings = make_settings(learner=learner, rollout=sections.get("rollout", {}))
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
