"""LoRA through peft (arXiv 2106.09685): only two thin matrices a layer are trained and sent to samplers.

The model itself stays frozen, so it is also its own reference model: the KL term switches the adapters off for one forward instead
of holding a second copy. There is no dropout: the learner's distribution is the sampler's (I3).
Memory beside the frozen weights: 4 x rank x (rows + columns) numbers an adapted layer (weight, gradient and AdamW's two moments).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.config import Settings
from headrace.errors import CheckpointError, ModelError
from headrace.learner.batch import MicroBatch
from headrace.learner.forward import Scores, SelectiveForward
from headrace.updates import AdaptedWeight, AdapterLayout

ADAPTER_FOLDER = "adapter"
"""Below a checkpoint, not in it: transformers would load the base model and the adapter where it finds adapter_config.json."""
_NAME = "default"  # peft's, of the only adapter
_WEIGHTS_FILE, _CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def adapter_layout(model_path: str, settings: Settings) -> AdapterLayout | None:
    """What a learner of these settings will publish, without loading weights; None when it trains all of them. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if settings.model.lora_rank == 0:
        return None
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return Adapters(model, settings).layout


class Adapters:
    """Puts adapters into a Hugging Face model, in place, and freezes the rest.

    They start as A random (drawn from run.seed: every rank the same) and B = 0, so the model is what it was. Raises ModelError when
    peft is missing or a target is not a linear layer of the model.
    """

    def __init__(self, model: Any, settings: Settings) -> None:
        self._model = model
        self._rank, self._alpha = settings.model.lora_rank, settings.model.lora_alpha
        self._peft = _wrap(model, settings)
        self._layers: dict[str, Any] = dict(_adapted_layers(model))
        self.layout = AdapterLayout(
            rank=self._rank,
            scale=self._alpha / self._rank,
            weights=tuple(
                AdaptedWeight(name=f"{path}.weight", rows=layer.out_features, columns=layer.in_features, transposed=bool(layer.fan_in_fan_out))
                for path, layer in self._layers.items()
            ),
        )

    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return [parameter for layer in self._layers.values() for parameter in (layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight)]

    def published(self) -> dict[str, Tensor]:
        """The tensors of `layout`, float32: adapters are small, and rounding them would be felt."""
        values = [parameter.detach().to(torch.float32) for parameter in self.parameters()]
        return dict(zip(self.layout.shapes(), values, strict=True))

    def disabled(self) -> AbstractContextManager[Any]:
        """Inside, the model is the one that training started from."""
        context: AbstractContextManager[Any] = self._peft.disable_adapter()
        return context

    def merged_state(self) -> Iterator[tuple[str, Tensor]]:
        """The state dict of the plain model with W0 + scale * B A, under its plain names. Leaves the model as it is."""
        for name, value in self._model.state_dict().items():
            owner, base, leaf = name.rpartition(".base_layer.")
            if not base or owner not in self._layers:
                if name.rpartition(".lora_")[0] not in self._layers:
                    yield name, value
            elif leaf == "weight":
                yield f"{owner}.weight", value + self._layers[owner].get_delta_weight(_NAME).detach()
            else:
                yield f"{owner}.{leaf}", value

    def save(self, directory: Path) -> None:
        """The merged model as a Hugging Face directory, and below it the adapter as peft loads it."""
        self._model.save_pretrained(directory, state_dict=dict(self.merged_state()))
        self._peft.save_pretrained(directory / ADAPTER_FOLDER)
        (directory / ADAPTER_FOLDER / "README.md").unlink(missing_ok=True)  # a model card with nothing filled in

    def load(self, directory: Path, saved_model: dict[str, Tensor]) -> None:
        """Takes a checkpoint's adapter over, in place. `saved_model`: its merged parameters, which prove that the base is the same.

        Raises CheckpointError before anything is changed.
        """
        folder = directory / ADAPTER_FOLDER
        config = json.loads((folder / _CONFIG_FILE).read_text(encoding="utf-8"))
        if (config["r"], config["lora_alpha"]) != (self._rank, self._alpha):
            raise CheckpointError(
                f"{folder}: its rank and alpha are {config['r']} and {config['lora_alpha']}, this run's are {self._rank} and {self._alpha}.",
                remedy="Set model.lora_rank and model.lora_alpha as they were.",
            )
        saved = load_file(folder / _WEIGHTS_FILE)
        names = [f"base_model.model.{path}.lora_{which}.weight" for path in self._layers for which in "AB"]
        if set(names) != set(saved) or any(saved[name].shape != mine.shape for name, mine in zip(names, self.parameters(), strict=True)):
            raise CheckpointError(f"{folder}: it adapts other layers than this run.", remedy="Set model.lora_targets as they were.")
        before = [parameter.detach().clone() for parameter in self.parameters()]
        self._put([saved[name] for name in names])
        for name, mine in self.merged_state():
            if name in saved_model and not torch.allclose(mine.cpu(), saved_model[name].to(mine.dtype), rtol=1e-3, atol=1e-4):
                self._put(before)
                raise CheckpointError(f"{directory}: {name} is not this run's model with its adapter: the run starts from another model.")

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(value)


class ReferenceForward:
    """The frozen reference model as the trained one without its adapters."""

    def __init__(self, forward: SelectiveForward, adapters: Adapters) -> None:
        self._forward = forward
        self._adapters = adapters

    def scores(self, micro_batch: MicroBatch, *, entropy_gradient: bool = False) -> Scores:
        with self._adapters.disabled():
            return self._forward.scores(micro_batch, entropy_gradient=entropy_gradient)


def _wrap(model: Any, settings: Settings) -> Any:
    """peft's model around this one."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(f"model.lora_rank is {settings.model.lora_rank}, but peft cannot be imported: {error}.", remedy="pip install peft") from error
    targets = list(settings.model.lora_targets) or "all-linear"
    config = LoraConfig(r=settings.model.lora_rank, lora_alpha=settings.model.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
    names = sorted({path.rpartition(".")[2] for path, module in model.named_modules() if getattr(getattr(module, "weight", None), "ndim", 0) == 2})
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []), _quiet():
        torch.manual_seed(settings.run.seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(f"model.lora_targets is {targets}: {error}", remedy=f"Layers of this model: {', '.join(names)}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """peft warns about GPT-2's transposed layers, which it then sets right itself, and looks at properties of the model that warn in turn."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name in the plain model, peft's layer around it)"""
    from peft.tuners.lora import Linear, LoraLayer

    embedding = model.get_input_embeddings().weight
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        base = module.get_base_layer()
        if not isinstance(module, Linear) or base.weight is embedding:
            what = "shares its weights with the input embedding" if isinstance(module, Linear) else f"is a {type(base).__name__}"
            raise ModelError(f"model.lora_targets: {path} {what}, adapters go into linear layers of their own.", remedy="Leave it out.")
        yield path, module
