"""Which updates are refused before the optimizer makes them: those that are not finite, and exploding ones. Pure functions and one window.

A gradient *explodes* when its norm (before it is scaled down) is over explosion_factor times the running median, and more standard deviations
over it than noise ever is; one within max_gradient_norm never does, it would be taken as it is. The deviation is that of the logarithms,
from their median absolute deviation (x 1.4826, Rousseeuw and Croux 1993), so neither a few outliers nor a run whose norms vary much anyway
move the bound where it does harm. A batch explodes when the policy has moved over MAX_KL away from the one that sampled it, and
KL_FACTOR times further than usual: its importance ratios say nothing any more.

Refused updates stay in the window: a run whose norms have risen for good is refused for half a window at most. The window is part of a
checkpoint, so a run that goes on from one knows what is usual in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

WINDOW = 64
"""Updates that the running medians look back."""
LEAST = 16
"""Updates before anything can be told from what is usual."""
DEVIATIONS = 6.0
"""A normal variable is over so many in one of 1e9 draws."""
MAX_KL = 1.0
"""Nats a token. Under it no batch is refused; healthy runs stay under 0.2."""
KL_FACTOR = 10.0
_LEAST_NORM = 1e-12


class Guard:
    """Each rank has its own and is given the same numbers, so all decide alike."""

    def __init__(self, *, explosion_factor: float, max_gradient_norm: float) -> None:
        """`explosion_factor` 0: only what is not finite is refused."""
        self._factor, self._max_gradient_norm = explosion_factor, max_gradient_norm
        self._log_norms: deque[float] = deque(maxlen=WINDOW)
        self._kls: deque[float] = deque(maxlen=WINDOW)

    @property
    def on(self) -> bool:
        """Whether it looks at the KL at all."""
        return self._factor > 0

    def state(self) -> dict[str, list[float]]:
        """The window, JSON values."""
        return {"log_norms": list(self._log_norms), "kls": list(self._kls)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Goes on from a window. An empty mapping, as of a checkpoint that kept none: from an empty one."""
        self._log_norms = deque(state.get("log_norms", ()), maxlen=WINDOW)
        self._kls = deque(state.get("kls", ()), maxlen=WINDOW)

    def refusal(self, norm: float, kl: float) -> str | None:
        """Why this update must not be made, None otherwise. `norm`: of the gradient; `kl`: KL(sampler || learner) before it, nats a token."""
        if not math.isfinite(norm):
            return f"the gradient is not finite (norm {norm})"
        if not self.on:
            return None
        reason = self._explodes(norm) or self._left_behind(kl)
        self._log_norms.append(math.log(max(norm, _LEAST_NORM)))
        if math.isfinite(kl):
            self._kls.append(abs(kl))
        return reason

    def _explodes(self, norm: float) -> str | None:
        if len(self._log_norms) < LEAST or norm <= self._max_gradient_norm:
            return None
        usual = median(self._log_norms)
        deviation = 1.4826 * median(abs(value - usual) for value in self._log_norms)
        if math.log(norm) <= usual + max(math.log(self._factor), DEVIATIONS * deviation):
            return None
        return f"the gradient explodes (norm {norm:.3g}, {norm / math.exp(usual):,.0f} times the median of the last {len(self._log_norms)})"

    def _left_behind(self, kl: float) -> str | None:
        if len(self._kls) < LEAST:
            return None
        usual = median(self._kls)
        if kl <= max(MAX_KL, KL_FACTOR * usual):
            return None
        return f"the policy has moved away from its data (KL(sampler || learner) {kl:.3g} nats a token, the median is {usual:.2g})"
