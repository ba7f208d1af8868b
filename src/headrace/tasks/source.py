"""Tasks: from a file, a Hugging Face dataset or a function of the recipe, in a seeded order, epoch after epoch.

What files hold is said in files.py; a function yields Task records or such objects. Everything is read before the run starts, so that every
mistake shows then, with its place, and the order of an epoch, and with it any position in it, is known.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from headrace.config import Settings
from headrace.errors import ConfigError, Problem, RecipeError
from headrace.recipe import RecipeCode
from headrace.tasks.files import HUB, read_dataset, read_file
from headrace.types import Task

MAX_GENERATED_TASKS = 100_000
"""A function that yields without end gives this many tasks; lists and files are taken whole."""

_SOURCE_REMEDY = "Mend that function: tasks are read before anything starts."

logger = logging.getLogger(__name__)


class ListTaskSource:
    """Implements roles.TaskSource over a list. The order of an epoch depends on (seed, epoch) only: any position can be resumed.

    Without `num_epochs` it never ends. An epoch holds each task once.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True, num_epochs: int | None = None) -> None:
        if not tasks:
            raise ValueError("a task source needs at least one task")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._epoch = -1
        self._order: list[int] = []
        self.position = 0
        """Tasks handed out so far; setting it resumes there."""

    def __len__(self) -> int:
        return len(self._tasks)

    def next(self) -> Task:
        epoch, index = divmod(self.position, len(self._tasks))
        if self._num_epochs is not None and epoch >= self._num_epochs:
            raise StopIteration(f"{self._num_epochs} epochs of {len(self._tasks)} tasks are used up")
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        self.position += 1
        return self._tasks[self._order[index]]


def make_task_source(settings: Settings, code: RecipeCode) -> ListTaskSource:
    """The training tasks: all of task.source, less those set apart for evaluation. Raises ConfigError or RecipeError."""
    return ListTaskSource(split_tasks(settings, code)[0], seed=settings.run.seed, shuffle=settings.task.shuffle)


def evaluation_tasks(settings: Settings, code: RecipeCode) -> list[Task]:
    """The first evaluation.num_tasks of task.evaluation_source, or else of task.source. Raises ConfigError or RecipeError."""
    return split_tasks(settings, code)[1]


def load_tasks(reference: str, code: RecipeCode, *, setting: str = "task.source") -> list[Task]:
    """All tasks of a JSONL or Parquet file (relative to the recipe), of a Hugging Face dataset (`hf:NAME`) or of `MODULE:FUNCTION`; ids are
    unique and there is at least one task.

    Raises ConfigError when there is no such file or dataset, RecipeError naming file, line and key when its content is wrong.
    """
    if reference.startswith(HUB):
        origin = reference
        numbered = read_dataset(reference, setting)
    elif _names_function(reference, code):
        origin = f"{code.path}: '{reference}'"
        numbered = _from_function(code, reference, origin)
    else:
        path = code.path.parent / reference
        origin = str(path)
        numbered = read_file(path, reference, setting)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for place, item in numbered:
        task = _as_task(item, f"{origin}, {place}")
        if task.id in places:
            raise RecipeError(f"{origin}, {place}: id '{task.id}' was already used ({places[task.id]}).", remedy="Give each task an id of its own.")
        places[task.id] = place
        tasks.append(task)
    if not tasks:
        raise RecipeError(f"{origin} holds no tasks.", remedy=f"Give at least one task, or correct {setting}.")
    return tasks


def split_tasks(settings: Settings, code: RecipeCode) -> tuple[list[Task], list[Task]]:
    """(training, evaluation). One reading of the source: of a function that is not deterministic, two readings could overlap."""
    if settings.task.source is None:
        raise ConfigError(
            [
                Problem(
                    message="task.source is not set: there are no tasks.",
                    key="task.source",
                    remedy="Name a JSONL or Parquet file, `hf:NAME` or `task:function`.",
                )
            ]
        )
    tasks = load_tasks(settings.task.source, code)
    wanted = settings.evaluation.num_tasks
    if settings.task.evaluation_source is not None:
        return tasks, load_tasks(settings.task.evaluation_source, code, setting="task.evaluation_source")[:wanted]
    if len(tasks) <= wanted:
        raise ConfigError(
            [
                Problem(
                    message=f"task.source holds {len(tasks)} tasks and evaluation.num_tasks sets {wanted} of them apart: none is left to train on.",
                    key="evaluation.num_tasks",
                    value=wanted,
                    limit=f"below {len(tasks)}",
                    remedy="Lower evaluation.num_tasks, give more tasks, or name task.evaluation_source.",
                )
            ]
        )
    return tasks[wanted:], tasks[:wanted]


def _names_function(reference: str, code: RecipeCode) -> bool:
    """`task:function` is a function, anything else a file."""
    stem, colon, _ = reference.partition(":")
    return bool(colon) and (stem == code.path.stem or not (code.path.parent / reference).exists()) and "/" not in stem and "." not in stem


def _from_function(code: RecipeCode, reference: str, origin: str) -> Iterator[tuple[str, Any]]:
    function = code.resolve(reference)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{origin} raised {code.described(error)}.", remedy=_SOURCE_REMEDY) from error
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if asyncio.iscoroutine(result):
            result.close()
        raise RecipeError(f"{origin} is async.", remedy="Write a plain `def` that returns or yields tasks.")
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping):
        raise RecipeError(f"{origin} returned a {type(result).__name__}.", remedy="Return a list of tasks, or yield them.")
    limit = None if isinstance(result, Sized) else MAX_GENERATED_TASKS
    index = -1
    try:
        for index, item in enumerate(itertools.islice(iter(result), limit)):
            yield f"task number {index + 1}", item
    except (Exception, SystemExit) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{origin}, task number {index + 2}: it raised {code.described(error)}.", remedy=_SOURCE_REMEDY) from error
    if limit is not None and index + 1 == limit:
        logger.warning("%s yields %d tasks or more: the first %d are used. Return a list to use all.", origin, limit, limit)


def _as_task(item: Any, place: str) -> Task:
    task_id: Any
    kind: Any
    data: Any
    if isinstance(item, Task):
        task_id, kind, data = item.id, item.kind, item.data
    elif isinstance(item, Mapping):
        rest = {key: value for key, value in item.items() if key not in ("id", "kind", "data")}
        if "id" not in item:
            raise RecipeError(f"{place}: key 'id' is missing.", remedy="Give each task an id of its own.")
        if "data" in item and rest:
            raise RecipeError(f"{place}: key '{next(iter(rest))}' stands beside 'data'.", remedy="Put it into 'data', or leave 'data' out.")
        task_id, kind, data = item["id"], item.get("kind", "default"), item.get("data", rest)
    else:
        raise RecipeError(f"{place}: a {type(item).__name__} where a task belongs.", remedy="A task is an object with the keys id, kind and data.")
    if isinstance(task_id, int) and not isinstance(task_id, bool):
        task_id = str(task_id)
    if not isinstance(task_id, str) or not task_id:
        raise RecipeError(f"{place}: key 'id' is {task_id!r}.", remedy="Use a text or a whole number.")
    if not isinstance(kind, str) or not kind:
        raise RecipeError(f"{place}: key 'kind' is {kind!r}.", remedy="Use a text.")
    if not isinstance(data, Mapping):
        raise RecipeError(f"{place}: key 'data' is a {type(data).__name__}.", remedy="Use an object.")
    _check_json(data, place)
    for key, text in (("id", task_id), ("kind", kind)):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # no file could hold it: all recorded trajectories would be lost
            raise RecipeError(f"{place}: key '{key}' is {text!a}, which is half a character (a lone surrogate).", remedy="Use whole characters.") from error
    return Task(id=task_id, kind=kind, data=data)


def _check_json(data: Mapping[str, Any], place: str) -> None:
    """JSON values only: tasks travel between processes and into records."""
    for key, value in data.items():
        if not isinstance(key, str):
            raise RecipeError(f"{place}: the data's key {key!r} is a {type(key).__name__}.", remedy="Use texts as keys.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:  # the last: lists in lists without end
            raise RecipeError(f"{place}: the value of '{key}' is not JSON ({error}).", remedy="Use texts, numbers, booleans, lists and objects.") from error
