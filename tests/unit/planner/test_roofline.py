"""Sizes from a config.json, and a roofline that published latencies lie near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.model_configs import DEEPSEEK_V3, GPT_2, LLAMA_8B, QWEN_7B, QWEN_30B_A3B
from headrace.errors import ConfigError
from headrace.planner.distributions import Distribution
from headrace.planner.hardware import DEVICES
from headrace.planner.roofline import Engine, estimate_profile, with_tensor_parallel
from headrace.planner.shapes import ModelShape


def engine(config: dict[str, Any], device: str, **changes: Any) -> Engine:
    return Engine(shape=ModelShape.from_config(config), device=DEVICES[device], **changes)


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [(QWEN_7B, 7.62, 7.07), (LLAMA_8B, 8.03, 7.50), (QWEN_30B_A3B, 30.5, 3.04), (DEEPSEEK_V3, 671.0, 36.6), (GPT_2, 0.124, 0.124)],
)
def test_parameters_follow_from_the_config(config: dict[str, Any], billions: float, active_billions: float) -> None:
    shape = ModelShape.from_config(config)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions, rel=0.01)


def test_grouped_queries_and_latent_attention_shrink_the_kv_cache() -> None:
    assert engine(QWEN_7B, "A100").kv_bytes_per_token == 56 * 1024  # as vLLM reports for this model
    assert engine(DEEPSEEK_V3, "H100").kv_bytes_per_token == 61 * 576 * 2


def test_experts_read_by_a_step_rise_from_those_of_one_token_to_all() -> None:
    shape = ModelShape.from_config(QWEN_30B_A3B)
    assert shape.touched_parameters(1) == pytest.approx(shape.active_parameters)
    assert shape.touched_parameters(512) == pytest.approx(shape.num_parameters - shape.embedding_parameters, rel=1e-3)


@pytest.mark.parametrize(("running", "milliseconds"), [(1, 11.64), (10, 13.09), (20, 13.97), (30, 14.80), (50, 17.04), (75, 19.98), (100, 21.76), (200, 34.84)])
def test_decode_latency_of_a_7b_model_on_an_a100_lies_within_the_interval(running: int, milliseconds: float) -> None:
    """Published, vLLM, about 1.5k context: github.com/dennislee22/vLLM-benchmarking, test 5."""
    one = engine(QWEN_7B, "A100")
    assert 1e3 * one.decode_seconds(running, 1536) == pytest.approx(milliseconds, rel=one.efficiencies.decode_error)


def test_an_estimated_profile_is_marked_and_carries_wide_intervals() -> None:
    profile = estimate_profile(engine(QWEN_7B, "H100"), name="7b", prompt_tokens=Distribution.constant(200), answer_tokens=Distribution.lognormal(1000, 800))
    assert profile.estimated and profile.source.kind == "estimated"
    assert profile.decode.fit.relative_error >= 0.25 and profile.learn.fit.relative_error >= 0.3
    for point in profile.decode.points:
        assert profile.decode.fit.seconds(point.running, point.context_tokens) == pytest.approx(point.seconds, rel=0.05)


def test_more_devices_an_engine_decode_faster_and_hold_more_but_not_in_proportion() -> None:
    one, two = engine(QWEN_7B, "H100"), engine(QWEN_7B, "H100", tensor_parallel=2)
    assert 0.5 < two.decode_seconds(64, 2000) / one.decode_seconds(64, 2000) < 1.0
    assert two.kv_capacity_tokens() > 2 * one.kv_capacity_tokens()


def test_tensor_parallelism_of_a_measured_profile_frees_memory_for_the_kv_cache() -> None:
    profile = estimate_profile(engine(QWEN_7B, "A100"), name="7b", prompt_tokens=Distribution.constant(200), answer_tokens=Distribution.constant(1000))
    doubled = with_tensor_parallel(profile, 2)
    assert doubled.estimated and doubled.model.tensor_parallel == 2
    assert profile.decode.kv_capacity_tokens and doubled.decode.kv_capacity_tokens
    assert doubled.decode.kv_capacity_tokens == pytest.approx(engine(QWEN_7B, "A100", tensor_parallel=2).kv_capacity_tokens(), rel=0.01)
    assert 0.5 < doubled.decode.fit.seconds(32, 1000) / profile.decode.fit.seconds(32, 1000) < 0.7
    assert with_tensor_parallel(profile, 1) is profile


def test_weights_that_do_not_fit_are_refused_with_a_number_of_devices_that_does() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate_profile(engine(DEEPSEEK_V3, "H100"), name="v3", prompt_tokens=Distribution.constant(200), answer_tokens=Distribution.constant(1000))
    problem = caught.value.problems[0]
    assert problem.key == "--tensor-parallel" and problem.remedy
    parallel = int(problem.remedy.split("--tensor-parallel ")[1].split(",")[0])
    assert engine(DEEPSEEK_V3, "H100", tensor_parallel=parallel).kv_capacity_tokens() > 1200


@pytest.mark.parametrize(
    ("text", "key"),
    [(None, "MODEL"), ("{", "MODEL"), ("[]", "MODEL"), ("{}", "hidden_size"), (json.dumps(QWEN_7B | {"num_hidden_layers": "many"}), "num_hidden_layers")],
)
def test_a_config_without_sizes_is_refused_with_file_and_key(tmp_path: Path, text: str | None, key: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ModelShape.load(tmp_path)
    problem = caught.value.problems[0]
    assert problem.key == key and problem.file == str(tmp_path / "config.json")
