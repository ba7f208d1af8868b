"""Arms of one recipe, run in turn and evaluated alike: what `headrace compare` does. The statistics are in report/comparison.py.

Every arm gets the recipe's settings, the settings given for all, and its own on top; each seed trains every arm on the same tasks in
the same order. Runs save checkpoints and evaluate nothing; when a run is over, one process evaluates its checkpoints and the weights it
started from, and the results go into its event log. Start-up and evaluation are therefore outside the timed window of every arm.

    DIRECTORY/comparison.json              the settings of every arm and the hash of the recipe's Python: what makes it resumable
    DIRECTORY/runs/ARM-SEED/               run directories
    DIRECTORY/result.json                  what --json prints
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import headrace
from headrace.config import Mode, Placement, Settings
from headrace.config_loading import COMMAND_LINE, ResolvedSettings, load_settings, plain_values
from headrace.errors import CheckpointError, ConfigError, Problem
from headrace.event_log import EventLog, read_events
from headrace.events import Evaluated
from headrace.report.comparison import NUM_SMOOTHED, MeasuredRun, measure_run, measured_capacity
from headrace.report.markup import printable
from headrace.report.progress import ProgressView, duration

if TYPE_CHECKING:
    from headrace.planner.profile import Profile

SYNC, ASYNC = "sync", "async"
DEFAULT_EVALUATIONS = 20
BELONGS_TO_ARM = ("run.mode", "run.placement", "run.num_samplers", "run.num_learner_ranks")
SET_BY_COMPARE = ("checkpoint.every_updates", "checkpoint.every_seconds", "checkpoint.keep", "evaluation.every_updates")

_EVENTS, _COMPARISON, _REPEATS = "events.jsonl", "comparison.json", "evaluation_repeats.json"
_OTHER_STREAMS = 1_000_003
"""Added to the seed for the second evaluations that show the evaluation's noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    settings: tuple[str, ...]
    """`section.key=value`, on top of what all arms share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is decided before anything runs. Raises ConfigError for arms that cannot be compared."""

    recipe: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, ...]
    num_seeds: int
    evaluate_every: int | None
    """Updates between evaluated checkpoints; None: a twentieth of the run."""
    directory: Path
    profile: Path | None = None
    """By which runs are foretold."""

    def seeds(self) -> range:
        first = load_settings(self.recipe, self.overrides).settings.run.seed
        return range(first, first + self.num_seeds)

    def resolve(self, arm: Arm, seed: int) -> ResolvedSettings:
        """The settings of one run. Problems name the arm."""
        try:
            shared = load_settings(self.recipe, [*self.overrides, *arm.settings])
            return load_settings(self.recipe, [*self.overrides, *arm.settings, f"run.seed={seed}", *self._for_evaluation(shared)])
        except ConfigError as error:
            raise ConfigError([dataclasses.replace(problem, message=f"arm '{arm.name}': {problem.message}") for problem in error.problems]) from None

    def every(self, settings: Settings) -> int:
        return self.evaluate_every or max(1, settings.run.num_updates // DEFAULT_EVALUATIONS)

    def _for_evaluation(self, shared: ResolvedSettings) -> list[str]:
        settings = shared.settings
        updates = settings.run.num_updates
        if updates // self.every(settings) < NUM_SMOOTHED:
            message = f"{updates} updates with an evaluation every {self.every(settings)} give fewer than {NUM_SMOOTHED}, and the final value is their mean."
            raise ConfigError([Problem(key="--evaluate-every", value=self.evaluate_every, message=message, remedy="Use more updates or fewer between two.")])
        added = [f"checkpoint.every_updates={self.every(settings)}", "checkpoint.every_seconds=0", f"checkpoint.keep={updates + 1}"]
        added.append("evaluation.every_updates=0")
        if is_exact(settings) and shared.origins["evaluation.samples_per_task"] != COMMAND_LINE:
            added.append("evaluation.samples_per_task=0")
        return added


def is_exact(settings: Settings) -> bool:
    """The metric comes from the recipe's evaluate function, a function of the weights: sampled rollouts would add nothing to it."""
    return settings.task.evaluate is not None and settings.evaluation.metric != "reward"


def make_arms(recipe: str, overrides: Sequence[str], given: Sequence[Arm], num_devices: int | None) -> tuple[Arm, ...]:
    """`sync` and `async` on equally many devices, then those given; one given under either name adds to its settings.

    Raises ConfigError for settings that belong to an arm but are given for all, and for ones that compare sets itself.
    """
    _refuse_keys(overrides, BELONGS_TO_ARM, "an arm decides that", "Write --arm NAME KEY=VALUE.")
    every = [*overrides, *(setting for arm in given for setting in arm.settings)]
    _refuse_keys(every, SET_BY_COMPARE, "compare sets it so that evaluations lie outside the timed window", "Use --evaluate-every.")
    _refuse_keys([setting for arm in given for setting in arm.settings], ("run.seed",), "seeds are paired", "Use --seeds.")
    _refuse_names(given)
    settings = load_settings(recipe, overrides).settings
    devices = num_devices or _num_devices(settings)
    more = {arm.name: arm.settings for arm in given}
    defaults = {SYNC: _sync_settings(devices), ASYNC: _async_settings(settings, devices)}
    arms = [Arm(name=name, settings=(*base, *more.pop(name, ()))) for name, base in defaults.items()]
    for name, own in more.items():
        is_sync = any(setting.replace(" ", "") == "run.mode=sync" for setting in own)
        arms.append(Arm(name=name, settings=(*defaults[SYNC if is_sync else ASYNC], *own)))
    return tuple(arms)


def _num_devices(settings: Settings) -> int:
    run = settings.run
    return max(2, run.num_samplers if run.placement is Placement.COLOCATED else run.num_samplers + run.num_learner_ranks)


def _sync_settings(devices: int) -> tuple[str, ...]:
    return ("run.mode=sync", "run.placement=colocated", f"run.num_samplers={devices}", f"run.num_learner_ranks={devices}")


def _async_settings(settings: Settings, devices: int) -> tuple[str, ...]:
    """The recipe's own split where it is one of so many devices; else a quarter of them learn."""
    run = settings.run
    learners = max(1, devices // 4)
    if run.placement is Placement.SPLIT and run.mode is Mode.ASYNC and run.num_samplers + run.num_learner_ranks == devices:
        learners = run.num_learner_ranks
    return ("run.mode=async", "run.placement=split", f"run.num_samplers={devices - learners}", f"run.num_learner_ranks={learners}")


def _refuse_keys(settings: Sequence[str], keys: Sequence[str], why: str, remedy: str) -> None:
    wrong = [key for setting in settings if (key := setting.partition("=")[0].strip()) in keys]
    if wrong:
        raise ConfigError([Problem(file=COMMAND_LINE, key=key, message=f"'{key}' cannot be given here: {why}.", remedy=remedy) for key in wrong])


def _refuse_names(given: Sequence[Arm]) -> None:
    for arm in given:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", arm.name):
            message = f"'{arm.name}' is not a name for an arm."
            raise ConfigError([Problem(key="--arm", value=arm.name, message=message, limit="letters, digits, _ . -", remedy="Write --arm NAME KEY=VALUE ...")])
        if sum(other.name == arm.name for other in given) > 1:
            raise ConfigError([Problem(key="--arm", value=arm.name, message=f"two arms are called '{arm.name}'.", remedy="Give each a name of its own.")])


# --- the directory -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held_directory(plan: Plan) -> Iterator[None]:
    """The comparison's directory, made or found again, for this process alone. Raises ConfigError when it holds something else."""
    directory = plan.directory
    try:
        if directory.exists() and any(directory.iterdir()) and not (directory / _COMPARISON).is_file():
            raise _refused(directory, "is not empty and holds no comparison")
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise _refused(directory, f"cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(directory, "is in use: another comparison is running there") from None
        _agree(plan)
        yield
    finally:
        os.close(descriptor)


def _agree(plan: Plan) -> None:
    """Writes down the settings of every arm, or finds the same ones written down: then finished runs are found again."""
    path = plan.directory / _COMPARISON
    resolved = {arm.name: plan.resolve(arm, seed=0) for arm in plan.arms}
    code = hashlib.sha256(next(iter(resolved.values())).task_module.read_bytes()).hexdigest()
    arms: dict[str, Any] = {name: plain_values(one.settings) for name, one in resolved.items()}
    if path.is_file():
        written = json.loads(path.read_text(encoding="utf-8"))
        if written["headrace"] != headrace.__version__:
            raise _refused(plan.directory, f"was made with headrace {written['headrace']}, this is {headrace.__version__}")
        if written["code"] != code:
            raise _refused(plan.directory, "was made with another version of the recipe's Python")
        for name in arms.keys() & written["arms"].keys():
            other = written["arms"][name]
            differing = [f"{key} was {other.get(key)!r}, is {value!r}" for key, value in arms[name].items() if other.get(key) != value]
            if differing:
                raise _refused(plan.directory, f"holds arm '{name}' with other settings ({'; '.join(differing[:5])})")
        arms = {**written["arms"], **arms}
    partial = path.with_suffix(".partial")
    record = {"schema": 1, "headrace": headrace.__version__, "recipe": plan.recipe, "code": code, "arms": arms}
    partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
    partial.replace(path)


def _refused(directory: Path, what: str) -> ConfigError:
    problem = Problem(key="--run-dir", value=str(directory), message=f"directory '{directory}' {what}.", remedy="Name another one with --run-dir.")
    return ConfigError([problem])


# --- the runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arm: Arm
    seed: int


Promises = Mapping[Job, Mapping[str, Any]]
"""By run, what a profile says of it (planner/promise.py)."""


def ordered_jobs(plan: Plan) -> list[Job]:
    """Seed by seed, every arm in turn; every second seed the other way round."""
    jobs = []
    for index, seed in enumerate(plan.seeds()):
        arms = plan.arms if index % 2 == 0 else tuple(reversed(plan.arms))
        jobs += [Job(arm=arm, seed=seed) for arm in arms]
    return jobs


async def run_comparison(plan: Plan, stream: IO[str], promises: Promises | None = None) -> dict[str, list[MeasuredRun]]:
    """Runs and evaluates what is not there yet, then measures everything: arm -> its runs by seed. `stream` gets the progress.

    Cancelling it (Ctrl-C) ends the run in progress cleanly; the same plan goes on where this stopped.
    """
    pending = [job for job in ordered_jobs(plan) if not is_complete(run_directory(plan, job), plan.resolve(job.arm, job.seed).settings)]
    total = len(ordered_jobs(plan))
    if len(pending) < total:
        _say(stream, f"{total - len(pending)} of {total} runs are there already")
    seconds: dict[str, list[float]] = {}
    for index, job in enumerate(pending):
        left = seconds_left(seconds, [other.arm.name for other in pending[index:]])
        done = total - len(pending) + index
        _say(stream, f"[{done + 1}/{total}] {job.arm.name}, seed {job.seed}" + ("" if left is None else f"; about {duration(left)} to finish everything"))
        started = time.monotonic()
        directory, resolved = run_directory(plan, job), plan.resolve(job.arm, job.seed)
        if not _is_run(directory):
            await _train(dataclasses.replace(resolved, promised=(promises or {}).get(job)), directory, stream)
        await _evaluate(resolved, directory, stream)
        seconds.setdefault(job.arm.name, []).append(time.monotonic() - started)
    return measure(plan)


def make_promises(plan: Plan, profile: Profile, stream: IO[str]) -> Promises:
    """What the profile says of each run that is to be made. Runs whose settings the simulation does not know get none, which is said.

    Simulations have a loop of their own, so no other one may be running.
    """
    from headrace.planner.promise import promise_of_profile

    promises: dict[Job, Mapping[str, Any]] = {}
    by = "profile" if plan.profile is None else plan.profile.name
    jobs = [job for job in ordered_jobs(plan) if not _is_run(run_directory(plan, job))]
    if jobs:
        _say(stream, f"foretelling {len(jobs)} runs by {by}")
    for job in jobs:
        settings = plan.resolve(job.arm, job.seed).settings
        values = settings.model_dump(mode="json", exclude_none=True)
        try:
            promises[job] = promise_of_profile(profile, values, by=by, cores=_shared_cores(settings))
        except ConfigError as error:
            _say(stream, f"no promise for {job.arm.name}, seed {job.seed}: {error}")
    return promises


def _shared_cores(settings: Settings) -> int | None:
    """Of this machine, where devices are cores."""
    pinned = settings.run.pin_devices and settings.model.device == "cpu" and hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if pinned else None


def seconds_left(seconds: Mapping[str, Sequence[float]], remaining: Sequence[str]) -> float | None:
    """From how long runs of each arm took; an arm not seen yet takes the mean of the others. None before the first."""
    known = [one for values in seconds.values() for one in values]
    if not known:
        return None
    return sum(statistics.fmean(seconds.get(name) or known) for name in remaining)


def run_directory(plan: Plan, job: Job) -> Path:
    return plan.directory / "runs" / f"{job.arm.name}-{job.seed}"


def is_complete(directory: Path, settings: Settings) -> bool:
    """Run to its end, and every checkpoint evaluated."""
    if not _is_run(directory):
        return False
    lines = list(read_events(directory / _EVENTS))
    return not _unevaluated(lines) and not _unrepeated(directory, lines, settings)


def measure(plan: Plan) -> dict[str, list[MeasuredRun]]:
    """Every finished run, with one capacity for all; arm -> runs by seed."""
    capacity = common_capacity(plan)
    measured: dict[str, list[MeasuredRun]] = {arm.name: [] for arm in plan.arms}
    for job in sorted(ordered_jobs(plan), key=lambda job: job.seed):
        directory = run_directory(plan, job)
        lines = list(read_events(directory / _EVENTS))
        run = measure_run(lines, arm=job.arm.name, seed=job.seed, run_dir=str(directory), capacity=capacity, repeats=_repeats(directory))
        measured[job.arm.name].append(run)
    return measured


def common_capacity(plan: Plan) -> int | None:
    """The median of what the samplers of all runs measured, of the arms with the most decode slots.

    Capacity belongs to the device, not to an arm: one with few decode slots cannot measure it.
    """
    slots = {arm.name: plan.resolve(arm, 0).settings.sampler.max_running for arm in plan.arms}
    widest = [job for job in ordered_jobs(plan) if slots[job.arm.name] == max(slots.values())]
    measured = [one for job in widest for one in measured_capacity(itertools.islice(read_events(run_directory(plan, job) / _EVENTS), 1))]
    return statistics.median_low(measured) if measured else None


async def _train(resolved: ResolvedSettings, directory: Path, stream: IO[str]) -> None:
    """A run that was cut has no value here: its directory is emptied and it starts again."""
    from headrace.runtime.local import run_local

    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.closing(ProgressView(stream)) as view:
        await run_local(resolved, directory, subscribers=[_without_checkpoints(view.on_event)], progress=view.on_startup, evaluate=False)


def _without_checkpoints(subscriber: Callable[[Mapping[str, Any]], None]) -> Callable[[Mapping[str, Any]], None]:
    def pass_on(line: Mapping[str, Any]) -> None:
        if line["event"] != "checkpoint_saved":  # twenty lines that say nothing here
            subscriber(line)

    return pass_on


async def _evaluate(resolved: ResolvedSettings, directory: Path, stream: IO[str]) -> None:
    """Evaluates what is not evaluated yet; then only the last checkpoint is kept."""
    from headrace.runtime.local_evaluation import evaluate_checkpoints, start_model

    lines = list(read_events(directory / _EVENTS))
    places = _checkpoints(directory, lines)
    missing = _unevaluated(lines)
    if 0 in missing:
        places[0] = await start_model(resolved)
    _require(places, missing, directory)
    if missing:
        with contextlib.closing(EventLog.reopened(directory / _EVENTS, asyncio.get_running_loop().time)) as log:
            await evaluate_checkpoints(resolved, [(version, places[version]) for version in missing], on_evaluated=_counted(log.emit, missing, stream))
    repeated = _unrepeated(directory, lines, resolved.settings)
    if repeated:
        _require(places, repeated, directory)
        other = dataclasses.replace(resolved, settings=_with_seed(resolved.settings, resolved.settings.run.seed + _OTHER_STREAMS))
        again = [(version, places[version]) for version in repeated]
        found = await evaluate_checkpoints(other, again, on_evaluated=_counted(lambda event: None, repeated, stream, again=True))
        (directory / _REPEATS).write_text(json.dumps({event.version: event.mean for event in found}), encoding="utf-8")
    for version in sorted(places)[:-1]:
        if version:
            shutil.rmtree(places[version], ignore_errors=True)


def _counted(pass_on: Callable[[Evaluated], None], versions: Sequence[int], stream: IO[str], *, again: bool = False) -> Callable[[Evaluated], None]:
    """Passes each evaluation on and shows how many are done: a line that is rewritten in a terminal, one at the start and the end elsewhere."""
    seconds: list[float] = []
    total = len(versions)
    _say(stream, f"evaluating {total} checkpoints" + (" again, for the noise of evaluating" if again else ""))

    def count(event: Evaluated) -> None:
        pass_on(event)
        seconds.append(event.seconds)
        left = statistics.fmean(seconds) * (total - len(seconds))
        if stream.isatty():
            stream.write(f"\r\x1b[2K{len(seconds)}/{total}, {duration(left)} to go" if left else "\r\x1b[2K")
        if len(seconds) == total:
            _say(stream, f"update {event.version}: {event.mean:.4f}")

    return count


def _with_seed(settings: Settings, seed: int) -> Settings:
    return settings.model_copy(update={"run": settings.run.model_copy(update={"seed": seed})})


def _require(places: Mapping[int, Path], versions: Sequence[int], directory: Path) -> None:
    for version in versions:
        if version not in places or not places[version].is_dir():
            raise CheckpointError(
                f"{directory}: the checkpoint of update {version} is not there and not evaluated.", remedy=f"Remove {directory}; it runs again."
            )


def _is_run(directory: Path) -> bool:
    path = directory / _EVENTS
    return path.is_file() and any(line["event"] == "run_finished" and line["status"] == "done" for line in read_events(path))


def _checkpoints(directory: Path, lines: Sequence[Mapping[str, Any]]) -> dict[int, Path]:
    """Version -> directory; found by name, so that the comparison may be moved."""
    return {line["version"]: directory / "checkpoints" / Path(line["path"]).name for line in lines if line["event"] == "checkpoint_saved"}


def _unevaluated(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Versions without an evaluation: 0 and every checkpoint."""
    saved = {0, *(line["version"] for line in lines if line["event"] == "checkpoint_saved")}
    return sorted(saved - {line["version"] for line in lines if line["event"] == "evaluated"})


def _unrepeated(directory: Path, lines: Sequence[Mapping[str, Any]], settings: Settings) -> list[int]:
    """The last checkpoints, when their second evaluation (the noise of evaluating) is missing; none where evaluations are exact."""
    if is_exact(settings) or (directory / _REPEATS).is_file():
        return []
    return sorted({line["version"] for line in lines if line["event"] == "checkpoint_saved"})[-NUM_SMOOTHED:]


def _repeats(directory: Path) -> dict[int, float]:
    path = directory / _REPEATS
    return {int(version): mean for version, mean in json.loads(path.read_text(encoding="utf-8")).items()} if path.is_file() else {}


def _say(stream: IO[str], text: str) -> None:
    stream.write(printable(text) + "\n")
    stream.flush()
