"""Simulated rollouts in flight: how far each is, and how long those that wait have waited."""

from __future__ import annotations

import asyncio

from headrace.runtime.simulated_checks import Cut
from headrace.runtime.simulated_engine import Action
from headrace.runtime.time_model import PlannedRollout
from headrace.types import PolicyVersion, RolloutRequest, TrajectorySummary, VersionCount


class SimulatedRollout:
    """One in flight."""

    __slots__ = (
        "action", "delivered", "drawn", "is_cut", "is_over", "plan", "refreshed_key_steps", "refreshed_tokens", "request", "round", "started", "step",
        "timer", "tokens", "wait_seconds",
    )  # fmt: skip

    def __init__(self, request: RolloutRequest, plan: PlannedRollout, started: float) -> None:
        self.request, self.plan, self.started = request, plan, started
        self.step = 0
        self.tokens = 0
        """Of the trajectory so far."""
        self.drawn: list[dict[PolicyVersion, int]] = []
        """Of each step that has begun."""
        self.action: Action | None = None
        """None while it waits for its environment."""
        self.timer: asyncio.TimerHandle | None = None
        """Of the environment's last answer, with which it ends."""
        self.wait_seconds = 0.0
        self.is_over = False
        self.delivered: TrajectorySummary | None = None
        """Its last, where it may be verified."""
        self.round = self.refreshed_tokens = self.refreshed_key_steps = 0
        self.is_cut = False
        """It is drawn again from a rejected token."""

    def note(self, counts: dict[PolicyVersion, int]) -> None:
        """Tokens of the present step."""
        while len(self.drawn) <= self.step:
            self.drawn.append({})
        step = self.drawn[self.step]
        for version, count in counts.items():
            step[version] = step.get(version, 0) + count

    @property
    def num_drawn(self) -> int:
        return sum(sum(counts.values()) for counts in self.drawn)

    @property
    def num_key_steps(self) -> int:
        return sum(self.plan.steps[index].key for index in range(len(self.drawn)))

    def versions(self) -> tuple[VersionCount, ...]:
        unmarked: dict[PolicyVersion, int] = {}
        key: dict[PolicyVersion, int] = {}
        for index, counts in enumerate(self.drawn):
            sums = key if self.plan.steps[index].key else unmarked
            for version, count in counts.items():
                sums[version] = sums.get(version, 0) + count
        return tuple(VersionCount(version=each, unmarked=unmarked.get(each, 0), key=key.get(each, 0)) for each in sorted(unmarked.keys() | key.keys()))

    def cut(self, stands: list[dict[PolicyVersion, int]], cut: Cut, now: float) -> Action:
        """It is where it was when the rejected token was drawn, its clock included. Returns what is to be drawn of that step."""
        before, keys = self.num_drawn, self.num_key_steps
        self.drawn, self.step, self.is_cut = stands, cut.step, True
        self.refreshed_tokens = before - self.num_drawn
        self.refreshed_key_steps = keys - sum(self.plan.steps[index].key for index in range(cut.step))
        self.tokens = sum(step.observation_tokens for step in self.plan.steps[: cut.step + 1]) + self.num_drawn
        part = self.num_drawn / max(1, before)
        self.started, self.wait_seconds = now - part * (self.delivered.seconds if self.delivered is not None else 0.0), part * self.wait_seconds
        return Action(self, context=self.tokens, observation_tokens=0, action_tokens=self.plan.steps[cut.step].action_tokens - cut.kept_tokens)


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
