"""`headrace resume`: go on with a run that was interrupted, was killed or failed, or train a finished one longer."""

from __future__ import annotations

import argparse
import contextlib

from headrace.cli.output import Output
from headrace.cli.run import open_logs, train
from headrace.cli.runs import CONFIG, find_run, is_simulated
from headrace.config_loading import load_settings
from headrace.errors import ConfigError, Problem


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directory = find_run(arguments.run)
    if is_simulated(directory):
        message = f"'{arguments.run}' was simulated: there are no weights to go on with, so it cannot be resumed."
        remedy = "Simulate again with more updates: headrace simulate PLAN --updates U."
        raise ConfigError([Problem(key="RUN", value=arguments.run, limit="a run of 'headrace run'", message=message, remedy=remedy)])
    if not (directory / CONFIG).is_file():
        message = f"'{arguments.run}' holds no {CONFIG}, so its settings are not known."
        raise ConfigError([Problem(key="RUN", value=arguments.run, limit="a run directory", message=message, remedy="Put it back, or start a new run.")])
    from headrace.runtime.resumption import refuse_changes

    resolved = load_settings(directory / CONFIG, arguments.overrides)
    refuse_changes(load_settings(directory / CONFIG).settings, resolved)
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(contextlib.closing(opened)) for opened in open_logs(arguments.log or (), resolved, directory, output)]
        return train(resolved, directory, logs, output, resume=True)
