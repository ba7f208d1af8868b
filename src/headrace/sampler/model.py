"""A Hugging Face causal LM behind the slot cache: loading, the check that it can be served, the packed forward.

Nothing here knows an architecture by name. A model is served when, run over the slot cache, it gives the logits that its own
plain forward gives: that is checked once at loading, and a ModelError names what is missing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache

from headrace.errors import ModelError
from headrace.sampler.attention import ATTENTION_NAME, BatchPlan, current_plan, make_plan, slot_attention
from headrace.sampler.kv_cache import LayerShape, ShapeRecorder, SlotCache, slot_bytes

AttentionInterface.register(ATTENTION_NAME, slot_attention)

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_PROBE_TOKENS = 12


class ServedModel:
    """The model, its parameters and what a token of its cache takes."""

    def __init__(self, path: str, *, max_context_tokens: int, device: str, dtype: str) -> None:
        self.path = path
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model = self._load()
        self.vocabulary_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        accepted = inspect.signature(self.model.forward).parameters
        self._cache_name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
        self._keeps_logits = "logits_to_keep" in accepted
        if self._cache_name is None or "position_ids" not in accepted:
            raise self._unserved("its forward takes no KV cache or no position_ids")
        self._check_config(max_context_tokens)
        self.shapes, self._cache_dtype = self._record_shapes()
        self.slot_bytes = slot_bytes(self.shapes, max_context_tokens, self._cache_dtype)
        self._check_forward()

    def new_cache(self, num_slots: int, context: int) -> SlotCache:
        return SlotCache(self.shapes, num_slots, context, self._cache_dtype, self.device)

    @torch.inference_mode()
    def forward(self, cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        """Runs the packed batch and writes its keys and values. Gives [len(logits_at), V] logits at these packed positions."""
        token = current_plan.set(plan)
        try:
            kwargs: dict[str, object] = {str(self._cache_name): cache}
            if self._keeps_logits:
                kwargs["logits_to_keep"] = logits_at
            logits: torch.Tensor = self.model(input_ids=plan.token_ids, position_ids=plan.positions, use_cache=True, **kwargs).logits[0]
        finally:
            current_plan.reset(token)
        return logits if self._keeps_logits else logits[logits_at]

    def _load(self) -> Any:
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype, attn_implementation=ATTENTION_NAME)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(
                f"{self.path}: cannot be loaded as a causal language model: {error}", remedy="Name a Hugging Face model directory or hub name."
            ) from error
        return model.to(self.device).eval().requires_grad_(False)

    def _check_config(self, max_context_tokens: int) -> None:
        config = self.model.config.get_text_config()
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise self._unserved("it is an encoder-decoder")
        if others := set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS:
            raise self._unserved(f"layers of type {', '.join(sorted(others))} keep a state that is not a KV cache of all tokens")
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and max_context_tokens > limit:
            raise ModelError(
                f"{self.path}: the context of {max_context_tokens} tokens exceeds the model's {limit} positions.", remedy="Lower rollout.max_tokens."
            )
        rope = getattr(config, "rope_parameters", None) or {}
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            original = parameters.get("original_max_position_embeddings") or limit
            if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE and max_context_tokens > (original or 0):
                raise self._unserved(f"its rotary embedding ({parameters['rope_type']}) changes for the whole batch beyond {original} tokens")

    def _record_shapes(self) -> tuple[list[LayerShape], torch.dtype]:
        recorder = Cache(layers=[ShapeRecorder() for _ in range(self.model.config.get_text_config().num_hidden_layers)])
        self.model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                self.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=True, **{str(self._cache_name): recorder})
        except Exception as error:
            raise self._unserved(f"it does not run with a cache of layers ({type(error).__name__}: {error})") from error
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        shapes = [layer.shape for layer in recorder.layers if layer.shape is not None]
        if len(shapes) != len(recorder.layers):
            raise self._unserved(f"only {len(shapes)} of its {len(recorder.layers)} layers write to the KV cache")
        return shapes, next(layer.dtype for layer in recorder.layers)

    def _check_forward(self) -> None:
        """Prompt in two parts of unlike lengths, then a short step, against the plain forward of the whole sequence."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, self.vocabulary_size, (2, _PROBE_TOKENS), generator=generator)
        cache = self.new_cache(2, _PROBE_TOKENS)
        served = None
        try:
            for bounds in (((0, 9), (0, 5)), ((9, 10), (5, 8)), ((10, _PROBE_TOKENS), (8, _PROBE_TOKENS))):
                plan = make_plan([rows[r, a:b].tolist() for r, (a, b) in enumerate(bounds)], [a for a, _ in bounds], [1, 0], self.device)
                served = self.forward(cache, plan, plan.last_R)
            self.model.set_attn_implementation("eager")
            with torch.inference_mode():
                expected = self.model(input_ids=rows.to(self.device), use_cache=False).logits[:, -1]
        except ModelError:
            raise
        except Exception as error:
            raise self._unserved(f"its attention does not go through transformers' attention interface ({type(error).__name__}: {error})") from error
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        assert served is not None
        difference = float((served.float() - expected.float()).abs().max())
        tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * (1.0 + float(expected.float().abs().max()))
        if not difference <= tolerance:
            raise self._unserved(
                f"over the slot cache its logits differ by {difference:.3g} from its plain forward (at most {tolerance:.3g}); its attention adds something"
            )

    def _unserved(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path}: {type(self.model).__name__} cannot be served by the transformers sampler: {why}.", remedy="Use another model or the vLLM sampler."
        )
