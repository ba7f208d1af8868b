"""The sections of the report about one run, top to bottom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from headrace.report.examples import Recorded, example_section
from headrace.report.figures_devices import shares_of, timeline, utilization_bars, words
from headrace.report.figures_learning import arrival_delays, length_figures, pool_levels, ratio_figures, staleness_map
from headrace.report.figures_speed import decode_latency
from headrace.report.governor import governor_lead, governor_parts
from headrace.report.key_steps import key_step_lead, key_step_parts
from headrace.report.markup import Markup, escape, figure, join, number_text, percent, table, tag
from headrace.report.progress import duration
from headrace.report.record import RunRecord
from headrace.report.timeline import end_of
from headrace.report.words import freshness, long_and_slow, utilization

_MAX_FAILURES = 30
_CLASSES = ("trained", "skipped", "expired", "filtered", "failed", "void", "pooled", "in_flight")


def section(title: str, *parts: object, lead: str | None = None) -> Markup | None:
    """None when there is nothing to show."""
    shown = [part for part in parts if part is not None and part != ""]
    if not shown:
        return None
    return tag("section", tag("h2", title), tag("p", lead) if lead else None, *shown)


def run_sections(run: RunRecord, recorded: Recorded | None) -> Markup:
    """Everything but summary, curves and settings."""
    ratios = _grid(figure(chart) for chart in ratio_figures(run))
    supply = _grid(figure(chart) for chart in (pool_levels(run), arrival_delays(run)) if chart)
    lengths = _grid(figure(chart) for chart in length_figures(run))
    devices = [figure(chart) for chart in (timeline(run), utilization_bars(run), decode_latency(run))]
    return join(
        [
            section("Who worked, who waited", *devices, _time_table(run), lead=utilization(run)),
            section("How fresh the data was", figure(staleness_map(run)), supply, lead=freshness(run)),
            section("Key steps", *key_step_parts(run), lead=key_step_lead(run)),
            section("What the governor did", *governor_parts(run), lead=governor_lead(run)),
            section("Off-policy statistics", ratios, lead="Of the trained tokens of every update."),
            section("Lengths, and who got trained", lengths, _kind_table(run), _long_table(run, recorded), lead=long_and_slow(run)),
            section("Where every token went", _ledger_table(run), lead=_ledger_lead(run)),
            section("Failed rollouts", _failure_table(run), lead=_failure_lead(run)),
            example_section(recorded),
        ]
    )  # fmt: skip


def _grid(figures: Iterable[Markup | None]) -> Markup | None:
    shown = list(figures)
    return tag("div", *shown, class_="grid") if shown else None


def phases(run: RunRecord) -> list[tuple[str, float]]:
    """(phase, seconds) from the command to the last event of the run."""
    spans = run.windows.spans
    found = [("start-up", run.started.get("startup_seconds") or 0.0)]
    if not spans:
        return found
    end = end_of(run.lines)
    return [*found, ("before training", spans[0][0]), ("training", run.windows.seconds), ("after training", max(0.0, end - spans[-1][1]))]


def _time_table(run: RunRecord) -> Markup | None:
    """Seconds of every device by what it did, largest first; each column adds up to the allocated time."""
    devices = run.summary["utilization"]["devices"]
    if not devices:
        return None
    shares = [shares_of(device) for device in devices]
    total: Counter[str] = Counter()
    for device, each in zip(devices, shares, strict=True):
        for activity, share in each.items():
            total[activity] += share * device["allocated_seconds"]
    rows: list[list[object]] = [["allocated", *(_seconds(device["allocated_seconds"]) for device in devices)]]
    for activity, _ in total.most_common():
        cells = [f"{_seconds(share * device['allocated_seconds'])} ({percent(share)})" if share else "–" for device, each in zip(devices, shares, strict=True)
                 for share in (each.get(activity, 0.0),)]  # fmt: skip
        rows.append([words(activity), *cells])
    for key in ("occupancy", "busy_fraction"):
        rows.append([tag("strong", key.replace("_", " ")), *(percent(device[key]) for device in devices)])
    capacities = [f"capacity {device['capacity']:g}" if device["role"] != "learner" else "" for device in devices]
    header = ["", *(join([device["name"], tag("small", capacity)], " ") for device, capacity in zip(devices, capacities, strict=True))]
    spent = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases(run) if seconds >= 0.5)
    return join([tag("h3", "Where the time went"), tag("p", f"The run as a whole: {spent}."), table(header, rows)])


def _kind_table(run: RunRecord) -> Markup | None:
    """By kind of task, from the ledger: does what is long or slow get trained as often as it was offered?"""
    kinds = (run.summary["ledger"] or {}).get("kinds") or {}
    if not kinds:
        return None
    offered = sum(each.get("offered", 0) for each in kinds.values())
    trained = sum(each.get("trained", 0) for each in kinds.values())
    rows = []
    for kind, each in sorted(kinds.items(), key=lambda item: -item[1].get("offered", 0)):
        finished = [one for one in run.rollouts if one.kind == kind]
        rewards = [one.reward for one in finished if one.reward is not None]
        lost = {name: each[name] for name in ("skipped", "expired", "failed", "void") if each.get(name)}
        rows.append(
            [
                kind, _with_share(each.get("offered", 0), offered), _with_share(each.get("trained", 0), trained),
                f"{each.get('filtered', 0):,}", ", ".join(f"{count:,} {name}" for name, count in lost.items()) or "–",
                number_text(fmean(one.tokens for one in finished)) if finished else "–", f"{fmean(one.seconds for one in finished):.2f} s" if finished else "–",
                f"{fmean(one.wait_seconds for one in finished):.2f} s" if finished else "–", number_text(fmean(rewards)) if rewards else "–",
            ]
        )  # fmt: skip
    header = ["kind of task", "offered (share)", "trained (share)", "no signal", "lost", "mean tokens", "mean time", "of it waiting", "mean reward"]
    note = "Trajectories. Offered counts what was started, also what is not back yet; groups of equal rewards carry no signal and are not trained."
    return join([table(header, rows), tag("p", note, class_="note")])


def _long_table(run: RunRecord, recorded: Recorded | None) -> Markup | None:
    """Long and slow rollouts by their own length, among what finished and what was trained; the latter needs the recorded trajectories."""
    if recorded is None or not recorded.trained:
        return None
    finished = [(float(each.tokens), each.seconds) for each in run.rollouts if each.tokens > 0]
    if not finished:
        return None
    rows = []
    for name, index in (("long", 0), ("slow", 1)):
        limit = 4.0 * sorted(each[index] for each in finished)[len(finished) // 2]
        among_finished = _ratio(sum(each[index] > limit for each in finished), len(finished))
        among_trained = _ratio(sum(each[index] > limit for each in recorded.trained), len(recorded.trained))
        unit = "tokens" if index == 0 else "s"
        rows.append([name, f"over {number_text(limit)} {unit}", f"{among_finished:.1%}".replace("%", " %"), f"{among_trained:.1%}".replace("%", " %")])
    note = f"Over 4 times the median; among {len(finished):,} finished rollouts, and {len(recorded.trained):,} recorded ones that were trained."
    return join([table(["rollouts", "limit", "share of the finished", "share of the trained"], rows), tag("p", note, class_="note")])


def _ledger_table(run: RunRecord) -> Markup | None:
    ledger = run.summary["ledger"]
    if not ledger:
        return None
    units = [unit for unit in ("tokens", "trajectories", "groups", "key_steps") if unit in ledger]
    totals = {unit: ledger[unit].get("generated", ledger[unit].get("offered", 0)) for unit in units}
    rows: list[list[object]] = [[tag("strong", "generated"), *(f"{totals[unit]:,}" for unit in units)]]
    for name in _CLASSES:
        values = [ledger[unit].get(name, 0) for unit in units]
        if not any(_sum(value) for value in values):
            continue
        rows.append([name.replace("_", " "), *(_with_share(_sum(value), totals[unit]) for unit, value in zip(units, values, strict=True))])
        reasons = sorted({reason for value in values if isinstance(value, Mapping) for reason in value})
        for reason in reasons:
            cells = [_with_share(value.get(reason, 0) if isinstance(value, Mapping) else 0, totals[unit]) for unit, value in zip(units, values, strict=True)]
            rows.append([tag("span", reason.replace("_", " "), class_="sub"), *cells])
        if name == "trained" and ledger.get("key_steps", {}).get("over_bound"):
            over = [_with_share(ledger[unit].get("over_bound", 0), totals[unit]) for unit in units]
            rows.append([tag("span", "of them over the key bound", class_="sub"), *over])
    header = ["", *(unit.replace("_", " ") for unit in units)]
    return table(header, rows)


def _ledger_lead(run: RunRecord) -> str | None:
    ledger = run.summary["ledger"]
    if not ledger:
        return None
    closes = "it closes: every one is in exactly one class" if ledger.get("closes") else "it does NOT close, which is a bug in headrace"
    evaluation = ledger.get("evaluation") or {}
    apart = f" Evaluation is kept apart: {evaluation['trajectories']:,} trajectories." if evaluation.get("trajectories") else ""
    return f"The ledger at update {ledger['at_update']:,}; {closes}.{apart}"


def _failure_table(run: RunRecord) -> Markup | None:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in run.events("rollout_failed"):
        whose = line["role"] if line["reason"] == "worker_lost" else line["task_id"]  # no fault of the tasks that it had
        one = found.setdefault((whose, line["reason"]), {"final": 0, "retried": 0, "error": ""})
        one["retried" if line["retried"] else "final"] += 1
        one["error"] = line["error"]
    if not found:
        return None
    ordered = sorted(found.items(), key=lambda item: -item[1]["final"] - item[1]["retried"])
    rows = [
        [task, reason.replace("_", " "), f"{one['final']:,}", f"{one['retried']:,}", tag("code", one["error"], class_="error")]
        for (task, reason), one in ordered[:_MAX_FAILURES]
    ]
    more = tag("p", f"And {len(ordered) - _MAX_FAILURES:,} more tasks.", class_="note") if len(ordered) > _MAX_FAILURES else None
    return join([table(["task", "what failed", "for good", "tried again", "newest error"], rows), more])


def _failure_lead(run: RunRecord) -> str:
    ends = Counter(each.end.replace("_", " ") for each in run.rollouts)
    return "How rollouts ended: " + ", ".join(f"{count:,} {end}" for end, count in ends.most_common()) + "." if ends else "No rollout has ended yet."


def settings_section(runs: Iterable[tuple[str, RunRecord]]) -> Markup | None:
    """One column an arm: what differs between the arms, then from the defaults, the rest folded away."""
    columns = [(name, flat(run.settings)) for name, run in runs if run.settings]
    if not columns:
        return None
    defaults = default_settings()
    keys = list(dict.fromkeys(key for _, values in columns for key in values))
    between = [key for key in keys if len({shown(values.get(key, defaults.get(key))) for _, values in columns}) > 1]
    changed = [key for key in keys if key not in between and shown(columns[0][1].get(key, defaults.get(key))) != shown(defaults.get(key))]
    same = [key for key in keys if key not in between and key not in changed]
    rows = {key: [_setting(values.get(key, defaults.get(key))) for _, values in columns] for key in keys}
    apart = table(["setting", *(name for name, _ in columns), "default"], [[tag("code", key), *rows[key], _setting(defaults.get(key))] for key in between])
    common = table(["setting", "value", "default"], [[tag("code", key), rows[key][0], _setting(defaults.get(key))] for key in changed])
    folded = table(["setting", "value"], [[tag("code", key), rows[key][0]] for key in same])
    return section(
        "Settings",
        join([tag("h3", "Between the arms"), apart]) if between else None,
        join([tag("h3", f"Other than the default ({len(changed)})"), common]) if changed else None,
        tag("details", tag("summary", f"{len(same)} settings at their defaults"), folded) if same else None,
    )


def default_settings() -> dict[str, Any]:
    """Dotted key -> default of every setting that has one."""
    from headrace.config import Settings  # pydantic

    found: dict[str, Any] = {}
    for section_name, section_field in Settings.model_fields.items():
        for name, each in getattr(section_field.annotation, "model_fields", {}).items():
            if not each.is_required():
                found[f"{section_name}.{name}"] = each.get_default(call_default_factory=True)
    return found


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for name, values in settings.items() if isinstance(values, Mapping) for key, value in values.items()}


def _setting(value: Any) -> Markup:
    return tag("code", shown(value)) if value is not None else escape("–")


def shown(value: Any) -> str:
    """One spelling for values of TOML and of pydantic: tuples are lists, enumerations their text."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case str():
            return str(value)
        case float():
            return f"{value:g}"
        case list() | tuple():
            return "[" + ", ".join(map(shown, value)) + "]"
        case Mapping():
            return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def _with_share(count: float, total: float) -> str:
    return f"{count:,} ({percent(count / total)})" if count and total else f"{count:,}"


def _sum(value: Any) -> int:
    return sum(value.values()) if isinstance(value, Mapping) else value


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def facts_line(run: RunRecord) -> Sequence[str]:
    """Small print under the title."""
    started = run.started
    wall = f", {started['wall_time'][:16].replace('T', ' ')} UTC" if started.get("wall_time") else ""
    return [f"{run.directory}", f"headrace {started['headrace']}, {started['runtime']} runtime{wall}"]
