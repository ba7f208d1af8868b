from __future__ import annotations

import gzip
import json
import re
import shutil
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fakes.report_runs import HOSTILE, made_events, write_run, write_tokenizer, write_trajectories
from headrace.cli.main import main
from headrace.errors import ConfigError, RunDirectoryError
from headrace.report.figures_learning import thinned
from headrace.report.markup import Markup, data_json, escape, printable, table, tag
from headrace.report.page import write_report
from headrace.report.record import load_run
from headrace.report.sections import default_settings


class _Reader(HTMLParser):
    """Tags with their attributes, texts outside scripts and styles, and the figures' JSON; notes what is left open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.figures: list[dict[str, object]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        if name not in ("meta", "br"):
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.tags[-1][1].get("type") == "application/json":
                self.figures.append(json.loads(data))
        elif self.open and self.open[-1] != "style":
            self.text += data.replace("\u00a0", " ")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_run(tmp_path_factory.mktemp("report") / "run <b>&amp;", made_events())
    write_trajectories(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def page(hostile: Path) -> _Reader:
    report = write_report([hostile], hostile / "report.html")
    return _Reader(report.path.read_text(encoding="utf-8"))


def test_hostile_texts_become_text_and_nothing_else(page: _Reader) -> None:
    assert page.open == []
    scripts = [attributes for name, attributes in page.tags if name == "script"]
    assert len(scripts) == len(page.figures) + 2  # plotly packed, and the page's own
    assert not {"img", "b"} & {name for name, attributes in page.tags if attributes.get("class") != "key"}
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    # task kind in its table, failed task and its error, end of the run, example
    assert page.text.count(printable(HOSTILE)) >= 5 and HOSTILE not in page.text


def test_no_text_of_a_run_reaches_plotly_as_a_tag_or_colour(page: _Reader) -> None:
    text = json.dumps(page.figures)
    assert "<script" not in text and "<img" not in text
    assert any("&lt;/script&gt;" in str(trace.get("name")) for figure in page.figures for trace in figure["data"])  # type: ignore[attr-defined]


def test_every_figure_is_one_that_plotly_knows(page: _Reader) -> None:
    import plotly.graph_objects as go

    def colored(value: object) -> object:
        """The page's script puts colours for these names."""
        if isinstance(value, dict):
            return {key: colored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [colored(item) for item in value]
        return "#123456" if isinstance(value, str) and re.fullmatch(r"\$[a-z0-9-]+", value) else value

    assert len(page.figures) >= 22
    for figure in page.figures:
        assert go.Figure(colored(figure)).data  # raises on properties and values that do not exist


def test_every_colour_that_a_figure_names_is_defined_in_both_themes(hostile: Path, page: _Reader) -> None:
    css = (Path(__file__).parents[3] / "src/headrace/report/page.css").read_text(encoding="utf-8")
    light, dark = css.split("@media (prefers-color-scheme: dark)")
    dark = dark.partition("* { box-sizing")[0]
    named = set(re.findall(r'"\$([a-z0-9-]+)"', json.dumps(page.figures))) | set(re.findall(r"var\(--([a-z0-9-]+)\)", css))
    assert len(named) > 20
    for each in named:
        assert f"--{each}:" in light and f"--{each}:" in dark, each


def test_summary_says_in_words_what_the_run_was(page: _Reader) -> None:
    assert "door was trained asynchronously on 1 sampler and 1 learner (seed 3): it was stopped by an error after 6 of 10 updates in 6 s." in page.text
    assert "success rose from 0.200 (95 % interval 0.150 to 0.250) to 0.900" in page.text
    assert "A trained token was 1.5 updates old on average and 2 at most; at key steps 1.0 and 2." in page.text
    assert "The median finished rollout had 10 tokens" in page.text
    assert "8 % were long" in page.text  # 1 of 12
    assert "Long ones gave their decode slot to short work 12 times" in page.text


def test_tables_show_ledger_failures_kinds_and_changed_settings(page: _Reader) -> None:
    for text in (
        "240 (92 %)",
        "environment error",
        "broken ",
        "30 (30 %)",
        "10 (25 %)",
        "learner.learning_rate",
        "0.0123",
        "0.0003",
        "of them over the key bound",
    ):
        assert text in page.text, text
    assert "run.mode" in page.text.partition("settings at their defaults")[2]


def test_where_the_time_went_adds_up_to_what_was_allocated(page: _Reader) -> None:
    rows = page.text.partition("Where the time went")[2]
    learner = {"learning": "3.6 s (60 %)", "waits for a batch": "1.2 s (20 %)", "learner's overhead": "0.60 s (10 %)"}
    sampler = {
        "waits for environments": "2.4 s (40 %)",
        "a new reason": "0.60 s (10 %)",
        "working at capacity": "2.1 s (35 %)",
        "working below capacity": "0.90 s (15 %)",
    }
    for words, value in {**learner, **sampler}.items():
        assert value in rows.partition(words)[2][:60], words


def test_examples_show_decoded_text_versions_and_key_steps(page: _Reader, hostile: Path) -> None:
    examples = page.text.partition("Example trajectories")[2]
    assert "seen alpha</pre><b>seen betagamma</pre><b>" in examples
    spans = [attributes for name, attributes in page.tags if name == "span" and "title" in attributes]
    assert {"version 1, step 1, key step", "version 0, step 0"} <= {attributes["title"] for attributes in spans}
    action = '<b class="key"><span class="v0" title="version 0, step 1, key step">beta</span><span class="v1" title="version 1, step 1, key step">gamma&lt;/pre'
    assert action in (hostile / "report.html").read_text(encoding="utf-8")
    assert sum(name == "b" and attributes.get("class") == "key" for name, attributes in page.tags) == len([1 for name, _ in page.tags if name == "article"])


def test_examples_without_a_tokenizer_show_token_ids(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", made_events())
    write_trajectories(directory)
    text = _Reader(write_report([directory], tmp_path / "r.html").path.read_text(encoding="utf-8")).text
    assert "token ids are shown" in text and "0 1 2 0 3 4 2 " in text


def test_report_holds_no_examples_where_files_cannot_be_read(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", made_events())
    (directory / "trajectories").mkdir()
    (directory / "trajectories" / "000001.parquet").write_bytes(b"PAR1 torn")
    assert "Example trajectories" not in write_report([directory], tmp_path / "r.html").path.read_text(encoding="utf-8")


def test_page_asks_the_network_for_nothing_and_holds_plotly_once(page: _Reader, hostile: Path) -> None:
    for name, attributes in page.tags:
        assert not {"src", "href"} & set(attributes), name
        assert name not in ("link", "iframe", "object")
    packed = re.findall(r'id="plotly">([A-Za-z0-9+/=]+)<', (hostile / "report.html").read_text(encoding="utf-8"))
    assert len(packed) == 1
    import base64

    from plotly.offline import get_plotlyjs

    assert gzip.decompress(base64.b64decode(packed[0])).decode() == get_plotlyjs()


def test_a_page_of_several_runs_leaves_the_report_of_each_run_alone(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = shutil.copytree(hostile, tmp_path / "one"), shutil.copytree(hostile, tmp_path / "two")
    (one / "report.html").write_text("of one alone", encoding="utf-8")
    assert main(["report", str(one), str(two), "--json"]) == 0
    assert (one / "report.html").read_text(encoding="utf-8") == "of one alone"
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "report.html")


def test_size_of_the_file_is_stated_and_stays_small(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(hostile), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["size_bytes"] == (hostile / "report.html").stat().st_size < 3_000_000
    assert result["report"] == str(hostile / "report.html") and result["trace"] is None
    assert result["runs"][0]["num_updates"] == 6


def test_same_runs_give_the_same_bytes(hostile: Path, tmp_path: Path) -> None:
    first, second = (write_report([hostile], tmp_path / name).path.read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_torn_last_line_is_left_out_and_a_broken_one_is_told(tmp_path: Path) -> None:
    going_on = write_run(tmp_path / "torn", made_events(finish=False), torn='{"event":"updated","ti')
    text = _Reader(write_report([going_on], tmp_path / "torn.html").path.read_text(encoding="utf-8")).text
    assert "the event log names no end" in text and "cannot be read" not in text
    broken = write_run(tmp_path / "broken", made_events(), torn='{"event":"upd\n\x00\xff\n{"no":1}\n')
    assert "3 lines of events.jsonl cannot be read" in write_report([broken], tmp_path / "broken.html").path.read_text(encoding="utf-8")


@pytest.mark.parametrize("count", range(1, 12))
def test_run_that_has_just_begun_can_be_reported(tmp_path: Path, count: int) -> None:
    directory = write_run(tmp_path / "run", made_events()[:count])
    assert _Reader(write_report([directory], tmp_path / "r.html").path.read_text(encoding="utf-8")).open == []


def test_unknown_events_and_keys_are_ignored(tmp_path: Path) -> None:
    known = write_run(tmp_path / "run", made_events())
    more = write_run(tmp_path / "more", made_events(), torn='{"event":"from_the_future","time":9.0,"role":"x","numbers":{"a":[1]}}\n')
    ends = [_Reader(write_report([each], tmp_path / "r.html").path.read_text(encoding="utf-8")).text.partition("Who worked")[2] for each in (known, more)]
    assert ends[0] == ends[1] != ""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "no run directory"),
        (lambda path: (path.mkdir(), (path / "events.jsonl").touch()), "no event of a run yet"),
        (lambda path: (path.mkdir(), (path / "events.jsonl").write_text('{"event":"run_sta')), "no event of a run yet"),
        (lambda path: (path.mkdir(), (path / "events.jsonl").write_text('{"event":"updated","time":"x"}\n')), "no event that can be read"),
    ],
)
def test_what_is_no_run_ends_with_exit_2_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, says: str) -> None:
    directory = tmp_path / "wrong"
    make(directory)  # type: ignore[operator]
    assert main(["report", str(directory), "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["kind"] == "ConfigError" and error["key"] == "RUN" and says in error["message"] and str(directory) in error["message"]
    assert "Traceback" not in err
    with pytest.raises(ConfigError):
        load_run(directory)


def test_place_that_cannot_be_written_is_named(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        write_report([hostile], tmp_path / "file" / "report.html")
    assert main(["report", str(hostile), "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_seeds_become_one_arm_with_a_band_and_other_settings_another(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a{seed}", made_events(final=0.8 + seed / 100), seed=seed) for seed in (1, 2, 3)]
    runs.append(write_run(tmp_path / "b", made_events(), seed=1, extra="[pool]\nmax_staleness = 5\n"))
    runs.append(write_run(tmp_path / "c", made_events(mode="sync"), seed=1))
    reader = _Reader(write_report(runs, tmp_path / "r.html").path.read_text(encoding="utf-8"))
    assert "5 runs in 3 arms" in reader.text
    assert "over key bound" in reader.text and "1.0 / 2" in reader.text and "22 %" in reader.text
    default = default_settings()["pool.max_staleness"]
    assert f"async split pool.max_staleness={default}, 3 seeds" in reader.text and "async split pool.max_staleness=5" in reader.text
    assert "sync colocated" in reader.text
    curve = next(figure for figure in reader.figures if figure["layout"]["xaxis"]["title"]["text"] == "update")  # type: ignore[index]
    bands = [trace for trace in curve["data"] if trace.get("fillcolor") == "$blue-band"]  # type: ignore[attr-defined]
    assert len(bands) == 1
    assert bands[0]["x"] == pytest.approx([0, 6, 6, 0]) and bands[0]["y"] == pytest.approx([0.2, 0.83, 0.81, 0.2])
    line = next(trace for trace in curve["data"] if trace.get("name", "").endswith("3 seeds"))  # type: ignore[attr-defined]
    assert line["y"] == pytest.approx([0.2, 0.82])


def test_given_arms_and_verdict_are_used(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{seed}", made_events(), seed=seed) for seed in (1, 2)]
    text = _Reader(write_report(runs, tmp_path / "r.html", arm_names=["<one>", "two"], verdict="Not <resolved>.").path.read_text(encoding="utf-8")).text
    assert "Not <resolved>." in text and "<one>, seed 1" in text and "two, seed 2" in text


def test_occupancies_of_several_runs_are_of_one_capacity(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{seed}", made_events(), seed=seed) for seed in (1, 2)]
    lines = (runs[1] / "events.jsonl").read_text().replace('"capacity":8', '"capacity":4', 1)
    (runs[1] / "events.jsonl").write_text(lines)
    report = write_report(runs, tmp_path / "r.html")
    assert {run.started["devices"][0]["capacity"] for run in report.runs} == {6}


def test_undone_updates_of_an_earlier_lineage_leave_the_curves(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", made_events())
    again = {"event": "updated", "time": 20.0, "role": "learner", "selection": 9, "version": 4, "lineage": 1, "reward_mean": 0.9,
             "seconds": 0.1, "busy_seconds": 0.1, "refused": None, "statistics": None}  # fmt: skip
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    versions = [(line["version"], line["lineage"]) for line in load_run(directory).surviving("updated")]
    assert versions == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_report_works_without_torch_and_network(hostile: Path, tmp_path: Path) -> None:
    code = f"""
import sys, socket
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "ray"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
socket.socket.connect = None
from headrace.cli.main import main
sys.exit(main(["report", {str(hostile)!r}, "--out", {str(tmp_path / "r.html")!r}]))
"""
    assert socket.socket.connect is not None
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.html").stat().st_size > 1_000_000


def test_markup_escapes_whatever_is_not_markup() -> None:
    assert tag("p", "<b>", Markup("<i>"), title='"&') == '<p title="&quot;&amp;">&lt;b&gt;<i></p>'
    assert escape("\x00\x1b\ud800") == "\u2400\u241b\ufffd"
    assert data_json({"a": "</script>&<!--", "b": float("nan")}) == '{"a":"\\u003c/script\\u003e\\u0026\\u003c!--","b":null}'


def test_columns_of_numbers_stand_right() -> None:
    text = table(["a", "b", "c"], [["x", "1,234 (5 %)", "–"], ["1", "<\u00a01\u00a0%", "–"]])
    assert text.count('<td class="number">') == 2


def test_long_series_are_thinned_and_a_maximum_survives_it() -> None:
    points = [(float(x), 5.0 if x == 7777 else 1.0) for x in range(10_000)]
    assert len(thinned(points)) <= 1500 and len(thinned(points, max)) <= 1500
    assert max(y for _, y in thinned(points, max)) == 5.0 > max(y for _, y in thinned(points))
    assert thinned(points[:1500]) == points[:1500]
