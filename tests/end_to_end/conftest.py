"""Real runs on real processes, small: the recipe `letters` beside this file, which learns from random weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.config_loading import load_settings
from headrace.event_log import read_events
from headrace.report.summary import summarize
from headrace.runtime.local import RunOutcome, run_local
from headrace.runtime.processes import end_forkserver

LETTERS = Path(__file__).parent / "letters"


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    directory: Path
    outcome: RunOutcome
    events: list[dict[str, Any]]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def summary(self) -> dict[str, Any]:
        return summarize(self.events)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """HEADRACE_CACHE of every end-to-end test, also of child processes."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("HEADRACE_CACHE", str(path))
        yield path
    end_forkserver()


@pytest.fixture
def run_letters(model_cache: Path, tmp_path: Path) -> Callable[..., FinishedRun]:
    def run(*overrides: str, name: str = "run", **options: Any) -> FinishedRun:
        directory = tmp_path / name
        outcome = asyncio.run(run_local(load_settings(LETTERS, overrides), directory, **options))
        return FinishedRun(directory=directory, outcome=outcome, events=list(read_events(directory / "events.jsonl")))

    return run
