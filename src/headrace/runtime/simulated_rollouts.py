"""Simulated rollouts in flight: how far each is, and how long those that wait have waited."""

from __future__ import annotations

import asyncio

from headrace.runtime.simulated_engine import Action
from headrace.runtime.time_model import PlannedRollout
from headrace.types import PolicyVersion, RolloutRequest


class SimulatedRollout:
    """One in flight."""

    __slots__ = ("action", "drawn", "is_over", "plan", "request", "started", "step", "timer", "tokens", "wait_seconds")

    def __init__(self, request: RolloutRequest, plan: PlannedRollout, started: float) -> None:
        self.request, self.plan, self.started = request, plan, started
        self.step = 0
        self.tokens = 0
        """Of the trajectory so far."""
        self.drawn: dict[PolicyVersion, int] = {}
        self.action: Action | None = None
        """None while it waits for its environment."""
        self.timer: asyncio.TimerHandle | None = None
        """Of the environment's last answer, with which it ends."""
        self.wait_seconds = 0.0
        self.is_over = False


class WaitingRollouts:
    """Rollouts in their environments, by how long: those that wait longer than `patience_seconds` have given their slot away."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._since: dict[SimulatedRollout, float] = {}
        """In order of time; the first `_num_long` have been out for longer than the patience."""
        self._fresh: dict[SimulatedRollout, None] = {}

    def begin(self, rollout: SimulatedRollout, now: float) -> None:
        self._since[rollout] = now
        self._fresh[rollout] = None

    def end(self, rollout: SimulatedRollout, now: float) -> float:
        """Returns how long it waited."""
        self._fresh.pop(rollout, None)
        return now - self._since.pop(rollout)

    def __contains__(self, rollout: SimulatedRollout) -> bool:
        return rollout in self._since

    def num_long(self, now: float) -> int:
        while self._fresh and now - self._since[first := next(iter(self._fresh))] > self._patience:
            del self._fresh[first]
        return len(self._since) - len(self._fresh)
