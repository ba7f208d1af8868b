"""Of all tests."""

import signal

from hypothesis import settings

# examples have no time limit, since nothing here asserts a time
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

# a script that starts the tests in its background leaves Ctrl-C ignored, and every program they start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
