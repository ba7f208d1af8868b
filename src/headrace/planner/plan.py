"""plan.json: what was asked, the ways to run that were found, best first, and why (CONTRACTS, plan).

Times are seconds, rates trajectories a second, staleness in updates. Keys that a later version adds are passed over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from headrace.errors import ConfigError, Problem
from headrace.planner.estimate import Selection, Setup
from headrace.planner.profile import Profile, profile_as_json, profile_from_json
from headrace.planner.roofline import with_tensor_parallel

SCHEMA = 1
T = TypeVar("T")

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
_AGAIN = "Make the plan again with: headrace plan PROFILE --gpus N --out plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked."""

    num_gpus: AtLeastOne
    max_staleness: Count = 8
    """Updates; every plan keeps within it."""
    batch_trajectories: tuple[AtLeastOne, ...]
    """Batches to choose from, each a whole number of groups; they are compared at equal numbers of trajectories."""
    group_size: AtLeastOne
    num_updates: AtLeastOne = 100
    """Of the first batch size; with other batches as many as train on as many trajectories."""
    price_per_gpu_hour: Amount | None = None
    deadline_hours: Positive | None = None
    what_if: Mapping[str, Positive] = field(default_factory=dict)
    """Input -> factor on it, already in the profile beside."""

    @property
    def num_trajectories(self) -> int:
        return self.num_updates * self.batch_trajectories[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One run in ten takes less than p10, half take less than p50, one in ten more than p90."""

    p50: Amount
    p90: Amount
    p10: Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSpread:
    """Of trained tokens."""

    mean: Amount
    p95: Amount
    max: Amount
    in_flight: Amount = 0.0
    """The part of the mean that is drawn before the group ends; the rest waits in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How a simulation went that a plan was checked with."""

    num_rollouts: Count
    num_updates: AtLeastOne
    scale: Annotated[float, Field(gt=0, le=1)]
    """Share of the plan's samplers and batch that was simulated; the learner's time was that of the whole batch."""
    step_seconds: Positive
    """Simulated, at that scale."""
    closed_form_step_seconds: Positive
    """What the closed form says at that scale: their ratio corrects the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run, and what it promises."""

    rank: AtLeastOne
    mode: Literal["sync", "async"]
    placement: Literal["split", "colocated"]
    num_sampler_devices: AtLeastOne
    num_learner_devices: AtLeastOne
    """Colocated: the same devices."""
    tensor_parallel: AtLeastOne
    """Devices of one sampler."""
    slots_per_sampler: AtLeastOne
    batch_trajectories: AtLeastOne
    group_size: AtLeastOne
    max_staleness: Count
    selection: Selection
    quorum: AtLeastOne | None
    step_seconds: Positive
    production_rate: Positive
    consumption_rate: Positive
    staleness: StalenessSpread
    occupancy: Amount
    busy_fraction: Amount
    finish_seconds: Spread
    cost: Spread | None
    """In the currency of the price; None where no price was given."""
    bottleneck: str
    why_not_better: str
    verified_by: Literal["simulation", "closed form"]
    running: Amount = 0.0
    """Sequences in a decode step of one sampler, mean."""
    in_flight: Amount = 0.0
    """Rollouts of all samplers, mean."""
    num_updates: AtLeastOne = 1
    sampler_idle_fraction: Amount = 0.0
    learner_idle_fraction: Amount = 0.0
    verification: Verification | None = None

    @property
    def num_samplers(self) -> int:
        """Engines."""
        return max(1, self.num_sampler_devices // self.tensor_parallel)

    @property
    def rate(self) -> float:
        """Trajectories a second through the whole run."""
        return self.batch_trajectories / self.step_seconds

    @property
    def split(self) -> str:
        """`learner:sampler` devices, as in 2:6; colocated: `all N in turn`."""
        if self.placement == "colocated":
            return f"all {self.num_sampler_devices} in turn"
        return f"{self.num_learner_devices}:{self.num_sampler_devices}"

    @property
    def kind(self) -> str:
        """For people: mode, and the order of training where it is not that of finishing."""
        return f"{self.mode}, in order" if self.mode == "async" and self.selection == "oldest_first" else self.mode

    @property
    def setup(self) -> Setup:
        return Setup(
            mode=self.mode, placement=self.placement, num_samplers=self.num_samplers, num_learner_ranks=self.num_learner_devices,
            slots_per_sampler=self.slots_per_sampler, batch_trajectories=self.batch_trajectories, max_staleness=self.max_staleness,
            selection=self.selection, quorum=self.quorum,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """Production and consumption at one split."""

    num_sampler_devices: AtLeastOne
    num_learner_devices: AtLeastOne
    production_rate: Positive
    consumption_rate: Positive
    rate: Positive
    staleness_mean: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    input: str
    elasticity: Annotated[float, Field(allow_inf_nan=False)]
    """Per cent by which the throughput of the best plan changes where the input rises by one per cent."""
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Everything that plan.json holds."""

    profile: Profile
    """With what-if already applied."""
    request: Request
    plans: tuple[Plan, ...]
    """By throughput; the first is the best."""
    flat_region: tuple[int, ...]
    """Ranks of asynchronous plans within 7 % of the best."""
    flat_region_text: str
    speedup_over_best_sync: Positive | None
    rates: tuple[RatePoint, ...]
    sensitivity: tuple[Elasticity, ...]
    infeasible_reason: str | None
    notes: tuple[str, ...] = ()
    profile_file: str | None = None

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def estimated(self) -> bool:
        return self.profile.estimated

    def profile_of(self, plan: Plan) -> Profile:
        """The profile of the plan's samplers, which may have another number of devices each than the one that was measured."""
        return with_tensor_parallel(self.profile, plan.tensor_parallel)

    def plan(self, rank: int, *, file: str | None = None) -> Plan:
        """Raises ConfigError where there is no plan of that rank."""
        for plan in self.plans:
            if plan.rank == rank:
                return plan
        if not self.plans:
            reason = self.infeasible_reason or "it holds none"
            raise ConfigError([Problem(file=file, key="--rank", value=rank, message=f"no plan to take: {reason}", remedy=_AGAIN)])
        limit = f"1 to {self.plans[-1].rank}"
        raise ConfigError([Problem(file=file, key="--rank", value=rank, limit=limit, message=f"there is no plan of rank {rank}.", remedy=f"Give {limit}.")])


_PLANS: TypeAdapter[tuple[Plan, ...]] = TypeAdapter(tuple[Plan, ...])
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
_RATES: TypeAdapter[tuple[RatePoint, ...]] = TypeAdapter(tuple[RatePoint, ...])
_SENSITIVITY: TypeAdapter[tuple[Elasticity, ...]] = TypeAdapter(tuple[Elasticity, ...])


def proposal_as_json(proposal: Proposal) -> dict[str, Any]:
    """The object of CONTRACTS. `best` is the first of `plans` once more; null where there is none."""
    plans = [plan | _told(plan) for plan in _PLANS.dump_python(proposal.plans, mode="json")]
    return {
        "schema": SCHEMA,
        "profile": profile_as_json(proposal.profile),
        "profile_file": proposal.profile_file,
        "request": _REQUEST.dump_python(proposal.request, mode="json"),
        "best": plans[0] if plans else None,
        "plans": plans,
        "flat_region": list(proposal.flat_region),
        "flat_region_text": proposal.flat_region_text,
        "speedup_over_best_sync": proposal.speedup_over_best_sync,
        "rates": _RATES.dump_python(proposal.rates, mode="json"),
        "sensitivity": _SENSITIVITY.dump_python(proposal.sensitivity, mode="json"),
        "estimated": proposal.estimated,
        "infeasible_reason": proposal.infeasible_reason,
        "notes": list(proposal.notes),
    }


def _told(plan: Mapping[str, Any]) -> dict[str, Any]:
    """`cost` always has its keys, so that readers need not ask."""
    return {"cost": plan["cost"] or {"p50": None, "p90": None, "p10": None}}


def save_proposal(proposal: Proposal, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    write_text(path, json.dumps(proposal_as_json(proposal), indent=1, allow_nan=False) + "\n", option="--out")


def write_text(path: Path, text: str, *, option: str) -> None:
    """Raises ConfigError naming the option where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"'{path}' cannot be written: {error.strerror}."
        problem = Problem(file=str(path), key=option, value=str(path), message=what, remedy=f"Give another file to {option}.")
        raise ConfigError([problem]) from error


def load_proposal(path: Path) -> Proposal:
    """Raises ConfigError naming every key that is missing or out of range."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"the plan cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise _wrong(path, f"it is no JSON: {error}.") from error
    return proposal_from_json(values, file=str(path))


def proposal_from_json(values: Any, *, file: str | None = None) -> Proposal:
    """Raises ConfigError naming every key that is missing or out of range."""
    if not isinstance(values, dict) or "plans" not in values or "request" not in values:
        raise _wrong(file, "it is no plan: 'plans' or 'request' is missing.")
    if values.get("schema") != SCHEMA:
        found = values.get("schema")
        raise ConfigError([Problem(file=file, key="schema", value=found, limit=str(SCHEMA), message=f"it has schema {found!r}.", remedy=_AGAIN)])
    profile = profile_from_json(values.get("profile"), file=file)
    plans = _validated(_PLANS, [_untold(plan) for plan in _list(values["plans"])], "plans", file)
    return Proposal(
        profile=profile,
        request=_validated(_REQUEST, values["request"], "request", file),
        plans=plans,
        flat_region=tuple(rank for rank in _list(values.get("flat_region")) if isinstance(rank, int)),
        flat_region_text=str(values.get("flat_region_text") or ""),
        speedup_over_best_sync=values.get("speedup_over_best_sync"),
        rates=_validated(_RATES, _list(values.get("rates")), "rates", file),
        sensitivity=_validated(_SENSITIVITY, _list(values.get("sensitivity")), "sensitivity", file),
        infeasible_reason=values.get("infeasible_reason"),
        notes=tuple(map(str, _list(values.get("notes")))),
        profile_file=values.get("profile_file"),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _untold(plan: Any) -> Any:
    if isinstance(plan, dict) and isinstance(plan.get("cost"), dict) and plan["cost"].get("p50") is None:
        return plan | {"cost": None}
    return plan


def _validated(adapter: TypeAdapter[T], values: Any, name: str, file: str | None) -> T:
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        problems = []
        for one in error.errors(include_url=False):
            key = ".".join(str(part) for part in (name, *one["loc"]))
            found = one.get("input") if one["type"] != "missing" else None
            shown = found if isinstance(found, str | int | float | bool | None) else type(found).__name__
            what = "is missing" if one["type"] == "missing" else f"is {shown!r}: {one['msg'][0].lower()}{one['msg'][1:]}"
            problems.append(Problem(file=file, key=key, value=shown, message=f"'{key}' {what}.", remedy=_AGAIN))
        raise ConfigError(problems) from error


def _wrong(path: Path | str | None, message: str) -> ConfigError:
    file = None if path is None else str(path)
    return ConfigError([Problem(file=file, key="PLAN", value=file, message=message, remedy=_AGAIN)])


# the overlay that `headrace run` takes --------------------------------------------------------------------------------


def overlay_settings(plan: Plan, *, num_updates: int | None = None) -> dict[str, str | int]:
    """Settings (dotted key -> value) under which a run does what the plan says. `num_updates` where it was asked for."""
    # a recipe's colocated devices are samplers of one device each
    ranks = plan.num_samplers if plan.placement == "colocated" else plan.num_learner_devices
    settings: dict[str, str | int] = {
        "run.mode": plan.mode,
        "run.placement": plan.placement,
        "run.num_samplers": plan.num_samplers,
        "run.num_learner_ranks": ranks,
        "sampler.max_running": plan.slots_per_sampler,
        "rollout.group_size": plan.group_size,
        "pool.groups_per_batch": plan.batch_trajectories // plan.group_size,
    }
    if plan.mode == "async":
        settings["pool.max_staleness"], settings["pool.selection"] = plan.max_staleness, plan.selection
    if plan.quorum is not None:
        settings["pool.quorum"] = plan.quorum
    if num_updates is not None:
        settings["run.num_updates"] = num_updates
    return settings


def overlay_toml(plan: Plan, *, num_updates: int | None = None) -> str:
    """The same as a TOML file: goes over a recipe with `headrace run RECIPE --plan FILE`."""
    lines = [f"# Plan {plan.rank}: {plan.mode}, {plan.split} devices (learner:sampler), {plan.step_seconds:.4g} s an update."]
    if plan.tensor_parallel > 1:
        lines.append(f"# Each sampler is meant to run on {plan.tensor_parallel} devices (tensor parallel).")
    section = ""
    for key, value in sorted(overlay_settings(plan, num_updates=num_updates).items()):
        name, _, leaf = key.partition(".")
        if name != section:
            lines += ["", f"[{name}]"]
            section = name
        lines.append(f"{leaf} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def load_overlay(path: Path, *, rank: int | None = None) -> list[str]:
    """`section.key=value` of a plan.json (of the best plan, or of `rank`) or of what overlay_toml wrote. Raises ConfigError."""
    if path.suffix != ".toml":
        proposal = load_proposal(path)
        return [f"{key}={json.dumps(value)}" for key, value in overlay_settings(proposal.plan(rank or 1, file=str(path))).items()]
    if rank is not None:
        what = f"'{path}' holds the settings of one plan: --rank cannot choose."
        raise ConfigError([Problem(file=str(path), key="--rank", value=rank, message=what, remedy="Give the plan.json, or leave --rank out.")])
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"the plan cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise _wrong(path, f"it is no TOML: {error}.") from error
    settings = []
    for section, values in sections.items():
        if not isinstance(values, dict):
            what = f"'{section}' is not in a section."
            raise ConfigError([Problem(file=str(path), key=section, value=str(values), message=what, remedy="Write [section] and its keys below it.")])
        settings += [f"{section}.{key}={json.dumps(value)}" for key, value in values.items()]
    return settings
