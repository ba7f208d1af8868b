"""Both ends of the weight channel of one machine (weights/channel.py holds the memory and the rules of reading and writing)."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.errors import ModelError, WaitTimeoutError
from headrace.types import PolicyVersion
from headrace.updates import WeightUpdate
from headrace.weights.channel import DTYPE, NEWEST, STARTED, VERSIONS, SharedMemoryChannel

ALIGNMENT = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""In the order of their codes in the header, from 1."""
_READ_LIMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where each parameter lies in a buffer. Both ends derive it from the same model, so a difference is a wrong model.

    All parameters travel in one dtype, the writer's choice, named in the channel's header; readers cast to what their parameters have
    (a model in bfloat16 may keep a few of them in float32).
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    offsets: tuple[int, ...]
    """Elements from the start of the buffer."""
    num_elements: int

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ParameterLayout:
        offsets, position = [], 0
        for parameter in parameters.values():
            offsets.append(position)
            position += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        return cls(
            names=tuple(parameters),
            shapes=tuple(tuple(parameter.shape) for parameter in parameters.values()),
            dtype=str(dtype).removeprefix("torch."),
            offsets=tuple(offsets),
            num_elements=position,
        )

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters as views into a flat [num_elements] buffer."""
        result = {}
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            size = 1
            for extent in shape:
                size *= extent
            result[name] = buffer[offset : offset + size].view(shape)
        return result


def _channel_dtype(parameters: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The narrowest that holds every parameter exactly."""
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters.values()})
    if dtype not in _DTYPES:
        raise ModelError(f"The weight channel carries {', '.join(map(str, _DTYPES))}, the model's parameters are {dtype}.", remedy="Correct model.dtype.")
    return dtype


def _buffer(channel: SharedMemoryChannel, index: int, layout: ParameterLayout) -> torch.Tensor:
    """Flat [num_elements] view of buffer 0 or 1."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    num_bytes = layout.num_elements * dtype.itemsize
    if num_bytes > channel.buffer_bytes:
        raise ModelError(f"The model has {num_bytes} bytes of parameters, the weight channel was made for {channel.buffer_bytes}.")
    return torch.frombuffer(channel.memory, dtype=dtype, count=layout.num_elements, offset=channel.buffer_offset(index))


class SharedMemoryWriter:
    """The learner's end (roles.WeightWriter)."""

    def __init__(self, channel: SharedMemoryChannel) -> None:
        self._channel = channel
        self._layout: ParameterLayout | None = None
        self._version: PolicyVersion | None = None

    def publish(self, parameters: Mapping[str, torch.Tensor], version: PolicyVersion) -> WeightUpdate:
        """Copies the parameters out and makes them the newest. Raises ValueError unless the version rises (I1)."""
        if self._version is not None and version <= self._version:
            raise ValueError(f"version {version} does not rise above {self._version}")
        start = time.perf_counter()
        header = self._channel.header
        if self._layout is None:
            dtype = _channel_dtype(parameters)
            self._layout = ParameterLayout.of(parameters, dtype)
            header[DTYPE] = _DTYPES.index(dtype) + 1
        fill = int(header[NEWEST]) + 1
        header[STARTED] = fill
        slot = VERSIONS + 2 * (fill % 2)
        header[slot], header[slot + 1] = version.lineage, version.number
        with torch.no_grad():
            for name, view in self._layout.views(_buffer(self._channel, fill % 2, self._layout)).items():
                view.copy_(parameters[name])
        header[NEWEST] = fill
        self._version = version
        num_bytes = self._layout.num_elements * getattr(torch, self._layout.dtype).itemsize
        return WeightUpdate(version=version, num_bytes=num_bytes, publish_seconds=time.perf_counter() - start)


class SharedMemoryReader:
    """A sampler's end (roles.WeightReader)."""

    def __init__(self, channel: SharedMemoryChannel) -> None:
        self._channel = channel
        self._layout: ParameterLayout | None = None
        self._staging: torch.Tensor | None = None

    def newest_version(self) -> PolicyVersion | None:
        header = self._channel.header
        while True:
            fill = int(header[NEWEST])
            version = self._version_of(fill)
            if int(header[STARTED]) < fill + 2:
                return version if fill else None

    def load_into(self, parameters: Mapping[str, torch.Tensor]) -> PolicyVersion:
        """Stages, verifies, then copies the newest whole set into these tensors in place."""
        if self._layout is None or self._staging is None:
            dtype = _DTYPES[int(self._channel.header[DTYPE]) - 1]
            self._layout = ParameterLayout.of(parameters, dtype)
            on_cuda = any(parameter.is_cuda for parameter in parameters.values())
            self._staging = torch.empty(self._layout.num_elements, dtype=dtype, pin_memory=on_cuda)
        version = self._stage(self._layout, self._staging)
        with torch.no_grad():
            for name, view in self._layout.views(self._staging).items():
                parameters[name].copy_(view)
        return version

    def _stage(self, layout: ParameterLayout, staging: torch.Tensor) -> PolicyVersion:
        header = self._channel.header
        deadline = time.monotonic() + _READ_LIMIT_SECONDS
        while time.monotonic() < deadline:
            fill = int(header[NEWEST])
            version = self._version_of(fill)
            staging.copy_(_buffer(self._channel, fill % 2, layout))
            if int(header[STARTED]) < fill + 2:
                return version
        raise WaitTimeoutError(f"No whole set of weights could be read in {_READ_LIMIT_SECONDS:g} s: the learner publishes faster than this sampler copies.")

    def _version_of(self, fill: int) -> PolicyVersion:
        slot = VERSIONS + 2 * (fill % 2)
        return PolicyVersion(int(self._channel.header[slot]), int(self._channel.header[slot + 1]))


def parameter_bytes(directory: Path | str) -> int:
    """Bytes the parameters of a Hugging Face directory take in memory order, with room for alignment; reads headers only."""
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory}: no *.safetensors file.", remedy="Save the model with save_pretrained.")
    elements, tensors = 0, 0
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as content:
                shapes = [content.get_slice(name).get_shape() for name in content.keys()]  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: not a whole safetensors file: {error}", remedy="Download or save the model again.") from error
        elements += sum(math.prod(shape) for shape in shapes)
        tensors += len(shapes)
    return 4 * (elements + ALIGNMENT * tensors)  # float32 is the widest dtype headrace serves
