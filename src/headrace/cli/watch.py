"""`headrace watch`: what a run does now, drawn again and again from its event log. It only reads."""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from pathlib import Path

from rich.live import Live

from headrace.cli.output import Output
from headrace.cli.runs import CONFIG, EVENTS, find_run, run_settings
from headrace.cli.safe_console import SafeConsole
from headrace.event_log import EventFollower
from headrace.report.watch import WatchState, frame

REDRAW_SECONDS = 0.5


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = find_run(arguments.run)
    watching = Watching(directory)
    watching.read()
    if arguments.once or output.json or not output.people.isatty():
        console = SafeConsole(file=output.people, width=shutil.get_terminal_size((100, 24)).columns, highlight=False)
        console.print(watching.picture(console.width))
    else:
        _live(watching, SafeConsole(file=output.people, highlight=False))
    state = watching.state
    output.result({"run_dir": str(directory), "state": state.status, **state.summary.result(), "warnings": state.warnings()})
    return 0


class Watching:
    """A run directory and what has been read of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = WatchState(run_settings(directory / CONFIG))
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


def _live(watching: Watching, console: SafeConsole) -> None:
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
