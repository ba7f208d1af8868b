"""What is wrong with a run and what to do about it, in sentences: from its numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.report.summary import over_bound_fraction

_IDLE = 0.3
"""A device that is idle for one reason longer than this share of its time is worth a word."""
_WAITS = 0.1
"""A learner that waits less than this for its batches is not held up by samplers."""
_FULL = 0.7
_ALL = 0.95
_MIN_SECONDS = 5.0
_LOW_SAMPLE_SIZE = 0.5
_MANY_STALE = 0.05
_MANY_FILTERED = 0.5
_MANY_FAILED = 0.05
_MANY_OVER_BOUND = 0.05
_MUCH_VERIFICATION = 0.3
_HARDLY = 0.1
_NEAR_THE_BOUND = 0.6
_MUCH_RECOMPUTED = 0.25
_MEBIBYTE = 2**20


def advice(
    summary: Mapping[str, Any],
    utilization: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    newest: Mapping[str, Any] | None = None,
    pool: Mapping[str, Any] | None = None,
) -> list[str]:
    """Most important first. `utilization` is that of the stretch to judge; `newest` the statistics of the last update, `pool` its levels.

    `settings` as in config.toml: with them the advice names values.
    """
    rows, settings = utilization["devices"], settings or {}
    found: list[str] = []
    if rows and rows[0]["allocated_seconds"] >= _MIN_SECONDS:
        found += [text for text in (_bottleneck(summary, rows, settings, pool), _tail(rows, settings), _outrun(summary, rows, settings)) if text]
    found += _recomputed(summary["cache"], settings)
    found += _learning(newest, settings, sync=summary["mode"] == "sync")
    found += _key_steps(summary, settings)
    found += _ledger(summary["ledger"])
    return found + _failures(summary)


def _bottleneck(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], pool: Mapping[str, Any] | None) -> str | None:
    """Who waits for whom, and which setting moves that."""
    samplers, learners = [row for row in rows if row["role"] == "sampler"], [row for row in rows if row["role"] == "learner"]
    if summary["mode"] == "sync" or not samplers or not learners:
        occupancy = sum(row["occupancy"] for row in rows) / len(rows)
        if summary["mode"] == "sync" and occupancy < _FULL:
            return f"occupancy {occupancy:.0%}: in sync everybody waits in turn; try run.mode=async"
        return None
    waits_for_batch = _mean_share(learners, "batch")
    environment, admission = _mean_share(samplers, "environment"), _mean_share(samplers, "admission")
    rollouts, bookkeeping = _mean_share(samplers, "rollouts"), _mean_share(samplers, "bookkeeping")
    more = f"run.num_samplers={len(samplers) + 1} where another core or GPU is free"
    if admission > _IDLE:
        learner_busy = sum(row["busy_fraction"] for row in learners) / len(learners)
        if learner_busy > _FULL:
            return f"samplers idle {admission:.0%}: the learner is the bottleneck; try run.num_learner_ranks={len(learners) + 1} or fewer samplers"
        return f"samplers idle {admission:.0%}: admission lets no more rollouts start; try {_double(settings, 'pool', 'max_staleness')}"
    could = f", the learner could take {1 / (1 - waits_for_batch):.1f} x as much" if waits_for_batch < _ALL else ""
    if rollouts + bookkeeping > max(_IDLE, environment) and waits_for_batch > _WAITS:
        where = f"in Python: {rollouts:.0%} of rollouts, {bookkeeping:.0%} around the model's steps"
        return f"samplers are {rollouts + bookkeeping:.0%} {where}; try {more}{could}; a larger model or longer actions make it a smaller share"
    if environment > _IDLE:
        limit = settings.get("sampler", {}).get("max_in_flight")
        bound_by_limit = limit and pool and pool["rollouts_in_flight"] > 0.8 * limit * len(samplers)
        remedy = _double(settings, *(("sampler", "max_in_flight") if bound_by_limit else ("pool", "max_staleness")))
        plain = "of plain `def` code, rollout.num_user_processes or async def"
        return f"samplers idle {environment:.0%}: all rollouts wait for their environments; more in flight would fill it: try {remedy}; {plain}"
    if waits_for_batch > _IDLE:
        return f"learner idle {waits_for_batch:.0%}: samplers are the bottleneck; try {more}{could}"
    return None


def _tail(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str | None:
    thin = [row for row in rows if row["role"] == "sampler" and _in_steps(row) > _FULL and row["occupancy"] < 0.5 * row["busy_fraction"]]
    if not thin:
        return None
    worst = min(thin, key=lambda row: row["occupancy"])
    return (
        f"{worst['name']} decodes {_in_steps(worst):.0%} of its time and is filled {worst['occupancy']:.0%}: few sequences run at once; "
        f"try {_double(settings, 'pool', 'max_staleness')}, or sampler.max_running={worst['capacity']:.0f} if it is lower"
    )


def _in_steps(row: Mapping[str, Any]) -> float:
    """Share of its time in decode steps: the model's work and the Python around it."""
    return float(row["busy_fraction"] + row["idle_seconds"].get("bookkeeping", 0.0) / row["allocated_seconds"])


def _recomputed(cache: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Caches of waiting rollouts gave way for want of memory. As much memory as holds a slot for each rollout in flight would keep them all."""
    if not cache["evicted_tokens"] > _MUCH_RECOMPUTED * cache["prefill_tokens"]:
        return []
    share = cache["evicted_tokens"] / cache["prefill_tokens"]
    remedy, now = "a higher sampler.kv_memory_bytes", settings.get("sampler", {}).get("kv_memory_bytes")
    if now and cache["slots"]:
        needed = math.ceil(now / cache["slots"] * max(cache["most_in_flight"], cache["slots"] + 1) / _MEBIBYTE) * _MEBIBYTE
        remedy = f"sampler.kv_memory_bytes={needed} (now {now}), which holds the {cache['most_in_flight']:,} rollouts in flight"
    return [f"{share:.0%} of the computed context tokens are computed again, as the caches of waiting rollouts gave way: try {remedy}"]


def _outrun(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str | None:
    """Samplers faster than the learner: what they finish waits in the pool until it is as old as it may become, and nobody is faster for it."""
    learners, age = [row for row in rows if row["role"] == "learner"], summary["staleness"]["mean"]
    bound = settings.get("pool", {}).get("max_staleness")
    if summary["mode"] == "sync" or not learners or not bound or bound < 2 or age is None:
        return None
    if age < _NEAR_THE_BOUND * bound or _mean_share(learners, "batch") > _HARDLY:
        return None
    lower = f"pool.max_staleness={bound // 2} (now {bound})"
    return f"samplers outrun the learner, and what it trains is {age:.1f} updates old: {lower} gives fresher data at about the same pace"


def _learning(newest: Mapping[str, Any] | None, settings: Mapping[str, Any], *, sync: bool) -> list[str]:
    if newest is None or newest["effective_sample_size"] is None or newest["effective_sample_size"] >= _LOW_SAMPLE_SIZE:
        return []
    text = f"effective sample size {newest['effective_sample_size']:.2f}: the data is far from the policy"
    governed = sync or settings.get("governor", {}).get("adapt_staleness")
    remedy = "a lower learner.learning_rate" + ("" if sync else " or pool.max_staleness") + ("" if governed else ", or governor.adapt_staleness=true")
    return [f"{text}; try {remedy}"]


def _key_steps(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Key steps that are trained too old, and what verification lacks or costs."""
    pool, verification, found = settings.get("pool", {}), summary["verification"], []
    over = over_bound_fraction(summary["ledger"])
    if over is not None and over > _MANY_OVER_BOUND:
        bound = pool.get("max_key_staleness")
        older = f"older than {bound} updates" if bound is not None else "older than pool.max_key_staleness"
        remedies = ["pool.verify=key_steps"] if not verification["asked"] else []
        remedies += ["pool.pace_key_steps=true"] if summary["pace"] is None else []
        found.append(f"{over:.0%} of the key steps are trained {older}: try {' or '.join(remedies) or 'a lower pool.max_staleness'}")
    if verification["unkept"]:
        remedy = _double(settings, "sampler", "verify_memory_bytes")
        found.append(f"{verification['unkept']:,} rollouts could not be verified, their distributions did not fit: try {remedy}")
    busy = sum(row["busy_fraction"] * row["allocated_seconds"] for row in summary["utilization"]["devices"] if row["role"] != "learner")
    if verification["seconds"] > _MUCH_VERIFICATION * busy > 0:
        remedy = _double(settings, "pool", "verify_after")
        found.append(f"verification takes {min(1.0, verification['seconds'] / busy):.0%} of the samplers' busy time: try {remedy}")
    return found


def _ledger(ledger: Mapping[str, Any] | None) -> list[str]:
    if not ledger or "tokens" not in ledger:
        return []
    tokens, found = ledger["tokens"], []
    generated = tokens["generated"] or 1
    stale = tokens["skipped"].get("stale", 0) + tokens["expired"]
    if stale / generated > _MANY_STALE:
        found.append(f"{stale / generated:.0%} of the tokens were too stale to train; try a higher pool.max_staleness or a faster learner")
    filtered = ledger["trajectories"]["filtered"] / (ledger["trajectories"]["generated"] or 1)
    if filtered > _MANY_FILTERED:
        found.append(f"{filtered:.0%} of the trajectories were in groups of equal rewards: the tasks are too easy or too hard, or rollout.group_size is small")
    if not ledger["closes"]:
        found.append("the ledger does not close: this is a bug in headrace, please report it with events.jsonl")
    return found


def _failures(summary: Mapping[str, Any]) -> list[str]:
    failures = summary["failures"]
    if not failures:
        return []
    count = sum(one["rollouts"] for one in failures)
    generated = ((summary["ledger"] or {}).get("trajectories") or {}).get("generated") or 0
    worst = failures[0]
    text = f"{count} rollouts failed, most of them of task {worst['task']}: {worst['reason']}: {worst['error']}"
    return [text if generated and count / generated > _MANY_FAILED else text[:200]]


def _double(settings: Mapping[str, Any], section: str, key: str) -> str:
    """`pool.max_staleness=16 (now 8)`, or `a higher pool.max_staleness` where the value is not known."""
    now = settings.get(section, {}).get(key)
    return f"{section}.{key}={2 * now or 1} (now {now})" if isinstance(now, int) else f"a higher {section}.{key}"


def _mean_share(rows: Sequence[Mapping[str, Any]], reason: str) -> float:
    return float(sum(row["idle_seconds"].get(reason, 0.0) / row["allocated_seconds"] for row in rows) / len(rows))
