"""Weight channel of one machine: shared memory without a name, two buffers, a seqlock. The writer never waits for a reader.

Layout: a header of int64 words, then two buffers that hold all parameters back to back.

    header: [started, newest, lineage of buffer 0, number of buffer 0, lineage of buffer 1, number of buffer 1]

Publish k fills buffer k % 2: it sets `started` to k, writes the version and the parameters, then sets `newest` to k. A reader
takes k from `newest`, copies the version and buffer k % 2 to a staging tensor, and looks at `started` again: what it copied is
whole unless publish k + 2 has begun, and then it retries with the newest. Only a whole, verified staging tensor is copied into
the model, so a forward never sees half an update (case 11). Each step is one aligned word, so a writer that is killed anywhere
leaves the last whole set readable, and its successor goes on from there.

The memory is a file that is unlinked before it is used: it lives as long as a process holds its descriptor and outlives no
crash (I13).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch

from headrace.errors import HeadraceError, ModelError, WaitTimeoutError
from headrace.types import PolicyVersion, WeightUpdate

_HEADER_WORDS = 8
_STARTED, _NEWEST, _VERSIONS = 0, 1, 2
_ALIGNMENT = 64
_READ_LIMIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where each parameter lies in a buffer. Both ends derive it from the same model, so a difference is a wrong model."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    offsets: tuple[int, ...]
    """Elements from the start of the buffer."""
    num_elements: int

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor]) -> ParameterLayout:
        dtypes = {parameter.dtype for parameter in parameters.values()}
        if len(dtypes) != 1:
            raise ModelError(f"The model's parameters have several dtypes ({', '.join(sorted(map(str, dtypes)))}): the weight channel carries one.")
        offsets, position = [], 0
        for parameter in parameters.values():
            offsets.append(position)
            position += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        return cls(
            names=tuple(parameters),
            shapes=tuple(tuple(parameter.shape) for parameter in parameters.values()),
            dtype=str(dtypes.pop()).removeprefix("torch."),
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


class SharedMemoryChannel:
    """The memory itself. Made by the runtime for `num_bytes` of parameters; sent to the learner and every sampler.

    Pickles only while a process is being started: the descriptor travels with it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.buffer_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        directory = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=directory) as file:
            size = mmap.PAGESIZE + 2 * self.buffer_bytes
            try:
                os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.truncate(size)
            except OSError as error:
                raise HeadraceError(
                    f"The weight channel needs {size / 2**20:.0f} MiB in {directory or tempfile.gettempdir()}: {error.strerror}.",
                    remedy="Free space there or enlarge it.",
                ) from error
            self._descriptor = os.dup(file.fileno())
        self._map()

    def _map(self) -> None:
        self._memory = mmap.mmap(self._descriptor, mmap.PAGESIZE + 2 * self.buffer_bytes)
        self.header = torch.frombuffer(self._memory, dtype=torch.int64, count=_HEADER_WORDS).numpy()

    def buffer(self, index: int, layout: ParameterLayout) -> torch.Tensor:
        """Flat [num_elements] view of buffer 0 or 1."""
        dtype: torch.dtype = getattr(torch, layout.dtype)
        if layout.num_elements * dtype.itemsize > self.buffer_bytes:
            raise ModelError(f"The model has {layout.num_elements * dtype.itemsize} bytes of parameters, the weight channel was made for {self.buffer_bytes}.")
        return torch.frombuffer(self._memory, dtype=dtype, count=layout.num_elements, offset=mmap.PAGESIZE + index * self.buffer_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"buffer_bytes": self.buffer_bytes, "descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.buffer_bytes = state["buffer_bytes"]
        self._descriptor = state["descriptor"].detach()
        self._map()


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
        if self._layout is None:
            self._layout = ParameterLayout.of(parameters)
        header = self._channel.header
        fill = int(header[_NEWEST]) + 1
        header[_STARTED] = fill
        slot = _VERSIONS + 2 * (fill % 2)
        header[slot], header[slot + 1] = version.lineage, version.number
        with torch.no_grad():
            for name, view in self._layout.views(self._channel.buffer(fill % 2, self._layout)).items():
                view.copy_(parameters[name])
        header[_NEWEST] = fill
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
            fill = int(header[_NEWEST])
            version = self._version_of(fill)
            if int(header[_STARTED]) < fill + 2:
                return version if fill else None

    def load_into(self, parameters: Mapping[str, torch.Tensor]) -> PolicyVersion:
        """Stages, verifies, then copies the newest whole set into these tensors in place."""
        if self._layout is None or self._staging is None:
            self._layout = ParameterLayout.of(parameters)
            self._staging = torch.empty(self._layout.num_elements, dtype=getattr(torch, self._layout.dtype))
        version = self._stage(self._layout, self._staging)
        with torch.no_grad():
            for name, view in self._layout.views(self._staging).items():
                parameters[name].copy_(view)
        return version

    def _stage(self, layout: ParameterLayout, staging: torch.Tensor) -> PolicyVersion:
        header = self._channel.header
        deadline = time.monotonic() + _READ_LIMIT_SECONDS
        while time.monotonic() < deadline:
            fill = int(header[_NEWEST])
            version = self._version_of(fill)
            staging.copy_(self._channel.buffer(fill % 2, layout))
            if int(header[_STARTED]) < fill + 2:
                return version
        raise WaitTimeoutError(f"No whole set of weights could be read in {_READ_LIMIT_SECONDS:g} s: the learner publishes faster than this sampler copies.")

    def _version_of(self, fill: int) -> PolicyVersion:
        slot = _VERSIONS + 2 * (fill % 2)
        return PolicyVersion(int(self._channel.header[slot]), int(self._channel.header[slot + 1]))


def parameter_bytes(directory: Path | str) -> int:
    """Bytes the parameters of a Hugging Face directory take in memory order, with room for alignment; reads headers only."""
    from safetensors import safe_open

    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory}: no *.safetensors file.", remedy="Save the model with save_pretrained.")
    elements, tensors = 0, 0
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                size = 1
                for extent in content.get_slice(name).get_shape():
                    size *= extent
                elements += size
                tensors += 1
    return 4 * (elements + _ALIGNMENT * tensors)  # float32 is the widest dtype headrace serves
