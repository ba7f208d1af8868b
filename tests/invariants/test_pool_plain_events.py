"""I10: without marks, quorum, verification and pace every event is what it was before the pool knew of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.plain_runs import SCENARIOS, fingerprints, lines_of

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "plain_events.json").read_text())


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_plain_runs_emit_the_events_on_record(name: str) -> None:
    lines, recorded = lines_of(name), RECORDED["events"][name]
    assert {line["event"] for line in lines} <= RECORDED["fields"].keys()
    found = fingerprints(lines, RECORDED["fields"])
    first = next((index for index, pair in enumerate(zip(found, recorded, strict=False)) if pair[0] != pair[1]), len(recorded))
    assert found == recorded, f"event {first} differs: {lines[first] if first < len(lines) else 'missing'}"
    assert len(recorded) > 100
