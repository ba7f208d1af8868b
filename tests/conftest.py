"""Of all tests: examples of hypothesis have no time limit, since nothing here asserts a time."""

from hypothesis import settings

settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
