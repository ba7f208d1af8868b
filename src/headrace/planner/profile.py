"""The profile: what the parts of a run take on some hardware, measured or estimated (CONTRACTS, profile.json).

Everything the planner predicts comes from one of these. Times are seconds, rates per second, `context_tokens` of a decode step
the mean of its running sequences. Keys that a later version adds are passed over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from headrace.errors import ConfigError, Problem
from headrace.planner.distributions import Distribution
from headrace.planner.fits import DecodeFit, LearnFit
from headrace.planner.key_steps import Checks
from headrace.planner.rewards import Rewards

SCHEMA = 1

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    kind: Literal["run", "measured", "estimated"]
    """run: from a finished run's events; measured: by a short run made for it; estimated: roofline, no hardware touched."""
    origin: Annotated[str, Field(alias="from")]
    """Run directory, recipe, or model and device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    device: str
    count: AtLeastOne
    """Devices that the numbers come from."""
    memory_bytes: Count | None = None
    """Of one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    num_parameters: Count
    kv_bytes_per_token: Count | None = None
    """Keys and values of one token in every layer, on all devices of an engine together."""
    tensor_parallel: AtLeastOne = 1
    """Devices of one engine in `decode` and `prefill`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """Decode steps alike in batch and context."""

    running: Positive
    """Sequences, mean over the steps."""
    context_tokens: Amount
    """Of one running sequence, mean."""
    seconds: Positive
    """Of one step, mean."""
    count: Count
    """Steps; 1 where estimated."""
    tokens: Amount = 0.0
    """Computed in one step, mean: more than `running` where observations or prompts came with it. 0: as many as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    running: AtLeastOne
    """The smallest running batch that reaches 90 % of the best rate (DESIGN section 2: capacity)."""
    tokens_per_second: Positive
    """The best rate of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One engine."""

    points: tuple[DecodePoint, ...]
    fit: DecodeFit
    kv_capacity_tokens: AtLeastOne | None
    """Of one engine, all running sequences together; None: memory is no limit."""
    saturation: Saturation
    gap_seconds: Amount = 0.0
    """Between two steps, while rollouts are in flight: handing out answers, gathering requests."""
    gap_seconds_per_sequence: Amount = 0.0
    """The part that grows with the running batch: the rollouts' own Python between two tokens, environments that compute."""
    answer_delay_steps: Amount = 0.0
    """Decode steps that pass from an environment's answer until its rollout is ready: samplers and rollouts share one event loop."""
    work_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of a step's seconds, in the model's work (busy, DESIGN section 2); the rest is bookkeeping around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    overhead_seconds: Amount
    """Of one prompt, beside its tokens."""
    tokens_per_second: Positive
    """Of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnPoint:
    ranks: AtLeastOne
    micro_batch_tokens: AtLeastOne
    """Most tokens, padding included, of one forward and backward."""
    tokens: Amount
    """Of the batch, padding included, on all ranks together."""
    seconds: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    points: tuple[LearnPoint, ...]
    fit: LearnFit
    handover_seconds: Amount = 0.0
    """Of one update, outside the points' seconds: the batch to the learner and the result back, what is written down in between."""
    tokens_per_trajectory: Amount = 0.0
    """Learner tokens of one trajectory that a batch takes, padding included and filtered ones counted as none. 0: its total tokens."""
    micro_batch_tokens: AtLeastOne = 8192
    """What the run used; predictions take it unless told otherwise."""
    busy_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of an update's seconds, in forward, backward and optimizer; the rest prepares tensors and waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    bytes: Count
    publish_seconds: Amount
    """The learner's own time."""
    transfer_seconds: Amount
    """Until every sampler has it; the learner waits for it only in sync mode."""
    pause_seconds: Amount
    """Of one sampler, in which it decodes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """Over rollouts; `tool_wait_seconds` over steps."""

    prompt_tokens: Distribution
    """Prompt and observations of one rollout."""
    answer_tokens: Distribution
    """Action tokens of one rollout."""
    steps: Distribution
    tool_wait_seconds: Distribution
    """The environment's answer to one action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    size: AtLeastOne
    tailness: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """E[most answer tokens of a group's members] / E[answer tokens]."""
    seconds_tailness: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """The same of the seconds that rollouts take; None: as of tokens."""
    draw_to_end: Amount | None = None
    """Mean seconds from the drawing of a trained token to the end of its group / mean rollout seconds; None: members independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """How the run went that was measured: predictions are held against it."""

    mode: str
    placement: str
    num_sampler_devices: int
    num_learner_devices: int
    slots_per_sampler: int
    batch_trajectories: int
    max_staleness: int
    num_updates: int
    step_seconds: float
    """Of one update, mean over the timed window without its first tenth."""
    trajectories_per_second: float
    """Finished."""
    mean_in_flight: float
    rollout_seconds: float
    staleness_mean: float | None
    learner_busy_fraction: float
    sampler_busy_fraction: float
    mean_running: float
    """Sequences in a decode step, time-weighted over busy seconds."""
    selection: str = "ready_first"
    max_in_flight: int | None = None
    """Of one sampler; None: no limit of its own, or not known."""
    gather_seconds: float | None = None
    queue_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    source: Source
    hardware: Hardware
    model: Model
    decode: Decode
    prefill: Prefill
    learn: Learn
    weight_update: WeightUpdate
    distributions: Distributions
    group: Group
    schema: Literal[1] = 1
    dispatch_seconds: Amount = 0.0
    """Of one rollout, outside its own seconds: the conductor's work and the wire, at its start and at its end."""
    rewards: Rewards | None = None
    """None: not known, or of more than two values; no group is left out for its rewards then."""
    key_step_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of all steps."""
    checks: Checks | None = None
    """Verifications; None: none were made."""
    observed: Observed | None = None

    @property
    def estimated(self) -> bool:
        return self.source.kind == "estimated"

    def with_distributions(self, distributions: Distributions) -> Profile:
        return replace(self, distributions=distributions)


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def profile_as_json(profile: Profile) -> dict[str, Any]:
    """The object of CONTRACTS."""
    values: dict[str, Any] = _ADAPTER.dump_python(profile, mode="json", by_alias=True)
    return {"schema": values.pop("schema"), **values}


def save_profile(profile: Profile, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(profile_as_json(profile), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        remedy = "Choose another file with --out FILE."
        problem = Problem(file=str(path), key="--out", value=str(path), message=f"the profile cannot be written: {error.strerror}.", remedy=remedy)
        raise ConfigError([problem]) from error


def load_profile(path: Path) -> Profile:
    """Raises ConfigError naming every key that is missing or out of range."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"the profile cannot be read: {error.strerror}.", "Make one with: headrace profile RUN --out profile.json") from error
    except ValueError as error:
        raise _wrong(path, f"it is no JSON: {error}.", "Make the profile again with: headrace profile RUN --out profile.json") from error
    return profile_from_json(values, file=str(path))


def profile_from_json(values: Any, *, file: str | None = None) -> Profile:
    """Raises ConfigError naming every key that is missing or out of range."""
    if not isinstance(values, dict):
        raise _wrong(file, f"a profile is a JSON object, this is a {type(values).__name__}.", "Give the file that headrace profile wrote.")
    if values.get("schema") != SCHEMA:
        found = values.get("schema")
        what = "has no schema: it is no profile" if found is None else f"has schema {found!r}, this version reads {SCHEMA}"
        remedy = "Give the file that headrace profile wrote, or make it again."
        raise ConfigError([Problem(file=file, key="schema", value=found, limit=str(SCHEMA), message=f"it {what}.", remedy=remedy)])
    try:
        profile = _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise ConfigError([_problem(file, one) for one in error.errors(include_url=False)]) from error
    if not profile.decode.points or not profile.learn.points:
        missing = "learn.points" if profile.decode.points else "decode.points"
        remedy = "Profile a run that made some updates, or write at least one point."
        raise ConfigError([Problem(file=file, key=missing, value=[], limit="at least 1", message=f"'{missing}' is empty.", remedy=remedy)])
    if empty := [name for name in ("answer_tokens", "steps") if min(getattr(profile.distributions, name).mean, getattr(profile.distributions, name).most) <= 0]:
        key = f"distributions.{empty[0]}.mean"
        what = f"'{key}', or its largest quantile, is 0: there is nothing to sample."
        raise ConfigError(
            [Problem(file=file, key=key, value=0, limit="> 0", message=what, remedy="Profile a run whose rollouts drew tokens, or give a larger value.")]
        )
    return profile


_REMEDIES = {"missing": "Add it, or make the profile again.", "greater_than": "Give a larger value.", "greater_than_equal": "Give a larger value."}


def _problem(file: str | None, error: Any) -> Problem:
    key = ".".join(str(part) for part in error["loc"])
    context = error.get("ctx") or {}
    limit = next((f"{sign} {context[name]:g}" for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")) if name in context), None)
    if error["type"] == "missing":
        return Problem(file=file, key=key, message=f"'{key}' is missing.", remedy=_REMEDIES["missing"])
    value = error.get("input")
    what = error["msg"][0].lower() + error["msg"][1:]
    shown = value if isinstance(value, str | int | float | bool | None) else type(value).__name__
    remedy = _REMEDIES.get(error["type"], "Correct it, or make the profile again.")
    return Problem(file=file, key=key, value=shown, limit=limit, message=f"'{key}' is {shown!r}: {what}.", remedy=remedy)


def _wrong(path: Path | str | None, message: str, remedy: str) -> ConfigError:
    file = None if path is None else str(path)
    return ConfigError([Problem(file=file, key="PROFILE", value=file, message=message, remedy=remedy)])
