"""Where text becomes tokens and tokens become text."""

from __future__ import annotations

import pytest

from fakes.rollouts import CharacterTokenizer
from headrace.rollout.render import read_action, render_observation
from headrace.types import Completion, Observation, PolicyVersion, SamplingParameters, StopReason, VersionSpan


def completion(text: str, *special: int) -> Completion:
    tokens = (*(ord(character) for character in text), *special)
    spans = (VersionSpan(version=PolicyVersion(0, 0), start=0, end=len(tokens)),) if tokens else ()
    return Completion(tokens=tokens, logprobs=(-1.0,) * len(tokens), version_spans=spans, stop_reason=StopReason.STOP)


def test_special_tokens_stand_only_before_the_first_prompt() -> None:
    observation = Observation(text="ab")
    assert render_observation(CharacterTokenizer(), observation, first=True) == [1, 97, 98]
    assert render_observation(CharacterTokenizer(), observation, first=False) == [97, 98]


@pytest.mark.parametrize(
    ("text", "special", "stop_strings", "stop_tokens", "seen"),
    [
        ("abc", (0,), (), (0,), "abc"),
        ("abc", (), (), (0,), "abc"),
        ("abc;", (), (";",), (), "abc"),
        ("abc;de", (), (";",), (), "abc"),  # a stop string in the middle of a token's text
        ("a;b\nc", (), ("\n", ";"), (), "a"),
        ("abZ", (), (), (ord("Z"),), "ab"),  # a stop token that is an ordinary character
        ("aZb", (), (), (ord("Z"),), "aZb"),  # only at the end does it stop
        ("", (0,), (), (0,), ""),
    ],
)
def test_an_environment_sees_no_stop_string_and_no_stop_token(
    text: str, special: tuple[int, ...], stop_strings: tuple[str, ...], stop_tokens: tuple[int, ...], seen: str
) -> None:
    drawn = completion(text, *special)
    action = read_action(CharacterTokenizer(), drawn, SamplingParameters(stop_strings=stop_strings, stop_tokens=stop_tokens))
    assert action.text == seen
    assert action.tokens == drawn.tokens
