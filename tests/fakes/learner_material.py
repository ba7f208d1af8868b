"""Models, trajectories and selections for the learner's tests: tiny, seeded, and checked by the records themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def make_selection(
    trajectories: Sequence[Trajectory], *, version: int = 0, max_staleness: int = 8, max_key_staleness: int = 2, marked: Sequence[int] = (), **more: Any
) -> Selection:
    """`marked`: indices of members that are key as a whole."""
    members = tuple(
        SelectedMember(summary=trajectory.summary(), payload=trajectory.to_bytes(), marked=index in marked) for index, trajectory in enumerate(trajectories)
    )
    more = {"id": 1, "learner_version": PolicyVersion(0, version), "max_staleness": max_staleness, "max_key_staleness": max_key_staleness, **more}
    return Selection(members=members, **more)


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


def with_verified(trajectory: Trajectory, verified: Sequence[tuple[int, int, float]]) -> Trajectory:
    """`verified`: (step, version, what the verified log-probs differ by) of whole actions that newer weights accepted."""
    spans, logprobs, place = [], [], 0
    changed = {step: (version, difference) for step, version, difference in verified}
    for index, step in enumerate(trajectory.steps):
        length = step.action_end - step.action_start
        if index in changed:
            version, difference = changed[index]
            spans.append(VersionSpan(version=PolicyVersion(0, version), start=step.action_start, end=step.action_end))
            logprobs += [min(value + difference, 0.0) for value in trajectory.sampler_logprobs[place : place + length]]
        place += length
    return replace(trajectory, verified_spans=tuple(spans), verified_logprobs=tuple(logprobs), round=1)


def as_if_newly_drawn(trajectory: Trajectory) -> Trajectory:
    """The same trajectory, whose verified tokens were drawn by the weights that verified them."""
    steps = tuple(replace(step, version_spans=tuple(trajectory.effective_spans(step))) for step in trajectory.steps)
    newer = dict(zip([p for span in trajectory.verified_spans for p in range(span.start, span.end)], trajectory.verified_logprobs, strict=True))
    logprobs = [newer.get(position, value) for position, value in zip(action_positions(trajectory), trajectory.sampler_logprobs, strict=True)]
    return replace(trajectory, steps=steps, sampler_logprobs=tuple(logprobs), verified_spans=(), verified_logprobs=(), round=0)


def action_positions(trajectory: Trajectory) -> list[int]:
    return [position for step in trajectory.steps for position in range(step.action_start, step.action_end)]


def full_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """[T, V] log-probabilities at every position of one unpadded trajectory; written independently of the learner."""
    logits = model(input_ids=torch.tensor([trajectory.tokens])).logits[0]
    return torch.log_softmax(logits / trajectory.temperature, dim=-1)


def step_logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """[T, V] log-probabilities at every position when each step sees its own observation only (rollout.context)."""
    parts, start = [], 0
    for step in trajectory.steps:
        logits = model(input_ids=torch.tensor([trajectory.tokens[start : step.action_end]])).logits[0]
        parts.append(torch.log_softmax(logits / trajectory.temperature, dim=-1))
        start = step.action_end
    return torch.cat(parts)


def action_logprobs(model: Any, trajectory: Trajectory, table: Callable[[Any, Trajectory], torch.Tensor] = full_logprobs) -> torch.Tensor:
    """[num_action_tokens], with gradient."""
    rows = table(model, trajectory)
    return torch.stack([rows[position - 1, trajectory.tokens[position]] for position in action_positions(trajectory)])
