"""Models, trajectories and selections for the learner's tests: tiny, seeded, and checked by the records themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import Settings
from headrace.types import EndReason, PolicyVersion, RolloutKey, StepRecord, StopReason, Trajectory, VersionSpan
from headrace.updates import SelectedMember, Selection

VOCABULARY = 23

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def save_model(directory: Path, architecture: Mapping[str, Any] = QWEN2, seed: int = 0) -> Path:
    """A Hugging Face directory with random weights, larger than usual so that distributions are not flat."""
    torch.manual_seed(seed)
    keys = dict(architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(directory)
    return directory


def make_settings(**sections: Mapping[str, Any]) -> Settings:
    """Settings by section, constant learning rate 1e-3."""
    learner = {"learning_rate": 1e-3, **sections.pop("learner", {})}
    rollout = {"max_tokens": 64, "max_action_tokens": 16, **sections.pop("rollout", {})}
    return Settings.model_validate({"learner": learner, "rollout": rollout, **sections})


def make_trajectory(
    generator: np.random.Generator,
    *,
    group: int,
    member: int,
    reward: float,
    steps: Sequence[tuple[int, int, Sequence[tuple[int, int]], float]],
    temperature: float = 1.0,
    lineage: int = 0,
) -> Trajectory:
    """`steps`: (observation tokens, action tokens, [(version number, tokens)], key weight); the log-probs are made up."""
    tokens: list[int] = []
    records = []
    total = 0
    for observation, action, spans, key in steps:
        tokens += generator.integers(0, VOCABULARY, observation).tolist()
        start = len(tokens)
        tokens += generator.integers(0, VOCABULARY, action).tolist()
        position, version_spans = start, []
        for number, length in spans:
            version_spans.append(VersionSpan(version=PolicyVersion(lineage, number), start=position, end=position + length))
            position += length
        records.append(
            StepRecord(
                action_start=start,
                action_end=len(tokens),
                version_spans=tuple(version_spans),
                key_weight=key,
                reward=0.0,
                stop_reason=StopReason.STOP,
            )
        )
        total += action
    logprobs = -np.abs(generator.normal(1.5, 1.0, total)).astype(np.float32)
    return Trajectory(
        key=RolloutKey(group, member, 0),
        task_id=f"task{group}",
        task_kind="default",
        tokens=tuple(tokens),
        sampler_logprobs=tuple(float(value) for value in logprobs),
        steps=tuple(records),
        reward=reward,
        end_reason=EndReason.DONE,
        temperature=temperature,
    )


def make_selection(trajectories: Sequence[Trajectory], *, version: int = 0, max_staleness: int = 8, max_key_staleness: int = 2, **more: Any) -> Selection:
    members = tuple(SelectedMember(summary=trajectory.summary(), payload=trajectory.to_bytes()) for trajectory in trajectories)
    return Selection(id=1, learner_version=PolicyVersion(0, version), members=members, max_staleness=max_staleness, max_key_staleness=max_key_staleness, **more)


def mixed_trajectories(seed: int = 0, *, groups: int = 3, size: int = 4, temperature: float = 1.0, version: int = 0, keys: bool = False) -> list[Trajectory]:
    """Groups of one- to three-step trajectories of very different lengths, rewards that differ inside each group."""
    generator = np.random.default_rng(seed)
    result = []
    for group in range(groups):
        for member in range(size):
            steps = []
            for index in range(int(generator.integers(1, 4))):
                action = int(generator.integers(1, 9))
                steps.append((int(generator.integers(1, 7)), action, [(version, action)], float(keys and index == 0)))
            reward = float(generator.normal())
            result.append(make_trajectory(generator, group=group, member=member, reward=reward, steps=steps, temperature=temperature))
    return result


def with_logprobs(trajectory: Trajectory, logprobs: Sequence[float]) -> Trajectory:
    """The same trajectory under other sampler log-probs; rounding above 0 is cut."""
    return replace(trajectory, sampler_logprobs=tuple(min(float(value), 0.0) for value in logprobs))


def action_positions(trajectory: Trajectory) -> list[int]:
    return [position for step in trajectory.steps for position in range(step.action_start, step.action_end)]


def full_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """[T, V] log-probabilities at every position of one unpadded trajectory; written independently of the learner."""
    logits = model(input_ids=torch.tensor([trajectory.tokens])).logits[0]
    return torch.log_softmax(logits / trajectory.temperature, dim=-1)


def action_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """[num_action_tokens], with gradient."""
    rows = full_logprobs(model, trajectory)
    return torch.stack([rows[position - 1, trajectory.tokens[position]] for position in action_positions(trajectory)])
