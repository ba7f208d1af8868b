"""What can be known to be wrong with a recipe before anything is started: its tasks, its Python, and whether the two fit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.config import Settings
from headrace.errors import RecipeError
from headrace.recipe import RecipeCode
from headrace.rollout.evaluation import resolve_evaluate
from headrace.rollout.user_code import RecipeUserCode
from headrace.tasks.source import split_tasks
from headrace.types import Task

T = TypeVar("T")

_NUM_NAMED = 5


async def read_recipe(settings: Settings, code: RecipeCode) -> tuple[list[Task], list[Task]]:
    """(training, evaluation) tasks, after every check that needs no model. Raises ConfigError or RecipeError.

    The recipe's Python runs in a thread of its own meanwhile: an import or a source function that never ends is named after
    limits.startup_seconds, and Ctrl-C works.
    """
    limit = settings.limits.startup_seconds
    try:
        async with asyncio.timeout(limit):
            return await _in_thread(lambda: _read(settings, code))
    except TimeoutError:
        raise RecipeError(
            f"{code.path}: importing it and reading its tasks ('{settings.task.source}') has not ended after {limit:g} s (limits.startup_seconds).",
            remedy="Look for a loop without end or a download; raise the limit if it needs longer.",
        ) from None


def _read(settings: Settings, code: RecipeCode) -> tuple[list[Task], list[Task]]:
    training, evaluation = split_tasks(settings, code)
    RecipeUserCode(code, settings)
    resolve_evaluate(code, settings)
    if settings.warm_start.demonstrations is not None:
        code.resolve(settings.warm_start.demonstrations)
    if settings.task.environment is None:
        check_prompts(settings, code, [*evaluation, *training])
    return training, evaluation


def check_prompts(settings: Settings, code: RecipeCode, tasks: Sequence[Task]) -> None:
    """One-step tasks need a prompt, of characters that a model from scratch knows. Raises RecipeError naming the tasks."""
    source = f"{code.path.parent.name}: task.source '{settings.task.source}'"
    chats = [task for task in tasks if "messages" in task.data]
    texts = [task for task in tasks if "messages" not in task.data]
    if wrong := [task for task in texts if not isinstance(task.data.get("prompt"), str) or not task.data["prompt"]]:
        raise RecipeError(
            f"{source}: {_named(wrong)} no 'prompt' that is a text and not empty.",
            remedy="One-step tasks need one in their data; tasks of several steps need task.environment.",
        )
    known = settings.model.characters
    if settings.model.path is not None or settings.model.prepare is not None or known is None:
        return
    if chats:
        raise RecipeError(f"{source}: {_named(chats)} 'messages', but a character tokenizer has no chat template.", remedy="Use 'prompt', or model.path.")
    if strange := sorted({character for task in texts for character in task.data["prompt"]} - set(known)):
        first = next(task for task in texts if strange[0] in task.data["prompt"])
        raise RecipeError(
            f"{source}: the prompt of task '{first.id}' holds {strange[0]!r}, which is not in model.characters.",
            remedy=f"Add {''.join(strange[:20])!r} to model.characters.",
        )


def check_chats(tasks: Sequence[Task], has_chat_template: bool) -> None:
    """Raises RecipeError for tasks with messages when the model's tokenizer cannot render them."""
    chats = [] if has_chat_template else [task for task in tasks if "messages" in task.data and "prompt" not in task.data]
    if chats:
        raise RecipeError(
            f"{_named(chats)} 'messages', but the model's tokenizer has no chat template.",
            remedy="Use 'prompt', or a model with a template (chat_template.jinja beside its tokenizer): instruction-tuned ones have one.",
        )


def _named(tasks: Sequence[Task]) -> str:
    names = ", ".join(f"'{task.id}'" for task in tasks[:_NUM_NAMED])
    more = f" and {len(tasks) - _NUM_NAMED} more" if len(tasks) > _NUM_NAMED else ""
    return f"task {names} has" if len(tasks) == 1 else f"tasks {names}{more} have"


async def _in_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a thread that never ends does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def set_result(value: T | None, error: BaseException | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(set_result, value, error)
        except RuntimeError:  # nobody waits any more: the loop is closed
            pass

    threading.Thread(target=work, name="recipe", daemon=True).start()
    return await result
