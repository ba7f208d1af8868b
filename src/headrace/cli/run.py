"""`headrace run`: train on a recipe, show how it goes, say where everything lies."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli import interrupts
from headrace.cli.config import print_settings, settings_object
from headrace.cli.output import INTERRUPTED, INTERRUPTED_ERROR, Output
from headrace.config_loading import ResolvedSettings, load_settings, plain_values
from headrace.errors import ConfigError, HeadraceError, Problem
from headrace.event_log import read_events
from headrace.report.summary import summarize

if TYPE_CHECKING:
    from headrace.report.adapters.log import SafeLog


def execute(arguments: argparse.Namespace, output: Output) -> int:
    planned = planned_settings(arguments.plan, arguments.rank)
    resolved = load_settings(arguments.recipe, arguments.overrides, plan=planned)
    if planned is not None:
        from headrace.planner.promise import promise_of_plan

        resolved = dataclasses.replace(resolved, promised=promise_of_plan(planned, arguments.rank, resolved))
    if arguments.dry_run:
        print_settings(resolved, output)
        output.result(settings_object(resolved))
        return 0
    directory = choose_run_directory(arguments.run_dir, resolved.settings.run.name)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(contextlib.closing(opened)) for opened in open_logs(arguments.log or (), resolved, directory, output)]
        return train(resolved, directory, logs, output)


def planned_settings(plan: str | None, rank: int | None) -> tuple[str, list[str]] | None:
    """(file, overrides) of a plan.json or of the settings that `headrace plan --overlay` wrote. Raises ConfigError."""
    if plan is None:
        if rank is not None:
            raise ConfigError([Problem(key="--rank", value=rank, message="--rank is for plans.", remedy="Add --plan plan.json, or leave it out.")])
        return None
    from headrace.planner.plan import load_overlay

    return plan, load_overlay(Path(plan), rank=rank)


def open_logs(names: Sequence[str], resolved: ResolvedSettings, directory: Path, output: Output) -> list[SafeLog]:
    """Loggers that events are fed to. Raises ConfigError when the package of one is missing."""
    from headrace.report.adapters.log import SafeLog, require

    for name in names:
        require(name)
    settings = plain_values(resolved.settings)
    return [SafeLog(name, directory=directory, settings=settings, say=output.say) for name in dict.fromkeys(names)]


def choose_run_directory(asked: str | None, name: str) -> Path:
    """The directory of a new run, not made yet. Raises ConfigError when the one asked for is in use."""
    if asked is None:
        directory = stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while directory.exists():
            number += 1
            directory = stem.with_name(f"{stem.name}-{number}")
        return directory.resolve()
    from headrace.runtime.run_directory import refuse_used

    directory = Path(asked)
    refuse_used(directory, asked)
    return directory.resolve()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A job scheduler's SIGTERM ends the run as cleanly as Ctrl-C does.

    A script's `headrace run ... &` starts with SIGINT ignored, and asyncio then leaves it alone: nothing would end the run.
    """
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupts.handler())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(resolved: ResolvedSettings, directory: Path, logs: Sequence[SafeLog], output: Output, *, resume: bool = False) -> int:
    """Runs to the end, shows how it goes and what came out; the exit code. `resume`: the directory is that of a run that goes on."""
    from headrace.report.picture import end_picture
    from headrace.report.progress import ProgressView
    from headrace.runtime.local import run_local
    from headrace.runtime.processes import end_forkserver

    output.say(f"headrace resume {directory}" if resume else f"headrace run {resolved.name} -> {directory}")
    status, error, code = "done", None, 0
    with contextlib.closing(ProgressView(output.people)) as view, sigterm_as_ctrl_c():
        try:
            watching = [view.on_event, *(log.on_event for log in logs)]
            interrupts.run(run_local(resolved, directory, subscribers=watching, progress=view.on_startup, resume=resume))
        except KeyboardInterrupt:
            interrupts.absorb()
            status, error, code = "interrupted", INTERRUPTED_ERROR, INTERRUPTED
        except HeadraceError as failure:
            status, error, code = "failed", failure.as_json(), failure.exit_code
            output.say_error(failure)
        finally:
            end_forkserver()
    log = directory / "events.jsonl"
    # most lines of a long run are of single rollouts, which neither picture nor summary looks at
    events = list(read_events(log, without=("rollout_finished", "group_reserved"))) if log.exists() else []
    if events and code != ConfigError.exit_code:  # a run that never started has nothing to show
        output.show(end_picture(events, directory, width=output.width))
    if status == "interrupted":
        output.say("Interrupted.")
    output.result({"run_dir": str(directory), **summarize(events, directory)}, status=status, error=error)
    return code
