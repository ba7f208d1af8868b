"""Devices that share the cores of one machine, in simulated time: who works on a core gets an equal part of it (processor sharing).

A seat is one device's place on a core. What it does takes as many times as long as there are devices at work on that core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace import clock
from headrace.config import Placement, Settings


class Core:
    """One core."""

    def __init__(self) -> None:
        self.at_work: set[Seat] = set()
        self.seats: list[Seat] = []

    def changed(self, by: Seat) -> None:
        for seat in self.seats:
            if seat is not by and seat in self.at_work and seat.on_change is not None:
                seat.on_change()


class Seat:
    """Of one device. `on_change` is called when another device of the core begins or ends work while this one is at work."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.on_change: Callable[[], None] | None = None
        core.seats.append(self)

    @property
    def slowdown(self) -> int:
        """How many devices work on the core, this one included."""
        return max(1, len(self._core.at_work))

    @property
    def slowdown_at_work(self) -> int:
        """The same, when this one is about to work."""
        return len(self._core.at_work | {self})

    def work(self, is_at_work: bool) -> None:
        if is_at_work == (self in self._core.at_work):
            return
        if is_at_work:
            self._core.at_work.add(self)
        else:
            self._core.at_work.remove(self)
        self._core.changed(self)


def take_seats(settings: Settings, num_cores: int | None) -> tuple[list[Seat | None], list[Seat]]:
    """(of each sampler, of each learner rank), as the local runtime pins them: samplers first, then ranks, in turn; colocated ones together.

    None: every device has its own, which needs no counting.
    """
    samplers, ranks = settings.run.num_samplers, settings.run.num_learner_ranks
    if num_cores is None:
        return [None] * samplers, []
    cores = [Core() for _ in range(num_cores)]
    first = 0 if settings.run.placement is Placement.COLOCATED else samplers
    return [Seat(cores[index % num_cores]) for index in range(samplers)], [Seat(cores[(first + rank) % num_cores]) for rank in range(ranks)]


async def work(seats: Sequence[Seat], seconds: float) -> None:
    """Lasts `seconds` where nobody shares a core with any of the seats; ranks go at the pace of the slowest."""
    if not seats:
        await asyncio.sleep(seconds)
        return
    loop = asyncio.get_running_loop()
    left = seconds
    for seat in seats:
        seat.work(True)
    while left > 1e-12:
        began, slowdown = clock.now(), max(seat.slowdown for seat in seats)
        woken: asyncio.Future[None] = loop.create_future()

        def wake(woken: asyncio.Future[None] = woken) -> None:
            if not woken.done():
                woken.set_result(None)

        for seat in seats:
            seat.on_change = wake
        timer = loop.call_at(began + left * slowdown, wake)
        await woken
        timer.cancel()
        left -= (clock.now() - began) / slowdown
    for seat in seats:
        seat.on_change = None
        seat.work(False)
