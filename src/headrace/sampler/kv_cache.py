"""Static slot KV cache: per layer one tensor [slots, key-value heads, context, head size] for keys and one for values.

A slot holds one sequence: token i stands at position i. The cache never moves a sequence; attention gathers what it reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from headrace.sampler.attention import current_plan


class LayerShape(NamedTuple):
    """What one layer stores a token."""

    num_heads: int
    key_size: int
    value_size: int


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values. `update` writes the packed batch of the current plan and hands out the whole tensors."""

    is_sliding = False

    def __init__(self, shape: LayerShape, num_slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        # Zeros: a masked key still multiplies its value by 0, and 0 times whatever the memory held could be NaN.
        self.keys = torch.zeros(num_slots, shape.num_heads, context, shape.key_size, dtype=dtype, device=device)
        self.values = torch.zeros(num_slots, shape.num_heads, context, shape.value_size, dtype=dtype, device=device)
        self.is_initialized = True
        self.shape = shape
        self.context = context
        self._flat_keys = self.keys.view(-1, shape.key_size)
        self._flat_values = self.values.view(-1, shape.value_size)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states: [1, heads, N, size] of the packed tokens."""
        index = current_plan.get().write_index(self.shape.num_heads, self.context)
        self._flat_keys.index_copy_(0, index, key_states[0].transpose(0, 1).reshape(-1, self.shape.key_size))
        self._flat_values.index_copy_(0, index, value_states[0].transpose(0, 1).reshape(-1, self.shape.value_size))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.context


class ShapeRecorder(CacheLayerMixin):  # type: ignore[misc]
    """Stands in for a cache layer during one forward, to learn what the layer stores."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: LayerShape | None = None
        self.dtype: torch.dtype | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.shape = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.dtype = key_states.dtype
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """All layers' slots."""

    def __init__(self, shapes: list[LayerShape], num_slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[SlotLayer(shape, num_slots, context, dtype, device) for shape in shapes])
        self.num_slots = num_slots
        self.context = context

    def clear(self, slot: int) -> None:
        """Zeroes one slot, so that a NaN in it cannot reach the next sequence through masked positions."""
        for layer in self.layers:
            layer.keys[slot].zero_()
            layer.values[slot].zero_()


def slot_bytes(shapes: list[LayerShape], context: int, dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers."""
    return sum(shape.num_heads * (shape.key_size + shape.value_size) for shape in shapes) * context * dtype.itemsize
