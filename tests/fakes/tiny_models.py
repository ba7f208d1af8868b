"""Tiny random models and a tokenizer, saved once a test session as Hugging Face directories."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CONTEXT = 24, 96
LETTERS = "abcdefghijklmnopqrstuvwx"

_SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2": _SHAPE,
    "llama": _SHAPE,
    "mistral": {**_SHAPE, "sliding_window": 7},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
_directories: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def tiny_model(kind: str, seed: int = 0) -> Path:
    """Directory of a random float32 model of that model_type. Its weights are drawn widely, so that its distributions differ."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, initializer_range=0.2, tie_word_embeddings=True, **_KINDS[kind], **special
    )
    model = AutoModelForCausalLM.from_config(config)
    directory = tempfile.TemporaryDirectory(prefix=f"headrace-{kind}-")
    _directories.append(directory)  # removed when the interpreter ends
    model.save_pretrained(directory.name)
    return Path(directory.name)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token; the last token is the end of a text."""
    vocabulary = {letter: index for index, letter in enumerate(LETTERS[:-1])}
    vocabulary["<end>"] = VOCABULARY - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def perturbed(parameters: dict[str, torch.Tensor], seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Other weights near these: what an update would leave."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in parameters.items()}
