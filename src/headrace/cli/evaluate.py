"""`headrace eval`: evaluate a checkpoint on a recipe's evaluation tasks."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli import interrupts
from headrace.cli.output import Output
from headrace.cli.runs import named_path
from headrace.config_loading import load_settings
from headrace.errors import CheckpointError, ConfigError, Problem
from headrace.manifest import MANIFEST, find_damage


def execute(arguments: argparse.Namespace, output: Output) -> int:
    checkpoint, run = find_checkpoint(named_path(arguments.checkpoint, key="CHECKPOINT_OR_RUN", limit="a Hugging Face model directory or a run"))
    recipe = arguments.recipe
    if recipe is None:
        if run is None or not (run / "config.toml").is_file():
            problem = Problem(key="--recipe", message=f"'{arguments.checkpoint}' is not in a run directory that names its recipe.", remedy="Give --recipe.")
            raise ConfigError([problem])
        recipe = run / "config.toml"
    resolved = load_settings(recipe, arguments.overrides)
    refuse_damaged(checkpoint)
    from headrace.runtime.local import evaluate_local
    from headrace.runtime.processes import end_forkserver

    try:
        result = interrupts.run(evaluate_local(resolved, checkpoint, progress=lambda what, fraction: output.say(f"{what} ...")))
    finally:
        end_forkserver()
    low, high = result.interval95
    output.show(f"{checkpoint}")
    output.show(f"  {resolved.settings.evaluation.metric}  {result.mean:.4f}  95 % interval {low:.4f} to {high:.4f}, {result.num_rollouts} rollouts")
    for name, value in sorted(result.metrics.items()):
        if name == resolved.settings.evaluation.metric:
            continue
        output.show(f"  {name}  {value:.4f}")
    evaluation = {
        "mean": result.mean,
        "interval95": result.interval95,
        "num_rollouts": result.num_rollouts,
        "metrics": result.metrics,
        "seconds": result.seconds,
    }
    output.result({"checkpoint": str(checkpoint), "recipe": str(resolved.recipe), "evaluation": evaluation})
    return 0


def find_checkpoint(given: Path) -> tuple[Path, Path | None]:
    """(model directory, run directory or None) of a checkpoint, of a run (its newest checkpoint), or of any Hugging Face directory."""
    if (given / "checkpoints").is_dir():
        # names carry the number with leading zeros, and a half-written one has no config.json
        saved = sorted(path for path in (given / "checkpoints").glob("update_*") if model_directory(path) is not None)
        if saved:
            model = model_directory(saved[-1])
            assert model is not None
            return model, given.resolve()
        raise ConfigError([Problem(key="CHECKPOINT_OR_RUN", value=str(given), message=f"Run '{given}' holds no checkpoint.", remedy="Let it run on.")])
    model = model_directory(given)
    if model is None:
        what = "holds no config.json" if given.is_dir() else "does not exist" if not given.exists() else "is not a directory"
        remedy = "Give a Hugging Face model directory or a run directory."
        raise ConfigError([Problem(key="CHECKPOINT_OR_RUN", value=str(given), message=f"'{given}' {what}.", remedy=remedy)])
    run = next((parent.parent for parent in given.resolve().parents if parent.name == "checkpoints"), None)
    return model, run


def refuse_damaged(checkpoint: Path) -> None:
    """Raises CheckpointError when a file of it is not as it was written; models from elsewhere have no manifest that would say so."""
    if (checkpoint / MANIFEST).is_file() and (damage := find_damage(checkpoint)) is not None:
        raise CheckpointError(f"{checkpoint}: {damage}.", remedy="Evaluate another checkpoint of the run.")


def model_directory(checkpoint: Path) -> Path | None:
    """Where the Hugging Face files lie: the checkpoint itself or its `model` folder."""
    return next((path.resolve() for path in (checkpoint, checkpoint / "model") if (path / "config.json").is_file()), None)
