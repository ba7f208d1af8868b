"""trajectories/*.parquet: what the learner got, whole files only, and never anything that touches the run (I13, I14)."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from fakes.learner import ScriptedLearner
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.config import RecordTrajectories
from headrace.runtime import trajectory_store
from headrace.runtime.trajectory_store import COLUMNS, TrajectoryStore
from headrace.types import FinishedRollout, PolicyVersion, RetireReason, Trajectory, VersionSpan


def tasks() -> list[Any]:
    return [
        scripted_task("steps", answers=3, wait_seconds=0.5, key_steps=[1], reward=1.0),
        scripted_task("short", answers=1, reward=0.25, action_tokens=[5]),
        scripted_task("broken", fail_at=0),
    ]


def recorded_run(directory: Path, record: RecordTrajectories = RecordTrajectories.TRAINED, **options: Any) -> tuple[ScriptedRun, TrajectoryStore]:
    fraction = options.pop("fraction", 1.0)
    store = TrajectoryStore(directory, record=record, fraction=fraction)
    run = ScriptedRun(settings=run_settings(num_updates=8, **options.pop("settings", {})), tasks=tasks(), recorder=store, **options)
    run_virtual(run.run())
    store.close()
    return run, store


def rows(directory: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(directory.glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]


def test_rows_hold_exactly_what_the_learner_was_given(tmp_path: Path) -> None:
    run, store = recorded_run(tmp_path / "t")
    found = {(row["group"], row["member"], row["attempt"]): row for row in rows(tmp_path / "t")}
    given = {tuple(m.summary.key): (s, Trajectory.from_bytes(m.payload)) for s in run.learner.selections for m in s.members}
    assert found.keys() == given.keys()
    assert len(found) == store.outcome().trajectories > 20
    for key, (selection, trajectory) in given.items():
        row = found[key]
        spans = [span for step in trajectory.steps for span in step.version_spans]
        versions = [span.version.number for span in spans for _ in range(span.end - span.start)]
        ages = [selection.learner_version.number - version for version in versions]
        assert tuple(row) == COLUMNS
        assert (row["task_id"], row["reward"], row["end"]) == (trajectory.task_id, trajectory.reward, trajectory.end_reason)
        assert row["tokens"] == list(trajectory.tokens)
        assert row["logprobs"] == list(trajectory.sampler_logprobs)
        assert row["versions"] == versions
        assert list(zip(row["action_starts"], row["action_ends"], strict=True)) == [(s.action_start, s.action_end) for s in trajectory.steps]
        assert row["key_steps"] == [index for index, step in enumerate(trajectory.steps) if step.key_weight > 0]
        assert row["key_weights"] == [step.key_weight for step in trajectory.steps]
        assert row["step_rewards"] == [step.reward for step in trajectory.steps]
        assert row["update"] == selection.learner_version.number + 1
        assert row["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert row["staleness_max"] == max(ages)
        assert row["retired"] in ("trained", "skipped")


def test_log_probabilities_of_a_verification_are_not_taken_for_those_of_the_sampler(tmp_path: Path) -> None:
    run, _ = recorded_run(tmp_path / "run")
    drawn = next(member for member in run.learner.selections[0].members if Trajectory.from_bytes(member.payload).num_action_tokens > 1)
    trajectory = Trajectory.from_bytes(drawn.payload)
    start = trajectory.steps[0].action_start
    span = VersionSpan(version=PolicyVersion(0, 9), start=start, end=start + 1)
    verified = dataclasses.replace(trajectory, verified_spans=(span,), verified_logprobs=(-9.0,), round=1)
    store = TrajectoryStore(tmp_path / "t", record=RecordTrajectories.ALL)
    for each in (verified, trajectory):
        key = trajectory.key._replace(member=each.round)
        store.finished(FinishedRollout(summary=dataclasses.replace(drawn.summary, key=key), payload=dataclasses.replace(each, key=key).to_bytes()))
        store.retired(key, RetireReason.EXPIRED)
    store.close()
    assert [row["logprobs"] for row in rows(tmp_path / "t")] == [pytest.approx(trajectory.sampler_logprobs)] * 2


def test_members_that_stood_out_of_their_group_are_recorded_with_every_step_key(tmp_path: Path) -> None:
    run = ScriptedRun(settings=run_settings(num_updates=1), tasks=tasks()[:1])
    run_virtual(run.run())
    selection = run.learner.selections[0]
    marked = dataclasses.replace(selection, members=tuple(dataclasses.replace(one, marked=one.summary.key.member == 0) for one in selection.members))
    store = TrajectoryStore(tmp_path / "t")
    for member in selection.members:
        store.finished(FinishedRollout(summary=member.summary, payload=member.payload))
    store.learned(marked, run_virtual(ScriptedLearner(run.settings, lambda version: None).learn(selection)))
    for member in selection.members:
        store.retired(member.summary.key, RetireReason.TRAINED)
    store.close()
    found = rows(tmp_path / "t")
    assert sorted(row["member"] for row in found) == [0, 0, 1, 1]
    for row in found:
        assert row["key_weights"] == ([1.0, 1.0, 1.0] if row["member"] == 0 else [0.0, 1.0, 0.0])
        assert row["key_steps"] == ([0, 1, 2] if row["member"] == 0 else [1])


@pytest.mark.parametrize("task_id", ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000, "\u202eabc \U0001f980", "</script>\x1b[2J"])
def test_a_task_id_is_a_value_in_the_rows_and_never_a_path(task_id: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    store = TrajectoryStore(tmp_path / "run" / "t")
    run = ScriptedRun(settings=run_settings(num_updates=3), tasks=[scripted_task(task_id, answers=1)], recorder=store)
    run_virtual(run.run())
    store.close()
    assert {row["task_id"] for row in rows(tmp_path / "run" / "t")} == {task_id}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".parquet"}


def test_trained_tokens_of_the_rows_are_those_of_the_ledger(tmp_path: Path) -> None:
    run, _ = recorded_run(tmp_path / "t")
    ledger = run.log.named("ledger")[-1]["ledger"]
    assert sum(row["trained_tokens"] for row in rows(tmp_path / "t")) == ledger["tokens"]["trained"] > 0


def test_all_holds_failed_attempts_too(tmp_path: Path) -> None:
    run, _ = recorded_run(tmp_path / "t", RecordTrajectories.ALL)
    by_reason: dict[str, list[dict[str, Any]]] = {}
    for row in rows(tmp_path / "t"):
        by_reason.setdefault(row["retired"], []).append(row)
    failures = run.log.named("rollout_failed")
    assert sorted((r["group"], r["member"], r["attempt"]) for r in by_reason["failed"]) == sorted((f["group"], f["member"], f["attempt"]) for f in failures)
    assert all(row["error"] and row["update"] is None and row["staleness_max"] is None for row in by_reason["failed"])


@pytest.mark.parametrize(("record", "kept"), [(RecordTrajectories.ALL, ["filtered", "expired", "trained"]), (RecordTrajectories.TRAINED, ["trained"])])
def test_members_that_the_learner_never_got_are_kept_only_by_all(tmp_path: Path, record: RecordTrajectories, kept: list[str]) -> None:
    run, _ = recorded_run(tmp_path / "run")
    members = run.learner.selections[0].members
    store = TrajectoryStore(tmp_path / "t", record=record)
    for member, reason in zip(members, (RetireReason.FILTERED, RetireReason.EXPIRED, RetireReason.TRAINED), strict=False):
        store.finished(FinishedRollout(summary=member.summary, payload=member.payload))
        store.retired(member.summary.key, reason)
    store.close()
    assert [row["retired"] for row in rows(tmp_path / "t")] == kept


def test_none_records_nothing_and_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    store = TrajectoryStore(tmp_path / "t", record=RecordTrajectories.NONE)
    assert threading.active_count() == before
    store.close()
    recorded_run(tmp_path / "t", RecordTrajectories.NONE)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_fraction_takes_whole_groups_evenly(tmp_path: Path, fraction: float) -> None:
    store = TrajectoryStore(tmp_path / "t", record=RecordTrajectories.NONE, fraction=fraction)
    chosen = [store._is_recorded(group) for group in range(1000)]
    assert sum(chosen) == pytest.approx(1000 * fraction, abs=2)
    assert all(abs(sum(chosen[start : start + 100]) - 100 * fraction) <= 3 for start in range(0, 900, 50))
    recorded_run(tmp_path / "run", fraction=fraction)
    groups = {row["group"] for row in rows(tmp_path / "run")}
    assert groups == {group for group in groups if store._is_recorded(group)}


def test_recording_changes_no_event_and_leaves_no_thread(tmp_path: Path) -> None:
    """I14 and I13."""
    plain = ScriptedRun(settings=run_settings(num_updates=8), tasks=tasks())
    run_virtual(plain.run())
    before = threading.active_count()
    recorded, _ = recorded_run(tmp_path / "t", RecordTrajectories.ALL)
    assert recorded.log.lines == plain.log.lines
    assert threading.active_count() == before


def test_files_are_cut_by_rows_and_each_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_store, "MAX_ROWS", 5)
    _, store = recorded_run(tmp_path / "t")
    sizes = [parquet.read_metadata(path).num_rows for path in sorted((tmp_path / "t").glob("*.parquet"))]
    assert store.outcome().files == len(sizes) > 3
    assert all(size == 5 for size in sizes[:-1])
    assert [path.name for path in (tmp_path / "t").iterdir() if path.suffix != ".parquet"] == []


def test_unwritable_directory_loses_rows_counts_them_and_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file stands where the directory should be")
    run, store = recorded_run(tmp_path / "t")
    outcome = store.outcome()
    assert run.log.named("updated")[-1]["version"] == 8
    assert outcome.trajectories == 0
    assert outcome.lost > 20
    assert outcome.failure is not None and "FileExistsError" in outcome.failure


def test_file_that_fails_halfway_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(table: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", torn)
    _, store = recorded_run(tmp_path / "t")
    assert list((tmp_path / "t").iterdir()) == []
    assert "No space left" in (store.outcome().failure or "")


def test_more_than_the_thread_can_take_is_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_store, "MAX_PENDING_BYTES", -1)
    _, store = recorded_run(tmp_path / "t")
    assert store.outcome().lost > 20
    assert store.outcome().trajectories == 0


def test_payload_that_is_no_trajectory_ends_recording_only(tmp_path: Path) -> None:
    run = ScriptedRun(settings=run_settings(num_updates=2), tasks=tasks())
    run_virtual(run.run())
    member = run.learner.selections[0].members[0]
    store = TrajectoryStore(tmp_path / "t")
    for payload in (member.payload, b"\x05\x00\x00\x00nonsense"):
        store.finished(FinishedRollout(summary=member.summary, payload=payload))
        store.retired(member.summary.key, RetireReason.TRAINED)
    store.close()
    assert store.outcome().failure is not None
    assert store.outcome().lost == 2


def test_token_columns_are_compact_numbers(tmp_path: Path) -> None:
    recorded_run(tmp_path / "t")
    schema = parquet.read_schema(tmp_path / "t" / "000001.parquet")
    assert schema.field("tokens").type == pa.list_(pa.int32())
    assert schema.field("logprobs").type == pa.list_(pa.float32())
