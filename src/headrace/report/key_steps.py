"""The report's section on key steps: how fresh they were trained, and what verification and pace did for it and cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from headrace.report.figures_key_steps import key_bound, key_step_figures, redrawn_shares, rollouts_out
from headrace.report.markup import Markup, figure, join, number_text, percent, table, tag
from headrace.report.record import RunRecord
from headrace.report.summary import over_bound_fraction


def has_key_steps(run: RunRecord) -> bool:
    """Marks or verification: otherwise there is nothing to say."""
    return bool(offered(run) or run.summary["verification"]["asked"])


def offered(run: RunRecord) -> int:
    steps = (run.summary["ledger"] or {}).get("key_steps") or {}
    return int(steps.get("offered", 0))


def key_step_parts(run: RunRecord) -> list[Markup | None]:
    """Figures and tables of the section; none where there are neither marks nor verification."""
    if not has_key_steps(run):
        return []
    first, *small = [figure(chart) for chart in key_step_figures(run)] or [None]
    grid = tag("div", *small, class_="grid") if small else None
    return [first, grid, _age_table(run), _verification_table(run), _pace_note(run)]


def key_step_lead(run: RunRecord) -> str | None:
    """In words; None where there is nothing to say."""
    if not has_key_steps(run):
        return None
    sentences = []
    if count := offered(run):
        staleness, over = run.summary["staleness"], over_bound_fraction(run.summary["ledger"])
        bound = key_bound(run)
        text = f"{count:,} key steps were offered"
        if staleness["key_mean"] is not None:
            trained = run.summary["ledger"]["key_steps"]["trained"]
            text += f" and {trained:,} trained; their tokens were {staleness['key_mean']:.1f} updates old on average and {staleness['key_max']} at most"
        if staleness["other_mean"] is not None:
            text += f", the other tokens {staleness['other_mean']:.1f} and {staleness['other_max']}"
        sentences.append(text + ".")
        if over is not None:
            of = f" of {bound:,} updates" if bound is not None else ""
            sentences.append(f"{percent(over)} of the trained key steps were over their bound{of}.")
    numbers = run.summary["verification"]
    if numbers["rollouts"]:
        cut = numbers["cut"] / numbers["rollouts"]
        sentences.append(f"{numbers['rollouts']:,} times a finished rollout was verified, and {percent(cut)} of these times it was cut.")
    return " ".join(sentences)


def _age_table(run: RunRecord) -> Markup | None:
    steps = (run.summary["ledger"] or {}).get("key_steps") or {}
    staleness = run.summary["staleness"]
    if not steps.get("offered"):
        return None
    lost = [(name, value) for name in ("skipped", "failed") for name, value in steps.get(name, {}).items() if value]
    left = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in lost) or "–"
    ages = [("tokens of key steps", staleness["key_mean"], staleness["key_max"]), ("other tokens", staleness["other_mean"], staleness["other_max"])]
    rows = [[name, _age(mean), "–" if oldest is None else f"{oldest:,}"] for name, mean, oldest in ages if mean is not None]
    over = steps["over_bound"]
    counts = [[f"{steps['offered']:,}", f"{steps['trained']:,}", _share(over, steps["trained"]), f"{steps['pooled'] + steps['in_flight']:,}", left]]
    return join(
        [
            tag("h3", "Fresh when trained"),
            table(["", "mean age, updates", "oldest"], rows) if rows else None,
            table(["key steps offered", "trained", "of them over the bound", "not trained yet", "not trained, by reason"], counts),
        ]
    )


def _verification_table(run: RunRecord) -> Markup | None:
    numbers = run.summary["verification"]
    if not numbers["asked"]:
        return None
    returned, drawn = numbers["rollouts"], ((run.summary["ledger"] or {}).get("tokens") or {}).get("generated", 0)
    busy = sum(device["busy_fraction"] * device["allocated_seconds"] for device in run.summary["utilization"]["devices"] if device["role"] != "learner")
    seconds = f"{numbers['seconds']:,.1f} s"
    rows: list[list[object]] = [
        ["rollouts asked for", f"{numbers['asked']:,}", "once more each time they have aged"],
        ["came back whole", _share(returned - numbers["cut"], returned), "every checked token accepted: it counts as drawn by the newest weights"],
        ["came back cut", _share(numbers["cut"], returned), "from the first rejected token on drawn again"],
        ["tokens cut off", _share(numbers["refreshed_tokens"], drawn), "of all tokens drawn; skipped.refreshed in the ledger"],
        ["key steps cut", f"{numbers['refreshed_key_steps']:,}", "they lost tokens: skipped.refreshed among the key steps"],
        ["samplers' time", f"{seconds} ({percent(min(1.0, numbers['seconds'] / busy))})" if busy else seconds, "of their busy time, for the check itself"],
        ["tokens computed", f"{numbers['tokens']:,}", "for the check: a prefill"],
        *_tail_rows(run),
    ]
    if numbers["unkept"]:
        rows.append(["could not be checked", f"{numbers['unkept']:,}", "their distributions did not fit into sampler.verify_memory_bytes"])
    return join([tag("h3", "Verification"), table(["", "number", "meaning"], rows)])


def _tail_rows(run: RunRecord) -> list[list[object]]:
    """What a group waits for: the mean time until a rollout is back, and how much of those cut is drawn again."""
    rows: list[list[object]] = []
    seconds = mean_seconds_out(rollouts_out(run.lines))
    if seconds is not None:
        rows.append(["time until it is back", f"{seconds:.2f} s", "mean over the rollouts, whole and cut (Little's law)"])
    tail, share = run.summary["verification"]["tail_seconds"], run.summary["verification"]["tail_share"]
    if tail is not None:
        text = f"{tail['median']:.2f} s, 95 % within {tail['p95']:.2f} s, longest {tail['max']:.2f} s"
        of = f"of a rollout's time: median {percent(share['median'])}, 95 % within {percent(share['p95'])}" if share is not None else ""
        rows.append(["from rejection until back", text, of])
    shares = sorted(redrawn_shares(run.events("rollout_verified")))
    if shares:
        most = shares[min(len(shares) - 1, int(0.9 * len(shares)))]
        rows.append(["redrawn tail", percent(sum(shares) / len(shares)), f"mean share of a cut rollout; one in ten over {percent(most)}"])
    return rows


def mean_seconds_out(levels: Sequence[tuple[float, int]]) -> float | None:
    """(time, rollouts out from then on) -> how long one is out: the integral of the level / the rollouts that were out (Little's law)."""
    area = sum(out * (later - time) for (time, out), (later, _) in itertools.pairwise(levels))
    before = [0, *(out for _, out in levels)]
    entered = sum(max(0, after - earlier) for earlier, after in itertools.pairwise(before))
    return area / entered if entered else None


def _pace_note(run: RunRecord) -> Markup | None:
    judged: list[Any] = run.events("paced")
    if not judged:
        return None
    last, limits = judged[-1], [line["limit_groups"] for line in judged]
    range_text = f"{min(limits):,} to {max(limits):,}" if min(limits) < max(limits) else f"{limits[0]:,}"
    text = f"Pace: {range_text} of {last['max_groups']:,} groups might be outstanding; {number_text(float(last['wait_seconds']))} s were spent waiting for it. "
    return tag("p", f"{text}Last judgement: {last['reason']}.", class_="note")


def _share(count: float, total: float) -> str:
    return f"{count:,} ({percent(count / total)})" if total else f"{count:,}"


def _age(mean: float | None) -> str:
    return "–" if mean is None else f"{mean:.2f}"
