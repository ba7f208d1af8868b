"""When a run will be done, from what it has done so far: a time and an interval, growing or shrinking lengths included.

The pace is that of the later half of the updates, so that the filling of pool and slots counts ever less and a change shows soon. Rollouts
that grow make later updates longer: their mean length is a line over the updates where that is plain, carried on as forecasts carry a
measured drift (it fades over twice the updates seen, and is uncertain by half).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

Line = Mapping[str, Any]

_MOST_MARKS = 512
_BLOCKS = 8
"""Stretches of updates whose paces are compared: neighbours go alike, so single updates would seem to tell more than they do."""
_LEAST_ERROR = 0.05
"""Relative, of the time that is left: what no run tells about itself."""
_PLAIN, _LEAST_POINTS = 4.0, 16
"""Standard errors, and stretches of updates, from which on a trend of lengths is believed: while a pool fills they grow too."""
_FADES, _DRIFT_ERROR = 2.0, 0.5
_LEAST_LENGTH, _MOST_LENGTH = 0.25, 4.0
"""Of the present mean, which lengths are taken to stay within."""
_T_90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415)
"""0.9 quantiles of Student's t, 1 to 7 degrees of freedom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Seconds that are left; one run in ten takes less than `low`, one in ten more than `high`."""

    seconds: float
    low: float
    high: float


class FinishMeter:
    """Fed with a run's events in order. Its size does not grow with the run."""

    def __init__(self) -> None:
        self.num_updates = 0
        """That the run is to make."""
        self._version = 0
        self._marks: list[tuple[int, float]] = []
        """(updates made, time), the start of the timed window first."""
        self._lengths: list[tuple[int, int, float]] = []
        """Between two marks: (updates made, rollouts, their tokens)."""
        self._each = 1
        """Updates between two marks."""
        self._rollouts, self._tokens = 0, 0.0
        self._is_timed = False

    def add(self, line: Line) -> None:
        match line["event"]:
            case "run_started":
                self.num_updates = line["num_updates"]
            case "run_resumed":
                self.num_updates, self._version = line["num_updates"], line["resumed_from_update"]
                self._marks, self._lengths, self._each = [], [], 1
            case "timed_window":
                self._is_timed = line["phase"] == "start"
                if self._is_timed:
                    self._marks, self._lengths, self._rollouts, self._tokens = [(self._version, line["time"])], [], 0, 0.0
            case "rollout_finished" if line["tokens"]:
                self._rollouts, self._tokens = self._rollouts + 1, self._tokens + line["tokens"]
            case "updated" if line["version"] > self._version:
                self._version = line["version"]
                if not self._marks and self._is_timed:  # the first one since the run went back to a checkpoint
                    self._marks, self._rollouts, self._tokens = [(self._version, line["time"])], 0, 0.0
                elif self._marks and self._version >= self._marks[-1][0] + self._each:
                    self._mark(line["time"])

    def forecast(self) -> Finish | None:
        """None before the first update and after the last one."""
        left = self.num_updates - self._version
        paces = self._paces()
        if not paces or left <= 0:
            return None
        pace = fmean(paces)
        grown = self._grown(left)
        seconds = pace * left * grown
        relative = _LEAST_ERROR
        if len(paces) > 1:
            made = self._version - self._marks[len(self._marks) // 2][0]
            # of the mean of what was seen, and of the mean of what is to come: as many blocks as its updates make
            relative = math.hypot(relative, stdev(paces) / pace * math.sqrt(1 / len(paces) + made / len(paces) / left))
            factor = _T_90[min(len(paces) - 1, len(_T_90)) - 1]
        else:
            relative, factor = 0.5, 1.0
        half = seconds * math.hypot(relative * factor, _DRIFT_ERROR * 1.2816 * abs(grown - 1.0) / grown)
        return Finish(seconds=seconds, low=max(0.0, seconds - half), high=seconds + half)

    def _mark(self, time: float) -> None:
        self._marks.append((self._version, time))
        self._lengths.append((self._version, self._rollouts, self._tokens))
        self._rollouts, self._tokens = 0, 0.0
        if len(self._marks) > _MOST_MARKS:
            self._each *= 2
            self._marks = self._marks[::2]
            self._lengths = [
                (later[0], former[1] + later[1], former[2] + later[2]) for former, later in zip(self._lengths[::2], self._lengths[1::2], strict=False)
            ]

    def _paces(self) -> list[float]:
        """Seconds an update in stretches of the later half, equal in number of marks as far as can be."""
        marks = self._marks[len(self._marks) // 2 :]
        if len(marks) < 2:
            return []
        count = min(_BLOCKS, len(marks) - 1)
        ends = [marks[round(index * (len(marks) - 1) / count)] for index in range(count + 1)]
        return [(later[1] - former[1]) / (later[0] - former[0]) for former, later in pairwise(ends)]

    def _grown(self, left: int) -> float:
        """Mean length of the updates to come / that of the paces' updates."""
        points = [(float(version), tokens / rollouts) for version, rollouts, tokens in self._lengths[len(self._lengths) // 2 :] if rollouts]
        slope, error, mean = _line(points)
        if len(points) < _LEAST_POINTS or abs(slope) < _PLAIN * error or mean <= 0:
            return 1.0
        middle = (self._marks[len(self._marks) // 2][0] + self._version) / 2
        at_paces = mean + slope * (middle - fmean(point[0] for point in points))
        if at_paces <= 0:
            return 1.0
        fades = _FADES * max(1, self._version - self._marks[0][0])
        # mean over the updates to come of a drift that dies away, from the middle of the paces' updates on
        ahead = (self._version - middle) + fades - fades * fades / left * -math.expm1(-left / fades)
        return min(_MOST_LENGTH, max(_LEAST_LENGTH, 1.0 + slope * ahead / at_paces))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(slope, its standard error, mean) of a least-squares line; an endless error for fewer than 3 points."""
    if len(points) < 3:
        return 0.0, math.inf, 0.0
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    squares = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / squares
    rest = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (len(points) - 2) / squares), y_mean
