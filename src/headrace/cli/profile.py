"""`headrace profile`: what the parts of a run take, from a finished run, a short run made for it, or a model's config and a device."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.cli import interrupts
from headrace.cli.output import Output
from headrace.cli.run import choose_run_directory, sigterm_as_ctrl_c
from headrace.cli.runs import RUNS, is_run
from headrace.config_loading import ResolvedSettings, load_settings
from headrace.errors import ConfigError, Problem
from headrace.planner.distributions import Distribution
from headrace.planner.hardware import find_device
from headrace.planner.measure import measure
from headrace.planner.profile import Profile, profile_as_json, save_profile
from headrace.planner.roofline import Engine, estimate_profile
from headrace.planner.shapes import ModelShape

LENGTH_SPREAD = 0.8
"""Standard deviation of answers / their mean, where only the mean is given (reasoning answers: 0.6 to 1)."""
_EVALUATION_TASKS = 8
_DEFAULT_UPDATES = 12
"""Of the measuring run."""
_ONLY_MEASURED = ("updates", "run_dir")
"""Options of the measuring run of a recipe."""
_ONLY_ESTIMATES = ("dtype", "tensor_parallel", "prompt_tokens", "answer_tokens", "max_answer_tokens", "group_size")
"""Options that need --device."""


def execute(arguments: argparse.Namespace, output: Output) -> int:
    out = Path(arguments.out)
    if out.is_dir():
        raise ConfigError([Problem(key="--out", value=str(out), message=f"'{out}' is a directory.", remedy="Give a file to --out.")])
    profile = _make(arguments, output)
    save_profile(profile, out)
    output.show("\n".join(described(profile)))
    output.show(f"profile {out}")
    output.result({"out": str(out), "profile": profile_as_json(profile)})
    return 0


def described(profile: Profile) -> list[str]:
    """Lines for people."""
    decode, lengths, rate = profile.decode, profile.distributions, profile.decode.saturation
    fit, kind = decode.fit, {"run": "measured in", "measured": "measured by a short run of", "estimated": "ESTIMATED for"}[profile.source.kind]
    answers = lengths.answer_tokens
    learner = profile.learn.points[len(profile.learn.points) // 2]
    drift = f", {answers.drift_per_update:+.3g} an update" if answers.drift_per_update else ""
    capacity = "no limit" if decode.kv_capacity_tokens is None else f"{decode.kv_capacity_tokens:,} tokens"
    return [
        f"{kind} {profile.source.origin}: {profile.model.num_parameters:,} parameters",
        f"decode  {1e3 * fit.seconds(1):.3g} ms a step alone, {1e3 * fit.seconds(rate.running):.3g} ms with {rate.running} running "
        f"(± {fit.relative_error:.0%}); best {rate.tokens_per_second:,.0f} tokens/s; KV cache {capacity}",
        f"learn   {learner.seconds:.3g} s an update of {learner.tokens:,.0f} tokens on {learner.ranks} {'rank' if learner.ranks == 1 else 'ranks'} "
        f"(± {profile.learn.fit.relative_error:.0%})",
        f"weights {profile.weight_update.bytes / 1e6:.3g} MB, {1e3 * profile.weight_update.publish_seconds:.3g} ms to publish, "
        f"a sampler pauses {1e3 * profile.weight_update.pause_seconds:.3g} ms",
        f"answers {answers.mean:.1f} tokens, 99 % under {answers.quantile(0.99):.0f}{drift}; {lengths.steps.mean:.1f} steps; "
        f"{1e3 * lengths.tool_wait_seconds.mean:.3g} ms in the environment a step; longest of a group of {profile.group.size}: "
        f"{profile.group.tailness:.2f} x the mean",
    ]


def _make(arguments: argparse.Namespace, output: Output) -> Profile:
    directory = next((path for path in (Path(arguments.what), RUNS / arguments.what) if is_run(path)), None)
    if arguments.device is not None:
        _refuse_options(arguments, _ONLY_MEASURED, "is for the run that measures a recipe; with --device nothing is run", "Leave it out.")
        return _estimated(arguments)
    _refuse_options(arguments, _ONLY_ESTIMATES, "is for estimates, and they need a device", "Add --device NAME, or leave it out.")
    if directory is not None:
        _refuse_options(arguments, _ONLY_MEASURED, f"is for the run that measures a recipe, and '{arguments.what}' is a run", "Leave it out.")
        if arguments.overrides:
            what = f"'{arguments.what}' is a run: settings such as '{arguments.overrides[0]}' cannot change it."
            raise ConfigError([Problem(key=arguments.overrides[0], message=what, remedy="Leave them out, or give a recipe.")])
        return measure(directory)
    if _is_model(Path(arguments.what)):
        what = f"'{arguments.what}' is a model, which is estimated for a device."
        raise ConfigError([Problem(key="--device", message=what, remedy="Add --device, for example --device H100; or give a run or a recipe.")])
    return _measured(arguments, output)


def _refuse_options(arguments: argparse.Namespace, names: Sequence[str], why: str, remedy: str) -> None:
    given = {"--" + name.replace("_", "-"): value for name in names if (value := getattr(arguments, name)) is not None}
    if given:
        raise ConfigError([Problem(key=option, value=value, message=f"{option} {why}.", remedy=remedy) for option, value in given.items()])


def _is_model(path: Path) -> bool:
    """A config.json, or a directory of a model that is no recipe's."""
    if path.is_dir():
        return (path / "config.json").is_file() and not (path / "recipe.toml").is_file()
    return path.is_file() and path.suffix == ".json"


def _estimated(arguments: argparse.Namespace) -> Profile:
    if arguments.overrides:
        what = f"With --device nothing is run: settings such as '{arguments.overrides[0]}' cannot change it."
        raise ConfigError([Problem(key=arguments.overrides[0], message=what, remedy="Leave them out.")])
    device, path = find_device(arguments.device), Path(arguments.what)
    shape, parallel = ModelShape.load(path), arguments.tensor_parallel or 1
    if shape.num_heads % parallel:
        what = f"--tensor-parallel is {parallel}, and the {shape.num_heads} attention heads of '{path}' do not divide by it."
        limit = f"a divisor of {shape.num_heads}"
        raise ConfigError([Problem(key="--tensor-parallel", value=parallel, limit=limit, message=what, remedy=f"Give {limit}.")])
    engine = Engine(
        shape=shape, device=device, tensor_parallel=parallel, dtype=arguments.dtype or "bfloat16"
    )  # fmt: skip
    answers, prompts = arguments.answer_tokens or 1000.0, arguments.prompt_tokens or 200.0
    lengths = Distribution.lognormal(answers, LENGTH_SPREAD * answers)
    if arguments.max_answer_tokens is not None:
        lengths = lengths.capped(arguments.max_answer_tokens)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return estimate_profile(engine, name=name, prompt_tokens=Distribution.constant(prompts), answer_tokens=lengths, group_size=arguments.group_size or 8)


def _measured(arguments: argparse.Namespace, output: Output) -> Profile:
    resolved, updates = load_settings(arguments.what, arguments.overrides), arguments.updates or _DEFAULT_UPDATES
    tasks = min(_EVALUATION_TASKS, resolved.settings.evaluation.num_tasks)
    shortened = [f"run.num_updates={updates}", "evaluation.every_updates=0", f"evaluation.num_tasks={tasks}", "checkpoint.every_updates=0"]
    resolved = load_settings(arguments.what, [*arguments.overrides, *shortened])
    with _directory(arguments.run_dir, resolved.settings.run.name) as directory:
        output.say(f"headrace profile {arguments.what}: {updates} updates")
        _run(resolved, directory, output)
        return measure(directory, kind="measured", origin=str(arguments.what))


@contextlib.contextmanager
def _directory(asked: str | None, name: str) -> Iterator[Path]:
    """Of the measuring run: the one asked for, which stays, or a temporary one."""
    if asked is not None:
        yield choose_run_directory(asked, name)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-profile-") as temporary:
        yield Path(temporary) / "run"


def _run(resolved: ResolvedSettings, directory: Path, output: Output) -> None:
    from headrace.report.progress import ProgressView
    from headrace.runtime.local import run_local
    from headrace.runtime.processes import end_forkserver

    with contextlib.closing(ProgressView(output.people)) as view, sigterm_as_ctrl_c():
        try:
            interrupts.run(run_local(resolved, directory, subscribers=[view.on_event], progress=view.on_startup))
        finally:
            end_forkserver()
