"""What can be served, and how a model that cannot be says so at start: by name of what is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, T5Config, T5ForConditionalGeneration

from fakes.sampling import beside, make_sampler, request
from fakes.tiny_models import CONTEXT, LETTERS, VOCABULARY, tiny_model, tiny_tokenizer
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.errors import ModelError
from headrace.runtime.local import sampling_parameters
from headrace.sampler.model import ServedModel


def refused(path: Path, *says: str, **settings: Any) -> None:
    with pytest.raises(ModelError) as caught:
        make_sampler(path=path, **settings)
    for text in (str(path), *says):
        assert text in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("bloom", "no position_ids"),
        ("mamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("qwen3_next", "recurrent state"),
        ("phimoe", "layer 0 (sliding_attention) tells attention a sliding window of all tokens, its config says 7"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name_of_what_is_missing(kind: str, missing: str) -> None:
    refused(tiny_model(kind), missing)


def test_an_encoder_decoder_is_refused_as_one(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    refused(tmp_path, "'t5' is an encoder-decoder")


@pytest.mark.parametrize(("kind", "says"), [("qwen2_vl", "part for images"), ("gemma3", "part for images"), ("vit", "no causal language model")])
def test_a_model_of_images_is_refused_before_its_weights_are_read(kind: str, says: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    refused(tmp_path, f"'{kind}'", says)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "cannot be loaded")


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "from_the_future"}))
    refused(tmp_path, "from_the_future")


def test_a_damaged_weights_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(tiny_model("qwen2"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(tmp_path, "cannot be loaded")


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=f"exceeds the model's {CONTEXT} positions"):
        ServedModel(str(tiny_model("qwen2")), max_context_tokens=CONTEXT + 1, device="cpu", dtype="float32")


def test_a_window_that_only_a_mask_would_apply_matters_once_the_context_is_longer(tmp_path: Path) -> None:
    """phimoe leaves its window to a mask that is not made here. The window is wider than the probe at start, as real ones are."""
    shutil.copytree(tiny_model("phimoe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 40}))
    ServedModel(str(tmp_path), max_context_tokens=40, device="cpu", dtype="float32")
    with pytest.raises(ModelError, match="its config says 40, and the context of 41 tokens is longer"):
        ServedModel(str(tmp_path), max_context_tokens=41, device="cpu", dtype="float32")


@pytest.mark.parametrize("device", ["gpu", "cuda:97"])
def test_a_device_that_is_not_there_is_refused_by_name(device: str) -> None:
    with pytest.raises(ModelError, match=f"device '{device}' cannot be used"):
        ServedModel(str(tiny_model("qwen2")), max_context_tokens=CONTEXT, device=device, dtype="float32")


def test_a_tokenizer_of_another_model_is_refused() -> None:
    larger = SimpleNamespace(vocab_size=VOCABULARY + 1, eos_token_id=None)
    with pytest.raises(ModelError, match=f"the tokenizer knows {VOCABULARY + 1} tokens, the model {VOCABULARY}"):
        make_sampler(tokenizer=larger)
    far_end = SimpleNamespace(vocab_size=VOCABULARY, eos_token_id=VOCABULARY)
    with pytest.raises(ModelError, match=f"end token is {VOCABULARY}"):
        make_sampler(tokenizer=far_end)


def test_a_tokenizer_with_added_tokens_beyond_the_model_is_served() -> None:
    """The tokenizers of families that also see hold image tokens which the text model has not."""
    tokenizer = type(tiny_tokenizer())(tokenizer_object=tiny_tokenizer().backend_tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str()))
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert len(tokenizer) > VOCABULARY
    completion = run_virtual(beside(sampler := make_sampler(tokenizer=tokenizer), sampler.sample(request([1], max_action_tokens=3))))
    assert len(completion.tokens) == 3


@pytest.mark.parametrize(("kind", "direct"), [("qwen2", True), ("gemma2", False)])
def test_a_cap_on_the_logits_is_found_even_where_fresh_weights_make_them_tiny(kind: str, direct: bool, tmp_path: Path) -> None:
    """With weights this small a cap at 3 changes logits by less than rounding; after training it would not."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
    model.save_pretrained(tmp_path)
    served = ServedModel(str(tmp_path), max_context_tokens=CONTEXT, device="cpu", dtype="float32")
    assert served._direct is direct


def test_letters_and_vocabulary_of_the_tiny_models_fit() -> None:
    assert len(LETTERS) == VOCABULARY


def test_a_tokenizer_without_end_token_is_refused_only_where_nothing_else_would_end_an_action() -> None:
    def settings(**rollout: Any) -> Settings:
        return Settings.model_validate({"rollout": rollout})

    with pytest.raises(ModelError, match="tokenizer has no end token"):
        sampling_parameters(settings(), ())
    assert sampling_parameters(settings(), (5,))[0].stop_tokens == (5,)
    assert sampling_parameters(settings(stop_strings=["."]), ())[0].stop_strings == (".",)
    assert sampling_parameters(settings(stop_at_end_token=False), ())[0].stop_tokens == ()
