"""Ctrl-C at any moment of a run, over scripted roles and the virtual clock: what was learned is saved, nothing is learned twice, a second one
ends at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes.journal import MemoryJournal
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace import clock
from headrace.clock import run_virtual
from headrace.config import Settings
from headrace.errors import CheckpointError
from headrace.types import PolicyVersion

NOWHERE = Path("/nowhere")
TASKS = [scripted_task(f"t{index}", answers=1 + index % 3, wait_seconds=[0.0, 0.4, 3.0][index % 3], reward=float(index % 2)) for index in range(7)]


def settings(mode: str = "async", *, every: int = 3, interrupt_seconds: float = 20.0, num_updates: int = 9) -> Settings:
    checkpoint = {"every_updates": every, "every_seconds": 0, "keep": 1000, "interrupt_seconds": interrupt_seconds}
    return run_settings(mode=mode, num_updates=num_updates, num_samplers=2, checkpoint=checkpoint)


class Interrupted:
    """A run that is cancelled at these moments; how long it took to end after the first."""

    def __init__(self, made: Settings, *moments: float, save_seconds: float = 0.5, save_error: Exception | None = None, **options: Any) -> None:
        self.settings = made
        self.run = ScriptedRun(settings=made, tasks=TASKS, journal=MemoryJournal(made), checkpoint_directory=NOWHERE, **options)
        self.seconds = run_virtual(self._live(moments, save_seconds, save_error))
        states = self.run.journal.states
        self.saved = PolicyVersion(*states[-1][1]["version"]) if states else PolicyVersion(0, 0)

    async def _live(self, moments: tuple[float, ...], save_seconds: float, save_error: Exception | None) -> float:
        building = self.run.build

        def build() -> None:
            building()
            saving = self.run.learner.save

            async def save(directory: Path) -> None:
                await asyncio.sleep(save_seconds)
                if save_error is not None:
                    raise save_error
                await saving(directory)

            self.run.learner.save = save  # type: ignore[method-assign]

        self.run.build = build  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.run.run())
            for moment in moments:
                await asyncio.sleep(moment - clock.now())
                task.cancel()
            await asyncio.wait([task])
        return clock.now() - moments[0]

    def resumed(self) -> ScriptedRun:
        restore, start = self.run.journal.restore()
        run = ScriptedRun(settings=self.settings, tasks=TASKS, journal=self.run.journal, restore=restore, start=start, checkpoint_directory=NOWHERE)
        run_virtual(run.run())
        return run


@given(
    moment=st.floats(0.0, 20.0).map(lambda seconds: round(seconds, 2)),
    mode=st.sampled_from(["sync", "async"]),
    every=st.integers(1, 4),
    learn_seconds=st.sampled_from([0.01, 0.7, 4.0]),
    publish_seconds=st.sampled_from([0.0, 0.3]),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_an_interrupted_run_saves_all_it_learned_and_goes_on_from_there(
    moment: float, mode: str, every: int, learn_seconds: float, publish_seconds: float
) -> None:
    first = Interrupted(settings(mode, every=every), moment, learn_seconds=learn_seconds, publish_seconds=publish_seconds)
    assert first.saved == first.run.learner.version, "whatever had been learned is saved"
    assert first.seconds <= learn_seconds + publish_seconds + 3 * 0.5 + 0.01
    learned = [selection for selection in first.run.learner.selections if selection.learner_version < first.saved]
    if first.saved.number == first.settings.run.num_updates:
        return
    second = first.resumed()
    assert [line["version"] for line in second.log.named("updated")] == list(range(first.saved.number + 1, 10))
    trained = Counter(m.summary.key[:2] for s in (*learned, *second.learner.selections) for m in s.members)
    assert not [key for key, count in trained.items() if count > 1], "a batch is learned once"
    second.conductor.pool.ledger.check()
    assert second.log.named("ledger")[-1]["ledger"]["closes"]
    told = [line["version"] for run in (first.run, second) for line in run.log.named("updated")]
    assert told == list(range(1, 10)), "the log tells of each update once"


def test_a_run_that_has_learned_nothing_since_its_checkpoint_ends_at_once() -> None:
    ended = Interrupted(settings(every=1), 0.3)
    assert ended.seconds == 0.0 and not ended.run.log.named("interrupted") and not ended.run.learner.saved


def test_a_second_interrupt_ends_at_once() -> None:
    calm = Interrupted(settings(every=100), 9.0, learn_seconds=6.0)
    ended = Interrupted(settings(every=100), 9.0, 9.8, learn_seconds=6.0)
    assert calm.seconds > 1.0 and ended.seconds == pytest.approx(0.8)
    assert ended.saved == PolicyVersion(0, 0) and len(ended.run.log.named("interrupted")) == 1


def test_a_learner_that_does_not_answer_is_waited_for_no_longer_than_the_limit() -> None:
    ended = Interrupted(settings(every=100, interrupt_seconds=5.0), 45.0, learn_seconds=30.0)
    assert ended.seconds == pytest.approx(5.0)
    assert [line["failure"] for line in ended.run.log.named("interrupted")] == [
        None,
        "the learner did not answer within 5 s (checkpoint.interrupt_seconds)",
    ]


def test_a_last_checkpoint_that_cannot_be_written_is_said_and_older_ones_stay() -> None:
    ended = Interrupted(settings(every=100), 9.0, save_error=CheckpointError("disk full"))
    assert ended.run.log.named("interrupted")[-1]["failure"] == "disk full"
    assert ended.saved == PolicyVersion(0, 0) < ended.run.learner.version


def test_without_a_limit_nothing_is_saved_at_an_interrupt() -> None:
    ended = Interrupted(settings(every=100, interrupt_seconds=0.0), 9.0, learn_seconds=2.0)
    assert ended.seconds == 0.0 and not ended.run.learner.saved and not ended.run.log.named("interrupted")
