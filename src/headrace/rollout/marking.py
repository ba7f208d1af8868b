"""Which steps of a rollout are key steps: the settings `marks`, applied (DESIGN section 6).

A step's key weight is the largest that any marker gives it. Before its action is sampled: the environment's own mark and rules on
the observation; only these can make a sampler take up weights for it (sampler.apply = key_steps). After the rollout: rules on
action, tool and reward, entropy, and the recipe's function. marks.min_advantage needs the whole group and is the pool's.

Marks lie over the trajectory. Nothing here changes a token, a log-probability or a version (I10).
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from headrace.config import MarkSettings
from headrace.marks import RULE_WEIGHT, StepView, TrajectoryView, observation_text, parse_rule
from headrace.rollout.checks import RolloutEnded, as_float, shown_value, text_of
from headrace.types import Action, EndReason, Observation, Task


async def _no_function(trajectory: TrajectoryView) -> object:
    raise AssertionError("marks.function is not set")


RECENT_STEPS = 2048
"""Steps that an entropy is compared with, the newest of a worker."""


class Marker:
    """The markers of one worker. It remembers the entropies of recent steps, so rollouts share it."""

    def __init__(self, settings: MarkSettings | None = None, function: Callable[[TrajectoryView], Awaitable[object]] = _no_function) -> None:
        """None: the environment's marks only (evaluation). `function` awaits the recipe's marks.function, where the settings name one."""
        settings = settings or MarkSettings()
        rules = [parse_rule(text) for text in settings.rules]
        self._before = [rule for rule in rules if rule.is_known_before]
        self._after = [rule for rule in rules if not rule.is_known_before]
        self._settings = settings
        self._function = function
        self.marks_afterwards = marks_afterwards(settings)
        """Whether a step can become key only once its action, its reward or the whole rollout is known."""
        self._entropies = RecentEntropies(settings.entropy_fraction)

    def before(self, observation: Observation) -> float:
        """Key weight of the action that will answer this observation, as far as it is known before it is sampled."""
        weight = observation.key if self._settings.environment else 0.0
        if self._before and weight < RULE_WEIGHT:
            text = observation_text(observation)
            if any(rule.marks_observation(text) for rule in self._before):
                return RULE_WEIGHT
        return weight

    @property
    def has_function(self) -> bool:
        return self._settings.function is not None

    async def after(self, trajectory: TrajectoryView) -> list[float]:
        """[steps] key weights of what is known after the rollout. Raises RolloutEnded (MARK_ERROR) when the recipe's function fails."""
        weights = [RULE_WEIGHT if any(rule.marks(step) for rule in self._after) else 0.0 for step in trajectory.steps]
        if self._settings.entropy_fraction > 0:
            weights = _largest(weights, self._entropies.mark(map(_mean_entropy, trajectory.steps)))
        if self._settings.function is not None:
            weights = _largest(weights, await self._asked(self._settings.function, trajectory))
        return weights

    async def _asked(self, name: str, trajectory: TrajectoryView) -> list[float]:
        try:
            return checked_weights(await self._function(trajectory), len(trajectory.steps))
        except WrongWeightsError as error:
            raise RolloutEnded(EndReason.MARK_ERROR, f"marks.function '{name}' returned {error}") from error
        except Exception as error:
            raise RolloutEnded(EndReason.MARK_ERROR, f"marks.function '{name}': {text_of(error)}") from error


class RolloutMarks:
    """Marks of one rollout while it goes on: what it showed and drew is kept as long as a marker wants to see it at the end."""

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self._steps: list[StepView] = []

    @property
    def are_complete(self) -> bool:
        """Whether nothing can become key once its action is sampled: `at_the_end` is not needed."""
        return not self._marker.marks_afterwards

    @property
    def ask_the_recipe(self) -> bool:
        """Whether `at_the_end` waits for the recipe's function."""
        return self._marker.has_function

    def before(self, observation: Observation) -> float:
        """Key weight of the action that is sampled next."""
        return self._marker.before(observation)

    def acted(self, step: int, observation: Observation, action: Action, logprobs: tuple[float, ...], entropies: tuple[float, ...] | None) -> None:
        """The whole action of a step stands. One that stood there before, and all after it, are gone (verification)."""
        if self._marker.marks_afterwards:
            del self._steps[step:]
            view = StepView(
                observation=observation_text(observation),
                action=action.text,
                tokens=action.tokens,
                logprobs=logprobs,
                entropies=entropies,
                key=observation.key,
            )
            self._steps.append(view)

    async def at_the_end(self, task: Task, rewards: Sequence[float], end_reason: EndReason) -> list[float]:
        """[steps] key weights of what is known now; `rewards`: [steps]. Raises RolloutEnded, see Marker.after."""
        steps = tuple(dataclasses.replace(step, reward=reward) for step, reward in zip(self._steps, rewards, strict=True))
        return await self._marker.after(TrajectoryView(task=task, steps=steps, reward=math.fsum(rewards), end_reason=end_reason))


def marks_afterwards(settings: MarkSettings) -> bool:
    """Whether a step can become key only after its action was sampled: then every action's distribution must be kept to verify key steps."""
    late = any(not parse_rule(text).is_known_before for text in settings.rules)
    return late or settings.entropy_fraction > 0 or settings.function is not None


class RecentEntropies:
    """Marks the given share of the steps, those of highest entropy, against the newest RECENT_STEPS steps.

    The policy's entropy falls as it learns, so the bound moves with it. Steps of one entropy are marked all or none, and never more
    than the share of the steps compared with; before 1 / share steps were seen nothing is marked. Depends on their order only.
    """

    def __init__(self, fraction: float, *, num_recent: int = RECENT_STEPS) -> None:
        self._fraction = fraction
        self._num_recent = num_recent
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def mark(self, entropies: Iterable[float]) -> list[float]:
        """[steps] weights of the steps of one rollout, which count among those they are compared with."""
        new = list(entropies)
        for entropy in new:
            self._order.append(entropy)
            insort(self._sorted, entropy)
            if len(self._order) > self._num_recent:
                del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        count = len(self._sorted)
        return [RULE_WEIGHT if count - bisect_left(self._sorted, entropy) <= self._fraction * count else 0.0 for entropy in new]


class WrongWeightsError(ValueError):
    """What a marking function returned instead of a weight for each step."""


def checked_weights(answer: object, num_steps: int) -> list[float]:
    """[steps] of what a marking function returned: numbers >= 0 or booleans, one a step. Raises WrongWeightsError."""
    if isinstance(answer, str | bytes | dict) or not isinstance(answer, Iterable):
        raise WrongWeightsError(f"{shown_value(answer)}, not a list of weights")
    given = list(answer)
    if len(given) != num_steps:
        raise WrongWeightsError(f"{len(given)} weights for {num_steps} steps")
    weights = []
    for index, one in enumerate(given):
        weight = as_float(one)
        if weight is None or not math.isfinite(weight) or weight < 0:
            raise WrongWeightsError(f"{shown_value(one)} for step {index}: use True, False or a weight >= 0")
        weights.append(weight)
    return weights


def _largest(first: list[float], second: list[float]) -> list[float]:
    return [max(pair) for pair in zip(first, second, strict=True)]


def _mean_entropy(step: StepView) -> float:
    """Nats a token of the action: a long action is no more uncertain for being long."""
    if step.entropies is None:
        raise RolloutEnded(EndReason.SAMPLER_ERROR, "marks.entropy_fraction needs the entropies of the actions, and the sampler delivered none")
    mean = math.fsum(step.entropies) / max(1, len(step.entropies))
    if not math.isfinite(mean):
        raise RolloutEnded(EndReason.SAMPLER_ERROR, f"the sampler delivered the entropies {shown_value(step.entropies)}")
    return mean
