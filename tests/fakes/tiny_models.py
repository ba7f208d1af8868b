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
_UNTIED = {"tie_word_embeddings": False}
_ALTERNATING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2": _SHAPE,
    "qwen3": {**_SHAPE, "head_dim": 16},
    "llama": {**_SHAPE, **_UNTIED},
    "mistral": {**_SHAPE, **_UNTIED, "sliding_window": 7},
    "gemma": {**_SHAPE, "head_dim": 16},
    "gemma2": {**_SHAPE, **_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_SHAPE, **_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "phi3": {**_SHAPE, **_UNTIED, "sliding_window": 7},
    "phimoe": {**_SHAPE, **_UNTIED, "sliding_window": 7},
    "jamba": {**_SHAPE, "mamba_d_state": 4, "use_mamba_kernels": False},
    "qwen3_next": {**_SHAPE, "layer_types": ["linear_attention", "full_attention"]},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
SERVED = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2")
"""Two sliding windows are narrower than most prompts of the tests; gemma2's soft caps bite."""
_directories: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def tiny_model(kind: str, seed: int = 0) -> Path:
    """Directory of a random float32 model of that model_type. Its weights are drawn widely, so that its distributions differ."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "initializer_range": 0.2, "tie_word_embeddings": True}
    config = AutoConfig.for_model(kind, **{**common, **_KINDS[kind], **special})
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
