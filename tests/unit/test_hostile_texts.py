"""Texts that a stranger wrote (names, ids, a model's answers) on pages and terminals and in files: shown, never obeyed."""

from __future__ import annotations

import dataclasses
import json
import os
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from fakes.made_events import lines_of, run_started
from fakes.plan_profiles import plain_profile
from fakes.report_runs import SPLIT, made_events, write_run, write_tokenizer, write_trajectories
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.cli.main import main
from headrace.clock import run_virtual
from headrace.errors import RecipeError, RunDirectoryError
from headrace.planner.profile import Source, save_profile
from headrace.recipe import RecipeCode
from headrace.report.markup import printable
from headrace.report.page import write_report
from headrace.runtime.trajectory_store import TrajectoryStore
from headrace.tasks.source import load_tasks

TEXTS = [
    "</script><script>hostile()</script>",
    '"><img src=x onerror=hostile()>',
    "' onmouseover='hostile()' x='",
    "</title></style><svg/onload=hostile()>",
    "javascript:hostile()",
    '<a href="javascript:hostile()">a</a>',
    "<!-- --!><iframe srcdoc='<script>hostile()</script>'>",
    "]]>&lt;b&gt;{{7*7}}${7*7}",
    "$blue</pre><b>",
    "a\u202egpj.exe\u2066\u2028",
    "\x1b]0;title\x07\x1b[2J\x9b31m",
]
HOSTILE = " ".join(TEXTS)


class Page(HTMLParser):
    """What a browser makes of it, and where it would run something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.text, self.scripts = "", []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        if name in ("img", "svg", "iframe", "object", "embed", "base", "form", "link") or (name == "b" and ("class", "key") not in attributes):
            self.found.append(name)
        for key, value in attributes:
            if key.startswith("on") or key in ("src", "href", "srcdoc", "action") or ("javascript:" in (value or "") and key != "aria-label"):
                self.found.append(f"{name} {key}={value}")
        if name == "script":
            self.scripts.append(dict(attributes).get("type"))
        if name not in ("meta", "br", "col"):
            self._inside.append(name)

    def handle_endtag(self, name: str) -> None:
        if self._inside.pop() != name:
            self.found.append(f"</{name}> ends something else")

    def handle_data(self, data: str) -> None:
        if self._inside[-1:] == ["script"]:
            if self.scripts[-1] == "application/json":
                self._look_at_figure(json.loads(data))
        elif self._inside[-1:] != ["style"]:
            self.text += data

    def _look_at_figure(self, value: object) -> None:
        """Plotly reads <a href>, <b> and others in its texts."""
        if isinstance(value, dict):
            for item in value.values():
                self._look_at_figure(item)
        elif isinstance(value, list):
            for item in value:
                self._look_at_figure(item)
        elif isinstance(value, str) and any(part in value for part in ("<script", "<img", "<a ", "<svg", "<iframe", "<b>", "\u202e", "\x1b")):
            self.found.append(f"figure: {value}")


def assert_shown(path: Path, *texts: str) -> None:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.found == []
    assert page.scripts.count(None) == 1 and page.scripts.count("text/plain") == 1  # the page's own, and plotly packed
    assert not unseen(page.text)
    for each in texts:
        assert printable(each) in page.text


def unseen(text: str) -> set[str]:
    return {character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character not in "\n\t"}


def test_no_text_acts_on_the_page_of_a_comparison(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run {index} <b>", made_events(text=HOSTILE, final=0.8 + index / 20)) for index in range(2)]
    for run in runs:
        write_trajectories(run, text=HOSTILE)
        write_tokenizer(run)
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        lines[0] |= {"recipe": HOSTILE, "devices": [{**device, "name": f"{device['name']}{HOSTILE}"} for device in lines[0]["devices"]]}
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "config.toml").write_text((run / "config.toml").read_text() + f"[task]\nsource = {json.dumps(HOSTILE)}\n")
    names = [f"one {HOSTILE}", f"two {HOSTILE}"]
    report = write_report(runs, tmp_path / "report.html", arm_names=names, verdict=f"One is better: {HOSTILE}", target=0.7)
    assert_shown(report.path, HOSTILE, *names, f"One is better: {HOSTILE}")


def test_no_text_acts_on_the_page_of_a_plan_or_in_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    profile = dataclasses.replace(plain_profile(device=HOSTILE), source=Source(kind="measured", origin=HOSTILE))
    save_profile(profile, Path("profile.json"))
    assert main(["plan", "profile.json", "--gpus", "2", "--batch", "64", "--rollouts", "0", "--report", "plan.html"]) == 0
    assert_shown(Path("plan.html"), HOSTILE)
    assert not unseen("".join(capsys.readouterr()))


IDS = [
    "../../escaped",
    "/etc/headrace-escaped",
    "..",
    ".",
    "a/../../../escaped",
    "..\\..\\escaped",
    "nul\0byte",
    "x" * 100_000,
    "~root",
    "-rf",
    "new\nline",
    *TEXTS,
]


@pytest.fixture
def run_of_ids(tmp_path: Path) -> Path:
    """A run directory two levels down, of tasks that a file gave, through the real source, conductor, pool and recorder."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (recipe / "tasks.jsonl").write_text("".join(json.dumps({"id": each, "kind": each, "prompt": each}) + "\n" for each in IDS), encoding="utf-8")
    tasks = load_tasks("tasks.jsonl", RecipeCode(recipe / "task.py", {}))
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    store = TrajectoryStore(run / "trajectories")
    scripted = [scripted_task(task.id, kind=task.kind, answers=1) for task in tasks]
    made = ScriptedRun(settings=run_settings(num_updates=len(IDS), group_size=2), tasks=scripted, recorder=store)
    run_virtual(made.run())
    store.close()
    lines = [*lines_of([(0.0, run_started(SPLIT))]), *made.log.lines]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run / "config.toml").write_text('[run]\nname = "one"\n', encoding="utf-8")
    return run


def files_below(path: Path) -> set[str]:
    return {each.relative_to(path).as_posix() for each in path.rglob("*")}


def test_no_id_of_a_task_file_leads_out_of_the_run_directory(run_of_ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {"recipe", "recipe/tasks.jsonl", "runs", "runs/one"} | {f"runs/one/{name}" for name in files_below(run_of_ids)}
    assert files_below(tmp_path) == before
    assert files_below(run_of_ids) <= {"events.jsonl", "config.toml", "trajectories"} | {f"trajectories/{number:06}.parquet" for number in range(99)}
    assert main(["trajectories", str(run_of_ids), "--export", str(tmp_path / "out.jsonl")]) == 0
    assert main(["trajectories", str(run_of_ids), "--export", str(tmp_path / "out.parquet")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().split(b"\n") if line]
    assert {row["task_id"] for row in rows} == set(IDS)
    assert {row["task_id"] for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()} == set(IDS)
    assert files_below(tmp_path) == before | {"out.jsonl", "out.parquet"}
    assert not os.path.lexists("/etc/headrace-escaped") and not os.path.lexists(tmp_path.parent / "escaped")
    for each in IDS:
        assert main(["trajectories", str(run_of_ids), f"--task={each}", "--limit", "1"]) == 0 or "\0" in each
    assert not unseen("".join(capsys.readouterr()))


def test_texts_of_a_run_are_shown_by_every_command_that_reads_it(run_of_ids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run_of_ids), "--limit", "100"]) == 0
    assert main(["watch", str(run_of_ids), "--once"]) == 0
    assert main(["report", str(run_of_ids), "--out", str(tmp_path / "report.html"), "--trace", str(tmp_path / "trace.json")]) == 0
    shown = "".join(capsys.readouterr())
    assert not unseen(shown)
    assert "\u2400" in shown and "\u241b" in shown and "\u2426" in shown
    assert len(shown) < 50_000 and "task new␤line" in shown  # an id makes no line of its own, and no page
    assert_shown(tmp_path / "report.html")


@pytest.mark.parametrize("line", ['{"id": "deep", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"id": ' + "1" * 10_000 + "}", "[" * 1_000_000])
def test_a_line_of_a_task_file_that_no_parser_takes_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "good"}\n' + line, encoding="utf-8")
    with pytest.raises(RecipeError, match="line 2") as caught:
        load_tasks("tasks.jsonl", RecipeCode(tmp_path / "task.py", {}))
    assert len(str(caught.value)) < 1000


def test_a_report_does_not_write_through_a_link_that_came_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", made_events())
    (tmp_path / "precious").write_text("precious")
    (run / "report.html").symlink_to(tmp_path / "precious")
    assert main(["report", str(run)]) == RunDirectoryError.exit_code
    assert "is a link" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_damaged_file_of_trajectories_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", made_events())
    (run / "trajectories").mkdir()
    for content in (b"PAR1junkPAR1", b""):
        (run / "trajectories/000001.parquet").write_bytes(content)
        assert main(["trajectories", str(run)]) == RunDirectoryError.exit_code
        assert "000001.parquet: not a whole file" in capsys.readouterr().err
    parquet.write_table(pa.table({"another": [1]}), run / "trajectories/000001.parquet")
    assert main(["trajectories", str(run), "--task", "a"]) == RunDirectoryError.exit_code


def test_a_models_text_is_shown_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", made_events())
    write_trajectories(run, text=HOSTILE)
    model = run / "checkpoints" / "update_000006"
    model.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({text: number for number, text in enumerate(TEXTS)}, unk_token=TEXTS[0]))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text("{}")
    rows = [{**row, "tokens": [9, 10, 0, 1, 9, 10, 2]} for row in parquet.read_table(run / "trajectories").to_pylist()]
    parquet.write_table(pa.Table.from_pylist(rows), run / "trajectories/000001.parquet")
    assert main(["trajectories", str(run), "--limit", "2"]) == 0
    shown = "".join(capsys.readouterr())
    assert "\u2426gpj.exe" in shown and "\u241b]0;title" in shown and not unseen(shown)
