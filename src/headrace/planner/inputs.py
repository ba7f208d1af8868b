"""The inputs of a prediction by name: what `--what-if` changes, and what sensitivities are taken of.

A factor multiplies a length or a time: `decode=0.8x` means that a decode step takes 0.8 times as long.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError, Problem
from headrace.planner.distributions import Distribution
from headrace.planner.profile import Profile

_MOST = 1000.0
"""Beyond a factor of that, or its inverse, nothing measured says anything."""


@dataclass(frozen=True, slots=True)
class Input:
    meaning: str
    apply: Callable[[Profile, float], Profile]


def _lengths(profile: Profile, **changed: Distribution) -> Profile:
    return profile.with_distributions(replace(profile.distributions, **changed))


def _answers(profile: Profile, factor: float) -> Profile:
    """Steps of as many tokens as before: a longer answer has more of them where there are several."""
    lengths = profile.distributions
    longer = {"answer_tokens": lengths.answer_tokens.scaled(factor)}
    extra = lengths.answer_tokens.mean * (factor - 1.0)
    if lengths.steps.mean > 1.5:
        longer |= {"steps": lengths.steps.scaled(factor), "prompt_tokens": lengths.prompt_tokens.scaled(factor)}
        extra += lengths.prompt_tokens.mean * (factor - 1.0)
    return _learned_tokens(_lengths(profile, **longer), profile, extra)


def _prompts(profile: Profile, factor: float) -> Profile:
    prompts = profile.distributions.prompt_tokens
    return _learned_tokens(_lengths(profile, prompt_tokens=prompts.scaled(factor)), profile, prompts.mean * (factor - 1.0))


def _learned_tokens(changed: Profile, before: Profile, extra: float) -> Profile:
    """The learner's tokens grow in the same proportion as all tokens of a trajectory."""
    each = before.learn.tokens_per_trajectory
    total = before.distributions.prompt_tokens.mean + before.distributions.answer_tokens.mean
    if not each or total <= 0:
        return changed
    return replace(changed, learn=replace(changed.learn, tokens_per_trajectory=each * (1.0 + extra / total)))


def _tools(profile: Profile, factor: float) -> Profile:
    return _lengths(profile, tool_wait_seconds=profile.distributions.tool_wait_seconds.scaled(factor))


def _tail(profile: Profile, factor: float) -> Profile:
    """How far the longest of a group exceeds the mean."""
    group = profile.group
    seconds = None if group.seconds_tailness is None else 1.0 + (group.seconds_tailness - 1.0) * factor
    return replace(profile, group=replace(group, tailness=1.0 + (group.tailness - 1.0) * factor, seconds_tailness=seconds))


def _learning(profile: Profile, factor: float) -> Profile:
    """How fast rewards rise; nothing where they are not known, or plainly stay."""
    rewards = profile.rewards
    if rewards is None:
        return profile
    return replace(profile, rewards=replace(rewards, log_odds_per_update=rewards.log_odds_per_update * factor))


def _decode(profile: Profile, factor: float) -> Profile:
    decode = profile.decode
    points = tuple(replace(point, seconds=point.seconds * factor) for point in decode.points)
    saturation = replace(decode.saturation, tokens_per_second=decode.saturation.tokens_per_second / factor)
    gap, each = decode.gap_seconds * factor, decode.gap_seconds_per_sequence * factor
    changed = replace(decode, fit=decode.fit.scaled(factor), points=points, saturation=saturation, gap_seconds=gap, gap_seconds_per_sequence=each)
    return replace(profile, decode=changed)


def _learn(profile: Profile, factor: float) -> Profile:
    learn = profile.learn
    points = tuple(replace(point, seconds=point.seconds * factor) for point in learn.points)
    return replace(profile, learn=replace(learn, fit=learn.fit.scaled(factor), points=points, handover_seconds=learn.handover_seconds * factor))


def _weights(profile: Profile, factor: float) -> Profile:
    update = profile.weight_update
    return replace(
        profile,
        weight_update=replace(
            update,
            publish_seconds=update.publish_seconds * factor,
            transfer_seconds=update.transfer_seconds * factor,
            pause_seconds=update.pause_seconds * factor,
        ),
    )


def _kv(profile: Profile, factor: float) -> Profile:
    capacity = profile.decode.kv_capacity_tokens
    if capacity is None:
        return profile
    return replace(profile, decode=replace(profile.decode, kv_capacity_tokens=max(1, round(capacity * factor))))


INPUTS: Mapping[str, Input] = {
    "answers": Input("length of answers", _answers),
    "prompts": Input("length of prompts and observations", _prompts),
    "tools": Input("seconds in the environment", _tools),
    "tail": Input("how far the longest of a group exceeds the mean", _tail),
    "learning": Input("how fast the odds of success rise", _learning),
    "decode": Input("seconds of a decode step", _decode),
    "learn": Input("seconds of an update in the learner", _learn),
    "weights": Input("seconds to publish, move and take up weights", _weights),
    "kv": Input("tokens that the KV cache holds", _kv),
}


def parse_what_if(given: Sequence[str]) -> dict[str, float]:
    """`answers=1.5x`, several in one text by commas. Raises ConfigError with every problem."""
    factors: dict[str, float] = {}
    problems = []
    for text in (part.strip() for each in given for part in each.split(",") if part.strip()):
        name, equals, factor = (part.strip() for part in text.partition("="))
        if name not in INPUTS or not equals:
            near = difflib.get_close_matches(name, INPUTS, n=1)
            what = f"'{text}' is not of the form input=FACTORx." if not equals else f"'{name}' is no input."
            remedy = f"Did you mean '{near[0]}=1.5x'?" if near else f"Inputs: {', '.join(INPUTS)}; for example answers=1.5x."
            problems.append(Problem(key="--what-if", value=text, limit=", ".join(INPUTS), message=what, remedy=remedy))
            continue
        try:
            value = float(factor.removesuffix("x"))
        except ValueError:
            value = math.nan
        if not (1 / _MOST <= value <= _MOST) or not factor.endswith("x"):
            limit = f"{1 / _MOST:g}x to {_MOST:g}x"
            what = f"'{factor}' of '{name}' is no factor."
            problems.append(Problem(key="--what-if", value=text, limit=limit, message=what, remedy=f"Write, for example, {name}=1.5x ({limit})."))
            continue
        factors[name] = factors.get(name, 1.0) * value
    if problems:
        raise ConfigError(problems)
    return factors


def apply_what_if(profile: Profile, factors: Mapping[str, float]) -> Profile:
    for name, factor in factors.items():
        profile = INPUTS[name].apply(profile, factor)
    return profile
