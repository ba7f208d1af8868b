"""What the forkserver imports last: it has loaded everything, and from now on hears by itself when its parent ends (see loading.py)."""

from __future__ import annotations

import signal

from headrace.runtime.loading import IN_FORKSERVER

if IN_FORKSERVER:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
