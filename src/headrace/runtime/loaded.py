"""What the forkserver imports last: it has loaded everything, and from now on hears by itself when nobody needs it any more (see loading.py).

Then it goes at once: the interpreter's own end takes over a second with torch loaded, several on a busy machine, and nothing here needs it.
"""

from __future__ import annotations

import atexit
import os
import signal

from headrace.runtime.loading import IN_FORKSERVER

_server = os.getpid()


def _end_at_once() -> None:
    if os.getpid() == _server:  # not a process that was forked from it
        os._exit(0)


if IN_FORKSERVER:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    atexit.register(_end_at_once)
