"""`headrace watch`: what a run does now, drawn again and again from its event log. It only reads."""

from __future__ import annotations

import argparse
import shutil
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from headrace.cli.output import Output
from headrace.errors import ConfigError, Problem
from headrace.events import EventFollower
from headrace.report.watch import WatchState, frame

REDRAW_SECONDS = 0.5
EVENTS, CONFIG = "events.jsonl", "config.toml"


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = find_run(arguments.run)
    watching = Watching(directory)
    watching.read()
    if arguments.once or output.json or not output.people.isatty():
        console = Console(file=output.people, width=shutil.get_terminal_size((100, 24)).columns, highlight=False)
        console.print(watching.picture(console.width))
    else:
        _live(watching, Console(file=output.people, highlight=False))
    state = watching.state
    output.result({"run_dir": str(directory), "state": state.status, **state.summary.result(), "warnings": state.warnings()})
    return 0


class Watching:
    """A run directory and what has been read of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = WatchState(_settings(directory / CONFIG))
        self._follower = EventFollower(directory / EVENTS)

    def read(self) -> None:
        for line in self._follower.new_events():
            self.state.add(line)

    def picture(self, width: int) -> object:
        return frame(self.state, name=self.directory.name, width=width, silent_seconds=self._silent_seconds())

    def _silent_seconds(self) -> float:
        try:
            return max(0.0, time.time() - (self.directory / EVENTS).stat().st_mtime)
        except OSError:
            return 0.0


def find_run(given: str) -> Path:
    """The directory of a run, which may be one that is just starting. Raises ConfigError, saying what lies there, for anything else."""
    path = Path(given)
    if not path.exists() and (Path("runs") / given).is_dir():
        path = Path("runs") / given
    if (path / EVENTS).is_file() or (path / CONFIG).is_file():
        return path.resolve()
    what = f"is no run directory: it holds no {EVENTS}" if path.is_dir() else "is a file, not a run directory" if path.exists() else "does not exist"
    remedy = "Give the directory that 'headrace run' names in its first line."
    raise ConfigError([Problem(key="RUN", value=given, limit="a run directory", message=f"'{given}' {what}.", remedy=remedy)])


def _settings(path: Path) -> dict[str, Any]:
    """Of the run; empty where they cannot be read, which a frame can do without."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _live(watching: Watching, console: Console) -> None:
    """Until the run ends, or Ctrl-C."""
    ended = threading.Event()  # nothing sets it: an interruptible wait that lasts as long as asked
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            started = time.monotonic()
            watching.read()
            live.update(watching.picture(console.width), refresh=True)  # type: ignore[arg-type]
            if watching.state.finished is not None:
                return
            ended.wait(max(REDRAW_SECONDS, 4 * (time.monotonic() - started)))  # at most a fifth of a core, however much there is to read
