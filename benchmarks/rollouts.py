"""What a step of a rollout costs a rollout worker besides the model's work, in microseconds of its processor time.

    python benchmarks/rollouts.py [--recipe arithmetic] [--repeats 5] [--rollouts 2000] [section.key=value ...]
    python benchmarks/rollouts.py --against ../other-checkout/src   # in turn with another version of headrace: ratios of pairs

One worker with its sampler in one process, a recipe from its warm start; no conductor and no learner, reports are taken and thrown away.
As in a run, a tool's answer is awaited, and the garbage collector is set as a worker sets it. Actions of `door` have one token, so it is the worst case:
longer actions share a step's cost among more tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

DEFAULTS = {"door": ("sampler.max_running=64", "task.options.tool_seconds=0.005", "task.options.num_tasks=400"), "arithmetic": ()}


def measure(recipe: str, num_rollouts: int, overrides: list[str]) -> dict[str, float]:
    """In this process. Seconds are of its processor time."""
    import torch
    from transformers import AutoTokenizer

    from headrace.config_loading import load_settings
    from headrace.learner.warm_start import prepare_model
    from headrace.recipe import RecipeCode
    from headrace.rollout.render import end_tokens
    from headrace.rollout.worker import RolloutWorkerCore
    from headrace.runtime.local import cache_directory, sampling_parameters
    from headrace.sampler.transformers_sampler import TransformersSampler
    from headrace.tasks.source import make_task_source
    from headrace.types import RolloutKey, RolloutRequest

    torch.set_num_threads(1)
    resolved = load_settings(recipe, [*DEFAULTS[recipe], *overrides])
    settings = resolved.settings
    code = RecipeCode(resolved.task_module, settings.task.options)
    model = prepare_model(settings, code, cache_directory=cache_directory(), progress=lambda what, fraction: None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    sampler = TransformersSampler(
        str(model), settings=settings.sampler, max_context_tokens=settings.rollout.max_tokens, device="cpu", dtype="float32", weights=None, tokenizer=tokenizer
    )
    tasks, sampling = make_task_source(settings, code), sampling_parameters(settings, end_tokens(tokenizer))[0]

    async def work() -> dict[str, float]:
        worker = RolloutWorkerCore("worker", sampler=sampler, code=code, settings=settings, tokenizer=tokenizer)
        found = {"steps": 0.0, "model_seconds": 0.0, "decode_steps": 0.0, "model_steps": 0.0}
        started_rollouts = finished = 0
        async with asyncio.TaskGroup() as group:
            running = group.create_task(worker.run())
            seconds = 0.0
            while finished < num_rollouts:
                report = await worker.next_report()
                finished += len(report.finished)
                if report.activity is not None:
                    found["decode_steps"] += report.activity.decode_steps
                    found["model_seconds"] += report.activity.busy_seconds
                found["steps"] += sum(one.summary.num_steps for one in report.finished)
                if room := min(report.room, num_rollouts - started_rollouts):
                    seconds = seconds or time.process_time()
                    keys = [RolloutKey(started_rollouts + index, 0, 0) for index in range(room)]
                    started_rollouts += room
                    await worker.start([RolloutRequest(key=key, task=tasks.next(), seed=0, sampling=sampling) for key in keys])
                await asyncio.sleep(0.01)
            found["seconds"] = time.process_time() - seconds
            await worker.stop()
            await running
        return found

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    return asyncio.run(work())


def measure_apart(source: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Microseconds a step, in a process of its own with headrace from `source`."""
    command = [sys.executable, __file__, "--child", "--recipe", arguments.recipe, "--rollouts", str(arguments.rollouts), *arguments.overrides]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    scale = 1e6 / found["steps"]
    return {"all": scale * found["seconds"], "model": scale * found["model_seconds"], "rest": scale * (found["seconds"] - found["model_seconds"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=DEFAULTS, default="door")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--against", type=Path, help="the src directory of another checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    if arguments.child:
        print(json.dumps(measure(arguments.recipe, arguments.rollouts, arguments.overrides)))
        return
    here = Path(__file__).resolve().parents[1] / "src"
    sources = [here] if arguments.against is None else [here, arguments.against.resolve()]
    rows = [[measure_apart(source, arguments) for source in sources] for _ in range(arguments.repeats)]
    print("| microseconds a step and rollout | " + " | ".join(str(source) for source in sources) + (" | ratio |" if len(sources) > 1 else " |"))
    print("|---" * (len(sources) + 1 + (len(sources) > 1)) + "|")
    for name in ("all", "model", "rest"):
        cells = [f"{statistics.median(row[index][name] for row in rows):.1f}" for index in range(len(sources))]
        if len(sources) > 1:
            ratios = sorted(row[0][name] / row[1][name] for row in rows)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
