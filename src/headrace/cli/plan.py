"""`headrace plan`: how many devices sample, how many learn, when is it done, what does it cost."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.cli.output import Output
from headrace.errors import ConfigError, Problem
from headrace.planner.explain import number
from headrace.planner.inputs import parse_what_if
from headrace.planner.plan import Plan, Proposal, Request, overlay_toml, proposal_as_json, save_proposal, write_text
from headrace.planner.profile import Profile, load_profile
from headrace.planner.proposal import Simulate, Simulated, Trial, make_proposal
from headrace.report.picture import chart
from headrace.report.progress import duration

DEFAULT_GROUPS = 64
"""Of a batch, where neither the request nor the profile says."""
DEFAULT_UPDATES = 100
MOST_DEVICES = 1_000_000
MOST_TRAJECTORIES = 100_000
"""Of a batch. Beyond them closed forms take minutes, and nothing measured says anything."""
_ROLLOUTS_THAT_PAY = 7_000
"""Simulated, from which on processes are started for them."""
_SENSITIVE = 4
"""Inputs that people are told of."""


def execute(arguments: argparse.Namespace, output: Output) -> int:
    profile = load_profile(Path(arguments.profile))
    request = make_request(arguments, profile)
    simulate = None if arguments.rollouts == 0 else _simulate(output)
    proposal = make_proposal(profile, request, simulate=simulate, max_rollouts=arguments.rollouts)
    proposal = replace(proposal, profile_file=arguments.profile)
    files = _write(proposal, arguments)
    output.show("\n".join([*described(proposal, width=output.width), "", *files]))
    values = proposal_as_json(proposal)
    if proposal.infeasible_reason is not None:
        output.say(f"Not possible: {proposal.infeasible_reason}")
        error = {"kind": "InfeasibleRequest", "message": proposal.infeasible_reason, "remedy": "Ask for more devices, less work or more time."}
        output.result(values, status="failed", error=error)
        return 1
    output.result(values)
    return 0


def _simulate(output: Output) -> Simulate:
    """One trial after the other, or side by side where that saves more than starting processes takes."""
    from headrace.planner.simulation import simulate_plan

    def simulate(trials: Sequence[Trial]) -> Sequence[Simulated | None]:
        output.say("simulating " + ", ".join(f"{plan.mode} {plan.split}" for _, plan, _ in trials) + " (learner:sampler devices)")
        processes = min(len(trials), os.cpu_count() or 1)
        if processes < 2 or sum(rollouts for _, _, rollouts in trials) < _ROLLOUTS_THAT_PAY:
            return [simulate_plan(*trial) for trial in trials]
        # Ctrl-C is the parent's to answer: leaving the block ends the others
        with multiprocessing.get_context("spawn").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            return pool.starmap(simulate_plan, trials, chunksize=1)

    return simulate


def _check_sizes(arguments: argparse.Namespace, group_size: int, batches: Sequence[int]) -> None:
    problems = []
    if arguments.gpus > MOST_DEVICES:
        what = f"--gpus is {arguments.gpus:,}, at most {MOST_DEVICES:,} can be shared out."
        problems.append(Problem(key="--gpus", value=arguments.gpus, limit=f"1 to {MOST_DEVICES}", message=what, remedy="Ask for fewer devices."))
    largest = max(batches)
    if largest > MOST_TRAJECTORIES:
        what = f"a batch of {largest:,} trajectories (groups of {group_size:,}) is more than {MOST_TRAJECTORIES:,}."
        remedy = "Give a smaller --batch or --group-size; without them they are those of the profile's run ('group.size')."
        file = None if arguments.batch and arguments.group_size else arguments.profile
        problems.append(Problem(file=file, key="--batch", value=largest, limit=f"at most {MOST_TRAJECTORIES}", message=what, remedy=remedy))
    if problems:
        raise ConfigError(problems)


def make_request(arguments: argparse.Namespace, profile: Profile) -> Request:
    """What was not given is taken from the run that was profiled. Raises ConfigError."""
    group_size, seen = arguments.group_size or profile.group.size, profile.observed
    if arguments.batch:
        batches = _batches(arguments.batch)
    else:
        usual = seen.batch_trajectories if seen is not None and seen.batch_trajectories else DEFAULT_GROUPS * group_size
        batches = (max(1, round(usual / group_size)) * group_size,)
    _check_sizes(arguments, group_size, batches)
    return Request(
        num_gpus=arguments.gpus,
        max_staleness=8 if arguments.max_staleness is None else arguments.max_staleness,
        batch_trajectories=batches,
        group_size=group_size,
        num_updates=arguments.updates or DEFAULT_UPDATES,
        price_per_gpu_hour=arguments.price,
        deadline_hours=arguments.deadline,
        what_if=parse_what_if(arguments.what_if or ()),
    )


def _batches(given: str) -> tuple[int, ...]:
    try:
        batches = tuple(int(part) for part in given.split(","))
        if min(batches) < 1:
            raise ValueError
    except ValueError:
        what = f"--batch is '{given}', it must be a number of trajectories, or several by commas."
        raise ConfigError([Problem(key="--batch", value=given, limit="at least 1", message=what, remedy="For example --batch 256,512.")]) from None
    return batches


def _write(proposal: Proposal, arguments: argparse.Namespace) -> list[str]:
    """Lines that say what was written."""
    out = Path(arguments.out)
    save_proposal(proposal, out)
    lines = [f"plan {out}"]
    if proposal.best is not None:
        lines.append(f"headrace simulate {out} plays it; headrace run RECIPE --plan {out} runs it")
    if arguments.overlay is not None and proposal.best is not None:
        write_text(Path(arguments.overlay), overlay_toml(proposal.best, num_updates=arguments.updates and proposal.best.num_updates), option="--overlay")
        lines.append(f"settings {arguments.overlay}")
    if arguments.report is not None and proposal.best is not None:
        from headrace.cli.plan_page import plan_page

        write_text(Path(arguments.report), plan_page(proposal, headline(proposal, proposal.best)), option="--report")
        lines.append(f"page {arguments.report}")
    return lines


# for people -----------------------------------------------------------------------------------------------------------


def described(proposal: Proposal, *, width: int) -> list[str]:
    request, best = proposal.request, proposal.best
    if best is None:
        return []
    lines = [headline(proposal, best), ""]
    lines += _table(proposal, width)
    lines += ["", *_sentences(proposal, best)]
    if len(proposal.rates) > 1:
        lines += ["", *_rates_chart(proposal, width)]
    if request.what_if:
        lines += ["", "what if: " + ", ".join(f"{name} x {factor:g}" for name, factor in request.what_if.items())]
    return lines


def headline(proposal: Proposal, best: Plan) -> str:
    request, finish = proposal.request, best.finish_seconds
    how = "all devices sample, then learn" if best.placement == "colocated" else f"{best.num_sampler_devices} sample, {best.num_learner_devices} learn"
    cost = "" if best.cost is None else f", costs {best.cost.p50:,.2f} (P90 {best.cost.p90:,.2f})"
    return (
        f"{request.num_gpus} devices, staleness at most {request.max_staleness}: {best.mode}, {how}. "
        f"{best.num_updates:,} updates of {best.batch_trajectories:,} trajectories take {duration(finish.p50)} (P90 {duration(finish.p90)}){cost}."
    )


def _table(proposal: Proposal, width: int) -> list[str]:
    from rich.table import Table

    from headrace.cli.safe_console import SafeConsole

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "mode", "learn:sample", "parallel", "slots", "bound", "s/update", "traj./s", "staleness", "occupancy", "busy", "done P50", "limit"):
        table.add_column(name, justify="left" if name in ("mode", "limit") else "right", no_wrap=True)
    for plan in proposal.plans:
        mark = "*" if plan.verified_by == "simulation" else ""
        stale = f"{plan.staleness.mean:.2f}" if plan.mode == "async" else "0"
        table.add_row(
            f"{plan.rank}{mark}", plan.kind, plan.split if plan.placement == "split" else "in turn", str(plan.tensor_parallel), str(plan.slots_per_sampler),
            str(plan.max_staleness), number(plan.step_seconds), number(plan.rate), stale, f"{plan.occupancy:.0%}", f"{plan.busy_fraction:.0%}",
            duration(plan.finish_seconds.p50), plan.bottleneck,
        )  # fmt: skip
    console = SafeConsole(width=max(width, 140), color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _sentences(proposal: Proposal, best: Plan) -> list[str]:
    lines = [f"{plan.rank:>4}  {plan.why_not_better}" for plan in proposal.plans[:5]]
    if any(plan.verified_by == "simulation" for plan in proposal.plans):
        lines.append("   *  simulated; the others in closed form, corrected by what simulation showed of their mode")
    lines.append("")
    lines += [proposal.flat_region_text] if proposal.flat_region_text else []
    if proposal.speedup_over_best_sync is not None:
        lines.append(f"{proposal.speedup_over_best_sync:.2f} x the throughput of the best synchronous plan.")
    if best.mode == "async":
        stale = best.staleness
        lines.append(f"Staleness of trained tokens: mean {stale.mean:.2f}, 95 % at most {stale.p95:.3g}, never over {best.max_staleness}.")
    strongest = [each for each in proposal.sensitivity if abs(each.elasticity) >= 0.01][:_SENSITIVE]
    if strongest:
        told = "; ".join(f"{each.meaning} {each.elasticity:+.2f} %" for each in strongest)
        lines.append(f"Throughput changes, for each per cent more: {told}.")
    return lines + list(proposal.notes)


def _rates_chart(proposal: Proposal, width: int) -> list[str]:
    produced = [(point.num_sampler_devices, point.production_rate) for point in proposal.rates]
    consumed = [(point.num_sampler_devices, point.consumption_rate) for point in proposal.rates]
    # what is far above the other side says nothing and would flatten the crossing
    most = 2.0 * max(point.rate for point in proposal.rates)
    series = {mark: [point for point in points if point[1] <= most] for mark, points in (("o", produced), ("x", consumed))}
    legend = "o  production    x  consumption, in trajectories/s, by devices that sample"
    return chart(series, columns=min(width, 110) - 10, legend=legend, unit="devices").splitlines()
