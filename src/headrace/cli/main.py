"""The command line: what can be asked, and how every command ends.

Exit 0 done, 1 the work failed, 2 wrong usage or configuration, 130 Ctrl-C. With --json stdout holds exactly one object
(CONTRACTS) however the command ends; everything for people goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from headrace import __version__
from headrace.cli.output import INTERRUPTED, INTERRUPTED_ERROR, Output
from headrace.errors import ConfigError, HeadraceError, Problem

_RECIPE_HELP = "a recipe file, a directory with recipe.toml, or a shipped name such as door"
_OVERRIDES_HELP = "settings that win over the recipe, for example pool.max_staleness=4 (TOML values; bare words are texts; none unsets)"


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would write to stderr and exit, so that --json holds for wrong usage too."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([Problem(message=f"{message[0].upper()}{message[1:]}.", remedy=f"See '{self.prog} --help'.")])


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headrace", description="Asynchronous reinforcement-learning post-training for language models and agents.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.add_argument("--json", action="store_true", help="print one machine-readable object on stdout; text for people goes to stderr")
        return added

    run = command("run", "train on a recipe")
    run.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP)
    run.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)
    run.add_argument("--run-dir", metavar="DIRECTORY", help="where everything of the run goes (default: runs/NAME-TIME)")
    run.add_argument("--dry-run", action="store_true", help="print every resolved setting and where it came from; start nothing")

    evaluate = command("eval", "evaluate a checkpoint on a recipe's evaluation tasks")
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT_OR_RUN", help="a Hugging Face directory, or a run directory (its newest checkpoint)")
    evaluate.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)
    evaluate.add_argument("--recipe", metavar="RECIPE", help=f"{_RECIPE_HELP} (default: the config.toml of the run)")

    config = command("config", "print every resolved setting and where it came from")
    config.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP)
    config.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)

    new = command("new", "make a task of your own that runs as it is")
    new.add_argument("directory", metavar="DIRECTORY", help="the folder to make; its last part is the task's name")
    new.add_argument("--kind", choices=("one_step", "multi_step"), default="one_step", help="a prompt and its answer, or an environment (default: one_step)")

    _add_report_arguments(command("report", "make one HTML file about a run, or about several"))

    command("doctor", "check whether this machine can run headrace")
    command("version", "print the version")
    return parser


def _add_report_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", metavar="RUN", nargs="+", help="a run directory; runs with equal settings but for the seed become one curve with a band")
    report.add_argument("--out", metavar="FILE", help="where the page goes (default: report.html in the first RUN)")
    report.add_argument("--trace", metavar="FILE", help="also write a trace for ui.perfetto.dev or chrome://tracing")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((argument for argument in given if not argument.startswith("-")), None)
    with Output(command=name, json="--json" in given) as output:
        try:
            return _execute(given, output)
        except KeyboardInterrupt:
            output.say("Interrupted.")
            output.fail("interrupted", INTERRUPTED_ERROR)
            return INTERRUPTED
        except HeadraceError as error:
            output.say_error(error)
            output.fail("failed", error.as_json())
            return error.exit_code
        except BrokenPipeError:
            # whoever read our output has gone (`headrace config door | head`): nothing failed, and Python must not flush into it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 0
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            output.fail("failed", {"kind": type(error).__name__, "message": str(error), "remedy": "This is a bug in headrace, please report it."})
            return 1


def _execute(given: Sequence[str], output: Output) -> int:
    arguments = _parse(given)
    module = {"eval": "evaluate"}.get(arguments.command, arguments.command)
    code: int = importlib.import_module(f"headrace.cli.{module}").execute(arguments, output)
    return code


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """argparse stops taking KEY=VALUE at the first option after RECIPE; here they may stand anywhere."""
    arguments, rest = build_parser().parse_known_args(given)
    unknown = [argument for argument in rest if argument.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        remedy = f"See 'headrace {arguments.command} --help'."
        raise ConfigError([Problem(message=f"Unknown argument '{argument}'.", value=argument, remedy=remedy) for argument in unknown])
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments
