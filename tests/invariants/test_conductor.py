"""The conductor over scripted roles and the virtual clock: synchronous = asynchronous at bound 0, and the invariants of DESIGN
section 10 that a whole run can show."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fakes.rollouts import scripted_task
from fakes.runs import CycledTasks, ScriptedRun, run_settings, version_numbers
from headrace import clock
from headrace.clock import run_virtual
from headrace.errors import NoProgressError, WaitTimeoutError
from headrace.types import PolicyVersion, RolloutKey, Task
from headrace.updates import Selection


def mixed_tasks(seed: int, count: int = 7, *, failing: float = 0.0) -> list[Task]:
    draw = random.Random(seed)
    return [
        scripted_task(
            f"task-{index}",
            answers=draw.randint(1, 5),
            wait_seconds=draw.choice([0.0, 0.1, 2.0, 9.0]),
            reward=draw.choice([0.0, 1.0]),
            key_steps=[0] if draw.random() < 0.5 else [],
            action_tokens=[draw.randint(1, 6)],
            fail_at=draw.randint(-1, 0) if draw.random() < failing else None,
        )
        for index in range(count)
    ]


def batches(run: ScriptedRun) -> list[tuple[int, list[tuple[RolloutKey, str, float, tuple[Any, ...]]]]]:
    """What the learner was given: version, and of each member its key, task, reward and the versions of its tokens."""
    return [
        (
            selection.learner_version.number,
            [(m.summary.key, m.summary.task_id, m.summary.reward, m.summary.versions) for m in selection.members],
        )
        for selection in run.learner.selections
    ]


def payloads(run: ScriptedRun) -> list[list[bytes]]:
    """Tokens and log-probabilities, byte for byte, without the times in the header."""
    from headrace.types import Trajectory

    return [
        [repr((t.tokens, t.sampler_logprobs, t.steps)).encode() for t in (Trajectory.from_bytes(member.payload) for member in selection.members)]
        for selection in run.learner.selections
    ]


def plain_synchronous_run(tasks: list[Task], *, num_updates: int, groups: int, group_size: int) -> list[tuple[int, list[RolloutKey], list[str]]]:
    """The textbook loop, written without conductor, pool or clock: sample a batch with the newest weights, learn, repeat."""
    source, group_id, result = CycledTasks(tasks), 0, []
    for version in range(num_updates):
        keys, ids = [], []
        for _ in range(groups):
            task = source.next()
            keys += [RolloutKey(group_id, member, 0) for member in range(group_size)]
            ids += [task.id] * group_size
            group_id += 1
        result.append((version, keys, ids))
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_samplers", [1, 3])
def test_synchronous_equals_asynchronous_at_bound_zero_and_the_textbook_loop(seed: int, num_samplers: int) -> None:
    tasks = mixed_tasks(seed)
    runs = {}
    for mode in ("sync", "async"):
        run = ScriptedRun(settings=run_settings(mode=mode, max_staleness=0, num_samplers=num_samplers), tasks=tasks, publish_seconds=0.3, apply_seconds=0.2)
        run_virtual(run.run())
        runs[mode] = run
    assert batches(runs["sync"]) == batches(runs["async"])
    assert payloads(runs["sync"]) == payloads(runs["async"])
    assert runs["sync"].log.lines == runs["async"].log.lines  # event for event, times included
    plain = plain_synchronous_run(tasks, num_updates=6, groups=2, group_size=2)
    assert [(version, [m[0] for m in members], [m[1] for m in members]) for version, members in batches(runs["sync"])] == plain
    for version, members in batches(runs["sync"]):
        assert all([count.version.number for count in m[3]] == [version] for m in members), "a synchronous batch has one version, the learner's"


def test_asynchronous_work_overlaps_and_synchronous_does_not() -> None:
    """The comparison above would be empty if async at bound 2 did the same: it must not."""
    tasks = mixed_tasks(1)
    seconds, ages = {}, {}
    for staleness in (0, 2):
        run = ScriptedRun(settings=run_settings(max_staleness=staleness, num_updates=12, pool={"selection": "oldest_first"}), tasks=tasks, learn_seconds=3.0)

        async def timed(run: ScriptedRun = run) -> float:
            await run.run()
            return clock.now()

        seconds[staleness] = run_virtual(timed())
        ages[staleness] = max(version - count.version.number for version, members in batches(run) for m in members for count in m[3])
    assert seconds[2] < 0.8 * seconds[0]
    assert ages[0] == 0 < ages[2] <= 2


def test_slot_is_freed_only_after_weights_are_applied() -> None:
    """At bound 0 no rollout starts between an update's publication and the last sampler's acknowledgement."""
    run = ScriptedRun(settings=run_settings(max_staleness=0, num_samplers=2), apply_seconds=5.0, tasks=mixed_tasks(3))
    run_virtual(run.run())
    applied = [line["time"] for line in run.log.named("weights_applied")]
    published = [line["time"] for line in run.log.named("weights_published")][1:]
    assert len(applied) == 2 * len(published) >= 10
    for time in published[:-1]:
        acknowledged = max(t for t in applied if t <= time + 5.01)
        assert not [key for start, key in run.started if time < start < acknowledged - 0.001]


def test_max_staleness_zero_with_slow_weight_updates_runs_without_deadlock() -> None:
    """Case 5."""
    run = ScriptedRun(settings=run_settings(max_staleness=0), publish_seconds=40.0, apply_seconds=30.0, tasks=mixed_tasks(2))
    run_virtual(run.run())
    assert version_numbers(run.learner.published) == list(range(7))


def test_after_a_pause_the_running_batch_is_full_again_at_once() -> None:
    """Case 8: when a retirement frees the whole admission, all of it starts in the same instant."""
    run = ScriptedRun(settings=run_settings(max_staleness=0, groups=6, group_size=4), tasks=mixed_tasks(5))
    run_virtual(run.run())
    at_once = Counter(round(time, 6) for time, _ in run.started)
    assert set(at_once.values()) == {24}


schedules = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "mode": st.sampled_from(["sync", "async"]),
        "selection": st.sampled_from(["oldest_first", "ready_first"]),
        "on_expiry": st.sampled_from(["skip_tokens", "drop_group", "wait"]),
        "no_signal": st.sampled_from(["filter", "refill", "train"]),
        "max_staleness": st.integers(1, 4),
        "num_samplers": st.integers(1, 3),
        "num_minibatches": st.integers(1, 2),
        "learn_seconds": st.sampled_from([0.01, 1.0, 7.0]),
        "max_running": st.sampled_from([1, 3, 64]),
        "failing": st.sampled_from([0.0, 0.3]),
        "refusing": st.booleans(),
    }
)


def scheduled_run(schedule: dict[str, Any]) -> ScriptedRun:
    # one task never fails and one group in two carries signal, so that every rule has something to serve
    tasks = [*mixed_tasks(schedule["seed"], failing=schedule["failing"]), scripted_task("sure", reward=1.0, action_tokens=[2])]
    return ScriptedRun(
        settings=run_settings(
            mode=schedule["mode"],
            num_updates=8,
            max_staleness=schedule["max_staleness"],
            num_samplers=schedule["num_samplers"],
            pool={key: schedule[key] for key in ("selection", "on_expiry")} | {"no_signal": "train"},
            learner={"num_minibatches": schedule["num_minibatches"]},
        ),
        tasks=tasks,
        learn_seconds=schedule["learn_seconds"],
        max_running=schedule["max_running"],
        refuse=(lambda selection_id: selection_id % 3 == 1) if schedule["refusing"] else (lambda selection_id: False),
    )


@given(schedule=schedules)
@hypothesis_settings(max_examples=60, deadline=None)
def test_invariants_hold_over_random_schedules(schedule: dict[str, Any]) -> None:
    run = scheduled_run(schedule)
    run_virtual(run.run())
    numbers = version_numbers(run.learner.published)
    assert numbers == sorted(set(numbers)), "I1: published versions rise strictly"
    for name in {line["role"] for line in run.log.named("weights_applied")}:
        applied = [line["version"] for line in run.log.named("weights_applied") if line["role"] == name]
        assert applied == sorted(applied), "I1: a sampler's version never falls"
    assert run.log.named("ledger"), "the ledger is written at every update"
    assert all(line["ledger"]["closes"] for line in run.log.named("ledger")), "I7"
    assert len(run.log.named("ledger")) == len(run.log.named("updated"))
    _assert_each_reservation_ends_once(run)
    if schedule["on_expiry"] != "skip_tokens":
        _assert_nothing_stale(run.learner.selections, run.settings.max_staleness)


def _assert_each_reservation_ends_once(run: ScriptedRun) -> None:
    """I5, counted from the outside: members that reached the learner, failed for good, or are still out or pooled."""
    reserved = {(line["group_id"], member) for line in run.log.named("group_reserved") for member in range(line["size"])}
    trained = [member.summary.key[:2] for selection in run.learner.selections for member in selection.members]
    failed = [(line["group"], line["member"]) for line in run.log.named("rollout_failed") if not line["retried"]]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(failed)
    assert {*trained, *failed} <= reserved


def _assert_nothing_stale(selections: list[Selection], bound: int) -> None:
    for selection in selections:
        for member in selection.members:
            for count in member.summary.versions:
                assert count.unmarked == 0 or selection.learner_version.number - count.version.number <= bound, "I6"


@given(schedule=schedules)
@hypothesis_settings(max_examples=15, deadline=None)
def test_the_same_seed_gives_the_same_events_twice(schedule: dict[str, Any]) -> None:
    """I11."""
    lines = []
    for _ in range(2):
        run = scheduled_run(schedule)
        run_virtual(run.run())
        lines.append(run.log.lines)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 20


def test_watchers_change_no_event_and_a_broken_one_breaks_no_run() -> None:
    """I14."""

    def breaks(line: dict[str, Any]) -> None:
        raise RuntimeError("a broken view")

    seen: list[dict[str, Any]] = []
    plain = ScriptedRun(settings=run_settings(), tasks=mixed_tasks(4))
    run_virtual(plain.run())
    watched = ScriptedRun(settings=run_settings(), tasks=mixed_tasks(4))

    async def run_watched() -> None:
        building = watched.build

        def build() -> None:
            building()
            watched.log.subscribe(breaks)
            watched.log.subscribe(seen.append)

        watched.build = build  # type: ignore[method-assign]
        await watched.run()

    run_virtual(run_watched())
    assert plain.log.lines == watched.log.lines == seen


@pytest.mark.parametrize("moment", [0.0, 0.01, 0.3, 1.0, 1.7, 2.51, 4.0, 7.9])
def test_a_cancelled_run_ends_cleanly_in_any_phase(moment: float) -> None:
    """Case 7, on an environment that answers at once: no task is left, whatever it waited for."""
    run = ScriptedRun(settings=run_settings(num_updates=1000), publish_seconds=0.2, apply_seconds=0.1)

    async def cut() -> set[asyncio.Task[Any]]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(moment):
                await run.run()
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert run_virtual(cut()) == set()


def test_a_sampler_that_never_takes_up_weights_is_named_after_the_limit() -> None:
    run = ScriptedRun(settings=run_settings(max_staleness=0, num_samplers=2, limits={"apply_seconds": 7}), applies=False)
    with pytest.raises(WaitTimeoutError, match="sampler-0, sampler-1 to take up version 1: no answer in 7 s"):
        run_virtual(run.run())


def test_a_learner_that_hangs_is_named_after_the_limit() -> None:
    run = ScriptedRun(settings=run_settings(limits={"learn_seconds": 50}), learn_seconds=1e6)
    with pytest.raises(WaitTimeoutError, match="learner to learn a batch: no answer in 50 s"):
        run_virtual(run.run())


def test_an_environment_that_never_answers_names_who_waits_for_whom() -> None:
    settings = run_settings(limits={"batch_seconds": 60}, rollout={"max_environment_seconds": 1e4, "max_seconds": 1e5})
    run = ScriptedRun(settings=settings, tasks=[scripted_task("stuck", hang_at=0)])
    with pytest.raises(WaitTimeoutError, match=r"learner waits for a batch: .*stuck.*environment"):
        run_virtual(run.run())


def test_tasks_that_always_fail_end_the_run_with_the_task_named() -> None:
    run = ScriptedRun(settings=run_settings(run={"max_failed_rollouts_in_a_row": 10}), tasks=[scripted_task("broken", fail_at=0)])
    with pytest.raises(NoProgressError, match=r"task 'broken': environment_error: .*scripted failure"):
        run_virtual(run.run())


def test_one_task_that_always_fails_leaves_the_others_going() -> None:
    """Cases 4 and 14: the run finishes, the task is named with its error, attempts are bounded, its groups leave."""
    run = ScriptedRun(settings=run_settings(), tasks=[scripted_task("broken", fail_at=0), scripted_task("fine", reward=1.0)])
    run_virtual(run.run())
    failures = run.log.named("rollout_failed")
    assert {line["task_id"] for line in failures} == {"broken"}
    assert max(line["attempt"] for line in failures) == run.settings.rollout.max_attempts - 1
    assert {m[1] for _, members in batches(run) for m in members} == {"fine"}


def test_batches_without_signal_end_the_run_with_a_reason() -> None:
    run = ScriptedRun(settings=run_settings(pool={"no_signal": "filter"}, run={"max_empty_batches": 3}))
    with pytest.raises(NoProgressError, match="3 batches in a row"):
        run_virtual(run.run())
    assert not run.learner.selections


def test_refused_updates_raise_no_version_and_end_the_run_when_they_repeat() -> None:
    run = ScriptedRun(settings=run_settings(learner={"max_refused_updates": 3}), refuse=lambda selection_id: selection_id >= 2)
    with pytest.raises(Exception, match="3 updates in a row were refused: scripted"):
        run_virtual(run.run())
    assert version_numbers(run.learner.published) == [0, 1, 2]


def test_marks_change_no_token_log_probability_or_version() -> None:
    """I10."""
    runs = []
    for marks in ([], [0, 1, 2]):
        tasks = [scripted_task(f"t{index}", answers=3, wait_seconds=0.4 * index, key_steps=marks, reward=index % 2) for index in range(4)]
        run = ScriptedRun(settings=run_settings(num_samplers=2), tasks=tasks)
        run_virtual(run.run())
        runs.append(run)
    from headrace.types import Trajectory

    def drawn(run: ScriptedRun) -> list[Any]:
        trajectories = [Trajectory.from_bytes(m.payload) for s in run.learner.selections for m in s.members]
        return [(t.key, t.tokens, t.sampler_logprobs, [step.version_spans for step in t.steps]) for t in trajectories]

    assert drawn(runs[0]) == drawn(runs[1])
    assert sum(step.key_weight for s in runs[0].learner.selections for m in s.members for step in Trajectory.from_bytes(m.payload).steps) == 0
    assert any(m.summary.num_key_steps for s in runs[1].learner.selections for m in s.members)


class PinnedEvaluator:
    """Evaluates slowly; notes what was asked and what it had pinned."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.calls: deque[tuple[PolicyVersion, int]] = deque()

    async def evaluate(self, version: PolicyVersion, requests: Any, tasks: Any) -> Any:
        from headrace.rollout.evaluation import EvaluationRecord

        self.calls.append((version, len(requests)))
        await asyncio.sleep(self.seconds)
        return EvaluationRecord(version=version, finished=(), metrics={"score": float(version.number)})


def test_evaluation_runs_beside_training_and_changes_nothing_in_it() -> None:
    """Case 17."""
    runs = []
    for every in (0, 2):
        settings = run_settings(num_updates=9, evaluation={"every_updates": every, "metric": "score"})
        evaluator = PinnedEvaluator(2.5)
        run = ScriptedRun(settings=settings, tasks=mixed_tasks(6), evaluator=evaluator, evaluation_tasks=mixed_tasks(8, 3))
        run_virtual(run.run())
        runs.append(run)
    assert batches(runs[0]) == batches(runs[1])
    curve = [(line["version"], line["mean"]) for line in runs[1].log.named("evaluated")]
    assert len(curve) > len(runs[0].log.named("evaluated")) == 2
    assert all(version == mean for version, mean in curve)
    assert curve[0][0] == 0
    assert curve[-1][0] == 9
