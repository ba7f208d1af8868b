"""What a rollout waits for, written by it and read by its worker, and how its worker cuts it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace import clock


class Phase(StrEnum):
    """What a rollout waits for."""

    START = "its turn to start"
    RESET = "its environment to reset"
    SAMPLER = "the sampler"
    ENVIRONMENT = "its environment"
    REWARD = "its reward"
    MARKS = "its marks"
    VERIFICATION = "verification"
    REWIND = "its environment to go back"


ENVIRONMENT_PHASES = frozenset({Phase.RESET, Phase.ENVIRONMENT, Phase.REWARD, Phase.MARKS, Phase.REWIND})


@dataclass(slots=True)
class RolloutProgress:
    """Where a rollout is; written by roll_out, read by its worker."""

    phase: Phase = Phase.START
    since_seconds: float = 0.0
    """Loop time at which the phase began."""
    step: int = 0
    on_wait: Callable[[], None] = lambda: None
    """Called when the rollout begins to wait for the user's code: it holds no decode slot then."""
    _cut: bool = False
    _timeout: asyncio.Timeout | None = field(default=None, repr=False)

    def enter(self, phase: Phase) -> float:
        """The phase begins now: returns the loop's time."""
        self.phase = phase
        time = self.since_seconds = clock.now()
        if phase in ENVIRONMENT_PHASES:
            self.on_wait()
        return time

    def cut(self) -> None:
        """Ends the rollout as CANCELLED, at once. Harmless when it is ending already."""
        if not self._cut:
            self._cut = True
            if self._timeout is not None:
                self._timeout.reschedule(clock.now())

    @property
    def is_cut(self) -> bool:
        return self._cut

    def arm(self, timeout: asyncio.Timeout | None) -> None:
        self._timeout = timeout
