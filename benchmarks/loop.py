"""What benchmarks of stale training share: a deterministic loop in one process, and results that are kept on disk.

The parts are those of recipes/one_file_loop.py, with a delay line between sampler and learner: each batch waits until it is
`staleness` updates old (the first ones less: all of them are sampled before the first update). So all arms get the same tasks,
random streams and staleness, and nothing depends on the machine's speed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from one_file_loop import Loop  # noqa: E402

SHOWN = ("effective_sample_size", "ratio_max", "clipped_fraction", "masked_fraction", "entropy", "gradient_norm")
"""Numbers of UpdateStatistics that are kept of every update."""
Score = Callable[[Loop], Awaitable[Sequence[float]]]
"""Scores of the weights as they are."""


def train_stale(loop: Loop, score: Score, *, num_updates: int, staleness: int, every: int) -> dict[str, Any]:
    """Trains on batches that are `staleness` updates old. Returns the curve [(update, *scores)], the learner's statistics of each
    batch and the seconds spent in sampling and learning.

    A batch that makes several updates (learner.num_minibatches) waits for `staleness // updates a batch` batches. No key step is over
    its bound: what is compared is the loss, and those would go through PPO-clip whatever it is.
    """
    return asyncio.run(_train_stale(loop, score, num_updates, staleness, every))


async def _train_stale(loop: Loop, score: Score, num_updates: int, staleness: int, every: int) -> dict[str, Any]:
    waiting: deque[Any] = deque()
    updates: list[dict[str, float]] = []
    curve: list[tuple[float, ...]] = []
    number = 0
    training_seconds = 0.0
    updates_per_batch = loop.settings.updates_per_batch
    delay = staleness // updates_per_batch
    bound = (delay + 1) * updates_per_batch - 1
    async with asyncio.TaskGroup() as background:
        engine = background.create_task(loop.sampler.run(lambda: "environment"))
        for update in range(0, num_updates + 1, updates_per_batch):
            last = update + updates_per_batch > num_updates
            if update % every < updates_per_batch or last:
                curve.append((update, *await score(loop)))
            if last:
                break
            started = time.perf_counter()
            while len(waiting) <= delay:
                waiting.append(await loop.sample(number))
                number += 1
            batch = waiting.popleft()
            result = await loop.learn(dataclasses.replace(loop.select(batch, update, max_staleness=bound), max_key_staleness=bound))
            training_seconds += time.perf_counter() - started
            statistics_ = None if result is None else result.statistics
            if statistics_ is not None:
                reward = statistics.fmean(trajectory.reward for trajectory in batch if not trajectory.failed)
                numbers = {name: getattr(statistics_, name) for name in SHOWN}
                updates.append({"reward": reward, **numbers, "staleness": statistics_.staleness_mean, "learning_rate": statistics_.learning_rate})
        engine.cancel()
    await loop.user_code.close()
    return {"curve": curve, "updates": updates, "seconds": training_seconds}


def kept(out: Path, name: str, arguments: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result in `out` of the same arm under the same arguments; where there is none it is made now and written, whole or not at all."""
    text = json.dumps(dict(arguments), sort_keys=True)
    words = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in name)
    path = out / f"{words}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text())["result"]
        return result
    torch.set_num_threads(1)
    result = json.loads(json.dumps(run()))  # the same types, read or made
    out.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"arm": name, "arguments": dict(arguments), "result": result}))
    part.rename(path)
    return result


def heading() -> str:
    """Machine, date and command of what is printed below."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}: {' '.join(sys.argv)}\n"
