"""Workers and the evaluator die, hang and come back at any moment: the run goes on, the ledger closes, nothing waits for ever.

Real conductor, pool and workers over scripted samplers under the virtual clock, where a run that hangs raises VirtualDeadlockError.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes.mortal import Death, MortalRun
from fakes.rollouts import scripted_task
from fakes.runs import run_settings, version_numbers
from headrace import clock
from headrace.clock import run_virtual
from headrace.errors import ModelError, WaitTimeoutError, WorkerLostError
from headrace.pool.members import MAX_LOSSES
from headrace.types import EndReason, VerifyRequest

TASKS = [
    scripted_task(f"t{index}", answers=1 + index % 3, wait_seconds=[0.0, 0.1, 2.0, 5.0][index % 4], reward=index % 2, key_steps=[0] if index % 2 else [])
    for index in range(7)
]
PATIENT = {"max_restarts": 1000, "report_seconds": 20.0}

deaths = st.lists(
    st.builds(
        Death, st.floats(0.0, 25.0).map(lambda seconds: round(seconds, 2)), st.integers(0, 2), st.sampled_from(["killed", "killed_after_report", "hung"])
    ),
    max_size=6,
)
schedules = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["async", "sync"]),
        "selection": st.sampled_from(["oldest_first", "ready_first"]),
        "on_expiry": st.sampled_from(["skip_tokens", "drop_group", "wait"]),
        "max_staleness": st.integers(0, 4),
        "num_samplers": st.integers(1, 3),
        "quorum": st.sampled_from([None, 1]),
        "verify": st.sampled_from(["off", "key_steps", "all"]),
        "learn_seconds": st.sampled_from([0.01, 1.0, 5.0]),
        "max_running": st.sampled_from([1, 3, 64]),
        "restart_seconds": st.sampled_from([0.1, 2.0, 12.0]),
        "failing_restarts": st.sampled_from([0, 2]),
    }
)


def scheduled_run(schedule: dict[str, Any], when: list[Death]) -> MortalRun:
    asynchronous = schedule["mode"] == "async"
    pool = {key: schedule[key] for key in ("selection", "on_expiry")} | {"no_signal": "train"}
    if asynchronous and schedule["max_staleness"]:
        pool |= {"verify": schedule["verify"], "verify_after": 1}
        pool |= {"quorum": schedule["quorum"]} if schedule["on_expiry"] == "skip_tokens" else {}
    lost = WorkerLostError("the successor died while it started")

    def reject(request: VerifyRequest) -> int | None:
        return request.checked[0][1] if sum(request.key) % 3 == 0 else None

    return MortalRun(
        settings=run_settings(
            mode=schedule["mode"], num_updates=8, max_staleness=schedule["max_staleness"], num_samplers=schedule["num_samplers"], pool=pool, limits=PATIENT
        ),
        tasks=TASKS,
        learn_seconds=schedule["learn_seconds"],
        max_running=schedule["max_running"],
        restart_seconds=schedule["restart_seconds"],
        fail_restart=lambda number: lost if number <= schedule["failing_restarts"] else None,
        reject=reject,
        deaths=when,
    )


def check_survived(run: MortalRun) -> None:
    numbers = version_numbers(run.learner.published)
    assert numbers == sorted(set(numbers)) and numbers[-1] == run.settings.run.num_updates, "I1, and every update was made"
    for name in {line["role"] for line in run.log.named("weights_applied")}:
        applied = [line["version"] for line in run.log.named("weights_applied") if line["role"] == name]
        assert applied == sorted(applied), "I1: a sampler's version never falls, whoever has its name"
    trained = Counter((m.summary.key.group_id, m.summary.key.member) for s in run.learner.selections for m in s.members)
    assert not trained or max(trained.values()) == 1, "nothing is trained twice"
    ledgers = [line["ledger"] for line in run.log.named("ledger")]
    assert len(ledgers) >= run.settings.run.num_updates and all(ledger["closes"] for ledger in ledgers), "I7"
    lost = [line for line in run.log.named("rollout_failed") if line["reason"] == EndReason.WORKER_LOST]
    assert len(lost) == sum(line["rollouts"] for line in run.log.named("role_lost"))
    assert all(line["attempt"] < MAX_LOSSES + run.settings.rollout.max_attempts for line in lost), "bounded"
    assert all(line["retried"] for line in lost if line["attempt"] < MAX_LOSSES)
    for selection in run.learner.selections:
        if run.settings.pool.on_expiry == "wait" and run.settings.max_staleness:
            assert all(
                c.key or selection.learner_version.number - c.version.number <= run.settings.max_staleness
                for m in selection.members
                for c in m.summary.versions
            )


@given(schedule=schedules, when=deaths)
@hypothesis_settings(max_examples=40, deadline=None)
def test_runs_survive_workers_that_die_hang_and_come_back_at_any_moment(schedule: dict[str, Any], when: list[Death]) -> None:
    run = scheduled_run(schedule, when)
    run_virtual(run.run())
    check_survived(run)


@pytest.mark.slow
@given(schedule=schedules, when=deaths)
@hypothesis_settings(max_examples=400, deadline=None)
def test_runs_survive_over_many_schedules(schedule: dict[str, Any], when: list[Death]) -> None:
    run = scheduled_run(schedule, when)
    run_virtual(run.run())
    check_survived(run)


def test_the_others_take_what_a_lost_worker_had_at_once() -> None:
    run = MortalRun(settings=run_settings(num_updates=12, num_samplers=2, limits=PATIENT), tasks=TASKS, deaths=[Death(3.05, 0, "killed")], restart_seconds=60.0)
    run_virtual(run.run())
    check_survived(run)
    (lost,) = run.log.named("role_lost")
    again = [round(seconds, 4) for seconds, key in run.started if key.attempt == 1]
    assert lost["rollouts"] == len(again) > 0 and set(again) == {lost["time"]}
    while_away = [line for line in run.log.named("updated") if lost["time"] < line["time"] < lost["time"] + 60]
    assert len(while_away) > 5, "the other one keeps the learner busy meanwhile"


def test_the_only_workers_rollouts_are_kept_until_its_successor_uses_the_newest_weights() -> None:
    run = MortalRun(settings=run_settings(num_updates=12, limits=PATIENT), tasks=TASKS, deaths=[Death(9.05, 0, "killed")], apply_seconds=0.4)
    run_virtual(run.run())
    check_survived(run)
    (lost,), (back,) = run.log.named("role_lost"), run.log.named("role_restarted")
    again = [round(seconds, 4) for seconds, key in run.started if key.attempt == 1]
    assert lost["rollouts"] == len(again) > 0 and set(again) == {back["time"]}
    assert back["time"] - lost["time"] == pytest.approx(back["seconds"], abs=1e-4)
    assert back["seconds"] >= 0.5 + 0.6 + 0.4, "back-off, start, weights"
    published = [line["version"] for line in run.log.named("weights_published") if line["time"] <= lost["time"]]
    drawn = [c.version.number for s in run.learner.selections for m in s.members if m.summary.key.attempt == 1 for c in m.summary.versions]
    assert drawn and min(drawn) >= max(published) > 0


def test_back_off_doubles_and_a_loss_too_many_ends_the_run_with_its_cause() -> None:
    settings = run_settings(num_updates=1000, limits={"max_restarts": 4, "restart_window_seconds": 600})
    run = MortalRun(settings=settings, tasks=TASKS, fail_restart=lambda number: WorkerLostError("CUDA error: out of memory"), deaths=[Death(5.0, 0, "killed")])
    with pytest.raises(WorkerLostError, match=r"sampler-0 was lost 5 times within 600 s \(limits.max_restarts = 4\). The last time: CUDA error: out of memory"):
        run_virtual(run.run())
    (first, *_) = run.log.named("role_lost")
    starts = [seconds for seconds, _ in run.restarts]
    assert [round(b - a, 3) for a, b in zip([first["time"], *(s + 0.6 for s in starts)], starts, strict=False)] == [0.5, 1.0, 2.0, 4.0]
    assert [line["restarted"] for line in run.log.named("role_lost")] == [True] * 4 + [False]


def test_losses_outside_the_window_are_forgotten() -> None:
    settings = run_settings(num_updates=60, limits={"max_restarts": 1, "restart_window_seconds": 10})
    run = MortalRun(settings=settings, tasks=TASKS, deaths=[Death(5.0 + 15.0 * index, 0, "killed") for index in range(4)])
    run_virtual(run.run())
    check_survived(run)
    assert [line["losses"] for line in run.log.named("role_lost")] == [1, 1, 1, 1]


def test_without_restarts_the_first_loss_ends_the_run_as_it_is() -> None:
    run = MortalRun(settings=run_settings(num_updates=100, limits={"max_restarts": 0}), tasks=TASKS, deaths=[Death(5.0, 0, "killed")])
    with pytest.raises(WorkerLostError, match=r"^sampler-0 was killed\.$"):
        run_virtual(run.run())
    silent = MortalRun(settings=run_settings(num_updates=100, limits={"max_restarts": 0, "report_seconds": 9}), tasks=TASKS, deaths=[Death(5.0, 0, "hung")])
    with pytest.raises(WaitTimeoutError, match="sign of life from sampler-0: no answer in 9 s"):
        run_virtual(silent.run())


def test_what_is_wrong_with_the_model_is_not_tried_again() -> None:
    run = MortalRun(
        settings=run_settings(num_updates=100), tasks=TASKS, deaths=[Death(5.0, 0, "killed")], fail_restart=lambda number: ModelError("no tokenizer")
    )
    with pytest.raises(ModelError, match="no tokenizer"):
        run_virtual(run.run())
    assert len(run.restarts) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("num_samplers", [1, 2])
def test_a_worker_that_dies_before_it_acknowledges_holds_nobody_up(mode: str, num_samplers: int) -> None:
    """At bound 0 the learner waits for every sampler: one that is gone comes back under the newest weights, so nobody waits for it."""
    for moment in (0.5, 1.7, 2.0, 2.1, 2.4, 3.05):
        run = MortalRun(
            settings=run_settings(mode=mode, max_staleness=0, num_samplers=num_samplers, limits={**PATIENT, "apply_seconds": 5}),
            tasks=TASKS[:3],
            apply_seconds=1.0,
            restart_seconds=30.0,
            deaths=[Death(moment, 0, "killed")],
        )
        run_virtual(run.run())
        check_survived(run)
        assert max(c.version.number - s.learner_version.number for s in run.learner.selections for m in s.members for c in m.summary.versions) == 0


def test_a_rollout_that_kills_every_worker_leaves_in_the_end() -> None:
    """Wherever task `poison` runs, the worker dies a moment later."""
    tasks = [scripted_task("poison", wait_seconds=0.4), *TASKS[:2]]
    run = MortalRun(settings=run_settings(num_updates=10, limits=PATIENT), tasks=tasks)
    building, poisoned = run.build, Counter[Any]()

    def build() -> None:
        building()
        noting = run._note_starts

        def note(worker: Any, member_tasks: Any) -> None:
            noting(worker, member_tasks)
            start = worker.start

            async def started(requests: Any) -> None:
                await start(requests)
                for request in requests:
                    if request.task.id == "poison" and request.key.group_id == 0:
                        poisoned[request.key] += 1
                        asyncio.get_running_loop().call_later(0.1, run.mortals[0].die, "killed")

            worker.start = started

        run._note_starts = note  # type: ignore[method-assign]
        for worker in run.workers:
            note(worker, run._member_tasks)

    run.build = build  # type: ignore[method-assign]
    run_virtual(run.run())
    check_survived(run)
    attempts = Counter(key.member for key in poisoned)
    assert set(attempts.values()) == {MAX_LOSSES + 1}
    assert not [line for line in run.log.named("rollout_finished") if line["group"] == 0 and line["end"] == "done"]


class MortalEvaluator:
    """Dies over the evaluations named, counted from 0."""

    def __init__(self, dies_at: set[int], seconds: float = 2.0) -> None:
        self.dies_at, self.seconds = dies_at, seconds
        self.calls: list[tuple[float, int]] = []

    async def evaluate(self, version: Any, requests: Any, tasks: Any) -> Any:
        from headrace.rollout.evaluation import EvaluationRecord

        self.calls.append((clock.now(), version.number))
        await asyncio.sleep(self.seconds)
        if len(self.calls) - 1 in self.dies_at:
            raise WorkerLostError("Process evaluator was ended by signal SIGKILL in the middle of the run.")
        return EvaluationRecord(version=version, finished=(), metrics={"score": float(version.number)})


def evaluated_run(evaluator: MortalEvaluator, **limits: Any) -> MortalRun:
    settings = run_settings(num_updates=9, evaluation={"every_updates": 4, "metric": "score"}, limits=limits)
    run = MortalRun(settings=settings, tasks=TASKS, evaluator=evaluator, evaluation_tasks=TASKS[:2])
    building = run.build

    def build() -> None:
        building()
        restart = run.conductor._supervision._restart
        assert restart is not None

        async def restarted(name: str) -> None:
            if name == "evaluator":
                await asyncio.sleep(run.restart_seconds)
            else:
                await restart(name)

        run.conductor._supervision._restart = restarted

    run.build = build  # type: ignore[method-assign]
    return run


def test_an_evaluation_is_made_again_by_the_evaluators_successor() -> None:
    evaluator, calm = MortalEvaluator({0, 2}), MortalEvaluator(set())
    runs = [evaluated_run(evaluator), evaluated_run(calm)]
    for run in runs:
        run_virtual(run.run())
    assert [number for _, number in evaluator.calls] == [0, 0, 4, 4, 8, 9]
    assert [number for _, number in calm.calls] == [0, 4, 8, 9]
    curves = [[(line["version"], line["mean"]) for line in run.log.named("evaluated")] for run in runs]
    assert curves[0] == curves[1] == [(number, float(number)) for number in (0, 4, 8, 9)]
    assert [line["role"] for line in runs[0].log.named("role_lost")] == ["evaluator"] * 2 == [line["role"] for line in runs[0].log.named("role_restarted")]


def test_an_evaluator_that_always_dies_ends_the_run_with_the_cause() -> None:
    run = evaluated_run(MortalEvaluator(set(range(100))), max_restarts=2)
    with pytest.raises(WorkerLostError, match=r"evaluator was lost 3 times within 600 s .* Process evaluator was ended by signal SIGKILL"):
        run_virtual(run.run())


def test_an_evaluation_over_its_limit_is_no_loss() -> None:
    run = evaluated_run(MortalEvaluator(set(), seconds=100.0), evaluate_seconds=50)
    with pytest.raises(WaitTimeoutError, match="evaluation of version 0: no answer in 50 s"):
        run_virtual(run.run())
    assert not run.log.named("role_lost")
