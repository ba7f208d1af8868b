"""An event log that somebody or something has damaged: what is whole is shown, what is not is counted; without a beginning it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.made_events import lines_of
from fakes.report_runs import made_events, write_run
from headrace.event_log import read_events
from wrong_input.rig import command

DAMAGED: dict[str, bytes] = {
    "broken JSON": b"{bad json\n",
    "a list": b"[1]\n",
    "a number": b"5\n",
    "null": b"null\n",
    "an empty line": b"\n",
    "random bytes": b"\x8f\xfe\x00\x01\xc3\x28 \x80\n",
    "an object that is no event": b'{"no":1}\n',
    "an event without a time": b'{"event":"updated"}\n',
    "an event whose time is no number": b'{"event":"updated","time":"x","role":"learner"}\n',
    "an event without its fields": b'{"event":"updated","time":1.0,"role":"learner"}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", made_events())


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_left_out_and_told(directory: Path, line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = command(capsys, "watch", str(directory)).result
    path = directory / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line, *lines[3:]]))
    watched = command(capsys, "watch", str(directory))
    assert watched.code == 0 and "Traceback" not in watched.people
    told = "1 lines of events.jsonl cannot be read and are left out"
    assert [text for text in watched.result["warnings"] if text not in whole["warnings"]] == [told]
    assert watched.people.count("cannot be read") == 1
    assert {**watched.result, "warnings": []} == {**whole, "warnings": []}, "the rest counts as before"
    reported = command(capsys, "report", str(directory), "--out", str(tmp_path / "r.html"), "--trace", str(tmp_path / "trace.json"))
    assert reported.code == 0, reported.people
    assert "1 lines of events.jsonl cannot be read" in (tmp_path / "r.html").read_text(encoding="utf-8")


def without(key: str) -> dict[str, Any]:
    line = lines_of(made_events())[0]
    del line[key]
    return line


FIRST: list[tuple[str, Any, str, str]] = [
    ("without a time", without("time"), "RUN", ""),
    ("without devices", without("devices"), "devices", "a list of {name, role, capacity}"),
    ("damaged devices", {**without("devices"), "devices": [5]}, "devices", "a list of {name, role, capacity}"),
    ("another event", {"event": "updated", "time": 1.0}, "event", "run_started"),
    ("a schema to come", {**without("schema"), "schema": 2}, "schema", "1"),
    ("a schema that is no number", {**without("schema"), "schema": "x"}, "schema", "1"),
]


@pytest.mark.parametrize("name", ["watch", "report"])
@pytest.mark.parametrize(("first", "key", "limit"), [row[1:] for row in FIRST], ids=[row[0] for row in FIRST])
def test_a_log_without_a_beginning_is_refused(
    tmp_path: Path, name: str, first: dict[str, Any], key: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "events.jsonl").write_text(json.dumps(first) + "\n")
    ended = command(capsys, name, str(directory))
    error = ended.error
    assert ended.code == 2 and "Traceback" not in ended.people
    assert (error["kind"], error["key"], error["limit"] or "") == ("ConfigError", key, limit)
    assert error["remedy"] and str(directory / "events.jsonl") in f"{error['file']} {error['message']}"
    if key == "schema":
        assert error["value"] == first["schema"]


def test_readers_in_python_get_the_whole_lines(directory: Path) -> None:
    path = directory / "events.jsonl"
    whole = list(read_events(path))
    path.write_bytes(path.read_bytes() + b"".join(DAMAGED.values()))
    assert [line for line in read_events(path) if line.get("role") != "learner" or len(line) > 3] == whole
