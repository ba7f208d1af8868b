"""Calls of async user code on the loop: one timer serves the limits of all of them, and each keeps its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.clock import VirtualDeadlockError, now, run_virtual
from headrace.rollout.user_call import CallWatch, UserCallError, call_on_loop

LIMIT_SECONDS = 5.0


async def answer_after(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def called(watch: CallWatch, start: float, seconds: float) -> tuple[float, str]:
    """(when it ended, how) of a call that begins at `start` and takes so many seconds."""
    await asyncio.sleep(start)
    try:
        await call_on_loop(answer_after, seconds, name="answer_after", watch=watch)
    except UserCallError as error:
        return now(), error.message
    return now(), "answered"


def test_each_call_ends_at_its_own_limit_whoever_began_before_it_and_whoever_answered_meanwhile() -> None:
    watch = CallWatch(LIMIT_SECONDS)

    async def main() -> list[tuple[float, str]]:
        return await asyncio.gather(*(called(watch, start, seconds) for start, seconds in ((0, 4), (0, 9), (1, 2), (2, 60), (2, 4.5), (6, 4), (30, 60))))

    late = "answer_after gave no answer in 5 s (rollout.max_environment_seconds)"
    expected = [(4, "answered"), (5, late), (3, "answered"), (7, late), (6.5, "answered"), (10, "answered"), (35, late)]
    assert run_virtual(main()) == [(pytest.approx(when), how) for when, how in expected]


def test_no_timer_is_left_when_no_call_waits() -> None:
    ended = 0.0

    async def main() -> None:
        nonlocal ended
        await call_on_loop(answer_after, 1.0, name="answer_after", watch=CallWatch(LIMIT_SECONDS))
        ended = now()
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlockError):
        run_virtual(main())
    assert ended == 1.0


def test_a_watch_serves_one_loop_after_another() -> None:
    watch = CallWatch(LIMIT_SECONDS)
    for _ in range(2):
        assert run_virtual(called(watch, 1.0, 60.0))[0] == 6.0


def test_a_call_that_answers_although_it_was_told_to_end_keeps_its_answer_and_its_task_goes_on() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "all the same"
        return "too late"

    async def main() -> str:
        answer = await call_on_loop(stubborn, name="stubborn", watch=CallWatch(LIMIT_SECONDS))
        await asyncio.sleep(1)  # raises if the cancellation were still pending
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        return answer

    assert run_virtual(main()) == "all the same"


def test_who_is_cancelled_from_outside_at_its_limit_is_cancelled() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(call_on_loop(answer_after, 60.0, name="answer_after", watch=CallWatch(LIMIT_SECONDS)))
        asyncio.get_running_loop().call_at(LIMIT_SECONDS, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_a_timeout_of_the_users_own_is_not_taken_for_the_limit() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(1):
            await asyncio.sleep(60)

    async def main() -> str:
        with pytest.raises(UserCallError) as caught:
            await call_on_loop(impatient, name="impatient", watch=CallWatch(LIMIT_SECONDS))
        return caught.value.message

    assert run_virtual(main()).startswith("impatient raised TimeoutError")


def test_a_function_that_hands_out_any_awaitable_may_be_called() -> None:
    def hand_out() -> asyncio.Future[str]:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1, future.set_result, "later")
        return future

    async def main() -> str:
        return await call_on_loop(hand_out, name="hand_out", watch=CallWatch(LIMIT_SECONDS))

    assert run_virtual(main()) == "later"


class Panic(BaseException):
    """As libraries written in Rust raise it."""


async def awaits_what_is_cancelled() -> None:
    waiting = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_later(1, waiting.cancel)
    await waiting


async def is_cancelled_at_once() -> None:
    raise asyncio.CancelledError


async def panics() -> None:
    raise Panic("index out of bounds")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (awaits_what_is_cancelled, "raised CancelledError"),
        (is_cancelled_at_once, "something that it awaited was cancelled"),
        (panics, "raised Panic: index out of bounds"),
    ],
)
def test_whatever_a_call_raises_by_itself_is_its_failure_and_ends_nobody_else(function: Callable[[], Awaitable[None]], says: str) -> None:
    async def main() -> str:
        with pytest.raises(UserCallError) as caught:
            await call_on_loop(function, name="call", watch=CallWatch(LIMIT_SECONDS))
        return caught.value.message

    assert says in run_virtual(main())


def test_a_call_that_ignores_its_limit_once_is_not_cancelled_again_by_the_limit_of_another() -> None:
    watch = CallWatch(LIMIT_SECONDS)

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(10)

    async def other() -> None:
        await asyncio.sleep(2)
        with pytest.raises(UserCallError):
            await call_on_loop(answer_after, 60.0, name="answer_after", watch=watch)

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            await call_on_loop(stubborn, name="stubborn", watch=watch)
        return now()

    assert run_virtual(main()) == LIMIT_SECONDS + 10
