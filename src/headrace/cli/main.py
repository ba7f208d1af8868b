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

from headrace import __version__
from headrace.cli import interrupts
from headrace.cli.arguments import AMOUNT, COUNT, COUNT_FROM_0, COUNT_FROM_2, FINITE, SHARE, Parser
from headrace.cli.output import INTERRUPTED, INTERRUPTED_ERROR, Output
from headrace.errors import ConfigError, HeadraceError

_RECIPE_HELP = "a recipe file, a directory with recipe.toml, or a shipped name such as door"
_RUN_HELP = "a run directory, or its name below runs/"
_OVERRIDES_HELP = "settings that win over the recipe, for example pool.max_staleness=4 (TOML values; bare words are texts; none unsets)"
LOGS = ("tensorboard", "wandb", "mlflow", "trackio")
_COMPARE_TEXT = """\
Hold arms of a recipe against each other, on the same tasks, seeds and evaluations.

  sync    run.mode=sync, run.placement=colocated: every one of N devices samples, then every one learns
  async   run.mode=async on as many devices: the recipe's own split of them, else a quarter of them learn
  --arm NAME KEY=VALUE ...   starts from async (from sync if it sets run.mode=sync)

Everything else is the recipe's, alike in every arm: batch, decode slots, learning rate. To tune the baseline, give its
settings: --arm sync sampler.max_running=128, or add variants and choose one: --baseline NAME.

Arms run one after another, their order alternating by seed. Checkpoints are evaluated when a run is over; neither that nor
start-up counts as time. Time to reward: from when the mean of 3 evaluations stays at the target. Final: mean of the last 3.
Intervals are 95 %, over seeds, of differences paired by seed."""


def build_parser() -> Parser:
    parser = Parser(prog="headrace", description="Asynchronous reinforcement-learning post-training for language models and agents.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.add_argument("--json", action="store_true", help="print one machine-readable object on stdout; text for people goes to stderr")
        return added

    run = command("run", "train on a recipe")
    run.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP)
    run.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES_HELP)
    run.add_argument("--plan", metavar="FILE", help="run it as headrace plan proposed: a plan.json, or the settings of its --overlay; KEY=VALUE still wins")
    run.add_argument("--rank", metavar="N", type=COUNT, help="which plan of a plan.json (default: 1, the best)")
    run.add_argument("--run-dir", metavar="DIRECTORY", help="where everything of the run goes (default: runs/NAME-TIME)")
    run.add_argument("--dry-run", action="store_true", help="print every resolved setting and where it came from; start nothing")
    _add_log_argument(run)
    _add_resume_arguments(command("resume", "go on with a run that was interrupted, was killed or failed; or train a finished one longer"))
    _add_compare_arguments(command("compare", "hold arms of a recipe against each other: asynchronous against synchronous"))

    evaluate = command("eval", "evaluate a checkpoint on a recipe's evaluation tasks")
    evaluate.add_argument("checkpoint", metavar="CHECKPOINT_OR_RUN", help="a Hugging Face directory, or a run (its newest checkpoint)")
    evaluate.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES_HELP)
    evaluate.add_argument("--recipe", metavar="RECIPE", help=f"{_RECIPE_HELP} (default: the config.toml of the run)")

    config = command("config", "print every resolved setting and where it came from")
    config.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP)
    config.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES_HELP)

    new = command("new", "make a task of your own that runs as it is")
    new.add_argument("directory", metavar="DIRECTORY", help="the folder to make; its last part is the task's name")
    new.add_argument("--kind", choices=("one_step", "multi_step"), default="one_step", help="a prompt and its answer, or an environment (default: one_step)")

    _add_report_arguments(command("report", "make one HTML file about a run, or about several"))

    watch = command("watch", "see what a run does now: progress, who waits for whom, staleness, what to change")
    watch.add_argument("run", metavar="RUN", help=_RUN_HELP)
    watch.add_argument("--once", action="store_true", help="print one frame and end (so does --json, and output that is no terminal)")
    _add_profile_arguments(command("profile", "measure what the parts of a run take, for headrace plan"))
    _add_plan_arguments(command("plan", "find how many devices should sample and how many learn, when it is done, what it costs"))
    _add_simulate_arguments(command("simulate", "play a plan, or a profile with settings, and write a run directory that watch and report read"))
    _add_trajectories_arguments(command("trajectories", "browse and export what a run sampled"))

    _add_mark_arguments(command("mark", "show which recorded steps a rule would mark as key, before a run is spent on it"))
    command("doctor", "check whether this machine can run headrace")
    command("version", "print the version")
    return parser


def _add_resume_arguments(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("run", metavar="RUN", help=_RUN_HELP)
    resume.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings that change, for example run.num_updates=200")
    _add_log_argument(resume)


def _add_log_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--log", metavar="WHERE", action="append", choices=LOGS, help=f"also log to {', '.join(LOGS)}; may be given several times")


def _add_compare_arguments(compare: argparse.ArgumentParser) -> None:
    compare.description = _COMPARE_TEXT
    compare.formatter_class = argparse.RawDescriptionHelpFormatter
    compare.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP)
    compare.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings of every arm")
    compare.add_argument(
        "--arm", metavar=("NAME", "KEY=VALUE"), nargs="+", action="append", help="one more arm, or more settings for sync or async; several times"
    )
    compare.add_argument("--seeds", metavar="N", type=COUNT, default=3, help="runs of each arm, paired by seed (default: 3)")
    compare.add_argument("--devices", metavar="N", type=COUNT_FROM_2, help="devices of each arm (default: as many as the recipe uses, at least 2)")
    compare.add_argument("--evaluate-every", metavar="UPDATES", type=COUNT, help="updates between evaluated checkpoints (default: a twentieth of the run)")
    compare.add_argument("--target", metavar="VALUE", type=FINITE, help="evaluation to reach (default: the baseline's final mean - 0.01)")
    compare.add_argument("--baseline", metavar="NAME", help="the arm that the others are held against (default: sync)")
    compare.add_argument("--profile", metavar="FILE", help="what headrace profile wrote: every run is promised how long it takes before it starts")
    compare.add_argument("--run-dir", metavar="DIRECTORY", help="where everything goes (default: runs/compare-NAME-TIME); one that was cut goes on")


def _add_report_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", metavar="RUN", nargs="+", help=f"{_RUN_HELP}; runs with equal settings but for the seed become one curve with a band")
    report.add_argument("--out", metavar="FILE", help="where the page goes (default: report.html in the first RUN)")
    report.add_argument("--trace", metavar="FILE", help="also write a trace for ui.perfetto.dev or chrome://tracing")


def _add_profile_arguments(profile: argparse.ArgumentParser) -> None:
    profile.add_argument("what", metavar="RUN|RECIPE|MODEL", help="a run directory; a recipe, of which a short run is made; with --device a config.json")
    profile.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings of the measuring run of a recipe")
    profile.add_argument("--out", metavar="FILE", default="profile.json", help="where the profile goes (default: profile.json)")
    profile.add_argument("--updates", metavar="N", type=COUNT, help="updates of the measuring run (default: 12)")
    profile.add_argument("--run-dir", metavar="DIRECTORY", help="keep the measuring run here (default: it is removed)")
    profile.add_argument("--device", metavar="NAME", help="estimate without hardware: H100, H200, A100, H20, B200, L40S, or a device.toml")
    profile.add_argument("--tensor-parallel", metavar="N", type=COUNT, help="devices of one engine (estimates; default: 1)")
    profile.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "fp8"), help="of the weights (estimates; default: bfloat16)")
    profile.add_argument("--prompt-tokens", metavar="N", type=AMOUNT, help="mean (estimates; default: 200)")
    profile.add_argument("--answer-tokens", metavar="N", type=AMOUNT, help="mean (estimates; default: 1000)")
    profile.add_argument("--max-answer-tokens", metavar="N", type=AMOUNT, help="longest (estimates; default: none)")
    profile.add_argument("--group-size", metavar="N", type=COUNT, help="trajectories of one task (estimates; default: 8)")


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("profile", metavar="PROFILE", help="what headrace profile wrote")
    plan.add_argument("--gpus", metavar="N", type=COUNT, required=True, help="devices to share out")
    plan.add_argument("--max-staleness", metavar="UPDATES", type=COUNT_FROM_0, help="how old a trained token may be (default: 8; 0: synchronous plans only)")
    plan.add_argument("--batch", metavar="B[,B]", help="trajectories of an update; several are compared (default: as in the profiled run, else 64 groups)")
    plan.add_argument("--group-size", metavar="G", type=COUNT, help="trajectories of one task (default: the profile's)")
    plan.add_argument("--updates", metavar="U", type=COUNT, help="updates to make (default: 100)")
    plan.add_argument("--price", metavar="P", type=AMOUNT, help="of one device for an hour, in any currency")
    plan.add_argument("--deadline", metavar="HOURS", type=AMOUNT, help="when it must be done")
    plan.add_argument(
        "--what-if", metavar="INPUT=FACTORx", action="append",
        help="change an input: answers, prompts, tools, tail, decode, learn, weights, kv; decode=0.8x: a step takes 0.8 times as long; several times",
    )  # fmt: skip
    plan.add_argument("--out", metavar="FILE", default="plan.json", help="where the plan goes (default: plan.json)")
    plan.add_argument("--overlay", metavar="FILE", help="also write the best plan as settings in TOML, for headrace run RECIPE --plan FILE")
    plan.add_argument("--report", metavar="FILE", help="also write an HTML page with the plans, and production and consumption as a figure")
    plan.add_argument("--rollouts", metavar="N", type=COUNT_FROM_0, help="simulated at most, to check the best plans (0: closed forms only, at once)")


def _add_simulate_arguments(simulate: argparse.ArgumentParser) -> None:
    simulate.add_argument("plan", metavar="PLAN", help="what headrace plan wrote, or a profile: then the setup of the run that was profiled")
    simulate.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=_OVERRIDES_HELP.replace("recipe", "plan"))
    simulate.add_argument("--rank", metavar="R", type=COUNT, help="which of the plans (default: 1, the best)")
    simulate.add_argument("--run-dir", metavar="DIRECTORY", help="where everything goes (default: runs/simulated-NAME-TIME)")
    simulate.add_argument("--seed", metavar="N", type=COUNT_FROM_0, help="of lengths and waits (default: 0)")
    simulate.add_argument("--updates", metavar="U", type=COUNT, help="updates to make (default: the plan's)")
    simulate.add_argument("--failures", metavar="SHARE", type=SHARE, default=0.0, help="of the rollouts that fail and are tried again (default: 0)")


def _add_trajectories_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=_RUN_HELP)
    parser.add_argument("--task", metavar="ID", help="only of this task")
    parser.add_argument("--min-reward", metavar="R", type=FINITE, help="only with at least this reward")
    parser.add_argument("--max-reward", metavar="R", type=FINITE, help="only with at most this reward")
    parser.add_argument("--min-staleness", metavar="UPDATES", type=COUNT_FROM_0, help="only with a token at least so old when it was trained")
    parser.add_argument("--key", action="store_true", help="only with key steps")
    parser.add_argument("--limit", metavar="N", type=COUNT, help="at most so many (default: 10; all in an export)")
    parser.add_argument("--export", metavar="FILE", help="write them to FILE.parquet or FILE.jsonl, with their text")


def _add_mark_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=_RUN_HELP)
    parser.add_argument(
        "--rule", metavar="RULE", action="append", help="observation:REGEX, action:REGEX, tool:NAME or reward:nonzero|positive|negative; several times"
    )
    parser.add_argument("--function", metavar="task:NAME", help="a marking function of the run's recipe")
    parser.add_argument("--min-advantage", metavar="N", type=FINITE, help="trajectories so many standard deviations from the mean of their group")
    parser.add_argument("--limit", metavar="N", type=COUNT, help="examples shown (default: 3)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((argument for argument in given if not argument.startswith("-")), None)
    with Output(command=name, json="--json" in given) as output:
        try:
            interrupts.release()
            return _execute(given, output)
        except KeyboardInterrupt:
            interrupts.absorb()
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
            output.say(traceback.format_exc().rstrip())
            output.fail("failed", {"kind": type(error).__name__, "message": str(error), "remedy": "This is a bug in headrace, please report it."})
            return 1


def _execute(given: Sequence[str], output: Output) -> int:
    arguments = _parse(given)
    module = {"eval": "evaluate"}.get(arguments.command, arguments.command)
    code: int = importlib.import_module(f"headrace.cli.{module}").execute(arguments, output)
    return code


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """argparse stops taking KEY=VALUE at the first option after RECIPE; here they may stand anywhere."""
    parser = build_parser()
    arguments: argparse.Namespace
    arguments, rest = parser.parse_known_args(given)
    unknown = [argument for argument in rest if argument.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        raise ConfigError([parser.subparser(arguments.command).unknown_argument(argument) for argument in unknown])
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments
