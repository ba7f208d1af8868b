"""The journal on disk, and what is found in the directory of a run that is over."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.errors import CheckpointError, ConfigError, RunDirectoryError
from headrace.manifest import MANIFEST, write_manifest
from headrace.pool.journal import Delivered, Record, Reported
from headrace.pool.restoring import held_rollouts
from headrace.runtime.journal import FILE, STATE_FILE, RunJournal, read_journal
from headrace.runtime.resumption import find_resumption, open_journal, refuse_changes, set_aside
from headrace.runtime.run_directory import RunDirectory
from headrace.types import PolicyVersion
from wrong_input.test_run_directory import largest_file, without_rights

Saved = tuple[list[Record], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def settings() -> Settings:
    return run_settings(num_updates=6, checkpoint={"every_updates": 2, "keep": 10})


@pytest.fixture(scope="module")
def recorded(settings: Settings) -> Saved:
    """(records, states) of a scripted run with checkpoints at updates 2, 4 and 6."""
    from fakes.journal import MemoryJournal

    journal = MemoryJournal()
    tasks = [scripted_task(f"t{index}", answers=1 + index % 3, reward=float(index % 2), wait_seconds=float(index)) for index in range(5)]
    run_virtual(ScriptedRun(settings=settings, tasks=tasks, journal=journal, checkpoint_directory=Path("/nowhere")).run())
    return journal.records, [dict(state) for _, state in journal.states]


def make_checkpoint(directory: Path, version: tuple[int, int]) -> str:
    path = directory / "checkpoints" / f"update_{version[1]:06d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * 100)
    (path / "learner.json").write_text(json.dumps({"version": list(version)}))
    write_manifest(path)
    return path.name


def flip_a_bit(path: Path) -> None:
    """What a disk does that loses its charge: the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def write_run(directory: Path, recorded: Saved, *, num_states: int) -> None:
    """What a run leaves that was killed after so many checkpoints."""
    records, states = recorded
    directory.mkdir(exist_ok=True)
    (directory / "events.jsonl").write_text('{"event":"run_started","time":0.0}\n')

    async def write() -> None:
        journal = RunJournal(directory, directory / "checkpoints")
        at = 0
        for state in states[:num_states]:
            for record in records[at : state["mark"]]:
                journal.append(record)
            at = state["mark"]
            await journal.checkpointed(make_checkpoint(directory, tuple(state["version"])), state)
        for record in records[at:]:
            journal.append(record)
        await journal.committed()
        journal.close()

    asyncio.run(write())


def test_what_was_committed_is_read_back_record_by_record(tmp_path: Path, recorded: Saved) -> None:
    records, states = recorded
    write_run(tmp_path / "run", recorded, num_states=2)
    read = read_journal(tmp_path / "run" / FILE, states[1])
    held, since, highest = read.held, read.records, read.highest
    later = [record for record in records[states[1]["mark"] :] if not isinstance(record, Reported)]
    assert [record for record in since if not isinstance(record, Reported)] == later and highest == len(records)
    assert set(held) == set(held_rollouts(states[1]["pool"])) and all(held.values())
    for worker in {record.worker for record in records if isinstance(record, Reported)}:
        newest = [max(r.generated_tokens for r in some if isinstance(r, Reported) and r.worker == worker) for some in (since, records)]
        assert newest[0] == newest[1], "of a worker's counter the newest is kept"


def test_the_two_newest_checkpoints_can_be_gone_back_to_and_older_records_are_gone(tmp_path: Path, recorded: Saved) -> None:
    records, states = recorded
    write_run(tmp_path / "run", recorded, num_states=3)
    for state in states[1:]:
        read = read_journal(tmp_path / "run" / FILE, state)
        assert set(read.held) == set(held_rollouts(state["pool"])) and read.reaches_back
        assert sum(isinstance(one, Delivered) for one in read.records) == sum(isinstance(one, Delivered) for one in records[state["mark"] :])
    connection = sqlite3.connect(tmp_path / "run" / FILE)
    assert connection.execute("SELECT min(seq) FROM records").fetchone()[0] > states[1]["mark"]
    kept = connection.execute("SELECT count(*) FROM trajectories WHERE seq <= ?", (states[1]["mark"],)).fetchone()[0]
    connection.close()
    assert kept == len(held_rollouts(states[1]["pool"])) < sum(isinstance(one, Delivered) for one in records[: states[1]["mark"]])


def test_the_newest_whole_checkpoint_is_found_under_the_next_lineage(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=2)
    found = find_resumption(tmp_path / "run", settings)
    assert (found.checkpoint.name, found.start, found.passed_over) == ("update_000004", PolicyVersion(1, 4), ())
    assert found.next_record == len(recorded[0]) + 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"torn"), "model.safetensors is damaged (4 bytes instead of 700)"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / STATE_FILE).unlink(), f"{STATE_FILE} is missing"),
        (lambda path: flip_a_bit(path / "model.safetensors"), "model.safetensors is damaged (its contents are not what was written)"),
        (lambda path: flip_a_bit(path / STATE_FILE), STATE_FILE),
        (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda path: (path / MANIFEST).write_text("[]"), f"{MANIFEST} is damaged"),
        (lambda path: (path / STATE_FILE).write_text("{"), f"{STATE_FILE} is damaged"),
        (lambda path: (path / "learner.json").write_text('{"version": [0, 3]}') and write_manifest(path), "learner.json is of version [0, 3]"),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_for_an_older_one(
    tmp_path: Path, recorded: Saved, settings: Settings, damage: Callable[[Path], object], says: str
) -> None:
    write_run(tmp_path / "run", recorded, num_states=2)
    damage(tmp_path / "run/checkpoints/update_000004")
    found = find_resumption(tmp_path / "run", settings)
    assert found.checkpoint.name == "update_000002" and found.start == PolicyVersion(1, 2)
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("update_000004: ") and says in found.passed_over[0]
    set_aside(tmp_path / "run", found)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["unused_update_000004", "update_000002"]


def test_a_run_that_had_saved_nothing_goes_on_from_its_start_with_what_it_had_sampled(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    records, _ = recorded
    write_run(tmp_path / "run", (records[:40], []), num_states=0)
    found = find_resumption(tmp_path / "run", settings)
    assert found.checkpoint is None and found.start == PolicyVersion(1, 0) and found.next_record == 41
    run = ScriptedRun(settings=settings, restore=found.restore, start=found.start)
    run_virtual(run.run())
    restored = run.conductor.restored
    assert restored is not None and restored.pooled and restored.num_lost > 0
    assert [line["version"] for line in run.log.named("updated")] == [1, 2, 3, 4, 5, 6] and run.learner.version == PolicyVersion(1, 6)
    assert run.log.named("ledger")[-1]["ledger"]["closes"]


def test_a_first_checkpoint_that_is_damaged_is_passed_over_for_the_start_of_the_run(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    (tmp_path / "run/checkpoints/update_000002/model.safetensors").unlink()
    found = find_resumption(tmp_path / "run", settings)
    assert found.checkpoint is None and found.passed_over == ("update_000002: model.safetensors is missing",) and found.restore.records
    run_virtual(ScriptedRun(settings=settings, restore=found.restore, start=found.start).run())


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_with_what_to_do(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=3)
    for number in (2, 4, 6):
        flip_a_bit(tmp_path / f"run/checkpoints/update_{number:06d}/model.safetensors")
    with pytest.raises(ConfigError, match=r"no whole checkpoint: .*update_000006: model\.safetensors is damaged.*headrace run .*config\.toml"):
        find_resumption(tmp_path / "run", settings)


def test_a_checkpoint_older_than_the_journal_is_gone_on_from_without_what_its_pool_held(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=3)
    for number in (4, 6):
        flip_a_bit(tmp_path / f"run/checkpoints/update_{number:06d}/model.safetensors")
    found = find_resumption(tmp_path / "run", settings)
    assert found.checkpoint is not None and found.checkpoint.name == "update_000002" and not found.restore.records
    assert found.next_record == len(recorded[0]) + 1 and len(found.passed_over) == 2
    run = ScriptedRun(settings=settings, restore=found.restore, start=found.start)
    run_virtual(run.run())
    assert run.conductor.restored is not None and run.conductor.restored.num_void > 0
    assert [line["version"] for line in run.log.named("updated")] == [3, 4, 5, 6]


def test_what_a_killed_save_has_left_half_written_goes(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=2)
    (tmp_path / "run/checkpoints/.update_000006.partial").mkdir()
    set_aside(tmp_path / "run", find_resumption(tmp_path / "run", settings))
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["update_000002", "update_000004"]


def test_a_finished_run_is_refused_until_it_is_given_more_updates(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=3)
    with pytest.raises(ConfigError, match=r"at update 6, and run\.num_updates is 6.*run\.num_updates=12"):
        find_resumption(tmp_path / "run", settings)
    assert find_resumption(tmp_path / "run", run_settings(num_updates=7)).start == PolicyVersion(1, 6)


def test_a_damaged_journal_is_said_to_be_and_one_moved_away_costs_the_pool_only(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    journal = tmp_path / "run" / FILE
    journal.write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointError, match=r"pool\.sqlite: the journal is damaged.*Move it away") as caught:
        find_resumption(tmp_path / "run", settings)
    assert caught.value.as_json()["file"] == str(journal) and str(caught.value).count(str(journal)) == 1
    journal.rename(tmp_path / "away")
    found = find_resumption(tmp_path / "run", settings)
    assert found.restore.held == {} and list(found.restore.records) == [] and found.next_record == recorded[1][0]["mark"] + 1


def test_a_journal_that_cannot_be_written_ends_the_run_with_its_reason(tmp_path: Path, recorded: Saved) -> None:
    async def fill() -> None:
        journal = RunJournal(tmp_path, tmp_path / "checkpoints")
        try:
            journal.append(recorded[0][0])
            await journal.committed()
            journal._writer._connection.execute("PRAGMA max_page_count = 1")  # type: ignore[union-attr]  # a full disk
            for record in recorded[0][1:]:
                journal.append(record)
            await journal.committed()
        finally:
            journal.close()

    with pytest.raises(RunDirectoryError, match=r"pool\.sqlite: the journal cannot be written: .*full.*headrace resume"):
        asyncio.run(fill())


def test_a_journal_that_keeps_no_records_still_makes_checkpoints_ones_to_go_on_from(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    async def write() -> None:
        journal = RunJournal(tmp_path, tmp_path / "checkpoints", keeps_records=False)
        journal.append(recorded[0][0])
        await journal.committed()
        await journal.checkpointed(make_checkpoint(tmp_path, (0, 2)), recorded[1][0])
        journal.close()

    asyncio.run(write())
    assert not (tmp_path / FILE).exists()
    assert find_resumption(tmp_path, settings).start == PolicyVersion(1, 2)


def test_only_one_process_can_go_on_with_a_run(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    first = RunDirectory(tmp_path / "run", settings, used=True)
    with pytest.raises(ConfigError, match=r"is going on: another process is writing there"):
        RunDirectory(tmp_path / "run", settings, used=True)
    first.update_settings()
    first.close()
    RunDirectory(tmp_path / "run", settings, used=True).close()
    assert "num_updates = 6" in (tmp_path / "run/config.toml").read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no run"):
        RunDirectory(tmp_path / "empty", settings, used=True)


def test_settings_that_hold_for_life_cannot_change() -> None:
    class Resolved:
        settings = run_settings(group_size=4)

    refuse_changes(run_settings(group_size=4, num_updates=3), Resolved())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'rollout\.group_size' cannot change"):
        refuse_changes(run_settings(group_size=2), Resolved())  # type: ignore[arg-type]


def test_a_disk_that_is_full_when_a_state_is_written_leaves_the_checkpoint_before_and_what_it_needs(
    tmp_path: Path, recorded: Saved, settings: Settings
) -> None:
    records, states = recorded

    async def write() -> None:
        journal = RunJournal(tmp_path, tmp_path / "checkpoints")
        try:
            for record in records[: states[0]["mark"]]:
                journal.append(record)
            await journal.checkpointed(make_checkpoint(tmp_path, (0, 2)), states[0])
            name = make_checkpoint(tmp_path, (0, 4))
            await journal.committed()
            with largest_file(1000):
                await journal.checkpointed(name, states[1])
        finally:
            journal.close()

    with pytest.raises(RunDirectoryError, match=r"update_000004/run_state\.json: the run's state cannot be written: File too large.*headrace resume"):
        asyncio.run(write())
    assert not list((tmp_path / "checkpoints/update_000004").glob("*run_state*"))
    found = find_resumption(tmp_path, settings)
    assert found.checkpoint is not None and found.checkpoint.name == "update_000002" and len(found.passed_over) == 1
    assert set(found.restore.held) == set(held_rollouts(states[0]["pool"]))


def test_a_journal_that_may_not_be_written_is_named_and_left_as_it_is(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.name.startswith("pytest-"):  # its rights let nobody else through
            parent.chmod(0o755)
    found = find_resumption(tmp_path / "run", settings)
    before = (tmp_path / "run" / FILE).read_bytes()
    (tmp_path / "run" / FILE).chmod(0o444)
    with without_rights(), pytest.raises(RunDirectoryError, match=r"pool\.sqlite: the journal cannot be written: .*headrace resume"):
        open_journal(tmp_path / "run", settings, found)
    assert (tmp_path / "run" / FILE).read_bytes() == before


def test_a_page_of_the_journal_that_is_damaged_is_found_before_anything_is_restored(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    journal = tmp_path / "run" / FILE
    connection = sqlite3.connect(journal)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(journal.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    journal.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"pool\.sqlite: the journal is damaged.*Move it away"):
        find_resumption(tmp_path / "run", settings)
    assert journal.read_bytes() == bytes(data)


def test_settings_that_cannot_be_written_leave_those_that_were_there(tmp_path: Path, recorded: Saved, settings: Settings) -> None:
    write_run(tmp_path / "run", recorded, num_states=1)
    held = RunDirectory(tmp_path / "run", settings, used=True)
    held.update_settings()
    before = (tmp_path / "run/config.toml").read_text()
    with largest_file(100), pytest.raises(RunDirectoryError, match=r"config\.toml cannot be written: File too large"):
        RunDirectory.update_settings(held)
    held.close()
    assert (tmp_path / "run/config.toml").read_text() == before


@pytest.mark.parametrize("damage", ["[run\n", "\0" * 50, "[run]\nnum_updates = 'many'\n"], ids=["torn", "zeros", "wrong"])
def test_damaged_settings_are_named_and_nothing_is_touched(tmp_path: Path, recorded: Saved, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    from headrace.cli.main import main

    write_run(tmp_path / "run", recorded, num_states=1)
    (tmp_path / "run/config.toml").write_text(damage)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert main(["resume", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "config.toml" in told and "Traceback" not in told
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
