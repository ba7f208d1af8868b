"""The user's plain Python in child processes: killed at its limit, replaced, and never in the way of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import Settings
from headrace.errors import RecipeError
from headrace.marks import StepView, TrajectoryView
from headrace.recipe import RecipeCode
from headrace.rollout.user_call import BLOCKING_SECONDS, UserCallError
from headrace.rollout.user_code import RecipeUserCode
from headrace.types import Action, EndReason, Observation, RolloutKey, StopReason, Task

RECIPE = '''
import asyncio, os, subprocess, sys, time
from headrace.types import Observation, Task

class Counter:
    """Plain def, stateful."""
    def __init__(self, start=0):
        self.count = start
    def reset(self, task):
        self.todo = task.data.get("do", "count")
        return Observation(text=f"{os.getpid()}")
    def step(self, action):
        if action.text == "hang": time.sleep(1000)
        if action.text == "spin":
            while True: pass
        if action.text == "die": os._exit(3)
        if action.text == "exit": sys.exit(4)
        if action.text == "raise": raise ValueError("no such door")
        if action.text == "unreadable": return lambda: 1, 0.0, True
        if action.text == "child":
            return Observation(text=str(subprocess.Popen(["sleep", "1000"]).pid)), 0.0, False
        if action.text == "print": print("hello from the user")
        if action.text == "slow": time.sleep(0.5)
        self.count += 1
        return Observation(text=str(self.count)), float(self.count), False

class Mixed:
    async def reset(self, task):
        await asyncio.sleep(0)
        return Observation(text="mixed")
    def step(self, action):
        return None, 1.0, True

class Quick:
    async def reset(self, task): return Observation(text="quick")
    async def step(self, action): return None, 1.0, True

class Blocking:
    async def reset(self, task):
        time.sleep(0.3)
        await asyncio.sleep(0)
        raise RuntimeError("after blocking")
    async def step(self, action): return None, 1.0, True

class NoStep:
    def reset(self, task): ...

def make_counter(start=0): return Counter(start)
def make_quick(): return Quick()
def make_broken(): raise OSError("no sandbox")
def make_number(): return 3
async def make_async(): return Quick()

def reward(task, answer):
    if answer == "hang": time.sleep(1000)
    if answer == "pid": return os.getpid()
    if "note" in task.data:
        with open(task.data["note"], "a") as file: file.write(answer)
        if answer == "s": time.sleep(0.3)
    return float(len(answer))
async def async_reward(task, answer): return 2.0

def marks(trajectory):
    if trajectory.steps[0].action == "hang": time.sleep(1000)
    if trajectory.steps[0].action == "raise": raise ValueError("no such door")
    return [os.getpid()] + [step.reward for step in trajectory.steps[1:]]
def lazy_marks(trajectory):
    for step in trajectory.steps: yield step.reward > 0
async def async_marks(trajectory): return [len(trajectory.task.data)] * len(trajectory.steps)
'''


def settings_for(
    environment: str | None = None, reward: str | None = None, limit_seconds: float = 20.0, num_processes: int = 1, marks: str | None = None
) -> Settings:
    return Settings.model_validate(
        {
            "marks": {"function": marks},
            "task": {"environment": environment, "reward": reward},
            "rollout": {"max_environment_seconds": limit_seconds, "num_user_processes": num_processes},
            "limits": {"startup_seconds": 60.0},
        }
    )


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeCode:
    (tmp_path / "task.py").write_text(RECIPE)
    return RecipeCode(tmp_path / "task.py", {})


def with_code(recipe: RecipeCode, use: Callable[[RecipeUserCode], Awaitable[None]], **settings: Any) -> None:
    """Runs `use`, then checks that no process and no thread's task is left (I13)."""

    async def main() -> None:
        code = RecipeUserCode(recipe, settings_for(**settings))
        try:
            await use(code)
        finally:
            pids = code.process_ids
            await code.close()
        assert not [pid for pid in pids if is_alive(pid)]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end between two looks
        return False


def key(member: int) -> RolloutKey:
    return RolloutKey(0, member, 0)


def say(text: str) -> Action:
    return Action(text=text, tokens=(5,), stop_reason=StopReason.STOP)


TASK = Task(id="t", data={})


async def reset(code: RecipeUserCode, member: int) -> Any:
    environment = code.open_environment(key(member))
    assert environment is not None
    observation = await environment.reset(TASK)
    assert isinstance(observation, Observation)
    return environment, observation.text


async def failure(awaitable: Awaitable[Any]) -> UserCallError:
    with pytest.raises(UserCallError) as caught:
        await awaitable
    return caught.value


def test_a_stateful_environment_lives_in_one_child_from_reset_to_its_end(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        assert code.process_ids == []  # started when first needed
        (one, pid), (other, _) = await reset(code, 1), await reset(code, 2)
        assert int(pid) != os.getpid() and [int(pid)] == code.process_ids
        for expected in (1, 2, 3):
            assert (await one.step(say("go")))[0].text == str(expected)
        assert (await other.step(say("go")))[0].text == "1"

    with_code(recipe, use, environment="task:Counter")


def test_environments_spread_over_the_processes(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        pids = [(await reset(code, member))[1] for member in range(6)]
        assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]

    with_code(recipe, use, environment="task:Counter", num_processes=2)


def test_a_released_environment_leaves_its_process(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        await reset(code, 1)
        other, _ = await reset(code, 2)
        code.release(key(1))
        await other.step(say("go"))
        home = code._homes[key(2)]
        error = await failure(home.call(("step", key(1), say("go")), name="step", limit_seconds=5))
        assert "KeyError" in str(error)

    with_code(recipe, use, environment="task:Counter")


def test_options_reach_the_environment_in_its_process(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(RECIPE)

    async def use(code: RecipeUserCode) -> None:
        environment, _ = await reset(code, 1)
        assert (await environment.step(say("go")))[0].text == "41"

    for reference in ("task:Counter", "task:make_counter"):
        with_code(RecipeCode(tmp_path / "task.py", {"start": 40, "other": 1}), use, environment=reference)


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_call_over_its_limit_is_killed_and_named_and_its_neighbours_may_be_tried_again(recipe: RecipeCode, how: str) -> None:
    async def use(code: RecipeUserCode) -> None:
        guilty, pid = await reset(code, 1)
        neighbour, _ = await reset(code, 2)
        error = await failure(guilty.step(say(how)))
        assert "Counter.step gave no answer in 0.5 s (rollout.max_environment_seconds): its process was killed" in str(error)
        assert not error.retryable
        assert not is_alive(int(pid))
        innocent = await failure(neighbour.step(say("go")))
        assert innocent.retryable
        assert "it did nothing wrong" in str(innocent) and "Counter.step gave no answer in 0.5 s" in str(innocent)
        fresh, new_pid = await reset(code, 3)
        assert new_pid != pid
        assert (await fresh.step(say("go")))[0].text == "1"

    with_code(recipe, use, environment="task:Counter", limit_seconds=0.5)


def test_a_call_that_waits_behind_a_hanging_one_is_made_again_in_the_next_process(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        guilty, _ = await reset(code, 1)
        neighbour, _ = await reset(code, 2)
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(failure(guilty.step(say("hang"))))
            await asyncio.sleep(0.05)
            stepping = group.create_task(failure(neighbour.step(say("go"))))
            resetting = group.create_task(reset(code, 3))
            grading = group.create_task(code.reward(TASK, "abc"))
        assert "no answer" in str(hanging.result())
        assert stepping.result().retryable
        assert (await resetting.result()[0].step(say("go")))[0].text == "1"
        assert grading.result() == 3.0

    with_code(recipe, use, environment="task:Counter", reward="task:reward", limit_seconds=0.5)


def test_the_loop_goes_on_while_the_users_code_hangs(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        guilty, _ = await reset(code, 1)
        turns = 0
        async with asyncio.TaskGroup() as group:
            hanging = group.create_task(failure(guilty.step(say("spin"))))
            while not hanging.done():
                await asyncio.sleep(0.01)
                turns += 1
        assert turns > 5

    with_code(recipe, use, environment="task:Counter", limit_seconds=0.6)


@pytest.mark.parametrize(
    ("action", "told", "survives"),
    [
        ("raise", "Counter.step raised ValueError: no such door (task.py:", True),
        ("exit", "Counter.step raised SystemExit: it called exit(4)", True),
        ("unreadable", "Counter.step raised", True),
        ("die", "Counter.step: its process ended with exit code 3 during the call", False),
    ],
)
def test_whatever_plain_code_does_is_named(recipe: RecipeCode, action: str, told: str, survives: bool) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, pid = await reset(code, 1)
        assert told in str(await failure(environment.step(say(action))))
        assert is_alive(int(pid)) is survives
        if survives:
            assert (await environment.step(say("go")))[0].text == "1"
        assert (await reset(code, 2))[0] is not None

    with_code(recipe, use, environment="task:Counter")


def test_a_cancelled_call_costs_its_neighbours_nothing(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        slow, _ = await reset(code, 1)
        other, _ = await reset(code, 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await slow.step(say("slow"))
        assert (await other.step(say("go")))[0].text == "1"
        assert (await slow.step(say("go")))[0].text == "2"  # the cancelled call ran to its end; its answer went nowhere

    with_code(recipe, use, environment="task:Counter")


def test_the_child_makes_every_call_that_it_was_sent_while_the_loop_is_busy(recipe: RecipeCode, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def use(code: RecipeUserCode) -> None:
        task = Task(id="t", data={"note": str(note)})
        await code.reward(task, "a")
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(code.reward(task, letter)) for letter in "bcdefgh"]
            await asyncio.sleep(0)
            deadline = time.monotonic() + 10.0
            while note.read_text() != "abcdefgh" and time.monotonic() < deadline:
                time.sleep(0.01)  # noqa: ASYNC251  the loop does not turn
            assert note.read_text() == "abcdefgh"
            assert not any(call.done() for call in calls)
        assert [call.result() for call in calls] == [1.0] * 7

    with_code(recipe, use, reward="task:reward")


def test_a_call_cancelled_before_it_began_is_never_made(recipe: RecipeCode, tmp_path: Path) -> None:
    note = tmp_path / "note"

    async def use(code: RecipeUserCode) -> None:
        task = Task(id="t", data={"note": str(note)})
        await code.reward(task, "a")
        async with asyncio.TaskGroup() as group:
            group.create_task(code.reward(task, "s"))
            cancelled, after = group.create_task(code.reward(task, "c")), group.create_task(code.reward(task, "dd"))
            await asyncio.sleep(0.05)
            cancelled.cancel()
        assert after.result() == 2.0
        assert note.read_text() == "asdd"

    with_code(recipe, use, reward="task:reward")


def test_each_calls_time_runs_from_its_own_beginning(recipe: RecipeCode, tmp_path: Path) -> None:
    """Five slow calls one after another take longer than the limit of each."""

    async def use(code: RecipeUserCode) -> None:
        task = Task(id="t", data={"note": str(tmp_path / "note")})
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(code.reward(task, "s")) for _ in range(5)]
        assert [call.result() for call in calls] == [1.0] * 5

    with_code(recipe, use, reward="task:reward", limit_seconds=1.2)


def test_a_process_that_ends_between_calls_costs_no_call(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        pid = int(await code.reward(TASK, "pid"))  # type: ignore[call-overload]
        os.kill(pid, signal.SIGKILL)
        while code.process_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await code.reward(TASK, "abc") == 3.0

    with_code(recipe, use, reward="task:reward")


def test_a_call_cancelled_while_its_process_starts_leaves_a_process_that_works(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        for patience in (0.0, 0.001, 0.01, 0.05):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await reset(code, 1)
        environment, _ = await reset(code, 2)
        assert (await environment.step(say("go")))[0].text == "1"

    with_code(recipe, use, environment="task:Counter")


def test_closing_while_a_process_starts_leaves_none(recipe: RecipeCode) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main() -> None:
        code = RecipeUserCode(recipe, settings_for("task:Counter"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await reset(code, 1)
        await code.close()

    asyncio.run(main())
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in left if "forkserver" not in " ".join(child.cmdline()) and "resource_tracker" not in " ".join(child.cmdline())]


def test_what_the_users_code_started_dies_with_its_process(recipe: RecipeCode) -> None:
    started: list[int] = []

    async def use(code: RecipeUserCode) -> None:
        environment, _ = await reset(code, 1)
        started.append(int((await environment.step(say("child")))[0].text))
        assert is_alive(started[0])

    with_code(recipe, use, environment="task:Counter")
    assert gone_soon(started[0])


def test_a_child_ends_when_its_parent_is_gone_although_it_hangs(recipe: RecipeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, pid = await reset(code, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await environment.step(say("spin"))
        home = code._homes[key(1)]
        assert home._connection is not None
        with monkeypatch.context() as here:
            here.setattr(home, "_end_now", lambda: None)  # a parent that is gone kills nobody
            home._connection.abort()  # what the kernel does then
            assert await asyncio.to_thread(gone_soon, int(pid))

    with_code(recipe, use, environment="task:Counter")


def gone_soon(pid: int) -> bool:
    deadline = time.monotonic() + 10.0
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from headrace.config import Settings
from headrace.recipe import RecipeCode
from headrace.rollout.user_code import RecipeUserCode
from headrace.types import Action, RolloutKey, StopReason, Task

async def main():
    settings = Settings.model_validate({"task": {"environment": "task:Counter"}})
    code = RecipeUserCode(RecipeCode(Path(sys.argv[1]), {}), settings)
    environment = code.open_environment(RolloutKey(0, 0, 0))
    await environment.reset(Task(id="t", data={}))
    await environment.step(Action(text="print", tokens=(1,), stop_reason=StopReason.STOP))
    await code.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_the_users_code_prints_goes_to_stderr_and_never_into_a_commands_json(recipe: RecipeCode) -> None:
    program = recipe.path.parent / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program), str(recipe.path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert "hello from the user" in done.stderr


def test_async_code_runs_on_the_loop_and_starts_no_process(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, text = await reset(code, 1)
        assert text == "quick"
        assert (await environment.step(say("go")))[2] is True
        assert await code.reward(TASK, "x") == 2.0
        assert code.process_ids == []
        assert code.warning() is None

    with_code(recipe, use, environment="task:Quick", reward="task:async_reward")
    with_code(recipe, use, environment="task:make_quick", reward="task:async_reward")


def test_an_environment_that_is_only_partly_async_runs_in_a_process(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, text = await reset(code, 1)
        assert (text, await environment.step(say("go"))) == ("mixed", (None, 1.0, True))
        assert len(code.process_ids) == 1

    with_code(recipe, use, environment="task:Mixed")


def test_a_plain_reward_function_runs_in_a_process_and_is_killed_at_its_limit(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        assert code.open_environment(key(1)) is None
        assert await code.reward(TASK, "pid") == code.process_ids[0] != os.getpid()
        assert "reward gave no answer in 0.5 s" in str(await failure(code.reward(TASK, "hang")))
        assert await code.reward(TASK, "four") == 4.0

    with_code(recipe, use, reward="task:reward", limit_seconds=0.5)


def view(*steps: tuple[str, float]) -> TrajectoryView:
    shown = tuple(StepView(observation="?", action=action, reward=reward) for action, reward in steps)
    return TrajectoryView(task=TASK, steps=shown, reward=1.0, end_reason=EndReason.DONE)


def test_a_plain_marking_function_runs_in_a_process_and_is_killed_at_its_limit(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        assert await code.mark(view(("go", 0.0), ("on", 0.5))) == [code.process_ids[0], 0.5]
        assert "marks raised ValueError: no such door (task.py:" in str(await failure(code.mark(view(("raise", 0.0)))))
        assert "marks gave no answer in 0.5 s" in str(await failure(code.mark(view(("hang", 0.0)))))
        assert (await code.mark(view(("go", 0.0))))[0] != os.getpid()  # type: ignore[index]

    with_code(recipe, use, marks="task:marks", limit_seconds=0.5)


def test_a_marking_function_may_be_a_generator_or_async(recipe: RecipeCode) -> None:
    async def lazy(code: RecipeUserCode) -> None:
        assert await code.mark(view(("go", 0.0), ("on", 0.5))) == [False, True]

    async def on_the_loop(code: RecipeUserCode) -> None:
        assert await code.mark(view(("go", 0.0), ("on", 0.5))) == [len(TASK.data)] * 2
        assert code.process_ids == []

    with_code(recipe, lazy, marks="task:lazy_marks")
    with_code(recipe, on_the_loop, marks="task:async_marks")


def test_async_code_that_blocks_the_loop_is_named(recipe: RecipeCode, caplog: pytest.LogCaptureFixture) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment = code.open_environment(key(1))
        assert environment is not None
        error = await failure(environment.reset(TASK))
        assert "RuntimeError: after blocking" in str(error) and "Blocking.reset held the event loop for" in str(error)
        warning = code.warning()
        assert warning is not None and "Blocking.reset held the event loop" in warning

    assert BLOCKING_SECONDS < 0.3
    with_code(recipe, use, environment="task:Blocking")
    assert "Blocking.reset" in caplog.text


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("task:NoStep", "'task:NoStep' has no method 'step'"),
        ("task:make_number", "makes a int, which has no method 'reset'"),
        ("task:make_broken", "'task:make_broken' raised OSError: no sandbox"),
        ("task:make_async", "is an async function"),
        ("task:Missing", "no function or class 'Missing'"),
    ],
)
def test_a_recipe_whose_environment_cannot_be_used_is_refused_at_the_start(recipe: RecipeCode, reference: str, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        RecipeUserCode(recipe, settings_for(reference))
    assert told in str(caught.value)
    assert str(recipe.path) in str(caught.value)
