"""Run directories for reports: every event, hostile texts, recorded trajectories, a tokenizer; the numbers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fakes.made_events import active, lines_of, run_started, statistics, updated, window
from headrace import events as ev

HOSTILE = "</script><script>hostile()</script><img src=x onerror=hostile()>&\"'`{{7*7}}$blue \u202eשלום \U0001f980"
"""Ends scripts, attributes and texts, names a colour of the page, and writes from right to left."""

SPLIT = [{"name": "sampler-0", "role": "sampler", "capacity": 8}, {"name": "learner-0", "role": "learner", "capacity": 1}]
COLOCATED = [{"name": "device-0", "role": "colocated", "capacity": 8}]


def made_events(*, num_updates: int = 6, text: str = HOSTILE, mode: str = "async", finish: bool = True, final: float = 0.9) -> list[tuple[float, ev.Event]]:
    """One second an update: 0.2 s waiting for the batch, 0.6 s learning, 0.1 s overhead, 0.1 s nothing named."""
    split = mode == "async"
    sampler = "sampler-0"
    timed: list[tuple[float, ev.Event]] = [(0.0, run_started(SPLIT if split else COLOCATED, mode=mode, placement="split" if split else "colocated"))]
    timed += [(0.0, _published(0)), (1.0, _evaluated(0, 0.2)), (1.0, window("start"))]
    for update in range(1, num_updates + 1):
        end = 1.0 + update
        timed.append((end - 0.9, ev.GroupReserved(group_id=update, task_id=f"task {update} {text}", task_kind=text, size=2)))
        timed.append((end - 0.8, ev.SelectionTaken(selection=update, learner_version=update - 1, lineage=0, trajectories=2, filtered=0, wait_seconds=0.2)))
        for member, kind in enumerate((text, "short")):
            timed.append((end - 0.5, _finished(update, member, kind)))
        timed.append((end - 0.45, ev.VerificationAsked(role=sampler, rollouts=2)))
        timed += [(end - 0.25, verified(update, 0, text)), (end - 0.15, verified(update, 1, "short", refreshed=4))]
        timed.append((end - 0.1, updated(update, seconds=0.7, busy=0.6, reward=update / 10, numbers=statistics({0: 10, 2: 30}, keys={0: 5, 2: 5}))))
        timed.append((end - 0.09, _published(update)))
        timed.append((end - 0.07, ev.WeightsAcknowledged(version=update, lineage=0, wait_seconds=0.01)))
        timed.append((end - 0.06, pool(in_flight=update, pooled=2)))
        timed.append((end - 0.05, ev.WeightsApplied(role=sampler, version=update, lineage=0)))
        timed.append((end - 0.02, ev.LedgerClosed(ledger=ledger(update, text))))
        upkeep: dict[str, Any] = {
            "verify_seconds": 0.05,
            "verify_tokens": 30,
            "num_unkept": 1,
            "num_parked": 2,
            "applied_updates": 1,
            "apply_delay_seconds": 0.1,
        }
        idle = {"environment": 0.4, "a new reason": 0.1}
        timed.append((end, active(sampler, 1.0, running={8: 0.3, 2: 0.2}, idle=idle, tokens=40, **upkeep)))
        if update % 2 == 0:
            reason = "22% of the key steps were over max_key_staleness: fewer groups outstanding"
            timed.append((end, ev.Paced(limit_groups=9 - update, max_groups=9, over_share=0.22, reason=reason, wait_seconds=0.1 * update)))
    end = 1.0 + num_updates
    timed.append((end, _failed(text)))
    timed.append((end, window("end")))
    timed.append((end + 0.5, _evaluated(num_updates, final)))
    timed.append((end + 0.6, ev.CheckpointSaved(version=num_updates, lineage=0, path=f"/{text}", seconds=0.05)))
    if finish:
        error = {"kind": "RecipeError", "message": f"wrong: {text}", "remedy": "Do it right."}
        timed.append((end + 1.0, ev.RunFinished(status="failed", error=error, version=num_updates, lineage=0)))
    return timed


def write_run(directory: Path, timed: list[tuple[float, ev.Event]], *, seed: int = 3, extra: str = "", torn: str = "") -> Path:
    """events.jsonl (with `torn` behind its last line) and config.toml of a run."""
    directory.mkdir(parents=True)
    lines = lines_of(timed)
    lines[0]["seed"] = seed
    (directory / "events.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines) + torn, encoding="utf-8")
    mode = lines[0]["mode"]
    settings = (
        f'[run]\nname = "door"\nseed = {seed}\nmode = "{mode}"\nnum_updates = 10\n[evaluation]\nmetric = "success"\n[learner]\nlearning_rate = 0.0123\n{extra}'
    )
    (directory / "config.toml").write_text(settings, encoding="utf-8")
    return directory


def write_trajectories(directory: Path, *, text: str = HOSTILE, retired: str = "trained") -> None:
    """Four trajectories of two steps; the second step is a key step and its action was drawn by two versions."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (directory / "trajectories").mkdir()
    rows: list[dict[str, Any]] = [
        {
            "group": number, "member": 0, "attempt": 0, "task_id": text, "kind": text, "retired": retired, "update": number + 1, "lineage": 0,
            "trained_tokens": 4, "reward": float(number % 2), "end": "done", "error": None, "steps": 2, "action_tokens": 4,
            "seconds": 1.0, "wait_seconds": 0.5, "temperature": 1.0,
            "staleness_mean": 1.0, "staleness_max": 2, "tokens": [0, 1, 2, 0, 3, 4, 2], "action_starts": [1, 4], "action_ends": [2, 7],
            "logprobs": [-0.5] * 4, "versions": [number, number, number + 1, number + 1], "key_steps": [1], "step_rewards": [0.0, 1.0],
        }
        for number in range(4)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), directory / "trajectories" / "000001.parquet")


def write_tokenizer(directory: Path) -> None:
    """Into a checkpoint; token 2 is a hostile text."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel

    model = directory / "checkpoints" / "update_000006"
    model.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({"seen ": 0, "alpha": 1, "</pre><b>": 2, "beta": 3, "gamma": 4}, unk_token="alpha"))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(model / "tokenizer.json"))


def ledger(update: int, kind: str = "short") -> dict[str, Any]:
    trained = 40 * update
    empty: dict[str, Any] = {"skipped": {}, "expired": 0, "filtered": 0, "failed": {}, "void": 0, "pooled": 0, "in_flight": 0}
    parts = {"skipped": {"stale": 5}, "filtered": 5, "failed": {"environment_error": 3}, "pooled": 4, "in_flight": 3}
    return {
        "at_update": update, "lineage": 0, "closes": True,
        "tokens": {"generated": trained + 20, "trained": trained, **empty, **parts},
        "trajectories": {"generated": 2 * update, "trained": 2 * update, **empty},
        "groups": {"generated": update, "trained": update, **empty},
        "key_steps": {**empty, "offered": 12 * update, "trained": 9 * update, "over_bound": 2 * update, "skipped": {"refreshed": 2 * update}, "pooled": update},
        "kinds": {kind: {"offered": 30, "trained": 10, "skipped": 1, "expired": 0, "filtered": 0, "failed": 0}, "short": {"offered": 70, "trained": 30}},
        "evaluation": {"tokens": 4, "trajectories": 2},
    }  # fmt: skip


def pool(*, in_flight: int, pooled: int) -> ev.PoolLevels:
    return ev.PoolLevels(
        max_groups=9, outstanding_groups=1, waiting_groups=0, ready_groups=0, taken_groups=0, rollouts_in_flight=in_flight, pooled_trajectories=pooled,
        pooled_tokens=10, staleness_mean=0.0, staleness_max=0, delivered_per_second=1.0, retired_per_second=1.0, waits=[],
    )  # fmt: skip


def _finished(group: int, member: int, kind: str) -> ev.RolloutFinished:
    return ev.RolloutFinished(**_numbers(group, member, kind))


def verified(group: int, member: int, kind: str, *, refreshed: int = 0, refresh_seconds: float = 0.0) -> ev.RolloutVerified:
    """As many tokens were drawn again as were cut off."""
    return ev.RolloutVerified(**_numbers(group, member, kind), round=1, refreshed=refreshed, refreshed_keys=int(refreshed > 0), refresh_seconds=refresh_seconds)


def _numbers(group: int, member: int, kind: str) -> dict[str, Any]:
    long = group == 1 and member == 0
    return {
        "role": "sampler-0", "group": group, "member": member, "attempt": 0, "kind": kind, "reward": 1.0, "end": "done", "steps": 2, "keys": 1,
        "tokens": 90 if long else 10, "versions": [group - 1, group], "seconds": 9.0 if long else 0.5, "wait_seconds": 0.2,
    }  # fmt: skip


def _failed(text: str) -> ev.RolloutFailed:
    return ev.RolloutFailed(
        role="sampler-0", group=9, member=0, attempt=1, task_id=f"broken {text}", reason="environment_error", error=f"ValueError: {text}", retried=False
    )


def _published(version: int) -> ev.WeightsPublished:
    return ev.WeightsPublished(version=version, lineage=0, bytes=1000, seconds=0.01)


def _evaluated(version: int, mean: float) -> ev.Evaluated:
    return ev.Evaluated(
        role="evaluator", version=version, lineage=0, mean=mean, interval95=[mean - 0.05, mean + 0.05], num_rollouts=64, metrics={"success": mean}, seconds=0.3
    )
