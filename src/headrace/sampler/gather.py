"""How many rows a step should have before waiting for more stops paying.

A step of n rows takes about a + b n seconds. Waiting w seconds for requests that arrive at rate r makes it n + r w rows in
w + a + b (n + r w) seconds; that is more rows a second than n in a + b n exactly if n < r a, whatever w and b are. So a step
waits only while it has fewer than r a rows: on a device with cheap steps hardly ever, on one with dear steps until it is full.
Rows in the middle of an action are in n, so their delay is part of the bargain.
"""

from __future__ import annotations

import math

_ARRIVAL_MEMORY_SECONDS = 0.25
_STEP_MEMORY = 0.98
"""Weight of the past at each step: about the last 50 steps count."""
_STEPS_TO_KNOW = 8
"""Steps before the estimate is used; until then a step waits for a full batch."""


class GatherTarget:
    """Estimates r (arrivals a second) and a (the fixed seconds of a step), both from the recent past."""

    def __init__(self) -> None:
        self.rows = math.inf
        """Fewer rows than this: wait for more."""
        self._arrived = 0
        self._arrivals = self._arrival_seconds = 0.0
        self._since: float | None = None
        self._num_steps = 0
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def arrive(self) -> None:
        self._arrived += 1

    def observe_step(self, num_tokens: int, seconds: float, now: float) -> None:
        """A step computed so many tokens in so many seconds and ended now."""
        if self._since is not None:
            elapsed = now - self._since
            fading = math.exp(-elapsed / _ARRIVAL_MEMORY_SECONDS)
            self._arrivals = self._arrivals * fading + self._arrived
            self._arrival_seconds = self._arrival_seconds * fading + elapsed
        self._since, self._arrived = now, 0
        self._num_steps += 1
        self._weight = self._weight * _STEP_MEMORY + 1
        self._n = self._n * _STEP_MEMORY + num_tokens
        self._nn = self._nn * _STEP_MEMORY + num_tokens * num_tokens
        self._t = self._t * _STEP_MEMORY + seconds
        self._nt = self._nt * _STEP_MEMORY + num_tokens * seconds
        if self._num_steps >= _STEPS_TO_KNOW and self._arrival_seconds > 0:
            self.rows = self._arrivals / self._arrival_seconds * self.fixed_seconds

    @property
    def fixed_seconds(self) -> float:
        """a, by least squares over steps of unlike size; a whole step's time when all were alike."""
        mean = self._t / self._weight
        spread = self._weight * self._nn - self._n**2
        if spread <= 1e-6 * self._n**2:
            return mean
        return min(mean, max(0.0, (self._nn * self._t - self._n * self._nt) / spread))
