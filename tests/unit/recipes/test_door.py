"""Recipe door: the task is what its README says, and its evaluation is exact."""

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.clock import now, run_virtual
from headrace.config_loading import load_settings
from headrace.errors import RecipeError
from headrace.learner.scratch import character_tokenizer
from headrace.learner.warm_start import prepare_model
from headrace.marks import StepView, TrajectoryView
from headrace.recipe import RecipeCode
from headrace.statistics import mean_with_interval
from headrace.types import Action, Observation, StopReason, Task

RECIPE = load_settings(Path(__file__).parents[3] / "recipes" / "door")
SETTINGS = RECIPE.settings
CODE = RecipeCode(RECIPE.task_module, SETTINGS.task.options)
DOOR = SimpleNamespace(**{name: CODE.resolve(f"task:{name}") for name in ("right_answers", "tasks", "evaluation_tasks", "demonstrations", "evaluate")})
ALPHABET = SETTINGS.model.characters or ""


def means(values: dict[str, list[float]]) -> dict[str, float]:
    """As headrace takes them."""
    return {name: mean_with_interval(numbers)[0] for name, numbers in values.items()}


def environment(tool_seconds: float = 0.0, tool_sigma: float = 1.0) -> Any:
    return CODE.resolve("task:Environment")(tool_seconds=tool_seconds, tool_sigma=tool_sigma)


def walk_task(signs: str, name: str = "walk") -> Task:
    return Task(id=name, data={"signs": signs}, kind="short")


async def play(signs: str, answers: Sequence[str], made: Any = None, name: str = "walk") -> tuple[list[Observation], list[float]]:
    """Observations and rewards of a walk answered so."""
    made = made or environment()
    observations, rewards, done = [await made.reset(walk_task(signs, name))], [], False
    for answer in answers:
        assert not done
        observation, reward, done = await made.step(Action(text=answer, tokens=(), stop_reason=StopReason.MAX_TOKENS))
        rewards.append(reward)
        if observation is not None:
            observations.append(observation)
    assert done and len(observations) == len(answers)
    return observations, rewards


def test_a_door_leads_as_many_rooms_on_as_it_says_round_the_ring() -> None:
    assert DOOR.right_answers("..3.4") == "FFDFC"
    assert DOOR.right_answers("1234") == "BDBA"


def test_the_reward_comes_once_at_the_end_of_a_walk_with_every_answer_right() -> None:
    _, rewards = asyncio.run(play(".3.4", "FDFC"))
    assert rewards == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("answers", ["ADFC", "FAFC", "FDAC", "FDFA", "FDF", "FDF\n"])
def test_one_wrong_answer_in_corridor_or_door_costs_the_reward_but_not_the_rest_of_the_walk(answers: str) -> None:
    padded = [*answers, *[""] * (4 - len(answers))]
    observations, rewards = asyncio.run(play(".3.4", padded))
    assert [observation.text for observation in observations] == [".", "3", ".", "4"]
    assert rewards == [0.0] * 4


def test_the_hidden_room_follows_the_truth_after_a_mistake() -> None:
    made = environment()
    asyncio.run(play("13", "CE", made))  # C is wrong, E is right behind B, F would be behind C
    assert made.answers == "BE" and not made.all_right


def test_doors_are_key_steps_and_corridors_are_not() -> None:
    observations, _ = asyncio.run(play(".3.4", "FDFC"))
    assert [observation.key for observation in observations] == [0.0, 1.0, 0.0, 1.0]


def test_a_walk_goes_on_from_any_of_its_snapshots_also_past_a_mistake() -> None:
    async def main() -> None:
        made = environment()
        await made.reset(walk_task(".3.4"))
        snapshots = [made.snapshot()]
        for answer in "FAFC":  # the first door is answered wrong
            _, reward, done = await made.step(Action(text=answer, tokens=(), stop_reason=StopReason.MAX_TOKENS))
            snapshots.append(made.snapshot())
        assert (reward, done) == (0.0, True)
        for position, answers, expected in ((1, "DFC", 1.0), (2, "FC", 0.0), (0, "FDFC", 1.0)):
            made.restore(snapshots[position])
            for answer in answers:
                _, reward, done = await made.step(Action(text=answer, tokens=(), stop_reason=StopReason.MAX_TOKENS))
            assert (reward, done) == (expected, True)

    asyncio.run(main())


async def _durations(tool_seconds: float, tool_sigma: float, names: Sequence[str], signs: str = "....1") -> list[float]:
    durations = []
    for name in names:
        start = now()
        await play(signs, DOOR.right_answers(signs), environment(tool_seconds, tool_sigma), name)
        durations.append(now() - start)
    return durations


def test_tool_latencies_differ_between_rollouts_of_a_task_and_come_again_in_another_process() -> None:
    first = run_virtual(_durations(0.02, 1.0, ["latency"] * 4))
    assert len(set(first)) == 4
    DOOR.right_answers.__globals__["_visits"].clear()  # what another process starts with
    assert run_virtual(_durations(0.02, 1.0, ["latency"] * 4)) == first


def test_tool_latency_has_the_median_and_the_heavy_tail_it_is_given() -> None:
    steps = run_virtual(_durations(0.02, 1.0, [f"tail {index}" for index in range(1000)], signs="1"))
    assert statistics.median(steps) == pytest.approx(0.02, rel=0.1)
    assert statistics.mean(steps) == pytest.approx(0.02 * math.exp(0.5), rel=0.2)
    assert run_virtual(_durations(0.02, 0.0, ["even"], signs="...1")) == [pytest.approx(0.08)]


def test_without_tool_seconds_a_walk_takes_no_time() -> None:
    assert run_virtual(_durations(0.0, 1.0, ["fast"])) == [0.0]


def test_training_and_evaluation_share_no_walk_and_come_again() -> None:
    training, evaluation = list(DOOR.tasks()), list(DOOR.evaluation_tasks())
    assert len(training) >= 5_000 and len(evaluation) >= 1_000
    assert not {task.data["signs"] for task in training} & {task.data["signs"] for task in evaluation}
    assert len({task.id for task in training + evaluation}) == len(training) + len(evaluation)
    assert list(DOOR.evaluation_tasks()) == evaluation
    assert [task.data for task in DOOR.tasks(task_seed=9)] != [task.data for task in training]


def test_walks_are_as_long_and_as_full_of_doors_as_the_readme_says() -> None:
    walks = [task.data["signs"] for task in DOOR.tasks()]
    lengths = [len(walk) for walk in walks]
    assert min(lengths) == 4 and max(lengths) == 60
    assert 12 <= statistics.median(lengths) <= 13
    signs = "".join(walks)
    assert sum(sign != "." for sign in signs) / len(signs) == pytest.approx(0.3, abs=0.02)
    assert all(walk.strip(".") for walk in walks)
    assert {len(task.data["signs"]) > 24 for task in DOOR.tasks() if task.kind == "long"} == {True}
    assert {len(task.data["signs"]) > 24 for task in DOOR.tasks() if task.kind == "short"} == {False}


def test_the_guide_is_mostly_wrong_at_doors_3_and_4_and_believes_its_own_answers() -> None:
    right: dict[str, list[bool]] = {sign: [] for sign in ".1234"}
    for texts in itertools.islice(DOOR.demonstrations(), 2000):
        room = 0
        for sign, answer in zip(texts[::2], texts[1::2], strict=True):
            if sign == ".":
                right[sign].append(answer == "F")
                continue
            right[sign].append(answer == "ABCDE"[(room + int(sign)) % 5])
            room = "ABCDE".index(answer)
    share = {sign: statistics.mean(answers) for sign, answers in right.items()}
    assert share["."] == 1.0
    assert share["1"] > 0.97 and share["2"] > 0.97
    assert 0.2 < share["3"] < 0.4 and 0.2 < share["4"] < 0.4


class TablePolicy:
    """A policy whose distribution is a fixed function of the history; `score` is asked through tokens like a real one."""

    version = None

    def __init__(self, alphabet: str = ALPHABET) -> None:
        self.tokenizer = character_tokenizer(alphabet)
        self.characters = alphabet

    def probabilities(self, history: str) -> list[float]:
        source = random.Random(history)
        weights = [source.random() for _ in self.characters]
        return [weight / sum(weights) for weight in weights]

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        texts = [self.tokenizer.decode(list(sequence)) for sequence in sequences]
        return [
            [math.log(self.probabilities(text[:position])[sequence[position]]) for position in range(1, len(text))]
            for text, sequence in zip(texts, sequences, strict=True)
        ]


async def _expected_reward(policy: TablePolicy, signs: str) -> float:
    """Sum over every sequence of answers of its probability times the environment's reward."""
    total = 0.0
    for answers in itertools.product(policy.characters, repeat=len(signs)):
        history, probability = "", 1.0
        for sign, answer in zip(signs, answers, strict=True):
            history += sign
            probability *= policy.probabilities(history)[policy.characters.index(answer)]
            history += answer
        _, rewards = await play(signs, answers)
        total += probability * sum(rewards)
    return total


def test_success_probability_is_the_expected_reward_over_all_answers() -> None:
    policy = TablePolicy()
    tasks = [walk_task("13", "a"), walk_task("4", "b"), walk_task(".2", "c")]
    values = means(asyncio.run(DOOR.evaluate(policy, tasks)))

    async def expected() -> float:
        return statistics.mean([await _expected_reward(policy, task.data["signs"]) for task in tasks])

    assert values["success_probability"] == pytest.approx(asyncio.run(expected()), rel=1e-9)
    assert 0 < values["success_probability"] < 0.2


class ConfidentPolicy(TablePolicy):
    """Right with `corridor` and `door` probability, whatever the history."""

    def __init__(self, corridor: float, door: float) -> None:
        super().__init__()
        self.corridor, self.door = corridor, door

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        texts = [self.tokenizer.decode(list(sequence)) for sequence in sequences]
        return [[math.log(self.corridor if text[position - 1] == "." else self.door) for position in range(1, len(text))] for text in texts]


def test_evaluation_tells_doors_corridors_and_kinds_apart_in_any_order_of_tasks() -> None:
    long = Task(id="long", data={"signs": "." * 30 + "11"}, kind="long")
    values = means(asyncio.run(DOOR.evaluate(ConfidentPolicy(0.9, 0.4), [long, walk_task(".1"), walk_task("..")])))
    assert values["door_accuracy"] == pytest.approx(0.4)
    assert values["corridor_accuracy"] == pytest.approx(0.9)
    assert values["success_probability_short"] == pytest.approx((0.9 * 0.4 + 0.81) / 2)
    assert values["success_probability_long"] == pytest.approx(0.9**30 * 0.16)
    assert values["success_probability"] == pytest.approx((0.9 * 0.4 + 0.81 + 0.9**30 * 0.16) / 3)
    assert values["sure_success"] == pytest.approx(1 / 3)


def test_a_tokenizer_that_merges_characters_is_refused() -> None:
    policy = TablePolicy()
    policy.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [0])
    with pytest.raises(RecipeError, match="one token a character"):
        asyncio.run(DOOR.evaluate(policy, [walk_task("12")]))


def test_the_recipes_settings_fit_its_task() -> None:
    assert SETTINGS.check_rules() == []
    longest = max(len(task.data["signs"]) for task in [*DOOR.tasks(), *DOOR.evaluation_tasks()])
    assert SETTINGS.rollout.max_steps >= longest
    assert SETTINGS.rollout.max_tokens >= 2 * longest
    assert (SETTINGS.model.architecture or {})["max_position_embeddings"] >= 2 * longest
    texts = itertools.chain.from_iterable(itertools.islice(DOOR.demonstrations(), 200))
    assert set(texts) <= set(ALPHABET)
    for reference in (SETTINGS.task.source, SETTINGS.task.evaluation_source, SETTINGS.task.environment, SETTINGS.task.evaluate):
        assert reference is not None and CODE.resolve(reference)
    assert len(list(DOOR.evaluation_tasks())) >= SETTINGS.evaluation.num_tasks


def test_the_recipes_model_is_made_from_its_own_demonstrations(tmp_path: Path) -> None:
    warm_start = SETTINGS.warm_start.model_copy(update={"num_updates": 2, "batch_size": 4})
    directory = prepare_model(SETTINGS.model_copy(update={"warm_start": warm_start}), CODE, cache_directory=tmp_path, progress=lambda what, fraction: None)
    assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(directory).encode(ALPHABET) == list(range(len(ALPHABET)))


def test_other_corridor_signs_are_answered_by_themselves_and_never_mark_a_key_step() -> None:
    assert DOOR.right_answers("v1wz3y") == "vBwzEy"
    signs = "vwxyz"
    walks = [str(task.data["signs"]) for task in itertools.islice(DOOR.tasks(corridor_signs=signs), 200)]
    assert set("".join(walks)) == set(signs) | set("1234")
    marks = [observation.key for observation in asyncio.run(observations("v1w", environment()))]
    assert marks == [0.0, 1.0, 0.0]


def test_the_guide_copies_half_of_several_corridor_signs_poorly_so_that_they_have_to_be_learnt() -> None:
    right: dict[str, list[bool]] = {}
    for texts in itertools.islice(DOOR.demonstrations(corridor_signs="vwxyz"), 400):
        for sign, answer in zip(texts[::2], texts[1::2], strict=True):
            right.setdefault(sign, []).append(answer == sign)
    for sign in "vwx":
        assert all(right[sign])
    for sign in "yz":
        assert 0.65 < statistics.fmean(right[sign]) < 0.85  # copied half the time, drawn from both otherwise


async def observations(signs: str, walk: Any) -> list[Observation]:
    seen = [await walk.reset(Task(id="t", data={"signs": signs}))]
    for answer in DOOR.right_answers(signs)[:-1]:
        observation, _, _ = await walk.step(Action(text=answer, tokens=(1,), stop_reason=StopReason.MAX_TOKENS))
        seen.append(observation)
    return seen


def test_random_marks_are_as_many_as_doors_and_come_again() -> None:
    steps = tuple(StepView(observation=".", action="F", reward=0.0, tokens=(1,), logprobs=(-0.1,), entropies=None, key=0.0) for _ in range(40))
    shares = []
    for index in range(200):
        view = TrajectoryView(task=Task(id=f"t{index}", data={}), steps=steps, reward=0.0, end_reason="done")
        marks = asyncio.run(CODE.resolve("task:random_marks")(view))
        assert marks == asyncio.run(CODE.resolve("task:random_marks")(view))
        shares.append(statistics.fmean(marks))
    assert 0.27 < statistics.fmean(shares) < 0.33
