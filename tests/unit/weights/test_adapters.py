"""Adapter-only updates: merged exactly, from the same W0 each time, whole or not at all."""

from __future__ import annotations

import pytest
import torch

from fakes.weights import FakeWeights
from headrace.errors import ModelError
from headrace.types import PolicyVersion
from headrace.updates import AdaptedWeight, AdapterLayout
from headrace.weights.adapters import AdapterReader, adapter_bytes
from headrace.weights.channel import SharedMemoryChannel
from headrace.weights.shared_memory import SharedMemoryReader, SharedMemoryWriter

LAYOUT = AdapterLayout(
    rank=2,
    scale=4.0,
    weights=(
        AdaptedWeight(name="up.weight", rows=6, columns=3, transposed=False),
        AdaptedWeight(name="conv.weight", rows=5, columns=5, transposed=True),  # square: the shape alone does not tell
    ),
)


def adapters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in LAYOUT.shapes().items()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    shapes = {"embed.weight": (7, 3), "up.weight": (6, 3), "conv.weight": (5, 5)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def by_hand(base: dict[str, torch.Tensor], update: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W0 + 4 B A, written out in float64, from the definition."""
    merged = {name: tensor.double() for name, tensor in base.items()}
    for name in ("up.weight", "conv.weight"):
        change = 4.0 * torch.einsum("or,ri->oi", update[f"{name}.lora_B"].double(), update[f"{name}.lora_A"].double())
        merged[name] = merged[name] + (change.t() if name == "conv.weight" else change)
    return merged


def test_merged_weights_are_those_of_the_definition_also_where_a_matrix_is_stored_transposed() -> None:
    weights, mine, base = FakeWeights(), parameters(), parameters()
    reader = AdapterReader(weights, LAYOUT)
    assert reader.newest_version() is None
    weights.publish(adapters(0), PolicyVersion(0, 3))
    assert reader.newest_version() == PolicyVersion(0, 3)
    assert reader.load_into(mine) == PolicyVersion(0, 3)
    for name, expected in by_hand(base, adapters(0)).items():
        torch.testing.assert_close(mine[name].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine["embed.weight"], base["embed.weight"])


def test_merging_a_thousand_times_adds_up_no_error() -> None:
    weights, mine, base = FakeWeights(), parameters(), parameters()
    reader = AdapterReader(weights, LAYOUT)
    for number in range(1000):
        weights.publish({name: 100 * tensor for name, tensor in adapters(number).items()}, PolicyVersion(0, number))
        reader.load_into(mine)
    weights.publish({name: torch.zeros_like(tensor) for name, tensor in adapters(0).items()}, PolicyVersion(0, 1000))
    reader.load_into(mine)
    assert all(torch.equal(mine[name], base[name]) for name in base)


def test_in_bfloat16_only_the_sum_is_rounded() -> None:
    weights, mine, base = FakeWeights(), parameters(torch.bfloat16), parameters(torch.bfloat16)
    weights.publish(adapters(5), PolicyVersion(0, 1))
    AdapterReader(weights, LAYOUT).load_into(mine)
    for name, expected in by_hand(base, adapters(5)).items():
        assert mine[name].dtype is torch.bfloat16
        torch.testing.assert_close(mine[name].double(), expected, rtol=2**-8, atol=1e-6)


def test_through_shared_memory_only_the_adapters_travel() -> None:
    channel = SharedMemoryChannel(adapter_bytes(LAYOUT))
    mine = parameters()
    update = SharedMemoryWriter(channel).publish(adapters(1), PolicyVersion(0, 1))
    assert update.num_bytes <= adapter_bytes(LAYOUT)
    AdapterReader(SharedMemoryReader(channel), LAYOUT).load_into(mine)
    torch.testing.assert_close(mine["up.weight"].double(), by_hand(parameters(), adapters(1))["up.weight"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "shape", "what"), [("up.weight", None, "no such parameter"), ("conv.weight", (5, 4), r"shape \(5, 4\)")])
def test_another_model_is_refused_before_a_weight_is_written(name: str, shape: tuple[int, int] | None, what: str) -> None:
    weights, mine = FakeWeights(), parameters()
    del mine[name]
    if shape is not None:
        mine[name] = torch.zeros(shape)
    before = {key: tensor.clone() for key, tensor in mine.items()}
    weights.publish(adapters(0), PolicyVersion(0, 1))
    with pytest.raises(ModelError, match=what):
        AdapterReader(weights, LAYOUT).load_into(mine)
    assert all(torch.equal(mine[key], before[key]) for key in before)
