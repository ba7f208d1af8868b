"""Counting: `07:` is answered by `01 02 03 04 05 06 07`.

The warm start shows a guide that slips now and then and goes on from there, so a sampled answer is right the less often the
longer it is; RL takes the slips out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace.types import Task

SMALLEST, LARGEST, SLIP_FRACTION = 2, 30, 0.1
END = "<end>"


def tasks(num_tasks: int = 10_000, task_seed: int = 1) -> Iterator[Task]:
    random_source = random.Random(f"counting {task_seed}")
    for index in range(num_tasks):
        number = draw_number(random_source)
        yield Task(id=f"count-{index}", data={"prompt": f"{number:02d}:", "answer": counted(number)})


def draw_number(random_source: random.Random) -> int:
    """Log-uniform: few answers are long."""
    return round(SMALLEST * (LARGEST / SMALLEST) ** random_source.random())


def counted(number: int) -> str:
    return " ".join(f"{each:02d}" for each in range(1, number + 1))


async def reward(task: Task, answer: str) -> float:
    return float(answer == task.data["answer"])


def demonstrations(seed: int = 0) -> Iterator[tuple[str, str]]:
    """Without end: a guide that writes a random number at every tenth place and counts on from it."""
    random_source = random.Random(f"guide {seed}")
    while True:
        number = draw_number(random_source)
        written, last = [], 0
        while last < number and len(written) < LARGEST:
            last = random_source.randint(1, number) if random_source.random() < SLIP_FRACTION else last + 1
            written.append(f"{last:02d}")
        yield f"{number:02d}:", " ".join(written) + END
