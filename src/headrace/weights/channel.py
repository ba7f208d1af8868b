"""Weight channel of one machine: shared memory without a name, two buffers, a seqlock. The writer never waits for a reader.

Layout: a header of int64 words, then two buffers that hold all parameters back to back.

    header: [started, newest, lineage of buffer 0, number of buffer 0, lineage of buffer 1, number of buffer 1, dtype]

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
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from headrace.errors import HeadraceError

_HEADER_WORDS = 8
STARTED, NEWEST, VERSIONS, DTYPE = 0, 1, 2, 6
"""Header words; VERSIONS + 2 * buffer holds the lineage, the next word the number. DTYPE is written before the first publish."""


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
        self.memory = mmap.mmap(self._descriptor, mmap.PAGESIZE + 2 * self.buffer_bytes)
        self.header = np.frombuffer(self.memory, dtype=np.int64, count=_HEADER_WORDS)

    def buffer_offset(self, index: int) -> int:
        """Bytes from the start of `memory` to buffer 0 or 1."""
        return mmap.PAGESIZE + index * self.buffer_bytes

    def close(self) -> None:
        """Gives this process's hold up; processes that were sent the channel keep theirs."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self.header
            self.memory.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"buffer_bytes": self.buffer_bytes, "descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.buffer_bytes = state["buffer_bytes"]
        self._descriptor = state["descriptor"].detach()
        self._map()
