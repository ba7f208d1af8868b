"""LoRA: only adapters are trained and published, the sampler and the learner agree, checkpoints are plain models and adapters too."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fakes.learner_material import QWEN2, action_logprobs, full_logprobs, make_selection, make_settings, make_trajectory, mixed_trajectories, save_model
from fakes.sampling import Replay, beside, make_sampler, request, turns
from fakes.tiny_models import tiny_model
from fakes.weights import FakeWeights
from headrace.clock import run_virtual
from headrace.errors import CheckpointError, ModelError
from headrace.learner.core import LearnerRank, init_ranks, load_model, shutdown_ranks
from headrace.learner.lora import Adapters, adapter_layout
from headrace.learner.state_memory import StateMemory
from headrace.types import Completion, PolicyVersion
from headrace.updates import Selection
from headrace.weights.adapters import AdapterReader

KINDS = ["qwen2", "llama", "gpt2"]
LORA = {"lora_rank": 3, "lora_alpha": 6}
NO_CLIP = 1e9


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(tmp_path_factory.mktemp("model") / "qwen2")


def make_rank(
    path: Path, *, dtype: torch.dtype = torch.float32, writer: Any = None, memory: Any = None, model: Mapping[str, Any] = LORA, **learner: Any
) -> LearnerRank:
    settings = make_settings(learner=learner, model={"path": "x", **model})
    return LearnerRank(path, settings, device="cpu", parameter_dtype=dtype, writer=writer, memory=memory)


def scramble(rank: LearnerRank, seed: int = 0, scale: float = 0.3) -> None:
    """Adapters as after many updates: B is not 0."""
    generator = torch.Generator().manual_seed(seed)
    assert rank._adapters is not None
    with torch.no_grad():
        for parameter in rank._adapters.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def all_values(rank: LearnerRank) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank.model.named_parameters()}


def merged(rank: LearnerRank) -> dict[str, torch.Tensor]:
    assert rank._adapters is not None
    return {name: value.clone() for name, value in rank._adapters.merged_state()}


def test_an_update_trains_adapters_and_nothing_else(model_path: Path) -> None:
    rank = make_rank(model_path)
    before = all_values(rank)
    for seed in (1, 2):  # B is 0 at first, so A moves with the second
        rank.learn(make_selection(mixed_trajectories(seed)))
    changed = {name for name, value in all_values(rank).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_before_the_first_update_the_policy_is_the_model(model_path: Path) -> None:
    rank, plain = make_rank(model_path), load_model(str(model_path), torch.float32, torch.device("cpu"))
    assert all(torch.equal(merged(rank)[name], value) for name, value in plain.state_dict().items())


def test_every_rank_draws_the_same_adapters_and_the_global_random_state_is_left_alone(model_path: Path) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_rank(model_path)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(all_values(first).values(), all_values(make_rank(model_path)).values(), strict=True))


def learned_gradients(rank: LearnerRank, selection: Selection) -> dict[str, torch.Tensor]:
    """Of the update's loss, at the weights before it."""
    rank.learn(selection)
    return {name: parameter.grad.clone() for name, parameter in rank.model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_the_gradient_is_the_chain_rule_on_that_of_the_merged_model(model_path: Path, tmp_path: Path, loss: str) -> None:
    """dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW, with dL/dW from a learner that trains every weight."""
    rank = make_rank(model_path, dtype=torch.float64, loss=loss, max_gradient_norm=NO_CLIP)
    scramble(rank)
    adapters = {name: value for name, value in all_values(rank).items() if "lora_" in name}
    assert rank._adapters is not None
    rank._adapters.save(tmp_path)
    full = LearnerRank(tmp_path, make_settings(learner={"loss": loss, "max_gradient_norm": NO_CLIP}), device="cpu", parameter_dtype=torch.float64)
    selection = make_selection(mixed_trajectories(3))
    of_weights, of_adapters = learned_gradients(full, selection), learned_gradients(rank, selection)
    assert len(of_adapters) == 2 * len(rank._adapters.layout.weights)
    for weight in rank._adapters.layout.weights:
        path = weight.name.removesuffix(".weight")
        a, b = f"{path}.lora_A.default.weight", f"{path}.lora_B.default.weight"
        torch.testing.assert_close(of_adapters[b], 2.0 * of_weights[weight.name] @ adapters[a].T, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(of_adapters[a], 2.0 * adapters[b].T @ of_weights[weight.name], rtol=1e-8, atol=1e-12)


def test_the_gradient_does_not_depend_on_micro_batches(model_path: Path) -> None:
    """I8, padding included: one row at a time against all in one."""
    found = []
    for budget in (16, 8192):
        rank = make_rank(model_path, dtype=torch.float64, micro_batch_tokens=budget, max_gradient_norm=NO_CLIP, kl_coefficient=0.1)
        scramble(rank)
        found.append(learned_gradients(rank, make_selection(mixed_trajectories(5))))
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-9, atol=1e-13)


def _learn_twice(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    settings = make_settings(model={"path": "x", **LORA}, learner={"kl_coefficient": 0.1, "micro_batch_tokens": 48})
    member = LearnerRank(path, settings, rank=rank, world_size=world_size, device="cpu", parameter_dtype=torch.float64)
    for seed in (1, 2):
        member.learn(make_selection(mixed_trajectories(seed)))
    return {name: parameter.detach().numpy() for name, parameter in member.model.named_parameters() if parameter.requires_grad}


def _run_rank(rank: int, address: str, path: Path, out: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    init_ranks(rank, 2, address, timeout_seconds=60)
    out.put((rank, _learn_twice(path, rank, 2)))
    shutdown_ranks()
    out.close()


@pytest.mark.slow
def test_two_ranks_end_with_the_adapters_of_one(model_path: Path, tmp_path: Path) -> None:
    """I8 over real processes, which start with unlike random states."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.learner.core", "fakes.learner_material"])
    out = context.Queue()
    processes = [context.Process(target=_run_rank, args=(rank, f"file://{tmp_path}/ranks", model_path, out)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        alone = _learn_twice(model_path, 0, 1)
        together = dict(out.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    for name, expected in alone.items():
        assert (together[0][name] == together[1][name]).all()
        assert abs(together[0][name] - expected).max() < 1e-9, name


def test_the_reference_model_is_the_one_without_adapters(model_path: Path) -> None:
    """The reported KL to the reference, against plain transformers models: the merged one and the one that training started from."""
    rank = make_rank(model_path, dtype=torch.float64, kl_coefficient=0.1)
    scramble(rank)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64).eval()
    policy.load_state_dict(merged(rank))
    trajectories = mixed_trajectories(4)
    with torch.no_grad():
        pairs = [(action_logprobs(plain, one), action_logprobs(policy, one)) for one in trajectories]
    expected = torch.cat([torch.exp(ref - own) - (ref - own) - 1 for ref, own in pairs]).mean()
    statistics = rank.learn(make_selection(trajectories)).statistics
    assert statistics is not None and statistics.reference_kl == pytest.approx(float(expected), rel=1e-6)
    assert float(expected) > 1e-3
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in rank.model.named_parameters())  # switched on again


# --- the sampler


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_learner_agree_on_every_token_also_of_updates_in_flight(kind: str) -> None:
    """I3: the reference is plain transformers with the learner's merged weights of the version that each token's span names."""
    weights = FakeWeights()
    rank = make_rank(tiny_model(kind), writer=weights)
    layout = adapter_layout(str(tiny_model(kind)), rank._settings)
    assert layout is not None and rank._adapters is not None and layout == rank._adapters.layout
    sampler = make_sampler(kind, weights=AdapterReader(weights, layout), max_running=8)
    history: dict[PolicyVersion, dict[str, torch.Tensor]] = {}

    def publish(number: int) -> None:
        scramble(rank, seed=number)
        rank._version = PolicyVersion(0, number)
        history[rank._version] = {name: value for name, value in merged(rank).items() if name in sampler._model.parameters}
        assert rank.publish().num_bytes == 4 * sum(rows * columns for rows, columns in layout.shapes().values())

    async def publish_all() -> None:
        for number in range(2, 8):
            await turns(3)
            publish(number)

    async def main() -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            group.create_task(publish_all())
            tasks = [group.create_task(sampler.sample(request([1, 2, 3 + index], group=index, max_action_tokens=20))) for index in range(6)]
        return [task.result() for task in tasks]

    publish(1)
    completions = run_virtual(beside(sampler, main()))
    replay = Replay(kind, history)
    from transformers import DynamicCache

    for index, completion in enumerate(completions):
        expected, _ = replay.logprobs([1, 2, 3 + index], completion, cache=DynamicCache())
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(completion.version_spans) > 2
    # what was drawn under the newest weights alone, scored by the learner's own model: adapters beside the weights, not merged
    (last,) = run_virtual(beside(sampler, _sample_one(sampler)))
    context = [1, 2, 3]
    with torch.no_grad():
        rows = torch.log_softmax(rank.model(input_ids=torch.tensor([[*context, *last.tokens]])).logits[0].double(), -1)
    own = [float(rows[len(context) - 1 + index, token]) for index, token in enumerate(last.tokens)]
    assert last.logprobs == pytest.approx(own, abs=1e-4)


async def _sample_one(sampler: Any) -> list[Completion]:
    return [await sampler.sample(request([1, 2, 3], max_action_tokens=30))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_trains_on_what_its_sampler_drew_sees_ratios_of_one(kind: str) -> None:
    """I3 and I9 through the learner's own statistics."""
    import numpy as np

    weights = FakeWeights()
    rank = make_rank(tiny_model(kind), writer=weights)
    scramble(rank)
    rank.publish()
    assert rank._adapters is not None
    sampler = make_sampler(kind, weights=AdapterReader(weights, rank._adapters.layout))

    async def draw() -> list[Completion]:
        return [await sampler.sample(request([1, 2, 3], group=member, max_action_tokens=9)) for member in range(4)]

    trajectories = []
    for member, completion in enumerate(run_virtual(beside(sampler, draw()))):
        made = make_trajectory(np.random.default_rng(0), group=0, member=member, reward=float(member), steps=[(3, 9, [(0, 9)], 0.0)])
        trajectories.append(_replaced(made, (1, 2, 3, *completion.tokens), completion.logprobs))
    statistics = rank.learn(make_selection(trajectories)).statistics
    assert statistics is not None
    assert abs(statistics.ratio_max - 1) < 1e-3 and abs(statistics.kl_sampler_learner) < 1e-4


def _replaced(trajectory: Any, tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Any:
    import dataclasses

    return dataclasses.replace(trajectory, tokens=tokens, sampler_logprobs=logprobs)


def test_in_low_precision_adapters_are_trained_and_published_in_float32(model_path: Path) -> None:
    weights = FakeWeights()
    rank = make_rank(model_path, model={**LORA, "dtype": "bfloat16"}, writer=weights)
    for seed in (1, 2):
        assert rank.learn(make_selection(mixed_trajectories(seed))).refused is None
    rank.publish()
    assert rank._adapters is not None
    (published,) = weights.history.values()
    assert [(name, value.dtype) for name, value in published.items()] == [(name, torch.float32) for name in rank._adapters.layout.shapes()]
    assert all(torch.equal(value, own) for value, own in zip(published.values(), rank._adapters.parameters(), strict=True))


# --- checkpoints


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_loads_as_a_plain_model_and_as_an_adapter(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    rank = make_rank(tiny_model(kind))
    scramble(rank)
    rank.save(tmp_path / "c")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "c").eval()
    assert "peft" not in type(plain).__module__ and not any("lora" in name for name, _ in plain.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected, of_base = rank.model(input_ids=tokens).logits, base(input_ids=tokens).logits
        with_adapter = PeftModel.from_pretrained(base, tmp_path / "c" / "adapter")
        torch.testing.assert_close(plain(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(with_adapter(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - of_base).abs().max() > 0.1


def test_the_update_after_a_restore_is_exactly_the_one_that_would_have_been(model_path: Path, tmp_path: Path) -> None:
    rank = make_rank(model_path)
    for seed in (1, 2):
        rank.learn(make_selection(mixed_trajectories(seed)))
    rank.save(tmp_path / "two")
    on, restored = rank.learn(make_selection(mixed_trajectories(3))), make_rank(model_path)
    restored.load(tmp_path / "two")
    assert restored.version == PolicyVersion(1, 2)
    again = restored.learn(make_selection(mixed_trajectories(3)))
    assert all(torch.equal(a, b) for a, b in zip(all_values(rank).values(), all_values(restored).values(), strict=True))
    assert again.statistics == on.statistics


def test_a_copy_in_memory_holds_the_adapters_alone_and_is_exact(model_path: Path) -> None:
    memory = StateMemory()
    rank, successor = make_rank(model_path, memory=memory), make_rank(model_path, memory=memory)
    rank.learn(make_selection(mixed_trajectories(1)))
    rank.copy()
    assert b"weight.model.layers.0" in memory.read(PolicyVersion(0, 1)) and b"embed_tokens" not in memory.read(PolicyVersion(0, 1))
    on = rank.learn(make_selection(mixed_trajectories(2)))
    successor.load_copy(PolicyVersion(0, 1), lineage=1)
    again = successor.learn(make_selection(mixed_trajectories(2)))
    assert all(torch.equal(a, b) for a, b in zip(all_values(rank).values(), all_values(successor).values(), strict=True))
    assert again.statistics == on.statistics


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora_rank": 0}, "it holds an adapter, this run trains all weights"),
        ({"lora_rank": 2}, "rank and alpha are 3 and 6, this run's are 2 and 16"),
        ({"lora_rank": 3, "lora_alpha": 5}, "rank and alpha are 3 and 6, this run's are 3 and 5"),
        ({**LORA, "lora_targets": ["q_proj"]}, "adapts other layers"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_and_changes_nothing(model_path: Path, tmp_path: Path, model: dict[str, Any], message: str) -> None:
    rank = make_rank(model_path)
    scramble(rank)
    rank.save(tmp_path / "c")
    other = make_rank(model_path, model=model)
    before = all_values(other)
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path / "c")
    assert other.version == PolicyVersion(0, 0)
    assert all(torch.equal(value, before[name]) for name, value in all_values(other).items())


def test_a_checkpoint_without_adapter_is_refused(model_path: Path, tmp_path: Path) -> None:
    make_rank(model_path, model={}).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no adapter, this run trains LoRA adapters"):
        make_rank(model_path).load(tmp_path / "c")


def test_a_checkpoint_made_from_another_model_is_refused_and_changes_nothing(model_path: Path, tmp_path: Path) -> None:
    other = make_rank(save_model(tmp_path / "other", QWEN2, seed=5))
    scramble(other)
    other.save(tmp_path / "c")
    rank = make_rank(model_path)
    before = all_values(rank)
    with pytest.raises(CheckpointError, match="starts from another model"):
        rank.load(tmp_path / "c")
    assert all(torch.equal(value, before[name]) for name, value in all_values(rank).items())


@pytest.mark.parametrize("damaged", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused_and_changes_nothing(model_path: Path, tmp_path: Path, damaged: str) -> None:
    make_rank(model_path).save(tmp_path / "c")
    (tmp_path / "c" / "adapter" / damaged).write_bytes(b"{}")
    rank = make_rank(model_path)
    before = all_values(rank)
    with pytest.raises(CheckpointError, match="not a whole learner checkpoint"):
        rank.load(tmp_path / "c")
    assert all(torch.equal(value, before[name]) for name, value in all_values(rank).items())


def test_the_optimizer_holds_state_of_adapters_only(model_path: Path, tmp_path: Path) -> None:
    rank = make_rank(model_path)
    rank.learn(make_selection(mixed_trajectories(1)))
    rank.save(tmp_path / "c")
    from safetensors.torch import load_file

    moments = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert moments and all("lora_" in name for name in moments)
    assert json.loads((tmp_path / "c" / "learner.json").read_text())["settings"]["model"]["lora_rank"] == 3


# --- which layers


def test_by_default_every_linear_layer_but_the_output_has_an_adapter_and_targets_choose(model_path: Path) -> None:
    def names(**more: Any) -> list[str]:
        layout = adapter_layout(str(model_path), make_settings(model={"path": "x", **LORA, **more}))
        assert layout is not None and layout.scale == 2.0
        return [weight.name for weight in layout.weights]

    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names() == [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in layers]
    assert names(lora_targets=["v_proj"]) == [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)]
    assert adapter_layout(str(model_path), make_settings()) is None


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prog"], r"q_prog.*Layers of this model: .*q_proj"),
        (["lm_head"], "lm_head shares its weights with the input embedding"),
        (["embed_tokens"], "embed_tokens is a Embedding|embed_tokens shares"),
    ],
)
def test_a_wrong_target_is_named_before_anything_starts(model_path: Path, targets: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        adapter_layout(str(model_path), make_settings(model={"path": "x", "lora_rank": 2, "lora_targets": targets}))


def test_without_peft_the_error_says_what_to_install(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelError, match=r"model.lora_rank is 3.*pip install peft"):
        Adapters(load_model(str(model_path), torch.float32, torch.device("cpu")), make_settings(model={"path": "x", **LORA}))


def test_logits_of_the_learner_are_those_of_the_merged_model(model_path: Path) -> None:
    rank = make_rank(model_path)
    scramble(rank)
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    plain.load_state_dict(merged(rank))
    (trajectory,) = mixed_trajectories(0, groups=1, size=1)
    with torch.no_grad():
        torch.testing.assert_close(full_logprobs(rank.model, trajectory), full_logprobs(plain, trajectory), rtol=1e-4, atol=1e-4)
