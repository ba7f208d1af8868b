"""Recipes, overrides and what is refused, with the words a user reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import config_loading
from headrace.config import Mode, Settings
from headrace.config_loading import dump_toml, fields, find_recipe, load_settings, plain_values, shipped_recipes
from headrace.errors import ConfigError, Problem

VALID = """
[model]
architecture = {model_type = "qwen2", hidden_size = 32}
characters = "abc"
[task]
source = "task:tasks"
reward = "task:reward"
options = {depth = 2}
[pool]
max_staleness = 4
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("")
    (tmp_path / "recipe.toml").write_text(VALID)
    return tmp_path / "recipe.toml"


def problems_of(*overrides: str, text: str | None = None) -> list[Problem]:
    if text is not None:
        Path("recipe.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings("recipe.toml", overrides)
    return caught.value.problems


def test_each_setting_says_where_it_came_from_and_the_last_one_wins(recipe: Path) -> None:
    resolved = load_settings("recipe.toml", ["pool.max_staleness=2", "pool.max_staleness=3", "run.mode=sync"])
    assert resolved.settings.pool.max_staleness == 3
    assert resolved.settings.run.mode is Mode.SYNC
    assert resolved.origins["pool.max_staleness"] == "command line"
    assert resolved.origins["model.characters"] == "recipe.toml"
    assert resolved.origins["pool.max_key_staleness"] == "default"
    assert set(resolved.origins) == {key for key, _, _ in fields()}
    assert resolved.recipe == recipe.resolve()
    assert resolved.task_module == recipe.with_name("task.py").resolve()


def test_unknown_key_offers_the_nearest_one_in_the_agreed_words(recipe: Path) -> None:
    (problem,) = problems_of(text=VALID.replace("max_staleness", "max_stalness"))
    assert str(problem) == "recipe.toml: unknown key 'pool.max_stalness'. Did you mean 'pool.max_staleness'?"
    assert problem.key == "pool.max_stalness" and problem.value == 4


@pytest.mark.parametrize(
    ("override", "offered"),
    [
        ("max_staleness=4", "pool.max_staleness"),
        ("learner.lr=1", None),
        ("learner.group_size=4", "rollout.group_size"),
        ("learner.learn_rate=1", "learner.learning_rate"),
        ("rollouts.max_steps=4", "[rollout]"),
    ],
)
def test_unknown_override_offers_the_key_that_was_meant(recipe: Path, override: str, offered: str | None) -> None:
    (problem,) = problems_of(override)
    assert problem.file == "command line"
    if offered is None:
        assert problem.remedy is not None and "learner.learning_rate" in problem.remedy
    else:
        assert problem.remedy == f"Did you mean '{offered}'?"


def test_path_below_a_plain_value_is_refused(recipe: Path) -> None:
    (problem,) = problems_of("pool.max_staleness.deep=4")
    assert problem.key == "pool.max_staleness" and problem.file == "command line"


def test_all_problems_of_file_and_command_line_come_at_once(recipe: Path) -> None:
    text = VALID.replace("max_staleness = 4", "max_stalness = 4\ngroups_per_batch = 0") + '[run]\nmode = "asynch"\n[learnr]\nx = 1\n'
    found = problems_of("rollout.group_size=yes", "rollout.top_k=5", "nonsense", text=text)
    assert {problem.key for problem in found} == {
        "pool.max_stalness", "pool.groups_per_batch", "run.mode", "learnr", "rollout.group_size", "rollout.top_k", "nonsense",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "limit"),
    [
        ("pool.max_staleness=-1", "a whole number, at least 0"),
        ("pool.max_staleness=1.5", "a whole number, at least 0"),
        ("pool.max_staleness=true", "a whole number, at least 0"),
        ('pool.max_staleness="4"', "a whole number, at least 0"),
        ("rollout.temperature=11", "a number, above 0, at most 10"),
        ("rollout.temperature=inf", "a finite number, above 0, at most 10"),
        ("rollout.temperature=nan", "a finite number, above 0, at most 10"),
        ("run.pin_devices=1", "true or false"),
        ("learner.loss=ppo", "one of reinforce, grpo, dr_grpo, rloo, ppo_clip, gspo, cispo, topr, decoupled_ppo"),
        ("learner.betas=[0.9]", "a list of 2"),
        ("rollout.stop_strings=[1]", "a list of strings"),
        ("model.architecture=3", "a table"),
        ("run.name=", "a text, not empty"),
        ("model.dtype=fp32", "one of float32, bfloat16, float16"),
        ("sampler.max_in_flight=0", "a whole number, at least 1"),
    ],
)
def test_value_outside_its_type_or_range_names_key_value_and_limit(recipe: Path, override: str, limit: str) -> None:
    (problem,) = problems_of(override)
    assert problem.key == override.partition("=")[0]
    assert problem.limit == limit
    assert f"it must be {limit}" in problem.message
    assert problem.remedy


def test_near_choice_is_offered(recipe: Path) -> None:
    (problem,) = problems_of("pool.selection=redy_first")
    assert problem.remedy == "Did you mean 'ready_first'?"


def test_rules_between_settings_are_refused_with_key_value_and_remedy(recipe: Path) -> None:
    found = problems_of("run.placement=colocated", "rollout.top_p=0.9")
    assert [problem.key for problem in found] == ["run.placement", "rollout.top_p"]
    assert found[0].file == "command line"
    assert "run.mode = 'sync'" in str(found[0])
    assert found[1].value == 0.9


def test_rule_that_may_follow_from_a_reported_problem_is_not_reported_too(recipe: Path) -> None:
    text = VALID.replace("source =", "sorce =")
    assert [problem.key for problem in problems_of(text=text)] == ["task.sorce"]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=a-b", "a-b"),
        ("run.name=5", "5"),
        ("run.name='quoted'", "quoted"),
        ("model.path=some/dir", "some/dir"),
        ("model.characters=none", None),
        ("learner.advantage=none", "none"),
        ("learner.learning_rate=1e-4", 1e-4),
        ("rollout.max_seconds=5", 5.0),
        ("rollout.stop_strings=['a', 'b']", ["a", "b"]),
        ("learner.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("sampler.max_in_flight=none", None),
        ("task.options.depth=3", 3),
        ("task.options.new.deep=x", "x"),
    ],
)
def test_override_values_are_toml_and_bare_words_are_texts(recipe: Path, override: str, value: Any) -> None:
    overrides = [override, "model.path=elsewhere"] if override == "model.characters=none" else [override]
    settings = load_settings("recipe.toml", overrides).settings
    assert config_loading.value_of(settings, override.partition("=")[0]) == value


def test_override_inside_a_table_keeps_its_other_keys(recipe: Path) -> None:
    resolved = load_settings("recipe.toml", ["model.architecture.num_hidden_layers=2"])
    assert resolved.settings.model.architecture == {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2}
    assert resolved.origins["model.architecture"] == "command line"


@pytest.mark.parametrize("content", [b"[pool\n", b"a = 1\na = 2\n", b"\xff\xfe"])
def test_broken_file_is_named_not_traced(recipe: Path, content: bytes) -> None:
    recipe.write_bytes(content)
    (problem,) = problems_of()
    assert problem.file == "recipe.toml" and problem.remedy


def test_missing_task_module_is_named(recipe: Path) -> None:
    recipe.with_name("task.py").unlink()
    (problem,) = problems_of()
    assert problem.key == "task.module" and str(recipe.with_name("task.py").resolve()) in problem.message


def test_recipe_is_a_path_then_a_directory_then_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = tmp_path / "shipped" / "door" / "recipe.toml"
    monkeypatch.setattr(config_loading, "shipped_recipes", lambda: {"door": shipped})
    assert find_recipe("door") == shipped
    Path("door").mkdir()
    assert find_recipe("door") == shipped, "a directory without recipe.toml does not hide a shipped recipe"
    Path("door/recipe.toml").write_text("")
    assert find_recipe("door") == tmp_path / "door" / "recipe.toml"
    Path("other.toml").write_text("")
    assert find_recipe("other.toml") == tmp_path / "other.toml"
    with pytest.raises(ConfigError, match=r"there is no recipe 'dor'. Did you mean 'door'\?"):
        find_recipe("dor")
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=r"directory 'empty' holds no recipe.toml"):
        find_recipe("empty")


def test_every_shipped_recipe_loads_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in shipped_recipes().items():
        resolved = load_settings(name)
        assert resolved.recipe == path and resolved.name == name


def test_a_run_that_goes_on_or_is_made_again_has_the_name_of_its_recipe(tmp_path: Path) -> None:
    resolved = load_settings("door")
    (tmp_path / "config.toml").write_text(dump_toml(resolved.anchored()), encoding="utf-8")
    assert load_settings(tmp_path / "config.toml").name == "door"


def load_back(settings: Settings, directory: Path) -> Settings:
    (directory / "config.toml").write_text(dump_toml(settings), encoding="utf-8")
    (directory / "task.py").touch()
    return load_settings(directory / "config.toml").settings


def test_dumped_settings_load_back_equal(recipe: Path, tmp_path: Path) -> None:
    resolved = load_settings("recipe.toml", ["learner.epsilon=1e-8", "task.options.text='a \"b\"\\n'", "task.options.list=[[1], {a = 2}]"])
    assert load_back(resolved.settings, tmp_path) == resolved.settings


plain = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(options=st.dictionaries(st.text(), plain, max_size=4), characters=st.text(min_size=1), rate=st.floats(1e-300, 1e300))
def test_any_settings_load_back_equal(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], characters: str, rate: float) -> None:
    tree = {
        "model": {"architecture": {"model_type": "x"}, "characters": characters},
        "task": {"source": "task:a", "reward": "task:b", "options": options},
        "learner": {"learning_rate": rate},
    }
    settings = Settings.model_validate(tree)
    assert load_back(settings, tmp_path_factory.mktemp("dump")) == settings


def test_anchored_settings_load_from_another_directory(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(VALID.replace('"task:tasks"', '"tasks.jsonl"'))
    recipe.with_name("tasks.jsonl").write_text("")
    anchored = load_settings("recipe.toml").anchored()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_toml(anchored))
    again = load_settings(run / "config.toml")
    assert again.task_module == recipe.with_name("task.py").resolve()
    assert again.settings.task.source == os.fspath(recipe.with_name("tasks.jsonl").resolve())


def test_plain_values_hold_every_setting(recipe: Path) -> None:
    values = plain_values(load_settings("recipe.toml").settings)
    assert list(values) == [key for key, _, _ in fields()]
    assert values["pool.selection"] == "ready_first" and values["model.path"] is None


def test_every_setting_has_a_description_and_a_limit_in_words() -> None:
    for key, field, schema in fields():
        assert field.description, key
        assert config_loading._limit(schema), key
