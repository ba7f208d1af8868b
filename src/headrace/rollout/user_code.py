"""The recipe's environment, reward and marking function, ready to be awaited: async code on the loop, plain `def` code in processes of its own.

Python of the user that is not async never blocks decoding: it runs in `rollout.num_user_processes` child processes, started when
they are first needed, killed at a call's limit and replaced. A stateful environment lives in one of them from reset to the end
of its rollout. When a process is killed, the guilty call fails with its limit; the other environments that lived there fail
with an error that says so and is retryable; calls that had not begun are made again in another process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from headrace.config import Settings, Verify
from headrace.errors import RecipeError
from headrace.marks import TrajectoryView
from headrace.recipe import RecipeCode
from headrace.roles import Environment
from headrace.rollout.rewind import Rewind, rewind_of
from headrace.rollout.user_call import CallWatch, LoopEnvironment, UserCallError, call_on_loop, describe_exception
from headrace.rollout.user_process import UnsentCallError, UserProcess
from headrace.types import Action, Observation, Outcome, RolloutKey, Task

_TRIES = 3


class RecipeUserCode:
    """Implements UserCode of rollout/roll_out for a recipe's module. Raises RecipeError when its functions cannot be used."""

    def __init__(self, recipe: RecipeCode, settings: Settings) -> None:
        self._recipe = recipe
        self._limit_seconds = settings.rollout.max_environment_seconds
        self._watch = CallWatch(self._limit_seconds)
        self._environment = settings.task.environment
        self._reward = settings.task.reward
        self._make_environment = None if self._environment is None else recipe.resolve(self._environment)
        self._grade = None if self._reward is None else recipe.resolve(self._reward)
        self._mark_name = settings.marks.function
        self._mark = None if self._mark_name is None else recipe.resolve(self._mark_name)
        self._environment_is_async, self._rewind = False, Rewind.NONE
        if self._make_environment is not None:
            kind = _environment_kind(recipe, str(self._environment), self._make_environment)
            self._environment_is_async = all(_is_async(getattr(kind, method)) for method in ("reset", "step"))
            self._rewind = rewind_of(kind)
            if settings.pool.verify is not Verify.OFF and self._rewind is Rewind.NONE:
                raise RecipeError(
                    f"{recipe.path}: pool.verify = '{settings.pool.verify}' needs an environment that can go back, and '{self._environment}' cannot.",
                    remedy="Give it snapshot() and restore(snapshot), or `replayable = True` if its answers follow from task and actions alone.",
                )
        self._reward_is_async = self._grade is not None and _is_async(self._grade)
        self._processes: list[UserProcess | None] = [None] * settings.rollout.num_user_processes
        self._startup_seconds = settings.limits.startup_seconds
        self._homes: dict[RolloutKey, UserProcess] = {}

    @property
    def has_reward(self) -> bool:
        return self._grade is not None

    @property
    def process_ids(self) -> list[int]:
        """Of the live child processes."""
        return [process.pid for process in self._processes if process is not None and process.lost is None and process.pid is not None]

    def open_environment(self, key: RolloutKey) -> Environment | None:
        if self._make_environment is None:
            return None
        if self._environment_is_async:
            return LoopEnvironment(self._make_environment(), watch=self._watch)
        return _ProcessEnvironment(self, key, _name_of(self._make_environment), self._rewind)

    def release(self, key: RolloutKey) -> None:
        home = self._homes.pop(key, None)
        if home is not None:
            home.tell(("drop", key))

    async def reward(self, task: Task, answer: str) -> object:
        assert self._grade is not None
        name = _name_of(self._grade)
        if self._reward_is_async:
            return await call_on_loop(self._grade, task, answer, name=name, watch=self._watch)
        return await self._call_anywhere(("grade", task, answer), name)

    async def mark(self, trajectory: TrajectoryView) -> object:
        """What the recipe's marking function returned, unchecked."""
        assert self._mark is not None
        if _is_async(self._mark):
            return await call_on_loop(self._mark, trajectory, name=_name_of(self._mark), watch=self._watch)
        return await self._call_anywhere(("mark", str(self._mark_name), trajectory), _name_of(self._mark))

    def warning(self) -> str | None:
        return self._watch.text()

    async def close(self) -> None:
        for process in self._processes:
            if process is not None:
                await process.close()
        self._homes.clear()

    async def reset(self, key: RolloutKey, task: Task, name: str) -> Any:
        """Makes the environment of a rollout in a process and resets it."""
        return await self._call_anywhere(("reset", key, task), f"{name}.reset", key)

    async def step(self, key: RolloutKey, action: Action, name: str) -> Any:
        return await self._call_at_home(("step", key, action), f"{name}.step", key)

    def snapshot(self, key: RolloutKey, number: int) -> None:
        """The environment's process takes a snapshot between this answer and the next call, and keeps it under that number."""
        self._homes[key].tell(("snapshot", key, number))

    async def restore(self, key: RolloutKey, number: int, name: str) -> None:
        """Raises UserCallError also for what taking the snapshot raised."""
        await self._call_at_home(("restore", key, number), f"{name}.restore", key)

    async def _call_at_home(self, message: tuple[Any, ...], name: str, key: RolloutKey) -> Any:
        home = self._homes[key]
        if home.lost is not None:
            raise UserCallError(_innocent(name, home.lost), retryable=True)
        try:
            return await home.call(message, name=name, limit_seconds=self._limit_seconds)
        except UnsentCallError as error:
            raise UserCallError(_innocent(name, home.lost or error.message), retryable=True) from error

    async def _call_anywhere(self, message: tuple[Any, ...], name: str, key: RolloutKey | None = None) -> Any:
        """A call that needs no state: made again elsewhere when its process is lost before it began."""
        error: UnsentCallError | None = None
        for _ in range(_TRIES):
            process = self._least_loaded()
            if key is not None:
                self._homes[key] = process
            try:
                return await process.call(message, name=name, limit_seconds=self._limit_seconds)
            except UnsentCallError as unsent:
                error = unsent
        assert error is not None
        raise UserCallError(f"{error.message} (three processes in a row)", retryable=True) from error

    def _least_loaded(self) -> UserProcess:
        loads = [0] * len(self._processes)
        for index, process in enumerate(self._processes):
            if process is None or process.lost is not None:
                process = self._processes[index] = UserProcess(
                    self._recipe, environment=self._environment, reward=self._reward, startup_seconds=self._startup_seconds
                )
            loads[index] = process.num_calls + sum(home is process for home in self._homes.values())
        chosen = self._processes[loads.index(min(loads))]
        assert chosen is not None
        return chosen


class _ProcessEnvironment:
    """The handle of an environment that lives in a child process under its rollout's key."""

    def __init__(self, owner: RecipeUserCode, key: RolloutKey, name: str, rewind: Rewind) -> None:
        self.name = name
        self.rewind = rewind
        self._owner = owner
        self._key = key
        self._num_snapshots = 0

    async def reset(self, task: Task) -> Observation:
        observation: Observation = await self._owner.reset(self._key, task, self.name)
        return observation

    async def step(self, action: Action) -> Outcome | tuple[Observation | None, float, bool]:
        outcome: Outcome = await self._owner.step(self._key, action, self.name)
        return outcome

    def snapshot(self) -> int:
        """Its number. It stays in the process, so whatever it holds need not be picklable."""
        self._owner.snapshot(self._key, self._num_snapshots)
        self._num_snapshots += 1
        return self._num_snapshots - 1

    async def restore(self, snapshot: int) -> None:
        await self._owner.restore(self._key, snapshot, self.name)


def _innocent(name: str, reason: str) -> str:
    return f"{name} was lost because the process that it shared was killed ({reason}); it did nothing wrong and can be tried again"


def _environment_kind(recipe: RecipeCode, reference: str, make: Callable[..., Any]) -> Any:
    """The class, or what a factory function made when it was called once. Raises RecipeError when it cannot be an environment."""
    target = make.func if isinstance(make, functools.partial) else make
    if inspect.iscoroutinefunction(target):
        raise RecipeError(f"{recipe.path}: '{reference}' is an async function.", remedy="Return the environment from a plain `def`, or name the class.")
    if inspect.isclass(target):
        kind: Any = target
    else:
        try:
            kind = make()
        except (Exception, SystemExit) as error:
            raise RecipeError(f"{recipe.path}: '{reference}' raised {describe_exception(error)}.") from error
    for method in ("reset", "step"):
        if not callable(getattr(kind, method, None)):
            made = "has" if kind is target else f"makes a {type(kind).__name__}, which has"
            raise RecipeError(f"{recipe.path}: '{reference}' {made} no method '{method}'.", remedy="An environment has reset(task) and step(action).")
    return kind


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _name_of(function: Callable[..., Any]) -> str:
    target = function.func if isinstance(function, functools.partial) else function
    return str(getattr(target, "__qualname__", type(target).__name__))
