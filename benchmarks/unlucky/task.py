"""Echo: short walks, and now and then a burst of walks a hundred times as long. The right answer to a sign is the sign itself.

Rewards are shares of right answers, so every group carries a signal and every walk can be learnt; how well is not the point here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from headrace.types import Action, Observation, Task

SIGNS = "abcdefgh"
SHORT_STEPS = 5
LONG_FACTOR = 100


def tasks(num_tasks: int = 16_120, burst_every: int = 1600, burst_tasks: int = 12) -> Iterator[Task]:
    """Walks of 2 to 8 steps; after each `burst_every` of them, `burst_tasks` of 500 steps in a row."""
    random_source = random.Random("unlucky")
    for index in range(num_tasks):
        is_long = index % (burst_every + burst_tasks) >= burst_every
        steps = SHORT_STEPS * LONG_FACTOR if is_long else random_source.randint(2, 2 * SHORT_STEPS - 2)
        signs = "".join(random_source.choice(SIGNS) for _ in range(steps))
        yield Task(id=f"walk-{index}", data={"signs": signs}, kind="long" if is_long else "short")


def evaluation_tasks() -> Iterator[Task]:
    return itertools.islice(tasks(), 16)


class Environment:
    """Shows one sign a step and answers at once."""

    async def reset(self, task: Task) -> Observation:
        self.signs = str(task.data["signs"])
        self.position = 0
        return Observation(text=self.signs[0])

    async def step(self, action: Action) -> tuple[Observation | None, float, bool]:
        reward = float(action.text == self.signs[self.position]) / len(self.signs)
        self.position += 1
        if self.position == len(self.signs):
            return None, reward, True
        return Observation(text=self.signs[self.position]), reward, False
