"""Where a sampler's wall time goes: busy by number of running sequences, idle by reason. One clock reading a change of state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.types import WorkerActivity


class ActivityMeter:
    """A state machine over time: each stretch belongs to exactly one state, so the parts sum to the whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._idle_reason = "admission"
        self._running: dict[int, float] = {}
        self._idle: dict[str, float] = {}
        self._apply_seconds = 0.0
        self._work: dict[tuple[int, int, int], list[float]] = {}
        self.last_seconds = 0.0
        """Of the last step."""
        self._verify_seconds = 0.0
        self._counters: dict[str, float] = {}

    @property
    def time(self) -> float:
        """When the last change of state was noted."""
        return self._since or 0.0

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._close()
        self._since = None

    def idle(self, reason: str) -> None:
        """From now on nothing is computed, for this reason."""
        self._close()
        self._idle_reason = reason

    def busy(self, running: int, tokens: int = 0, context_tokens: int = 0) -> None:
        """The stretch that just ended was a step of so many sequences. Of a decode step: the tokens computed and the context they read."""
        seconds = self.last_seconds = self._elapsed()
        self._running[running] = self._running.get(running, 0.0) + seconds
        if tokens:
            sums = self._work.setdefault(_kind_of_step(running, tokens, context_tokens), [0, 0, 0, 0, 0.0])
            for index, value in enumerate((1, running, tokens, context_tokens, seconds)):
                sums[index] += value

    def verified(self, running: int) -> None:
        """The stretch that just ended checked rollouts while so many sequences, they included, held the device."""
        self.busy(running)
        self._verify_seconds += self.last_seconds

    def applied(self) -> None:
        """The stretch that just ended took up new weights."""
        seconds = self._elapsed()
        self._idle["weights"] = self._idle.get("weights", 0.0) + seconds
        self._apply_seconds += seconds

    def take(self, **counters: float) -> WorkerActivity:
        """The work since the last take; the arguments are cumulative counters, named like the fields of WorkerActivity."""
        self._close()
        since: dict[str, Any] = {name: value - self._counters.get(name, 0) for name, value in counters.items()}
        busy, idle = sum(self._running.values()), sum(self._idle.values())
        activity = WorkerActivity(
            seconds=busy + idle,
            busy_seconds=busy,
            running_seconds=dict(sorted(self._running.items())),
            idle_seconds=dict(sorted(self._idle.items())),
            apply_seconds=self._apply_seconds,
            verify_seconds=self._verify_seconds,
            decode_work=_largest(self._work),
            **since,
        )
        self._work = {}
        self._running, self._idle, self._apply_seconds, self._verify_seconds, self._counters = {}, {}, 0.0, 0.0, counters
        return activity

    def _close(self) -> None:
        if self._since is not None and (seconds := self._elapsed()) > 0:
            self._idle[self._idle_reason] = self._idle.get(self._idle_reason, 0.0) + seconds

    def _elapsed(self) -> float:
        now = self._clock()
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now
        return seconds


_MAX_KINDS = 24
"""Of steps in one report, so that its line stays small."""


def _kind_of_step(running: int, tokens: int, context_tokens: int) -> tuple[int, int, int]:
    """Half octaves of the running batch, octaves of its mean context; decoding only, with short observations, or with prompts."""
    half_octave = 2 * running.bit_length() + (running >> max(0, running.bit_length() - 2) & 1)
    prompts = 0 if tokens <= running else 1 if tokens <= 3 * running else 1 + (tokens - running).bit_length()
    return half_octave, (context_tokens // running).bit_length(), prompts


def _largest(work: dict[tuple[int, int, int], list[float]]) -> tuple[tuple[int, int, int, int, float], ...]:
    most = sorted(work.values(), key=lambda sums: -sums[4])[:_MAX_KINDS]
    return tuple((int(a), int(b), int(c), int(d), seconds) for a, b, c, d, seconds in most)
