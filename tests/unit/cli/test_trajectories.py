"""headrace trajectories: filters, pictures and exports of a recorded scripted run."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from rich.console import Console

from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.cli.main import main
from headrace.cli.trajectories import picture
from headrace.clock import run_virtual
from headrace.config import RecordTrajectories
from headrace.runtime import trajectory_store
from headrace.runtime.trajectory_store import COLUMNS, TrajectoryStore


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trajectories lie in several files, with a tokenizer of characters in its checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "config.toml").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectory_store, "MAX_ROWS", 7)
        store = TrajectoryStore(directory / "trajectories", record=RecordTrajectories.ALL)
        tasks = [
            scripted_task("steps", answers=4, wait_seconds=3.0, key_steps=[1], reward=1.0),
            scripted_task("short", answers=1, reward=0.25, action_tokens=[5]),
            scripted_task("broken", fail_at=0),
        ]
        run_virtual(ScriptedRun(settings=run_settings(num_updates=10, max_staleness=4), tasks=tasks, recorder=store).run())
        store.close()
    write_tokenizer(directory / "checkpoints" / "update_000010")
    return directory


def write_tokenizer(model: Path) -> None:
    """Token n is the character of code point n, as in fakes.rollouts."""
    from tokenizers import Tokenizer, decoders, models

    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    tokenizer = Tokenizer(models.WordLevel({chr(code) if code > 1 else f"<{code}>": code for code in range(128)}, unk_token="<1>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))


def all_rows(directory: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((directory / "trajectories").glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]


def asked(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["trajectories", str(directory), "--json", "--limit", "1000", *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def identity(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["group"], row["member"], row["attempt"]


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ([], lambda row: True),
        (["--task", "short"], lambda row: row["task_id"] == "short"),
        (["--min-reward", "0.5"], lambda row: row["reward"] >= 0.5),
        (["--max-reward", "0.25"], lambda row: row["reward"] <= 0.25),
        (["--min-staleness", "2"], lambda row: row["staleness_max"] is not None and row["staleness_max"] >= 2),
        (["--key"], lambda row: bool(row["key_steps"])),
        (["--task", "steps", "--min-staleness", "1", "--key"], lambda row: row["task_id"] == "steps" and (row["staleness_max"] or 0) >= 1 and row["key_steps"]),
        (["--task", "no such task"], lambda row: False),
    ],
)
def test_filters_keep_exactly_the_rows_they_name(run_directory: Path, options: list[str], keep: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = all_rows(run_directory)
    wanted = [identity(row) for row in rows if keep(row)]
    result = asked(run_directory, capsys, *options)
    assert [identity(row) for row in result["trajectories"]] == wanted
    assert (result["matched"], result["recorded"]) == (len(wanted), len(rows))
    assert len(wanted) > 0 or options[-1] == "no such task"


def test_key_says_that_nothing_is_marked_and_how_to_mark(tmp_path: Path, run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "trajectories").mkdir()
    for path in sorted((run_directory / "trajectories").glob("*.parquet")):
        table = parquet.read_table(path)
        unmarked = table.set_column(table.schema.get_field_index("key_steps"), "key_steps", [[[]] * table.num_rows])
        parquet.write_table(unmarked.cast(table.schema), tmp_path / "trajectories" / path.name)
    assert main(["trajectories", str(tmp_path), "--key"]) == 0
    told = capsys.readouterr().err
    assert "No recorded step is marked" in told and f"headrace mark {tmp_path} --rule" in told
    assert main(["trajectories", str(run_directory), "--key", "--task", "short"]) == 0
    assert "No recorded step is marked" not in capsys.readouterr().err, "others of this run are marked"


def test_limit_shows_the_first_ones_and_still_counts_all(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run_directory), "--json", "--limit", "9"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [identity(row) for row in result["trajectories"]] == [identity(row) for row in all_rows(run_directory)[:9]]
    assert result["matched"] == len(all_rows(run_directory))
    assert main(["trajectories", str(run_directory), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["trajectories"]) == 10


def test_text_is_decoded_by_the_tokenizer_of_the_checkpoint(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = asked(run_directory, capsys, "--task", "steps")["trajectories"][0]
    assert row["text"].replace("<0>", "\0").replace("<1>", "\1") == "".join(chr(token) for token in row["tokens"])
    assert "0?" in row["text"]
    assert "3?" in row["text"]


def test_without_any_tokenizer_the_tokens_are_shown(tmp_path: Path, run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "trajectories").symlink_to(run_directory / "trajectories")
    row = asked(tmp_path, capsys)["trajectories"][0]
    assert row["text"] is None
    assert main(["trajectories", str(tmp_path), "--limit", "1"]) == 0
    assert " ".join(str(token) for token in row["tokens"]) in " ".join(capsys.readouterr().out.replace("«", "").replace("★", "").replace("»", "").split())


def test_picture_colours_actions_by_version_and_underlines_key_steps() -> None:
    row = {
        "group": 4, "member": 1, "task_id": "find", "reward": 1.0, "end": "done", "update": 9, "retired": "trained", "staleness_mean": 1.5, "staleness_max": 3,
        "steps": 2, "key_steps": [1], "error": None, "tokens": [ord(c) for c in "?ab!cd."], "action_starts": [1, 4], "action_ends": [3, 6],
        "versions": [6, 6, 7, 8],
    }  # fmt: skip
    text = picture(row, lambda tokens: "".join(map(chr, tokens)))
    plain = text.plain
    assert "group 4.1  task find  reward 1  done  update 9  staleness 1.5, max 3  2 steps, 1 key" in plain
    assert "?ab!cd." in plain
    start = plain.index("?ab!cd.")
    console = Console(file=io.StringIO())
    styles = [text.get_style_at_offset(console, start + index) for index in range(7)]
    assert [bool(style.underline) for style in styles] == [False, False, False, False, True, True, False]
    assert [bool(style.dim) for style in styles] == [True, False, False, True, False, False, True]
    assert styles[1].color == styles[2].color != styles[4].color != styles[5].color
    marked = picture(row, lambda tokens: "".join(map(chr, tokens)), marks=True).plain
    assert "?«ab»!«★ cd»." in marked and "actions in «»" in marked


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_export_holds_every_matching_row_with_its_text(run_directory: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"out.{suffix}"
    assert main(["trajectories", str(run_directory), "--min-reward", "0.5", "--export", str(path)]) == 0
    assert f"-> {path}" in capsys.readouterr().err
    exported = [json.loads(line) for line in path.read_text().splitlines()] if suffix == "jsonl" else parquet.read_table(path).to_pylist()
    wanted = [row for row in all_rows(run_directory) if row["reward"] >= 0.5]
    assert len(wanted) > 10
    assert [{key: row[key] for key in COLUMNS} for row in exported] == wanted
    assert all("0?" in row["text"] for row in exported)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_export_of_nothing_is_a_whole_file_of_no_rows(run_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    assert main(["trajectories", str(run_directory), "--task", "no such task", "--export", str(path)]) == 0
    table = parquet.read_table(path)
    assert table.num_rows == 0
    assert table.schema.field("tokens").type == pa.list_(pa.int32())


@pytest.mark.parametrize("limit", ["3", "12"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_export_stops_at_the_limit(run_directory: Path, tmp_path: Path, suffix: str, limit: str) -> None:
    path = tmp_path / f"few.{suffix}"
    assert main(["trajectories", str(run_directory), "--limit", limit, "--export", str(path)]) == 0
    count = len(path.read_text().splitlines()) if suffix == "jsonl" else parquet.read_table(path).num_rows
    assert count == int(limit)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--export", "x.csv"], ".parquet nor .jsonl"),
        (["--export", "x.csv/y"], ".parquet nor .jsonl"),
        (["--limit", "0"], "at least 1"),
        (["--min-reward", "much"], "a finite number"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(
    run_directory: Path, tmp_path: Path, options: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trajectories", str(run_directory), "--json", *options]) == 2
    captured = capsys.readouterr()
    assert what in json.loads(captured.out)["error"]["message"]
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_run_without_recorded_trajectories_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert main(["trajectories", str(tmp_path)]) == 2
    assert "run.record_trajectories" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trajectories", "mark"])
@pytest.mark.parametrize(("runtime", "says"), [("local", "run.record_trajectories"), ("simulated", "simulated: nothing was sampled")])
def test_commands_answer_alike_when_a_run_has_no_records(tmp_path: Path, name: str, runtime: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "run_started", "time": 0.0, "runtime": runtime, "devices": []}) + "\n")
    assert main([name, str(tmp_path), "--json", *(["--rule", "tool:x"] if name == "mark" else [])]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["key"], error["value"]) == ("RUN", str(tmp_path)) and says in error["message"]


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    match how:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "garbage":
            path.write_bytes(bytes(range(256)) * 20)
        case "flipped":
            path.write_bytes(whole[:8] + bytes(byte ^ 0xFF for byte in whole[8:400]) + whole[400:])
        case "another table":
            parquet.write_table(pa.table({"x": [1, 2]}), path)
        case "another type":
            table = parquet.read_table(path)
            parquet.write_table(table.set_column(table.column_names.index("reward"), "reward", pa.array(["much"] * table.num_rows)), path)


@pytest.mark.parametrize("how", ["empty", "cut", "garbage", "flipped", "another table", "another type"])
@pytest.mark.parametrize("name", ["trajectories", "mark"])
def test_a_damaged_file_is_left_out_and_named(run_directory: Path, tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rule", "reward:positive", "--min-advantage", "1"] if name == "mark" else ["--export", str(tmp_path / "new" / "out.parquet")]
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text("")
    shutil.copytree(run_directory / "trajectories", directory / "trajectories")
    files = sorted((directory / "trajectories").glob("*.parquet"))
    damage(files[1], how)
    assert main([name, str(directory), "--json", *options]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["unreadable_files"] == [files[1].name]
    assert err.count(f"1 of {len(files)} files") == 1 and files[1].name in err and "Traceback" not in err
    if name == "trajectories":
        rows = sum(parquet.read_table(path).num_rows for path in files if path != files[1])
        assert parquet.read_table(tmp_path / "new" / "out.parquet").num_rows == json.loads(out)["recorded"] == rows
    for path in files:
        damage(path, "garbage")
    assert main([name, str(directory), "--json", *options]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["file"] in map(str, files) and "Traceback" not in err


def test_a_task_that_is_not_recorded_is_told_with_near_ones(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run_directory), "--task", "stpes"]) == 0
    assert "No trajectory of task 'stpes' is recorded. Did you mean 'steps'?" in capsys.readouterr().err
    assert main(["trajectories", str(run_directory), "--task", "steps", "--min-reward", "9"]) == 0
    assert "is recorded" not in capsys.readouterr().err


def test_half_written_file_of_a_run_that_goes_on_is_not_read(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / ".000001.parquet.part").write_bytes(b"PAR1half")
    assert main(["trajectories", str(tmp_path)]) == 2
    assert "holds no recorded trajectories" in capsys.readouterr().err


def test_what_is_no_run_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(tmp_path / "nope")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_export_of_a_recording_without_a_newer_column_leaves_it_empty(run_directory: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "trajectories").mkdir(parents=True)
    (old / "config.toml").write_text("")
    for path in sorted((run_directory / "trajectories").glob("*.parquet")):
        parquet.write_table(parquet.read_table(path).drop_columns(["key_weights"]), old / "trajectories" / path.name)
    assert main(["trajectories", str(old), "--export", str(tmp_path / "out.parquet")]) == 0
    exported = parquet.read_table(tmp_path / "out.parquet")
    assert exported.num_rows == len(all_rows(run_directory)) and exported["key_weights"].null_count == exported.num_rows
    assert exported["key_steps"].to_pylist() == [row["key_steps"] for row in all_rows(run_directory)]
