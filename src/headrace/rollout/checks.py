"""Checks of what environments, rewards and samplers hand back: what is wrong becomes an end reason with a text for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from headrace.rollout.user_call import UserCallError, describe_exception, shorten
from headrace.types import Completion, EndReason, Observation, Task

_LOWEST_LOGPROB = -3.0e38  # trajectories store float32


class RolloutEnded(Exception):
    """The rollout is over before its last step."""

    def __init__(self, reason: EndReason, error: str | None = None) -> None:
        super().__init__(reason, error)
        self.reason = reason
        self.error = None if error is None else shorten(error)


def checked_observation(observation: object, source: str) -> Observation:
    """With `key` as a float. Raises RolloutEnded."""
    if not isinstance(observation, Observation):
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned {shown_value(observation)} where an Observation belongs")
    if not isinstance(observation.text, str):
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned an observation whose text is {shown_value(observation.text)}")
    if observation.messages != () and (wrong := wrong_messages(observation.messages)):
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned an observation whose messages are {wrong}")
    if observation.messages and observation.text:
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned an observation with a text and messages: give one of the two")
    key = as_float(observation.key)
    if key is None or not math.isfinite(key) or key < 0:
        raise RolloutEnded(
            EndReason.ENVIRONMENT_ERROR, f"{source} returned an observation whose key is {shown_value(observation.key)}: use True, False or a weight >= 0"
        )
    return observation if type(observation.key) is float else dataclasses.replace(observation, key=key)


def first_observation(task: Task) -> Observation:
    """What a one-step task shows: its `prompt` (a text) or `messages` (a chat). Raises RolloutEnded."""
    prompt, messages = task.data.get("prompt"), task.data.get("messages")
    wrong = None
    if prompt is None and messages is None:
        wrong = "has no 'prompt' and no 'messages': one-step tasks need one of them in their data"
    elif prompt is not None and messages is not None:
        wrong = "has a 'prompt' and 'messages': give one of the two"
    elif messages is not None:
        problem = wrong_messages(messages)
        wrong = f"has 'messages' that are {problem}" if problem else None
    elif not isinstance(prompt, str):
        wrong = f"has a 'prompt' that is a {type(prompt).__name__}, not a text"
    if wrong is not None:
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"task '{task.id}' {wrong}")
    return Observation(text=prompt) if isinstance(prompt, str) else Observation(messages=tuple(messages or ()))


def wrong_messages(messages: object) -> str | None:
    """What is wrong with a chat's messages; None: nothing."""
    if not isinstance(messages, list | tuple) or not messages:
        return f"{shown_value(messages)}, not a list of messages"
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"not all messages: {shown_value(message)} lacks a role or a content that is a text"
    return None


def checked_outcome(outcome: object, source: str) -> tuple[Observation | None, float, bool]:
    """What Environment.step returned, its parts checked. Raises RolloutEnded."""
    if not isinstance(outcome, tuple | list) or len(outcome) != 3:
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned {shown_value(outcome)}, not (observation, reward, done)")
    observation, reward, done = outcome
    if not isinstance(done, bool) and type(done).__name__ not in ("bool", "bool_"):  # numpy has a bool of its own
        raise RolloutEnded(EndReason.ENVIRONMENT_ERROR, f"{source} returned done = {shown_value(done)}, not True or False")
    value = checked_reward(reward, source)
    return (None if observation is None else checked_observation(observation, source)), value, bool(done)


def checked_reward(reward: object, source: str) -> float:
    value = as_float(reward)
    if value is None:
        raise RolloutEnded(EndReason.REWARD_ERROR, f"{source} returned {shown_value(reward)} as reward, not a number")
    if not math.isfinite(value):
        raise RolloutEnded(EndReason.REWARD_ERROR, f"{source} returned the reward {value}")
    return value


def as_float(value: object) -> float | None:
    """Numbers, also numpy's and one-element tensors; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except Exception:
        return None


def broken_completion(completion: Completion) -> str | None:
    """What is wrong with what the sampler delivered; spans and lengths were checked when it was made."""
    if not completion.tokens:
        return "the sampler delivered no token"
    for index, logprob in enumerate(completion.logprobs):
        if not _LOWEST_LOGPROB < logprob <= 0.0:
            return f"the sampler delivered the log-probability {logprob} for token {index} of an action"
    return None


def text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, UserCallError) else describe_exception(error)


def shown_value(value: object) -> str:
    """`'abc' (str)`, short enough for a message."""
    try:
        text = repr(value)
    except Exception:
        text = "a value that cannot be shown"
    return f"{text if len(text) <= 80 else text[:76] + ' ...'} ({type(value).__name__})"
