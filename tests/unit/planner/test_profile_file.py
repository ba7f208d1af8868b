"""profile.json: what is written is what is read, and what is wrong is named with key, value, limit and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.model_configs import QWEN_7B
from headrace.errors import ConfigError
from headrace.planner.distributions import Distribution
from headrace.planner.hardware import DEVICES, find_device
from headrace.planner.profile import Profile, load_profile, profile_as_json, profile_from_json, save_profile
from headrace.planner.roofline import Engine, estimate_profile
from headrace.planner.shapes import ModelShape


@pytest.fixture(scope="module")
def profile() -> Profile:
    engine = Engine(shape=ModelShape.from_config(QWEN_7B), device=DEVICES["H100"])
    return estimate_profile(engine, name="7b", prompt_tokens=Distribution.constant(200), answer_tokens=Distribution.lognormal(1000, 800))


def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "new" / "profile.json")
    assert load_profile(tmp_path / "new" / "profile.json") == profile


def test_the_file_has_the_keys_of_the_contract(profile: Profile) -> None:
    values = profile_as_json(profile)
    keys: dict[str, set[str]] = {
        "source": {"kind", "from"},
        "hardware": {"device", "count", "memory_bytes"},
        "model": {"num_parameters", "kv_bytes_per_token"},
        "decode": {"points", "fit", "kv_capacity_tokens", "saturation"},
        "prefill": {"overhead_seconds", "tokens_per_second"},
        "learn": {"points", "fit"},
        "weight_update": {"bytes", "publish_seconds", "transfer_seconds", "pause_seconds"},
        "distributions": {"prompt_tokens", "answer_tokens", "steps", "tool_wait_seconds"},
        "group": {"size", "tailness"},
    }
    assert values["schema"] == 1
    for key, inside in keys.items():
        assert inside <= values[key].keys(), key
    assert {"running", "context_tokens", "seconds", "count"} <= values["decode"]["points"][0].keys()
    assert {"ranks", "micro_batch_tokens", "tokens", "seconds"} <= values["learn"]["points"][0].keys()
    assert values["distributions"]["steps"].keys() == {"mean", "quantiles", "drift_per_update"}


def test_keys_of_a_later_version_are_passed_over(profile: Profile) -> None:
    values = profile_as_json(profile) | {"later": 1}
    values["decode"]["later"] = 2
    assert profile_from_json(values) == profile


def changed(profile: Profile, path: str, value: Any) -> dict[str, Any]:
    values = profile_as_json(profile)
    *folders, last = path.split(".")
    inside = values
    for folder in folders:
        inside = inside[folder]
    inside[last] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "limit"),
    [
        ("group.size", 0, ">= 1"),
        ("decode.fit.floor_seconds", -1.0, ">= 0"),
        ("decode.saturation.tokens_per_second", 0.0, "> 0"),
        ("schema", 2, "1"),
        ("distributions.steps.quantiles", [[0.0, 1.0], [0.5, 2.0]], None),
        ("distributions.steps.quantiles", [[0.0, 3.0], [1.0, 2.0]], None),
        ("learn.points", [], "at least 1"),
        ("source.kind", "guessed", None),
        ("weight_update.bytes", "many", None),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_limit(profile: Profile, path: str, value: Any, limit: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_from_json(changed(profile, path, value), file="p.json")
    problem = caught.value.problems[0]
    assert problem.key == path and problem.file == "p.json" and problem.limit == limit and problem.remedy
    assert caught.value.exit_code == 2


def test_every_missing_key_is_named_at_once(profile: Profile) -> None:
    values = profile_as_json(profile)
    del values["group"], values["decode"]["fit"]
    with pytest.raises(ConfigError) as caught:
        profile_from_json(values)
    assert {problem.key for problem in caught.value.problems} == {"group", "decode.fit"}


@pytest.mark.parametrize("text", [None, "{", "[1]", "{}", '{"schema": 1}', json.dumps({"event": "run_started"})])
def test_what_is_no_profile_is_refused_with_a_remedy(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert caught.value.problems[0].file == str(path) and caught.value.problems[0].remedy


def test_devices_are_known_by_name_in_any_case_and_near_misses_are_named() -> None:
    assert find_device("h200").name == "H200"
    assert {"H100", "H200", "A100", "H20", "B200", "L40S"} <= DEVICES.keys()
    with pytest.raises(ConfigError, match="Did you mean 'H100'"):
        find_device("H10")


def test_a_device_of_ones_own_is_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\npeak_flops = {bfloat16 = 1e14}\nmemory_bandwidth = 1e12\nmemory_bytes = 2.4e10\n')
    device = find_device(str(path))
    assert device.name == "mine" and device.flops("bfloat16") == device.flops("float32") == 1e14


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('name = "x"\npeak_flops = {bf16 = 1e14}\nmemory_bandwidth = 1e12\nmemory_bytes = 1e10', "peak_flops"),
        ('name = "x"\npeak_flops = {}\nmemory_bandwidth = 1e12\nmemory_bytes = 1e10', "peak_flops"),
        ('name = "x"\npeak_flops = {bfloat16 = 1e14}\nmemory_bandwith = 1e12\nmemory_bytes = 1e10', "memory_bandwith"),
        ('name = "x"\npeak_flops = {bfloat16 = 1e14}\nmemory_bandwidth = -1\nmemory_bytes = 1e10', "memory_bandwidth"),
        ("name =", None),
    ],
)
def test_a_wrong_device_file_names_file_and_key(tmp_path: Path, text: str, key: str | None) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        find_device(str(path))
    assert caught.value.problems[0].file == str(path)
    assert key is None or key in {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("name", ["answer_tokens", "steps"])
def test_a_profile_that_samples_nothing_is_refused(profile: Profile, name: str) -> None:
    values = profile_as_json(profile)
    values["distributions"][name]["mean"] = 0
    with pytest.raises(ConfigError) as refused:
        profile_from_json(values, file="p.json")
    (problem,) = refused.value.problems
    assert (problem.file, problem.key, problem.limit) == ("p.json", f"distributions.{name}.mean", "> 0")
