"""A made run directory whose true latencies, lengths and waits are known: what a profile must find again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from fakes.made_events import run_started, statistics, window
from headrace import events as ev
from headrace.event_log import EventLog
from headrace.planner.fits import DecodeFit, LearnFit
from headrace.types import WorkerActivity

DECODE = DecodeFit(floor_seconds=2e-3, seconds_per_sequence=5e-5, seconds_per_context_token=8e-7, seconds_per_extra_token=3e-5, sharpness=1.0)
LEARN = LearnFit(overhead_seconds=0.05, seconds_per_micro_batch=0.0, seconds_per_token=2e-5, seconds_per_exchange=0.0)
WAIT_MEAN, WAIT_DEVIATION = 0.03, 0.04
GAP_SECONDS = 4e-4
WORK_SHARE = 0.8
GROUP_SIZE, BATCH_GROUPS = 8, 4
NUM_UPDATES = 40
STEP_SECONDS = 0.5


def write_run(directory: Path, *, detail: bool = True, seed: int = 0, num_updates: int = NUM_UPDATES) -> None:
    """`detail`: with the fields decode_work and total_tokens, which older versions did not write."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(
        '[model]\ndtype = "float32"\n[sampler]\nmax_running = 64\nkv_memory_bytes = 1048576\n[learner]\nmicro_batch_tokens = 4096\n'
        '[pool]\nmax_staleness = 8\nselection = "ready_first"\n'
    )
    time, random = 0.0, np.random.default_rng(seed)
    log = EventLog(directory / "events.jsonl", lambda: time)
    sampler = {"name": "sampler-0", "role": "sampler", "capacity": 48, "saturated_tokens_per_second": 9000.0}
    log.emit(run_started([sampler, {"name": "learner-0", "role": "learner", "capacity": 1}], num_updates=num_updates))
    log.emit(window("start"))
    group = 0
    for update in range(num_updates):
        time = (update + 1) * STEP_SECONDS
        log.emit(worker_active(random, detail))
        lengths: list[float] = []
        for _ in range(BATCH_GROUPS):
            steps = int(np.clip(random.lognormal(2.4, 0.5), 2, 60))
            for member in range(GROUP_SIZE):
                log.emit(finished(random, group, member, steps, update, detail))
                lengths.append(2 * steps)
            group += 1
        log.emit(
            ev.SelectionTaken(
                selection=update, learner_version=update, lineage=0, trajectories=len(lengths) // 2, filtered=len(lengths) - len(lengths) // 2, wait_seconds=0.1
            )
        )
        tokens = int(sum(lengths) / 2)
        seconds = LEARN.seconds(1, 4096, tokens) * math.exp(0.02 * random.normal())
        log.emit(learned(update, tokens, seconds))
        log.emit(ev.WeightsPublished(version=update + 1, lineage=0, bytes=400_000, seconds=0.002))
    log.emit(window("end"))
    log.close()


def worker_active(random: np.random.Generator, detail: bool) -> ev.WorkerActive:
    work, running_seconds, counts, busy = [], {}, [0, 0, 0], 0.0
    for running in random.choice([1, 2, 4, 8, 16, 32, 64], size=5, replace=False).tolist():
        context, steps = int(random.integers(10, 60)), 10
        seconds = steps * DECODE.seconds(running, context, running) * math.exp(0.03 * random.normal())
        work.append((steps, steps * running, 2 * steps * running, steps * running * context, seconds))
        running_seconds[running] = seconds
        busy += seconds
        counts = [counts[0] + steps, counts[1] + steps * running, counts[2] + steps * running]
    gap = GAP_SECONDS * counts[0]
    share = WORK_SHARE if detail else 1.0  # older versions counted whole steps as busy
    away = STEP_SECONDS - busy - gap - 0.004
    idle = {"bookkeeping": (1 - share) * busy, "gather": gap / 2, "rollouts": gap / 2 + away / 4, "environment": away * 3 / 4, "weights": 0.004}
    activity = WorkerActivity(
        seconds=STEP_SECONDS, busy_seconds=share * busy, running_seconds={running: share * seconds for running, seconds in running_seconds.items()},
        idle_seconds=idle,
        step_seconds=busy, gap_seconds=gap, environment_seconds=away, decode_steps=counts[0], prefill_tokens=counts[2],
        sampled_tokens=counts[1], apply_seconds=0.004, applied_updates=1, decode_work=tuple(work) if detail else (),
    )  # fmt: skip
    return ev.WorkerActive(role="sampler-0", in_flight=3, activity=activity)


def finished(random: np.random.Generator, group: int, member: int, steps: int, update: int, detail: bool) -> ev.RolloutFinished:
    spread = math.log1p((WAIT_DEVIATION / WAIT_MEAN) ** 2)
    waits = random.lognormal(math.log(WAIT_MEAN) - spread / 2, math.sqrt(spread), steps).sum()
    return ev.RolloutFinished(
        role="sampler-0", group=group, member=member, attempt=0, kind="made", reward=float(member % 2), end="done", steps=steps, keys=0, tokens=steps,
        versions=[max(0, update - 2), update], seconds=float(waits) + 0.01 * steps, wait_seconds=float(waits), total_tokens=2 * steps if detail else 0,
    )  # fmt: skip


def learned(update: int, tokens: int, seconds: float) -> ev.Updated:
    return ev.Updated(
        role="learner", selection=update, version=update + 1, lineage=0, reward_mean=0.5, seconds=seconds, busy_seconds=0.9 * seconds, refused=None,
        statistics=statistics({2: tokens}), transfer_seconds=0.01,
    )  # fmt: skip
