"""The model a run starts from: a given one, or one from scratch after a short supervised start that is cached.

torch is imported only when a model has to be made: a cached one is found in milliseconds.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headrace
from headrace.config import Settings
from headrace.errors import HeadraceError, RecipeError
from headrace.recipe import RecipeCode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[str, float], None]
Demonstration = Sequence[str]
"""(prompt, answer, prompt, answer, ...)"""
Example = tuple[list[int], list[bool]]
"""tokens [T], and whether each belongs to an answer [T]"""

BUCKET_BATCHES = 8  # batches drawn at a time and sorted by length, so that padding stays small
WARMUP_UPDATES = 10
IGNORED = -100  # cross_entropy's label without loss


def prepare_model(settings: Settings, code: RecipeCode, *, cache_directory: Path, progress: Progress) -> Path:
    """The directory (or hub name) of the model to start from.

    `model.path` where it is given, or what `model.prepare` returns. Else a model from scratch after `warm_start.num_updates`
    supervised updates, from the cache or made now and cached. The cache entry is written whole or not at all; several processes may prepare the same one.
    `progress(what, fraction)` is called while work is done. Raises ModelError for a model that cannot be built and RecipeError
    for demonstrations that are not what they should be.
    """
    if settings.model.path is not None:
        return Path(settings.model.path)
    if settings.model.prepare is not None:
        progress(f"preparing the model ({settings.model.prepare})", 0.0)
        return _prepared(code, settings.model.prepare, cache_directory)
    target = cache_directory / f"model-{cache_key(settings, code)[:24]}"
    if not target.is_dir():
        part = cache_directory / f"{target.name}.{uuid.uuid4().hex}.part"
        try:
            _make(settings, code, part, progress)
            _publish(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return target


def _prepared(code: RecipeCode, reference: str, cache_directory: Path) -> Path:
    """What the recipe's own function returns. It is the user's code: its errors say where it is."""
    function = code.resolve(reference)
    try:
        made = function(cache_directory)
    except HeadraceError:
        raise
    except Exception as error:
        raise RecipeError(f"{code.path}: '{reference}' raised {type(error).__name__}: {error}") from error
    if not isinstance(made, str | Path) or not Path(made).is_dir():
        raise RecipeError(f"{code.path}: '{reference}' returned {made!r:.120}, which is no directory.", remedy="Return the directory of a Hugging Face model.")
    return Path(made)


def cache_key(settings: Settings, code: RecipeCode) -> str:
    """Hash of everything that decides the weights: model and warm start settings, the recipe's code, headrace's version.

    Of the recipe's options only those that the demonstrations function names; without demonstrations its code does not matter.
    """
    reference = settings.warm_start.demonstrations
    recipe = None
    if reference is not None:
        parameters = inspect.signature(code.resolve(reference)).parameters
        recipe = RecipeCode(code.path, {key: value for key, value in code.options.items() if key in parameters}).digest()
    relevant = {
        "model": settings.model.model_dump(mode="json", exclude={"path", "prepare", "device", "sampler_device", "lora_rank", "lora_alpha", "lora_targets"}),
        "warm_start": settings.warm_start.model_dump(mode="json"),
        "recipe": recipe,
        "headrace": headrace.__version__,
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _make(settings: Settings, code: RecipeCode, directory: Path, progress: Progress) -> None:
    import torch

    from headrace.learner import scratch

    progress("building the model", 0.0)
    model, tokenizer = scratch.make_model(settings)
    if settings.warm_start.demonstrations is not None and settings.warm_start.num_updates > 0:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a second thread makes small models slower
        try:
            _train(model, tokenizer, settings, code, progress)
        finally:
            torch.set_num_threads(num_threads)
        progress("warm start", 1.0)
    scratch.write_model(model, tokenizer, settings, directory)


def _train(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, settings: Settings, code: RecipeCode, progress: Progress) -> None:
    import torch

    warm_start = settings.warm_start
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm_start.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = _batches(_examples(_demonstrations(settings, code), tokenizer), warm_start.batch_size, warm_start.seed)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warm_start.seed)  # dropout, where the architecture has it
        for update, batch in enumerate(itertools.islice(batches, warm_start.num_updates)):
            for group in optimizer.param_groups:
                group["lr"] = warm_start.learning_rate * _schedule(update, warm_start.num_updates)
            loss = _answer_loss(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress("warm start", (update + 1) / warm_start.num_updates)
    model.eval()


def _schedule(update: int, num_updates: int) -> float:
    """Fraction of the learning rate: a short linear rise, then a cosine to 0."""
    rise = min(1.0, (update + 1) / min(WARMUP_UPDATES, num_updates))
    return rise * 0.5 * (1 + math.cos(math.pi * update / num_updates))


def _answer_loss(model: torch.nn.Module, batch: Sequence[Example]) -> torch.Tensor:
    """Mean negative log-likelihood of the answer tokens.

    Padding stands on the right, where causal attention never looks at it from a real token: no mask is needed.
    """
    import torch

    length = max(len(tokens) for tokens, _ in batch)
    tokens_BT = torch.zeros((len(batch), length), dtype=torch.long)
    labels_BT = torch.full((len(batch), length), IGNORED, dtype=torch.long)
    for row, (tokens, is_answer) in enumerate(batch):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        labels_BT[row, : len(tokens)] = torch.tensor([token if answer else IGNORED for token, answer in zip(tokens, is_answer, strict=True)])
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)


def _demonstrations(settings: Settings, code: RecipeCode) -> Iterator[Demonstration]:
    """Endless: a generator that ends is started again. A parameter `seed` gets `warm_start.seed`."""
    reference = settings.warm_start.demonstrations
    assert reference is not None
    function = code.resolve(reference)
    arguments: dict[str, Any] = {}
    if "seed" in inspect.signature(function).parameters and "seed" not in code.options:
        arguments["seed"] = settings.warm_start.seed
    while True:
        empty = True
        try:
            for demonstration in _iterate(function(**arguments), code, reference):
                empty = False
                yield demonstration
        except HeadraceError:
            raise
        except Exception as error:
            raise RecipeError(f"{code.path}: '{reference}' raised {code.described(error)}.", remedy="Mend that function.") from error
        if empty:
            raise RecipeError(f"{code.path}: '{reference}' yields no demonstrations.", remedy="Yield (prompt, answer, ...) tuples.")


def _iterate(made: object, code: RecipeCode, reference: str) -> Iterable[Demonstration]:
    if not isinstance(made, Iterable):
        raise RecipeError(f"{code.path}: '{reference}' returns a {type(made).__name__}.", remedy="Yield (prompt, answer, ...) tuples of text.")
    for texts in made:
        if not isinstance(texts, tuple | list) or len(texts) < 2 or len(texts) % 2 or not all(isinstance(text, str) and text for text in texts):
            raise RecipeError(
                f"{code.path}: '{reference}' yields {texts!r:.120}: not an even number of texts that are not empty.",
                remedy="Yield (prompt, answer, prompt, answer, ...) tuples.",
            )
        yield texts


def _examples(demonstrations: Iterator[Demonstration], tokenizer: PreTrainedTokenizerFast) -> Iterator[Example]:
    """Each text is tokenised by itself, as a rollout does."""
    for texts in demonstrations:
        tokens: list[int] = []
        is_answer: list[bool] = []
        for index, text in enumerate(texts):
            try:
                part = tokenizer.encode(text, add_special_tokens=False)
            except Exception as error:  # tokenizers raises a bare Exception
                raise RecipeError(
                    f"Demonstration text {text!r:.120} cannot be tokenised: {error}", remedy="Add what is missing to model.characters."
                ) from error
            tokens += part
            is_answer += [index % 2 == 1] * len(part)
        yield tokens, is_answer


def _batches(examples: Iterator[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Batches of about equal lengths, in random order."""
    order = random.Random(seed)
    while True:
        drawn = sorted(itertools.islice(examples, batch_size * BUCKET_BATCHES), key=lambda example: len(example[0]))
        batches = [drawn[start : start + batch_size] for start in range(0, len(drawn), batch_size)]
        order.shuffle(batches)
        yield from batches


def _publish(part: Path, target: Path) -> None:
    """Renames what was written into place once it is on disk. Whoever comes second keeps the first one's."""
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        part.rename(target)
    except OSError:
        if not target.is_dir():
            raise
