"""Every loss and every off-policy correction on one recipe: does it learn from stale rollouts, how fast, and if not, why not?

    python benchmarks/losses.py --updates 80 --staleness 4

Everything runs in one deterministic process, with a delay line between sampler and learner (loop.py). `ppo_clip, staleness 0` is the
same loop without the delay.

Scores are the share of evaluation problems answered right: sampled at temperature 1, and greedy. Resumable: an arm in --out is
not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from headrace.evaluation import evaluation_requests
from headrace.tasks.source import evaluation_tasks
from headrace.types import SamplingParameters
from loop import SHOWN, Loop, heading, kept, train_stale

PLAIN = ["learner.loss=reinforce"]
SEQUENCE = ["learner.ratio_level=sequence"]
ARMS: dict[str, list[str]] = {
    "ppo_clip, staleness 0": ["learner.loss=ppo_clip"],
    "reinforce": PLAIN,
    "ppo_clip": ["learner.loss=ppo_clip"],
    "grpo": ["learner.loss=grpo"],
    "dr_grpo": ["learner.loss=dr_grpo"],
    "rloo": ["learner.loss=rloo"],
    "gspo": ["learner.loss=gspo"],
    "gspo, clip of its paper": ["learner.loss=gspo", "learner.clip_low=3e-4", "learner.clip_high=4e-4"],
    "cispo": ["learner.loss=cispo"],
    "topr": ["learner.loss=topr"],
    "decoupled_ppo + decoupled, token": ["learner.loss=decoupled_ppo", "learner.correction=decoupled"],
    "decoupled_ppo + decoupled, sequence": ["learner.loss=decoupled_ppo", "learner.correction=decoupled", *SEQUENCE],
    "reinforce + truncated, token": [*PLAIN, "learner.correction=truncated"],
    "reinforce + truncated, sequence": [*PLAIN, "learner.correction=truncated", *SEQUENCE],
    "reinforce + masked, token": [*PLAIN, "learner.correction=masked"],
    "reinforce + masked, sequence": [*PLAIN, "learner.correction=masked", *SEQUENCE],
    "reinforce + sequence_masked, token": [*PLAIN, "learner.correction=sequence_masked"],
    "reinforce + sequence_masked, sequence": [*PLAIN, "learner.correction=sequence_masked", *SEQUENCE],
}
"""What stands before the `+` is the loss; `token` and `sequence` are learner.ratio_level."""


async def scores(loop: Loop) -> list[float]:
    """Share of the evaluation tasks that are answered right: sampled, greedy."""
    return [await _score(loop, temperature) for temperature in (1.0, 0.0)]


async def _score(loop: Loop, temperature: float) -> float:
    sampling = loop.sampling
    parameters = SamplingParameters(
        temperature=temperature, max_action_tokens=sampling.max_action_tokens, stop_tokens=sampling.stop_tokens, stop_strings=sampling.stop_strings
    )
    requests = evaluation_requests(loop.settings, evaluation_tasks(loop.settings, loop.code), parameters)
    async with asyncio.TaskGroup() as running:
        rollouts = [running.create_task(loop.roll_out(request)) for request in requests]
    return statistics.fmean(rollout.result().reward for rollout in rollouts)


def run_arm(recipe: str, arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    staleness = 0 if arm.endswith("staleness 0") else arguments.staleness
    overrides = [*ARMS[arm], f"run.seed={seed}", f"run.num_updates={arguments.updates}", *arguments.overrides]
    options = {"num_updates": arguments.updates, "staleness": staleness, "every": arguments.every}

    def run() -> dict[str, Any]:
        return train_stale(Loop(recipe, overrides), scores, **options)

    return kept(arguments.out, f"{arm}-{seed}", {"recipe": recipe, "overrides": overrides, **options}, run)


def verdict(runs: list[dict[str, Any]], reference: float) -> str:
    """`learns`, or how it falls short of `reference` and what the learner measured meanwhile (means over updates and seeds)."""
    start = statistics.fmean(run["curve"][0][1] for run in runs)
    final = statistics.fmean(run["curve"][-1][1] for run in runs)
    best = statistics.fmean(max(point[1] for point in run["curve"]) for run in runs)
    if reference <= start:
        return "nothing to compare with: the first arm gained nothing"
    share = (final - start) / (reference - start)
    if share >= 0.9:
        return "learns"
    updates = [update for run in runs for update in run["updates"]]
    means = {name: statistics.fmean(update[name] for update in updates) for name in SHOWN}
    last = statistics.fmean(update["entropy"] for run in runs for update in run["updates"][-10:])
    reasons = []
    if means["clipped_fraction"] > 0.2:
        reasons.append(f"{means['clipped_fraction']:.0%} of the tokens are clipped and teach nothing")
    if means["masked_fraction"] > 0.05:
        reasons.append(f"{means['masked_fraction']:.0%} of the tokens are masked")
    if means["effective_sample_size"] < 0.9:
        reasons.append(f"effective sample size {means['effective_sample_size']:.2f}, ratios up to {max(update['ratio_max'] for update in updates):.0f}")
    if last > 2 * updates[0]["entropy"]:
        reasons.append(f"entropy rises from {updates[0]['entropy']:.2f} to {last:.2f}")
    reason = f": {'; '.join(reasons)}" if reasons else ""
    if best > final + 0.1:
        return f"fails, falls back from {best:.2f}{reason}"
    return f"learns, {share:.0%} of the gain without staleness{reason}" if share >= 0.25 else f"fails{reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--every", type=int, default=20, help="updates between evaluations")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-losses"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    print(heading(), flush=True)
    print("| loss + correction | sampled | greedy | effective samples | largest ratio | clipped | masked | seconds | |\n|---|---|---|---|---|---|---|---|---|")
    reference = None
    for arm in arguments.arms:
        runs = [run_arm(arguments.recipe, arm, seed, arguments) for seed in range(arguments.seeds)]
        before, after = ([statistics.fmean(run["curve"][end][kind] for run in runs) for kind in (1, 2)] for end in (0, -1))
        reference = after[0] if reference is None else reference  # the first arm asked for
        updates = [update for run in runs for update in run["updates"]]
        mean = {name: statistics.fmean(update[name] for update in updates) for name in SHOWN}
        print(
            f"| {arm} | {before[0]:.2f} -> {after[0]:.2f} | {before[1]:.2f} -> {after[1]:.2f} | {mean['effective_sample_size']:.2f} "
            f"| {max(update['ratio_max'] for update in updates):.3g} | {mean['clipped_fraction']:.1%} | {mean['masked_fraction']:.1%} "
            f"| {statistics.fmean(run['seconds'] for run in runs):.0f} | {verdict(runs, reference)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
