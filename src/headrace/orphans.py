"""A process that ends with another one, by the kernel's hand: it gets SIGKILL as soon as the last writer of a pipe is gone.

A thread that waits for the same pipe needs the interpreter, which a long call into C may hold, and processor time, of which a busy machine
gives little. A signal of the kernel needs neither, and unlike a parent's death signal it does not depend on which thread started what.
Linux only; the watches in processes.py and user_process.py are there everywhere, and stay as the second line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal


def end_with(pipe: int, *, group: bool = False) -> None:
    """From now on this process is killed when nobody can write to `pipe` any more; at once where that is so already. Nothing may be written
    to it later: that counts as its end. `group`: all of the process group, which must be this process's own."""
    signals = getattr(fcntl, "F_SETSIG", None)
    if signals is not None:
        with contextlib.suppress(OSError):  # not a pipe that knows this
            fcntl.fcntl(pipe, signals, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp() if group else os.getpid())
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    looked = select.poll()
    looked.register(pipe, 0)
    if any(what & select.POLLHUP for _, what in looked.poll(0)):  # before the kernel was asked to tell
        os.kill(0 if group else os.getpid(), signal.SIGKILL)
