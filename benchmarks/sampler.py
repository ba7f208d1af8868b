"""Speed of the transformers sampler, as ratios of two things run in turn in one process. Prints a Markdown table.

    python benchmarks/sampler.py [--pairs 5]

1. 64 requests of mixed lengths: engine against `generate` in its best batch order (sorted, the best of several batch sizes).
2. Decode at a fixed batch: engine against the bare `model(...)` forward over transformers' own static cache.
3. Door-like: 300 rollouts in flight, one-token actions, one or two observation tokens, a tool of 30 ms x log-normal(0, 1 / 2);
   answers gathered against not gathered.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, StaticCache

from headrace.config import SamplerSettings
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import RolloutKey, SampleRequest, SamplingParameters

CONTEXT, VOCABULARY, BATCH = 128, 20, 64


class NoTokenizer:
    """No stop strings here: nothing is ever decoded."""

    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError


def save_model(directory: Path, width: int = 64, layers: int = 2) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=3 * width,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def make_sampler(directory: Path, **settings: object) -> TransformersSampler:
    return TransformersSampler(
        str(directory),
        settings=SamplerSettings(**{"max_running": BATCH, **settings}),
        max_context_tokens=CONTEXT,
        device="cpu",
        dtype="float32",
        weights=None,
        tokenizer=NoTokenizer(),
    )


def requests(seed: int) -> list[tuple[list[int], int]]:
    """(prompt, action tokens): prompts of 4 to 40 tokens, actions of 4 to 80."""
    chooser = random.Random(seed)
    return [([chooser.randrange(VOCABULARY) for _ in range(chooser.randint(4, 40))], chooser.randint(4, 80)) for _ in range(BATCH)]


async def sample_all(sampler: TransformersSampler, work: Sequence[tuple[list[int], int]], seed: int) -> float:
    """Seconds for all requests, sent at once."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        loop = group.create_task(sampler.run(lambda: "admission"))
        await asyncio.gather(
            *(
                sampler.sample(
                    SampleRequest(key=RolloutKey(seed, index, 0), step=0, seed=seed, tokens=prompt, sampling=SamplingParameters(max_action_tokens=length))
                )
                for index, (prompt, length) in enumerate(work)
            )
        )
        seconds = time.perf_counter() - start
        loop.cancel()
    return seconds


@torch.inference_mode()
def generate_all(model: torch.nn.Module, work: Sequence[tuple[list[int], int]], batch: int) -> float:
    start = time.perf_counter()
    ordered = sorted(work, key=lambda item: item[1])
    for first in range(0, len(ordered), batch):
        part = ordered[first : first + batch]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        model.generate(ids, attention_mask=mask, max_new_tokens=max(length for _, length in part), do_sample=True, eos_token_id=None, pad_token_id=0)
    return time.perf_counter() - start


def compare_generate(directory: Path, pairs: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    sampler = make_sampler(directory)
    warm = requests(999)
    asyncio.run(sample_all(sampler, warm, 999))
    best = min((8, 16, 32, 64), key=lambda size: min(generate_all(model, warm, size) for _ in range(2)))
    ours, theirs = [], []
    for pair in range(pairs):
        work = requests(pair)
        tokens = sum(length for _, length in work)
        ours.append(tokens / asyncio.run(sample_all(sampler, work, pair)))
        theirs.append(tokens / generate_all(model, work, best))
    row("64 mixed requests, tokens/s", f"generate, batches of {best}", ours, theirs)


def compare_forward(directory: Path, pairs: int, batch: int) -> None:
    """Steady decode: contexts from 32 to 96 tokens."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    sampler = make_sampler(directory, max_running=batch)
    work = [([1] * 32, 64)] * batch
    asyncio.run(sample_all(sampler, work, 0))
    static = next(name for name in ("cache", "past_key_values") if name in __import__("inspect").signature(model.forward).parameters)

    @torch.inference_mode()
    def bare(make_cache: Callable[[], object]) -> float:
        start = time.perf_counter()
        cache = make_cache()
        model(input_ids=torch.ones(batch, 32, dtype=torch.long), use_cache=True, **{static: cache})
        ids = torch.ones(batch, 1, dtype=torch.long)
        for position in range(32, 95):
            model(input_ids=ids, position_ids=torch.full((batch, 1), position), use_cache=True, **{static: cache})
        return time.perf_counter() - start

    kinds = {"static cache": lambda: StaticCache(config=model.config, max_cache_len=CONTEXT), "dynamic cache": lambda: DynamicCache(config=model.config)}
    for name, make_cache in kinds.items():
        ours, theirs = [], []
        for pair in range(pairs):
            ours.append(batch * 64 / asyncio.run(sample_all(sampler, work, pair)))
            theirs.append(batch * 64 / bare(make_cache))
        row(f"decode at batch {batch}, tokens/s (prefill counted on both sides)", f"bare forward, {name}", ours, theirs)


async def door(sampler: TransformersSampler, in_flight: int, seconds: float, seed: int) -> tuple[float, float, float]:
    """(tokens/s, busy fraction, mean rows a step) with one-token actions and a slow tool."""
    chooser = random.Random(seed)
    out = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def rollout(number: int) -> None:
        nonlocal out
        attempt = 0
        while loop.time() < end:
            key = RolloutKey(number, 0, attempt)
            attempt += 1
            context = [1, 2, 3]
            for step in range(max(4, min(40, int(12 * chooser.lognormvariate(0, 0.6))))):
                if loop.time() >= end:
                    break
                completion = await sampler.sample(SampleRequest(key=key, step=step, seed=seed, tokens=context, sampling=SamplingParameters(), keep_cache=True))
                out += 1
                await asyncio.sleep(0.03 * chooser.lognormvariate(-0.125, 0.5))
                out -= 1
                context = [*context, *completion.tokens, *([4] if chooser.random() < 0.7 else [4, 5])]
            sampler.release(key)

    async with asyncio.TaskGroup() as group:
        running = group.create_task(sampler.run(lambda: "environment" if out else "admission"))
        before = sampler.generated_tokens
        sampler.take_activity()
        async with asyncio.TaskGroup() as rollouts:
            for number in range(in_flight):
                rollouts.create_task(rollout(number))
        activity = sampler.take_activity()
        running.cancel()
    rows = sum(count * spent for count, spent in activity.running_seconds.items()) / max(1e-9, activity.busy_seconds)
    return (sampler.generated_tokens - before) / activity.seconds, activity.busy_seconds / activity.seconds, rows


def compare_door(directory: Path, pairs: int, in_flight: int) -> None:
    with_gather, without = make_sampler(directory), make_sampler(directory, gather_seconds=0.0)
    ours, theirs = [], []
    for pair in range(pairs):
        ours.append(asyncio.run(door(with_gather, in_flight, 1.0, pair)))
        theirs.append(asyncio.run(door(without, in_flight, 1.0, pair)))
    row(f"door, {in_flight} in flight, tokens/s", "no gathering", [o[0] for o in ours], [t[0] for t in theirs])
    for name, values in (("gathered", ours), ("not gathered", theirs)):
        busy, rows = statistics.median(v[1] for v in values), statistics.median(v[2] for v in values)
        print(f"|  - {name}: busy fraction {busy:.2f}, rows a busy second {rows:.1f} | | | | |")


def row(what: str, against: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(
        f"| {what} | {statistics.median(ours):,.0f} | {against} | {statistics.median(theirs):,.0f} | {statistics.median(ratios):.2f}"
        f" ({min(ratios):.2f} to {max(ratios):.2f}) |",
        flush=True,
    )


def header() -> None:
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{datetime.date.today()} · {machine} · torch {torch.__version__} · transformers {transformers.__version__} · {' '.join(sys.argv)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    header()
    print("| what | sampler | against | value | ratio, median (range) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_model(directory)
        capacity, rate = make_sampler(directory).measure_capacity()
        print(f"| capacity {capacity} rows, saturated tokens/s | {rate:,.0f} | | | |")
        compare_generate(directory, pairs)
        compare_forward(directory, pairs, BATCH)
        for in_flight in (64, 300):
            compare_door(directory, pairs, in_flight)


if __name__ == "__main__":
    main()
