"""`headrace version`."""

from __future__ import annotations

import argparse
import platform

from headrace import __version__
from headrace.cli.output import Output


def execute(arguments: argparse.Namespace, output: Output) -> int:
    output.show(f"headrace {__version__}")
    output.result({"headrace": __version__, "python": platform.python_version()})
    return 0
