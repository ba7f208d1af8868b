"""Arithmetic: division by repeated subtraction, written out.

    33/4=29 25 21 17 13 09 05 01

The answer takes the divisor away again and again, writes down every difference, and stops at the first one below the divisor. How
many differences there are is the quotient, the last one is the remainder: these two are graded. The length of an answer
follows from its problem: quotients are log-normal, so most answers are short and some are very long.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Iterator, Sequence

from headrace.errors import RecipeError
from headrace.roles import ScorePolicy
from headrace.types import Task

MEDIAN_QUOTIENT, SIGMA_QUOTIENT, MIN_QUOTIENT, MAX_QUOTIENT = 6, 0.7, 1, 40
SMALLEST_DIVISOR, LARGEST_DIVISOR = 2, 5
LONG_QUOTIENT = 10  # answers of more differences are of kind `long`
DIGITS = 2  # of every number, leading zeros included
END = "<end>"

GUIDE_CONFUSED_DIGITS = (0, 1)
GUIDE_CONFUSED_FRACTION = 0.75
GUIDE_MAX_DIFFERENCES = 40  # mistakes make the work longer


def tasks(num_tasks: int = 20_000, task_seed: int = 1) -> Iterator[Task]:
    """Training problems."""
    return _tasks(num_tasks, task_seed, evaluation=False)


def evaluation_tasks(num_evaluation_tasks: int = 512, evaluation_seed: int = 2) -> Iterator[Task]:
    """Problems that no training task repeats."""
    return _tasks(num_evaluation_tasks, evaluation_seed, evaluation=True)


def right_work(number: int, divisor: int) -> str:
    """The work without a mistake."""
    differences = []
    while number >= divisor:
        number -= divisor
        differences.append(f"{number:0{DIGITS}d}")
    return " ".join(differences)


async def reward(task: Task, answer: str) -> float:
    """1 when there are as many differences as the quotient and the last one is the remainder, whatever stands between."""
    differences = answer.split(" ")
    return float(len(differences) == task.data["quotient"] and differences[-1] == task.data["remainder"])


def demonstrations(seed: int = 0) -> Iterator[tuple[str, str]]:
    """(problem, work of a poor guide) without end, for the supervised warm start.

    The guide subtracts well, but down from a last digit 0 or 1, where it has to borrow, it mostly takes one too few away: 21 - 4 is 18
    to it. It believes its own differences and goes on from there, so that a model that answers like it is wrong about most
    problems, also when it takes its most probable tokens.
    """
    random_source = random.Random(f"guide {seed}")
    while True:
        number, divisor = _draw_problem(random_source)
        prompt, differences = _prompt(number, divisor), []
        while number >= divisor:
            confused = number % 10 in GUIDE_CONFUSED_DIGITS and random_source.random() < GUIDE_CONFUSED_FRACTION
            number -= divisor - confused
            differences.append(f"{number:0{DIGITS}d}")
        if len(differences) <= GUIDE_MAX_DIFFERENCES:
            yield prompt, " ".join(differences) + END


async def evaluate(policy: ScorePolicy, tasks: Sequence[Task]) -> dict[str, list[float]]:
    """Exact values of each task (or difference), temperature 1; headrace takes their means and intervals.

    work_probability: of the whole right work, also for its kinds, a lower bound of the chance of a reward, which other work may
    earn too; difference_accuracy: of one right difference after right ones, borrow_accuracy: of those that need a borrow;
    stop_accuracy: of going on or stopping as is right; sure_work: 1 where each token of the right work has a probability above
    1/2, a lower bound of greedy success.
    """
    tasks = sorted(tasks, key=lambda task: len(task.data["work"]))  # neighbours of about one length are scored with little padding
    sequences = [_right_sequence(policy, task) for task in tasks]
    values: dict[str, list[float]] = {"work_probability": [], "work_probability_short": [], "work_probability_long": [], "sure_work": []}
    values |= {"difference_accuracy": [], "borrow_accuracy": [], "stop_accuracy": []}
    for task, logprobs in zip(tasks, await policy.score(sequences), strict=True):
        work = logprobs[len(task.data["prompt"]) - 1 :]
        probability = math.exp(math.fsum(work))
        values["work_probability"].append(probability)
        values[f"work_probability_{task.kind}"].append(probability)
        values["sure_work"].append(float(min(work) > math.log(0.5)))
        values["stop_accuracy"] += [math.exp(logprob) for logprob in work[DIGITS :: DIGITS + 1]]
        accuracies = [math.exp(math.fsum(work[start : start + DIGITS])) for start in range(0, len(work), DIGITS + 1)]
        values["difference_accuracy"] += accuracies
        values["borrow_accuracy"] += itertools.compress(accuracies, _borrows(task))
    return {name: numbers for name, numbers in values.items() if numbers}


def _right_sequence(policy: ScorePolicy, task: Task) -> list[int]:
    text = task.data["prompt"] + task.data["work"]
    tokens = policy.tokenizer.encode(text, add_special_tokens=False)
    if len(tokens) != len(text) or policy.tokenizer.eos_token_id is None:
        raise RecipeError(
            "arithmetic's evaluate needs a tokenizer with one token a character and an end token.", remedy="Use the recipe's own model from scratch."
        )
    return [*tokens, policy.tokenizer.eos_token_id]


def _borrows(task: Task) -> list[bool]:
    """Of each difference of the right work: whether its last digit is taken from a smaller one."""
    number, _, divisor = task.data["prompt"].rstrip("=").partition("/")
    numbers = [number, *task.data["work"].split(" ")]
    return [before[-1] < divisor[-1] for before in numbers[:-1]]


def _tasks(num_tasks: int, seed: int, *, evaluation: bool) -> Iterator[Task]:
    random_source = random.Random(f"problems {seed}")
    problems = (_draw_problem(random_source) for _ in itertools.count())
    fitting = (problem for problem in problems if _is_held_out(*problem) == evaluation)
    for index, (number, divisor) in enumerate(itertools.islice(fitting, num_tasks)):
        work = right_work(number, divisor)
        yield Task(
            id=f"{'evaluation' if evaluation else 'train'}-{seed}-{index}",
            data={"prompt": _prompt(number, divisor), "work": work, "quotient": number // divisor, "remainder": work[-DIGITS:]},
            kind="long" if number // divisor > LONG_QUOTIENT else "short",
        )


def _prompt(number: int, divisor: int) -> str:
    return f"{number:0{DIGITS}d}/{divisor}="


def _is_held_out(number: int, divisor: int) -> bool:
    """A quarter of all problems is for evaluation, whatever the seeds."""
    return zlib.crc32(_prompt(number, divisor).encode()) % 4 == 0


def _draw_problem(random_source: random.Random) -> tuple[int, int]:
    """(number, divisor) with a log-normal quotient."""
    quotient = 0
    while not MIN_QUOTIENT <= quotient <= MAX_QUOTIENT:
        quotient = round(MEDIAN_QUOTIENT * random_source.lognormvariate(0.0, SIGMA_QUOTIENT))
    divisor = random_source.randint(SMALLEST_DIVISOR, min(LARGEST_DIVISOR, 10**DIGITS // (quotient + 1)))
    return quotient * divisor + random_source.randrange(divisor), divisor
