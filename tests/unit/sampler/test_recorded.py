"""Recorded steps: every served model has them, they are the forward, and a forward that cannot be recorded runs in Python."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.tiny_models import CONTEXT, SERVED, VOCABULARY, tiny_model
from headrace.sampler.attention import BatchPlan, make_plan
from headrace.sampler.kv_cache import SlotCache
from headrace.sampler.model import ServedModel
from headrace.sampler.recorded import Forward, RecordedSteps


def served(kind: str = "qwen2") -> ServedModel:
    return ServedModel(str(tiny_model(kind)), max_context_tokens=CONTEXT, device="cpu", dtype="float32")


def random_step(model: ServedModel, chooser: random.Random, longest: int) -> tuple[SlotCache, BatchPlan]:
    """Rows of up to `longest` new tokens over a cache of random numbers."""
    num_rows = chooser.randint(1, 20)
    cache = model.new_cache(num_rows + 3, CONTEXT)
    for store in cache.stores:
        store.normal_()
    tokens = [[chooser.randrange(VOCABULARY) for _ in range(chooser.randint(1, longest))] for _ in range(num_rows)]
    starts = [chooser.randint(0, CONTEXT - longest) for _ in range(num_rows)]
    return cache, make_plan(tokens, starts, chooser.sample(range(num_rows + 3), num_rows), model.device)


@pytest.mark.parametrize("kind", SERVED)
def test_recorded_steps_are_the_forward_to_the_last_bit_for_any_rows_contexts_and_weights(kind: str) -> None:
    model = served(kind)
    chooser = random.Random(kind)
    torch.manual_seed(0)
    for trial in range(12):
        if trial == 6:
            for parameter in model.parameters.values():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        cache, plan = random_step(model, chooser, longest=(1, 2, 8)[trial % 3])
        copy = SlotCache(model.shapes, [store.clone() for store in cache.stores])
        logits = model._recorded.run(cache, plan, plan.last_R)
        assert logits is not None
        with torch.inference_mode():
            assert torch.equal(logits, model._forward_in_python(copy, plan, plan.last_R))
        assert all(torch.equal(one, two) for one, two in zip(cache.stores, copy.stores, strict=True))


def test_a_model_whose_config_names_a_padding_token_is_recorded_too(tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": 1}))
    model = ServedModel(str(tmp_path), max_context_tokens=CONTEXT, device="cpu", dtype="float32")
    for longest in (1, 2):
        cache, plan = random_step(model, random.Random(longest), longest)
        assert model._recorded.run(cache, plan, plan.last_R) is not None


def test_prompts_and_unlike_contexts_are_left_to_python() -> None:
    model = served()
    cache = model.new_cache(2, CONTEXT)
    plan = make_plan([[1] * 30, [1]], [0, 4], [0, 1], model.device)
    assert model._recorded.run(cache, plan, plan.last_R) is None


def test_many_rows_of_unlike_contexts_are_attended_apart_and_few_together_with_the_same_logits(tmp_path: Path) -> None:
    shutil.copytree(tiny_model("mistral"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1200}))
    model = ServedModel(str(tmp_path), max_context_tokens=1100, device="cpu", dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    chooser = random.Random(0)
    rows = [[chooser.randrange(VOCABULARY) for _ in range(length)] for length in (10, 1000, 200, *[30] * 17)]
    cache = model.new_cache(len(rows), 1100)
    slots = list(range(len(rows)))
    prompts = make_plan([row[:-1] for row in rows], [0] * len(rows), slots, model.device)
    model.forward(cache, prompts, prompts.last_R)
    with torch.inference_mode():
        expected = torch.stack([plain(input_ids=torch.tensor([row])).logits[0, -1] for row in rows[:4]])
    for number, num_groups in ((len(rows), 3), (4, 1)):
        plan = make_plan([row[-1:] for row in rows[:number]], [len(row) - 1 for row in rows[:number]], slots[:number], model.device)
        assert len(plan.groups) == num_groups
        torch.testing.assert_close(model.forward(cache, plan, plan.last_R)[:4], expected, atol=1e-4, rtol=0)


def recorded_with(model: ServedModel, forward: Forward) -> RecordedSteps:
    return RecordedSteps(model.model, forward, model.new_cache, model.shapes, model.vocabulary_size)


def assert_runs_in_python(model: ServedModel, recorded: RecordedSteps) -> None:
    assert recorded.failure is not None
    for tokens in ([[1], [2]], [[1, 2], [3]]):
        plan = make_plan(tokens, [3, 4], [0, 1], model.device)
        assert recorded.run(model.new_cache(2, CONTEXT), plan, plan.last_R) is None


def test_a_forward_that_looks_at_a_tensors_value_is_not_recorded() -> None:
    """As a mixture of experts that loops over those that were chosen."""
    model = served()

    def forward(cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        logits = model._forward_in_python(cache, plan, logits_at)
        return logits if float(logits.sum()) > -1e9 else -logits

    recorded = recorded_with(model, forward)
    assert_runs_in_python(model, recorded)
    assert "depends on a tensor's value" in str(recorded.failure)


def test_a_forward_that_keeps_something_between_calls_is_not_recorded() -> None:
    model = served()
    calls: list[Any] = []

    def forward(cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return model._forward_in_python(cache, plan, logits_at) + len(calls)

    recorded = recorded_with(model, forward)
    assert_runs_in_python(model, recorded)
    assert "gives other numbers" in str(recorded.failure)


def test_a_forward_that_raises_while_it_is_recorded_is_not_recorded() -> None:
    model = served()

    def forward(cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not this way")

    recorded = recorded_with(model, forward)
    assert_runs_in_python(model, recorded)
    assert recorded.failure == "recording its forward raised RuntimeError: not this way"


def test_a_sampler_says_why_its_model_could_not_be_recorded_and_nothing_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served().recording_failure is None
    plain = ServedModel._forward_in_python

    def forward(model: ServedModel, cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        logits = plain(model, cache, plan, logits_at)
        return logits if float(logits.sum()) > -1e9 else -logits

    monkeypatch.setattr(ServedModel, "_forward_in_python", forward)
    assert "depends on a tensor's value" in str(served().recording_failure)


def test_a_model_that_is_too_large_to_be_recorded_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sampler.recorded._MOST_PARAMETERS", 10)
    assert served().recording_failure is None


def test_recording_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    served()
    assert torch.equal(torch.rand(3), expected)
