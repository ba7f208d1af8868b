"""Rules that mark key steps: what each marks, and what is refused in which words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config_loading import load_settings
from headrace.errors import ConfigError
from headrace.marks import RuleError, StepView, calls_tool, observation_text, parse_rule, stands_out
from headrace.types import Observation


def step(observation: str = "", action: str = "", reward: float = 0.0) -> StepView:
    return StepView(observation=observation, action=action, reward=reward)


@pytest.mark.parametrize(
    ("rule", "marked", "unmarked"),
    [
        ("observation:[1-4]", step("door 3"), step("corridor", action="3")),
        ("observation:^Q: ", step("Q: who?"), step("A: Q: who?")),
        (r"action:(?i)\btherefore\b", step(action="Therefore x"), step("therefore", action="thereforefore")),
        ("action:a:b", step(action="a:b"), step(action="a")),
        ("tool:search", step(action='{"name": "search", "arguments": {}}'), step('{"name": "search"}', action="search")),
        ("tool: search ", step(action="search(1)"), step(action="research(1)")),
        ("reward:nonzero", step(reward=-0.5), step(reward=0.0)),
        ("reward:positive", step(reward=0.5), step(reward=-0.5)),
        ("reward:negative", step(reward=-0.5), step(reward=0.5)),
    ],
)
def test_each_kind_of_rule_marks_what_it_says(rule: str, marked: StepView, unmarked: StepView) -> None:
    parsed = parse_rule(rule)
    assert parsed.marks(marked) and not parsed.marks(unmarked)


def test_only_rules_on_the_observation_are_known_before_the_action() -> None:
    rules = ["observation:a", "action:a", "tool:a", "reward:nonzero"]
    assert [parse_rule(rule).is_known_before for rule in rules] == [True, False, False, False]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "search", "arguments": {"query": "x"}}',
        'I look it up.\n<tool_call>\n{"arguments": {"q": "{}"}, "name": "search"}\n</tool_call>',
        '[{"name": "open"}, {"name": "search"}]',
        '{"tool_calls": [{"type": "function", "function": {"name": "search", "arguments": "{}"}}]}',
        '{"name": "open"} {broken {"name": "search"}',
        "search('x')",
        "x = search(1)",
        "<tool_call>search\n<arg_key>q</arg_key>",
        "<tool_call>\n search</tool_call>",
        "<tool_call><function=search><parameter=q>x</parameter></function></tool_call>",
    ],
)
def test_every_documented_form_of_a_tool_call_is_seen(text: str) -> None:
    assert calls_tool(text, "search")


@pytest.mark.parametrize(
    "text",
    [
        "I will search for it (soon)",
        "search (soon)",
        "research('x')",
        "browser.search('x')",
        '{"name": "searching"}',
        '{"name": "open", "arguments": {"name": "search"}}',
        '{"name": "sear',
        '{"tool": "search"',
        "<tool_call>search_all",
        "<function=search_all>",
        '"name": "search"',
        "{" * 2000 + "search",
        '{"a":' * 3000 + '"search"',
    ],
)
def test_what_only_looks_like_a_call_of_the_tool_is_none(text: str) -> None:
    assert not calls_tool(text, "search")


def test_a_tool_with_a_dot_or_a_regex_character_in_its_name_is_taken_literally() -> None:
    assert calls_tool("browser.search('x')", "browser.search")
    assert not calls_tool("browser_search('x')", "browser.search")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("observation:[1-4", ("'observation:[1-4'", "no regular expression", "unterminated character set")),
        ("action:(", ("'action:('", "no regular expression")),
        ("observaton:x", ("'observaton'", "no kind of rule", "Did you mean 'observation:x'?")),
        ("colour:red", ("'colour'", "no kind of rule", "observation:, action:, tool:, reward:")),
        ("[1-4]", ("not of the form KIND:ARGUMENT",)),
        ("", ("not of the form KIND:ARGUMENT",)),
        ("tool:", ("says nothing", "tool:search")),
        ("observation: ", ("says nothing", "observation:[1-4]")),
        ("reward:positiv", ("'positiv'", "no reward event", "Did you mean 'reward:positive'?")),
        ("reward:1.0", ("'1.0'", "no reward event", "reward:nonzero, reward:positive, reward:negative")),
    ],
)
def test_a_wrong_rule_is_refused_with_the_settings_and_says_what_to_write(rule: str, says: tuple[str, ...]) -> None:
    with pytest.raises(RuleError) as raised:
        parse_rule(rule)
    with pytest.raises(ConfigError) as refused:
        load_settings("door", [f"marks.rules=['observation:fine', '''{rule}''']"])
    (problem,) = refused.value.problems
    assert problem.key == "marks.rules" and rule in str(problem.value) and refused.value.exit_code == 2
    for text in says:
        assert text in str(raised.value) and text in str(problem)


def test_all_wrong_rules_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings("door", ["marks.rules=['tool:', 'reward:much']"])
    assert [problem.limit is not None and problem.limit[:12] for problem in refused.value.problems] == ["rule 'tool:'", "rule 'reward"]


def test_rules_read_the_contents_of_a_chats_messages() -> None:
    chat = Observation(messages=({"role": "user", "content": "one"}, {"role": "tool", "content": "two"}))
    assert observation_text(chat) == "one\ntwo"
    assert observation_text(Observation(text="plain")) == "plain"


def test_members_far_from_their_groups_mean_stand_out() -> None:
    # mean 0.25, population deviation sqrt(3)/4 = 0.433: the one at 1 lies 1.73 from it, the others 0.58
    assert stands_out([0.0, 0.0, 0.0, 1.0], 1.7) == [False, False, False, True]
    assert stands_out([0.0, 0.0, 0.0, 1.0], 1.8) == [False] * 4
    assert stands_out([0.0, 0.0, 0.0, 1.0], 0.5) == [True] * 4
    assert stands_out([0.3, 0.3, 0.3], 0.1) == [False] * 3
    assert stands_out([], 1.0) == []


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.floats(0.1, 3), st.integers(-3, 3))
def test_standing_out_does_not_depend_on_the_scale_of_rewards(rewards: list[float], bound: float, exponent: int) -> None:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    near_the_bound = any(abs(abs(reward - mean) - bound * deviation) < 1e-9 for reward in rewards)
    if not near_the_bound and deviation > 1e-6:
        assert stands_out([reward * 2.0**exponent for reward in rewards], bound) == stands_out(rewards, bound)
