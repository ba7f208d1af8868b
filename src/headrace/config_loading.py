"""From a recipe's name to settings: find the recipe, read it, put command-line overrides on top, check everything at once.

Last wins: default < recipe file < plan < command line. Every problem of the file and of the overrides is reported in one ConfigError.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from headrace.config import Settings
from headrace.errors import ConfigError, Problem

RECIPE_FILE, RUN_FILE = "recipe.toml", "config.toml"
DEFAULT = "default"
COMMAND_LINE = "command line"

_TYPE_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "array": "a list",
    "object": "a table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """Settings and where each of them came from."""

    settings: Settings
    origins: Mapping[str, str]
    """Dotted key -> `default`, the recipe's path, the plan's path, or `command line`."""
    recipe: Path
    """The recipe file; absolute."""
    task_module: Path
    """The recipe's Python file; absolute."""
    promised: Mapping[str, Any] | None = None
    """What a plan or a profile says of a run with them, which its first event tells on."""

    @property
    def name(self) -> str:
        """What people call the recipe: its folder's name, or the file's when it is not called recipe.toml. The config.toml of a run says it
        by the place of the recipe's Python."""
        if self.recipe.name == RUN_FILE and self.task_module.parent != self.recipe.parent:
            return self.task_module.parent.name
        return self.recipe.parent.name if self.recipe.name == RECIPE_FILE else self.recipe.stem

    def anchored(self) -> Settings:
        """The same settings with the recipe's relative paths made absolute: what config.toml of a run directory holds."""
        task = {"module": str(self.task_module)}
        for key in ("source", "evaluation_source"):
            value = getattr(self.settings.task, key)
            if value is not None and (self.recipe.parent / value).is_file():
                task[key] = str((self.recipe.parent / value).resolve())
        update: dict[str, Any] = {"task": self.settings.task.model_copy(update=task)}
        path = self.settings.model.path
        if path is not None and (self.recipe.parent / path).is_dir():
            update["model"] = self.settings.model.model_copy(update={"path": str((self.recipe.parent / path).resolve())})
        return self.settings.model_copy(update=update)


def shipped_recipes() -> dict[str, Path]:
    """Name -> recipe file of the recipes that come with headrace: `_recipes` in an installed wheel, `recipes/` in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.parent.name: path for path in sorted(folder.glob(f"*/{RECIPE_FILE}"))}
    return {}


def find_recipe(name: str | Path) -> Path:
    """An existing file, else a directory with recipe.toml, else a shipped name. Raises ConfigError with the nearest names."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    if (path / RECIPE_FILE).is_file():
        return (path / RECIPE_FILE).resolve()
    shipped = shipped_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    what = f"directory '{name}' holds no {RECIPE_FILE}." if path.is_dir() else f"there is no recipe '{name}'."
    near = difflib.get_close_matches(str(name), shipped, n=3, cutoff=0.5)
    if near:
        remedy = f"Did you mean {' or '.join(repr(each) for each in near)}?"
    else:
        remedy = f"Give a recipe file, a directory with {RECIPE_FILE}, or a shipped name: {', '.join(shipped) or 'none is installed'}."
    raise ConfigError([Problem(message=what, key="recipe", value=str(name), remedy=remedy)])


def load_settings(recipe: str | Path, overrides: Sequence[str] = (), *, plan: tuple[str, Sequence[str]] | None = None) -> ResolvedSettings:
    """Settings of a recipe (see find_recipe) with `section.key=value` overrides on top; values are TOML, bare words are texts.

    `plan`: (file, overrides) that lie between the two. Raises ConfigError with every problem found.
    """
    path = find_recipe(recipe)
    shown = _shown(path)
    tree = _read_toml(path, shown)
    origins = dict.fromkeys(_leaves(tree), shown)
    problems = [] if plan is None else _put_overrides(tree, plan[1], origins, plan[0])
    problems += _put_overrides(tree, overrides, origins, COMMAND_LINE)
    settings, found = _validate(tree, origins, shown)
    problems += found
    module = (path.parent / settings.task.module).resolve()
    if not module.is_file() and not any(problem.key == "task.module" for problem in problems):
        problems.append(
            Problem(
                file=origins.get("task.module", shown),
                key="task.module",
                value=settings.task.module,
                message=f"'task.module' is '{settings.task.module}', but there is no file {module}.",
                remedy="Create it or correct task.module.",
            )
        )
    if problems:
        raise ConfigError(problems)
    every = {key: origins.get(key, DEFAULT) for key, _, _ in fields()}
    every |= {key: origin for key, origin in origins.items() if key not in every}
    return ResolvedSettings(settings=settings, origins=every, recipe=path, task_module=module)


def make_settings(tree: Mapping[str, Mapping[str, Any]], overrides: Sequence[str] = (), *, file: str) -> Settings:
    """Settings (section -> key -> value) that no recipe file holds, with overrides on top. `file`: where people would look for the tree.

    Raises ConfigError with every problem found.
    """
    values: dict[str, Any] = {section: dict(keys) for section, keys in tree.items()}
    origins = dict.fromkeys(_leaves(values), file)
    problems = _put_overrides(values, overrides, origins, COMMAND_LINE)
    settings, found = _validate(values, origins, file)
    if problems or found:
        raise ConfigError([*problems, *found])
    return settings


@cache
def fields() -> tuple[tuple[str, FieldInfo, dict[str, Any]], ...]:
    """(dotted key, field, JSON schema) of every setting, in the order of config.py. Sections themselves are left out."""
    return tuple(_fields(Settings, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, dict[str, Any]]]:
    properties = model.model_json_schema()
    definitions = properties.get("$defs", {})
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _fields(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, _inline(properties["properties"][name], definitions)


def value_of(settings: Settings, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = settings
    for part in key.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def plain_values(settings: Settings) -> dict[str, Any]:
    """Dotted key -> JSON value of every setting; None stays None."""
    dumped = settings.model_dump(mode="json")
    return {key: dumped[key.partition(".")[0]][key.partition(".")[2]] for key, _, _ in fields()}


def dump_toml(settings: Settings) -> str:
    """The settings as a recipe file that loads back equal. A setting that is None is left out: that is its default."""
    parts = []
    for section, values in settings.model_dump(mode="json").items():
        lines = [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
        parts.append(f"[{section}]\n" + "\n".join(lines) + "\n" if lines else f"[{section}]\n")
    return "\n".join(parts)


def _shown(path: Path) -> str:
    """As the user would type it: relative where the file lies below the working directory."""
    here = Path.cwd()
    return os.fspath(path.relative_to(here)) if path.is_relative_to(here) else os.fspath(path)


def _read_toml(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(file=shown, message=f"not valid TOML: {error}.", remedy="Correct that line.")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(file=shown, message=f"not UTF-8 text: {error.reason} at byte {error.start}.", remedy="Save it as UTF-8.")]) from error
    except OSError as error:
        raise ConfigError([Problem(file=shown, message=f"cannot be read: {error.strerror}.", remedy="Check the path and its rights.")]) from error


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys that a file sets; a table below a known setting (task.options, model.architecture) is one key."""
    known = {key for key, _, _ in fields()}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known and key in Settings.model_fields:
            yield from _leaves(value, f"{key}.")
        else:
            yield key


def _put_overrides(tree: dict[str, Any], overrides: Sequence[str], origins: dict[str, str], origin: str) -> list[Problem]:
    """Writes each `section.key=value` into the tree. Below a setting that is a table, the rest of the key is a path in it."""
    problems = []
    tables = {key: schema for key, _, schema in fields()}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.append(
                Problem(
                    file=origin,
                    key=key or None,
                    value=override,
                    message=f"'{override}' is not of the form section.key=value.",
                    remedy="Write, for example, pool.max_staleness=4.",
                )
            )
            continue
        setting = next((name for name in tables if key == name or key.startswith(name + ".")), key)
        node = tree
        parts = key.split(".")
        for part in parts[:-1]:
            child = node.get(part)
            child = dict(child) if isinstance(child, Mapping) else {}
            node[part] = child
            node = child
        node[parts[-1]] = _parse_override(text.strip(), tables.get(key))
        origins[setting] = origin
    return problems


def _parse_override(text: str, schema: dict[str, Any] | None) -> Any:
    types = _schema_types(schema) if schema is not None else set()
    if text == "none" and "null" in types:
        return None
    try:
        value = tomllib.loads(f"value = {text}\n")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if types and types <= {"string", "null"} and not isinstance(value, str) else value


def _validate(tree: dict[str, Any], origins: Mapping[str, str], shown: str) -> tuple[Settings, list[Problem]]:
    """Settings and problems. With problems the settings hold defaults in the wrong places, so that rules can be checked as well."""
    problems: list[Problem] = []
    try:
        # JSON mode is strict about types (true is not 1, "4" is not 4) but takes the texts of enumerations
        settings = Settings.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        wrong: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            key = _key_of(detail["loc"])
            wrong.setdefault(key, _problem(detail, key, tree, origins, shown))
        problems = list(wrong.values())
        settings = _without(tree, wrong)
    names = {*Settings.model_fields, *(key for key, _, _ in fields())}
    doubtful = names & {word for problem in problems for word in (problem.key, *_quoted(problem.remedy or ""))}
    for key, what, remedy in settings.check_rules():
        if any(word in f"{key} {what} {remedy}" for word in doubtful):
            continue  # may follow from a problem that is reported already
        value = value_of(settings, key)
        problems.append(
            Problem(
                file=origins.get(key, shown),
                key=key,
                value=_json_value(value),
                limit=what,
                message=f"'{key}' is {_value_text(value)}: {what}.",
                remedy=remedy,
            )
        )
    return settings, problems


def _without(tree: Mapping[str, Any], wrong: Iterable[str]) -> Settings:
    kept: dict[str, Any] = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
    for key in wrong:
        section, _, name = key.partition(".")
        if not name or not isinstance(kept.get(section), dict):
            kept.pop(section, None)
        else:
            kept[section].pop(name.partition(".")[0], None)
    return Settings.model_validate_json(json.dumps(kept, default=str), strict=True)


def _key_of(location: Sequence[str | int]) -> str:
    """The dotted key of a pydantic location; indices and branches of unions below a setting are left out."""
    known = {key for key, _, _ in fields()}
    key = ""
    for part in location:
        key = f"{key}.{part}" if key else str(part)
        if key in known:
            break
    return key


def _problem(detail: ErrorDetails, key: str, tree: Mapping[str, Any], origins: Mapping[str, str], shown: str) -> Problem:
    file = next((origin for name, origin in origins.items() if name == key or name.startswith(key + ".")), shown)
    value = _lookup(tree, key)
    if detail["type"] == "extra_forbidden":
        return _unknown_key(key, value, file)
    if key in Settings.model_fields:
        return Problem(
            file=file,
            key=key,
            value=_json_value(value),
            limit="a section",
            message=f"'{key}' is {_value_text(value)}, but it is a section.",
            remedy=f"Write [{key}] and its keys below it.",
        )
    field, schema = next((field, schema) for name, field, schema in fields() if name == key)
    limit = _limit(schema)
    if detail["type"] == "finite_number":
        limit = limit.replace("a number", "a finite number")
    choices = _choices(schema)
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    remedy = f"Did you mean '{near[0]}'?" if near else f"The default is {_value_text(field.get_default(call_default_factory=True))}."
    return Problem(
        file=file,
        key=key,
        value=_json_value(value),
        limit=limit,
        message=f"'{key}' is {_value_text(value)}, it must be {limit}.",
        remedy=remedy,
    )


def _unknown_key(key: str, value: Any, file: str) -> Problem:
    known = [name for name, _, _ in fields()]
    section, _, name = key.partition(".")
    if not name and isinstance(value, Mapping):
        near = difflib.get_close_matches(section, Settings.model_fields, n=1, cutoff=0.5)
        remedy = f"Did you mean '[{near[0]}]'?" if near else f"Sections are {', '.join(Settings.model_fields)}."
        return Problem(file=file, key=key, limit="a known section", message=f"unknown section '[{section}]'.", remedy=remedy)
    siblings = {each.partition(".")[2]: each for each in known if each.startswith(section + ".")}
    leaf = name or section
    near = [each for each in known if each.partition(".")[2] == leaf]
    leaves = siblings or {each.partition(".")[2]: each for each in known}
    near += [leaves[each] for each in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    if near:
        remedy = f"Did you mean '{near[0]}'?"
    else:
        remedy = f"Known keys: {', '.join(siblings.values())}." if siblings else f"Sections are {', '.join(Settings.model_fields)}."
    return Problem(file=file, key=key, value=_json_value(value), limit="a known key", message=f"unknown key '{key}'.", remedy=remedy)


def _inline(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    inlined = dict(schema)
    if "anyOf" in schema:
        inlined["anyOf"] = [_inline(branch, definitions) for branch in schema["anyOf"]]
    return inlined


def _schema_types(schema: Mapping[str, Any]) -> set[str]:
    branches = schema.get("anyOf", [schema])
    return {str(branch.get("type", "object")) for branch in branches}


def _choices(schema: Mapping[str, Any]) -> list[str]:
    return [str(value) for branch in schema.get("anyOf", [schema]) for value in branch.get("enum", ())]


def _limit(schema: Mapping[str, Any]) -> str:
    """What a setting accepts, for people: `a whole number, at least 0`."""
    choices = _choices(schema)
    if choices:
        return f"one of {', '.join(choices)}"
    branch = next(branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null")
    words = [_TYPE_WORDS[str(branch.get("type", "object"))]]
    if branch.get("type") == "array" and branch.get("minItems") == branch.get("maxItems") is not None:
        words[0] = f"a list of {branch['maxItems']}"
    elif branch.get("type") == "array":
        words[0] = f"a list of {branch.get('items', {}).get('type', 'value')}s"
    names = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    words += [f"{word} {branch[name]:g}" for name, word in names.items() if name in branch]
    if branch.get("minLength"):
        words.append("not empty")
    return ", ".join(words)


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _quoted(text: str) -> list[str]:
    return [part.strip("[]") for part in text.split("'")[1::2]]


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _value_text(value: Any) -> str:
    """A value as the recipe file would show it."""
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "a section"
    try:
        return _toml_value(value)
    except TypeError:
        return repr(value)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _toml_text(value)
        case int():
            return str(value)
        case float():
            return repr(value)
        case Mapping():
            return "{" + ", ".join(f"{_toml_text(name)} = {_toml_value(item)}" for name, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_toml_value(item) for item in value) + "]"
        case _:
            raise TypeError(f"{type(value).__name__} has no TOML form: {value!r}")


def _toml_text(text: str) -> str:
    # JSON's escapes are TOML's, but TOML also wants DEL escaped
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
