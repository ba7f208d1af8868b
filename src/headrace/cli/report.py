"""`headrace report`: one self-contained HTML file about one or several runs, and a trace for Perfetto."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.output import Output
from headrace.cli.runs import named_path
from headrace.errors import ConfigError, Problem, RunDirectoryError
from headrace.report.page import write_report
from headrace.report.trace import write_trace


def execute(arguments: argparse.Namespace, output: Output) -> int:
    directories = [named_path(run) for run in dict.fromkeys(arguments.runs)]
    out = Path(arguments.out) if arguments.out else _default(directories)
    for key, given in (("--out", out), ("--trace", Path(arguments.trace) if arguments.trace else None)):
        if given is not None and given.is_dir():
            raise ConfigError([Problem(key=key, value=str(given), message=f"'{given}' is a directory.", remedy=f"Give a file to {key}.")])
    report = write_report(directories, out)
    output.show(f"report  {report.path}  ({report.size_bytes / 1e6:.1f} MB; open it in a browser)")
    trace = None
    if arguments.trace:
        trace = Path(arguments.trace)
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            write_trace(report.runs, trace)
        except OSError as error:
            raise RunDirectoryError(f"{trace}: the trace cannot be written: {error.strerror}.", remedy="Choose another place with --trace FILE.") from error
        output.show(f"trace   {trace}  (open it at ui.perfetto.dev or chrome://tracing)")
    runs = [{"run_dir": str(run.directory), **run.summary} for run in report.runs]
    output.result({"report": str(report.path), "size_bytes": report.size_bytes, "trace": None if trace is None else str(trace), "runs": runs})
    return 0


def _default(directories: Sequence[Path]) -> Path:
    """In the run; of several runs beside the first one, so that no run's own report is overwritten."""
    first = directories[0]
    return (first if len(directories) == 1 else first.resolve().parent) / "report.html"
