"""A run played decode step by decode step, with none of the planner's formulas: what closed forms are held against."""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from headrace.planner.distributions import Distribution
from headrace.planner.fits import DecodeFit


@dataclass(slots=True)
class Row:
    group: int
    remaining: int
    length: int
    started: float
    version_sum: int = 0


@dataclass(slots=True)
class Played:
    """Means over the second half of the updates."""

    step_seconds: float
    staleness: float
    """Of the mean trained token, in updates."""
    in_flight: float
    rollout_seconds: float


@dataclass
class StepSimulation:
    """Engines of `slots` rows decode one token each a step; a learner takes the groups that were complete first; admission (s + 1) B."""

    fit: DecodeFit
    lengths: Distribution
    engines: int
    slots: int
    batch: int
    group_size: int
    max_staleness: int
    learn_seconds: float
    wait_seconds: float = 0.0
    """After each token, in the environment; the row holds no slot meanwhile."""
    in_order: bool = False
    """Groups are trained in the order in which they started (oldest_first)."""
    seed: int = 0
    time: float = 0.0
    version: int = 0
    outstanding: int = 0
    members_left: list[Row] = field(default_factory=list)
    ready: deque[list[Row]] = field(default_factory=deque)
    finished: dict[int, list[Row]] = field(default_factory=dict)
    _events: list[tuple[float, int, int, object]] = field(default_factory=list)
    _count: int = 0
    _learning: int | None = None

    def play(self, num_updates: int) -> Played:
        self._random = random.Random(self.seed)
        self._running: list[list[Row]] = [[] for _ in range(self.engines)]
        self._held = [0] * self.engines
        """Rows that run or wait for a step."""
        self._stepping = [False] * self.engines
        self._ends: list[float] = []
        self._ages: list[tuple[float, int]] = []
        self._durations: list[tuple[float, float]] = []
        self._flights: list[tuple[float, int]] = []
        self._in_flight = 0
        self._next_group, self._next_out = 0, 1
        self._fill()
        while self.version < num_updates:
            self.time, _, engine, what = heapq.heappop(self._events)
            if engine < 0:
                self._learned()
            elif isinstance(what, Row):
                self._held[engine] += 1
                self._running[engine].append(what)
            else:
                assert isinstance(what, list)
                self._stepped(engine, what)
            self._learn()
            self._fill()
        return self._means()

    def _push(self, time: float, engine: int, what: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, engine, what))

    def _fill(self) -> None:
        """Rollouts start at the engine with most room, as the conductor does it; an engine that has rows and does not step begins one."""
        while self.members_left or self.outstanding + self.group_size <= (self.max_staleness + 1) * self.batch:
            engine = min(range(self.engines), key=lambda each: self._held[each])
            if self._held[engine] >= self.slots:
                break
            if not self.members_left:
                self.outstanding += self.group_size
                self._next_group += 1
                drawn = [max(1, round(self.lengths.quantile(self._random.random()))) for _ in range(self.group_size)]
                self.members_left = [Row(self._next_group, length, length, 0.0) for length in drawn]
            row = self.members_left.pop()
            row.started = self.time
            self._running[engine].append(row)
            self._held[engine] += 1
            self._note(1)
        for engine, rows in enumerate(self._running):
            if rows and not self._stepping[engine]:
                self._stepping[engine] = True
                for row in rows:
                    row.version_sum += self.version  # weights change between steps only
                context = sum(row.length - row.remaining for row in rows) / len(rows)
                self._push(self.time + self.fit.seconds(len(rows), context), engine, rows)
                self._running[engine] = []

    def _stepped(self, engine: int, drawn: list[Row]) -> None:
        self._stepping[engine] = False
        for row in drawn:
            row.remaining -= 1
            if row.remaining == 0:
                self._held[engine] -= 1
                self._finish(row)
            elif self.wait_seconds:
                self._held[engine] -= 1
                self._push(self.time + self._random.expovariate(1 / self.wait_seconds), engine, row)
            else:
                self._running[engine].append(row)

    def _finish(self, row: Row) -> None:
        self._note(-1)
        self._durations.append((self.time, self.time - row.started))
        group = self.finished.setdefault(row.group, [])
        group.append(row)
        if self.in_order:
            while len(self.finished.get(self._next_out, ())) == self.group_size:
                self.ready.append(self.finished.pop(self._next_out))
                self._next_out += 1
        elif len(group) == self.group_size:
            self.ready.append(self.finished.pop(row.group))

    def _learn(self) -> None:
        groups = self.batch // self.group_size
        if self._learning is None and len(self.ready) >= groups:
            for row in (row for _ in range(groups) for row in self.ready.popleft()):
                self._ages.append((self.version * row.length - row.version_sum, row.length))
            self._learning = self.batch
            self._push(self.time + self.learn_seconds, -1, None)

    def _learned(self) -> None:
        assert self._learning is not None
        self.version += 1
        self.outstanding -= self._learning
        self._learning = None
        self._ends.append(self.time)

    def _note(self, change: int) -> None:
        self._in_flight += change
        self._flights.append((self.time, self._in_flight))

    def _means(self) -> Played:
        half = len(self._ends) // 2
        start = self._ends[half]
        area = sum(level * (b - a) for (a, level), (b, _) in zip(self._flights, self._flights[1:], strict=False) if a >= start)
        ages = self._ages[len(self._ages) // 2 :]
        kept = [seconds for time, seconds in self._durations if time >= start]
        return Played(
            step_seconds=(self._ends[-1] - start) / (len(self._ends) - 1 - half),
            staleness=sum(age for age, _ in ages) / sum(length for _, length in ages),
            in_flight=area / (self._flights[-1][0] - start),
            rollout_seconds=sum(kept) / len(kept),
        )
