"""Updates of LoRA adapters only: a reader that merges them into the sampler's weights, so that the engine need not know.

The model keeps its plain form: W = W0 + scale * B A, computed anew from W0 at each update, so that no rounding adds up over updates.
Memory: a copy of every adapted matrix (W0) in the model's dtype; the update itself is rank * (rows + columns) float32 numbers a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.errors import ModelError
from headrace.roles import WeightReader
from headrace.types import PolicyVersion
from headrace.updates import AdaptedWeight, AdapterLayout
from headrace.weights.shared_memory import ALIGNMENT


class AdapterReader:
    """roles.WeightReader over a reader of adapters; the first load takes what the parameters hold then as W0."""

    def __init__(self, reader: WeightReader, layout: AdapterLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._adapters = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in layout.shapes().items()}
        self._base: dict[str, torch.Tensor] = {}

    def newest_version(self) -> PolicyVersion | None:
        return self._reader.newest_version()

    def load_into(self, parameters: Mapping[str, torch.Tensor]) -> PolicyVersion:
        """Reads the newest whole set of adapters, then writes every merged matrix in place. Computes in float32, rounds once."""
        if not self._base:
            self._base = {weight.name: _adapted(parameters, weight).detach().clone() for weight in self._layout.weights}
        version = self._reader.load_into(self._adapters)
        with torch.no_grad():
            for weight in self._layout.weights:
                base = self._base[weight.name]
                change = self._adapters[weight.b_name].to(base.device) @ self._adapters[weight.a_name].to(base.device)
                merged = torch.add(base, change.T if weight.transposed else change, alpha=self._layout.scale)
                parameters[weight.name].copy_(merged)
        return version


def adapter_bytes(layout: AdapterLayout) -> int:
    """Bytes of one published set of adapters, with room for alignment."""
    return 4 * sum(rows * columns + ALIGNMENT for rows, columns in layout.shapes().values())


def _adapted(parameters: Mapping[str, torch.Tensor], weight: AdaptedWeight) -> torch.Tensor:
    shape = (weight.columns, weight.rows) if weight.transposed else (weight.rows, weight.columns)
    found = parameters.get(weight.name)
    if found is None or tuple(found.shape) != shape:
        what = "has no such parameter" if found is None else f"has one of shape {tuple(found.shape)}"
        raise ModelError(f"An adapter changes {weight.name} of shape {shape}, but the sampler's model {what}: the learner's is another model.")
    return found
