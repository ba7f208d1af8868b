"""How much of the bare forward and backward's speed the learner keeps: real tokens a second, learner against bare, in turn.

Bare: the same micro-batches of the same model, all logits, the sum of the action log-probs, backward; no selection to decode, no
weights, statistics, optimizer or ledger. One thread, interleaved pairs, a quiet machine or a ratio that says so.

    python benchmarks/learner.py [--pairs 7] [--groups 16] [--group-size 8] [--json]

With --saving: what leaving tokens out of the loss saves, in forward tokens and seconds of an update. Agent-like trajectories (median 12
steps, 8 to 40 tokens an observation, 1 to 8 an action, 3 steps in 10 are key), unmarked steps sampled with probability p
(learner.unmarked_fraction) or too old, and the policy sees the whole trajectory or its newest observation (rollout.context).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import ContextRule, Settings
from headrace.learner.batch import MicroBatch, coefficients, deal_rows, micro_batches, weigh
from headrace.learner.core import LearnerRank
from headrace.learner.unpack import unpack
from headrace.types import EndReason, PolicyVersion, RolloutKey, StepRecord, StopReason, Trajectory, VersionSpan
from headrace.updates import SelectedMember, Selection

VOCABULARY = 32
KEY_SHARE = 0.3
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def door_like(generator: np.random.Generator, group: int, member: int) -> Trajectory:
    """4 to 60 steps, log-normal (median 12), one observation and one action token a step, like the door task."""
    num_steps = int(np.clip(np.exp(generator.normal(np.log(12), 0.6)), 4, 60))
    tokens: list[int] = []
    steps = []
    for _ in range(num_steps):
        tokens += generator.integers(0, VOCABULARY, 2).tolist()
        end = len(tokens)
        span = VersionSpan(version=PolicyVersion(0, 0), start=end - 1, end=end)
        steps.append(StepRecord(action_start=end - 1, action_end=end, version_spans=(span,), key_weight=0.0, reward=0.0, stop_reason=StopReason.STOP))
    return Trajectory(
        key=RolloutKey(group, member, 0),
        task_id=str(group),
        task_kind="default",
        tokens=tuple(tokens),
        sampler_logprobs=tuple(-float(x) for x in generator.exponential(1.0, num_steps)),
        steps=tuple(steps),
        reward=float(generator.integers(0, 2)),
        end_reason=EndReason.DONE,
    )


def agent_like(generator: np.random.Generator, group: int, member: int) -> Trajectory:
    """Observations of 8 to 40 tokens, actions of 1 to 8. The first half of the steps was sampled by version 0, the rest by version 4."""
    num_steps = int(np.clip(np.exp(generator.normal(np.log(12), 0.6)), 4, 60))
    tokens: list[int] = []
    steps = []
    for index in range(num_steps):
        start = len(tokens) + int(generator.integers(8, 41))
        end = start + int(generator.integers(1, 9))
        tokens += generator.integers(0, VOCABULARY, end - len(tokens)).tolist()
        span = VersionSpan(version=PolicyVersion(0, 0 if index < num_steps / 2 else 4), start=start, end=end)
        key = float(generator.random() < KEY_SHARE)
        steps.append(StepRecord(action_start=start, action_end=end, version_spans=(span,), key_weight=key, reward=0.0, stop_reason=StopReason.STOP))
    num_action_tokens = sum(step.action_end - step.action_start for step in steps)
    return Trajectory(
        key=RolloutKey(group, member, 0),
        task_id=str(group),
        task_kind="default",
        tokens=tuple(tokens),
        sampler_logprobs=tuple(-float(x) for x in generator.exponential(1.0, num_action_tokens)),
        steps=tuple(steps),
        reward=float(generator.integers(0, 2)),
        end_reason=EndReason.DONE,
    )


def make_selection(groups: int, size: int, kind: Callable[[np.random.Generator, int, int], Trajectory] = door_like) -> Selection:
    generator = np.random.default_rng(0)
    trajectories = [kind(generator, group, member) for group in range(groups) for member in range(size)]
    members = tuple(SelectedMember(summary=t.summary(), payload=t.to_bytes()) for t in trajectories)
    return Selection(id=0, learner_version=PolicyVersion(0, 0), members=members, max_staleness=10**9, max_key_staleness=10**9)


def same_micro_batches(selection: Selection, settings: Settings) -> list[MicroBatch]:
    batch = unpack(selection, PolicyVersion(0, 0), {0: 0}, settings.learner.advantage)
    rows = np.arange(len(batch.rows))
    weighing = weigh(batch, 0)
    coefficient_of_row = coefficients(batch, weighing, rows, settings.learner.loss_scale, settings.rollout.max_tokens)
    share = deal_rows(batch, weighing, rows, 1)[0]
    budget = settings.learner.micro_batch_tokens
    return list(micro_batches(batch, weighing, share, coefficient_of_row, budget_tokens=budget, dtype=torch.float32, device=torch.device("cpu")))


def bare(model: Any, micro_batches_of_batch: list[MicroBatch]) -> None:
    model.zero_grad(set_to_none=False)
    for micro_batch in micro_batches_of_batch:
        logits = model(input_ids=micro_batch.tokens_RT, use_cache=False).logits.flatten(0, 1)
        logprobs = torch.log_softmax(logits, -1)[micro_batch.hidden_N, micro_batch.target_N]
        (logprobs * micro_batch.coefficient_N).sum().backward()


def seconds_of(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def collect_as_processes_do() -> None:
    """As runtime/hosts.py does once a process is set up: or else a full collection of everything torch loaded falls into some update."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def measure(pairs: int, groups: int, size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    selection = make_selection(groups, size)
    settings = Settings.model_validate({"run": {"num_updates": 10**6}})
    real_tokens = sum(member.summary.num_tokens for member in selection.members)
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY)).save_pretrained(directory)
        rank = LearnerRank(Path(directory), settings, device="cpu")
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
    parts = same_micro_batches(selection, settings)
    rank.learn(selection)
    bare(model, parts)
    collect_as_processes_do()
    timings = []
    for pair in range(pairs):
        order = ("learner", "bare") if pair % 2 == 0 else ("bare", "learner")
        taken = {name: seconds_of((lambda: rank.learn(selection)) if name == "learner" else (lambda: bare(model, parts))) for name in order}
        timings.append((real_tokens / taken["learner"], real_tokens / taken["bare"]))
    ratios = [learner / other for learner, other in timings]
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}",
        "trajectories": groups * size,
        "real_tokens": real_tokens,
        "padded_tokens": sum(part.padded_tokens for part in parts),
        "micro_batches": len(parts),
        "learner_tokens_per_second": statistics.median(learner for learner, _ in timings),
        "bare_tokens_per_second": statistics.median(other for _, other in timings),
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


SAVING_ARMS: dict[str, tuple[float, int]] = {
    "all steps": (1.0, 10**9),
    "p = 0.5": (0.5, 10**9),
    "p = 0.2": (0.2, 10**9),
    "unmarked of version 0 too old": (1.0, 6),
}
"""(learner.unmarked_fraction, max_staleness) of a learner at version 8"""


def measure_saving(rounds: int, groups: int, size: int) -> list[dict[str, Any]]:
    """One row an arm: medians over rounds, arms in turn; each round draws other steps."""
    torch.set_num_threads(1)
    selection = make_selection(groups, size, agent_like)
    arms = {(context, name): arm for context in ContextRule for name, arm in SAVING_ARMS.items()}
    taken: dict[tuple[ContextRule, str], list[tuple[float, int, int]]] = {key: [] for key in arms}
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY | {"max_position_embeddings": 4096})).save_pretrained(directory)
        ranks = {key: LearnerRank(Path(directory), saving_settings(key[0], arms[key][0]), device="cpu") for key in arms}
    collect_as_processes_do()
    for number in range(-1, rounds):  # the first one only warms up
        for key, rank in ranks.items():
            rank._version = PolicyVersion(0, 8)
            result = rank.learn(replace(selection, id=number + 1, max_staleness=arms[key][1]))
            assert result.statistics is not None
            if number >= 0:
                taken[key].append((result.seconds, result.statistics.padded_tokens, result.statistics.trained_tokens))
    rows = []
    for key, found in taken.items():
        seconds, forward, trained = (statistics.median(column) for column in zip(*found, strict=True))
        whole = taken[key[0], "all steps"]
        rows.append(
            {
                "context": str(key[0]),
                "arm": key[1],
                "trained_tokens": trained,
                "forward_tokens": forward,
                "seconds": seconds,
                "forward_tokens_ratio": forward / statistics.median(one[1] for one in whole),
                "seconds_ratio": statistics.median(one[0] / other[0] for one, other in zip(found, whole, strict=True)),
            }
        )
    return rows


def saving_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| {row['context']} | {row['arm']} | {row['trained_tokens']:.0f} | {row['forward_tokens']:.0f} ({row['forward_tokens_ratio']:.2f}) "
        f"| {row['seconds']:.2f} ({row['seconds_ratio']:.2f}) |"
        for row in rows
    ]
    head = ["| context | in the loss | trained tokens | forward tokens | seconds an update |", "|---|---|---|---|---|"]
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {datetime.now(UTC):%Y-%m-%d}"
    return "\n".join([where, "", *head, *lines])


def saving_settings(context: ContextRule, fraction: float) -> Settings:
    return Settings.model_validate({"rollout": {"context": context}, "learner": {"unmarked_fraction": fraction}, "run": {"num_updates": 10**6}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--saving", action="store_true", help="what leaving tokens out of the loss saves")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.saving:
        rows = measure_saving(max(arguments.pairs, 5), arguments.groups, arguments.group_size)
        print(json.dumps(rows) if arguments.json else saving_table(rows))
        return
    result = measure(max(arguments.pairs, 5), arguments.groups, arguments.group_size)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
