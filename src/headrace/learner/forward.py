"""Log-probabilities of chosen tokens under a Hugging Face causal language model, without logits where nobody needs them.

Shapes: _RT input tokens, right-padded; _N chosen positions; _V vocabulary.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from headrace.learner.batch import MicroBatch

_NOTING = "headrace_noting"
_soft_caps: ContextVar[list[float]] = ContextVar("soft_caps")


class Scores(NamedTuple):
    logprobs_N: Tensor
    """[N] natural log, with gradient when enabled."""
    entropy_N: Tensor
    """[N] nats, of the whole distribution at the token, temperature applied."""


class SelectiveForward:
    """Computes logits at chosen positions only, for any architecture.

    A hook on the model's output embedding keeps the chosen hidden states before they are multiplied by the vocabulary, so that what
    an architecture does to its logits afterwards (scaling, soft caps) still happens. A probe at construction compares with the full
    logits; a model for which they differ gets full logits and a selection after.

    No attention mask is passed: rows are padded on the right and attention is causal, so no chosen position sees padding. Dropout is
    off (eval mode): the learner's distribution is the sampler's.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        model.eval()
        use_exact_attention(model)
        self._hidden_N: Tensor | None = None
        head = model.get_output_embeddings()
        self._selects = False
        if head is not None:
            hook = head.register_forward_pre_hook(self._select)
            self._selects = self._agrees()
            if not self._selects:
                hook.remove()

    def logits(self, tokens_RT: Tensor, hidden_N: Tensor) -> Tensor:
        """[N, V] raw logits at `hidden_N`, indices into the flattened [R * T]."""
        if not self._selects:
            logits_RTV = self.model(input_ids=tokens_RT, use_cache=False).logits
            return torch.as_tensor(logits_RTV.flatten(0, 1).index_select(0, hidden_N))
        self._hidden_N = hidden_N
        try:
            return torch.as_tensor(self.model(input_ids=tokens_RT, use_cache=False).logits[0])
        finally:
            self._hidden_N = None

    def scores(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        """Log-probability of each target and the entropy at it, temperature applied."""
        logits_NV = self.logits(micro_batch.tokens_RT, micro_batch.hidden_N)
        if logits_NV.dtype in (torch.float16, torch.bfloat16):
            logits_NV = logits_NV.float()
        if micro_batch.temperature_N is not None:
            logits_NV = logits_NV / micro_batch.temperature_N[:, None]
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # -inf logits (vocabulary an architecture shuts out) have probability 0 and add nothing
            entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=torch.finfo(logprobs_NV.dtype).min)).sum(-1)
        return Scores(logprobs_NV.gather(1, micro_batch.target_N[:, None])[:, 0], entropy_N)

    def _select(self, _: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._hidden_N is None:
            return None
        return (inputs[0].flatten(0, 1).index_select(0, self._hidden_N)[None], *inputs[1:])

    @torch.no_grad()
    def _agrees(self) -> bool:
        device = next(self.model.parameters()).device
        tokens_RT = torch.arange(6, device=device).reshape(2, 3) % self.model.get_input_embeddings().num_embeddings
        hidden_N = torch.tensor([1, 2, 4], device=device)
        full_NV = self.model(input_ids=tokens_RT, use_cache=False).logits.flatten(0, 1)[hidden_N]
        self._selects = True
        try:
            chosen_NV = self.logits(tokens_RT, hidden_N)
        except (RuntimeError, IndexError, TypeError):  # the architecture looks at the shape after the head
            return False
        return chosen_NV.shape == full_NV.shape and torch.allclose(chosen_NV, full_NV, rtol=1e-4, atol=1e-4)


def use_exact_attention(model: Any) -> None:
    """Eager attention for a model that caps its attention scores: torch's fused attention cannot, and transformers before 5.24 let it
    leave the cap out in silence."""
    if model.config._attn_implementation != "sdpa":
        return
    caps: list[float] = []
    token = _soft_caps.set(caps)
    was_training = model.training
    model.eval()  # dropout would move the global random state
    model.set_attn_implementation(_NOTING)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device), use_cache=False)
    finally:
        _soft_caps.reset(token)
        model.set_attn_implementation("eager" if caps else "sdpa")
        model.train(was_training)


def _noting_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, softcap: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for attention during one forward: notes a soft cap, computes nothing."""
    if softcap is not None:
        _soft_caps.get().append(softcap)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_NOTING, _noting_attention)
