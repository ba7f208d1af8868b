"""What weight updates in the middle of decoding cost, through the real shared-memory channel, published by another process.

    python benchmarks/weight_updates.py [--pairs 5] [--updates 200] [--width 64] [--layers 2]

1. Pause: what a running request waits between two of its tokens beyond a decode step, at an update every 50 ms. Its p99 against
   one decode step + the copy (load_into, timed by itself while nobody publishes).
2. Throughput: tokens/s with an update a second against none, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import sampler as sampler_benchmark
from headrace.config import SamplerSettings
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.types import PolicyVersion, RolloutKey, SampleRequest, SamplingParameters
from headrace.weights.channel import SharedMemoryChannel
from headrace.weights.shared_memory import SharedMemoryReader, SharedMemoryWriter, parameter_bytes
from sampler import BATCH, CONTEXT, VOCABULARY, NoTokenizer, header

PAUSE_EVERY_SECONDS = 0.05


def publish_on_command(channel: SharedMemoryChannel, directory: str, commands: Connection) -> None:
    """Main of the publishing process: `None` pauses, a number publishes every so many seconds, EOF ends. Answers each command once obeyed."""
    torch.set_num_threads(1)
    parameters = {name: parameter.detach() for name, parameter in AutoModelForCausalLM.from_pretrained(directory).named_parameters()}
    writer = SharedMemoryWriter(channel)
    number, every = 0, None
    with contextlib.suppress(EOFError):
        while True:
            if number == 0 or every is not None:
                writer.publish(parameters, PolicyVersion(0, number))
                number += 1
            if commands.poll(every):
                every = commands.recv()
                commands.send(number)


@contextlib.contextmanager
def publisher(channel: SharedMemoryChannel, directory: Path) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish_on_command, args=(channel, str(directory), theirs))
    process.start()
    theirs.close()
    try:
        set_rate(ours, None)
        yield ours
    finally:
        ours.close()
        process.join()


def set_rate(commands: Connection, every: float | None) -> None:
    commands.send(every)
    commands.recv()


class Timeline:
    """When each decode step and each taking up of weights began and ended: wraps the two calls of the engine."""

    def __init__(self, sampler: TransformersSampler) -> None:
        engine = sampler._engine
        self.steps: list[tuple[float, float]] = []
        self.pauses: list[float] = []
        self._applied = False
        step, take_up = engine.step, engine.take_up_weights

        def timed_step() -> int:
            start = time.perf_counter()
            if self._applied and self.steps:
                self.pauses.append(start - self.steps[-1][1])
            self._applied = False
            rows = step()
            self.steps.append((start, time.perf_counter()))
            return rows

        def noted_take_up(now: float = 0.0) -> bool:
            applied = take_up(now)
            self._applied |= applied
            return applied

        engine.step, engine.take_up_weights = timed_step, noted_take_up  # type: ignore[method-assign]


async def decode(sampler: TransformersSampler, seconds: float, seed: int, *, until_updates: int | None = None) -> float:
    """Tokens/s of a batch kept full by requests of mixed lengths."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    updates = sampler._engine.applied_updates

    def done() -> bool:
        return loop.time() >= start + seconds and (until_updates is None or sampler._engine.applied_updates - updates >= until_updates)

    async def client(number: int) -> None:
        chooser = random.Random(f"{seed}-{number}")
        attempt = 0
        while not done():
            prompt = [chooser.randrange(VOCABULARY) for _ in range(chooser.randint(4, 40))]
            wanted = SamplingParameters(max_action_tokens=chooser.randint(4, 80))
            await sampler.sample(SampleRequest(key=RolloutKey(number, 0, attempt), step=0, seed=seed, tokens=prompt, sampling=wanted))
            attempt += 1

    async with asyncio.TaskGroup() as group:
        running = group.create_task(sampler.run(lambda: "admission"))
        before = sampler.generated_tokens
        async with asyncio.TaskGroup() as clients:
            for number in range(BATCH):
                clients.create_task(client(number))
        rate = (sampler.generated_tokens - before) / (loop.time() - start)
        running.cancel()
    return rate


def copy_seconds(sampler: TransformersSampler, reader: SharedMemoryReader) -> float:
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        reader.load_into(sampler._model.parameters)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def quantile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def compare(directory: Path, pairs: int, updates: int) -> None:
    channel = SharedMemoryChannel(parameter_bytes(directory))
    reader = SharedMemoryReader(channel)
    sampler = TransformersSampler(
        str(directory),
        settings=SamplerSettings(max_running=BATCH),
        max_context_tokens=CONTEXT,
        device="cpu",
        dtype="float32",
        weights=reader,
        tokenizer=NoTokenizer(),
    )
    with publisher(channel, directory) as commands:
        asyncio.run(decode(sampler, 1.0, seed=999))
        copy = copy_seconds(sampler, reader)
        with_updates, without = [], []
        for pair in range(pairs):
            set_rate(commands, 1.0)
            with_updates.append(asyncio.run(decode(sampler, 4.0, seed=pair)))
            set_rate(commands, None)
            without.append(asyncio.run(decode(sampler, 4.0, seed=pair)))
        sampler_benchmark.row("tokens/s, an update a second", "no updates", with_updates, without)
        timeline = Timeline(sampler)
        set_rate(commands, PAUSE_EVERY_SECONDS)
        asyncio.run(decode(sampler, 0.0, seed=7, until_updates=updates))
        set_rate(commands, None)
    step = statistics.median(end - start for start, end in timeline.steps)
    allowed = step + copy
    print(f"\none decode step of {BATCH} rows {1e3 * step:.2f} ms, the copy of {channel.buffer_bytes / 2**20:.2f} MiB {1e3 * copy:.2f} ms (medians)")
    print("| pause of running requests | ms | / (one step + the copy) |\n|---|---|---|")
    for name, fraction in (("median", 0.5), ("p99", 0.99), ("largest", 1.0)):
        value = quantile(timeline.pauses, fraction)
        print(f"| {name} of {len(timeline.pauses)} updates | {1e3 * value:.2f} | {value / allowed:.2f} |")
    channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    header()
    print("| what | with | against | value | ratio, median (range) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        sampler_benchmark.save_model(Path(name), width=arguments.width, layers=arguments.layers)
        compare(Path(name), arguments.pairs, arguments.updates)


if __name__ == "__main__":
    main()
