"""The governor in whole runs: real conductor, pool and workers over scripted roles under the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.restored import RestoredRun
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace.clock import run_virtual
from headrace.errors import DivergedError, NoProgressError, RollBackError
from headrace.updates import Selection

TASKS = [scripted_task(f"t{index}", answers=1 + index % 3, wait_seconds=[0.0, 0.3, 2.0][index % 3], reward=index % 2) for index in range(6)]
FAR = {"effective_sample_size": 0.3, "kl_sampler_learner": 0.2}
COLLAPSED = {"effective_sample_size": 0.05, "kl_sampler_learner": 2.0, "trained_tokens": 500}
NOWHERE = Path("/nowhere")


def governed_run(*, max_staleness: int = 8, num_updates: int = 20, governor: Mapping[str, Any] | None = None, **options: Any) -> ScriptedRun:
    settings = run_settings(max_staleness=max_staleness, num_updates=num_updates, governor=governor or {}, **options.pop("sections", {}))
    return ScriptedRun(settings=settings, tasks=TASKS, **options)


def actions(lines: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(what, at which version, bound from then on)"""
    return [(line["action"], line["version"], line["max_staleness"]) for line in lines if line["event"] == "governed"]


def test_a_healthy_run_is_the_same_bit_for_bit_with_the_whole_governor_on() -> None:
    off = governed_run(governor={"explosion_factor": 0, "on_failure": "skip"})
    on = governed_run(governor={"adapt_staleness": True, "on_failure": "roll_back", "reward_drop": 0.5})
    for run in (off, on):
        run_virtual(run.run())
    assert off.log.lines == on.log.lines and not actions(on.log.lines)


def test_the_bound_in_effect_follows_the_updates_down_to_on_policy_and_up_again_and_is_obeyed() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        return FAR if 2 <= selection.learner_version.number < 16 else {}

    run = governed_run(num_updates=60, governor={"adapt_staleness": True}, measured=measured, learn_seconds=0.5)
    run_virtual(run.run())
    moves = [("tightened", 5, 4), ("tightened", 8, 2), ("tightened", 11, 1), ("tightened", 14, 0)]
    assert actions(run.log.lines)[:4] == moves
    # 0 held from 14 on; the last update that missed led to 16; 1 had failed, so it is tried after twice the usual 12
    assert actions(run.log.lines)[4:] == [("loosened", 40, 1), ("loosened", 52, 2)]
    in_effect = {version: bound for _, version, bound in actions(run.log.lines)}
    bound = 8
    for selection in run.learner.selections:
        bound = in_effect.get(selection.learner_version.number, bound)
        assert selection.max_staleness == bound
    assert run.log.named("governed")[0]["reason"] == ("3 updates in a row missed effective sample size 0.5 or KL 0.1: at most 4 updates old from now on")
    assert run.log.named("governed")[0]["effective_sample_size"] == 0.3
    trained_on_policy = [line for line in run.log.named("updated") if 16 < line["version"] <= 40]
    assert {line["statistics"]["staleness_max"] for line in trained_on_policy} == {0}
    acknowledged = {line["version"] for line in run.log.named("weights_acknowledged")}
    assert acknowledged == set(range(15, 41)), "on-policy, every sampler takes up an update before the next rollouts begin"
    assert run.log.named("ledger")[-1]["ledger"]["closes"]


def test_what_is_too_old_when_the_bound_is_lowered_is_no_refused_update() -> None:
    """Everything that waits in the pool may be over the new bound: these batches train nothing, and end no run."""
    settings = {"learner": {"max_refused_updates": 2}, "pool": {"selection": "oldest_first"}}
    run = governed_run(governor={"adapt_staleness": True, "patience_updates": 1}, sections=settings, measured=lambda selection: FAR, learn_seconds=5.0)
    run_virtual(run.run())
    assert actions(run.log.lines)[-1][2] == 0 and {action for action, _, _ in actions(run.log.lines)} == {"tightened"}


def test_sync_has_no_bound_to_move() -> None:
    run = governed_run(governor={"adapt_staleness": True}, sections={"mode": "sync"}, measured=lambda selection: FAR)
    run_virtual(run.run())
    assert not actions(run.log.lines)


def test_a_collapse_ends_the_run_with_its_cause_unless_it_is_skipped() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        return COLLAPSED if selection.learner_version.number in (4, 6, 7, 8) else {}

    stopped, skipped = governed_run(measured=measured), governed_run(measured=measured, governor={"on_failure": "skip"})
    with pytest.raises(DivergedError, match=r"^3 updates in a row were beyond effective sample size 0\.1 or KL 0\.5\. Lower learner\.learning_rate"):
        run_virtual(stopped.run())
    run_virtual(skipped.run())
    for run in (stopped, skipped):
        assert actions(run.log.lines) == [("failed", 9, 8)]


def test_every_refused_update_is_an_event_and_half_of_the_last_ones_refused_is_failure() -> None:
    run = governed_run(refuse=lambda selection_id: selection_id % 2 == 1, sections={"learner": {"max_refused_updates": 3}})
    with pytest.raises(DivergedError, match="6 of the last 12 updates were refused: scripted"):
        run_virtual(run.run())
    assert [action for action, _, _ in actions(run.log.lines)] == ["refused"] * 6 + ["failed"]


def test_refusals_that_are_skipped_do_not_go_on_for_ever() -> None:
    run = governed_run(refuse=lambda selection_id: True, governor={"on_failure": "skip"}, sections={"learner": {"max_refused_updates": 3}})
    with pytest.raises(DivergedError, match="30 updates in a row were refused"):
        run_virtual(run.run())


def rolled_back(measured: Any = lambda selection: {}, *, every_updates: int = 2, **options: Any) -> RestoredRun:
    governor = {"on_failure": "roll_back", **options.pop("governor", {})}
    sections = {"checkpoint": {"every_updates": every_updates, "keep": 1000, "interrupt_seconds": 0}, "governor": governor, **options.pop("sections", {})}
    return RestoredRun(settings=run_settings(num_updates=16, **sections), tasks=TASKS, checkpoint_directory=NOWHERE, measured=measured, **options)


def test_a_collapsed_run_goes_back_to_the_last_good_checkpoint_with_a_lower_learning_rate() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        return COLLAPSED if selection.learner_version.lineage == 0 and selection.learner_version.number >= 7 else {}

    run = rolled_back(measured, governor={"learning_rate_factor": 0.3})
    run_virtual(run.run())
    first, second = run.lives
    # the update from 7 is the first that collapsed: the checkpoint that was due at 8 is not made
    assert actions(first.lines) == [("held_back", 8, 2), ("failed", 10, 2)] and not actions(second.lines)
    assert tuple(second.start) == (1, 6)
    assert [(back.cause, back.learning_rate_factor, back.reason) for back in run.returns] == [
        ("roll_back", 0.3, "3 updates in a row were beyond effective sample size 0.1 or KL 0.5")
    ]
    assert run.learner.version.number == 16


def test_a_run_that_fails_again_before_anything_new_was_saved_goes_back_further() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        return COLLAPSED if selection.learner_version.lineage < 2 and selection.learner_version.number >= 6 else {}

    run = rolled_back(measured)
    run_virtual(run.run())
    assert [tuple(life.start) for life in run.lives] == [(0, 0), (1, 6), (2, 4)]
    assert [back.newest_update for back in run.returns] == [None, 5]


def test_a_run_that_fails_however_far_it_goes_back_ends() -> None:
    run = rolled_back(lambda selection: COLLAPSED if selection.learner_version.number >= 6 else {}, governor={"max_roll_backs": 2})
    with pytest.raises(DivergedError, match=r"2 rollbacks in a row did not help\. Now: 3 updates in a row were beyond") as raised:
        run_virtual(run.run())
    assert not isinstance(raised.value, RollBackError) and len(run.lives) == 3


def test_updates_that_go_on_missing_their_targets_are_failure_only_where_the_run_may_go_back() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        return FAR if selection.learner_version.lineage == 0 and selection.learner_version.number >= 5 else {}

    back, stays = rolled_back(measured), governed_run(measured=measured)
    for run in (back, stays):
        run_virtual(run.run())
    assert [one.reason for one in back.returns] == ["6 updates in a row missed effective sample size 0.5 or KL 0.1"]
    assert tuple(back.lives[1].start) == (1, 4), "nothing is saved while updates miss them"
    assert not actions(stays.log.lines)


def test_refused_updates_roll_back_too() -> None:
    run = rolled_back(refuse=lambda selection_id: 5 <= selection_id < 8, sections={"learner": {"max_refused_updates": 3}})
    run_virtual(run.run())
    assert [back.reason for back in run.returns] == ["3 updates in a row were refused: scripted"]


def test_the_bound_that_was_in_effect_at_a_checkpoint_is_in_effect_after_a_restore() -> None:
    def measured(selection: Selection) -> Mapping[str, Any]:
        if selection.learner_version.lineage == 0:
            return COLLAPSED if selection.learner_version.number >= 9 else FAR if selection.learner_version.number < 3 else {"effective_sample_size": 0.6}
        return {"effective_sample_size": 0.6}

    run = rolled_back(measured, governor={"adapt_staleness": True})
    run_virtual(run.run())
    first, second = run.lives
    assert next(one for one in actions(first.lines) if one[0] == "tightened") == ("tightened", 3, 1)
    assert {selection.max_staleness for selection in second.selections} == {1}


def test_a_policy_that_solves_nothing_any_more_goes_back_and_one_that_never_did_ends_the_run() -> None:
    sections = {"pool": {"no_signal": "filter"}, "run": {"max_empty_batches": 4}, "learner": {"advantage": "none"}}
    lost, never = rolled_back(sections=sections), rolled_back(sections=sections)
    never.tasks = [scripted_task("hard", reward=0.0)]
    lost.tasks = [*[scripted_task("easy", reward=1.0)] * 8, *never.tasks * 1000]
    with pytest.raises(NoProgressError, match="4 batches in a row held no group with different rewards"):
        run_virtual(never.run())
    with pytest.raises(DivergedError, match=r"3 rollbacks in a row did not help.*no group with different rewards, their mean is 0, it had been 1"):
        run_virtual(lost.run())
    assert not never.returns and len(lost.lives) == 4
