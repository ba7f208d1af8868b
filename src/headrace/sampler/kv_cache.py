"""Static slot KV cache: per layer one tensor [slots, key-value heads, context, head size] for keys and one for values.

A slot holds one sequence: token i stands at position i. The cache never moves a sequence; attention gathers what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from headrace.sampler.attention import LayerShape, current_plan


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values. `update` writes the packed batch of the current plan and hands out the whole tensors."""

    is_sliding = False

    def __init__(self, shape: LayerShape, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys and values: [slots, heads, context, size]."""
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.shape = shape
        self.context = keys.shape[2]
        self._flat_keys = keys.view(-1, shape.key_size)
        self._flat_values = values.view(-1, shape.value_size)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states: [1, heads, N, size] of the packed tokens."""
        plan = current_plan.get()
        plan.layer = self.shape
        index = plan.write_index(self.shape.num_heads, self.context)
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
        self.shape = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1], key_states.shape[1])
        self.dtype = key_states.dtype
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """All layers' slots: `stores` are keys and values of layer 0, keys and values of layer 1, ..., each [slots, heads, context, size]."""

    def __init__(self, shapes: Sequence[LayerShape], stores: Sequence[torch.Tensor]) -> None:
        super().__init__(layers=[SlotLayer(shape, stores[2 * layer], stores[2 * layer + 1]) for layer, shape in enumerate(shapes)])
        self.stores = tuple(stores)

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape], num_slots: int, context: int, dtype: torch.dtype, device: torch.device) -> SlotCache:
        # Zeros: a masked key still multiplies its value by 0, and 0 times whatever the memory held could be NaN.
        sizes = [(shape.num_heads, size) for shape in shapes for size in (shape.key_size, shape.value_size)]
        return cls(shapes, [torch.zeros(num_slots, heads, context, size, dtype=dtype, device=device) for heads, size in sizes])

    def clear(self, slot: int) -> None:
        """Zeroes one slot, so that a NaN in it cannot reach the next sequence through masked positions."""
        for layer in self.layers:
            layer.keys[slot].zero_()
            layer.values[slot].zero_()


def slot_bytes(shapes: Sequence[LayerShape], context: int, dtype: torch.dtype) -> int:
    """Bytes of one slot over all layers."""
    return sum(shape.num_heads * (shape.key_size + shape.value_size) for shape in shapes) * context * dtype.itemsize
