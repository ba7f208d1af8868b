"""Every loss and every off-policy correction on one recipe: does it learn from stale rollouts, how fast, and if not, why not?

    python benchmarks/losses.py --updates 80 --staleness 4

Everything runs in one process on the parts of recipes/one_file_loop.py, with a delay line between sampler and learner: each batch
waits until it is `--staleness` updates old (the first ones less: all of them are sampled before the first update). So all arms
get the same tasks, random streams and staleness, and nothing depends on the machine's speed. `ppo_clip, staleness 0` is the
same loop without the delay.

Scores are the share of evaluation problems answered right: sampled at temperature 1, and greedy. Resumable: an arm in --out is
not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from headrace.evaluation import evaluation_requests  # noqa: E402
from headrace.tasks.source import evaluation_tasks  # noqa: E402
from headrace.types import SamplingParameters  # noqa: E402
from one_file_loop import Loop  # noqa: E402

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
SHOWN = ("effective_sample_size", "ratio_max", "clipped_fraction", "masked_fraction", "entropy", "gradient_norm")


async def score(loop: Loop, *, greedy: bool) -> float:
    """Share of the evaluation tasks that are answered right."""
    sampling = loop.sampling
    parameters = SamplingParameters(
        temperature=0.0 if greedy else 1.0, max_action_tokens=sampling.max_action_tokens, stop_tokens=sampling.stop_tokens, stop_strings=sampling.stop_strings
    )
    requests = evaluation_requests(loop.settings, evaluation_tasks(loop.settings, loop.code), parameters)
    async with asyncio.TaskGroup() as running:
        rollouts = [running.create_task(loop.roll_out(request)) for request in requests]
    return statistics.fmean(rollout.result().reward for rollout in rollouts)


async def train_stale(loop: Loop, *, num_updates: int, staleness: int, every: int) -> dict[str, Any]:
    """Trains on batches that are `staleness` updates old. Returns scores, curve and the learner's statistics of each update."""
    waiting: deque[Any] = deque()
    updates: list[dict[str, float]] = []
    curve: list[tuple[int, float, float]] = []
    number = 0
    training_seconds = 0.0
    async with asyncio.TaskGroup() as background:
        engine = background.create_task(loop.sampler.run(lambda: "environment"))
        for update in range(num_updates + 1):
            if update % every == 0 or update == num_updates:
                curve.append((update, await score(loop, greedy=False), await score(loop, greedy=True)))
            if update == num_updates:
                break
            started = time.perf_counter()
            while len(waiting) <= staleness:
                waiting.append(await loop.sample(number))
                number += 1
            batch = waiting.popleft()
            result = await loop.learn(loop.select(batch, update, max_staleness=staleness))
            training_seconds += time.perf_counter() - started
            statistics_ = None if result is None else result.statistics
            if statistics_ is not None:
                reward = statistics.fmean(trajectory.reward for trajectory in batch if not trajectory.failed)
                updates.append({"reward": reward, **{name: getattr(statistics_, name) for name in SHOWN}, "staleness": statistics_.staleness_mean})
        engine.cancel()
    await loop.user_code.close()
    return {"curve": curve, "updates": updates, "seconds": training_seconds}


def run_arm(recipe: str, arm: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    path = arguments.out / f"{arm.replace(' ', '_').replace(',', '').replace('+', 'and')}-{seed}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    loop = Loop(recipe, [*ARMS[arm], f"run.seed={seed}", f"run.num_updates={arguments.updates}", *arguments.overrides])
    staleness = 0 if arm.endswith("staleness 0") else arguments.staleness
    result = asyncio.run(train_stale(loop, num_updates=arguments.updates, staleness=staleness, every=arguments.every))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return result


def verdict(runs: list[dict[str, Any]], reference: float) -> str:
    """`learns`, or how it falls short of `reference` and what the learner measured meanwhile (means over updates and seeds)."""
    start = statistics.fmean(run["curve"][0][1] for run in runs)
    final = statistics.fmean(run["curve"][-1][1] for run in runs)
    best = statistics.fmean(max(point[1] for point in run["curve"]) for run in runs)
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
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}\n", flush=True)
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
