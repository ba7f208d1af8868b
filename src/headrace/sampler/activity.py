"""Where a sampler's wall time goes: the model's work by number of running sequences, and everything else by reason.

Only the model's work is busy (DESIGN section 2). What a step takes beside it is `bookkeeping`. Between steps the loop runs other Python:
rollouts that take their answers, environments that are `async def`, requests that are made. That is `rollouts`: all of the turn that the loop
is given after a step, and of a wait (`environment`, `gather`) the part in which this thread had the processor. Readings a step: four of the
wall clock, and one of the processor's at the begin and the end of a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.types import WorkerActivity

BOOKKEEPING, ROLLOUTS, GATHER, ENVIRONMENT = "bookkeeping", "rollouts", "gather", "environment"
_WAITS = (ENVIRONMENT, GATHER)


def _none() -> float:
    return 0.0


class ActivityMeter:
    """A state machine over time: each stretch belongs to exactly one state, so the parts sum to the whole.

    `clock`: wall time; `processor_clock`: time in which this thread had a processor; both in seconds.
    """

    def __init__(self, clock: Callable[[], float], processor_clock: Callable[[], float] = _none) -> None:
        self._clock, self._processor_clock = clock, processor_clock
        self._since: float | None = None
        self._idle_reason = self._stretch = "admission"
        self._processor_since = 0.0
        self._step_seconds = 0.0
        self._stretches: dict[str, float] = {}
        self._running: dict[int, float] = {}
        self._idle: dict[str, float] = {}
        self._apply_seconds = 0.0
        self._work: dict[tuple[int, int, int], list[float]] = {}
        self.last_seconds = 0.0
        """Of the last step."""
        self._last_work = 0.0
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

    def idle(self, reason: str, *, between: str | None = None) -> None:
        """From now on nothing is computed, for this reason. `between`: what the stretch as a whole is, where it is part of a longer one:
        `gather` while somebody could be served, else what is waited for."""
        self._close()
        self._idle_reason, self._stretch = reason, between or reason
        if reason in _WAITS:
            self._processor_since = self._processor_clock()

    def busy(self, running: int, work_seconds: float, tokens: int = 0, context_tokens: int = 0) -> None:
        """The stretch that just ended was a step of so many sequences, of which the model worked `work_seconds`. Of a decode step: the tokens
        computed and the context they read."""
        seconds = self.last_seconds = self._elapsed()
        work = self._last_work = min(seconds, work_seconds)
        self._step_seconds += seconds
        self._running[running] = self._running.get(running, 0.0) + work
        self._add_idle(BOOKKEEPING, seconds - work)
        if tokens:
            sums = self._work.setdefault(_kind_of_step(running, tokens, context_tokens), [0, 0, 0, 0, 0.0])
            for index, value in enumerate((1, running, tokens, context_tokens, seconds)):
                sums[index] += value

    def verified(self, running: int, work_seconds: float) -> None:
        """The stretch that just ended checked rollouts while so many sequences, they included, held the device."""
        self.busy(running, work_seconds)
        self._verify_seconds += self._last_work

    def applied(self) -> None:
        """The stretch that just ended took up new weights."""
        seconds = self._elapsed()
        self._add_idle("weights", seconds)
        self._apply_seconds += seconds

    def take(self, *, kv_slots: int = 0, **counters: float) -> WorkerActivity:
        """The work since the last take; the arguments are named like the fields of WorkerActivity, `counters` are cumulative."""
        self._close()
        since: dict[str, Any] = {name: value - self._counters.get(name, 0) for name, value in counters.items()}
        busy, idle = sum(self._running.values()), sum(self._idle.values())
        activity = WorkerActivity(
            seconds=busy + idle,
            busy_seconds=busy,
            running_seconds=dict(sorted(self._running.items())),
            idle_seconds=dict(sorted(self._idle.items())),
            step_seconds=self._step_seconds,
            gap_seconds=self._stretches.get(GATHER, 0.0),
            environment_seconds=self._stretches.get(ENVIRONMENT, 0.0),
            apply_seconds=self._apply_seconds,
            verify_seconds=self._verify_seconds,
            decode_work=_largest(self._work),
            kv_slots=kv_slots,
            **since,
        )
        self._work, self._stretches, self._step_seconds = {}, {}, 0.0
        self._running, self._idle, self._apply_seconds, self._verify_seconds, self._counters = {}, {}, 0.0, 0.0, counters
        return activity

    def _close(self) -> None:
        if self._since is None or (seconds := self._elapsed()) <= 0:
            return
        self._stretches[self._stretch] = self._stretches.get(self._stretch, 0.0) + seconds
        if self._idle_reason in _WAITS:
            now = self._processor_clock()
            at_work = min(seconds, now - self._processor_since)
            self._processor_since = now
            self._add_idle(ROLLOUTS, at_work)
            seconds -= at_work
        self._add_idle(self._idle_reason, seconds)

    def _add_idle(self, reason: str, seconds: float) -> None:
        if seconds > 0:
            self._idle[reason] = self._idle.get(reason, 0.0) + seconds

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
