"""I3: with equal weights sampler and learner agree on every log-probability, for every architecture and dtype that is served."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes.learner_material import make_selection, make_settings
from fakes.sampling import beside, make_sampler, request
from fakes.tiny_models import CONTEXT, SERVED, VOCABULARY, tiny_model
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.learner.batch import weigh
from headrace.learner.core import LearnerRank
from headrace.learner.scratch import build_model
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import EndReason, RolloutKey, StepRecord, Trajectory, VersionSpan
from headrace.updates import Selection
from headrace.weights.channel import SharedMemoryChannel
from headrace.weights.shared_memory import SharedMemoryReader, SharedMemoryWriter, parameter_bytes


async def draw_trajectory(sampler: TransformersSampler, group: int, member: int, context: str = "trajectory") -> Trajectory:
    """One to three steps with a cache kept between them; with context `observation` each sees what follows the last action."""
    chooser = random.Random(f"{group}-{member}")
    tokens = [chooser.randrange(VOCABULARY) for _ in range(chooser.choice((1, 3, 12, 25)))]
    logprobs: list[float] = []
    steps: list[StepRecord] = []
    for step in range(chooser.randint(1, 3)):
        seen = tokens[steps[-1].action_end :] if steps and context == "observation" else tokens
        wanted = request(seen, group=group, member=member, step=step, keep=context == "trajectory", max_action_tokens=chooser.randint(1, 14), temperature=0.8)
        completion = await sampler.sample(wanted)
        start = len(tokens)
        tokens += completion.tokens
        logprobs += completion.logprobs
        spans = tuple(VersionSpan(version=span.version, start=start + span.start, end=start + span.end) for span in completion.version_spans)
        steps.append(
            StepRecord(action_start=start, action_end=len(tokens), version_spans=spans, key_weight=0.0, reward=0.0, stop_reason=completion.stop_reason)
        )
        tokens += [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, 3))]
    sampler.release(RolloutKey(group, member, 0))
    return Trajectory(
        key=RolloutKey(group, member, 0),
        task_id=f"task{group}",
        task_kind="default",
        tokens=tuple(tokens),
        sampler_logprobs=tuple(logprobs),
        steps=tuple(steps),
        reward=float(member % 2),
        end_reason=EndReason.DONE,
        temperature=0.8,
    )


def draw_selection(sampler: TransformersSampler, version: int, first_group: int, context: str = "trajectory") -> Selection:
    async def main() -> list[Trajectory]:
        return await asyncio.gather(*(draw_trajectory(sampler, first_group + group, member, context) for group in range(4) for member in range(4)))

    return make_selection(run_virtual(beside(sampler, main())), version=version)


def largest_difference(learner: LearnerRank, selection: Selection) -> float:
    batch = learner._unpack(selection)
    weighing = weigh(batch, learner.version.number)
    differences = []
    with torch.no_grad():
        for micro_batch in learner._cut(batch, weighing, np.arange(len(batch.rows)), np.ones(len(batch.rows))):
            scores = learner._scores(learner._forward, micro_batch)
            differences.append(float((scores.logprobs_N - micro_batch.sampler_logprobs_N).abs().max()))
    return max(differences)


@pytest.mark.parametrize("kind", SERVED)
def test_sampler_and_learner_agree_before_and_after_updates_reach_the_sampler(kind: str) -> None:
    """Through both real ends: what the learner publishes by name is what the sampler loads, tied embeddings and all."""
    weights = FakeWeights()
    settings = make_settings(rollout={"max_tokens": CONTEXT, "max_action_tokens": 16}, learner={"learning_rate": 1e-2}, model={"path": "unused"})
    learner = LearnerRank(str(tiny_model(kind)), settings, writer=weights)
    sampler = make_sampler(kind, weights=weights)
    selection = draw_selection(sampler, 0, first_group=0)
    assert largest_difference(learner, selection) <= 1e-4
    for update in (1, 2):
        assert learner.learn(selection).refused is None
        learner.publish()
        assert largest_difference(learner, selection) > 1e-2, "the update changed nothing: equal weights would prove nothing"
        sampler.wake()
        selection = draw_selection(sampler, update, first_group=100 * update)
        assert sampler.version.number == update
        assert largest_difference(learner, selection) <= 1e-4


def test_sampler_and_learner_agree_where_each_step_saw_the_newest_observation_only() -> None:
    sampler = make_sampler("llama", weights=FakeWeights())
    selection = draw_selection(sampler, 0, first_group=0, context="observation")
    differences = {}
    for context in ("observation", "trajectory"):
        settings = make_settings(rollout={"max_tokens": CONTEXT, "max_action_tokens": 16, "context": context}, model={"path": "unused"})
        differences[context] = largest_difference(LearnerRank(str(tiny_model("llama")), settings), selection)
    assert differences["observation"] <= 1e-4 < 1e-2 < differences["trajectory"]


def test_sampler_and_learner_agree_where_the_padding_token_was_drawn_as_any_other(tmp_path: Path) -> None:
    """Neither side masks it: both normalise over the whole vocabulary, and its place in a context is computed."""
    architecture = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.2,
    }  # fmt: skip
    characters = "abcdefghijklmnopqrstuvwxyz"[: VOCABULARY - 2]
    scratch = make_settings(model={"path": None, "architecture": architecture, "characters": characters})
    build_model(scratch, tmp_path / "model")
    settings = make_settings(rollout={"max_tokens": CONTEXT, "max_action_tokens": 16}, learner={"learning_rate": 1e-2}, model={"path": "unused"})
    weights = FakeWeights()
    learner = LearnerRank(str(tmp_path / "model"), settings, writer=weights)
    sampler = make_sampler(path=tmp_path / "model", weights=weights)
    pad = len(characters)
    for update in (0, 1):
        selection = draw_selection(sampler, update, first_group=100 * update)
        trajectories = [Trajectory.from_bytes(member.payload) for member in selection.members]
        actions = [token for trajectory in trajectories for step in trajectory.steps for token in trajectory.tokens[step.action_start : step.action_end]]
        assert pad in actions
        assert largest_difference(learner, selection) <= 1e-4
        assert learner.learn(selection).refused is None
        learner.publish()
        sampler.wake()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_in_a_low_precision_both_sides_work_in_it_and_agree_within_it(kind: str, dtype: str, tmp_path: Path) -> None:
    """The bounds are twice what was measured: about ten roundings to 8 or 11 bits."""
    weights = FakeWeights()
    settings = make_settings(rollout={"max_tokens": CONTEXT, "max_action_tokens": 16}, model={"path": "unused", "dtype": dtype})
    learner = LearnerRank(str(tiny_model(kind)), settings, writer=weights)
    sampler = make_sampler(kind, weights=weights, dtype=dtype)
    learner.publish()
    assert {tensor.dtype for tensor in weights.history[learner.version].values()} == {getattr(torch, dtype)}
    selection = draw_selection(sampler, 0, first_group=0)
    assert {tensor.dtype for tensor in sampler._model.parameters.values()} == {getattr(torch, dtype)}
    assert sampler._engine.cache.layers[0].keys.dtype is getattr(torch, dtype)
    assert largest_difference(learner, selection) <= (0.15 if dtype == "bfloat16" else 0.02)
    assert learner.learn(selection).refused is None
    learner.publish()
    assert weights.newest_version() == learner.version


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_on_a_cuda_device_both_sides_work_there_and_agree(kind: str, dtype: str, tolerance: float) -> None:
    """Through the real channel, which lies in the host's memory. float32 products may be TF32's on a GPU."""
    channel = SharedMemoryChannel(parameter_bytes(tiny_model(kind)))
    settings = make_settings(rollout={"max_tokens": CONTEXT, "max_action_tokens": 16}, model={"path": "unused", "device": "cuda", "dtype": dtype})
    learner = LearnerRank(str(tiny_model(kind)), settings, writer=SharedMemoryWriter(channel))
    sampler = make_sampler(kind, weights=SharedMemoryReader(channel), device="cuda", dtype=dtype)
    capacity, rate = sampler.measure_capacity()
    assert capacity >= 1 and rate > 0
    selection = draw_selection(sampler, 0, first_group=0)
    assert sampler._engine.cache.layers[0].keys.is_cuda
    assert largest_difference(learner, selection) <= tolerance
    assert learner.learn(selection).refused is None
    learner.publish()
    sampler.wake()
    selection = draw_selection(sampler, 1, first_group=100)
    assert sampler.version == learner.version
    assert largest_difference(learner, selection) <= tolerance
    channel.close()
