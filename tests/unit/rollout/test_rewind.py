"""Going back in the recipe's environments: on the loop, in user processes, and which environments can."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.rollouts import CharacterTokenizer, ScriptedSampler, rollout_request
from headrace.config import Settings
from headrace.errors import RecipeError
from headrace.recipe import RecipeCode
from headrace.rollout.rewind import Rewind, restore, rewind_of, take_snapshot
from headrace.rollout.user_call import UserCallError
from headrace.rollout.user_code import RecipeUserCode
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import Action, EndReason, Observation, RolloutKey, StopReason, Task, Trajectory

RECIPE = """
import copy, time
from headrace.types import Observation

class Plain:
    def reset(self, task):
        self.said = []
        return Observation(text="go")
    def step(self, action):
        if action.text == "hang": time.sleep(1000)
        self.said.append(action.text)
        return Observation(text=",".join(self.said)), 0.0, False

class Snapshots(Plain):
    def snapshot(self): return (list(self.said), lambda: "cannot be pickled")
    def restore(self, snapshot): self.said = list(snapshot[0])

class Loop(Snapshots):
    async def reset(self, task): return super().reset(task)
    async def step(self, action): return super().step(action)

class AsyncSnapshots(Loop):
    async def snapshot(self): return Snapshots.snapshot(self)
    async def restore(self, snapshot): Snapshots.restore(self, snapshot)

class Broken(Snapshots):
    def snapshot(self): raise OSError("no space for a snapshot")

class Replayable(Plain):
    replayable = True

def make_snapshots(): return Snapshots()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeCode:
    (tmp_path / "task.py").write_text(RECIPE)
    return RecipeCode(tmp_path / "task.py", {})


def settings_for(environment: str, verify: str = "all") -> Settings:
    return Settings.model_validate(
        {"task": {"environment": f"task:{environment}"}, "pool": {"verify": verify}, "rollout": {"max_environment_seconds": 1.0, "num_user_processes": 1}}
    )


def with_code(recipe: RecipeCode, environment: str, use: Callable[[RecipeUserCode], Awaitable[None]]) -> None:
    async def main() -> None:
        code = RecipeUserCode(recipe, settings_for(environment))
        try:
            await use(code)
        finally:
            await code.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def say(text: str) -> Action:
    return Action(text=text, tokens=(5,), stop_reason=StopReason.STOP)


def opened(code: RecipeUserCode, member: int = 0) -> Any:
    environment = code.open_environment(RolloutKey(0, member, 0))
    assert environment is not None
    return environment


TASK = Task(id="t", data={})


@pytest.mark.parametrize("name", ["Snapshots", "make_snapshots", "Loop", "AsyncSnapshots"])
def test_an_environment_goes_back_to_any_of_its_snapshots_wherever_it_lives(recipe: RecipeCode, name: str) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, other = opened(code), opened(code, 1)
        await environment.reset(TASK)
        await other.reset(TASK)
        snapshots = [await take_snapshot(environment)]
        for text in "abc":
            await environment.step(say(text))
            snapshots.append(await take_snapshot(environment))
        await other.step(say("x"))
        for step, told in ((2, "a,b,z"), (2, "a,b,z"), (0, "z"), (3, "a,b,c,z")):
            await restore(environment, snapshots[step])
            assert (await environment.step(say("z")))[0] == Observation(text=told)
        assert (await other.step(say("y")))[0] == Observation(text="x,y")
        assert environment.rewind is Rewind.SNAPSHOT

    with_code(recipe, name, use)


def test_a_snapshot_that_could_not_be_taken_in_a_process_is_told_when_it_is_needed(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment = opened(code)
        await environment.reset(TASK)
        snapshot = environment.snapshot()
        assert (await environment.step(say("a")))[0] == Observation(text="a")
        with pytest.raises(UserCallError, match=r"Broken.restore raised OSError: no space for a snapshot"):
            await environment.restore(snapshot)

    with_code(recipe, "Broken", use)


def test_snapshots_are_lost_with_their_process_and_the_loss_is_told(recipe: RecipeCode) -> None:
    async def use(code: RecipeUserCode) -> None:
        environment, guilty = opened(code), opened(code, 1)
        await environment.reset(TASK)
        snapshot = environment.snapshot()
        await guilty.reset(TASK)
        with pytest.raises(UserCallError, match="gave no answer in 1 s"):
            await guilty.step(say("hang"))
        with pytest.raises(UserCallError, match="did nothing wrong") as caught:
            await environment.restore(snapshot)
        assert caught.value.retryable

    with_code(recipe, "Snapshots", use)


@pytest.mark.parametrize(("name", "rewind"), [("Plain", Rewind.NONE), ("Snapshots", Rewind.SNAPSHOT), ("Replayable", Rewind.REPLAY), ("Loop", Rewind.SNAPSHOT)])
def test_how_an_environment_goes_back_is_read_from_its_class(recipe: RecipeCode, name: str, rewind: Rewind) -> None:
    kind = recipe.resolve(f"task:{name}")
    assert rewind_of(kind) is rewind_of(kind()) is rewind


def test_verification_of_an_environment_that_cannot_go_back_is_refused_at_the_start(recipe: RecipeCode) -> None:
    with pytest.raises(RecipeError, match=r"needs an environment that can go back, and 'task:Plain' cannot") as caught:
        RecipeUserCode(recipe, settings_for("Plain"))
    assert "snapshot() and restore(snapshot), or `replayable = True`" in str(caught.value.remedy)
    RecipeUserCode(recipe, settings_for("Plain", verify="off"))


@pytest.mark.parametrize("name", ["Snapshots", "Replayable"])
def test_a_verified_rollout_goes_on_in_its_process(recipe: RecipeCode, name: str) -> None:
    """What it shows after the cut follows from the answers that stand and the new ones, and from no other."""

    async def main() -> None:
        sampler = ScriptedSampler(seconds_per_token=0.001, action_tokens=lambda request: 2, reject=lambda request: request.checked[2][1])
        settings = settings_for(name).model_copy(update={"rollout": settings_for(name).rollout.model_copy(update={"max_steps": 4})})
        worker = RolloutWorkerCore("worker-0", sampler=sampler, code=recipe, tokenizer=CharacterTokenizer(), settings=settings)

        async def finished() -> Trajectory:
            while not (found := (await worker.next_report()).finished):
                pass
            return Trajectory.from_bytes(found[0].payload)

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            await worker.start([rollout_request(task=TASK)])
            first = await finished()
            await worker.verify([first.key])
            second = await finished()
            await worker.stop()
        assert (second.round, second.end_reason, len(second.steps)) == (1, EndReason.MAX_STEPS, 4)
        said = [text_of(second.tokens[step.action_start : step.action_end]) for step in second.steps]
        assert said[:2] == [text_of(first.tokens[step.action_start : step.action_end]) for step in first.steps[:2]]
        assert text_of(second.tokens).startswith(f"go{said[0]}{said[0]}{said[1]}{said[0]},{said[1]}{said[2]}{said[0]},{said[1]},{said[2]}{said[3]}")
        assert text_of(first.tokens) != text_of(second.tokens)

    asyncio.run(main())


def text_of(tokens: tuple[int, ...]) -> str:
    return CharacterTokenizer().decode(tokens, skip_special_tokens=True)
