"""What the forkserver imports first: while it loads it ends with the process that it loads for.

Loading torch takes seconds in which it listens to nobody: a conductor that is killed meanwhile would leave it loading (I13). So it opens the
pipe of its starter's (`life_line`), whose end kills it, and looks now and then whether the starter is still there; the former works in a long
call into C and without processor time, the latter on every system. Imported anywhere else this does nothing.
`headrace.runtime.loaded`, imported last, ends the looking.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from headrace.orphans import end_with

LOOK_SECONDS = 0.25
IN_FORKSERVER = any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)
STARTER = "HEADRACE_STARTER"
"""Environment variable: pid of the process that starts the forkserver, which may be gone before the forkserver could ask who that was, and its
descriptor of a pipe that only it can write to."""
_pid, _, _pipe = os.environ.get(STARTER, "").partition(":")
_parent = int(_pid or os.getppid())


def _look(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _parent:
        os._exit(1)


if IN_FORKSERVER:
    signal.signal(signal.SIGALRM, _look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    if _pipe and sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is gone, which the look sees, or forbids it
            end_with(os.open(f"/proc/{_parent}/fd/{_pipe}", os.O_RDONLY | os.O_CLOEXEC))
