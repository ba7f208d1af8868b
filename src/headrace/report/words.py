"""What a run was, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from headrace.report.comparison import evaluation_curve, final_mean
from headrace.report.figures_devices import words
from headrace.report.finish import FinishMeter
from headrace.report.markup import number_text, percent
from headrace.report.progress import duration
from headrace.report.promise import promise_advice, promise_text
from headrace.report.record import RunRecord
from headrace.report.utilization import went_back

_DEVICES = {
    "sampler": ("sampler", "samplers"),
    "learner": ("learner", "learners"),
    "colocated": ("device that samples and learns in turn", "devices that sample and learn in turn"),
}
LONG = 4.0
"""A rollout is long (slow) over this many times the median tokens (seconds) of the finished ones (DESIGN section 7)."""


def metric_of(run: RunRecord) -> str:
    return str(run.settings.get("evaluation", {}).get("metric", "mean"))


def status_of(run: RunRecord) -> str:
    """done | failed | interrupted | running (or killed: nobody wrote an end)"""
    return "running" if run.finished is None else str(run.finished["status"])


def headline(run: RunRecord) -> str:
    """What it was and how far it came."""
    summary, status = run.summary, status_of(run)
    how = "asynchronously" if summary["mode"] == "async" else "synchronously"
    roles = [device["role"] for device in run.started["devices"]]
    where = " and ".join(f"{roles.count(role)} {forms[roles.count(role) > 1]}" for role, forms in _DEVICES.items() if role in roles)
    planned = f" of {summary['planned_updates']:,}" if summary["planned_updates"] else ""
    did = f"{summary['num_updates']:,}{planned} updates in {duration(summary['wall_seconds'])}"
    begin = f"{summary['recipe'] or 'This run'} was trained {how} on {where or 'no device'} (seed {summary['seed']})"
    match status:
        case "done":
            return f"{begin}: {did}."
        case "running":
            return f"{begin}: {did} so far; the event log names no end, so the run is going on or was killed."
        case _:
            return f"{begin}: it was {'interrupted' if status == 'interrupted' else 'stopped by an error'} after {did}."


def result(run: RunRecord) -> str | None:
    before, after = run.summary["evaluation"]["before"], run.summary["evaluation"]["after"]
    metric = metric_of(run)
    if before and after and before["mean"] is not None and after["mean"] is not None:
        went = "rose" if after["mean"] > before["mean"] else "fell"
        return f"{metric} {went} from {_with_interval(before)} to {_with_interval(after)}."
    if before and before["mean"] is not None:
        return f"{metric} was {_with_interval(before)} before training; it has not been evaluated since."
    rewards = [line["reward_mean"] for line in run.surviving("updated") if line["reward_mean"] is not None]
    if len(rewards) >= 2:
        part = max(1, len(rewards) // 10)
        went = f"from {fmean(rewards[:part]):.3f} to {fmean(rewards[-part:]):.3f}"
        return f"The mean reward of a batch went {went} (first and last tenth of the updates); there was no evaluation."
    return None


def utilization(run: RunRecord) -> str | None:
    numbers = run.summary["utilization"]
    if not numbers["devices"]:
        return None
    attainable = numbers["attainable_occupancy"]
    text = f"The devices were {percent(numbers['occupancy'])} occupied and {percent(numbers['busy_fraction'])} busy"
    if attainable is not None and attainable < 0.995:
        text += f"; at best {percent(attainable)} occupancy can be had with this split"
    waits = []
    for device in numbers["devices"]:
        if device["idle_seconds"]:
            reason, seconds = max(device["idle_seconds"].items(), key=lambda item: item[1])
            share = seconds / device["allocated_seconds"]
            if share >= 0.05:
                waits.append((device["name"], reason, share))
    if not waits:
        return text + "."
    # many devices: the longest idle time of each reason is enough
    longest = {reason: (name, share) for name, reason, share in sorted(waits, key=lambda each: each[2])}
    shown = [f"{name} {words(reason)} {percent(share)} of the time" for reason, (name, share) in longest.items()][-3:]
    return f"{text}. Most idle time: {'; '.join(shown)}."


def freshness(run: RunRecord) -> str | None:
    numbers = run.summary["staleness"]
    if numbers["mean"] is None:
        return None
    if numbers["max"] == 0:
        return "Every token was trained by the very version that drew it (staleness 0)."
    text = f"A trained token was {numbers['mean']:.1f} updates old on average and {numbers['max']} at most"
    if numbers["key_mean"] is not None:
        text += f"; at key steps {numbers['key_mean']:.1f} and {numbers['key_max']}"
    return text + "."


def rollouts(run: RunRecord) -> str | None:
    if not run.rollouts:
        return None
    failed = sum(line["reason"] != "cancelled" and not line["retried"] for line in run.events("rollout_failed"))
    text = f"{len(run.rollouts):,} rollouts ended" + (f", {failed:,} of them failed for good" if failed else "")
    rate = run.summary["tokens_per_second"]
    return f"{text}; {rate:,.0f} tokens were drawn a second." if rate else f"{text}."


def long_and_slow(run: RunRecord) -> str | None:
    finished = [each for each in run.rollouts if each.tokens > 0]
    if not finished:
        return None
    tokens, seconds = median(each.tokens for each in finished), median(each.seconds for each in finished)
    long = sum(each.tokens > LONG * tokens for each in finished) / len(finished)
    slow = sum(each.seconds > LONG * seconds for each in finished) / len(finished)
    waits = sum(each.wait_seconds for each in finished) / (sum(each.seconds for each in finished) or 1)
    parked = run.summary["parked"]
    gave_way = f" Long ones gave their decode slot to short work {parked:,} times in the middle of an action." if parked else ""
    return (
        f"The median finished rollout had {number_text(tokens)} tokens and took {number_text(float(seconds))} s; {percent(waits)} of all rollout time "
        f"was spent waiting for the environment. {percent(long)} were long (over {LONG:.0f} times the median tokens), {percent(slow)} slow "
        f"(over {LONG:.0f} times the median seconds).{gave_way}"
    )


def losses(run: RunRecord) -> str | None:
    """Of processes that died, broke down or hung in the middle of the run."""
    lost, back = run.events("role_lost"), run.events("role_restarted")
    if not lost:
        return None
    counts = Counter(line["role"] for line in lost)
    who = ", ".join(f"{role} {count} time{'s' * (count > 1)}" for role, count in sorted(counts.items()))
    text = f"Lost in the middle of the run: {who}; {sum(line['rollouts'] for line in lost):,} rollouts began anew"
    if back:
        text += f", and it took {duration(max(line['seconds'] for line in back))} at most until a successor was up"
    return f"{text}. The last time: {lost[-1]['error']}"


def returns(run: RunRecord) -> str | None:
    """To a checkpoint, by the run itself."""
    back = [line for line in run.events("run_resumed") if went_back(line)]
    if not back:
        return None
    losses, last = sum(line["cause"] == "learner_lost" for line in back), back[-1]
    causes = [
        f"{count} time{'s' * (count > 1)} {why}" for count, why in ((losses, "because the learner was lost"), (len(back) - losses, "as a rollback")) if count
    ]
    rate = f", with the learning rate x {last['learning_rate_factor']:.3g}" if last["learning_rate_factor"] != 1.0 else ""
    undone, longest = sum(line["undone_updates"] for line in back), duration(max(line["seconds"] for line in back))
    return (
        f"The run went back to a checkpoint {' and '.join(causes)}: {undone} updates were made again, and it stood still for {longest} at most. "
        f"The last time it went on from update {last['resumed_from_update']} as lineage {last['lineage']}{rate}: {last['reason']}"
    )


def finish(run: RunRecord) -> str | None:
    """How long the rest takes, and what was promised."""
    meter = FinishMeter()
    for line in run.lines:
        meter.add(line)
    left = meter.forecast() if run.finished is None else None
    said = "" if left is None else f"It will take {duration(left.seconds)} more ({duration(left.low)} to {duration(left.high)}, four runs in five)."
    promised = promise_text(run.started.get("promised"), run.summary, left)
    found = [said, f"Promised {promised}." if promised else "", _as_sentence(promise_advice(run.started.get("promised"), run.summary, left))]
    return " ".join(each for each in found if each) or None


def _as_sentence(text: str | None) -> str:
    return f"It is {text}." if text else ""


def run_sentences(run: RunRecord) -> list[str]:
    return [each for each in (headline(run), finish(run), result(run), utilization(run), freshness(run), rollouts(run), losses(run), returns(run)) if each]


def final_of(run: RunRecord) -> float | None:
    """Mean of the last three evaluations, as `compare` has it."""
    curve = evaluation_curve(run.lines)
    return final_mean(curve) if curve else None


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _with_interval(numbers: Mapping[str, Any]) -> str:
    low, high = numbers["interval95"]
    return f"{numbers['mean']:.3f}" if high - low < 5e-4 else f"{numbers['mean']:.3f} (95\u00a0% interval {low:.3f} to {high:.3f})"
