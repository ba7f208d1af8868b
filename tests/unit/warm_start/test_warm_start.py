"""Supervised warm start: what is learnt, what is cached, what is refused."""

import itertools
import math
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Settings
from headrace.errors import ModelError, RecipeError
from headrace.learner import warm_start
from headrace.learner.scratch import build_model, make_model
from headrace.learner.warm_start import cache_key, prepare_model
from headrace.recipe import RecipeCode

ARCHITECTURE = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
RECIPE = """
import random
def echo(seed=0, length=2):
    source = random.Random(seed)
    for _ in range(10):
        yield tuple(text for _ in range(length) for text in [source.choice("abcd")] * 2)
def empty():
    return []
def odd():
    yield ("a", "b", "c")
def numbers():
    yield ("a", 1)
def blank():
    yield ("a", "")
def foreign():
    yield ("a", "z")
def nothing():
    return None
def fails_late(bad_from=3):
    for number in range(1000):
        yield ("a", "z" if number >= bad_from else "b")
def seeds(seed):
    yield (str(seed), "a")
"""


@pytest.fixture
def code(tmp_path: Path) -> RecipeCode:
    path = tmp_path / "task.py"
    path.write_text(RECIPE)
    return RecipeCode(path, {})


def make_settings(demonstrations: str | None = "task:echo", **changes: Any) -> Settings:
    tree: dict[str, Any] = {
        "model": {"architecture": ARCHITECTURE, "characters": "abcd0123456789"},
        "warm_start": {"demonstrations": demonstrations, "num_updates": 2, "batch_size": 4},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return Settings.model_validate(tree)


def ignore(what: str, fraction: float) -> None:
    pass


def test_a_given_model_is_used_as_it_is(tmp_path: Path, code: RecipeCode) -> None:
    assert prepare_model(make_settings(model__path="some/hub-name"), code, cache_directory=tmp_path / "cache", progress=ignore) == Path("some/hub-name")
    assert not (tmp_path / "cache").exists()


def test_the_model_learns_the_answers_of_the_demonstrations(tmp_path: Path, code: RecipeCode) -> None:
    settings = make_settings(warm_start__num_updates=60, warm_start__learning_rate=0.02, warm_start__batch_size=16)
    progress: list[tuple[str, float]] = []
    directory = prepare_model(settings, code, cache_directory=tmp_path, progress=lambda what, fraction: progress.append((what, fraction)))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    tokens = torch.tensor([tokenizer.encode("bbccaadd")])
    probabilities = model(input_ids=tokens).logits.softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    assert all(probability > 0.9 for probability in probabilities[0:3:2].tolist())
    assert progress[-1] == ("warm start", 1.0)
    fractions = [fraction for what, fraction in progress if what == "warm start"]
    assert fractions == sorted(fractions) and len(fractions) >= 60


def test_the_loss_is_the_mean_over_answer_tokens_whatever_the_padding(code: RecipeCode) -> None:
    model, _ = make_model(make_settings())
    batch = [([0, 1, 2, 3], [False, True, False, True]), ([3, 2, 1, 0, 1, 2, 3], [False, False, True, True, True, False, False])]
    expected = []
    for tokens, is_answer in batch:
        logprobs = model(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        expected += [-logprobs[position - 1, tokens[position]].item() for position in range(len(tokens)) if is_answer[position]]
    assert warm_start._answer_loss(model, batch).item() == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)


def test_the_second_call_finds_the_first_ones_model_without_work(tmp_path: Path, code: RecipeCode) -> None:
    first = prepare_model(make_settings(), code, cache_directory=tmp_path / "cache", progress=ignore)
    calls: list[str] = []
    second = prepare_model(make_settings(), code, cache_directory=tmp_path / "cache", progress=lambda what, fraction: calls.append(what))
    assert second == first and calls == []
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_equal_settings_make_equal_weights_in_another_cache(tmp_path: Path, code: RecipeCode) -> None:
    first = prepare_model(make_settings(), code, cache_directory=tmp_path / "one", progress=ignore)
    second = prepare_model(make_settings(), code, cache_directory=tmp_path / "two", progress=ignore)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_start__num_updates": 3},
        {"warm_start__learning_rate": 0.01},
        {"warm_start__seed": 1},
        {"warm_start__batch_size": 5},
        {"model__characters": "abcd01234567 9"},
        {"model__architecture": ARCHITECTURE | {"hidden_size": 32}},
        {"model__dtype": "bfloat16"},
    ],
)
def test_what_decides_the_weights_decides_the_cache_entry(code: RecipeCode, changes: dict[str, Any]) -> None:
    assert cache_key(make_settings(**changes), code) != cache_key(make_settings(), code)


def test_the_recipes_text_and_the_options_its_demonstrations_name_decide_the_cache_entry(code: RecipeCode) -> None:
    key = cache_key(make_settings(), code)
    assert cache_key(make_settings(), RecipeCode(code.path, {"length": 3})) != key
    assert cache_key(make_settings(), RecipeCode(code.path, {"tool_seconds": 3})) == key
    code.path.write_text(RECIPE.replace("abcd", "ab"))
    assert cache_key(make_settings(), RecipeCode(code.path, {})) != key


def test_headraces_version_decides_the_cache_entry(code: RecipeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache_key(make_settings(), code)
    monkeypatch.setattr("headrace.__version__", "99")
    assert cache_key(make_settings(), code) != key


def test_settings_of_the_run_share_one_cache_entry(code: RecipeCode) -> None:
    other = make_settings(run__seed=7, run__name="other", learner__learning_rate=1e-4, model__device="cuda")
    assert cache_key(other, code) == cache_key(make_settings(), code)


def test_without_demonstrations_the_model_is_the_random_one(tmp_path: Path, code: RecipeCode) -> None:
    told: list[str] = []
    directory = prepare_model(make_settings(None), code, cache_directory=tmp_path / "cache", progress=lambda what, fraction: told.append(what))
    assert "warm start" not in told
    build_model(make_settings(None), tmp_path / "random")
    assert (directory / "model.safetensors").read_bytes() == (tmp_path / "random" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("empty", "yields no demonstrations"),
        ("odd", "even number"),
        ("numbers", "even number"),
        ("blank", "not empty"),
        ("foreign", "model.characters"),
        ("nothing", "NoneType"),
        ("fails_late", "model.characters"),
        ("absent", "no function"),
    ],
)
def test_wrong_demonstrations_are_refused_and_leave_no_cache_entry(tmp_path: Path, code: RecipeCode, function: str, message: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(RecipeError, match=message):
        prepare_model(make_settings(f"task:{function}"), code, cache_directory=cache, progress=ignore)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_failure_while_writing_leaves_no_cache_entry_and_the_next_call_succeeds(tmp_path: Path, code: RecipeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def fail(self: object, directory: Path, **keywords: object) -> None:
        (directory / "tokenizer.json").write_text("half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
        with pytest.raises(OSError, match="disk full"):
            prepare_model(make_settings(), code, cache_directory=cache, progress=ignore)
    assert list(cache.iterdir()) == []
    assert AutoTokenizer.from_pretrained(prepare_model(make_settings(), code, cache_directory=cache, progress=ignore)).encode("ba") == [1, 0]


def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path, code: RecipeCode) -> None:
    with pytest.raises(ModelError, match="model_type"):
        prepare_model(make_settings(model__architecture={"model_type": "lama"}), code, cache_directory=tmp_path / "cache", progress=ignore)


def test_whoever_comes_second_keeps_the_first_ones_model(tmp_path: Path, code: RecipeCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that both found the cache empty: the other one's entry appears between our work and our rename."""
    publish = warm_start._publish

    def late(part: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("the other one's")
        publish(part, target)

    monkeypatch.setattr(warm_start, "_publish", late)
    directory = prepare_model(make_settings(), code, cache_directory=tmp_path / "cache", progress=ignore)
    assert (directory / "config.json").read_text() == "the other one's"
    assert list((tmp_path / "cache").iterdir()) == [directory]


def _prepare(settings: Settings, code: RecipeCode, cache: Path) -> Path:
    return prepare_model(settings, code, cache_directory=cache, progress=ignore)


def test_processes_that_prepare_the_same_model_at_once_end_with_one_whole_entry(tmp_path: Path, code: RecipeCode) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        directories = pool.starmap(_prepare, [(make_settings(), code, tmp_path / "cache")] * 4, chunksize=1)
    assert len(set(directories)) == 1 and list((tmp_path / "cache").iterdir()) == [directories[0]]
    AutoModelForCausalLM.from_pretrained(directories[0])


def test_demonstrations_get_the_warm_start_seed_unless_an_option_sets_theirs(code: RecipeCode) -> None:
    def first(options: dict[str, Any]) -> Any:
        return next(warm_start._demonstrations(make_settings("task:seeds", warm_start__seed=4), RecipeCode(code.path, options)))

    assert first({}) == ("4", "a")
    assert first({"seed": 6}) == ("6", "a")


def test_a_generator_that_ends_is_started_again(code: RecipeCode) -> None:
    stream = warm_start._demonstrations(make_settings(), code)
    drawn = [next(stream) for _ in range(25)]
    assert drawn[:10] == drawn[10:20] and drawn[:5] == drawn[20:]


def test_a_batch_holds_neighbours_in_length_and_every_example_once() -> None:
    examples = [([index] * length, [True] * length) for index, length in enumerate([9, 1, 5, 3, 7, 2, 8, 4, 6, 10, 12, 11])]
    batches = list(_take(warm_start._batches(iter(examples), 3, seed=0), 4))
    assert sorted(sorted(len(tokens) for tokens, _ in batch) for batch in batches) == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def test_batches_of_different_lengths_come_in_random_order() -> None:
    examples = ([0] * length for length in itertools.cycle(range(1, 9)))
    batches = warm_start._batches(((tokens, [True] * len(tokens)) for tokens in examples), 1, seed=0)
    lengths = [len(batch[0][0]) for batch in _take(batches, 2 * warm_start.BUCKET_BATCHES)]
    first, second = lengths[: warm_start.BUCKET_BATCHES], lengths[warm_start.BUCKET_BATCHES :]
    assert sorted(first) == sorted(second) == list(range(1, 9))
    assert first not in (sorted(first), sorted(first, reverse=True)) and first != second


def _take(batches: Any, number: int) -> Any:
    return [next(batches) for _ in range(number)]


@pytest.mark.parametrize("make", [lambda code: code, lambda code: make_settings()])
def test_what_the_runtime_sends_to_the_preparing_process_can_be_pickled(code: RecipeCode, make: Callable[[RecipeCode], object]) -> None:
    code.resolve("task:echo")  # a loaded module must not be in the way
    sent = pickle.loads(pickle.dumps((make(code), code)))
    assert cache_key(make_settings(), sent[1]) == cache_key(make_settings(), code)


def test_the_learning_rate_rises_briefly_and_falls_to_zero() -> None:
    rates = [warm_start._schedule(update, 100) for update in range(100)]
    top = rates.index(max(rates))
    assert 5 <= top <= 12 and max(rates) > 0.95 and rates[-1] < 0.001
    assert rates[top:] == sorted(rates[top:], reverse=True)
