"""Synchronous seconds an update of headrace against TRL's GRPOTrainer: same start, same tasks, same reward, same batch, in turn.

    pip install trl datasets accelerate        # in an environment of its own, beside headrace
    python benchmarks/against_trl.py [--recipe arithmetic] [--pairs 5] [--window 5] [--trl-processes 2] [--json FILE]

Both train the recipe's model (its cached warm start) on the same number of rollouts an update in float32, with PPO-clip on the group's
z-scores averaged over tokens (TRL: loss_type dapo), no KL term, AdamW, the same learning rate, clips and limit of tokens. headrace: sync,
colocated, one device a core. TRL: `generate` with KV cache and the whole batch in one forward, no gradient checkpointing; one process
with `--trl-threads` threads, or data-parallel processes (`--trl-processes`).

Both run from beginning to end, and in turn: while one does its window of updates the other is stopped (SIGSTOP), so both see the same
machine, whatever else runs there. The update that was interrupted is left out. CPU seconds count every process of a run: on a machine
that others use too they say more than the wall clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from headrace.config import Settings
from headrace.config_loading import ResolvedSettings, load_settings
from headrace.recipe import RecipeCode
from headrace.tasks.source import load_tasks

WARM_UP_UPDATES = 3
"""Of each run: allocators and caches fill."""
CORES = len(os.sched_getaffinity(0))
HEADRACE = [
    "run.mode=sync",
    "run.placement=colocated",
    f"run.num_samplers={CORES}",
    f"run.num_learner_ranks={CORES}",
    "limits.report_seconds=1e6",  # it is stopped for a while
    "limits.batch_seconds=1e6",
    "limits.apply_seconds=1e6",
]
MANY_UPDATES = 100_000
"""Neither ends by itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--window", type=int, default=5, help="updates measured in a window")
    parser.add_argument("--trl-processes", type=int, default=1)
    parser.add_argument("--trl-threads", type=int, default=CORES, help="of each TRL process")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["headrace", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--report-to", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.child is None:
        compare(arguments)
        return
    with open(arguments.report_to, "w", buffering=1) as report:
        (run_headrace if arguments.child == "headrace" else run_trl)(arguments, report)


class Run:
    """One of the two, stopped except in its windows. Every update is a line {time, reward, tokens, cpu}."""

    def __init__(self, name: str, model: Path, directory: Path, arguments: argparse.Namespace) -> None:
        self.name = name
        self.updates: list[dict[str, float]] = []
        self._processes = arguments.trl_processes if name == "trl" else 1
        threads = arguments.trl_threads if name == "trl" else 1
        reading, writing = os.pipe()
        command = [sys.executable, __file__, "--child", name, "--recipe", arguments.recipe, "--model", str(model), "--directory", str(directory)]
        command += ["--report-to", str(writing), *arguments.overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
        if self._processes > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self._processes)}
            environment["LOCAL_WORLD_SIZE"] = str(self._processes)
        self._children: list[subprocess.Popen[bytes]] = []
        for rank in range(self._processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if self._processes > 1 else {}
            log = (directory / f"{name}-{rank}.log").open("wb")
            self._children.append(
                subprocess.Popen(command, env=environment | ranks, stdout=log, stderr=log, pass_fds=[writing], start_new_session=True, close_fds=True)
            )
        os.close(writing)
        self._lines: IO[str] = os.fdopen(reading)
        self._log = directory / f"{name}-0.log"
        self._advance(WARM_UP_UPDATES)
        self._signal(signal.SIGSTOP)

    def window(self, num_updates: int) -> tuple[float, float]:
        """(median seconds, mean CPU seconds) of an update, the interrupted one left out."""
        self._signal(signal.SIGCONT)
        self._advance(num_updates + 1)
        self._signal(signal.SIGSTOP)
        measured = self.updates[-num_updates - 1 :]
        seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(measured)]
        return statistics.median(seconds), self._processes * (measured[-1]["cpu"] - measured[0]["cpu"]) / num_updates

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        for child in self._children:
            child.wait()

    def _advance(self, num_updates: int) -> None:
        for _ in range(num_updates):
            line = self._lines.readline()
            if not line:
                raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-4000:]}")
            self.updates.append(json.loads(line))

    def _signal(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)


@contextlib.contextmanager
def both(arguments: argparse.Namespace) -> Iterator[dict[str, Run]]:
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-trl-", ignore_cleanup_errors=True) as directory:
        model = starting_model(load_settings(arguments.recipe, arguments.overrides))
        try:
            for name in ("headrace", "trl"):
                runs[name] = Run(name, model, Path(directory), arguments)
            yield runs
        finally:
            for run in runs.values():
                run.end()


def compare(arguments: argparse.Namespace) -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}", flush=True)
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    with both(arguments) as runs:
        for pair in range(arguments.pairs):
            order = ("headrace", "trl") if pair % 2 == 0 else ("trl", "headrace")
            found = {name: runs[name].window(arguments.window) for name in order}
            (ours, our_cpu), (theirs, their_cpu) = found["headrace"], found["trl"]
            ratios.append(ours / theirs)
            cpu_ratios.append(our_cpu / their_cpu)
            print(
                f"pair {pair}: headrace {ours:.3f} s an update, TRL {theirs:.3f} s, ratio {ratios[-1]:.3f}; "
                f"CPU {our_cpu:.3f} and {their_cpu:.3f} s, ratio {cpu_ratios[-1]:.3f}; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    for name, run in runs.items():
        print(f"{name}: {statistics.mean(update['tokens'] for update in run.updates):.1f} tokens an answer; mean reward of each update from the first:")
        print("   " + " ".join(f"{update['reward']:.2f}" for update in run.updates))
    for what, each in (("wall", ratios), ("CPU", cpu_ratios)):
        print(f"{what} ratio: median {statistics.median(each):.3f}, from {min(each):.3f} to {max(each):.3f} over {len(each)} pairs")
    if arguments.json is not None:
        updates = {name: run.updates for name, run in runs.items()}
        arguments.json.write_text(json.dumps({"ratios": ratios, "cpu_ratios": cpu_ratios, "updates": updates}, indent=1))


def starting_model(resolved: ResolvedSettings) -> Path:
    """The recipe's warm-started model; headrace finds the same one in its cache."""
    from headrace.learner.warm_start import prepare_model
    from headrace.runtime.local import cache_directory

    code = RecipeCode(resolved.task_module, resolved.settings.task.options)
    return prepare_model(resolved.settings, code, cache_directory=cache_directory(), progress=lambda what, fraction: None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_headrace(arguments: argparse.Namespace, report: IO[str]) -> None:
    from headrace.runtime.local import run_local

    resolved = load_settings(arguments.recipe, [*HEADRACE, f"run.num_updates={MANY_UPDATES}", *arguments.overrides])
    tokens: list[int] = []

    def reporter(line: dict[str, Any]) -> None:
        if line["event"] == "rollout_finished":
            tokens.append(line["tokens"])
        elif line["event"] == "updated":
            processes = (os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children()))
            cpu = sum(cpu_seconds(pid) for pid in processes)
            update = {"time": time.perf_counter(), "reward": line["reward_mean"], "tokens": statistics.mean(tokens), "cpu": cpu}
            report.write(json.dumps(update) + "\n")
            tokens.clear()

    asyncio.run(run_local(resolved, arguments.directory / "run", evaluate=False, subscribers=[reporter]))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_trl(arguments: argparse.Namespace, report: IO[str]) -> None:
    """One rank of TRL's trainer; the first one reports."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    resolved = load_settings(arguments.recipe, arguments.overrides)
    settings = resolved.settings
    code = RecipeCode(resolved.task_module, settings.task.options)
    tasks = load_tasks(str(settings.task.source), code)
    by_prompt = {task.data["prompt"]: task for task in tasks}
    grade = code.resolve(str(settings.task.reward))

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        async def all_of_them() -> list[float]:
            return [await grade(by_prompt[prompt], answer) for prompt, answer in zip(prompts, completions, strict=True)]

        if asyncio.iscoroutinefunction(getattr(grade, "func", grade)):
            return asyncio.run(all_of_them())
        return [grade(by_prompt[prompt], answer) for prompt, answer in zip(prompts, completions, strict=True)]

    class Reporter(TrainerCallback):
        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs is not None and "reward" in logs and int(os.environ.get("RANK", "0")) == 0:
                tokens = float(logs["completions/mean_length"])
                update = {"time": time.perf_counter(), "reward": float(logs["reward"]), "tokens": tokens, "cpu": time.process_time()}
                report.write(json.dumps(update) + "\n")

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": task.data["prompt"]} for task in tasks]),
        args=trl_settings(settings, str(arguments.directory / "trl")),
        callbacks=[Reporter()],
    )
    trainer.train()


def trl_settings(settings: Settings, directory: str) -> Any:
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
        max_steps=MANY_UPDATES,
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
        seed=settings.run.seed,
    )


if __name__ == "__main__":
    main()
