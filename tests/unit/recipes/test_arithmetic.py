"""Recipe arithmetic: problems, grading and demonstrations are what its README says, and its evaluation is exact."""

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config_loading import load_settings
from headrace.errors import RecipeError
from headrace.learner.scratch import character_tokenizer
from headrace.learner.warm_start import prepare_model
from headrace.recipe import RecipeCode
from headrace.types import Task

RECIPE = load_settings(Path(__file__).parents[3] / "recipes" / "arithmetic")
SETTINGS = RECIPE.settings
CODE = RecipeCode(RECIPE.task_module, SETTINGS.task.options)
ARITHMETIC = SimpleNamespace(
    **{name: CODE.resolve(f"task:{name}") for name in ("tasks", "evaluation_tasks", "right_work", "reward", "demonstrations", "evaluate")}
)
CONFUSED_DIGITS, CONFUSED_FRACTION = (ARITHMETIC.right_work.__globals__[f"GUIDE_CONFUSED_{name}"] for name in ("DIGITS", "FRACTION"))
CHARACTERS = SETTINGS.model.characters or ""


def problem(number: int, divisor: int, *, kind: str = "short") -> Task:
    data = {
        "prompt": f"{number:02d}/{divisor}=",
        "work": ARITHMETIC.right_work(number, divisor),
        "quotient": number // divisor,
        "remainder": f"{number % divisor:02d}",
    }
    return Task(id=f"{number}-{divisor}", data=data, kind=kind)


def graded(answer: str, number: int = 33, divisor: int = 4) -> float:
    reward: float = asyncio.run(ARITHMETIC.reward(problem(number, divisor), answer))
    return reward


def test_the_work_writes_down_every_difference_and_ends_with_the_remainder() -> None:
    assert ARITHMETIC.right_work(33, 4) == "29 25 21 17 13 09 05 01"
    assert ARITHMETIC.right_work(6, 3) == "03 00"
    for task in itertools.islice(ARITHMETIC.tasks(), 500):
        number, divisor = int(task.data["prompt"][:2]), int(task.data["prompt"][3])
        numbers = [number, *map(int, task.data["work"].split(" "))]
        assert {before - after for before, after in itertools.pairwise(numbers)} == {divisor}
        assert numbers[-1] == number % divisor == int(task.data["remainder"])
        assert len(numbers) - 1 == number // divisor == task.data["quotient"]


def test_the_number_of_differences_and_the_last_one_are_graded() -> None:
    assert graded("29 25 21 17 13 09 05 01") == 1.0
    assert graded("29 25 21 99 13 09 05 01") == 1.0
    assert graded("03 00", number=6, divisor=3) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *("", " ", "01", "29 25 21 17 13 09 05", "29 25 21 17 13 09 05 02", "29 25 21 17 13 09 01", "29 25 21 17 13 09 05 01 01"),
        *("29 25 21 17 13 09 05 1", "29 25 21 17 13 09 05 01 ", "29 25 21 17 13 09 0501", "29 25 21 17 13 09 05  01", "29 25 21 17 13 09 05 01="),
        "01 29 25 21 17 13 09 05",
    ],
)
def test_any_other_answer_is_worth_nothing(answer: str) -> None:
    assert graded(answer) == 0.0


def test_right_work_always_earns_its_reward() -> None:
    for task in itertools.islice(ARITHMETIC.tasks(), 300):
        assert asyncio.run(ARITHMETIC.reward(task, task.data["work"])) == 1.0


def test_training_and_evaluation_share_no_problem_and_come_again() -> None:
    training, evaluation = list(ARITHMETIC.tasks()), list(ARITHMETIC.evaluation_tasks())
    assert len({task.data["prompt"] for task in training}) >= 250
    assert len({task.data["prompt"] for task in evaluation}) >= 70
    assert not {task.data["prompt"] for task in training} & {task.data["prompt"] for task in evaluation}
    assert len({task.id for task in training + evaluation}) == len(training) + len(evaluation)
    assert list(ARITHMETIC.evaluation_tasks()) == evaluation
    assert [task.data for task in ARITHMETIC.tasks(task_seed=9)] != [task.data for task in training]


def test_answers_are_mostly_short_and_sometimes_very_long() -> None:
    tasks = list(ARITHMETIC.tasks())
    quotients = [len(task.data["work"].split(" ")) for task in tasks]
    assert min(quotients) == 1 and max(quotients) >= 30
    assert 5 <= statistics.median(quotients) <= 6
    assert 0.1 < statistics.mean(quotient > 10 for quotient in quotients) < 0.3
    assert all((task.kind == "long") == (quotient > 10) for task, quotient in zip(tasks, quotients, strict=True))


def test_the_guide_mostly_takes_one_too_few_from_small_digits_and_believes_its_own_differences() -> None:
    wrong: dict[bool, list[bool]] = {False: [], True: []}
    for prompt, work in itertools.islice(ARITHMETIC.demonstrations(), 1000):
        number, divisor = int(prompt[:2]), int(prompt[3])
        assert work.endswith("<end>")
        for difference in map(int, work.removesuffix("<end>").split(" ")):
            assert number >= divisor, "it goes on below the divisor"
            assert difference in (number - divisor, number - divisor + 1)
            wrong[number % 10 in CONFUSED_DIGITS].append(difference != number - divisor)
            number = difference
        assert number < divisor, "it stops before it is below the divisor"
    assert CONFUSED_FRACTION - 0.05 < statistics.mean(wrong[True]) < CONFUSED_FRACTION + 0.05
    assert not any(wrong[False])


class TablePolicy:
    """A policy whose distribution is a fixed function of the text so far."""

    version = None

    def __init__(self, right: float | None = None) -> None:
        self.tokenizer = character_tokenizer(CHARACTERS)
        self.right = right

    def logprob(self, history: Sequence[int], token: int) -> float:
        if self.right is not None:
            return math.log(self.right)
        weights = [random.Random(f"{list(history)} {other}").random() for other in range(len(CHARACTERS) + 2)]
        return math.log(weights[token] / sum(weights))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[self.logprob(sequence[:position], sequence[position]) for position in range(1, len(sequence))] for sequence in sequences]


def test_work_probability_is_the_product_over_the_answer_and_its_end_token_alone() -> None:
    policy = TablePolicy()
    values = asyncio.run(ARITHMETIC.evaluate(policy, [problem(10, 4)]))
    tokens = policy.tokenizer.encode("10/4=06 02<end>")
    assert tokens[-1] == policy.tokenizer.eos_token_id
    expected = math.prod(math.exp(policy.logprob(tokens[:position], tokens[position])) for position in range(len("10/4="), len(tokens)))
    assert values["work_probability"] == [pytest.approx(expected, rel=1e-9)]


def test_evaluation_tells_differences_borrows_stops_and_kinds_apart() -> None:
    tasks = [problem(33, 4, kind="long"), problem(10, 4)]  # 33 - 4, 21 - 4, 13 - 4 and 10 - 4 borrow
    values = asyncio.run(ARITHMETIC.evaluate(TablePolicy(right=0.9), tasks))
    assert values["work_probability_short"] == [pytest.approx(0.9**6)]
    assert values["work_probability_long"] == [pytest.approx(0.9**24)]
    assert sorted(values["work_probability"]) == pytest.approx([0.9**24, 0.9**6])
    assert values["difference_accuracy"] == [pytest.approx(0.9**2)] * 10
    assert values["borrow_accuracy"] == [pytest.approx(0.9**2)] * 4
    assert values["stop_accuracy"] == [pytest.approx(0.9)] * 10
    assert values["sure_work"] == [1.0, 1.0]
    assert asyncio.run(ARITHMETIC.evaluate(TablePolicy(right=0.49), tasks))["sure_work"] == [0.0, 0.0]


def test_a_tokenizer_that_merges_characters_or_has_no_end_is_refused() -> None:
    for tokenizer in (
        SimpleNamespace(encode=lambda text, add_special_tokens: [0], eos_token_id=1),
        SimpleNamespace(encode=lambda text, add_special_tokens: [0] * len(text), eos_token_id=None),
    ):
        policy = TablePolicy()
        policy.tokenizer = tokenizer  # type: ignore[assignment]
        with pytest.raises(RecipeError, match="one token a character"):
            asyncio.run(ARITHMETIC.evaluate(policy, [problem(10, 4)]))


def test_the_recipes_settings_fit_its_task() -> None:
    assert SETTINGS.check_rules() == []
    problems = [*ARITHMETIC.tasks(), *ARITHMETIC.evaluation_tasks()]
    assert len(list(ARITHMETIC.evaluation_tasks())) >= SETTINGS.evaluation.num_tasks
    longest = max(len(task.data["work"]) for task in problems) + 1
    prompt = {len(task.data["prompt"]) for task in problems}
    assert prompt == {5}
    assert SETTINGS.rollout.max_action_tokens > longest
    assert SETTINGS.rollout.max_tokens >= 5 + SETTINGS.rollout.max_action_tokens
    assert (SETTINGS.model.architecture or {})["max_position_embeddings"] >= SETTINGS.rollout.max_tokens
    for prompt_text, work in itertools.islice(ARITHMETIC.demonstrations(), 500):
        assert set(prompt_text + work.removesuffix("<end>")) <= set(CHARACTERS)
        assert len(prompt_text) + len(work.removesuffix("<end>")) + 1 <= SETTINGS.rollout.max_tokens
    for reference in (SETTINGS.task.source, SETTINGS.task.evaluation_source, SETTINGS.task.reward, SETTINGS.task.evaluate):
        assert reference is not None and CODE.resolve(reference)


def test_the_recipes_model_is_made_from_its_own_demonstrations(tmp_path: Path) -> None:
    warm_start = SETTINGS.warm_start.model_copy(update={"num_updates": 2, "batch_size": 4})
    directory = prepare_model(SETTINGS.model_copy(update={"warm_start": warm_start}), CODE, cache_directory=tmp_path, progress=lambda what, fraction: None)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size == len(CHARACTERS) + 2
    assert AutoTokenizer.from_pretrained(directory).encode(CHARACTERS) == list(range(len(CHARACTERS)))
