"""SIGKILL on real processes with scripted roles, and what became of every rollout (I12, I13). `benchmarks/chaos.py` does it hundreds of times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fakes.chaos import CONDUCTOR, Story, check, fates
from fakes.chaos_child import RECORDS

ENDLESS = ("run.num_updates=1000000", "evaluation.every_updates=0", "evaluation.metric=logprob_of_a")


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(kind="scripted", directory=tmp_path / "run", seed=3, overrides=(*ENDLESS, "checkpoint.every_updates=5"))


def test_kills_of_sampler_learner_and_conductor_lose_nothing(story: Story) -> None:
    try:
        for role in ("sampler-0", "learner-0", CONDUCTOR):
            while not any(kill.role == role for kill in story.kills):
                story.tell(len(story.kills) + 1, roles=(role,), delay_seconds=0.2)
        assert story.interrupt() == 130
        story.finish(f"run.num_updates={story.reached() + 2}")
        ledger = check(story)
    finally:
        story.end()
    assert [kill.role for kill in story.kills] == ["sampler-0", "learner-0", CONDUCTOR]
    assert ledger["lineage"] >= 2 and ledger["trajectories"]["failed"]["worker_lost"] > 0
    lines = (story.notes / RECORDS).read_text().splitlines()
    twice = next(line for line in lines if json.loads(line)["kind"] == "Consumed" and json.loads(line)["version"][1] == 1)
    (story.notes / RECORDS).write_text("\n".join([*lines, twice]))
    assert max(fates(story).trained.values()) == 2, "the check can fail"
    (story.notes / RECORDS).write_text("\n".join(line for line in lines if json.loads(line)["kind"] != "Consumed"))
    assert fates(story).unknown


def test_a_learner_killed_beside_a_copy_in_memory_goes_on_from_that(story: Story) -> None:
    story = dataclasses.replace(story, overrides=(*ENDLESS, "checkpoint.every_updates=500", "checkpoint.memory_copy=true"))
    try:
        while not story.kills or not [line for line in story.events() if line["event"] == "run_resumed" and line["from_memory"]]:
            story.tell(len(story.kills) + 1, roles=("learner-0",), delay_seconds=0.4)
        story.tell(len(story.kills) + 1, roles=(CONDUCTOR,), delay_seconds=0.4)
        assert story.interrupt() == 130
        story.finish(f"run.num_updates={story.reached() + 2}")
        check(story)
    finally:
        story.end()
    for line in story.events():
        if line["event"] == "run_resumed" and line["from_memory"]:
            assert line["cause"] == "learner_lost" and line["undone_updates"] <= 1 and line["checkpoint"] == "" and line["resumed_from_update"] > 0


@pytest.mark.slow
def test_a_conductor_killed_before_the_first_checkpoint_goes_on_from_the_start(tmp_path: Path) -> None:
    story = Story(kind="scripted", directory=tmp_path / "run", seed=4, overrides=(*ENDLESS, "checkpoint.interrupt_seconds=0"))
    try:
        while not story.kills or story.kills[-1].phase != "training":
            story.tell(len(story.kills) + 1, roles=(CONDUCTOR,), delay_seconds=1.5)
        story.interrupt()
        assert not list(story.directory.glob("checkpoints/update_*"))
        story.finish(f"run.num_updates={story.reached() + 2}")
        check(story)
    finally:
        story.end()
    resumed = [line for line in story.events() if line["event"] == "run_resumed"]
    assert {line["resumed_from_update"] for line in resumed} == {0} and {line["checkpoint"] for line in resumed} == {""}
    assert [line["lineage"] for line in resumed] == list(range(1, len(resumed) + 1))
