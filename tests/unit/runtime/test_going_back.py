"""What a run that goes back by itself finds in its directory: which checkpoint, which lineage, which learning rate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Settings
from headrace.errors import ConfigError
from headrace.events import ResumeCause
from headrace.manifest import write_manifest
from headrace.pool.journal import Restored
from headrace.restoration import Return
from headrace.runtime.journal import RunJournal
from headrace.runtime.resumption import find_resumption, set_aside, start_state
from headrace.types import PolicyVersion

SETTINGS = Settings.model_validate({"run": {"num_updates": 100}})


def back(newest_update: int | None = None, factor: float = 0.5) -> Return:
    return Return(cause=ResumeCause.ROLL_BACK, reason="it fell", since_seconds=0.0, learning_rate_factor=factor, newest_update=newest_update)


def save(directory: Path, journal: RunJournal, lineage: int, number: int, *, factor: float = 1.0) -> Any:
    path = directory / "checkpoints" / f"update_{number:06d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "learner.json").write_text(json.dumps({"version": [lineage, number], "learning_rate_factor": factor}))
    write_manifest(path)
    mark = journal.append(Restored(version=PolicyVersion(0, 0), lineage=0))  # any record
    return journal.checkpointed(path.name, {**start_state(SETTINGS), "version": [lineage, number], "mark": mark})


def written(directory: Path, *checkpoints: tuple[int, int, float], restored: tuple[int, int, float] | None = None) -> Path:
    """`checkpoints`: lineage, number and learning rate factor; then perhaps a restore that nothing has been saved since."""

    directory.mkdir()

    async def write() -> None:
        journal = RunJournal(directory, directory / "checkpoints")
        for lineage, number, factor in checkpoints:
            await save(directory, journal, lineage, number, factor=factor)
        if restored is not None:
            lineage, number, factor = restored
            journal.append(Restored(version=PolicyVersion(0, number), lineage=lineage, learning_rate_factor=factor))
        journal.close()

    asyncio.run(write())
    return directory


def test_a_rollback_goes_to_the_newest_checkpoint_unless_told_an_update(tmp_path: Path) -> None:
    run = written(tmp_path / "run", (0, 10, 1.0), (0, 20, 1.0), (0, 30, 1.0))
    found = find_resumption(run, SETTINGS, back())
    assert (found.start, found.undone, found.restore.learning_rate_factor) == (PolicyVersion(1, 30), (), 0.5)
    for newest, number, undone in [(30, 30, ()), (29, 20, ("update_000030",)), (10, 10, ("update_000020", "update_000030"))]:
        found = find_resumption(run, SETTINGS, back(newest))
        assert (found.start.number, found.undone) == (number, undone)
    assert find_resumption(run, SETTINGS, back(3)).start.number == 10, "the oldest there is"


def test_what_a_rollback_leaves_behind_is_never_gone_on_from_again(tmp_path: Path) -> None:
    run = written(tmp_path / "run", (0, 10, 1.0), (0, 20, 1.0))
    found = find_resumption(run, SETTINGS, back(15))
    set_aside(run, found)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["unused_update_000020", "update_000010"]
    assert find_resumption(run, SETTINGS).start.number == 10


def test_a_damaged_older_checkpoint_is_passed_over_for_one_that_is_older_still(tmp_path: Path) -> None:
    run = written(tmp_path / "run", (0, 10, 1.0), (0, 20, 1.0), (0, 30, 1.0))
    (run / "checkpoints/update_000020/model.safetensors").write_bytes(b"weighty")
    assert find_resumption(run, SETTINGS, back(29)).start.number == 10


@pytest.mark.parametrize(("newest_update", "factor"), [(None, 0.5), (10, 0.5)])
def test_the_learning_rate_of_a_rollback_lasts_through_crashes_and_adds_up(tmp_path: Path, newest_update: int | None, factor: float) -> None:
    """Also before a checkpoint says so, and where an older one says otherwise."""
    crashed = written(tmp_path / "crashed", (0, 10, 1.0), (0, 20, 1.0), restored=(3, 20, 0.25))
    assert find_resumption(crashed, SETTINGS).restore.learning_rate_factor == 0.25, "by the command, too"
    assert find_resumption(crashed, SETTINGS).start == PolicyVersion(4, 20)
    assert find_resumption(crashed, SETTINGS, back(newest_update)).restore.learning_rate_factor == 0.25 * factor
    saved = written(tmp_path / "saved", (0, 10, 1.0), (3, 20, 0.25))
    assert find_resumption(saved, SETTINGS, back(newest_update)).restore.learning_rate_factor == 0.25 * factor
    assert find_resumption(saved, SETTINGS, back(newest_update)).start.lineage == 4


def test_a_run_that_had_made_all_its_updates_may_go_back_by_itself_but_not_by_the_command(tmp_path: Path) -> None:
    run = written(tmp_path / "run", (0, 100, 1.0))
    assert find_resumption(run, SETTINGS, back()).start.number == 100
    with pytest.raises(ConfigError, match="nothing is left to do"):
        find_resumption(run, SETTINGS)
