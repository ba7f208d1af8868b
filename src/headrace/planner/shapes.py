"""What a Hugging Face config.json says of a model's size: parameters, those that one token uses, bytes of its KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, Problem

_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_head_kv"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "expert_size": ("moe_intermediate_size",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers of weights; norms and biases are left out (under 0.1 %)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    kv_values_per_token: int
    """Numbers that one token's KV cache holds, all layers."""
    vocabulary: int
    dense_parameters: int
    """Used by every token: attention, dense layers, shared experts, output layer; without the input embedding, which is looked up."""
    embedding_parameters: int
    """The input embedding, unless the output layer shares it."""
    expert_parameters: int = 0
    """Of one routed expert in every layer that has experts, all such layers together."""
    num_experts: int = 0
    experts_per_token: int = 0
    attention_width: int = 0
    """num_heads x head size: what attention multiplies with each context token."""

    @property
    def num_parameters(self) -> int:
        return self.dense_parameters + self.embedding_parameters + self.num_experts * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Multiplied with one token."""
        return self.dense_parameters + self.experts_per_token * self.expert_parameters

    def touched_parameters(self, tokens: float) -> float:
        """Read from memory by a step of so many tokens: each picks its experts as if at random."""
        if not self.num_experts:
            return float(self.dense_parameters)
        share: float = 1.0 - (1.0 - self.experts_per_token / self.num_experts) ** tokens
        return self.dense_parameters + share * self.num_experts * self.expert_parameters

    def attention_flops(self, context_tokens: float) -> float:
        """Of one token over its context, all layers: scores and weighted values."""
        return 4.0 * self.num_layers * self.attention_width * context_tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, file: str | None = None) -> ModelShape:
        """Dense and mixture-of-experts decoders, grouped-query and latent attention (DeepSeek). Raises ConfigError naming what is missing."""
        values = {**config, **config.get("text_config", {})}
        reader = _Reader(values, file)
        hidden, layers, heads = reader.need("hidden_size"), reader.need("num_layers"), reader.need("num_heads")
        vocabulary = reader.need("vocabulary")
        head = int(values.get("head_dim") or hidden // heads)
        attention, kv_values, width = _attention(values, hidden, heads, reader.get("num_kv_heads") or heads, head)
        # GPT-2 and OPT have two matrices in a feed-forward layer, the others a gate as well
        matrices = 2 if values.get("model_type") in ("gpt2", "opt", "gpt_neo", "gpt_neox", "phi", "bloom") else 3
        feed_forward = matrices * hidden * (reader.get("intermediate_size") or 4 * hidden)
        experts = reader.get("num_experts") or 0
        dense_layers = layers
        dense, expert = 0, 0
        if experts:
            size = reader.get("expert_size") or reader.need("intermediate_size")
            dense_layers = _num_dense_layers(values, layers)
            shared = int(values.get("n_shared_experts") or 0) * 3 * hidden * size
            shared += 3 * hidden * int(values.get("shared_expert_intermediate_size") or 0)
            expert = (layers - dense_layers) * 3 * hidden * size
            dense += (layers - dense_layers) * (shared + hidden * experts)
        dense += dense_layers * feed_forward + layers * attention + hidden * vocabulary
        tied = bool(values.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
        return cls(
            hidden_size=hidden, num_layers=layers, num_heads=heads, kv_values_per_token=layers * kv_values, vocabulary=vocabulary,
            dense_parameters=dense, embedding_parameters=0 if tied else hidden * vocabulary, expert_parameters=expert, num_experts=experts,
            experts_per_token=reader.get("experts_per_token") or 0, attention_width=width,
        )  # fmt: skip

    @classmethod
    def load(cls, path: Path) -> ModelShape:
        """From a config.json or a directory that holds one. Raises ConfigError."""
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            remedy = "Give a Hugging Face config.json, or the directory it lies in."
            problem = Problem(file=str(file), key="MODEL", value=str(path), message=f"it cannot be read: {error.strerror}.", remedy=remedy)
            raise ConfigError([problem]) from error
        except ValueError as error:
            raise ConfigError([Problem(file=str(file), key="MODEL", message=f"it is no JSON: {error}.", remedy="Give a Hugging Face config.json.")]) from error
        if not isinstance(config, dict):
            raise ConfigError([Problem(file=str(file), key="MODEL", message="it is no JSON object.", remedy="Give a Hugging Face config.json.")])
        return cls.from_config(config, file=str(file))


class _Reader:
    def __init__(self, values: Mapping[str, Any], file: str | None) -> None:
        self._values, self._file = values, file

    def get(self, what: str) -> int | None:
        for name in _NAMES[what]:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, list):
                value = max(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    [Problem(file=self._file, key=name, value=str(value), limit=">= 0", message=f"'{name}' is {value!r}, it must be a whole number.")]
                )
            return value
        return None

    def need(self, what: str) -> int:
        value = self.get(what)
        if not value:
            name = _NAMES[what][0]
            remedy = "It must be the config.json of a causal language model."
            raise ConfigError([Problem(file=self._file, key=name, value=value, limit="> 0", message=f"'{name}' is missing or 0.", remedy=remedy)])
        return value


def _attention(values: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head: int) -> tuple[int, int, int]:
    """(weights of one layer, KV values of a token in one layer, width of scores and values)."""
    latent = int(values.get("kv_lora_rank") or 0)
    if not latent:
        return 2 * hidden * heads * head + 2 * hidden * kv_heads * head, 2 * kv_heads * head, heads * head
    nope, rope = int(values.get("qk_nope_head_dim") or head), int(values.get("qk_rope_head_dim") or 0)
    value_head, query_rank = int(values.get("v_head_dim") or head), int(values.get("q_lora_rank") or 0)
    queries = query_rank * (hidden + heads * (nope + rope)) if query_rank else hidden * heads * (nope + rope)
    weights = queries + hidden * (latent + rope) + latent * heads * (nope + value_head) + heads * value_head * hidden
    return weights, latent + rope, heads * (nope + rope + value_head) // 2


def _num_dense_layers(values: Mapping[str, Any], layers: int) -> int:
    first = int(values.get("first_k_dense_replace") or 0)
    named = values.get("mlp_only_layers") or []
    every = int(values.get("decoder_sparse_step") or values.get("moe_layer_freq") or 1) if not isinstance(values.get("moe_layer_freq"), list) else 1
    return min(layers, first + len(named) + (layers - layers // every if every > 1 else 0))
