"""Synchronous seconds an update of headrace against TRL's GRPOTrainer: same start, same tasks, same reward, same batch, in turn.

    pip install trl datasets accelerate        # in an environment of its own, beside headrace
    python benchmarks/against_trl.py [--recipe arithmetic] [--pairs 5] [--updates 20] [--trl-processes 2] [--json FILE]

Both train the recipe's model (its cached warm start) on 16 x 8 rollouts an update in float32, with PPO-clip on the group's z-scores
averaged over tokens (TRL: loss_type dapo), no KL term, AdamW, the same learning rate, clips and limit of tokens. headrace: sync,
colocated, one device a core. TRL: `generate` with KV cache and the whole batch in one forward, no gradient checkpointing; one process
with `--trl-threads` threads, or data-parallel processes (`--trl-processes`). Each run is a process of its own; start-up and the
first updates are left out. A pair is one run of each, the order alternating. CPU seconds count every process of a run: on a machine that
others use too they say more than the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.config import Settings
from headrace.config_loading import ResolvedSettings, load_settings
from headrace.recipe import RecipeCode
from headrace.tasks.source import load_tasks

SKIPPED_UPDATES = 3
"""Of each run: allocators and caches fill."""
CORES = len(os.sched_getaffinity(0))
HEADRACE = ["run.mode=sync", "run.placement=colocated", f"run.num_samplers={CORES}", f"run.num_learner_ranks={CORES}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--trl-processes", type=int, default=1)
    parser.add_argument("--trl-threads", type=int, default=CORES, help="of each TRL process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["headrace", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.child is None:
        compare(arguments)
        return
    run = run_headrace if arguments.child == "headrace" else run_trl
    result = run(load_settings(arguments.recipe, [f"run.seed={arguments.seed}", f"run.num_updates={arguments.updates}", *arguments.overrides]), arguments)
    if result is not None:
        arguments.out.write_text(json.dumps(result))


def compare(arguments: argparse.Namespace) -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    resolved = load_settings(arguments.recipe, arguments.overrides)
    model = starting_model(resolved)
    runs: dict[str, list[dict[str, Any]]] = {"headrace": [], "trl": []}
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    for pair in range(arguments.pairs):
        for name in ("headrace", "trl") if pair % 2 == 0 else ("trl", "headrace"):
            runs[name].append(in_a_process(name, pair, model, arguments))
        seconds = {name: statistics.median(runs[name][-1]["seconds"][SKIPPED_UPDATES:]) for name in runs}
        ratios.append(seconds["headrace"] / seconds["trl"])
        cpu = {name: runs[name][-1]["cpu_seconds"] for name in runs}
        cpu_ratios.append(cpu["headrace"] / cpu["trl"])
        print(
            f"pair {pair}: headrace {seconds['headrace']:.3f} s an update, TRL {seconds['trl']:.3f} s, ratio {ratios[-1]:.3f}; "
            f"CPU {cpu['headrace']:.3f} and {cpu['trl']:.3f} s, ratio {cpu_ratios[-1]:.3f}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    for name, made in runs.items():
        everything = [seconds for run in made for seconds in run["seconds"][SKIPPED_UPDATES:]]
        tokens = statistics.mean(run["tokens_an_answer"] for run in made)
        print(f"{name}: median {statistics.median(everything):.3f} s an update, {tokens:.1f} tokens an answer; mean reward by update over all runs:")
        print("   " + " ".join(f"{statistics.mean(rewards):.2f}" for rewards in zip(*(run["rewards"] for run in made), strict=False)))
    for what, found in (("wall", ratios), ("CPU", cpu_ratios)):
        print(f"{what} ratio: median {statistics.median(found):.3f}, from {min(found):.3f} to {max(found):.3f} over {len(found)} pairs")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"ratios": ratios, "cpu_ratios": cpu_ratios, "runs": runs}, indent=1))


def starting_model(resolved: ResolvedSettings) -> Path:
    """The recipe's warm-started model; headrace finds the same one in its cache."""
    from headrace.learner.warm_start import prepare_model
    from headrace.runtime.local import cache_directory

    code = RecipeCode(resolved.task_module, resolved.settings.task.options)
    return prepare_model(resolved.settings, code, cache_directory=cache_directory(), progress=lambda what, fraction: None)


def in_a_process(name: str, seed: int, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    processes = arguments.trl_processes if name == "trl" else 1
    with tempfile.TemporaryDirectory(prefix="headrace-trl-") as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--child", name, "--recipe", arguments.recipe, "--updates", str(arguments.updates)]
        command += ["--seed", str(seed), "--model", str(model), "--out", str(out), *arguments.overrides]
        threads = arguments.trl_threads if name == "trl" else 1
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
        if processes == 1:
            environment.pop("WORLD_SIZE")
        children = []
        for rank in range(processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)} if processes > 1 else {}
            children.append(subprocess.Popen(command, env=environment | ranks, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        outputs = [child.communicate()[1] for child in children]
        if not out.exists():
            raise SystemExit(f"{name} failed:\n{outputs[0][-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_headrace(resolved: ResolvedSettings, arguments: argparse.Namespace) -> dict[str, Any]:
    from headrace.events import read_events
    from headrace.runtime.local import run_local
    from headrace.runtime.processes import end_forkserver

    given = [*HEADRACE, f"run.seed={arguments.seed}", f"run.num_updates={arguments.updates}", *arguments.overrides]
    with tempfile.TemporaryDirectory(prefix="headrace-trl-run-") as directory:
        clock = CpuClock()
        outcome = asyncio.run(run_local(load_settings(arguments.recipe, given), Path(directory) / "run", evaluate=False, subscribers=[clock]))
        events = list(read_events(outcome.run_directory / "events.jsonl"))
    end_forkserver()
    updated = [event for event in events if event["event"] == "updated"]
    tokens = [event["tokens"] for event in events if event["event"] == "rollout_finished"]
    start = next(event["time"] for event in events if event["event"] == "timed_window")
    times = [start, *(event["time"] for event in updated)]
    return {
        "seconds": [after - before for before, after in itertools.pairwise(times)],
        "rewards": [event["reward_mean"] for event in updated],
        "tokens_an_answer": statistics.mean(tokens),
        "cpu_seconds": clock.of_an_update(),
        "learner_seconds": statistics.median(event["seconds"] for event in updated),
    }


class CpuClock:
    """A subscriber of a run's events: processor time of this process and all it started, at each update."""

    def __init__(self) -> None:
        self._readings: list[float] = []

    def __call__(self, line: dict[str, Any]) -> None:
        if line["event"] == "updated":
            self._readings.append(sum(cpu_seconds(pid) for pid in (os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children()))))

    def of_an_update(self) -> float:
        return (self._readings[-1] - self._readings[SKIPPED_UPDATES]) / (len(self._readings) - 1 - SKIPPED_UPDATES)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_trl(resolved: ResolvedSettings, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """One rank of TRL's trainer; the first one returns what it measured."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    settings = resolved.settings
    code = RecipeCode(resolved.task_module, settings.task.options)
    tasks = load_tasks(str(settings.task.source), code)
    by_prompt = {task.data["prompt"]: task for task in tasks}
    grade = code.resolve(str(settings.task.reward))
    times, busy = [time.perf_counter()], []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        async def all_of_them() -> list[float]:
            return [await grade(by_prompt[prompt], answer) for prompt, answer in zip(prompts, completions, strict=True)]

        if asyncio.iscoroutinefunction(getattr(grade, "func", grade)):
            return asyncio.run(all_of_them())
        return [grade(by_prompt[prompt], answer) for prompt, answer in zip(prompts, completions, strict=True)]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())
            busy.append(time.process_time())

    with tempfile.TemporaryDirectory(prefix="headrace-trl-out-") as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": task.data["prompt"]} for task in tasks]),
            args=trl_settings(settings, arguments, directory),
            callbacks=[Clock()],
        )
        trainer.train()
    if int(os.environ.get("RANK", "0")) != 0:
        return None
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seconds": [after - before for before, after in itertools.pairwise(times)],
        "rewards": [entry["reward"] for entry in logs],
        "tokens_an_answer": statistics.mean(entry["completions/mean_length"] for entry in logs),
        # ranks work alike
        "cpu_seconds": int(os.environ.get("WORLD_SIZE", "1")) * (busy[-1] - busy[SKIPPED_UPDATES]) / (len(busy) - 1 - SKIPPED_UPDATES),
    }


def trl_settings(settings: Settings, arguments: argparse.Namespace, directory: str) -> Any:
    """The recipe's settings in TRL's words."""
    from trl import GRPOConfig

    learner = settings.learner
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings.batch_trajectories // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=1,
        num_generations=settings.rollout.group_size,
        max_completion_length=settings.rollout.max_action_tokens,
        temperature=settings.rollout.temperature,
        max_steps=arguments.updates,
        learning_rate=learner.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_gradient_norm,
        beta=0.0,
        epsilon=learner.clip_low,
        epsilon_high=learner.clip_high,
        loss_type="dapo",
        mask_truncated_completions=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
