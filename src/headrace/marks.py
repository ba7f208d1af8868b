"""Rules that mark key steps, and what they and a recipe's marking function look at (DESIGN section 6). Standard library only.

A rule is a text, KIND:ARGUMENT:

    observation:REGEX                          the observation that the action answers
    action:REGEX                               the action
    tool:NAME                                  the action calls that tool
    reward:nonzero | positive | negative       the reward of the step

A regular expression is searched for (`re.search`), case and all. The text of a chat's observation is the contents of its new
messages, one below the other. The recipe's reward function belongs to the last step.

A tool call is one of these, with the whole name; one that is cut off counts only once its name stands there and is closed:

    {"name": "search", ...}                    a JSON object, bare, in a list or in <tool_call>; also inside "function" or "tool_calls"
    search(...)                                not after a letter or a dot: browser.search(...) calls browser.search
    <tool_call>search  <function=search>       tags before arguments that are no JSON
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.types import EndReason, Observation, Task

RULE_WEIGHT = 1.0
"""Key weight of a step that a rule, the entropy or the advantage marks."""


class RuleKind(StrEnum):
    OBSERVATION = "observation"
    ACTION = "action"
    TOOL = "tool"
    REWARD = "reward"


class RewardEvent(StrEnum):
    NONZERO = "nonzero"
    POSITIVE = "positive"
    NEGATIVE = "negative"


class RuleError(ValueError):
    """A text that is no rule: what is wrong, and what to do."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step as a marking function sees it."""

    observation: str
    """What the environment showed."""
    action: str
    """What the policy answered, without stop string and special tokens."""
    reward: float = 0.0
    """Of the step; the recipe's reward function belongs to the last one."""
    tokens: tuple[int, ...] = ()
    """[action] sampled."""
    logprobs: tuple[float, ...] = ()
    """[action] natural log, when they were drawn."""
    entropies: tuple[float, ...] | None = None
    """[action] nats, of the distributions drawn from; None unless marks.entropy_fraction is above 0."""
    key: float = 0.0
    """The environment's mark, also where marks.environment is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryView:
    """A whole rollout as a marking function sees it, once it has ended and was graded."""

    task: Task
    steps: tuple[StepView, ...]
    reward: float
    end_reason: EndReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One parsed rule."""

    kind: RuleKind
    argument: str
    pattern: re.Pattern[str] | None = None
    """Of observation and action rules."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.argument}"

    @property
    def is_known_before(self) -> bool:
        """Whether it can be said before the action is sampled."""
        return self.kind is RuleKind.OBSERVATION

    def marks(self, step: StepView) -> bool:
        match self.kind:
            case RuleKind.OBSERVATION:
                return self.marks_observation(step.observation)
            case RuleKind.ACTION:
                assert self.pattern is not None
                return self.pattern.search(step.action) is not None
            case RuleKind.TOOL:
                return calls_tool(step.action, self.argument)
            case RuleKind.REWARD:
                return _is_event(step.reward, RewardEvent(self.argument))

    def marks_observation(self, text: str) -> bool:
        return self.kind is RuleKind.OBSERVATION and self.pattern is not None and self.pattern.search(text) is not None


def parse_rule(text: str) -> Rule:
    """Raises RuleError."""
    kinds = [str(kind) for kind in RuleKind]
    word, colon, argument = text.partition(":")
    kind = word.strip()
    if not colon or kind not in kinds:
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.6)
        remedy = f"Did you mean '{near[0]}:{argument or '...'}'?" if near else f"Rules begin with {', '.join(f'{each}:' for each in kinds)}."
        what = f"'{kind}' is no kind of rule" if colon else "it is not of the form KIND:ARGUMENT"
        raise RuleError(f"rule '{text}': {what}", remedy)
    if not argument.strip():
        raise RuleError(f"rule '{text}' says nothing after its colon", f"Write, for example, '{_EXAMPLES[RuleKind(kind)]}'.")
    return _parsed(text, RuleKind(kind), argument)


def _parsed(text: str, kind: RuleKind, argument: str) -> Rule:
    if kind in (RuleKind.OBSERVATION, RuleKind.ACTION):
        try:
            return Rule(kind=kind, argument=argument, pattern=re.compile(argument))
        except (re.error, OverflowError, RecursionError) as error:
            remedy = "Mend it; in TOML, single quotes keep backslashes as they are."
            raise RuleError(f"rule '{text}' is no regular expression: {error}", remedy) from error
    argument = argument.strip()
    events = [str(event) for event in RewardEvent]
    if kind is RuleKind.REWARD and argument not in events:
        near = difflib.get_close_matches(argument, events, n=1, cutoff=0.5)
        remedy = f"Did you mean 'reward:{near[0]}'?" if near else f"Use one of {', '.join(f'reward:{each}' for each in events)}."
        raise RuleError(f"rule '{text}': '{argument}' is no reward event", remedy)
    return Rule(kind=kind, argument=argument)


_EXAMPLES = {
    RuleKind.OBSERVATION: "observation:[1-4]",
    RuleKind.ACTION: "action:(?i)therefore",
    RuleKind.TOOL: "tool:search",
    RuleKind.REWARD: "reward:nonzero",
}


def observation_text(observation: Observation) -> str:
    """What rules and functions read of an observation."""
    return "\n".join(message["content"] for message in observation.messages) if observation.messages else observation.text


def calls_tool(text: str, name: str) -> bool:
    """Whether an action calls the tool `name`, in one of the forms at the top of this module."""
    if name not in text:
        return False
    whole = re.escape(name)
    if re.search(rf"(?<![\w.]){whole}\(|<tool_call>\s*{whole}(?![\w.-])|<function={whole}>", text):
        return True
    return any(_names(found, name) for found in _json_objects(text))


def _names(found: object, name: str) -> bool:
    if isinstance(found, list):
        return any(_names(each, name) for each in found)
    if not isinstance(found, dict):
        return False
    return found.get("name") == name or any(_names(found.get(inside), name) for inside in ("function", "tool_calls"))


def _json_objects(text: str) -> Iterator[object]:
    """Whole JSON objects of a text, outermost ones only."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            found, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            yield found
        position = text.find("{", end)


def _is_event(reward: float, event: RewardEvent) -> bool:
    match event:
        case RewardEvent.NONZERO:
            return reward != 0.0
        case RewardEvent.POSITIVE:
            return reward > 0.0
        case RewardEvent.NEGATIVE:
            return reward < 0.0


def stands_out(rewards_G: Sequence[float], min_advantage: float) -> list[bool]:
    """[G] marks.min_advantage: which members of a group lie at least so many (population) standard deviations from its mean.

    The same scale as learner.advantage = mean_std; a group of equal rewards has nobody who stands out.
    """
    if not rewards_G:
        return []
    mean = math.fsum(rewards_G) / len(rewards_G)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards_G) / len(rewards_G))
    return [deviation > 0.0 and abs(reward - mean) >= min_advantage * deviation for reward in rewards_G]
