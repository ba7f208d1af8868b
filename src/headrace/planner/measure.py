"""A profile from what a run recorded: its events, its settings, and the config.json of its newest checkpoint. Nothing is run."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError, Problem
from headrace.event_log import check_first_event, event_of
from headrace.planner.distributions import Distribution
from headrace.planner.fits import fit_decode, fit_learn
from headrace.planner.key_steps import key_step_share, measure_checks
from headrace.planner.observed import observe
from headrace.planner.overheads import dispatch_seconds, environment_seconds, gap_seconds, handover_seconds, settled, step_seconds, work_share
from headrace.planner.profile import (
    Decode,
    DecodePoint,
    Distributions,
    Group,
    Hardware,
    Learn,
    LearnPoint,
    Model,
    Prefill,
    Profile,
    Saturation,
    Source,
    WeightUpdate,
)
from headrace.planner.rewards import Rewards, fit_rewards
from headrace.planner.roofline import saturation_of
from headrace.planner.shapes import ModelShape

Line = Mapping[str, Any]

EVENTS_FILE = "events.jsonl"
_MAX_LEARN_POINTS = 24
ANSWER_DELAY_STEPS = 2.0
_IN_THE_LOOP = 0.25
"""Of a step: waits below it are an environment that answers at once."""
_FAILED_ENDS = frozenset({"environment_error", "reward_error", "prompt_too_long", "sampler_error", "worker_lost", "cancelled", "mark_error"})
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True)
class Recording:
    """The lines of a run that a profile needs."""

    started: Line
    settings: Mapping[str, Any]
    directory: Path
    rollouts: list[Line] = field(default_factory=list)
    """rollout_finished, without the failed ones."""
    deliveries: list[Line] = field(default_factory=list)
    """The same, and rollout_verified, in order."""
    reserved: dict[int, float] = field(default_factory=dict)
    """When each group was reserved."""
    active: list[Line] = field(default_factory=list)
    updated: list[Line] = field(default_factory=list)
    taken: list[Line] = field(default_factory=list)
    published: list[Line] = field(default_factory=list)
    acknowledged: list[Line] = field(default_factory=list)
    levels: list[Line] = field(default_factory=list)
    windows: list[Line] = field(default_factory=list)
    last_time: float = 0.0

    def setting(self, section: str, key: str, default: Any) -> Any:
        return self.settings.get(section, {}).get(key, default)

    def devices(self, *roles: str) -> list[Line]:
        return [device for device in self.started["devices"] if device["role"] in roles]


def measure(directory: Path, *, kind: Literal["run", "measured"] = "run", origin: str | None = None) -> Profile:
    """Raises ConfigError when it is no run directory, its events are damaged, or the run did too little to be measured: no rollout finished, or no
    update."""
    try:
        return _measure(read_recording(directory), kind, origin or str(directory))
    except (LookupError, TypeError, AttributeError, ValueError) as error:  # lines that are JSON and have a name, but not the fields of an event
        message = f"{directory / EVENTS_FILE} holds damaged events ({type(error).__name__}: {error})."
        raise _wrong(directory, message, "Profile an undamaged run of this version of headrace.") from error


def _measure(recording: Recording, kind: Literal["run", "measured"], origin: str) -> Profile:
    directory = recording.directory
    if not recording.rollouts or not recording.updated:
        what = "finished no rollout" if not recording.rollouts else "made no update"
        raise _wrong(directory, f"the run in '{directory}' {what}: there is nothing to profile.", "Profile a run that made some updates.")
    model, dtype_bytes = _model(recording)
    distributions, group = _distributions(recording)
    points = _decode_points(recording, distributions)
    if not points:
        raise _wrong(directory, f"the run in '{directory}' reported no decode work.", "Profile a run of this version of headrace.")
    decode = _decode(recording, points, model, distributions)
    decode, distributions = _without_delay(decode, distributions)
    learn = _learn(recording)
    return Profile(
        source=Source(kind=kind, origin=origin),
        hardware=Hardware(device=str(recording.setting("model", "device", "cpu")), count=len(recording.started["devices"])),
        model=model,
        decode=decode,
        prefill=Prefill(overhead_seconds=0.0, tokens_per_second=min(1e12, 1.0 / max(decode.fit.seconds_per_extra_token, 1e-12))),
        learn=learn,
        weight_update=_weight_update(recording, model.num_parameters * dtype_bytes),
        distributions=distributions,
        group=group,
        dispatch_seconds=dispatch_seconds(recording),
        rewards=_rewards(recording),
        key_step_share=key_step_share(recording.rollouts),
        checks=measure_checks(str(recording.setting("pool", "verify", "off")), recording.deliveries, recording.active),
        observed=observe(recording),
    )


def read_recording(directory: Path) -> Recording:
    """Raises ConfigError when there is no events file or no run in it."""
    path = directory / EVENTS_FILE
    if not path.is_file():
        what = "does not exist" if not directory.exists() else f"holds no {EVENTS_FILE}: it is no run directory"
        raise _wrong(directory, f"'{directory}' {what}.", "Give the directory of a run, for example runs/NAME-TIME.")
    try:
        settings = tomllib.loads((directory / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # most of a profile does not need them
        settings = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            recording = _collect(filter(None, map(event_of, (text for text in file if text.endswith("\n")))), settings, directory)
    except OSError as error:
        raise _wrong(directory, f"{path} cannot be read: {error.strerror}.", "Check its rights.") from error
    if recording is None:
        raise _wrong(directory, f"{path} holds no event of a run yet.", "Profile again when the run has started up.")
    return recording


def _collect(lines: Iterable[Line], settings: Mapping[str, Any], directory: Path) -> Recording | None:
    recording: Recording | None = None
    for line in lines:
        if recording is None:
            check_first_event(line, directory / EVENTS_FILE)
            recording = Recording(started=line, settings=settings, directory=directory)
            continue
        recording.last_time = line["time"]
        match line["event"]:
            case "rollout_finished" if line["end"] not in _FAILED_ENDS:
                recording.rollouts.append(line)
                recording.deliveries.append(line)
            case "rollout_verified" if line["end"] not in _FAILED_ENDS:
                recording.deliveries.append(line)
            case "group_reserved":
                recording.reserved[line["group_id"]] = line["time"]
            case "worker_active":
                recording.active.append(line)
            case "updated" if line["statistics"] is not None:
                recording.updated.append(line)
            case "selection_taken":
                recording.taken.append(line)
            case "weights_published":
                recording.published.append(line)
            case "weights_acknowledged":
                recording.acknowledged.append(line)
            case "pool":
                recording.levels.append(line)
            case "timed_window":
                recording.windows.append(line)
    return recording


def _model(recording: Recording) -> tuple[Model, int]:
    """(model, bytes of one weight); from the newest checkpoint's config.json, else from the bytes that an update sends."""
    dtype_bytes = _DTYPE_BYTES.get(str(recording.setting("model", "dtype", "float32")), 4)
    configs = sorted((recording.directory / "checkpoints").glob("update_*/config.json"))
    if configs:
        try:
            shape = ModelShape.load(configs[-1])
            return Model(num_parameters=shape.num_parameters, kv_bytes_per_token=shape.kv_values_per_token * dtype_bytes), dtype_bytes
        except ConfigError:  # an architecture whose config names its sizes otherwise
            pass
    sent = max((line["bytes"] for line in recording.published), default=0)
    return Model(num_parameters=sent // dtype_bytes), dtype_bytes


def _distributions(recording: Recording) -> tuple[Distributions, Group]:
    rollouts = settled(recording.rollouts)
    groups = [int(line["group"]) for line in rollouts]
    began = [float(line["versions"][0]) if line["versions"] else 0.0 for line in rollouts]
    answers = [float(line["tokens"]) for line in rollouts]
    drawn = sum(line["activity"]["sampled_tokens"] for line in recording.active)
    # runs of versions that did not write total_tokens: samplers at least counted what they computed beside what they drew
    ratio = sum(line["activity"]["prefill_tokens"] for line in recording.active) / drawn if drawn else 0.0
    prompts = [float(line["total_tokens"] - line["tokens"]) if line.get("total_tokens") else ratio * line["tokens"] for line in rollouts]
    steps = [float(line["steps"]) for line in rollouts]
    waits = [float(line["wait_seconds"] or 0.0) for line in rollouts]
    return Distributions(
        prompt_tokens=Distribution.of(prompts, began, groups),
        answer_tokens=Distribution.of(answers, began, groups),
        steps=Distribution.of(steps, began, groups),
        tool_wait_seconds=_step_waits(steps, waits),
    ), _group(rollouts)


def _step_waits(steps: Sequence[float], waits: Sequence[float]) -> Distribution:
    """Of one step. A rollout reports the sum over its n steps: its mean is n m and its variance n v, which gives m and v; log-normal."""
    if sum(steps) <= 0:
        return Distribution.constant(0.0)
    if max(steps) <= 1:
        return Distribution.of(waits)
    mean = sum(waits) / sum(steps)
    variance = sum((wait - count * mean) ** 2 for wait, count in zip(waits, steps, strict=True)) / sum(steps)
    return Distribution.lognormal(mean, variance**0.5)


def _group(rollouts: Sequence[Line]) -> Group:
    members: dict[int, dict[int, Line]] = {}
    for line in rollouts:
        members.setdefault(line["group"], {})[line["member"]] = line
    size = max(len(group) for group in members.values())
    whole = [list(group.values()) for group in members.values() if len(group) == size]
    return Group(size=size, tailness=_tailness(whole, "tokens"), seconds_tailness=_tailness(whole, "seconds"), draw_to_end=_draw_to_end(whole))


def _rewards(recording: Recording) -> Rewards | None:
    """With the learner's padding: its tokens / those of the trajectories that carry a signal."""
    members: dict[int, list[Line]] = {}
    for line in settled(recording.rollouts):
        members.setdefault(line["group"], []).append(line)
    size = max(len(group) for group in members.values())
    whole = [group for group in members.values() if len(group) == size]
    no_signal = str(recording.setting("pool", "no_signal", "filter"))
    trained = [group for group in whole if no_signal == "train" or len({line["reward"] for line in group}) > 1]
    given = [float(line.get("total_tokens") or 0.0) for group in trained for line in group]
    computed, taken = sum(line["statistics"]["padded_tokens"] for line in recording.updated), sum(line["trajectories"] for line in recording.taken)
    padding = computed / taken / (sum(given) / len(given)) if taken and sum(given) else 0.0
    return fit_rewards(whole, padding=padding, no_signal=no_signal) if padding else None


def _tailness(groups: Sequence[Sequence[Line]], key: str) -> float:
    """E[largest of a group] / E[one]."""
    total = sum(float(line[key] or 0.0) for group in groups for line in group)
    largest = sum(max(float(line[key] or 0.0) for line in group) for group in groups)
    count = sum(len(group) for group in groups)
    return max(1.0, (largest / len(groups)) / (total / count)) if total > 0 else 1.0


def _draw_to_end(groups: Sequence[Sequence[Line]]) -> float | None:
    """Of the groups that carry a signal (of unequal rewards; all, where none does): mean over tokens / mean seconds of all rollouts."""
    useful = [group for group in groups if len({line["reward"] for line in group}) > 1] or groups
    tokens = seconds = 0.0
    for group in useful:
        end = max(line["time"] for line in group)
        for line in group:
            tokens += line["tokens"]
            seconds += line["tokens"] * (end - line["time"] + float(line["seconds"] or 0.0) / 2)
    mean = sum(float(line["seconds"] or 0.0) for group in groups for line in group) / sum(map(len, groups))
    return seconds / tokens / mean if tokens > 0 and mean > 0 else None


def _decode_points(recording: Recording, distributions: Distributions) -> list[DecodePoint]:
    """Sums over the run of steps alike in batch (a third of an octave), context (an octave) and tokens computed beside (an octave)."""
    sums: dict[tuple[int, int, int], list[float]] = {}
    for line in recording.active:
        activity = line["activity"]
        for work in activity.get("decode_work") or _without_detail(activity, distributions):
            steps, sequences, tokens, context, seconds = work
            if steps <= 0 or seconds <= 0 or sequences <= 0:
                continue
            extra = max(0.0, (tokens - sequences) / sequences)
            key = (_log_bin(sequences / steps, 3), _log_bin(max(context / sequences, 1.0), 1), _log_bin(1.0 + extra, 1))
            entry = sums.setdefault(key, [0.0] * 5)
            for index, value in enumerate((steps, sequences, tokens, context, seconds)):
                entry[index] += value
    return [
        DecodePoint(running=sequences / steps, context_tokens=context / sequences, seconds=seconds / steps, count=int(steps), tokens=tokens / steps)
        for _, (steps, sequences, tokens, context, seconds) in sorted(sums.items())
    ]


def _without_detail(activity: Mapping[str, Any], distributions: Distributions) -> list[tuple[float, float, float, float, float]]:
    """Runs that did not write decode_work: the mean step of each report, contexts half as long as a rollout."""
    steps, drawn = activity["decode_steps"], activity["sampled_tokens"]
    context = (distributions.prompt_tokens.mean + distributions.answer_tokens.mean) / 2
    return [(steps, drawn, drawn + activity["prefill_tokens"], drawn * context, step_seconds(activity))] if steps and drawn else []


def _log_bin(value: float, parts: int) -> int:
    """Octaves cut into `parts`."""
    return round(math.log2(max(value, 1e-9)) * parts)


def _decode(recording: Recording, points: list[DecodePoint], model: Model, distributions: Distributions) -> Decode:
    fit = fit_decode([(point.running, point.context_tokens, max(0.0, point.tokens - point.running), point.seconds, point.count) for point in points])
    fit = fit.scaled(
        sum(point.seconds * point.count for point in points)
        / sum(fit.seconds(point.running, point.context_tokens, max(0.0, point.tokens - point.running)) * point.count for point in points)
    )
    samplers = recording.devices("sampler", "colocated")
    capacity = min((int(device.get("capacity") or 0) for device in samplers), default=0)
    rate = min((float(device.get("saturated_tokens_per_second") or 0.0) for device in samplers), default=0.0)
    slots = int(recording.setting("sampler", "max_running", 64))
    context = distributions.prompt_tokens.mean + distributions.answer_tokens.mean / 2
    saturation = Saturation(running=capacity, tokens_per_second=rate) if capacity > 0 and rate > 0 else saturation_of(fit, context, slots)
    gap, gap_per_sequence = _gaps(recording, distributions)
    kv_bytes = model.kv_bytes_per_token
    memory = int(recording.setting("sampler", "kv_memory_bytes", 0))
    return Decode(
        points=tuple(points), fit=fit, kv_capacity_tokens=memory // kv_bytes if memory and kv_bytes else None, saturation=saturation,
        gap_seconds=gap, gap_seconds_per_sequence=gap_per_sequence, work_share=max(1e-3, work_share(recording.active)),
    )  # fmt: skip


def _gaps(recording: Recording, distributions: Distributions) -> tuple[float, float]:
    """(seconds between two decode steps, the part of each running sequence).

    Where environments answer at once nobody gathers for them: between two steps the loop ends rollouts and begins others, so the gap grows
    with the batch (`arithmetic`: 8.2, 8.9 and 9.2 us a sequence with 36, 81 and 103 running). A sampler that is said to wait for
    environments may have its loop at work: with n rollouts that wait W seconds on average the first is back after W / n, so what is
    longer, where that is short, is the rollouts' own work.
    """
    steps = gathered = busy_steps = between = sequences = 0.0
    wait = distributions.tool_wait_seconds.mean
    for line in recording.active:
        activity = line["activity"]
        done, gather = activity["decode_steps"], gap_seconds(activity)
        steps, gathered = steps + done, gathered + gather
        idle = environment_seconds(activity)
        out = max(line["in_flight"], activity["sampled_tokens"] / max(1, done))  # sync: nothing is, when the report is made
        waited = done * wait / max(1, out)
        if idle > 4 * waited and out > 1 and done:
            busy_steps, between, sequences = busy_steps + done, between + idle - waited, sequences + activity["sampled_tokens"]
    each = between / sequences if busy_steps >= 0.5 * steps and sequences else 0.0
    drawn = sum(line["activity"]["sampled_tokens"] for line in recording.active)
    if drawn and wait * steps < _IN_THE_LOOP * sum(step_seconds(line["activity"]) for line in recording.active):
        return 0.0, each + gathered / drawn
    return (gathered / steps if steps else 0.0), each


def _without_delay(decode: Decode, distributions: Distributions) -> tuple[Decode, Distributions]:
    """Waits as environments make them, and how many decode steps answers then wait to be noticed, which depends on the setup.

    A wait ends in the middle of a step, and goes through the event loop, which gets round once a step. Measured on `door`, whose tools
    take 33.0 ms: waits of 37.4 ms beside steps of 2 ms, 46.9 ms beside steps of 5.9 ms. Waits much shorter than a step never left the loop: their rollouts are
    back before the next step, all of them.
    """
    drawn = sum(point.running * point.count for point in decode.points)
    step = sum((point.seconds + decode.gap_seconds + decode.gap_seconds_per_sequence * point.running) * point.running * point.count for point in decode.points)
    delay, waits = ANSWER_DELAY_STEPS * step / drawn, distributions.tool_wait_seconds
    if waits.mean < _IN_THE_LOOP * step / drawn:  # the environments' own Python, which the gaps have
        return decode, replace(distributions, tool_wait_seconds=Distribution.constant(0.0))
    if waits.mean <= delay:
        return decode, distributions
    shorter = waits.scaled((waits.mean - delay) / waits.mean)
    return replace(decode, answer_delay_steps=ANSWER_DELAY_STEPS), replace(distributions, tool_wait_seconds=shorter)


def _learn(recording: Recording) -> Learn:
    """Without the first update of a longer run, which allocates and compiles."""
    updated = recording.updated[1:] if len(recording.updated) > 3 else recording.updated
    ranks = max(1, len(recording.devices("learner", "colocated")))
    micro = int(recording.setting("learner", "micro_batch_tokens", 8192))
    ordered = sorted((float(line["statistics"]["padded_tokens"]), float(line["seconds"])) for line in updated if line["seconds"] > 0)
    points = []
    bounds = [round(index * len(ordered) / min(_MAX_LEARN_POINTS, len(ordered))) for index in range(min(_MAX_LEARN_POINTS, len(ordered)) + 1)]
    for start, end in itertools.pairwise(bounds):
        part = ordered[start:end]
        tokens, seconds = sum(each[0] for each in part) / len(part), sorted(each[1] for each in part)[len(part) // 2]
        points.append(LearnPoint(ranks=ranks, micro_batch_tokens=micro, tokens=tokens, seconds=seconds))
    offered = sum(line["trajectories"] + line["filtered"] for line in recording.taken) or 1
    computed = sum(line["statistics"]["padded_tokens"] for line in recording.updated)
    fit = fit_learn([(point.ranks, point.micro_batch_tokens, point.tokens, point.seconds) for point in points])
    fit = fit.scaled(sum(seconds for _, seconds in ordered) / sum(fit.seconds(ranks, micro, tokens) for tokens, _ in ordered))
    return Learn(
        points=tuple(points),
        fit=fit,
        handover_seconds=handover_seconds(recording),
        tokens_per_trajectory=computed / offered,
        micro_batch_tokens=micro,
        busy_fraction=min(1.0, sum(line["busy_seconds"] for line in updated) / max(1e-12, sum(line["seconds"] for line in updated))),
    )


def _weight_update(recording: Recording, num_bytes: int) -> WeightUpdate:
    published = [float(line["seconds"]) for line in recording.published[1:] or recording.published]
    acknowledged = [float(line["wait_seconds"]) for line in recording.acknowledged[1:]]
    applied = sum(line["activity"]["applied_updates"] for line in recording.active)
    applying = sum(line["activity"]["apply_seconds"] for line in recording.active)
    return WeightUpdate(
        bytes=max((line["bytes"] for line in recording.published), default=num_bytes),
        publish_seconds=sum(published) / len(published) if published else 0.0,
        transfer_seconds=sum(acknowledged) / len(acknowledged) if acknowledged else 0.0,
        pause_seconds=applying / applied if applied else 0.0,
    )


def _wrong(directory: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key="RUN", value=str(directory), message=message, remedy=remedy)])
