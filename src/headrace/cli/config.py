"""`headrace config`: every setting, its value and where it came from."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli.output import Output
from headrace.config_loading import DEFAULT, ResolvedSettings, load_settings, plain_values

_PIPE_COLUMNS = 120


def execute(arguments: argparse.Namespace, output: Output) -> int:
    resolved = load_settings(arguments.recipe, arguments.overrides)
    print_settings(resolved, output)
    output.result(settings_object(resolved))
    return 0


def settings_object(resolved: ResolvedSettings) -> dict[str, Any]:
    """The part of the JSON object that `config` and `run --dry-run` share."""
    values = plain_values(resolved.settings)
    return {
        "recipe": str(resolved.recipe),
        "task_module": str(resolved.task_module),
        "settings": {key: {"value": value, "origin": resolved.origins[key]} for key, value in values.items()},
    }


def print_settings(resolved: ResolvedSettings, output: Output) -> None:
    from rich.table import Table
    from rich.text import Text

    from headrace.cli.safe_console import SafeConsole

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    for key, value in plain_values(resolved.settings).items():
        origin = resolved.origins[key]
        shown = "none" if value is None else "true" if value is True else "false" if value is False else str(value)
        table.add_row(Text(key), Text(shown), Text(origin), style="dim" if origin == DEFAULT else None)
    console = SafeConsole(file=output.people, width=None if output.people.isatty() else _PIPE_COLUMNS, soft_wrap=False)
    with console.capture() as captured:  # rich would exit by itself where the reader has gone
        console.print(f"recipe {resolved.recipe}", highlight=False, markup=False)
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=output.people, flush=True)
