"""`headrace watch`: what a run does now, drawn again and again from its event log. It only reads."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import threading
import time
from pathlib import Path

from rich.live import Live

from headrace.cli.output import Output
from headrace.cli.runs import CONFIG, EVENTS, find_run, run_settings
from headrace.cli.safe_console import SafeConsole
from headrace.errors import ConfigError, Problem
from headrace.event_log import EventFollower, check_first_event
from headrace.report.watch import WatchState, frame
from headrace.runtime.journal import FILE as JOURNAL
from headrace.runtime.run_directory import is_held

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
        self.state = WatchState(run_settings(directory / CONFIG), directory)
        self._follower = EventFollower(directory / EVENTS)
        self._num_lacking = 0

    def read(self) -> None:
        """Raises ConfigError when the log has no beginning that this version reads."""
        with contextlib.suppress(OSError):  # asked first: a run says that it has ended before it lets go
            self.state.is_alone = is_held(self.directory) is False
        for line in self._follower.new_events():
            if not self.state.num_events:
                check_first_event(line, self.directory / EVENTS)
            try:
                self.state.add(line)
            except (ValueError, LookupError, TypeError, AttributeError):  # it lacks what events of its name have
                self._num_lacking += 1
        self.state.log_is_missing = self._has_begun() and not (self.directory / EVENTS).exists()
        self.state.unreadable = self._follower.unreadable + self._num_lacking
        if self.state.unreadable and not self.state.num_events:
            path = self.directory / EVENTS
            message = f"the event log holds no event that can be read ({self.state.unreadable:,} lines cannot)."
            raise ConfigError([Problem(file=str(path), key="RUN", value=str(self.directory), message=message, remedy="Restore it from a copy.")])

    def picture(self, width: int) -> object:
        return frame(self.state, name=self.directory.name, width=width, silent_seconds=self._silent_seconds())

    def _has_begun(self) -> bool:
        """By what a run makes once its roles are up, and by what a killed one must have had."""
        return self.state.num_events > 0 or self.state.is_alone or (self.directory / JOURNAL).exists()

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
            if watching.state.has_ended:
                return
            ended.wait(max(REDRAW_SECONDS, 4 * (time.monotonic() - started)))  # at most a fifth of a core, however much there is to read
