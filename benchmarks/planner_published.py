"""The planner's closed forms against published measurements: what is predicted from what, and how far off it is.

    python benchmarks/planner_published.py [CASES.json] [--json]

CASES.json is a list of {id, kind, group, source, inputs, outputs, missing_inputs, notes}; default: the copy that the tests use.
An arm is predicted from its own *inputs* and from the *outputs* of other arms (`calibrated_from`), never from its own outputs;
where that cannot be avoided it is a consistency check, with relative_error null. What is not predicted is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from headrace.planner import literature
from headrace.planner.distributions import Distribution
from headrace.planner.estimate import Setup, steady_state
from headrace.planner.fits import fit_learn
from headrace.planner.hardware import DEVICES
from headrace.planner.roofline import Engine, estimate_profile
from headrace.planner.shapes import ModelShape
from headrace.planner.staleness import prefetch_staleness, queue_drop_staleness

CASES = Path(__file__).resolve().parent.parent / "tests" / "unit" / "planner" / "published_cases.json"
Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    id: str
    output: str
    predicted: float
    published: float
    calibrated_from: tuple[str, ...] = ()
    """Cases whose outputs were used."""
    check: bool = False
    """A consistency check: inputs derive from its own outputs."""
    how: str = ""

    @property
    def relative_error(self) -> float | None:
        if self.check or self.id in self.calibrated_from:
            return None
        return self.predicted / self.published - 1.0

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "output": self.output, "predicted": round(self.predicted, 6), "published": self.published,
            "relative_error": None if self.relative_error is None else round(self.relative_error, 6), "calibrated_from": list(self.calibrated_from),
            "how": self.how,
        }  # fmt: skip


def number(case: Case, *path: str) -> float | None:
    """A finite number below `inputs` or `outputs`; None where it is missing or a text."""
    value: Any = case
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def groups_of(cases: Sequence[Case], accepts: Callable[[Case], bool]) -> Iterator[list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        if case.get("group") and accepts(case):
            found.setdefault(str(case["group"]), []).append(case)
    return iter(found.values())


def ids(cases: Sequence[Case]) -> tuple[str, ...]:
    return tuple(sorted({str(case["id"]) for case in cases}))


def others(case: Case, cases: Sequence[Case]) -> list[Case]:
    return [each for each in cases if each["id"] != case["id"]]


# one split against the others: tau(T) = overhead + work / T, seconds a group = fixed + work / R --------------------------


def split_sweeps(cases: Sequence[Case]) -> Iterator[Prediction]:
    def accepts(case: Case) -> bool:
        return None not in (
            number(case, "outputs", "train_compute_s"),
            number(case, "outputs", "rollout_groups_per_s"),
            number(case, "inputs", "split", "train"),
        )

    sweeps = list(groups_of(cases, accepts))
    for arms in sweeps:
        like = [each for sweep in sweeps for each in sweep if same_run(each, arms[0])]
        if len(arms) < 2 or len(like) < 4:
            continue
        for arm in arms:
            yield from one_split(arm, others(arm, like))
        best = max(arms, key=updates_per_hour)
        siblings = [each for each in like if each["group"] != best["group"]]
        rest = siblings if len(siblings) > 3 else others(best, arms)
        chosen = min(arms, key=lambda arm: sweep_step(arm, rest))
        how = f"chosen: {chosen['id']}; its published updates/h against those of the best, {best['id']}"
        yield Prediction(
            id=best["id"],
            output="best_split_updates_per_h",
            predicted=updates_per_hour(chosen),
            published=updates_per_hour(best),
            calibrated_from=ids(rest),
            how=how,
        )
    for case in cases:
        rates = case["outputs"].get("predicted_updates_per_h")
        arms = [arm for sweep in sweeps for arm in sweep if same_run(arm, case)]
        if isinstance(rates, Mapping) and len(arms) > 3:
            for split, published in rates.items():
                train, rollout = (int(part) * case["inputs"]["gpus_per_node"] for part in str(split).split(":"))
                step = sweep_step({"inputs": {**case["inputs"], "split": {"train": train, "rollout": rollout}}}, arms)
                how = f"split {split}, fitted over all measured arms (published: their own fit)"
                yield Prediction(id=case["id"], output="updates_per_h", predicted=3600 / step, published=published, calibrated_from=ids(arms), how=how)


def one_split(arm: Case, rest: Sequence[Case]) -> Iterator[Prediction]:
    inputs = arm["inputs"]
    learn, generate = sweep_seconds(arm, rest)
    how = "max(update, batch / rate), both fitted over the split"
    measured = arm["outputs"]["train_compute_s"] + arm["outputs"]["trainer_wait_s"]
    yield Prediction(id=arm["id"], output="step_time_s", predicted=sweep_step(arm, rest), published=round(measured, 3), calibrated_from=ids(rest), how=how)
    stale = number(arm, "outputs", "staleness_total_mean")
    if stale is not None:
        age = prefetch_staleness(
            concurrency=inputs["concurrency_groups"], batch=inputs["batch_groups"], rho=learn / (inputs["batch_groups"] * generate),
            queue=inputs["queue_cap_groups"], bound=inputs["max_staleness_updates"],
        )  # fmt: skip
        yield Prediction(id=arm["id"], output="staleness_mean", predicted=age.mean, published=stale, calibrated_from=ids(rest), how="in flight + prefetch")


def same_run(first: Case, second: Case) -> bool:
    """Alike but for split and staleness bound."""
    keys = ("model", "gpu_type", "n_gpus", "batch_groups", "samples_per_prompt", "concurrency_groups", "rollout_engine", "train_engine")
    return all(first["inputs"].get(key) == second["inputs"].get(key) for key in keys)


def updates_per_hour(arm: Case) -> float:
    return 3600.0 / float(arm["outputs"]["train_compute_s"] + arm["outputs"]["trainer_wait_s"])


def sweep_step(arm: Case, rest: Sequence[Case]) -> float:
    learn, generate = sweep_seconds(arm, rest)
    return max(learn, float(arm["inputs"]["batch_groups"]) * generate)


def sweep_seconds(arm: Case, rest: Sequence[Case]) -> tuple[float, float]:
    """(seconds of an update, seconds a group) of the arm by the others. Groups/s of a trainer-bound arm are throttled and do not count."""
    points = [(int(each["inputs"]["split"]["train"]), 10**9, 1.0, float(each["outputs"]["train_compute_s"])) for each in rest]
    split = arm["inputs"]["split"]
    learn = fit_over_devices([(ranks, seconds) for ranks, _, _, seconds in points], int(split["train"]))
    free = [each for each in rest if each["outputs"]["trainer_wait_s"] > 0.05 * each["outputs"]["train_compute_s"]] or rest
    return learn, fit_over_devices(
        [(int(each["inputs"]["split"]["rollout"]), 1 / each["outputs"]["rollout_groups_per_s"]) for each in free], int(split["rollout"])
    )


def fit_over_devices(points: Sequence[tuple[int, float]], devices: int) -> float:
    """Overhead + work / devices: the planner's learner fit with one 'token' a device-second."""
    work = 1e6  # so many tokens that one micro-batch holds a rank's share
    return fit_learn([(each, 10**9, work, seconds) for each, seconds in points]).seconds(devices, 10**9, work)


# synchronous phases by token rates ---------------------------------------------------------------------------------------


def token_rates(cases: Sequence[Case]) -> Iterator[Prediction]:
    def accepts(case: Case) -> bool:
        return None not in (number(case, "outputs", "gen_tokens_per_s_per_gpu"), number(case, "inputs", "response_length_mean"))

    for arms in groups_of(cases, accepts):
        for arm in arms:
            for rest in others(arm, arms)[:1]:
                tokens = arm["inputs"]["batch_samples"] * arm["inputs"]["response_length_mean"]
                calibrated = rest["inputs"]["batch_samples"] * rest["inputs"]["response_length_mean"]
                share = tokens / calibrated * rest["inputs"]["n_gpus"] / arm["inputs"]["n_gpus"]
                phases = ("gen_time_s", "prev_logprob_s", "train_time_s")
                step = share * sum(rest["outputs"][phase] for phase in phases)
                published = arm["outputs"]["step_time_s"]
                how = "phases at the other arm's tokens/s"
                yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=published, calibrated_from=ids([rest]), how=how)


# the same mode on another number of devices ------------------------------------------------------------------------------


def device_scaling(cases: Sequence[Case]) -> Iterator[Prediction]:
    def accepts(case: Case) -> bool:
        return None not in (number(case, "outputs", "step_time_s"), number(case, "outputs", "train_time_s")) and "mode" in case["inputs"]

    for arms in groups_of(cases, accepts):
        if any("identical" in arm.get("notes", "") or "one-step-off" in arm["inputs"]["mode"] for arm in arms):
            continue  # rows that the source mixes up; one-step overlap has its own form
        for arm in arms:
            alike = [each for each in others(arm, arms) if each["inputs"]["mode"] == arm["inputs"]["mode"] and train_devices(each) != train_devices(arm)]
            published = arm["outputs"]["step_time_s"]
            for rest in alike[:1]:
                factor = train_devices(rest) / train_devices(arm)
                wait = number(rest, "outputs", "trainer_wait_for_samples_s")
                step = factor * rest["outputs"]["step_time_s"] if wait is None else factor * rest["outputs"]["train_time_s"] + wait
                how = "work over devices" if wait is None else "training over devices, the wait stays"
                yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=published, calibrated_from=ids([rest]), how=how)
            sync = [each for each in others(arm, arms) if "sync colocated" in each["inputs"]["mode"] and each["inputs"]["n_gpus"] == arm["inputs"]["n_gpus"]]
            if not alike and "async" in arm["inputs"]["mode"] and sync:
                step = sync[0]["outputs"]["train_time_s"] * train_devices(sync[0]) / train_devices(arm)
                how = "training over fewer devices; rollouts bring their log-probabilities and are assumed to keep up"
                yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=published, calibrated_from=ids(sync[:1]), how=how)


def train_devices(case: Case) -> float:
    return number(case, "inputs", "split", "train") or float(case["inputs"]["n_gpus"])


# one step off: generation has a tail that devices do not shorten ---------------------------------------------------------


def one_step_off(cases: Sequence[Case]) -> Iterator[Prediction]:
    pairs = []
    for arms in groups_of(cases, lambda case: number(case, "outputs", "generate_sequences_s") is not None and "mode" in case["inputs"]):
        sync = [arm for arm in arms if "sync colocated" in arm["inputs"]["mode"]]
        overlap = [arm for arm in arms if "one-step-off" in arm["inputs"]["mode"] and states(arm, "inputs.split.train inputs.split.rollout")]
        pairs += [(a, b) for a in sync[:1] for b in overlap[:1]]
    for sync, arm in pairs:
        for other_sync, other in [pair for pair in pairs if pair[1]["id"] != arm["id"]][:1]:
            # the tail: seconds a token of the longest answer, from the other engine's pair
            fewer = other_sync["inputs"]["n_gpus"] / other["inputs"]["split"]["rollout"]
            short, long = other_sync["outputs"]["generate_sequences_s"], other["outputs"]["generate_sequences_s"]
            tail = max(0.0, (fewer * short - long) / (fewer - 1)) / other_sync["inputs"]["response_length_max"] * sync["inputs"]["response_length_max"]
            fewer = sync["inputs"]["n_gpus"] / arm["inputs"]["split"]["rollout"]
            generate = tail + fewer * max(0.0, sync["outputs"]["generate_sequences_s"] - tail)
            share = sync["inputs"]["n_gpus"] / arm["inputs"]["split"]["train"]
            learn = share * (sync["outputs"]["old_log_prob_s"] + sync["outputs"]["train_time_s"])
            step = literature.overlapped_step(generate, learn)
            how = "max(generation with its tail, training + log-probabilities)"
            used = ids([sync, other_sync, other])
            yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=arm["outputs"]["step_time_s"], calibrated_from=used, how=how)


# weights every k updates --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """Of one group: seconds of the slower side and those that a barrier exposes, by two synchronous arms."""

    slower: float
    exposed: float

    @classmethod
    def of(cls, first: Case, second: Case) -> Interval:
        """step(k) = slower + exposed / k (literature.interval_step)."""
        (a, step_a), (b, step_b) = ((float(arm["inputs"]["sync_interval"]), step_of(arm)) for arm in (first, second))
        exposed = (step_a - step_b) / (1 / a - 1 / b)
        return cls(step_a - exposed / a, exposed)


def in_intervals(arms: Sequence[Case]) -> list[Case]:
    """The synchronous ones, shortest interval first."""
    sync = [arm for arm in arms if arm["inputs"]["mode"] == "synchronous" and number(arm, "inputs", "sync_interval")]
    return sorted(sync, key=lambda arm: int(arm["inputs"]["sync_interval"]))


def step_of(case: Case) -> float:
    return 60.0 * float(case["outputs"]["total_minutes"]) / float(case["inputs"]["steps"])


def parameters_of(case: Case) -> float:
    text = str(case["inputs"]["model"]).rsplit("-", 1)[-1].upper().removesuffix("B")
    return float(text)


def intervals(cases: Sequence[Case]) -> Iterator[Prediction]:
    def accepts(case: Case) -> bool:
        return number(case, "outputs", "total_minutes") is not None and "sync_interval" in case["inputs"]

    families = list(groups_of(cases, accepts))
    for arms in families:
        sync = in_intervals(arms)
        if len(sync) < 2:
            continue
        for arm in sync if len(sync) > 2 else ():
            rest = others(arm, sync)
            found = Interval.of(rest[0], rest[-1])
            step = found.slower + found.exposed / arm["inputs"]["sync_interval"]
            yield Prediction(
                id=arm["id"], output="step_time_s", predicted=step, published=step_of(arm), calibrated_from=ids(rest), how="slower side + exposed / interval"
            )
        found = Interval.of(sync[0], sync[1])
        yield from barriers(arms, sync[:2], found, [family for family in families if family is not arms])


def barriers(arms: Sequence[Case], sync: Sequence[Case], found: Interval, families: Sequence[Sequence[Case]]) -> Iterator[Prediction]:
    """One step off waits for a barrier each step, as long as in the other model's arm; fully async writes its weights each step."""
    one_off = [arm for arm in arms if "one-step off" in arm["inputs"]["mode"]]
    for family in families[:1]:
        theirs = in_intervals(family)[:2]
        their_one = [arm for arm in family if "one-step off" in arm["inputs"]["mode"]]
        if len(theirs) < 2 or not their_one:
            continue
        barrier = max(0.0, step_of(their_one[0]) - Interval.of(*theirs).slower)
        for arm in one_off:
            used = ids([*sync, *theirs, their_one[0]])
            how = "slower side + the other model's barrier"
            yield Prediction(id=arm["id"], output="step_time_s", predicted=found.slower + barrier, published=step_of(arm), calibrated_from=used, how=how)
        pool = [(one_off, sync, found)] if one_off else []
        pool.append((their_one, theirs, Interval.of(*theirs)))
        largest, their_sync, their_found = max(pool, key=lambda each: parameters_of(each[0][0]))
        for arm in (arm for arm in arms if arm["inputs"]["mode"] == "fully async"):
            written = max(0.0, step_of(largest[0]) - their_found.slower) * parameters_of(arm) / parameters_of(largest[0])
            used = ids([*sync, *their_sync, largest[0]])
            how = "slower side + writing the weights, at the largest model's bytes a second"
            yield Prediction(id=arm["id"], output="step_time_s", predicted=found.slower + written, published=step_of(arm), calibrated_from=used, how=how)


# on-policy and off-policy arms of one model, over releases ---------------------------------------------------------------


def releases(cases: Sequence[Case]) -> Iterator[Prediction]:
    arms = [case for case in cases if number(case, "inputs", "max_trajectory_age_steps") is not None and number(case, "outputs", "step_time_s")]
    sync = [arm for arm in arms if arm["inputs"]["split"] == "colocated"]
    asynchronous = [arm for arm in arms if isinstance(arm["inputs"]["split"], Mapping)]
    for arm in asynchronous:
        yield from off_policy_arm(arm, sync, asynchronous)
    for arm in sync:
        yield from larger_sync_arm(arm, sync, asynchronous)


def off_policy_arm(arm: Case, sync: Sequence[Case], asynchronous: Sequence[Case]) -> Iterator[Prediction]:
    """The slower side's share of the synchronous step, from the same model's pair in other releases, else from other models' like split."""
    published = arm["outputs"]["step_time_s"]
    base = [each for each in sync if each["group"] == arm["group"] and alike(each, arm)]
    base = [each for each in base if each["inputs"]["n_gpus"] == min(one["inputs"]["n_gpus"] for one in base)]
    pairs = [(a, b) for b in asynchronous if b["id"] != arm["id"] for a in sync if a["group"] == b["group"] and alike(a, b)]
    same = [(a, b) for a, b in pairs if a["inputs"]["model"] == arm["inputs"]["model"] and base and relative_split(a, b) == relative_split(base[0], arm)]
    if base and same:
        # several updates make a step; tokens of the two arms differ, and the published step times are of their own
        share = statistics.median(b["outputs"]["step_time_s"] / a["outputs"]["step_time_s"] * tokens(a) / tokens(b) for a, b in same)
        step = share * base[0]["outputs"]["step_time_s"] * tokens(arm) / tokens(base[0])
        used = ids([base[0], *(each for pair in same for each in pair)])
        how = "slower side / sum of both, as in other releases"
        yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=published, calibrated_from=used, how=how)
        return
    near = [each for each in asynchronous if each["group"] == arm["group"] and each["id"] != arm["id"] and alike(each, arm)]
    for rest in near[:1]:
        work = rest["outputs"]["step_time_s"] * tokens(arm) / tokens(rest)
        split, theirs = arm["inputs"]["split"], rest["inputs"]["split"]
        step = max(work * theirs["rollout"] / split["rollout"], work * theirs["train"] / split["train"])
        how = "both sides as slow as the slower one there, over devices"
        yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=published, calibrated_from=ids([rest]), how=how)


def larger_sync_arm(arm: Case, sync: Sequence[Case], asynchronous: Sequence[Case]) -> Iterator[Prediction]:
    """More devices for the same batch: training shrinks with them, generation only as far as smaller batches decode faster (roofline)."""
    smaller = [each for each in sync if each["group"] == arm["group"] and each["inputs"]["n_gpus"] < arm["inputs"]["n_gpus"] and alike(each, arm)]
    pair = [each for each in asynchronous if each["group"] == arm["group"] and alike(each, arm)]
    shape = shape_of(str(arm["inputs"]["model"]))
    for rest in smaller[:1]:
        matching = [each for each in pair if each["inputs"]["split"]["rollout"] == rest["inputs"]["n_gpus"]]
        if not states(arm, "inputs.gen_tp_pp' inputs.gpu_type'") or arm["inputs"]["gpu_type"] not in DEVICES:
            continue
        if not matching or shape is None or arm["inputs"]["gen_tp_pp"] != rest["inputs"].get("gen_tp_pp"):
            continue
        generate = min(matching[0]["outputs"]["step_time_s"], rest["outputs"]["step_time_s"])
        parallel = json.loads(arm["inputs"]["gen_tp_pp"])[0]
        engine = Engine(shape=shape, device=DEVICES[arm["inputs"]["gpu_type"]], tensor_parallel=parallel)
        running = [arm["inputs"]["batch_samples"] * parallel / each["inputs"]["n_gpus"] for each in (arm, rest)]
        faster = engine.decode_seconds(running[0], tokens(arm) / 2) / engine.decode_seconds(running[1], tokens(rest) / 2)
        learn = (rest["outputs"]["step_time_s"] - generate) * rest["inputs"]["n_gpus"] / arm["inputs"]["n_gpus"]
        step = (generate * faster + learn) * tokens(arm) / tokens(rest)
        how = f"generation x {faster:.2f} by roofline, the rest over devices"
        used = ids([rest, matching[0]])
        yield Prediction(id=arm["id"], output="step_time_s", predicted=step, published=arm["outputs"]["step_time_s"], calibrated_from=used, how=how)


def alike(first: Case, second: Case) -> bool:
    return all(first["inputs"].get(key) == second["inputs"].get(key) for key in ("algorithm", "precision", "batch_samples"))


def tokens(case: Case) -> float:
    return float(case["inputs"]["sequence_length_mean"])


def relative_split(sync: Case, arm: Case) -> tuple[float, float]:
    split = arm["inputs"]["split"]
    return split["train"] / sync["inputs"]["n_gpus"], split["rollout"] / sync["inputs"]["n_gpus"]


# total hours of one system on several models ----------------------------------------------------------------------------


def total_hours(cases: Sequence[Case]) -> Iterator[Prediction]:
    def accepts(case: Case) -> bool:
        return None not in (number(case, "outputs", "total_hours", "sync_areal"), number(case, "outputs", "total_hours", "areal_async"))

    for arms in groups_of(cases, accepts):
        for arm in arms:
            rest = others(arm, arms)
            if not rest:
                continue
            share = statistics.fmean(each["outputs"]["total_hours"]["areal_async"] / each["outputs"]["total_hours"]["sync_areal"] for each in rest)
            hours = arm["outputs"]["total_hours"]
            how = "slower side / sum of both, as with other models; from its own synchronous hours, so a check"
            yield Prediction(
                id=arm["id"],
                output="async_total_hours",
                predicted=share * hours["sync_areal"],
                published=hours["areal_async"],
                calibrated_from=ids(arms),
                how=how,
            )


# staleness ----------------------------------------------------------------------------------------------------------------


def staleness(cases: Sequence[Case]) -> Iterator[Prediction]:
    rows = [case for case in cases if number(case, "inputs", "rho_rollout_over_trainer_rate") is not None]
    for case in rows:
        inputs = case["inputs"]
        age = queue_drop_staleness(
            concurrency=inputs["concurrency_samples_C"], batch=inputs["batch_samples_B"], rho=inputs["rho_rollout_over_trainer_rate"],
            tailness=inputs["tailness_M"], queue_batches=inputs["queue_capacity_batches_q"],
        )  # fmt: skip
        published = case["outputs"]["mean_staleness_measured"]
        yield Prediction(id=case["id"], output="staleness_mean", predicted=age.mean, published=published, how="in flight + in queue, published formula")
    for case in cases:
        inputs = case["inputs"]
        capacities, ages = inputs.get("queue_capacity_batches"), case["outputs"].get("mean_staleness")
        if not rows or not isinstance(capacities, list) or not isinstance(ages, list):
            continue
        tailness = statistics.median(row["inputs"]["tailness_M"] for row in rows)
        for capacity, published in zip(capacities, ages, strict=True):
            age = queue_drop_staleness(
                concurrency=inputs["concurrency_samples_C"], batch=inputs["batch_samples_B"], rho=float(str(inputs["rho"]).lstrip("~")), tailness=tailness,
                queue_batches=capacity,
            )  # fmt: skip
            how = f"queue of {capacity}; tailness as in the other rows' inputs"
            yield Prediction(id=case["id"], output="staleness_mean", predicted=age.mean, published=published, how=how)
    for case in cases:
        inputs, published = case["inputs"], number(case, "outputs", "staleness_total_mean")
        if case["kind"] == "staleness" and published is not None and "concurrency" in inputs:
            batch = inputs["batch_groups"] * inputs["samples_per_prompt"]
            age = prefetch_staleness(concurrency=inputs["concurrency"], batch=batch, rho=1.0, queue=0, bound=inputs["max_staleness_updates"], prefetched=0.0)
            yield Prediction(id=case["id"], output="staleness_mean", predicted=age.mean, published=published, how="in flight, at most the bound")


# decode curves by roofline ------------------------------------------------------------------------------------------------


def llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": inner, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def experts(hidden: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    return llama(hidden, layers, heads, 4, 3 * hidden, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=inner)


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2-7b": llama(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-32b": llama(5120, 64, 40, 8, 27648, 152064),
    "qwen2-72b": llama(8192, 80, 64, 8, 29568, 152064),
    "qwen3-0.6b": llama(1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-1.7b": llama(2048, 28, 16, 8, 6144, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-4b": llama(2560, 36, 32, 8, 9728, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": llama(4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": llama(5120, 40, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": llama(5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": experts(2048, 48, 32, 768),
    "qwen3-235b-a22b": experts(4096, 94, 64, 1536),
    "deepseek v3": {
        **llama(7168, 61, 128, 128, 18432, 129280), "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip
_ALIASES = {"qwen3-235b": "qwen3-235b-a22b", "qwen3-30b3a": "qwen3-30b-a3b"}


def shape_of(name: str) -> ModelShape | None:
    key = name.lower().removesuffix("-instruct")
    config = CONFIGS.get(_ALIASES.get(key, key))
    return None if config is None else ModelShape.from_config(config)


def decode_curves(cases: Sequence[Case]) -> Iterator[Prediction]:
    for case in (case for case in cases if case["kind"] == "decode_curve"):
        inputs, outputs = case["inputs"], case["outputs"]
        device = DEVICES.get(str(inputs.get("gpu_type", "")).split("-")[0])
        shape = shape_of(str(inputs.get("model", "")))
        if device is None:
            continue
        if shape is not None and "median_itl_ms" in outputs.get("columns", ()):
            engine = Engine(shape=shape, device=device, tensor_parallel=int(inputs["n_gpus"]))
            context = inputs["input_tokens"] + inputs["output_tokens"] / 2
            most = min(256.0, inputs["kv_cache_gib_per_gpu"] * inputs["n_gpus"] * 2**30 / engine.kv_bytes_per_token / context)
            column = outputs["columns"].index("median_itl_ms")
            for row in (row for row in outputs["rows"] if row[0] <= 200):
                seconds = engine.decode_seconds(min(row[0], most), context)
                yield Prediction(id=case["id"], output="decode_step_ms", predicted=1e3 * seconds, published=row[column], how=f"roofline, {row[0]} at once")
        if shape is not None and isinstance(inputs.get("running_requests"), list) and isinstance(outputs.get("tokens_per_s"), list):
            engine = Engine(shape=shape, device=device)
            for running, rate in zip(inputs["running_requests"], outputs["tokens_per_s"], strict=True):
                how = f"roofline, {running} running, 2,000 tokens of context assumed"
                yield Prediction(
                    id=case["id"], output="decode_step_ms", predicted=1e3 * engine.decode_seconds(running, 2000), published=1e3 * running / rate, how=how
                )
        if isinstance(outputs.get("tokens_per_s"), Mapping):
            for name, rate in outputs["tokens_per_s"].items():
                size, _, parallel = str(name).partition(" TP")
                found = shape_of(f"qwen3-{size}")
                if found is not None:
                    seconds = Engine(shape=found, device=device, tensor_parallel=int(parallel or 1)).decode_seconds(1, 1024)
                    yield Prediction(id=case["id"], output="decode_step_ms", predicted=1e3 * seconds, published=1e3 / rate, how=f"roofline, {name} alone")


# analytic models: consistency checks ------------------------------------------------------------------------------------


def pipeline_case(cases: Sequence[Case]) -> Iterator[Prediction]:
    for case in cases:
        inputs, outputs = case["inputs"], case["outputs"]
        if number(case, "outputs", "pipeline_r_train") is None or number(case, "outputs", "speedup") is None:
            continue
        devices, generating = inputs["n_gpus"], inputs["pipeline"]["I"]
        efficiency, cost = outputs["pipeline_r_gen"] / generating, (devices - generating) / outputs["pipeline_r_train"]
        rate = literature.pipeline_rate(devices, generating, efficiency, cost)
        conventional = literature.conventional_rate(outputs["conventional_r_gen"], devices / cost)
        how = "U and tau derive from its rates"
        yield Prediction(id=case["id"], output="speedup", predicted=rate / conventional, published=outputs["speedup"], check=True, how=how)
        best = literature.pipeline_best_split(devices, efficiency, cost)
        yield Prediction(id=case["id"], output="best_split_generating", predicted=best, published=generating, check=True, how=how)
        lag = literature.pipeline_max_lag(inputs["pipeline"]["H"], generating, 2.0, 1.0, inputs["batch_samples"])
        yield Prediction(id=case["id"], output="max_lag_steps", predicted=lag, published=inputs["pipeline"]["max_lag_steps"], check=True, how=how)


def talk(cases: Sequence[Case]) -> Iterator[Prediction]:
    """40 problems x 32 samples: 99 % done in 40 s, the last 1 % takes 80 s more; best asynchronous split against synchronous."""
    tail = next((case for case in cases if "last_1_percent_extra_s" in case["outputs"] and number(case, "inputs", "batch_samples")), None)
    speedup = next((case for case in cases if "60 %" in str(case["outputs"].get("speedup_vs_sync", ""))), None)
    if tail is None or speedup is None:
        return
    found = talk_speedup(int(tail["inputs"]["batch_samples"]), int(tail["inputs"]["samples_per_prompt"]))
    how = "explained from assumptions: " + TALK_ASSUMPTIONS
    yield Prediction(id=speedup["id"], output="speedup", predicted=found, published=1.6, calibrated_from=(str(tail["id"]),), check=True, how=how)


TALK_ASSUMPTIONS = "Qwen3-30B-A3B in bfloat16, 8 H100, one an engine, by roofline; log-normal answers with t(100 %) = 3 x t(99 %) = 120 s; staleness at most 2"


def talk_speedup(batch: int, group_size: int, *, devices: int = 8, max_staleness: int = 2) -> float:
    """Synchronous step / step of the best asynchronous split. The longest answer takes 120 s at the pace of a nearly empty engine."""
    longest_level = NormalDist().inv_cdf(1 - 0.5 / batch)
    sigma = math.log(3) / (longest_level - NormalDist().inv_cdf(0.99))
    engine = Engine(shape=ModelShape.from_config(CONFIGS["qwen3-30b-a3b"]), device=DEVICES["H100"])
    longest = 120.0 / engine.decode_seconds(2, 2000)
    mean = longest / math.exp(sigma * longest_level) * math.exp(sigma**2 / 2)
    answers = Distribution.lognormal(mean, mean * math.sqrt(math.exp(sigma**2) - 1)).capped(longest)
    profile = estimate_profile(engine, name="30b-a3b", prompt_tokens=Distribution.constant(200), answer_tokens=answers, group_size=group_size)

    def step(mode: Literal["sync", "async"], samplers: int, ranks: int) -> float:
        placement: Literal["split", "colocated"] = "colocated" if mode == "sync" else "split"
        setup = Setup(
            mode=mode, placement=placement, num_samplers=samplers, num_learner_ranks=ranks, slots_per_sampler=256, batch_trajectories=batch,
            max_staleness=max_staleness,
        )  # fmt: skip
        return steady_state(profile, setup).step_seconds

    return step("sync", devices, devices) / min(step("async", engines, devices - engines) for engines in range(1, devices))


# all of it ----------------------------------------------------------------------------------------------------------------

# with what a case must state to be used; of several lines one is enough. A key is a number, with ' a text, with [ a list, with { a mapping
FAMILIES: dict[Callable[[Sequence[Case]], Iterator[Prediction]], tuple[str, ...]] = {
    split_sweeps: (
        "inputs.batch_groups inputs.concurrency_groups inputs.queue_cap_groups inputs.max_staleness_updates inputs.split.train inputs.split.rollout "
        "outputs.train_compute_s outputs.trainer_wait_s outputs.rollout_groups_per_s",
        "inputs.batch_groups inputs.gpus_per_node outputs.predicted_updates_per_h{",
    ),
    token_rates: (
        "inputs.batch_samples inputs.response_length_mean inputs.n_gpus outputs.gen_tokens_per_s_per_gpu outputs.gen_time_s outputs.prev_logprob_s "
        "outputs.train_time_s outputs.step_time_s",
    ),
    device_scaling: ("inputs.n_gpus inputs.mode' outputs.step_time_s outputs.train_time_s",),
    one_step_off: (
        "inputs.n_gpus inputs.mode' inputs.response_length_max outputs.generate_sequences_s outputs.old_log_prob_s outputs.train_time_s outputs.step_time_s",
    ),
    intervals: ("inputs.mode' inputs.model' inputs.steps outputs.total_minutes",),
    releases: (
        "inputs.max_trajectory_age_steps inputs.n_gpus inputs.sequence_length_mean inputs.batch_samples inputs.model' inputs.split' outputs.step_time_s",
        "inputs.max_trajectory_age_steps inputs.n_gpus inputs.sequence_length_mean inputs.batch_samples inputs.model' inputs.split.train inputs.split.rollout "
        "outputs.step_time_s",
    ),
    total_hours: ("outputs.total_hours.sync_areal outputs.total_hours.areal_async",),
    staleness: (
        "inputs.concurrency_samples_C inputs.batch_samples_B inputs.rho_rollout_over_trainer_rate inputs.tailness_M inputs.queue_capacity_batches_q "
        "outputs.mean_staleness_measured",
        "inputs.concurrency_samples_C inputs.batch_samples_B inputs.rho' inputs.queue_capacity_batches[ outputs.mean_staleness[",
        "inputs.batch_groups inputs.samples_per_prompt inputs.concurrency inputs.max_staleness_updates outputs.staleness_total_mean",
    ),
    decode_curves: (
        "inputs.gpu_type' inputs.model' inputs.n_gpus inputs.input_tokens inputs.output_tokens inputs.kv_cache_gib_per_gpu outputs.columns[ outputs.rows[",
        "inputs.gpu_type' inputs.model' inputs.running_requests[ outputs.tokens_per_s[",
        "inputs.gpu_type' outputs.tokens_per_s{",
    ),
    pipeline_case: (
        "inputs.n_gpus inputs.pipeline.I inputs.pipeline.H inputs.pipeline.max_lag_steps inputs.batch_samples outputs.pipeline_r_gen outputs.pipeline_r_train "
        "outputs.conventional_r_gen outputs.speedup",
    ),
    talk: ("inputs.batch_samples inputs.samples_per_prompt outputs.last_1_percent_extra_s'", "outputs.speedup_vs_sync'"),
}
_REASONS = {
    "weight_sync": "weight transfer differs by 1,000 times between engines for like models; profiles measure it",
    "train_throughput": "a training rate alone, of pre-training or one engine: an input of profiles (the efficiencies in planner/roofline.py), no run",
    "decode_curve": "model, device or running batch is not stated",
}


_KINDS: dict[str, tuple[type, ...]] = {"'": (str,), "[": (list,), "{": (dict,)}


def states(case: Case, keys: str) -> bool:
    """Whether the case has all of them."""
    for key in keys.split():
        path = tuple(key.rstrip("'[{").split("."))
        if key[-1] not in _KINDS:
            if number(case, *path) is None:
                return False
            continue
        value: Any = case
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        if not isinstance(value, _KINDS[key[-1]]):
            return False
    return True


def predict(cases: Sequence[Case]) -> list[Prediction]:
    made = []
    for family, needs in FAMILIES.items():
        made += family([case for case in cases if "kind" in case and any(states(case, keys) for keys in needs)])
    return made


def unpredicted(cases: Sequence[Case], predictions: Sequence[Prediction]) -> dict[str, str]:
    """Case id -> why nothing is predicted."""
    done = {prediction.id for prediction in predictions}
    used = {used: prediction.id for prediction in predictions for used in prediction.calibrated_from}
    reasons = {}
    for case in (case for case in cases if case["id"] not in done):
        missing = case.get("missing_inputs") or []
        if case["id"] in used:
            reasons[case["id"]] = f"no other arm tells its phases; others are calibrated from it ({used[case['id']]})"
        elif case["kind"] in _REASONS:
            reasons[case["id"]] = _REASONS[case["kind"]]
        else:
            reasons[case["id"]] = f"not stated, and in no other arm: {', '.join(missing[:3])}" if missing else "the only arm of its kind"
    return reasons


def losses(cases: Sequence[Case], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Asynchronous arms whose step is published to be slower than a synchronous arm's on as many devices: also predicted so?"""
    predicted = {one.id: one.predicted for one in predictions if one.output == "step_time_s" and one.relative_error is not None}
    published = {one.id: one.published for one in predictions if one.output == "step_time_s"}
    published |= {case["id"]: value for case in cases if (value := number(case, "outputs", "step_time_s")) is not None}
    found = []
    for first, second in combinations(cases, 2):
        for arm, sync in ((first, second), (second, first)):
            comparable = arm.get("group") == sync.get("group") is not None and arm["inputs"].get("n_gpus") == sync["inputs"].get("n_gpus")
            modes = str(arm["inputs"].get("mode", "")), str(sync["inputs"].get("mode", ""))
            if not comparable or "async" not in modes[0] or "sync" not in modes[1] or "async" in modes[1] or arm["id"] not in predicted:
                continue
            if published[arm["id"]] > published.get(sync["id"], float("inf")):
                held = predicted.get(sync["id"], published[sync["id"]])
                found.append({"id": arm["id"], "against": sync["id"], "predicted_to_lose": predicted[arm["id"]] > held})
    return found


def summary(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """By output: how many, median and largest absolute error; of staleness in updates too."""
    result: dict[str, dict[str, float]] = {}
    for output in sorted({one.output for one in predictions}):
        errors = [abs(one.relative_error) for one in predictions if one.output == output and one.relative_error is not None]
        if errors:
            result[output] = {"num": len(errors), "median_absolute_error": statistics.median(errors), "largest_absolute_error": max(errors)}
            if output == "staleness_mean":
                differences = [abs(one.predicted - one.published) for one in predictions if one.output == output]
                result[output] |= {"median_difference_updates": statistics.median(differences), "largest_difference_updates": max(differences)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=Path, default=CASES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = json.loads(arguments.cases.read_text(encoding="utf-8"))
    predictions = predict(cases)
    left, lost, by_output = unpredicted(cases, predictions), losses(cases, predictions), summary(predictions)
    if arguments.json:
        print(json.dumps({"cases": [one.as_json() for one in predictions], "summary": by_output, "losses": lost, "unpredicted": left}))
        return
    print(f"{'case':58} {'output':26} {'predicted':>10} {'published':>10} {'error':>7}  how; calibrated from")
    for one in predictions:
        error = "check" if one.relative_error is None else f"{one.relative_error:+.1%}"
        source = f"; from {', '.join(one.calibrated_from)}" if one.calibrated_from else ""
        print(f"{one.id:58} {one.output:26} {one.predicted:10.4g} {one.published:10.4g} {error:>7}  {one.how}{source}")
    print("\nBy output")
    for output, numbers in by_output.items():
        print(f"  {output:28} " + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
    print("\nAsynchronous arms that lose to a synchronous one on as many devices")
    for each in lost:
        print(f"  {each['id']} against {each['against']}: {'predicted to lose' if each['predicted_to_lose'] else 'MISSED'}")
    print(f"\nNot predicted: {len(left)} of {len(cases)}")
    for name, reason in left.items():
        print(f"  {name:58} {reason}")


if __name__ == "__main__":
    main()
