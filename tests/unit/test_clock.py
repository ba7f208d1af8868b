"""The virtual clock jumps, repeats and refuses what is real; named waits say who did not answer."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.clock import VirtualDeadlockError, Waits, now, run_virtual
from headrace.errors import WaitTimeoutError


def test_virtual_hour_is_exact_and_not_waited_for() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return now()

    assert run_virtual(main()) == 3600.0


def test_timers_fire_in_order_of_their_time_whatever_the_order_they_were_set() -> None:
    fired: list[tuple[str, float]] = []

    async def note(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((name, now()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in (("late", 3.0), ("early", 1.0), ("middle", 2.0), ("also early", 1.0)):
                group.create_task(note(name, seconds))

    run_virtual(main())
    assert fired == [("early", 1.0), ("also early", 1.0), ("middle", 2.0), ("late", 3.0)]


def test_deadlock_raises_where_a_real_run_would_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlockError, match="every task waits for another one"):
        run_virtual(main())


def test_virtual_clock_refuses_threads_and_sockets() -> None:
    async def thread() -> None:
        await asyncio.to_thread(lambda: None)

    async def sockets() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    async def other_thread_wakes_it() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.get_running_loop().call_soon_threadsafe, lambda: None).result()

    for main in (thread, sockets, other_thread_wakes_it):
        with pytest.raises(RuntimeError, match="the virtual clock knows no"):
            run_virtual(main())


def test_ctrl_c_cancels_a_virtual_run_like_any_other() -> None:
    ended = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.append(now())
            raise

    with pytest.raises(KeyboardInterrupt):
        run_virtual(main())
    assert ended == [1.0]


def test_wait_within_its_limit_returns_the_answer_and_leaves_no_name() -> None:
    async def answer() -> str:
        await asyncio.sleep(1)
        return "here"

    async def main() -> tuple[str, list[tuple[str, float]]]:
        waits = Waits()
        return await waits.limited(answer(), "a waits for b", 2.0), waits.current()

    assert run_virtual(main()) == ("here", [])


def test_wait_over_its_limit_names_who_did_not_answer_with_limit_and_remedy() -> None:
    missing = ["sampler-0", "sampler-1"]

    async def main() -> None:
        waits = Waits()
        async with asyncio.TaskGroup() as group:
            group.create_task(lose_one())
            await waits.limited(asyncio.Event().wait(), lambda: f"conductor waits for {', '.join(missing)}", 5.0, "Look at it.")

    async def lose_one() -> None:
        await asyncio.sleep(1)
        missing.remove("sampler-0")

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(main())
    (error,) = caught.value.exceptions
    assert isinstance(error, WaitTimeoutError)
    assert str(error) == "conductor waits for sampler-1: no answer in 5 s. Look at it."


def test_timeout_of_the_awaited_itself_is_not_taken_for_the_limit() -> None:
    async def fails_by_itself() -> None:
        raise TimeoutError("my own")

    async def main() -> None:
        await Waits().limited(fails_by_itself(), "a waits for b", 5.0)

    with pytest.raises(TimeoutError, match="my own"):
        run_virtual(main())


def test_a_limit_is_told_by_its_name_whenever_it_begins() -> None:
    """(t + 0.3) - t is less than 0.3 for many a t."""

    async def main() -> None:
        waits = Waits()
        for _ in range(100):
            await asyncio.sleep(0.07)
            with pytest.raises(WaitTimeoutError, match=r"it: no answer in 0\.3 s"):
                await waits.limited(asyncio.Event().wait(), "it", 0.3)

    run_virtual(main())


def test_current_waits_are_listed_oldest_first_with_their_seconds() -> None:
    async def main() -> list[tuple[str, float]]:
        waits, listed = Waits(), []
        async with asyncio.TaskGroup() as group:
            group.create_task(waits.limited(asyncio.sleep(10), "first", None))
            await asyncio.sleep(2)
            group.create_task(waits.limited(asyncio.sleep(4), lambda: "second", 100.0))
            await asyncio.sleep(3)
            listed = waits.current()
        assert waits.current() == []
        return listed

    assert run_virtual(main()) == [("first", 5.0), ("second", 3.0)]


def test_cancelled_wait_leaves_no_name() -> None:
    async def main() -> list[tuple[str, float]]:
        waits = Waits()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(waits.limited(asyncio.Event().wait(), "for ever", None))
            await asyncio.sleep(1)
            task.cancel()
        return waits.current()

    assert run_virtual(main()) == []
