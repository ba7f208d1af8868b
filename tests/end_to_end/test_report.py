"""Reports in a real headless browser: no console error, every figure drawn, readable wide and narrow, light and dark, on paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from end_to_end.conftest import FinishedRun
from fakes.browser import Browser, Page, browser, chromium
from fakes.report_runs import made_events, write_run, write_tokenizer, write_trajectories
from headrace.report.page import write_report

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium in the PATH: apt-get install chromium (.ci/run does it where it may)")

_DRAWN = """
[...document.querySelectorAll('.plot')].map((plot) => [
  plot.closest('figure').querySelector('h3').textContent,
  plot.querySelectorAll('svg.main-svg').length > 0
    && plot.querySelectorAll('.scatterlayer .trace path, .barlayer .point path, .heatmaplayer image').length > 0,
])
"""
_LINE = "document.querySelector('.scatterlayer .trace:last-child .js-line').style.stroke"
# texts whose colour does not stand out from the page (WCAG contrast under 4.5), and texts too small to read
_UNREADABLE = """
(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return light(color);
    }
    return 1;
  };
  const found = [];
  const texts = 'h1, h2, h3, p, td, th, figcaption, summary, code, pre span, .legend span, .plot .xtick text, .plot .ytick text';
  for (const node of document.querySelectorAll(texts)) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(channels(node.namespaceURI.endsWith('svg') ? style.fill : style.color)), behind(node)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5 || parseFloat(style.fontSize) < 11) found.push([node.tagName, node.textContent.slice(0, 40), contrast, style.fontSize]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is hostile, with key steps, verification and pace."""
    directory = write_run(tmp_path_factory.mktemp("one") / "run", made_events(), extra="[pool]\nmax_key_staleness = 2\n")
    write_trajectories(directory)
    write_tokenizer(directory)
    return write_report([directory], directory / "report.html").path


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    runs = [write_run(folder / f"{mode}-{seed}", made_events(mode=mode), seed=seed) for mode in ("async", "sync") for seed in (1, 2)]
    return write_report(runs, folder / "report.html").path


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (400, True)])
def test_page_is_drawn_whole_and_readable(chrome: Browser, one: Path, width: int, dark: bool) -> None:
    page = chrome.open(one, width=width, dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    drawn = page.evaluate(_DRAWN)
    assert len(drawn) >= 22
    assert [title for title, whole in drawn if not whole] == []
    assert {"Age of key steps and of other tokens", "Key steps over their bound", "Verified rollouts", "Redrawn tails", "Pace"} <= {title for title, _ in drawn}
    assert page.complaints() == []
    assert page.evaluate("typeof hostile") == "undefined"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(_UNREADABLE) == []
    assert (page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)") is dark
    assert [url for url in page.requests() if not url.startswith(("file:", "data:", "blob:"))] == []


def test_figures_of_closed_runs_are_drawn_when_they_are_opened(chrome: Browser, several: Path) -> None:
    page = chrome.open(several, width=1280)
    total, ready = page.evaluate("[document.querySelectorAll('.plot').length, Number(document.documentElement.dataset.ready)]")
    assert 0 < ready < total
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.until(f"document.documentElement.dataset.ready == {total}")
    assert [title for title, whole in page.evaluate(_DRAWN) if not whole] == []
    assert page.complaints() == []


def test_colours_follow_when_the_theme_changes(chrome: Browser, one: Path) -> None:
    page = chrome.open(one, width=1280)
    before = _line_colour(page)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.until(f"{_LINE} !== {before!r}")
    assert page.evaluate(_UNREADABLE) == []


def test_paper_is_light_even_where_the_screen_is_dark(chrome: Browser, one: Path) -> None:
    light = _line_colour(chrome.open(one, width=1280))
    page = chrome.open(one, width=1280, dark=True)
    assert _line_colour(page) != light
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.until(f"{_LINE} === {light!r}")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.until(f"{_LINE} !== {light!r}")
    document = page.print()
    assert document.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", document)) >= 3
    assert page.complaints() == []


def test_figures_answer_to_hover_and_zoom(chrome: Browser, one: Path) -> None:
    page = chrome.open(one, width=1280)
    x, y = page.evaluate(
        "(() => { const plot = [...document.querySelectorAll('.plot')].find((each) => each.querySelector('.barlayer')); plot.scrollIntoView({block: 'center'});"
        " const box = plot.querySelector('.barlayer .point path').getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 2, y=y)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.until("document.querySelector('.hoverlayer .hovertext') !== null")
    zoomed = "Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [1, 2]}).then((plot) => plot.layout.xaxis.range)"
    assert page.evaluate(zoomed) == [1, 2]


def test_key_steps_and_other_tokens_have_colours_of_their_own_and_a_bound_of_its_own_line(chrome: Browser, one: Path) -> None:
    page = chrome.open(one, width=1280)
    strokes = page.evaluate(
        "(() => { const plot = [...document.querySelectorAll('figure')].find((each) => each.querySelector('h3').textContent.startsWith('Age of key steps'));"
        " return [...plot.querySelectorAll('.scatterlayer .js-line')].map((line) => [line.style.stroke, line.style.strokeDasharray]); })()"
    )
    (key, _), (key_oldest, dots), (other, _), _, (bound, dashes) = strokes
    assert key == key_oldest and len({key, other, bound}) == 3
    assert dots not in ("", "none", dashes), "the oldest are dotted, the bound is dashed"


def test_report_of_a_real_run_is_drawn(run_letters: Callable[..., FinishedRun], chrome: Browser) -> None:
    run = run_letters("run.num_updates=3")
    page = chrome.open(write_report([run.directory], run.directory / "report.html").path, width=400)
    assert [title for title, whole in page.evaluate(_DRAWN) if not whole] == []
    assert page.complaints() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert "3 of 3 updates" in page.evaluate("document.querySelector('.summary').textContent")
    assert page.evaluate("document.querySelectorAll('.example pre .v0').length") > 0  # from the trajectories that the run recorded
    assert "token ids" not in page.evaluate("document.body.textContent")


def _line_colour(page: Page) -> str:
    colour: str = page.evaluate(_LINE)
    return colour
