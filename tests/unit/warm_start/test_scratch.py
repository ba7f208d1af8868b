"""Character tokenizers and models from scratch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import Settings
from headrace.errors import ModelError
from headrace.learner.scratch import build_model, character_tokenizer

CHARACTERS = "abc ABC\n.é的,!'→\t😀<>"
TINY = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}


def scratch_settings(characters: str = CHARACTERS, seed: int = 0, dtype: str = "float32", **architecture: Any) -> Settings:
    return Settings.model_validate({"model": {"architecture": TINY | architecture, "characters": characters, "dtype": dtype}, "warm_start": {"seed": seed}})


@given(strategies.text(alphabet=CHARACTERS, max_size=40))
@settings(max_examples=60, deadline=None)
def test_every_text_of_the_alphabet_is_one_token_a_character_and_comes_back(text: str) -> None:
    tokenizer = character_tokenizer(CHARACTERS)
    tokens = tokenizer.encode(text, add_special_tokens=True)
    assert tokens == [CHARACTERS.index(character) for character in text]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_pad_and_end_follow_the_characters_and_are_left_out_of_decoded_text() -> None:
    tokenizer = character_tokenizer("ab")
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (2, 3, 4)
    assert tokenizer.encode("ab<end>") == [0, 1, 3]
    assert tokenizer.decode([0, 1, 3], skip_special_tokens=True) == "ab"


def test_a_character_outside_the_alphabet_is_refused_not_dropped() -> None:
    with pytest.raises(Exception, match=r"(?i)unk"):
        character_tokenizer("ab").encode("axb")


@pytest.mark.parametrize("characters", ["", "aba"])
def test_an_empty_or_ambiguous_alphabet_is_refused(characters: str) -> None:
    with pytest.raises(ModelError, match=r"model\.characters"):
        character_tokenizer(characters)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "phi3"])
def test_the_directory_loads_with_transformers_own_classes(tmp_path: Path, model_type: str) -> None:
    build_model(scratch_settings(model_type=model_type), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) == len(CHARACTERS) + 2
    assert (model.config.pad_token_id, model.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    tokens = tokenizer.encode("  a Bé的→😀\n\tb,c!'C<a")
    assert tokenizer.decode(tokens) == "  a Bé的→😀\n\tb,c!'C<a"
    assert model(input_ids=torch.tensor([tokens])).logits.shape == (1, len(tokens), len(tokenizer))


def test_an_alphabet_that_transformers_would_break_on_loading_is_refused(tmp_path: Path) -> None:
    build_model(scratch_settings(".12AB", model_type="qwen2"), tmp_path / "fits")
    with pytest.raises(ModelError, match="Qwen2Tokenizer"):
        build_model(scratch_settings("a b", model_type="qwen2"), tmp_path / "broken")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


def test_the_seed_alone_decides_the_weights_and_the_global_stream_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_model(scratch_settings(), tmp_path / "first")
    assert torch.equal(torch.rand(1), expected)
    build_model(scratch_settings(), tmp_path / "again")
    build_model(scratch_settings(seed=1), tmp_path / "other")
    first, again, other = (weights(tmp_path / name) for name in ("first", "again", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_weights_are_written_in_the_dtype_of_the_settings(tmp_path: Path) -> None:
    build_model(scratch_settings(dtype="bfloat16"), tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"model_type": "lama"}, "no model_type 'lama'"),
        ({"hiden_size": 16}, "Did you mean 'hidden_size'"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 3}, "model.architecture"),
    ],
)
def test_a_wrong_architecture_is_refused_by_name(tmp_path: Path, architecture: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(scratch_settings(**architecture), tmp_path)


def test_keys_that_an_architecture_reads_without_declaring_them_are_accepted(tmp_path: Path) -> None:
    build_model(scratch_settings(model_type="qwen2", characters="ab", head_dim=4), tmp_path)
    assert weights(tmp_path)["model.layers.0.self_attn.q_proj.weight"].shape == (8, 16)
