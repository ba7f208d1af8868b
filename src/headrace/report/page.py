"""`headrace report`: runs as one self-contained HTML file.

The page holds everything it shows: plotly.js (gzip, base64; the browser unpacks it) once, figures as JSON, text as HTML. It asks the
network for nothing.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from headrace.errors import RunDirectoryError
from headrace.report.comparison import TARGET_BELOW_FINAL, measured_capacity, time_to_reward
from headrace.report.comparison import evaluation_curve as evaluations
from headrace.report.examples import load_recorded
from headrace.report.figures_learning import ARM_COLORS, Arm, evaluation_curve, reward_curve
from headrace.report.markup import Markup, figure, join, number_text, percent, table, tag
from headrace.report.record import RunRecord, load_run
from headrace.report.sections import default_settings, facts_line, flat, run_sections, section, settings_section, shown
from headrace.report.summary import over_bound_fraction
from headrace.report.words import final_of, mean_of, metric_of, run_sentences, status_of

_COMPRESSION = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    path: Path
    size_bytes: int
    runs: Sequence[RunRecord]


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    arm_names: Sequence[str] | None = None,
    verdict: str | None = None,
    capacity: int | None = None,
    target: float | None = None,
) -> ReportFile:
    """`arm_names`: one for each directory; runs of one name are seeds of one arm. Default: runs with equal settings but for the seed.
    `capacity`: of every sampling device, so that occupancies can be held against each other (DESIGN section 2). Default: what each run
    measured, and the median of that for several runs of one recipe. `target`: evaluation that arms are timed to; default: a little under
    the final one of the first synchronous arm, else of the lowest.

    Raises ConfigError when a directory is no run, RunDirectoryError when `out` cannot be written.
    """
    runs = [load_run(directory) for directory in directories]
    capacity = _common_capacity(runs) if capacity is None else capacity
    if capacity is not None:
        runs = [run.with_capacity(capacity) for run in runs]
    text = page(runs, arms_of(runs, arm_names), verdict=verdict, target=target)
    data = text.encode("utf-8")
    if out.is_symlink() and out.parent.resolve() in {directory.resolve() for directory in directories}:
        raise RunDirectoryError(
            f"{out} is a link, and a run directory may come from somebody else.", remedy="Remove it, or choose another place with --out FILE."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(data)
    except OSError as error:
        raise RunDirectoryError(f"{out}: the report cannot be written: {error.strerror}.", remedy="Choose another place with --out FILE.") from error
    return ReportFile(path=out, size_bytes=len(data), runs=runs)


def _common_capacity(runs: Sequence[RunRecord]) -> int | None:
    if len(runs) == 1 or len({run.started.get("recipe") for run in runs}) > 1:
        return None
    measured = [capacity for run in runs for capacity in measured_capacity(run.lines)]
    return round(median(measured)) if measured else None


def arms_of(runs: Sequence[RunRecord], names: Sequence[str] | None = None) -> list[Arm]:
    """In order of their first run."""
    keys = list(names) if names is not None else [_arm_key(run) for run in runs]
    groups: dict[str, list[RunRecord]] = {}
    for key, run in zip(keys, runs, strict=True):
        groups.setdefault(key, []).append(run)
    labels = dict(zip(groups, groups if names is not None else _labels(list(groups.values())), strict=True))
    return [Arm(name=labels[key], runs=group, color=ARM_COLORS[index % len(ARM_COLORS)]) for index, (key, group) in enumerate(groups.items())]


def page(runs: Sequence[RunRecord], arms: Sequence[Arm], *, verdict: str | None = None, target: float | None = None) -> str:
    recipes = dict.fromkeys(str(run.summary["recipe"] or run.name) for run in runs)
    title = ", ".join(recipes)
    body = _single(runs[0], arms, verdict) if len(runs) == 1 else _several(runs, arms, verdict, target)
    header = tag("header", tag("p", "Headrace report", class_="brand"), tag("h1", title))
    columns = [(arm.name if len(arms) > 1 else "value", arm.runs[0]) for arm in arms]
    return document(f"{title} · headrace report", header, body, settings_section(columns), _footer(runs))


def document(title: str, *parts: object) -> str:
    """A whole HTML file that draws the figures in its parts."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"), tag("title", title), tag("style", Markup(_asset("page.css"))),
    )  # fmt: skip
    scripts = [tag("script", Markup(_plotly()), type="text/plain", id="plotly"), tag("script", Markup(_asset("page.js")))]
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", tag("main", *parts), *scripts), lang="en") + "\n"


def _single(run: RunRecord, arms: Sequence[Arm], verdict: str | None) -> Markup:
    return join(
        [
            tag("div", tag("p", " ".join([*([verdict] if verdict else []), *run_sentences(run)])), class_="summary"),
            _problem(run),
            *(tag("p", line, class_="note") for line in facts_line(run)),
            _curves([run], arms),
            run_sections(run, load_recorded(run.directory)),
        ]
    )


def _several(runs: Sequence[RunRecord], arms: Sequence[Arm], verdict: str | None, target: float | None) -> Markup:
    details = []
    for index, (arm, run) in enumerate([(each, run) for each in arms for run in each.runs]):
        title = f"{arm.name}, seed {run.summary['seed']}"
        told = [tag("p", " ".join(run_sentences(run))), _problem(run), *(tag("p", line, class_="note") for line in facts_line(run))]
        whole = [*told, run_sections(run, load_recorded(run.directory))]
        details.append(
            tag("details", tag("summary", title, " ", tag("small", f"{run.name} · {status_of(run)}")), *whole, class_="run", open="" if index == 0 else None)
        )
    return join(
        [
            tag("div", tag("p", verdict) if verdict else None, *_overview(runs, arms), class_="summary"),
            *(_problem(run) for run in runs),
            section("The arms", _arm_table(arms, target)),
            _curves(runs, arms),
            tag("h2", "Run by run"),
            *details,
        ]
    )


def _curves(runs: Sequence[RunRecord], arms: Sequence[Arm]) -> Markup | None:
    metric = metric_of(runs[0])
    charts = [evaluation_curve(arms, by_seconds=False, metric=metric), evaluation_curve(arms, by_seconds=True, metric=metric), reward_curve(arms)]
    return section("What was learned", tag("div", *(figure(chart) for chart in charts), class_="grid wide-first") if any(charts) else None)


def _overview(runs: Sequence[RunRecord], arms: Sequence[Arm]) -> list[Markup]:
    parts = []
    for arm in arms:
        final = mean_of([final_of(run) for run in arm.runs])
        occupancy = mean_of([run.summary["utilization"]["occupancy"] for run in arm.runs])
        known = f": {number_text(mean_of([run.summary['wall_seconds'] for run in arm.runs]))} s of training"
        known += f", {metric_of(arm.runs[0])} {final:.3f} at the end" if final is not None else ""
        known += f", occupancy {percent(occupancy)}" if occupancy is not None else ""
        parts.append(tag("li", tag("strong", arm.label), known, "."))
    count = f"{len(runs)} runs" if len(arms) == 1 else f"{len(runs)} runs in {len(arms)} arms"
    return [tag("p", f"{count}, means over their seeds:"), tag("ul", *parts)]


def _arm_table(arms: Sequence[Arm], given_target: float | None) -> Markup:
    """Means over an arm's seeds."""
    finals = [mean_of([final_of(run) for run in arm.runs]) for arm in arms]
    target = _target(arms, finals) if given_target is None else given_target
    rows = []
    with_keys = any(run.summary["staleness"]["key_mean"] is not None for arm in arms for run in arm.runs)
    for arm, final in zip(arms, finals, strict=True):
        summaries = [run.summary for run in arm.runs]
        times = [time_to_reward(evaluations(run.lines), target) for run in arm.runs] if target is not None else []
        ends = [value for run in arm.runs if (value := final_of(run)) is not None]
        spread = f" ({min(ends):.3f} to {max(ends):.3f})" if len(ends) > 1 else ""
        reached = f"{sum(time is not None for time in times)} of {len(times)}: " if None in times else ""
        rows.append(
            [
                arm.name, ", ".join(str(each["seed"]) for each in summaries), number_text(mean_of([each["num_updates"] for each in summaries])),
                f"{number_text(mean_of([each['wall_seconds'] for each in summaries]))} s", f"{final:.3f}{spread}" if final is not None else "–",
                f"{reached}{number_text(mean_of(times))} s" if any(times) else "–", percent(mean_of([each["utilization"]["occupancy"] for each in summaries])),
                percent(mean_of([each["utilization"]["busy_fraction"] for each in summaries])),
                number_text(mean_of([each["tokens_per_second"] for each in summaries])),
                _staleness([each["staleness"] for each in summaries]), *(_key_cells(summaries) if with_keys else []),
            ]
        )  # fmt: skip
    reach = f"to {target:.3f}" if target is not None else "to target"
    header = ["arm", "seeds", "updates", "training", "final evaluation", reach, "occupancy", "busy", "tokens/s", "staleness mean / max"]
    header += ["of key steps", "over key bound"] if with_keys else []
    capacities = sorted({capacity for arm in arms for run in arm.runs for capacity in measured_capacity(run.lines)})
    note = (
        f"Means over the seeds. Occupancy: of capacity {' or '.join(map(str, capacities))}. Final: mean of the last 3 evaluations, in brackets the lowest and "
        f"highest seed. {reach[0].upper()}{reach[1:]}: seconds of training from which on the mean of 3 evaluations stays there"
        + (f" ({TARGET_BELOW_FINAL} under the final of the first synchronous arm, else of the lowest). " if given_target is None else ". ")
        + ("Over key bound: share of the trained key steps. " if with_keys else "")
    )
    return join([table(header, rows), tag("p", note, "Whether a difference is resolved is what ", tag("code", "headrace compare"), " says.", class_="note")])


def _target(arms: Sequence[Arm], finals: Sequence[float | None]) -> float | None:
    known = [(final, arm.runs[0].summary["mode"]) for arm, final in zip(arms, finals, strict=True) if final is not None]
    if not known:
        return None
    return next((final for final, mode in known if mode == "sync"), min(final for final, _ in known)) - TARGET_BELOW_FINAL


def _staleness(each: Sequence[Mapping[str, Any]], of: str = "") -> str:
    mean = mean_of([one[f"{of}mean"] for one in each])
    if mean is None:
        return "–"
    return f"{mean:.1f} / {max(one[f'{of}max'] or 0 for one in each)}"


def _key_cells(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_staleness([each["staleness"] for each in summaries], of="key_"), percent(mean_of([over_bound_fraction(each["ledger"]) for each in summaries]))]


def _problem(run: RunRecord) -> Markup | None:
    """What went wrong, where it did."""
    parts = []
    finished = run.finished
    if finished is not None and finished.get("error"):
        error = finished["error"]
        remedy = f" {error['remedy']}" if error.get("remedy") else ""
        parts.append(tag("p", tag("strong", f"{run.name}: {error.get('kind', 'error')}. "), f"{error.get('message', '')}{remedy}"[:2000]))
    if run.unreadable:
        parts.append(tag("p", f"{run.name}: {run.unreadable:,} lines of events.jsonl cannot be read and are left out."))
    refused = [line for line in run.events("updated") if line["refused"]]
    if refused:
        parts.append(tag("p", f"{run.name}: {len(refused):,} updates were refused, the last one: {refused[-1]['refused']}"))
    return tag("div", *parts, class_="problem") if parts else None


def _footer(runs: Sequence[RunRecord]) -> Markup:
    text = "Made by headrace report from the event log of the run; staleness, occupancy and the other words are those of docs/concepts.md. "
    return tag(
        "footer",
        tag("p", text if len(runs) == 1 else text.replace("the run", "the runs")),
        tag("noscript", "The figures need JavaScript; the text and the tables do not."),
    )


def _arm_key(run: RunRecord) -> str:
    """Equal for runs that differ in nothing but their seed, and in where they found the recipe."""
    started = run.started
    return repr((started.get("recipe"), started.get("mode"), started.get("placement"), sorted(_compared(run).items())))


def _compared(run: RunRecord) -> dict[str, Any]:
    values = {key: shown(value) for key, value in {**default_settings(), **flat(run.settings)}.items() if key not in ("run.seed", "run.name")}
    return {**values, "task.module": Path(values.get("task.module", "")).name} if run.settings else {}


def _labels(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Mode and placement; where that is not enough, with the settings that differ."""
    firsts = [group[0] for group in groups]
    recipes = {run.started.get("recipe") for run in firsts}
    base = []
    for run in firsts:
        recipe = f"{run.started.get('recipe')} " if len(recipes) > 1 else ""
        base.append(f"{recipe}{run.started.get('mode')} {run.started.get('placement')}")
    settings = [_compared(run) for run in firsts]
    for label in set(base):
        same = [index for index, each in enumerate(base) if each == label]
        if len(same) > 1:
            keys = [key for key in settings[same[0]] if len({settings[index].get(key) for index in same}) > 1]
            for index in same:
                base[index] += " " + (", ".join(f"{key}={settings[index].get(key)}" for key in keys[:3]) or firsts[index].name)
    return base


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), _COMPRESSION, mtime=0)).decode()


def _asset(name: str) -> str:
    return resources.files("headrace.report").joinpath(name).read_text(encoding="utf-8")
