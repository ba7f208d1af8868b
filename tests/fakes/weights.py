"""A weight channel in memory: both ends in one object. Checks what the real one checks, so that a misuse fails here too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headrace.types import PolicyVersion
from headrace.updates import WeightUpdate


class FakeWeights:
    """roles.WeightWriter and roles.WeightReader. `loads` notes every version that a reader took."""

    def __init__(self) -> None:
        self.history: dict[PolicyVersion, dict[str, torch.Tensor]] = {}
        self.loads: list[PolicyVersion] = []
        self._newest: PolicyVersion | None = None

    def publish(self, parameters: Mapping[str, Any], version: PolicyVersion) -> WeightUpdate:
        if self._newest is not None and version <= self._newest:
            raise ValueError(f"published version {version} does not rise above {self._newest}")
        self.history[version] = {name: tensor.detach().clone() for name, tensor in parameters.items()}
        self._newest = version
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.history[version].values())
        return WeightUpdate(version=version, num_bytes=size, publish_seconds=0.0)

    def newest_version(self) -> PolicyVersion | None:
        return self._newest

    def load_into(self, parameters: Mapping[str, Any]) -> PolicyVersion:
        assert self._newest is not None, "load_into before the first publish"
        weights = self.history[self._newest]
        assert weights.keys() == parameters.keys(), sorted(weights.keys() ^ parameters.keys())
        with torch.no_grad():
            for name, tensor in parameters.items():
                tensor.copy_(weights[name])
        self.loads.append(self._newest)
        return self._newest
