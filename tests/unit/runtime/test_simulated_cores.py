"""Devices on one core take turns; those with a core of their own do not notice each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fakes.rollouts import scripted_task
from fakes.runs import run_settings
from fakes.simulated_runs import scripted_times, simulated_lines
from headrace import clock
from headrace.report.summary import summarize
from headrace.runtime.simulated_cores import Core, Seat, take_seats, work

TASKS = [scripted_task("a", answers=4, wait_seconds=[0.0], action_tokens=[25])]


async def ends(starts: list[tuple[float, float]], *, num_cores: int = 1) -> list[float]:
    """When each of several works, (start, seconds), is done, on cores in turn."""
    cores = [Core() for _ in range(num_cores)]

    async def one(index: int) -> float:
        start, seconds = starts[index]
        await asyncio.sleep(start)
        await work([Seat(cores[index % num_cores])], seconds)
        return clock.now()

    return list(await asyncio.gather(*(one(index) for index in range(len(starts)))))


def test_two_at_once_take_twice_as_long() -> None:
    assert clock.run_virtual(ends([(0.0, 3.0), (0.0, 3.0)])) == pytest.approx([6.0, 6.0])


def test_each_gets_the_part_that_is_free_at_the_time() -> None:
    """1 s alone, then both at half speed: 2 s of the later one's work are done 4 s after its start, and the first has 1 s left."""
    assert clock.run_virtual(ends([(0.0, 4.0), (1.0, 2.0)])) == pytest.approx([6.0, 5.0])


def test_cores_of_their_own_are_not_shared() -> None:
    assert clock.run_virtual(ends([(0.0, 4.0), (1.0, 2.0)], num_cores=2)) == pytest.approx([4.0, 3.0])


def test_devices_are_pinned_in_turn_samplers_first() -> None:
    samplers, ranks = take_seats(run_settings(num_updates=1, num_samplers=3), 2)
    cores = [seat._core for seat in (*samplers, *ranks) if seat is not None]
    assert [cores.index(core) for core in cores] == [0, 1, 0, 1]
    assert take_seats(run_settings(num_updates=1, num_samplers=3), None) == ([None] * 3, [])


@pytest.mark.parametrize(("num_cores", "slower"), [(2, 1.0), (1, 2.0)])
def test_a_sampler_and_a_learner_on_one_core_slow_each_other_down(num_cores: int, slower: float) -> None:
    """Both have always something to do: 100 tokens of each rollout, and a learner that takes as long as sampling a batch."""
    settings = run_settings(num_updates=12, group_size=4, groups=2, max_staleness=4, sampler={"max_running": 8})
    model = scripted_times(learn_seconds=lambda tokens, ranks: 5.0)
    alone = summarize(clock.run_virtual(simulated_lines(settings, TASKS, model)))["wall_seconds"]
    shared = summarize(clock.run_virtual(simulated_lines(settings, TASKS, replace(model, num_cores=num_cores))))["wall_seconds"]
    assert shared / alone == pytest.approx(slower, rel=0.15)
