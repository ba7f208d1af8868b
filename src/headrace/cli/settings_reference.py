"""docs/settings.md, made from the settings' own models: `python -m headrace.cli.settings_reference > docs/settings.md`.

A test compares the file with what this module writes, so a new setting or rule cannot be forgotten.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headrace.config import Settings
from headrace.config_loading import fields

COMMAND = "python -m headrace.cli.settings_reference > docs/settings.md"

_UNITS_BY_NAME = {"seconds": "seconds", "bytes": "bytes", "tokens": "tokens", "staleness": "updates", "updates": "updates", "fraction": "0 to 1"}
_UNITS_BY_DESCRIPTION = {
    **{word: word.lower() for word in ("Updates", "Groups", "Trajectories", "Steps", "Attempts", "Batches", "Rollouts", "Demonstrations")},
    "Decode": "slots",
    "Failed": "rollouts",
    "Newest": "checkpoints",
}
_TYPES = {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text", "array": "list", "object": "table"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}

VALID: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "task": {"source": "task:tasks", "reward": "task:reward"}}
"""The smallest settings that break no rule."""

BROKEN: tuple[dict[str, dict[str, Any]], ...] = (
    {"run": {"mode": "async", "placement": "colocated"}},
    {"run": {"mode": "sync", "placement": "colocated", "num_samplers": 2, "num_learner_ranks": 1}},
    {"rollout": {"top_k": 50}},
    {"rollout": {"group_size": 1}},
    {"pool": {"max_staleness": 0}, "learner": {"num_minibatches": 4}},
    {"pool": {"quorum": 9}},
    {"run": {"mode": "sync"}, "pool": {"verify": "all"}},
    {"checkpoint": {"memory_copy": True, "every_seconds": 0}},
    {"pool": {"groups_per_batch": 2}, "learner": {"num_minibatches": 4}},
    {"learner": {"loss": "decoupled_ppo"}},
    {"learner": {"unmarked_fraction": 0.5, "loss": "gspo"}},
    {"model": {"path": "m", "prepare": "task:prepare"}},
    {"model": {"path": None}},
    {"model": {"architecture": {"hidden_size": 64}, "characters": "ab"}},
    {"task": {"source": None}},
    {"task": {"reward": None}},
    {"rollout": {"max_tokens": 128, "max_action_tokens": 128}},
    {"model": {"path": None, "characters": "ab", "architecture": {"model_type": "llama", "max_position_embeddings": 64}}},
    {"marks": {"rules": ["observation:[1-4"]}},
    {"evaluation": {"samples_per_task": 0}},
)
"""One example of each rule of Settings.check_rules; the document shows what it answers to them."""

_HEAD = f"""# Settings

Every setting of a recipe, in the order of `src/headrace/config.py`. This file is generated: `{COMMAND}`.

- In `recipe.toml` a section is a table: `[pool]`, then `max_staleness = 4`. On the command line: `pool.max_staleness=4`.
- Last wins: default, recipe file, command line. `headrace config RECIPE` shows every value and where it came from.
- *none* is a setting that is not given. In a file leave the key out; on the command line write `none`.
- Unknown keys are refused. Numbers must be finite.
- The word in brackets after a type is its unit. An update is one optimizer step.
"""


def reference() -> str:
    """The whole document."""
    parts = [_HEAD]
    for section, field in Settings.model_fields.items():
        rows = [_row(key, setting, schema) for key, setting, schema in fields() if key.startswith(section + ".")]
        table = "\n".join(["| setting | type | default | range | what |", "|---|---|---|---|---|", *rows])
        parts.append(f"## {section}\n\n{field.description}\n\n{table}\n")
    parts.append(_rules())
    return "\n".join(parts)


def broken_rules(example: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(key, what is wrong, what to do) of an example laid over VALID."""
    tree = {section: {**VALID.get(section, {}), **example.get(section, {})} for section in VALID.keys() | example.keys()}
    return Settings.model_validate(tree).check_rules()


def _rules() -> str:
    rows = ["| for example | setting named | what is wrong | what to do |", "|---|---|---|---|"]
    for example in BROKEN:
        shown = ", ".join(f"`{section}.{key} = {_text(value)}`" for section, values in example.items() for key, value in values.items())
        rows += [f"| {shown} | `{key}` | {_cell(what)} | {_cell(remedy)} |" for key, what, remedy in broken_rules(example)]
    text = "Beside its own range a setting has to fit the others. All broken rules come in one message. Each line is an example and the answer to it.\n\n"
    return "## Rules between settings\n\n" + text + "\n".join(rows) + "\n"


def _row(key: str, setting: Any, schema: Mapping[str, Any]) -> str:
    kind = _type(schema)
    if kind in ("whole number", "number") and (unit := unit_of(key, setting.description)):
        kind += f" ({unit})"
    default = _text(setting.get_default(call_default_factory=True))
    cells = (f"`{key.partition('.')[2]}`", kind, default if default == "none" else f"`{default}`", _range(schema), setting.description)
    return f"| {' | '.join(map(_cell, cells))} |"


def unit_of(key: str, description: str) -> str | None:
    """From the name's last word (`_seconds`), the thing it counts (`num_tasks`), or the description's first word."""
    words = key.rpartition(".")[2].split("_")
    if words[-1] in _UNITS_BY_NAME:
        return _UNITS_BY_NAME[words[-1]]
    if words[0] == "num" and len(words) > 1:
        return " ".join(words[1:])
    return _UNITS_BY_DESCRIPTION.get(description.split()[0])


def _branch(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema without its `null`."""
    branches: list[Mapping[str, Any]] = schema.get("anyOf", [schema])
    return next(branch for branch in branches if branch.get("type") != "null")


def _type(schema: Mapping[str, Any]) -> str:
    branch = _branch(schema)
    if "enum" in branch:
        return ", ".join(f"`{value}`" for value in branch["enum"])
    return _TYPES[str(branch.get("type", "object"))]


def _range(schema: Mapping[str, Any]) -> str:
    branch = _branch(schema)
    words = [f"{word} {branch[name]:,}" for name, word in _BOUNDS.items() if name in branch]
    if branch.get("minLength"):
        words.append("not empty")
    if branch.get("maxItems") is not None and branch.get("maxItems") == branch.get("minItems"):
        words.append(f"{branch['maxItems']} numbers")
    return ", ".join(words)


def _text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case list() | tuple():
            return "[" + ", ".join(_text(item) for item in value) + "]"
        case Mapping():
            return "{" + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
