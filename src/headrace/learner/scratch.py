"""Models from scratch: random seeded weights and a character tokenizer, written as a Hugging Face directory."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from headrace.config import ModelSettings, Settings
from headrace.errors import ModelError
from headrace.learner.forward import use_exact_attention

PAD = "<pad>"
END = "<end>"

# Keys that some architectures read although their config class declares no such field.
UNDECLARED_KEYS = frozenset({"head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor"})


def character_tokenizer(characters: str, *, max_tokens: int | None = None) -> PreTrainedTokenizerFast:
    """One token a character, in this order, then a pad and an end token; encoding adds no special tokens.

    The texts "<pad>" and "<end>" encode to those two tokens, so a recipe may write an end into its answers. A character
    outside the alphabet raises when encoded. Raises ModelError when `characters` is empty or names one twice.
    """
    if not characters:
        raise ModelError("model.characters is empty.", remedy="List every character of prompts and answers.")
    twice = sorted({character for character in characters if characters.count(character) > 1})
    if twice:
        raise ModelError(f"model.characters names {', '.join(map(repr, twice))} more than once.", remedy="List each character once.")
    backend = BackendTokenizer(WordLevel({token: index for index, token in enumerate([*characters, PAD, END])}))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    limit = {} if max_tokens is None else {"model_max_length": max_tokens}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False, **limit)
    return cast(PreTrainedTokenizerFast, tokenizer)


def make_model(settings: Settings) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """The model of `model.architecture`, float32, its weights drawn from `warm_start.seed`, and its tokenizer.

    The global random state is left as it was. Raises ModelError naming what is wrong with the settings.
    """
    model_settings = settings.model
    if model_settings.architecture is None or model_settings.characters is None:
        raise ModelError("A model from scratch needs model.architecture and model.characters.", remedy="Give both, or model.path.")
    tokenizer = character_tokenizer(model_settings.characters, max_tokens=model_settings.architecture.get("max_position_embeddings"))
    config = _make_config(model_settings, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.warm_start.seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:  # whatever the architecture says about its own keys
            raise ModelError(f"model.architecture cannot be built: {type(error).__name__}: {error}", remedy="Correct its keys.") from error
    use_exact_attention(model)
    return model, tokenizer


def write_model(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, settings: Settings, directory: Path) -> None:
    """Writes weights (in `model.dtype`), config and tokenizer into `directory`, as AutoModelForCausalLM and AutoTokenizer load them."""
    directory.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # the one of transformers, for a single small file
    model.to(getattr(torch, settings.model.dtype)).save_pretrained(directory)  # type: ignore[operator]
    tokenizer.save_pretrained(directory)
    _check_loads_back(tokenizer, settings.model, directory)


def build_model(settings: Settings, directory: Path) -> None:
    """Makes the model of the settings with random weights and writes it. Raises ModelError; the same seed writes the same weights."""
    model, tokenizer = make_model(settings)
    write_model(model, tokenizer, settings, directory)


def _check_loads_back(tokenizer: PreTrainedTokenizerFast, model_settings: ModelSettings, directory: Path) -> None:
    """For a few architectures (qwen2 is one) transformers loads every tokenizer as the one of the released models, which may not fit."""
    loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    text = model_settings.characters or ""
    tokens = tokenizer.encode(text)
    if loaded.encode(text) != tokens or loaded.decode(tokens) != text or loaded.encode(text + END) != [*tokens, tokenizer.eos_token_id]:
        model_type = (model_settings.architecture or {})["model_type"]
        raise ModelError(
            f"model.architecture: AutoTokenizer takes the tokenizer of a '{model_type}' model for a {type(loaded).__name__}, which breaks model.characters.",
            remedy="Use another model_type, for example 'llama' or 'qwen3'.",
        )


def _make_config(model_settings: ModelSettings, tokenizer: PreTrainedTokenizerFast) -> Any:
    keys = dict(model_settings.architecture or {})
    model_type = keys.pop("model_type", None)
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ModelError(f"model.architecture: transformers knows no model_type '{model_type}'.", remedy="Name one, for example 'qwen2'.") from error
    for key in sorted(set(keys) - UNDECLARED_KEYS):
        if not hasattr(known, key):  # transformers would accept a misspelt key in silence
            near = difflib.get_close_matches(key, known.to_dict(), n=1)
            raise ModelError(f"model.architecture: '{model_type}' has no key '{key}'.", remedy=f"Did you mean '{near[0]}'?" if near else "Remove it.")
    keys |= {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    try:
        return AutoConfig.for_model(model_type, **keys)
    except Exception as error:
        raise ModelError(f"model.architecture: {error}", remedy="Correct the value.") from error
