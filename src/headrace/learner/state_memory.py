"""Memory for the newest state of a learner that outlives its process: two files without a name, written in turn.

The runtime makes it and keeps it; every learner is sent it when it starts. A state is what checkpoints.py makes of one. Its header is
cleared before it is written and filled in afterwards, so a learner that is killed meanwhile leaves the other file's state whole.

The files are unlinked before they are used, as the weight channel's is: they live as long as a process holds them and outlive no crash (I13).
"""

from __future__ import annotations

import os
import struct
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

from headrace.errors import CheckpointError
from headrace.types import PolicyVersion

_HEADER = struct.Struct("=qqq")
"""Bytes of the state, lineage, number; no bytes: no state."""


class StateMemory:
    """Pickles only while a process is being started: the descriptors travel with it."""

    def __init__(self) -> None:
        directory = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
        self._directory = directory or tempfile.gettempdir()
        files = [tempfile.TemporaryFile(dir=directory) for _ in range(2)]  # noqa: SIM115 (their descriptors are kept, they are not)
        self._descriptors = [os.dup(file.fileno()) for file in files]
        for file in files:
            file.close()
        self._kept = 1
        """The file that holds the state to go on from: the other one is written next."""

    def write(self, version: PolicyVersion, state: bytes) -> None:
        """In place of the older one. Raises CheckpointError when there is no room; then the newer one is still there."""
        index = 1 - self._kept
        descriptor = self._descriptors[index]
        try:
            os.ftruncate(descriptor, 0)
            _write(descriptor, state, offset=_HEADER.size)
            _write(descriptor, _HEADER.pack(len(state), *version), offset=0)
        except OSError as error:
            raise CheckpointError(
                f"The copy of the learner's state needs twice {len(state) / 2**20:.0f} MiB in {self._directory}: {error.strerror}.",
                remedy="Free space there or enlarge it, or set checkpoint.memory_copy = false.",
            ) from error
        self._kept = index

    def read(self, version: PolicyVersion) -> bytes:
        """It is kept until the next one is whole. Raises CheckpointError when it is not there."""
        for index, descriptor in enumerate(self._descriptors):
            header = os.pread(descriptor, _HEADER.size, 0)
            if len(header) == _HEADER.size and (found := _HEADER.unpack(header))[0] and PolicyVersion(*found[1:]) == version:
                self._kept = index
                return _read(descriptor, found[0], offset=_HEADER.size)
        raise CheckpointError(f"The learner's state of version {version} is not in memory.")

    def close(self) -> None:
        """Gives this process's hold up; processes that were sent the memory keep theirs."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self._directory, "descriptors": [DupFd(descriptor) for descriptor in self._descriptors]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._directory, self._kept = state["directory"], 1
        self._descriptors = [descriptor.detach() for descriptor in state["descriptors"]]


def _write(descriptor: int, data: bytes, *, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read(descriptor: int, num_bytes: int, *, offset: int) -> bytes:
    parts = []
    while num_bytes:
        parts.append(os.pread(descriptor, num_bytes, offset))
        offset, num_bytes = offset + len(parts[-1]), num_bytes - len(parts[-1])
    return b"".join(parts)
