"""A learner's checkpoint: a Hugging Face directory that any tool loads, plus what the optimizer needs to go on exactly.

    config.json, model*.safetensors, tokenizer files     as transformers writes them (with LoRA: the merged model)
    adapter/                                             with LoRA: the adapter alone, as peft loads it
    optimizer.safetensors                                AdamW's moments and step counts by parameter name; data, not code
    learner.json                                         schema, version, ancestry, settings, what the guard of updates knows
    manifest.json                                        size and SHA-256 of all these, written last, checked before anything is loaded

Written to a directory beside the target, flushed to disk, then renamed: whole or absent.

For checkpoint.memory_copy the same state, of the parameters that are trained, is packed into one piece (state_memory.py keeps it).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from headrace.errors import CheckpointError
from headrace.learner.lora import ADAPTER_FOLDER, Adapters
from headrace.manifest import find_damage, write_manifest
from headrace.types import PolicyVersion

SCHEMA = 1
OPTIMIZER_FILE = "optimizer.safetensors"
LEARNER_FILE = "learner.json"
_WEIGHT = "weight"
"""Before the name of a parameter, where AdamW's moments have `exp_avg` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """learner.json"""

    version: PolicyVersion
    ancestry: dict[int, int]
    """lineage -> number of the version it started from."""
    settings: dict[str, Any]
    learning_rate_factor: float
    """What rollbacks had multiplied the learning rate by."""
    guard: dict[str, list[float]]
    """Of learner/guard.py; empty in a checkpoint of a headrace that kept nothing of it."""


def save_checkpoint(
    directory: Path, model: Any, tokenizer: Any | None, optimizer: torch.optim.Optimizer, state: LearnerState, *, adapters: Adapters | None = None
) -> None:
    """Writes the directory, replacing one of that name. Raises CheckpointError; then the old one, if any, is still there."""
    partial = directory.parent / f".{directory.name}.partial"
    replaced = directory.parent / f".{directory.name}.replaced"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if adapters is None:
            model.save_pretrained(partial)
        else:
            adapters.save(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        save_file(_moments(model, optimizer), partial / OPTIMIZER_FILE)
        (partial / LEARNER_FILE).write_text(_state_to_json(state), encoding="utf-8")
        write_manifest(partial)
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        _flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{directory}: the checkpoint cannot be written: {error}.", remedy="Free disk space or choose another run directory.") from error


def load_checkpoint(directory: Path, model: Any, optimizer: torch.optim.Optimizer, *, adapters: Adapters | None = None) -> LearnerState:
    """Puts weights and optimizer state into `model` and `optimizer`, in place. Raises CheckpointError before anything is changed."""
    from transformers import AutoModelForCausalLM

    parameters = dict(model.named_parameters())
    if (damage := find_damage(directory)) is not None:
        raise CheckpointError(f"{directory}: not a whole learner checkpoint: {damage}.", remedy="Name another checkpoint of the run.")
    try:
        state = _read_state(directory)
        if (directory / ADAPTER_FOLDER).is_dir() != (adapters is not None):
            there, here = ("an", "trains all weights") if adapters is None else ("no", "trains LoRA adapters")
            raise CheckpointError(f"{directory}: it holds {there} adapter, this run {here}.", remedy="Set model.lora_rank as it was.")
        moments = load_file(directory / OPTIMIZER_FILE)
        dtype = next(iter(parameters.values())).dtype
        stored = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True, trust_remote_code=False)
        saved = dict(stored.named_parameters())
        if adapters is not None:
            adapters.load(directory, saved)
        else:
            _load_parameters(directory, parameters, saved)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: not a whole learner checkpoint: {error}.", remedy="Name another checkpoint of the run.") from error
    _load_moments(optimizer, parameters, moments)
    return state


def pack_state(model: Any, optimizer: torch.optim.Optimizer, state: LearnerState) -> bytes:
    """Length of learner.json in 8 bytes, learner.json, safetensors of the trained parameters and AdamW's moments."""
    text = _state_to_json(state).encode()
    weights = {f"{_WEIGHT}.{name}": parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return b"".join((len(text).to_bytes(8, "little"), text, save({**weights, **_moments(model, optimizer)})))


def unpack_state(packed: bytes, model: Any, optimizer: torch.optim.Optimizer) -> LearnerState:
    """Puts it into a model of the same run, in place."""
    start = 8 + int.from_bytes(packed[:8], "little")
    tensors, parameters = load(packed[start:]), dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.copy_(tensors.pop(f"{_WEIGHT}.{name}"))
    _load_moments(optimizer, parameters, tensors)
    return _state_from_json(packed[8:start].decode())


def _read_state(directory: Path) -> LearnerState:
    text = (directory / LEARNER_FILE).read_text(encoding="utf-8")
    if (schema := json.loads(text)["schema"]) != SCHEMA:
        raise CheckpointError(f"{directory / LEARNER_FILE}: schema {schema}, this headrace reads {SCHEMA}.")
    return _state_from_json(text)


def _state_to_json(state: LearnerState) -> str:
    return json.dumps(
        {
            "schema": SCHEMA, "version": list(state.version), "ancestry": sorted(state.ancestry.items()),
            "learning_rate_factor": state.learning_rate_factor, "guard": state.guard, "settings": state.settings,
        },
        indent=1,
    )  # fmt: skip


def _state_from_json(text: str) -> LearnerState:
    learner = json.loads(text)
    return LearnerState(
        version=PolicyVersion(*learner["version"]),
        ancestry={int(lineage): int(number) for lineage, number in learner["ancestry"]},
        settings=learner["settings"],
        learning_rate_factor=float(learner.get("learning_rate_factor", 1.0)),
        guard={name: [float(value) for value in values] for name, values in learner.get("guard", {}).items()},
    )


def _load_parameters(directory: Path, parameters: dict[str, torch.nn.Parameter], saved: dict[str, torch.Tensor]) -> None:
    different = [name for name in parameters if name not in saved or saved[name].shape != parameters[name].shape]
    if different or len(saved) != len(parameters):
        raise CheckpointError(f"{directory}: it holds another model than this run's (first difference: {(different or ['number of parameters'])[0]}).")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def load_tokenizer(model_path: str) -> Any | None:
    """The tokenizer that lies beside a model; None when there is none."""
    from transformers import AutoTokenizer

    if Path(model_path).is_dir() and not any(Path(model_path).glob("*token*")):
        return None
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)


def _moments(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _load_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], moments: Mapping[str, torch.Tensor]) -> None:
    optimizer.state.clear()
    for key, value in moments.items():
        kind, _, name = key.partition(".")
        target = parameters[name]
        # AdamW keeps its step count on the CPU
        optimizer.state[target][kind] = value.clone() if kind == "step" else value.to(device=target.device, dtype=target.dtype)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
