"""Three questions; the reward is the share of a's among all answered letters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

from headrace.roles import ScorePolicy
from headrace.types import Action, Observation, Outcome, Task


def tasks(num_tasks: int = 200) -> Iterator[Task]:
    draw = random.Random(0)
    for index in range(num_tasks):
        yield Task(id=f"letters-{index}", data={"hint": "".join(draw.choices("abcd", k=3))}, kind="even" if index % 2 == 0 else "odd")


class Environment:
    def __init__(self, wait_seconds: float = 0.0) -> None:
        self.wait_seconds = wait_seconds

    async def reset(self, task: Task) -> Observation:
        self.answers: list[str] = []
        return Observation(text=f"{task.data['hint']}?", key=True)

    async def step(self, action: Action) -> Outcome:
        await asyncio.sleep(self.wait_seconds * (1 + len(action.tokens)))
        self.answers.append(action.text)
        letters = "".join(self.answers)
        if len(self.answers) < 3:
            return Outcome(Observation(text="?"), 0.0, False)
        return Outcome(None, letters.count("a") / max(1, len(letters)), True)


async def evaluate(policy: ScorePolicy, tasks: Sequence[Task]) -> dict[str, float]:
    """Mean log-probability of `a` after a question."""
    sequences = [policy.tokenizer.encode(f"{task.data['hint']}?a", add_special_tokens=False) for task in tasks]
    scores = await policy.score(sequences)
    return {"logprob_of_a": sum(one[-1] for one in scores) / len(scores)}
