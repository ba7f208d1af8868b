"""What can be known to be wrong with a recipe before anything is started: its tasks, its Python, and whether the two fit."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import json
import logging
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.config import Settings
from headrace.errors import ConfigError, Problem, RecipeError
from headrace.recipe import RecipeCode
from headrace.rollout.evaluation import resolve_evaluate
from headrace.rollout.user_code import RecipeUserCode
from headrace.tasks.source import split_tasks
from headrace.types import Task

T = TypeVar("T")

_NUM_NAMED = 5
_NUM_MEASURED = 256
"""Tasks of each kind whose prompts are measured."""
_MAX_SPECIAL_TOKENS = 8

_KINDS = {type(None): "None", ast.JoinedStr: "a text", ast.Tuple: "a tuple", ast.List: "a list", ast.ListComp: "a list", ast.Dict: "a dictionary"}

logger = logging.getLogger(__name__)


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
    check_context(settings)
    training, evaluation = split_tasks(settings, code)
    RecipeUserCode(code, settings)
    resolve_evaluate(code, settings)
    if settings.warm_start.demonstrations is not None:
        code.resolve(settings.warm_start.demonstrations)
    if settings.task.reward is not None:
        check_reward(code, settings.task.reward)
    if settings.marks.function is not None:
        _check_call(code, settings.marks.function, "trajectory", "A marking function takes a trajectory and returns one weight a step.")
    if settings.task.environment is None:
        check_prompts(settings, code, [*evaluation, *training])
        check_lengths(settings, code, training, evaluation)
    return training, evaluation


def check_context(settings: Settings) -> None:
    """rollout.max_tokens must fit the model that model.path names, where that is a directory. Raises ConfigError. (Of a model from scratch
    the settings say it; of one that is not here yet its role does, once it is loaded.)"""
    if settings.model.path is None:
        return
    file = Path(settings.model.path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # no directory, or whatever is wrong with it is told with the model
        return
    if isinstance(positions, int) and settings.rollout.max_tokens > positions:
        message = f"rollout.max_tokens is {settings.rollout.max_tokens}, but the model has {positions} positions ({file}: max_position_embeddings)."
        limit, remedy = f"at most {positions}", "Lower rollout.max_tokens, or take a model with a longer context."
        raise ConfigError([Problem(key="rollout.max_tokens", value=settings.rollout.max_tokens, limit=limit, message=message, remedy=remedy)])


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


def check_reward(code: RecipeCode, reference: str) -> None:
    """What is sure without calling it: that it takes (task, answer), and that what it returns can be a number. Raises RecipeError."""
    function = _check_call(code, reference, "task, answer", "A reward function takes a task and the text of an answer.")
    target = function.func if isinstance(function, functools.partial) else function
    if wrong := _never_a_number(target):
        raise RecipeError(f"{code.path}: '{reference}' {wrong}.", remedy="A reward function returns a finite number.")


def _check_call(code: RecipeCode, reference: str, parameters: str, remedy: str) -> Callable[..., Any]:
    """The function, if it can be called with as many arguments. Raises RecipeError."""
    function = code.resolve(reference)
    with contextlib.suppress(ValueError):  # written in C: nothing can be known
        try:
            inspect.signature(function).bind(*parameters.split(", "))
        except TypeError as error:
            raise RecipeError(f"{code.path}: '{reference}' cannot be called with ({parameters}): {error}.", remedy=remedy) from error
    return function


def _never_a_number(function: Any) -> str | None:
    """For people: what each `return` of a function gives where none can give a number; None where that is not sure."""
    if not inspect.isfunction(function):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) or tree.decorator_list:
        return None
    inner: list[ast.AST] = [*tree.body]
    returned: list[ast.expr | None] = []
    while inner:
        node = inner.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return "is a generator"
        if isinstance(node, ast.Return):
            returned.append(node.value)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            inner.extend(ast.iter_child_nodes(node))
    if not returned and any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
        return None
    kinds = [_KINDS.get(type(value)) if not isinstance(value, ast.Constant) else _constant_kind(value.value) for value in returned] or ["None"]
    if not all(kinds):
        return None
    return "returns nothing" if set(kinds) == {"None"} else f"returns {kinds[0]}, not a number"


def _constant_kind(value: object) -> str | None:
    return "None" if value is None else "a text" if isinstance(value, str | bytes) else None


def check_lengths(settings: Settings, code: RecipeCode, training: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Prompts must leave room for an answer in rollout.max_tokens. Raises RecipeError when none does; some that do not are told of:
    their rollouts will fail, which a run can live with. Without a tokenizer at hand nothing is said before the model is loaded.
    """
    limit = settings.rollout.max_tokens
    for key, tasks in (("task.source", training), ("evaluation", evaluation)):
        looked_at = tasks[:_NUM_MEASURED]
        found = _too_long(settings, looked_at)
        if not found:
            continue
        task, num_tokens = found[0]
        text = (
            f"{code.path.parent.name}: the prompt of task '{task.id}' ({key}) has {num_tokens} tokens and leaves no room for an answer: "
            f"rollout.max_tokens is {limit}"
        )
        if len(found) == len(looked_at):
            others = f"; so it is with all {len(found)} that were looked at" if len(found) > 1 else ""
            raise RecipeError(f"{text}{others}.", remedy="Raise rollout.max_tokens, or shorten the prompts.")
        logger.warning("%s. So it is with %d of the first %d tasks: their rollouts will fail.", text, len(found), len(looked_at))


def _too_long(settings: Settings, tasks: Sequence[Task]) -> list[tuple[Task, int]]:
    """Those among the tasks, each with the tokens of its prompt (of a chat: of its messages alone, the template adds some)."""
    limit = settings.rollout.max_tokens
    texts = {task.id: _texts(task) for task in tasks}
    # no tokenizer makes more tokens than bytes, but for the few that it adds: most recipes need none to be sure
    suspects = [task for task in tasks if sum(len(text.encode()) for text in texts[task.id]) + _MAX_SPECIAL_TOKENS >= limit]
    count = _token_counter(settings) if suspects else None
    if count is None:
        return []
    counted = ((task, sum(count(text) for text in texts[task.id])) for task in suspects)
    return [(task, number) for task, number in counted if number >= limit]


def _texts(task: Task) -> list[str]:
    prompt, messages = task.data.get("prompt"), task.data.get("messages")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(messages, list | tuple):
        return []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return [content for content in contents if isinstance(content, str)]


def _token_counter(settings: Settings) -> Callable[[str], int] | None:
    """Tokens of a text, where that can be known without loading or fetching a model."""
    if settings.model.prepare is not None:
        return None
    if settings.model.path is None:
        return len  # a model from scratch: one token a character
    file = Path(settings.model.path) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # whatever is wrong with it is told with the model
        return None
    return lambda text: len(tokenizer.encode(text).ids)


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
