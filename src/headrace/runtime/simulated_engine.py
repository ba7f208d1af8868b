"""Continuous batching as arithmetic: between two events the running batch is constant, so any number of decode steps is one formula.

Time here is the engine's *position*, the number of decode steps made so far. With b sequences running, C context tokens in their
caches at its beginning, and x seconds for prompts and observations in its first step, a stretch of k steps takes

    x + k (step(b) + gap(b)) + context_seconds (k C + b k (k - 1) / 2)

An action of n tokens that joins at position p ends at p + n. Pure: it is told the time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque

from headrace.runtime.time_model import TimeModel
from headrace.types import PolicyVersion, WorkerActivity

_WATERMARK = 0.01
"""Of the KV cache, kept free when an action is let in (vLLM's default), so that it is not thrown out again at once."""
_MAX_KINDS = 24
"""Of steps in one activity."""


class Action:
    """One action in progress, of one rollout."""

    __slots__ = ("context", "drawn", "end", "joined", "observation_tokens", "order", "owner", "remaining")

    def __init__(self, owner: object, *, context: int, observation_tokens: int, action_tokens: int) -> None:
        """`context`: tokens before the observation, whose cache is kept."""
        self.owner = owner
        self.context = context
        self.observation_tokens = observation_tokens
        self.remaining = action_tokens
        self.joined = self.end = self.order = -1
        """Positions; -1 while it waits for a slot."""
        self.drawn: dict[PolicyVersion, int] = {}


class DecodeEngine:
    """One sampler's decode slots, KV cache and weights."""

    def __init__(self, model: TimeModel, *, max_running: int) -> None:
        self.max_running = max_running
        self.version = PolicyVersion(0, 0)
        self.waiting: deque[Action] = deque()
        self.num_running = 0
        self.generated_tokens = 0
        """Drawn, cumulative."""
        self.preempted = 0
        """Actions that were thrown out because the KV cache was full, cumulative."""
        self._model = model
        self._capacity = math.inf if model.kv_capacity_tokens is None else float(model.kv_capacity_tokens)
        self.context_tokens = 0
        """In the KV cache, of the running sequences."""
        self._position = self._next_order = 0
        self._ends: list[tuple[int, int, Action]] = []
        self._versions: list[tuple[int, PolicyVersion]] = [(0, self.version)]
        self._since = self._observation_seconds = self._fixed = self._reading = self._gap = 0.0
        self._observation_tokens = 0
        self._activity = ActivitySums(model.work_share)

    # --- between two steps -------------------------------------------------------------------------------------------------

    def take_up(self, version: PolicyVersion, seconds: float) -> None:
        """New weights, after a pause of so many seconds."""
        self.version = version
        if self._versions[-1][0] == self._position:
            self._versions.pop()
        self._versions.append((self._position, version))
        self._activity.applied(seconds)
        if len(self._versions) > 512:
            self._forget_versions()

    def begin(self, now: float, slowdown: float = 1.0) -> int:
        """Lets waiting actions in and starts a stretch of steps. Returns after how many something happens; 0: nothing runs.

        `slowdown`: everything takes so many times as long, where the device is shared.
        """
        self._make_room()
        self._admit(slowdown)
        running = self.num_running
        if not running:
            return 0
        self._since = now
        self._fixed, self._gap = slowdown * self._model.step_seconds(running), slowdown * self._model.gap_seconds(running)
        self._reading = slowdown * self._model.seconds_per_context_token
        steps = self._ends[0][0] - self._position
        if self.context_tokens + running * steps > self._capacity and running > 1:
            steps = min(steps, max(1, int((self._capacity - self.context_tokens) // running)))
        return steps

    def time_of(self, steps: int) -> float:
        """When so many steps of the stretch are done."""
        return self._since + self._seconds(steps)

    @property
    def period_seconds(self) -> float:
        """Of one step of the stretch, with the gap before it."""
        return self._fixed + self._gap + self._reading * self.context_tokens

    def steps_done(self, now: float) -> int:
        """Whole steps of the stretch by now."""
        elapsed = now - self._since - self._observation_seconds
        each = self.period_seconds
        growth = self._reading * self.num_running
        if elapsed < each:
            return 0
        if growth * elapsed < 1e-9 * each * each:
            steps = int(elapsed / each)
        else:
            linear = each - growth / 2
            steps = int((math.sqrt(linear * linear + 2 * growth * elapsed) - linear) / growth)
        while self.time_of(steps + 1) <= now:
            steps += 1
        while steps > 0 and self.time_of(steps) > now:
            steps -= 1
        return steps

    def advance(self, steps: int) -> list[Action]:
        """So many steps of the stretch are over; it goes on, a step that has begun included. Returns the actions that ended, in order."""
        if steps <= 0 or not self.num_running:
            return []
        running, context = self.num_running, self.context_tokens
        read = steps * context + running * steps * (steps - 1) // 2
        seconds = self._observation_seconds + steps * self._fixed + self._reading * read
        self._activity.decoded(running, steps, seconds, steps * self._gap, self._observation_tokens, read)
        self._since = self.time_of(steps)
        self._observation_seconds, self._observation_tokens = 0.0, 0
        self._position += steps
        self.context_tokens += running * steps
        self.generated_tokens += running * steps
        ended: list[Action] = []
        while self._ends and self._ends[0][0] <= self._position:
            action = heapq.heappop(self._ends)[2]
            self._leave(action)
            ended.append(action)
        return ended

    def drop(self, action: Action) -> None:
        """It is given up, what it has drawn stays in `drawn`."""
        if action.joined < 0:
            self.waiting.remove(action)
            return
        self._ends.remove((action.end, action.order, action))
        heapq.heapify(self._ends)
        self._leave(action)

    # --- activity ----------------------------------------------------------------------------------------------------------

    def idle(self, reason: str, seconds: float) -> None:
        self._activity.idle(reason, seconds)

    def checked(self, seconds: float, tokens: int) -> None:
        """Trajectories of so many tokens, between two steps."""
        self._activity.checked(seconds, tokens)

    def take_activity(self) -> WorkerActivity:
        """Since the last call, up to the last whole step."""
        activity, self._activity = self._activity.result(), ActivitySums(self._model.work_share)
        return activity

    # --- insides -----------------------------------------------------------------------------------------------------------

    def _seconds(self, steps: int) -> float:
        if not steps:
            return 0.0
        read = steps * self.context_tokens + self.num_running * steps * (steps - 1) / 2
        return self._observation_seconds + steps * (self._fixed + self._gap) + self._reading * read

    def _admit(self, slowdown: float) -> None:
        """In order of arrival, as long as there is a slot and the KV cache holds it."""
        limit = self._capacity * (1 - _WATERMARK)
        while self.waiting and self.num_running < self.max_running:
            action = self.waiting[0]
            needed = action.context + action.observation_tokens
            if self.num_running and self.context_tokens + needed + self.num_running >= limit:
                return
            self.waiting.popleft()
            action.joined, action.end, action.order = self._position, self._position + action.remaining, self._next_order
            self._next_order += 1
            self._observation_seconds += slowdown * self._model.observation_seconds(action.observation_tokens)
            self._observation_tokens += action.observation_tokens
            self.context_tokens += needed
            self.num_running += 1
            heapq.heappush(self._ends, (action.end, action.order, action))

    def _make_room(self) -> None:
        """While the next step would not fit in the KV cache, the action that came last is thrown out: its cache is computed again when it
        comes back, first of those that wait (as vLLM does)."""
        while self.num_running > 1 and self.context_tokens + self.num_running > self._capacity:
            last = max(self._ends, key=lambda entry: entry[1])[2]
            self.drop(last)
            last.observation_tokens, last.context, last.joined = last.context, 0, -1
            self.waiting.appendleft(last)
            self.preempted += 1

    def _leave(self, action: Action) -> None:
        """It holds no slot any more."""
        drawn = self._position - action.joined
        action.remaining -= drawn
        action.context += action.observation_tokens + drawn
        action.observation_tokens = 0
        self.context_tokens -= action.context
        self.num_running -= 1
        end = self._position
        for start, version in reversed(self._versions):
            first = max(start, action.joined)
            if end > first:
                action.drawn[version] = action.drawn.get(version, 0) + end - first
                end = first
            if start <= action.joined:
                break

    def _forget_versions(self) -> None:
        oldest = min((action.joined for _, _, action in self._ends), default=self._position)
        first = bisect_right(self._versions, oldest, key=lambda entry: entry[0]) - 1
        del self._versions[: max(0, first)]


class ActivitySums:
    """Where a sampler's time went; becomes a WorkerActivity."""

    def __init__(self, work_share: float) -> None:
        """`work_share`: of a step, the model's work."""
        self._work_share = work_share
        self._step_seconds = self._gap_seconds = self._environment_seconds = 0.0
        self._running: dict[int, float] = {}
        self._idle: dict[str, float] = {}
        self._work: dict[tuple[int, int, int], list[float]] = {}
        self._steps = self._observed = self._sampled = self._applied = 0
        self._apply_seconds = self._verify_seconds = 0.0
        self._verify_tokens = 0

    def decoded(self, running: int, steps: int, seconds: float, gap: float, observed: int, read: int) -> None:
        """`seconds` of whole steps, and between them `gap`, which is the rollouts' Python."""
        busy = self._work_share * seconds
        self._running[running] = self._running.get(running, 0.0) + busy
        self._step_seconds += seconds
        self._gap_seconds += gap
        self.idle("bookkeeping", seconds - busy)
        self.idle("rollouts", gap)
        self._steps += steps
        self._observed += observed
        self._sampled += running * steps
        kind = (
            running if running < 8 else running.bit_length() * 8 + (running >> running.bit_length() - 3),
            (read // (running * steps)).bit_length(),
            observed > 0,
        )
        sums = self._work.setdefault(kind, [0, 0, 0, 0, 0.0])
        for index, value in enumerate((steps, running * steps, running * steps + observed, read, seconds)):
            sums[index] += value

    def idle(self, reason: str, seconds: float) -> None:
        if seconds > 0:
            self._idle[reason] = self._idle.get(reason, 0.0) + seconds
        if reason == "environment":
            self._environment_seconds += seconds

    def checked(self, seconds: float, tokens: int) -> None:
        """Work of the model, with nothing running."""
        self._verify_seconds += seconds
        self._verify_tokens += tokens

    def applied(self, seconds: float) -> None:
        self.idle("weights", seconds)
        self._applied += 1
        self._apply_seconds += seconds

    def result(self) -> WorkerActivity:
        busy, idle = sum(self._running.values()) + self._verify_seconds, sum(self._idle.values())
        work = sorted(self._work.values(), key=lambda sums: -sums[4])[:_MAX_KINDS]
        return WorkerActivity(
            seconds=busy + idle,
            busy_seconds=busy,
            running_seconds=dict(sorted(self._running.items())),
            idle_seconds=dict(sorted(self._idle.items())),
            step_seconds=self._step_seconds,
            gap_seconds=self._gap_seconds,
            environment_seconds=self._environment_seconds,
            decode_steps=self._steps,
            prefill_tokens=self._observed,
            sampled_tokens=self._sampled,
            apply_seconds=self._apply_seconds,
            verify_seconds=self._verify_seconds,
            verify_tokens=self._verify_tokens,
            applied_updates=self._applied,
            decode_work=tuple((int(a), int(b), int(c), int(d), seconds) for a, b, c, d, seconds in work),
        )
