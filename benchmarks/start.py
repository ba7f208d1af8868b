"""Seconds to start a role process: the first one waits for the forkserver to load torch and transformers, later ones do not.

    python benchmarks/start.py --pairs 5

Prints the first, the median of the later ones, and their ratio to a spawned process that imports the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from headrace.config import Settings
from headrace.config_loading import load_settings
from headrace.recipe import RecipeCode
from headrace.runtime import hosts
from headrace.runtime.local_evaluation import start_model
from headrace.runtime.processes import RoleProcess, end_forkserver

SPAWNED = (
    "import headrace.sampler.transformers_sampler, headrace.rollout.worker; from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained"
)


async def start_evaluator(model: Path, settings: Settings, code: RecipeCode) -> float:
    """Until a role with the model loaded says hello."""
    started = time.perf_counter()
    process = RoleProcess("evaluator", hosts.host_evaluator, (model, settings, code, None, None), core=None)
    await process.hello()
    seconds = time.perf_counter() - started
    await process.stop(5.0)
    return seconds


def spawn() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", SPAWNED], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="door")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}")
    resolved = load_settings(arguments.recipe)
    settings, code = resolved.anchored(), RecipeCode(resolved.task_module, resolved.settings.task.options)
    model = asyncio.run(start_model(resolved))
    end_forkserver()
    first = asyncio.run(start_evaluator(model, settings, code))
    later, spawned = [], []
    for _ in range(arguments.pairs):
        later.append(asyncio.run(start_evaluator(model, settings, code)))
        spawned.append(spawn())
    end_forkserver()
    ratios = [one / other for one, other in zip(later, spawned, strict=True)]
    print(f"first {first:.2f} s; later {statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})")
    print(f"against a spawned process that imports the same: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
