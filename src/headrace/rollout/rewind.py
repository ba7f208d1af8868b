"""Going back in an environment, so that a verified rollout can go on from its middle (DESIGN section 6): snapshots, or a replay."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.types import Action, Observation


class Rewind(StrEnum):
    """How an environment goes back."""

    NONE = "none"
    SNAPSHOT = "snapshot"
    REPLAY = "replay"


@dataclass(slots=True)
class Moment:
    """What was when an action began: kept for actions of rollouts that may be verified."""

    observation: Observation
    """That the action answers."""
    key_weight: float
    """Of the action, as far as it was known before it was drawn."""
    seconds: float
    """Since the rollout began."""
    snapshot: Any = None
    """Of the environment, before the action; None where it has none or the action is never checked."""
    action: Action | None = None
    """What was answered, once it is whole."""


def rewind_of(environment: object) -> Rewind:
    """Of an environment, of the handle of one, or of a class."""
    stated = getattr(environment, "rewind", None)
    if isinstance(stated, Rewind):
        return stated
    if callable(getattr(environment, "snapshot", None)) and callable(getattr(environment, "restore", None)):
        return Rewind.SNAPSHOT
    return Rewind.REPLAY if getattr(environment, "replayable", False) is True else Rewind.NONE


def name_of(environment: object) -> str:
    """For people."""
    return str(getattr(environment, "name", None) or type(environment).__name__)


async def take_snapshot(environment: Any) -> Any:
    """Environment.snapshot(), which may be async."""
    return await _finished(environment.snapshot())


async def restore(environment: Any, snapshot: Any) -> None:
    """Environment.restore(snapshot), which may be async."""
    await _finished(environment.restore(snapshot))


async def _finished(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
