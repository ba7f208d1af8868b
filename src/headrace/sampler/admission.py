"""Which rows decode next: first come, first served, but for three rules.

A row may wait for new weights (a new rollout while the sampler drains), for a storage slot, or for short work (scheduling.py). Those behind
it that need not wait pass it; it keeps its place. A long row that is parked in the middle of its action keeps its tokens, and its cache while nobody
else needs the memory; it goes on where it stopped, from the same random numbers, under the weights that are in use then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain

from headrace.config import SamplerSettings
from headrace.sampler.applying import ApplyGate
from headrace.sampler.rows import Row, SlotTable
from headrace.sampler.scheduling import Candidate, LongRule, share_slots
from headrace.types import RolloutKey


class Admission:
    """Moves rows between the engine's `waiting` (in order of arrival) and `running`."""

    def __init__(self, slots: SlotTable, gate: ApplyGate, *, max_running: int, settings: SamplerSettings) -> None:
        self.num_parked = 0
        """Times that a row in the middle of its action gave its decode slot away."""
        self._slots = slots
        self._gate = gate
        self._max_running = max_running
        self._lengths = LongRule(max_running=max_running, long_share=settings.long_share, long_factor=settings.long_factor)
        self._num_arrived = 0

    def arrive(self, row: Row) -> None:
        self._num_arrived += 1
        row.order = self._num_arrived
        row.tokens_before = self._lengths.tokens_before(row.request.key, row.num_context)
        self._slots.resume(row)

    def acted(self, row: Row) -> None:
        """Its action is complete."""
        self._lengths.acted(row.request.key, row.num_tokens)

    def released(self, key: RolloutKey) -> None:
        self._lengths.released(key)
        self._gate.released(key)

    @property
    def most_long(self) -> int:
        return self._lengths.most_long

    def long_rollouts(self, running: Sequence[Row]) -> frozenset[RolloutKey]:
        """Those that are long by now, between two actions or in the middle of one."""
        limit = self._lengths.limit_tokens
        if limit == math.inf:
            return frozenset()
        return self._lengths.long_in_progress() | {row.request.key for row in running if row.num_tokens > limit}

    def may_run(self, row: Row, *, draining: bool) -> bool:
        """`draining`: actions in progress finish, others wait."""
        return (not draining or bool(row.logprobs)) and self._gate.admits(row.request.key)

    def admit(self, running: list[Row], waiting: deque[Row], *, draining: bool) -> None:
        """Fills `running` up to max_running; parks long rows where short ones wait."""
        if not waiting:
            return
        limit = self._lengths.limit_tokens
        if limit < math.inf and any(len(row.tokens) + row.tokens_before > limit for row in chain(running, waiting)):
            self._share(running, waiting, limit, draining=draining)
        elif len(running) < self._max_running:
            self._fill(running, waiting, draining=draining)

    def _fill(self, running: list[Row], waiting: deque[Row], *, draining: bool) -> None:
        passed: list[Row] = []
        no_slot_left = False
        anyone = not draining and not self._gate.draining
        while waiting and len(running) < self._max_running:
            row = waiting.popleft()
            if not anyone and not self.may_run(row, draining=draining):
                passed.append(row)
            elif (no_slot_left and row.slot < 0) or not self._find_slot(row):
                no_slot_left = True
                passed.append(row)  # those behind it that hold a slot may pass
            else:
                self._start(row, running)
        waiting.extendleft(reversed(passed))

    def _share(self, running: list[Row], waiting: deque[Row], limit: float, *, draining: bool) -> None:
        able = [row for row in waiting if self.may_run(row, draining=draining)]
        shares = share_slots(
            [Candidate(row.order, row.num_tokens > limit) for row in running],
            [Candidate(row.order, row.num_tokens > limit) for row in able],
            num_slots=self._max_running,
            most_long=self._lengths.most_long,
        )
        parked = [running[index] for index in shares.park]
        for row in parked:
            running.remove(row)
            self.num_parked += 1
        chosen = {able[index].order for index in shares.admit}
        for row in (*parked, *(row for row in able if row.order not in chosen and row.num_tokens > limit)):
            row.parked = True
            self._lay_aside(row)
        started = set()
        for index in shares.admit:
            if self._find_slot(able[index]):
                self._start(able[index], running)
                started.add(able[index].order)
        if parked or started:
            left = sorted((*parked, *(row for row in waiting if row.order not in started)), key=lambda row: row.order)
            waiting.clear()
            waiting.extend(left)

    def _start(self, row: Row, running: list[Row]) -> None:
        row.parked = False
        if self._gate.counts_rollouts:
            self._gate.begin(row.request.key)
        running.append(row)

    def _find_slot(self, row: Row) -> bool:
        if row.slot >= 0:
            return True
        if row.parked:
            self._slots.resume(row)
        if row.slot < 0:
            slot = self._slots.take()
            if slot is None:
                return False
            row.slot = slot
        return True

    def _lay_aside(self, row: Row) -> None:
        """Its cache stays only while the slot is not needed."""
        if row.slot >= 0:
            self._slots.keep(row, list(row.tokens))
            row.slot, row.cached = -1, 0
