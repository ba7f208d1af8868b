"""docs/settings.md says of every setting and every rule what the code says."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from headrace.cli.settings_reference import BROKEN, COMMAND, broken_rules, reference, unit_of
from headrace.config import Settings
from headrace.config_loading import fields

DOCUMENT = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_document_is_what_the_settings_say_now() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reference(), f"docs/settings.md is out of date; write it again: {COMMAND}"


def test_every_setting_has_one_line_under_its_section() -> None:
    sections = {block.split("\n", 1)[0]: block for block in reference().split("\n## ")[1:]}
    for key, _, _ in fields():
        section, _, name = key.partition(".")
        assert sections[section].count(f"\n| `{name}` |") == 1, key


def test_the_smallest_valid_settings_break_no_rule() -> None:
    assert broken_rules({}) == []


@pytest.mark.parametrize("example", BROKEN, ids=lambda example: " ".join(f"{section}.{key}" for section, keys in example.items() for key in keys))
def test_each_example_breaks_exactly_one_rule(example: dict[str, dict[str, object]]) -> None:
    assert len(broken_rules(example)) == 1


def test_every_rule_has_an_example() -> None:
    shown = {(key, remedy) for example in BROKEN for key, _, remedy in broken_rules(example)}
    num_rules = inspect.getsource(Settings.check_rules).count("broken.append(")
    assert len(shown) == num_rules, "Settings.check_rules changed: give each rule an example in settings_reference.BROKEN"


def test_settings_whose_name_or_description_says_a_unit_show_it() -> None:
    assert unit_of("rollout.max_seconds", "Longest wait.") == "seconds"
    assert unit_of("pool.max_staleness", "How old.") == "updates"
    assert unit_of("run.num_samplers", "Workers.") == "samplers"
    assert unit_of("pool.groups_per_batch", "Groups the learner takes.") == "groups"
    assert unit_of("learner.epsilon", "Of AdamW.") is None
