"""Arms against each other, from their runs' events: pure functions (CONTRACTS, compare --json).

Pairs are runs of one seed: two arms of a seed meet the same tasks in the same order and are evaluated with the same random streams.
Intervals are 95 % Student t intervals over seeds. With one seed there is none, and nothing is called resolved.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.report.finish import FinishMeter
from headrace.report.summary import over_bound_fraction, summarize
from headrace.report.utilization import went_back

Line = Mapping[str, Any]
Interval = tuple[float, float]

NUM_SMOOTHED = 3
"""Evaluations in a mean: final value and time to reward."""
TARGET_BELOW_FINAL = 0.01
SAID_AFTER = 0.1
"""Of the updates; then a run says when it will be done."""
_NEARLY_FINAL = 0.9
"""Jitter counts from where a curve first reaches this share of its final value."""

_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""0.975 quantiles of Student's t, 1 to 10 degrees of freedom."""
_Z_975 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One evaluation."""

    version: int
    seconds: float
    """Timed seconds until these weights were published; 0 for the weights that training started from."""
    mean: float
    half_width: float
    """Of the evaluation's own 95 % interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One arm, one seed."""

    arm: str
    seed: int
    run_dir: str
    curve: tuple[CurvePoint, ...]
    """By version, ascending."""
    repeat_differences: tuple[float, ...]
    """Between two evaluations of the same weights with other random streams: the evaluation's noise. Empty where it has none."""
    num_updates: int
    wall_seconds: float
    """From the first rollout to the last update."""
    checkpoint_seconds: float
    """Part of wall_seconds in which the learner wrote checkpoints for the evaluations."""
    occupancy: float | None
    attainable_occupancy: float | None
    busy_fraction: float | None
    useful_tokens_per_second: float | None
    """Trained tokens / wall_seconds."""
    staleness_mean: float | None
    staleness_max: int | None
    key_staleness_mean: float | None = None
    """Of the trained tokens of key steps; None without key steps."""
    key_staleness_max: int | None = None
    key_over_bound_fraction: float | None = None
    """Of the trained key steps, those over pool.max_key_staleness."""
    predicted_seconds: float | None = None
    """What wall_seconds was said to be: by a profile before the run, else by the run itself after a tenth of its updates."""
    was_promised: bool = False
    """It was said before the run."""

    @property
    def final_mean(self) -> float:
        return final_mean(self.curve)

    @property
    def final_half_width(self) -> float:
        """Of the last evaluations' own interval; they share their tasks, so averaging them does not narrow it."""
        return statistics.fmean(point.half_width for point in self.curve[-NUM_SMOOTHED:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """An arm against the baseline, paired by seed."""

    arm: str
    baseline: str
    num_seeds: int
    final_difference: float
    """arm - baseline"""
    difference_interval95: Interval | None
    time_ratio: float | None
    """arm / baseline, geometric mean over the seeds in which both reached the target; None when there is no such seed."""
    time_ratio_interval95: Interval | None
    wall_ratio: float
    """Of the whole timed windows, arm / baseline, geometric mean: how long the arm took for its own number of updates."""
    num_reached: int
    """Seeds in which the arm reached the target."""
    num_baseline_reached: int

    @property
    def resolved(self) -> bool:
        """True when the interval of the final difference leaves out 0."""
        interval = self.difference_interval95
        return interval is not None and not interval[0] <= 0 <= interval[1]


def measure_run(lines: Sequence[Line], *, arm: str, seed: int, run_dir: str, capacity: int | None, repeats: Mapping[int, float] | None = None) -> MeasuredRun:
    """Numbers of a finished run whose checkpoints are evaluated (`evaluated` events of its log).

    `capacity`: of every sampling device, instead of what this run measured; `repeats`: version -> mean of a second evaluation.
    """
    summary = summarize(with_capacity(lines, capacity))
    curve = evaluation_curve(lines)
    means = {point.version: point.mean for point in curve}
    use = summary["utilization"]
    start, end = _window(lines)
    return MeasuredRun(
        arm=arm,
        seed=seed,
        run_dir=run_dir,
        curve=curve,
        repeat_differences=tuple(mean - means[version] for version, mean in sorted((repeats or {}).items()) if version in means),
        num_updates=summary["num_updates"],
        wall_seconds=summary["wall_seconds"],
        checkpoint_seconds=sum(line["seconds"] for line in lines if line["event"] == "checkpoint_saved" and start <= line["time"] <= end),
        occupancy=use["occupancy"],
        attainable_occupancy=use["attainable_occupancy"],
        busy_fraction=use["busy_fraction"],
        useful_tokens_per_second=summary["useful_tokens_per_second"],
        staleness_mean=summary["staleness"]["mean"],
        staleness_max=summary["staleness"]["max"],
        key_staleness_mean=summary["staleness"]["key_mean"],
        key_staleness_max=summary["staleness"]["key_max"],
        key_over_bound_fraction=over_bound_fraction(summary["ledger"]),
        predicted_seconds=promised_seconds(lines) or said_seconds(lines),
        was_promised=promised_seconds(lines) is not None,
    )


def promised_seconds(lines: Sequence[Line]) -> float | None:
    """The median that a plan or a profile gave before the run."""
    promised = next((line.get("promised") for line in lines if line["event"] == "run_started"), None)
    return float(promised["finish_seconds"]["p50"]) if promised else None


def said_seconds(lines: Sequence[Line], part: float = SAID_AFTER) -> float | None:
    """Of the whole timed window, by what a run had done after this part of its updates."""
    meter, start = FinishMeter(), 0.0
    for line in lines:
        meter.add(line)
        if line["event"] == "timed_window" and line["phase"] == "start":
            start = line["time"]
        if line["event"] == "updated" and line["version"] >= part * meter.num_updates:
            left = meter.forecast()
            return None if left is None else float(line["time"]) - start + left.seconds
    return None


def evaluation_curve(lines: Sequence[Line]) -> tuple[CurvePoint, ...]:
    """Evaluations by version; each at the time its weights were published, so that evaluating takes none."""
    start, _ = _window(lines)
    published: dict[int, float] = {}
    for line in lines:
        if line["event"] == "run_resumed":
            published = {version: seconds for version, seconds in published.items() if version <= line["resumed_from_update"]}
        if line["event"] == "weights_published":
            published.setdefault(line["version"], max(0.0, line["time"] - start))
    found = {line["version"]: line for line in lines if line["event"] == "evaluated"}  # the newest of each: what a restore undid is made again
    return tuple(
        CurvePoint(version=version, seconds=published[version], mean=line["mean"], half_width=(line["interval95"][1] - line["interval95"][0]) / 2)
        for version, line in sorted(found.items())
        if version in published
    )


def measured_capacity(lines: Iterable[Line]) -> list[int]:
    """What each sampling device of a run measured at its start."""
    devices: list[dict[str, Any]] = next((line["devices"] for line in lines if line["event"] == "run_started"), [])
    return [device["capacity"] for device in devices if device["role"] != "learner"]


def with_capacity(lines: Iterable[Line], capacity: int | None) -> list[Line]:
    """The same events, as if every sampling device had measured `capacity`; None leaves them as they are."""
    if capacity is None:
        return list(lines)
    changed: list[Line] = []
    for line in lines:
        if line["event"] in ("run_started", "run_resumed"):
            devices = [device if device["role"] == "learner" else {**device, "capacity": capacity} for device in line["devices"]]
            line = {**line, "devices": devices}
        changed.append(line)
    return changed


def final_mean(curve: Sequence[CurvePoint]) -> float:
    """Mean of the last 3 evaluations."""
    return statistics.fmean(point.mean for point in curve[-NUM_SMOOTHED:])


def time_to_reward(curve: Sequence[CurvePoint], target: float) -> float | None:
    """Seconds from which on the mean of 3 evaluations in a row stays at or above the target; None when it never does.

    The time is that of the last of the three.
    """
    reached = None
    for end in range(NUM_SMOOTHED, len(curve) + 1):
        if statistics.fmean(point.mean for point in curve[end - NUM_SMOOTHED : end]) < target:
            reached = None
        elif reached is None:
            reached = curve[end - 1].seconds
    return reached


def jitter(curve: Sequence[CurvePoint]) -> float | None:
    """Standard deviation of successive evaluation differences after the curve first reaches 90 % of its final value.

    None with fewer than 2 differences. A final value below 0 counts as reached from 10 % of its size below it.
    """
    final = final_mean(curve)
    threshold = final - (1 - _NEARLY_FINAL) * abs(final)
    first = next((index for index, point in enumerate(curve) if point.mean >= threshold), len(curve))
    late = [point.mean for point in curve[first:]]
    differences = [after - before for before, after in itertools.pairwise(late)]
    return statistics.stdev(differences) if len(differences) >= 2 else None


def noise_floor(runs: Iterable[MeasuredRun]) -> float:
    """The jitter that evaluating alone makes: root mean square difference of two evaluations of the same weights. 0: exact."""
    differences = [difference for run in runs for difference in run.repeat_differences]
    return math.sqrt(statistics.fmean(difference**2 for difference in differences)) if differences else 0.0


def default_target(baseline: Sequence[MeasuredRun]) -> float:
    """The baseline's final mean over its seeds - 0.01."""
    return statistics.fmean(run.final_mean for run in baseline) - TARGET_BELOW_FINAL


def mean_and_interval(values: Sequence[float]) -> tuple[float, Interval | None]:
    """(mean, its 95 % t interval; None with one value)"""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    half_width = t_quantile_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, (mean - half_width, mean + half_width)


def t_quantile_975(degrees: int) -> float:
    """Of Student's t; over 10 degrees of freedom by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5), within 0.0002."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _Z_975
    return (
        z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def compare_arm(arm: Sequence[MeasuredRun], baseline: Sequence[MeasuredRun], target: float) -> ArmComparison:
    """Paired by seed; runs whose seed the other arm lacks are left out. Raises ValueError without a common seed."""
    others = {run.seed: run for run in baseline}
    pairs = [(run, others[run.seed]) for run in sorted(arm, key=lambda run: run.seed) if run.seed in others]
    if not pairs:
        raise ValueError("the arms have no seed in common")
    difference, interval = mean_and_interval([one.final_mean - other.final_mean for one, other in pairs])
    times = [(time_to_reward(one.curve, target), time_to_reward(other.curve, target)) for one, other in pairs]
    logs = [math.log(mine / theirs) for mine, theirs in times if mine and theirs]
    ratio, ratio_interval = None, None
    if logs:
        mean, log_interval = mean_and_interval(logs)
        ratio = math.exp(mean)
        ratio_interval = None if log_interval is None else (math.exp(log_interval[0]), math.exp(log_interval[1]))
    return ArmComparison(
        arm=arm[0].arm,
        baseline=baseline[0].arm,
        num_seeds=len(pairs),
        final_difference=difference,
        difference_interval95=interval,
        time_ratio=ratio,
        time_ratio_interval95=ratio_interval,
        wall_ratio=math.exp(statistics.fmean(math.log(one.wall_seconds / other.wall_seconds) for one, other in pairs)),
        num_reached=sum(mine is not None for mine, _ in times),
        num_baseline_reached=sum(theirs is not None for _, theirs in times),
    )


_BOUNDLESS = 100.0
"""An interval of a ratio whose ends lie farther apart than this says nothing: two seeds have one degree of freedom."""


def verdict(comparisons: Sequence[ArmComparison], target: float) -> str:
    """One sentence or two for each arm: time, difference, interval, and what is not resolved."""
    return " ".join(f"{_time_sentence(one, target)} {_difference_sentence(one)}" for one in comparisons)


def _time_sentence(one: ArmComparison, target: float) -> str:
    seeds = "1 seed" if one.num_seeds == 1 else f"{one.num_seeds} seeds"
    missed = [
        f"{name} does not in {one.num_seeds - reached} of {seeds}"
        for name, reached in ((one.arm, one.num_reached), (one.baseline, one.num_baseline_reached))
        if reached < one.num_seeds
    ]
    took = f"{one.arm}'s runs took {one.wall_ratio:.2f} x as long as {one.baseline}'s"
    if one.time_ratio is None:
        return f"In no seed do both {one.arm} and {one.baseline} reach {target:.3f} ({'; '.join(missed)}); {took}."
    interval = ""
    if one.time_ratio_interval95 is not None and one.time_ratio_interval95[1] > _BOUNDLESS * one.time_ratio_interval95[0]:
        interval = ", which do not bound it" + (": use --seeds 3 or more" if one.num_seeds == 2 else "")
    elif one.time_ratio_interval95 is not None:
        interval = f", 95 % interval {one.time_ratio_interval95[0]:.2f} to {one.time_ratio_interval95[1]:.2f}"
    counted = f"; seeds that miss it left out: {'; '.join(missed)}; {took}" if missed else ""
    return f"{one.arm} reaches {target:.3f} in {one.time_ratio:.2f} x the time of {one.baseline} ({seeds}{interval}{counted})."


def _difference_sentence(one: ArmComparison) -> str:
    difference = f"The final evaluation of {one.arm} differs by {one.final_difference:+.4f}"
    interval = one.difference_interval95
    if interval is None:
        return f"{difference}: not resolved, one seed has no interval; use --seeds 3 or more."
    text = f"{difference} (95 % interval {interval[0]:+.4f} to {interval[1]:+.4f})"
    if one.resolved:
        return f"{text}: {'better' if one.final_difference > 0 else 'worse'}."
    return f"{text}: not resolved; more than {max(0.0, -interval[0]):.4f} worse or {max(0.0, interval[1]):.4f} better is ruled out."


def as_json(
    arms: Mapping[str, Sequence[MeasuredRun]], settings: Mapping[str, Mapping[str, Any]], comparisons: Sequence[ArmComparison], target: float
) -> dict[str, Any]:
    """target_reward, noise_floor, arms, comparisons, verdict: the object of CONTRACTS without what only the command knows."""
    return {
        "target_reward": target,
        "noise_floor": noise_floor(run for runs in arms.values() for run in runs),
        "arms": [_arm_json(name, runs, settings[name], target) for name, runs in arms.items()],
        "comparisons": [
            {
                "arm": one.arm,
                "baseline": one.baseline,
                "num_seeds": one.num_seeds,
                "final_difference": one.final_difference,
                "difference_interval95": one.difference_interval95,
                "time_ratio": one.time_ratio,
                "time_ratio_interval95": one.time_ratio_interval95,
                "wall_ratio": one.wall_ratio,
                "num_reached": one.num_reached,
                "num_baseline_reached": one.num_baseline_reached,
                "resolved": one.resolved,
            }
            for one in comparisons
        ],
        "verdict": verdict(comparisons, target),
    }


def _arm_json(name: str, runs: Sequence[MeasuredRun], settings: Mapping[str, Any], target: float) -> dict[str, Any]:
    mean, interval = mean_and_interval([run.final_mean for run in runs])
    return {"name": name, "settings": dict(settings), "final_mean": mean, "final_interval95": interval, "runs": [_run_json(run, target) for run in runs]}


def _run_json(run: MeasuredRun, target: float) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "run_dir": run.run_dir,
        "wall_seconds": run.wall_seconds,
        "time_to_reward_seconds": time_to_reward(run.curve, target),
        "final_mean": run.final_mean,
        "jitter": jitter(run.curve),
        "occupancy": run.occupancy,
        "attainable_occupancy": run.attainable_occupancy,
        "busy_fraction": run.busy_fraction,
        "useful_tokens_per_second": run.useful_tokens_per_second,
        "staleness_mean": run.staleness_mean,
        "staleness_max": run.staleness_max,
        "key_staleness_mean": run.key_staleness_mean,
        "key_staleness_max": run.key_staleness_max,
        "key_over_bound_fraction": run.key_over_bound_fraction,
        "predicted_seconds": run.predicted_seconds,
        "was_promised": run.was_promised,
        "num_updates": run.num_updates,
        "checkpoint_seconds": run.checkpoint_seconds,
        "curve": [{"version": point.version, "seconds": point.seconds, "mean": point.mean, "half_width": point.half_width} for point in run.curve],
    }


def _window(lines: Iterable[Line]) -> tuple[float, float]:
    """(start, end) of the timed window; a run that was cut ends never."""
    start, end, is_open = 0.0, math.inf, False
    for line in lines:
        if line["event"] == "run_resumed" and not went_back(line):
            is_open = False
        if line["event"] == "timed_window":
            if line["phase"] == "end":
                end, is_open = line["time"], False
            elif not is_open:
                start, is_open = line["time"], True
    return start, end
