"""Which run a command is about: a path, or the name of a directory below runs/."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, Problem
from headrace.event_log import read_events

EVENTS, CONFIG = "events.jsonl", "config.toml"
RUNS = Path("runs")
"""Where `headrace run` puts a run that was given no directory."""
_NUM_NAMED = 5


def named_path(given: str, *, key: str = "RUN", limit: str = "a run directory") -> Path:
    """The path, else runs/PATH. Raises ConfigError, saying which runs there are, where neither exists."""
    path = Path(given)
    if path.exists():
        return path
    if (RUNS / given).is_dir():
        return RUNS / given
    raise ConfigError([Problem(key=key, value=given, limit=limit, message=f"'{given}' does not exist.", remedy=_which_exist(given))])


def find_run(given: str) -> Path:
    """The directory of a run, which may be one that is just starting. Raises ConfigError, saying what lies there, for anything else."""
    path = named_path(given)
    if is_run(path):
        return path.resolve()
    what = f"is no run directory: it holds no {EVENTS}" if path.is_dir() else "is a file, not a run directory"
    remedy = "Give the directory that 'headrace run' names in its first line."
    raise ConfigError([Problem(key="RUN", value=given, limit="a run directory", message=f"'{given}' {what}.", remedy=remedy)])


def is_run(path: Path) -> bool:
    return (path / EVENTS).is_file() or (path / CONFIG).is_file()


def is_simulated(path: Path) -> bool:
    """Whether the run was played by `headrace simulate`: nothing was sampled and nothing learned."""
    try:
        first = next(read_events(path / EVENTS), None)
    except OSError:
        return False
    return first is not None and first.get("runtime") == "simulated"


def run_settings(path: Path) -> dict[str, Any]:
    """Of a run's config.toml; empty where they cannot be read, which a picture of it can do without."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _which_exist(given: str) -> str:
    found = [path for path in RUNS.iterdir() if is_run(path)] if RUNS.is_dir() else []
    if not found:
        return f"Give a run directory as 'headrace run' names it in its first line; there is no run below {RUNS}/ here."
    names = [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
    if near := difflib.get_close_matches(given.rstrip("/").rpartition("/")[2], names, n=1, cutoff=0.8):
        return f"Did you mean '{near[0]}'?"
    more = f" and {len(names) - _NUM_NAMED} older ones" if len(names) > _NUM_NAMED else ""
    return f"Below {RUNS}/ there is {', '.join(names[:_NUM_NAMED])}{more}."
