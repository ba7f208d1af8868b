"""The loss of the learner's tests once more, token by token and without the learner's code: what its gradients are held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from fakes.learner_material import action_logprobs, full_logprobs, make_selection, make_settings, make_trajectory, with_logprobs
from headrace.learner.core import LearnerRank
from headrace.types import Trajectory
from headrace.updates import Selection

Table = Callable[[Any, Trajectory], torch.Tensor]
"""(model, trajectory) -> [T, V] log-probabilities after each token of the trajectory"""

NO_CLIP = 1e9  # of the gradient norm, so that the gradient can be read off after the step
VERSION = 6
MAX_STALENESS, MAX_KEY_STALENESS = 3, 1
PAPERS = {"grpo": ("mean_std", "sequence"), "dr_grpo": ("mean", "constant"), "rloo": ("leave_one_out", "constant"), "gspo": ("mean_std", "sequence")}


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def stale_trajectories(path: Path, table: Table = full_logprobs) -> list[Trajectory]:
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
                near = action_logprobs(model, trajectory, table).numpy() + generator.normal(0, 0.4, trajectory.num_action_tokens)
            result.append(with_logprobs(trajectory, near))
    return result


def learner_at(path: Path, version: int, *, rollout: dict[str, Any] | None = None, **learner: Any) -> LearnerRank:
    settings = make_settings(learner={"max_gradient_norm": NO_CLIP, **learner}, rollout=rollout or {})
    rank = LearnerRank(path, settings, device="cpu", parameter_dtype=torch.float64)
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
    table_of: Table = full_logprobs,
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
        table = table_of(model, trajectory)
        with torch.no_grad():
            reference_table = table_of(reference, trajectory) if reference else None
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
