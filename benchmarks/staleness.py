"""How old may training data be, and what helps? door and arithmetic at several staleness, under several losses and corrections.

    python benchmarks/staleness.py                                            # the whole grid, about an hour
    python benchmarks/staleness.py --recipes door --staleness 0 8 --losses ppo_clip --seeds 1 --updates 30
    python benchmarks/staleness.py --losses ppo_clip --slopes 0 0.125         # is a smaller learning rate for stale data better?
    python benchmarks/staleness.py --losses ppo_clip --rates 6e-4 3e-4        # at any staleness?

One deterministic process with a delay line between sampler and learner (loop.py): every token is exactly `staleness` updates old (those
of the first batches less), every arm has the same tasks and random streams. Scores are exact, not sampled: the chance
that a whole walk of door succeeds (1,024 walks), that the whole right work of arithmetic is written (512 problems; a lower bound of the
chance of its reward).

final: mean of the last 3 evaluations. difference: to the same loss at staleness 0, paired by seed, with its standard error.
jitter: sd of the differences of neighbouring evaluations after 90 % of the final value was first reached. Resumable: every
finished arm is a file in --out and is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.rollout.evaluation import PinnedPolicy, resolve_evaluate
from headrace.tasks.source import evaluation_tasks
from loop import Loop, heading, kept, train_stale

LOSSES: dict[str, list[str]] = {
    "none": ["learner.loss=reinforce", "learner.correction=none"],
    "truncated": ["learner.loss=reinforce", "learner.correction=truncated"],
    "ppo_clip": ["learner.loss=ppo_clip", "learner.correction=none"],
    "decoupled": ["learner.loss=decoupled_ppo", "learner.correction=decoupled"],
}
"""With one update a batch, decoupled is the whole ratio as a weight; learner.num_minibatches=4 gives its clip something to do."""
STALENESS = {"door": (0, 2, 8, 16), "arithmetic": (0, 8)}
METRIC = {"door": "success_probability", "arithmetic": "work_probability"}
OVERRIDES = {"door": ["task.options.tool_seconds=0"], "arithmetic": []}
"""Nobody waits for anybody here: tool latencies would only cost time."""
NUM_LAST = 3


class Arm(NamedTuple):
    recipe: str
    loss: str
    rate: float | None
    """None: the recipe's."""
    slope: float
    staleness: int

    def overrides(self) -> list[str]:
        rate = [] if self.rate is None else [f"learner.learning_rate={self.rate!r}"]
        return [*LOSSES[self.loss], *rate, f"learner.staleness_slope={self.slope!r}", *OVERRIDES[self.recipe]]

    def __str__(self) -> str:
        extra = ("" if self.rate is None else f", rate {self.rate:g}") + (f", slope {self.slope:g}" if self.slope else "")
        return f"{self.recipe} {self.loss}{extra}, staleness {self.staleness}"


async def exact(loop: Loop) -> list[float]:
    """The recipe's own exact evaluation: the metric of METRIC."""
    evaluate = resolve_evaluate(loop.code, loop.settings)
    assert evaluate is not None
    policy = PinnedPolicy(loop.sampler.version, loop.tokenizer, loop.sampler)
    found = await evaluate(policy, evaluation_tasks(loop.settings, loop.code))
    return [statistics.fmean(found[METRIC[loop.settings.run.name]])]


def run_arm(arm: Arm, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    overrides = [*arm.overrides(), f"run.seed={seed}", f"run.num_updates={arguments.updates}", *arguments.overrides]
    options = {"num_updates": arguments.updates, "staleness": arm.staleness, "every": arguments.every}

    def run() -> dict[str, Any]:
        return train_stale(Loop(arm.recipe, overrides), exact, **options)

    return kept(arguments.out, f"{arm}-{seed}", {"recipe": arm.recipe, "overrides": overrides, **options}, run)


def final(run: dict[str, Any]) -> float:
    return statistics.fmean(point[1] for point in run["curve"][-NUM_LAST:])


def jitter(run: dict[str, Any]) -> float:
    """nan with fewer than two differences."""
    scores = [point[1] for point in run["curve"]]
    reached = next(index for index, score in enumerate(scores) if score >= 0.9 * final(run))
    differences = [after - before for before, after in itertools.pairwise(scores[reached:])]
    return statistics.stdev(differences) if len(differences) > 1 else math.nan


def difference(runs: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]) -> str:
    """Mean over seeds, in points, and its standard error."""
    found = [100 * (final(run) - final(other)) for run, other in zip(runs, fresh, strict=True)]
    error = f" ({statistics.stdev(found) / math.sqrt(len(found)):.1f})" if len(found) > 1 else " (one seed)"
    return f"{statistics.fmean(found):+.1f}{error}"


def line(arm: Arm, runs: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]] | None) -> str:
    def mean(name: str) -> float:
        return statistics.fmean(update[name] for run in runs for update in run["updates"])

    compared = "" if not arm.staleness or fresh is None else difference(runs, fresh)
    ages = [update["staleness"] for run in runs for update in run["updates"][arm.staleness :]]
    cells = [
        str(arm),
        f"{statistics.fmean(run['curve'][0][1] for run in runs):.3f} -> {statistics.fmean(map(final, runs)):.3f}",
        compared,
        f"{statistics.fmean(map(jitter, runs)):.4f}",
        f"{statistics.fmean(ages):.1f}" if ages else "",
        f"{mean('learning_rate'):.2e}",
        f"{mean('effective_sample_size'):.3f}",
        f"{mean('clipped_fraction'):.1%}",
        f"{statistics.fmean(run['seconds'] for run in runs):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=STALENESS, default=list(STALENESS))
    parser.add_argument("--staleness", nargs="+", type=int, help="updates; default: 0 2 8 16 for door, 0 8 for arithmetic")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--rates", nargs="+", type=float, default=[None], help="learning rates; default: the recipe's")
    parser.add_argument("--slopes", nargs="+", type=float, default=[0.0], help="learner.staleness_slope")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=70)
    parser.add_argument("--every", type=int, default=2, help="updates between evaluations")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-staleness"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for every arm")
    arguments = parser.parse_intermixed_args()
    print(heading(), flush=True)
    print("| arm | score | difference | jitter | age | learning rate | effective samples | clipped | seconds |\n|---|---|---|---|---|---|---|---|---|")
    for recipe, loss, rate, slope in itertools.product(arguments.recipes, arguments.losses, arguments.rates, arguments.slopes):
        fresh: list[dict[str, Any]] | None = None
        for staleness in sorted(arguments.staleness or STALENESS[recipe]):
            arm = Arm(recipe, loss, rate, slope if staleness else 0.0, staleness)  # without staleness the slope changes nothing
            runs = [run_arm(arm, seed, arguments) for seed in range(arguments.seeds)]
            if staleness == 0:
                fresh = runs
            print(line(arm, runs, fresh), flush=True)


if __name__ == "__main__":
    main()
