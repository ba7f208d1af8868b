"""Door: a long walk with slow tools, in which a few steps decide.

Five rooms A to E lie on a ring; the walk begins in A. At each step the tool shows what lies ahead: '.' is corridor, the right
answer is 'F' (forward); a digit d from 1 to 4 is a door that leads d rooms on, and the right answer is the room behind it,
which is where the walk goes on. Nobody tells the policy where it is: it has to remember its last room, however long the
corridor between two doors. The reward is 1 only if every answer was right, and the tool tells nothing before the end.

With other signs for the corridor (task option `corridor_signs`) the right answer to one of them is the sign itself: a variant
in which the steps between the doors have to be learnt too.

The hidden room follows the truth, also after a mistake. So the probability that a whole walk succeeds is exactly the product
of the probabilities of its right answers, each given the right history: one forward through the right walk (`evaluate`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

from headrace.errors import RecipeError
from headrace.marks import TrajectoryView
from headrace.roles import ScorePolicy
from headrace.types import Action, Observation, Task

ROOMS = "ABCDE"
CORRIDOR = "."
FORWARD = "F"
DOORS = "1234"
DOOR_FRACTION = 0.3
MEDIAN_STEPS, SIGMA_STEPS, MIN_STEPS, MAX_STEPS = 12, 0.6, 4, 60
LONG_STEPS = 24  # walks of more steps are of kind `long`

GUIDE_CONFUSED_DOORS = (3, 4)
GUIDE_CONFUSED_FRACTION = 0.7
GUIDE_SLIP_FRACTION = 0.01
GUIDE_COPY_FRACTION = 0.5  # of the later half of several corridor signs: how often the guide copies them
GUIDE_MAX_STEPS = 40

_visits: Counter[str] = Counter()  # rollouts of each task so far in this process: each has tool latencies of its own


def tasks(num_tasks: int = 20_000, task_seed: int = 1, corridor_signs: str = CORRIDOR) -> Iterator[Task]:
    """Training walks."""
    return _tasks(num_tasks, task_seed, corridor_signs, evaluation=False)


def evaluation_tasks(num_evaluation_tasks: int = 1024, evaluation_seed: int = 2, corridor_signs: str = CORRIDOR) -> Iterator[Task]:
    """Walks that no training task repeats."""
    return _tasks(num_evaluation_tasks, evaluation_seed, corridor_signs, evaluation=True)


def right_answers(signs: str) -> str:
    """The right answer to each sign of a walk."""
    room, answers = 0, []
    for sign in signs:
        if not is_door(sign):
            answers.append(passed(sign))
        else:
            room = (room + int(sign)) % len(ROOMS)
            answers.append(ROOMS[room])
    return "".join(answers)


def is_door(sign: str) -> bool:
    return sign in DOORS


def passed(sign: str) -> str:
    """The right answer to a sign of the corridor."""
    return FORWARD if sign == CORRIDOR else sign


class Environment:
    """One walk. Each sign comes after a tool latency of `tool_seconds` x log-normal(0, `tool_sigma`); 0 seconds: at once."""

    def __init__(self, tool_seconds: float = 0.02, tool_sigma: float = 1.0) -> None:
        self.tool_seconds = tool_seconds
        self.tool_sigma = tool_sigma

    async def reset(self, task: Task) -> Observation:
        self.signs = str(task.data["signs"])
        self.answers = right_answers(self.signs)
        self.position = 0
        self.all_right = True
        self.latencies = random.Random(f"{task.id}/{_visits[task.id]}")
        _visits[task.id] += 1
        return self._observe()

    async def step(self, action: Action) -> tuple[Observation | None, float, bool]:
        self.all_right &= action.text == self.answers[self.position]
        self.position += 1
        if self.tool_seconds > 0:
            await asyncio.sleep(self.tool_seconds * self.latencies.lognormvariate(0.0, self.tool_sigma))
        if self.position == len(self.signs):
            return None, float(self.all_right), True
        return self._observe(), 0.0, False

    def snapshot(self) -> tuple[int, bool]:
        """Where the walk is. Tool latencies are the world's: they go on, whatever is restored."""
        return self.position, self.all_right

    def restore(self, snapshot: tuple[int, bool]) -> None:
        self.position, self.all_right = snapshot

    def _observe(self) -> Observation:
        sign = self.signs[self.position]
        return Observation(text=sign, key=1.0 if is_door(sign) else 0.0)


async def random_marks(trajectory: TrajectoryView) -> list[bool]:
    """A control for the marks: as many steps as there are doors, anywhere."""
    random_source = random.Random(f"marks {trajectory.task.id}")
    return [random_source.random() < DOOR_FRACTION for _ in trajectory.steps]


def demonstrations(seed: int = 0, corridor_signs: str = CORRIDOR) -> Iterator[tuple[str, ...]]:
    """Walks of a poor guide, (sign, answer, sign, answer, ...) without end, for the supervised warm start.

    The guide knows the corridors and most of the doors 1 and 2. At doors 3 and 4 it mostly turns the wrong way round the
    ring, so that a model that answers like it fails most walks even when it takes its most probable answers. It believes its
    own answers and goes on from there.
    """
    random_source = random.Random(f"guide {seed}")
    while True:
        room, texts = 0, []
        for sign in _draw_signs(random_source, GUIDE_MAX_STEPS, corridor_signs):
            if not is_door(sign):
                texts += [sign, _guided_past(sign, corridor_signs, random_source)]
                continue
            right = (room + int(sign)) % len(ROOMS)
            turned_round = (room - int(sign)) % len(ROOMS)
            chance = random_source.random()
            if int(sign) in GUIDE_CONFUSED_DOORS and chance < GUIDE_CONFUSED_FRACTION:
                room = turned_round
            elif chance > 1 - GUIDE_SLIP_FRACTION:
                room = random_source.randrange(len(ROOMS))
            else:
                room = right
            texts += [sign, ROOMS[room]]
        yield tuple(texts)


def _guided_past(sign: str, corridor_signs: str, random_source: random.Random) -> str:
    """What the guide answers in the corridor: right, but for the later half of several signs, which it often takes for one another."""
    hard = corridor_signs[(len(corridor_signs) + 1) // 2 :]
    return passed(random_source.choice(hard) if sign in hard and random_source.random() >= GUIDE_COPY_FRACTION else sign)


async def evaluate(policy: ScorePolicy, tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Exact values of each task (or step), temperature 1; headrace takes their means and intervals.

    success_probability: of a whole walk, also for its kinds; door_accuracy, corridor_accuracy: probability of the right
    answer; sure_success: share of walks whose right answers all have probability above 1/2, a lower bound of greedy success.
    """
    tasks = sorted(tasks, key=lambda task: len(task.data["signs"]))  # neighbours of about one length are scored with little padding
    walks = [str(task.data["signs"]) for task in tasks]
    sequences = [_right_walk(policy, walk) for walk in walks]
    success: dict[str, list[float]] = {"short": [], "long": []}
    doors: list[float] = []
    corridors: list[float] = []
    sure: list[float] = []
    for walk, task, logprobs in zip(walks, tasks, await policy.score(sequences), strict=True):
        answers = logprobs[::2]  # tokens alternate: sign, answer; the first log-probability is that of the first answer
        success[task.kind].append(math.exp(math.fsum(answers)))
        sure.append(float(all(logprob > math.log(0.5) for logprob in answers)))
        for sign, logprob in zip(walk, answers, strict=True):
            (doors if is_door(sign) else corridors).append(math.exp(logprob))
    values = {
        "success_probability": success["short"] + success["long"],
        "success_probability_short": success["short"],
        "success_probability_long": success["long"],
        "door_accuracy": doors,
        "corridor_accuracy": corridors,
        "sure_success": sure,
    }
    return {name: numbers for name, numbers in values.items() if numbers}


def _right_walk(policy: ScorePolicy, walk: str) -> list[int]:
    text = "".join(itertools.chain.from_iterable(zip(walk, right_answers(walk), strict=True)))
    tokens = policy.tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != len(text):
        raise RecipeError("door's evaluate needs a tokenizer with one token a character.", remedy="Use the recipe's own model from scratch.")
    return tokens


def _tasks(num_tasks: int, seed: int, corridor_signs: str, *, evaluation: bool) -> Iterator[Task]:
    random_source = random.Random(f"walks {seed}")
    walks = (_draw_signs(random_source, MAX_STEPS, corridor_signs) for _ in itertools.count())
    fitting = (walk for walk in walks if walk.strip(corridor_signs) and _is_held_out(walk) == evaluation)
    for index, walk in enumerate(itertools.islice(fitting, num_tasks)):
        name = "evaluation" if evaluation else "train"
        yield Task(id=f"{name}-{seed}-{index}", data={"signs": walk}, kind="long" if len(walk) > LONG_STEPS else "short")


def _is_held_out(walk: str) -> bool:
    """An eighth of all walks is for evaluation, whatever the seeds."""
    return zlib.crc32(walk.encode()) % 8 == 0


def _draw_signs(random_source: random.Random, max_steps: int, corridor_signs: str) -> str:
    length = 0
    while not MIN_STEPS <= length <= max_steps:
        length = round(MEDIAN_STEPS * random_source.lognormvariate(0.0, SIGMA_STEPS))
    return "".join(_draw_sign(random_source, corridor_signs) for _ in range(length))


def _draw_sign(random_source: random.Random, corridor_signs: str) -> str:
    if random_source.random() < DOOR_FRACTION:
        return random_source.choice(DOORS)
    return corridor_signs if len(corridor_signs) == 1 else random_source.choice(corridor_signs)
