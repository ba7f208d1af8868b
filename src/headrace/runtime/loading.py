"""What the forkserver imports first: while it loads it looks now and then whether the process that it loads for is still there.

Loading torch takes seconds in which it listens to nobody: a conductor that is killed meanwhile would leave it loading (I13). Imported anywhere
else this does nothing. `headrace.runtime.loaded`, imported last, ends it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

LOOK_SECONDS = 0.25
IN_FORKSERVER = any("multiprocessing.forkserver" in argument for argument in sys.orig_argv)
STARTER = "HEADRACE_STARTER"
"""Environment variable: pid of the process that starts the forkserver; it may be gone before the forkserver could ask who that was."""
_parent = int(os.environ.get(STARTER, os.getppid()))


def _look(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _parent:
        os._exit(1)


if IN_FORKSERVER:
    signal.signal(signal.SIGALRM, _look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
