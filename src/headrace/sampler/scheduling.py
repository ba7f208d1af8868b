"""Who decodes: long rollouts leave decode slots to short work that waits (DESIGN section 7). Pure: no tensors, no clock.

A rollout is long once its tokens exceed `long_factor` x the median of the finished ones. While short work waits, long rollouts hold at most
`most_long` slots; an action beyond it is parked between two decode steps and goes on later, with the same random numbers.

Nobody starves. Rows are served in the order in which they came; a long one is passed over only while `most_long` >= 1 of them run. So of the
long ones the first comes up after at most `most_long` running ones have ended, and short ones have all the other slots: each row is served
within (tokens of all rows before it) steps. The batch is full whenever there is enough work: what is passed over takes any slot that no
short row wants.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.types import RolloutKey

_REMEMBERED = 512
"""Finished rollouts whose lengths count: answers get longer or shorter while a policy learns."""
_FEWEST = 16
"""Before so many have finished nothing is long."""


class LongRule:
    """Which rollouts are long, from the lengths of the finished ones."""

    def __init__(self, *, max_running: int, long_share: float, long_factor: float) -> None:
        self.most_long = max_running if long_share >= 1 else max(1, int(long_share * max_running))
        """Slots that long rollouts may hold while short work waits; fewer than all if there are two or more."""
        self.limit_tokens = math.inf
        """Trajectory tokens beyond which a rollout is long; infinite while it is not known or nothing is limited."""
        self._factor = long_factor
        self._limited = self.most_long < max_running
        self._in_progress: dict[RolloutKey, int] = {}
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def tokens_before(self, key: RolloutKey, num_context: int) -> int:
        """Trajectory tokens that a request's context leaves out: 0 unless each step shows its observation alone."""
        known = self._in_progress.get(key, 0)
        return known if num_context < known else 0

    def long_in_progress(self) -> frozenset[RolloutKey]:
        """Rollouts of several steps that are long by now, whether an action of theirs is being drawn or not."""
        return frozenset(key for key, num_tokens in self._in_progress.items() if num_tokens > self.limit_tokens)

    def acted(self, key: RolloutKey, num_tokens: int) -> None:
        """An action ended; its rollout has so many tokens by now."""
        if self._limited:
            self._in_progress[key] = num_tokens

    def released(self, key: RolloutKey) -> None:
        """The rollout takes no further step."""
        length = self._in_progress.pop(key, 0)
        if length == 0:
            return
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > _REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        if len(self._sorted) >= _FEWEST:
            self.limit_tokens = self._factor * self._sorted[(len(self._sorted) - 1) // 2]


class Candidate(NamedTuple):
    """A row that runs or waits."""

    order: int
    """Rows that came earlier have smaller numbers."""
    is_long: bool


class Shares(NamedTuple):
    """What changes before the next step. Indices into what `share_slots` was given."""

    park: list[int]
    """Running rows that give their slot away."""
    admit: list[int]
    """Waiting rows that get one, in order."""


def share_slots(running: Sequence[Candidate], waiting: Sequence[Candidate], *, num_slots: int, most_long: int) -> Shares:
    """Short rows want `wanted` slots; long ones keep the rest, at least `most_long`. Those that came last are parked.

    `waiting` in order of arrival. Afterwards min(num_slots, all rows) run.
    """
    num_short = sum(not row.is_long for row in running) + sum(not row.is_long for row in waiting)
    allowed = max(most_long, num_slots - num_short)
    long_running = sorted((row.order, index) for index, row in enumerate(running) if row.is_long)
    park = sorted(index for _, index in long_running[allowed:])
    num_long, num_running = min(len(long_running), allowed), len(running) - len(park)
    admit: list[int] = []
    for index, row in enumerate(waiting):
        if num_running == num_slots:
            break
        if row.is_long:
            if num_long >= allowed:
                continue
            num_long += 1
        admit.append(index)
        num_running += 1
    return Shares(park, admit)
