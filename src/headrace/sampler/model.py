"""A Hugging Face causal LM behind the slot cache: loading, the check that it can be served, the packed forward.

Nothing here knows an architecture by name. A model is served when, run over the slot cache, it gives the logits that its own
plain forward gives: that is checked once at loading, and a ModelError names what is missing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils.logging import disable_progress_bar

from headrace.errors import ModelError
from headrace.roles import Tokenizer
from headrace.sampler.attention import (
    ATTENTION_NAME,
    RECORDING_NAME,
    BatchPlan,
    LayerShape,
    current_plan,
    make_plan,
    recording_attention,
    slot_attention,
    told_to_attention,
)
from headrace.sampler.kv_cache import ShapeRecorder, SlotCache, slot_bytes
from headrace.sampler.recorded import RecordedSteps

AttentionInterface.register(ATTENTION_NAME, slot_attention)
AttentionInterface.register(RECORDING_NAME, recording_attention)

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_PROBE_TOKENS = 24


class ServedModel:
    """The model, its parameters and what a token of its cache takes."""

    def __init__(self, path: str, *, max_context_tokens: int, device: str, dtype: str) -> None:
        self.path = path
        self.device = _usable_device(device)
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.model = self._load()
        self.vocabulary_size: int = self.model.get_input_embeddings().weight.shape[0]
        self.parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        accepted = inspect.signature(self.model.forward).parameters
        if getattr(self.model, "_is_stateful", False):
            raise self._unserved("it keeps a recurrent state (as mamba and linear attention do), which is not a KV cache of all tokens")
        names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not names or "position_ids" not in accepted:
            raise self._unserved("its forward takes no KV cache or no position_ids")
        self._cache_name = names[0]
        self._keeps_logits = "logits_to_keep" in accepted
        self._check_config(max_context_tokens)
        self.shapes, self._cache_dtype = self._record_shapes(max_context_tokens)
        self.slot_bytes = slot_bytes(self.shapes, max_context_tokens, self._cache_dtype)
        expected = self._plain_logits()
        self._base_forward = inspect.unwrap(type(self.model.base_model).forward)
        self._head = self.model.get_output_embeddings()
        self._direct = self._is_base_and_head()
        if not self._direct or self._difference(expected) is not None:
            self._direct = False
            if (problem := self._difference(expected)) is not None:
                raise self._unserved(problem)
        self._recorded = RecordedSteps(self.model, self._forward_in_python, self.new_cache, self.shapes, self.vocabulary_size)

    @property
    def recording_failure(self) -> str | None:
        """Why decode steps run in Python although the model is small enough to be recorded (RecordedSteps.failure)."""
        return self._recorded.failure

    def new_cache(self, num_slots: int, context: int) -> SlotCache:
        return SlotCache.empty(self.shapes, num_slots, context, self._cache_dtype, self.device)

    @torch.inference_mode()
    def forward(self, cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        """Runs the packed batch and writes its keys and values. Gives [len(logits_at), V] logits at these packed positions."""
        logits = self._recorded.run(cache, plan, logits_at)
        return self._forward_in_python(cache, plan, logits_at) if logits is None else logits

    def _forward_in_python(self, cache: SlotCache, plan: BatchPlan, logits_at: torch.Tensor) -> torch.Tensor:
        token = current_plan.set(plan)
        kwargs: dict[str, Any] = {"input_ids": plan.token_ids, "position_ids": plan.positions, "use_cache": True, self._cache_name: cache}
        try:
            if self._direct:
                hidden: torch.Tensor = self._base_forward(self.model.base_model, **kwargs).last_hidden_state[0]
                logits: torch.Tensor = self._head(hidden.index_select(0, logits_at))
                return logits
            if self._keeps_logits:
                logits = self.model(logits_to_keep=logits_at, **kwargs).logits[0]
                return logits
            logits = self.model(**kwargs).logits[0]
            return logits.index_select(0, logits_at)
        finally:
            current_plan.reset(token)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ModelError when the tokenizer writes tokens that the model has not. (A model may have more: many are padded to a
        round number. Added tokens may lie beyond it: a text model of a family that also sees has no image token.)"""
        known = getattr(tokenizer, "vocab_size", None)
        end = tokenizer.eos_token_id
        if isinstance(known, int) and known > self.vocabulary_size:
            problem = f"the tokenizer knows {known} tokens, the model {self.vocabulary_size}"
        elif end is not None and not 0 <= end < self.vocabulary_size:
            problem = f"the tokenizer's end token is {end}, the model knows 0 to {self.vocabulary_size - 1}"
        else:
            return
        raise ModelError(f"{self.path}: {problem}.", remedy="Put the tokenizer that belongs to the model beside it.")

    def _load(self) -> Any:
        disable_progress_bar()  # its bars would draw over ours, and take semaphores that outlive a killed process
        try:
            self._check_kind(AutoConfig.from_pretrained(self.path, trust_remote_code=False))
            model = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=self.dtype, attn_implementation=ATTENTION_NAME, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            what = str(error).strip().splitlines() or [type(error).__name__]  # the first line says it; what follows may list every class there is
            raise ModelError(
                f"{self.path}: cannot be loaded as a causal language model: {what[0]}", remedy="Name a Hugging Face model directory or hub name."
            ) from error
        model = model.to(self.device).eval().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # matters to gradients only, and torch's check of it would forbid a recording (recorded.py)
        return model

    def _check_kind(self, config: Any) -> None:
        """Before any weight is read. Models whose code comes with them are left to the check of what they compute."""
        problem = None
        if getattr(config, "is_encoder_decoder", False):
            problem = "is an encoder-decoder"
        elif sub := next((name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None), None):
            problem = f"has a part for {'images' if sub == 'vision_config' else 'sound'} ({sub})"
        elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
            problem = "has no causal language model in transformers"
        if problem is not None:
            raise ModelError(
                f"{self.path}: model_type '{config.model_type}' {problem}; the transformers sampler serves causal language models of text.",
                remedy="Use another model.",
            )

    def _check_config(self, max_context_tokens: int) -> None:
        config = self.model.config.get_text_config()
        if others := set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS:
            raise self._unserved(f"layers of type {', '.join(sorted(others))} keep a state that is not a KV cache of all tokens")
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and max_context_tokens > limit:
            raise ModelError(
                f"{self.path}: the context of {max_context_tokens} tokens exceeds the model's {limit} positions.",
                remedy="Lower rollout.max_tokens, or raise model.architecture.max_position_embeddings of a model from scratch.",
            )
        rope = getattr(config, "rope_parameters", None) or {}
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            original = parameters.get("original_max_position_embeddings") or limit
            if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE and max_context_tokens > (original or 0):
                raise self._unserved(f"its rotary embedding ({parameters['rope_type']}) changes for the whole batch beyond {original} tokens")

    def _record_shapes(self, max_context_tokens: int) -> tuple[list[LayerShape], torch.dtype]:
        recorder = Cache(layers=[ShapeRecorder() for _ in range(self.model.config.get_text_config().num_hidden_layers)])
        self.model.set_attn_implementation(RECORDING_NAME)
        told: list[tuple[int, int | None]] = []
        token = told_to_attention.set(told)
        try:
            with torch.inference_mode():
                ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                self.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=True, **{self._cache_name: recorder})
        except Exception as error:
            raise self._unserved(f"it does not run with a cache of layers ({type(error).__name__}: {error})") from error
        finally:
            told_to_attention.reset(token)
            self.model.set_attn_implementation(ATTENTION_NAME)
        self._check_windows([window for _, window in told], max_context_tokens)
        shapes = [layer.shape for layer in recorder.layers if layer.shape is not None]
        if len(shapes) != len(recorder.layers):
            raise self._unserved(f"only {len(shapes)} of its {len(recorder.layers)} layers write to the KV cache")
        if len(told) == len(shapes):
            shapes = [shape._replace(query_heads=query_heads) for shape, (query_heads, _) in zip(shapes, told, strict=True)]
        return shapes, next(layer.dtype for layer in recorder.layers)

    def _check_windows(self, windows: list[int | None], max_context_tokens: int) -> None:
        """Some models leave their sliding window to the mask that transformers makes; here a window is what attention is told.

        The probe's few tokens lie within any real window, so this is read from the config.
        """
        config = self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        if window is None or window >= max_context_tokens or len(windows) != config.num_hidden_layers:
            return
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
        for layer, (kind, told) in enumerate(zip(kinds, windows, strict=True)):
            if told != (window if kind == "sliding_attention" else None):
                raise self._unserved(
                    f"layer {layer} ({kind}) tells attention a sliding window of {told or 'all'} tokens, its config says {window}, "
                    f"and the context of {max_context_tokens} tokens is longer"
                )

    @torch.inference_mode()
    def _is_base_and_head(self) -> bool:
        """Whether the model is its base model and its output embedding, and nothing between or after them (scales, soft caps).

        Then the two are called without transformers' wrappers, which saves a fifth of a small model's step. The output embedding
        is made to give numbers up to 80: what a cap does to a fresh model's tiny logits would be lost in rounding.
        """
        if self.model.base_model is self.model or self._head is None:
            return False
        seen: dict[str, torch.Tensor] = {}

        def replace(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            seen["hidden"], seen["logits"] = inputs[0], torch.linspace(-80, 80, output.numel(), device=output.device).view_as(output).to(output.dtype)
            return seen["logits"]

        hook = self._head.register_forward_hook(replace)
        self.model.set_attn_implementation("eager")
        try:
            rows = self._probe_rows().to(self.device)
            logits = self.model(input_ids=rows, use_cache=False).logits
            hidden = self._base_forward(self.model.base_model, input_ids=rows, use_cache=False).last_hidden_state
        except Exception:  # its parts do not stand alone: it is called whole
            return False
        finally:
            hook.remove()
            self.model.set_attn_implementation(ATTENTION_NAME)
        return bool(seen) and torch.equal(logits.float(), seen["logits"].float()) and torch.equal(hidden, seen["hidden"])

    def _plain_logits(self) -> torch.Tensor:
        """[2, V] last logits of the probe's two sequences, by the model's own forward without a cache."""
        self.model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.model(input_ids=self._probe_rows().to(self.device), use_cache=False).logits[:, -1].float()
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        return logits

    def _difference(self, expected: torch.Tensor) -> str | None:
        """Serves the probe: prompts, then two short steps, of unlike lengths: every path of the attention. Says what differs; None when nothing does."""
        rows = self._probe_rows()
        cache = self.new_cache(2, _PROBE_TOKENS)
        served = expected
        try:
            for bounds in (((0, 20), (0, 17)), ((20, 21), (17, 20)), ((21, _PROBE_TOKENS), (20, _PROBE_TOKENS))):
                plan = make_plan([rows[r, a:b].tolist() for r, (a, b) in enumerate(bounds)], [a for a, _ in bounds], [1, 0], self.device)
                with torch.inference_mode():
                    served = self._forward_in_python(cache, plan, plan.last_R).float()
        except ModelError as error:
            return error.message
        except Exception as error:
            return f"its attention does not go through transformers' attention interface ({type(error).__name__}: {error})"
        difference = float((served - expected).abs().max())
        tolerance = (1e-4 if self.dtype == torch.float32 else 5e-2) * (1.0 + float(expected.abs().max()))
        if difference <= tolerance:
            return None
        return f"over the slot cache its logits differ by {difference:.3g} from its plain forward (at most {tolerance:.3g})"

    def _probe_rows(self) -> torch.Tensor:
        return torch.randint(0, self.vocabulary_size, (2, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))

    def _unserved(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path}: {type(self.model).__name__} cannot be served by the transformers sampler: {why}.", remedy="Use another model or the vLLM sampler."
        )


def _usable_device(name: str) -> torch.device:
    """Raises ModelError for a device that torch does not know or does not see."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"model.device '{name}' cannot be used: {str(error).splitlines()[0]}", remedy="Name one that `headrace doctor` lists, or cpu."
        ) from error
    return device
