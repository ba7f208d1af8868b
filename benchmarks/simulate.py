"""How fast runs are simulated: rollouts and decode steps a second of this machine's time.

    python benchmarks/simulate.py [--rollouts 20000] [--json]

Tokens must not matter: the second setup has ten times longer answers than the first. Steps of tools do: each is an event of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config import Settings
from headrace.planner.distributions import Distribution
from headrace.planner.fits import DecodeFit, LearnFit
from headrace.planner.profile import (
    Decode,
    DecodePoint,
    Distributions,
    Group,
    Hardware,
    Learn,
    LearnPoint,
    Model,
    Prefill,
    Profile,
    Saturation,
    Source,
    WeightUpdate,
)
from headrace.planner.simulation import merged, simulated_tree
from headrace.planner.time_model import time_model
from headrace.runtime.simulated import simulate


def make_profile(answer_tokens: float, steps: float = 1.0, wait_seconds: float = 0.0) -> Profile:
    """A model of 8 billion parameters on one device, roughly."""
    decode = DecodeFit(floor_seconds=0.011, seconds_per_sequence=5e-5, seconds_per_context_token=6e-8, seconds_per_extra_token=6e-5, relative_error=0.1)
    learn = LearnFit(overhead_seconds=2.0, seconds_per_micro_batch=0.02, seconds_per_token=2e-4, seconds_per_exchange=0.2)
    distributions = Distributions(
        prompt_tokens=Distribution.lognormal(300.0 * steps, 100.0 * steps),
        answer_tokens=Distribution.lognormal(answer_tokens, 0.8 * answer_tokens),
        steps=Distribution.lognormal(steps, 0.5 * steps) if steps > 1 else Distribution.constant(1.0),
        tool_wait_seconds=Distribution.lognormal(wait_seconds, wait_seconds) if wait_seconds else Distribution.constant(0.0),
    )
    return Profile(
        source=Source(kind="estimated", origin="benchmark"),
        hardware=Hardware(device="device", count=1),
        model=Model(num_parameters=8_000_000_000),
        decode=Decode(
            points=(DecodePoint(running=64, context_tokens=1000, seconds=0.018, count=1),), fit=decode, kv_capacity_tokens=400_000,
            saturation=Saturation(running=128, tokens_per_second=6000.0),
        ),
        prefill=Prefill(overhead_seconds=0.0, tokens_per_second=16_000.0),
        learn=Learn(points=(LearnPoint(ranks=8, micro_batch_tokens=16384, tokens=500_000, seconds=14.0),), fit=learn),
        weight_update=WeightUpdate(bytes=16_000_000_000, publish_seconds=1.0, transfer_seconds=1.0, pause_seconds=1.0),
        distributions=distributions,
        group=Group(size=8, tailness=1.5),
    )  # fmt: skip


def measure(name: str, profile: Profile, rollouts: int, run_directory: Path | None) -> dict[str, Any]:
    batch, updates = 512, max(2, rollouts // 512)
    tree = merged(
        simulated_tree(profile),
        {
            "run": {"mode": "async", "num_samplers": 12, "num_learner_ranks": 4, "num_updates": updates},
            "sampler": {"max_running": 128},
            "pool": {"groups_per_batch": batch // 8, "max_staleness": 4},
        },
    )
    settings = Settings.model_validate(tree)
    counts = {"rollouts": 0, "tokens": 0, "steps": 0, "events": 0}

    def count(line: dict[str, Any]) -> None:
        counts["events"] += 1
        if line["event"] == "rollout_finished":
            counts["rollouts"] += 1
            counts["tokens"] += line["tokens"]
            counts["steps"] += line["steps"]

    started = time.process_time()
    outcome = simulate(settings, time_model(profile, settings), run_directory=run_directory, subscribers=[count])
    seconds = time.process_time() - started
    return {
        "setup": name,
        **counts,
        "seconds": seconds,
        "simulated_seconds": outcome.seconds,
        "rollouts_per_second": counts["rollouts"] / seconds,
        "tokens_per_second": counts["tokens"] / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=20_000, help="trained ones of each setup")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    short, agent = make_profile(600.0), make_profile(2000.0, steps=20.0, wait_seconds=2.0)
    long = replace(short, distributions=make_profile(6000.0).distributions)
    rows = [
        measure(name, profile, arguments.rollouts, None)
        for name, profile in (("answers of 600", short), ("answers of 6,000", long), ("20 steps of tools", agent))
    ]
    with tempfile.TemporaryDirectory() as directory:
        rows.append(measure("600, run directory", short, arguments.rollouts, Path(directory) / "run"))
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'setup':20}{'rollouts':>9}{'tokens':>14}{'events':>8}{'s (CPU)':>9}{'rollouts/s':>11}{'tokens/s':>12}{'simulated':>11}", file=out)
    for row in rows:
        print(
            f"{row['setup']:20}{row['rollouts']:9,}{row['tokens']:14,}{row['events']:8,}{row['seconds']:9.1f}{row['rollouts_per_second']:11,.0f}"
            f"{row['tokens_per_second']:12,.0f}{row['simulated_seconds']:9,.0f} s",
            file=out,
        )
    if arguments.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
