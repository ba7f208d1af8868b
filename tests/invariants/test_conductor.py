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
from headrace.types import PolicyVersion, RolloutKey, Task, VerifyRequest
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
        _assert_nothing_stale(run.learner.selections, run.settings.max_staleness, but_beside_key_steps=schedule["on_expiry"] == "drop_group")


def _assert_each_reservation_ends_once(run: ScriptedRun) -> None:
    """I5, counted from the outside: members that reached the learner, failed for good, or are still out or pooled."""
    reserved = {(line["group_id"], member) for line in run.log.named("group_reserved") for member in range(line["size"])}
    trained = [member.summary.key[:2] for selection in run.learner.selections for member in selection.members]
    failed = [(line["group"], line["member"]) for line in run.log.named("rollout_failed") if not line["retried"]]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(failed)
    assert {*trained, *failed} <= reserved


def _assert_nothing_stale(selections: list[Selection], bound: int, *, but_beside_key_steps: bool) -> None:
    """Under drop_group stale unmarked tokens beside key steps, which are never dropped, reach the learner, which leaves them out."""
    for selection in selections:
        with_key_steps = {member.summary.key.group_id for member in selection.members if member.summary.num_key_steps}
        for member in selection.members:
            if but_beside_key_steps and member.summary.key.group_id in with_key_steps:
                continue
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


def verified_run(*, num_updates: int = 12, rejects: bool = True, **pool: Any) -> ScriptedRun:
    """Rollouts of many steps that last several updates; two samplers; every third verified rollout is cut somewhere."""

    def reject(request: VerifyRequest) -> int | None:
        draw = random.Random(repr((request.key, request.round)))
        if not rejects or draw.random() > 1 / 3:
            return None
        _, start, end = draw.choice(request.checked)
        return draw.randrange(start, end)

    settings = run_settings(num_updates=num_updates, max_staleness=6, num_samplers=2, pool={"verify_after": 1, **pool})
    tasks = [scripted_task(f"t{index}", answers=4, wait_seconds=0.3 * (index % 4), key_steps=[0, 2], reward=index % 2) for index in range(5)]
    return ScriptedRun(settings=settings, tasks=tasks, learn_seconds=0.8, apply_seconds=0.1, reject=reject)


def key_ages(run: ScriptedRun) -> list[tuple[int, int]]:
    """(age at take of the oldest key token, rounds) of each member."""
    return [
        (max(s.learner_version.number - count.version.number for count in m.summary.versions if count.key), m.summary.round)
        for s in run.learner.selections
        for m in s.members
    ]


@pytest.mark.parametrize("verify", ["key_steps", "all"])
def test_aged_rollouts_are_verified_before_they_are_trained(verify: str) -> None:
    """A whole run: what is trained with key tokens older than verify_after has used up its rounds; the ledger closes at each update."""
    plain, verified = verified_run(verify="off"), verified_run(verify=verify, verify_rounds=3)
    run_virtual(plain.run())
    run_virtual(verified.run())
    assert max(age for age, _ in key_ages(plain)) > 1, "without verification key tokens are older: the comparison would show nothing"
    assert all(age <= 1 or rounds >= 3 for age, rounds in key_ages(verified))
    assert sum(rounds > 0 for _, rounds in key_ages(verified)) > 5
    back = verified.log.named("rollout_verified")
    assert sum(line["rollouts"] for line in verified.log.named("verification_asked")) >= len(back) > 5
    ledger = verified.log.named("ledger")[-1]["ledger"]
    refreshed = sum(line["refreshed"] for line in back)
    assert ledger["closes"] and 0 < ledger["tokens"]["skipped"]["refreshed"] <= refreshed
    assert not plain.log.named("verification_asked")
    in_batches = {key for _, members in batches(verified) for key in (m[0] for m in members)}
    for sampler in verified.samplers:  # what left the pool is forgotten
        kept = [key for key in in_batches if sampler.can_verify(key)]
        assert len(kept) <= verified.settings.batch_trajectories


def test_verification_does_not_hold_up_a_run_whose_rollouts_are_never_old() -> None:
    run = verified_run(verify="all", verify_after=50)
    run_virtual(run.run())
    plain = verified_run(verify="off")
    run_virtual(plain.run())
    assert batches(run) == batches(plain)
    assert not run.log.named("rollout_verified")


def test_rollouts_that_cannot_be_checked_are_trained_as_old_as_they_are() -> None:
    def fail(request: VerifyRequest) -> int | None:
        raise RuntimeError("the old distribution is gone")

    run = verified_run(verify="key_steps")
    run.reject = fail
    run_virtual(run.run())
    assert {rounds for _, rounds in key_ages(run)} == {0, run.settings.pool.verify_rounds}


def test_a_verification_that_never_comes_back_holds_up_only_its_own_group() -> None:
    """A worker that loses what it was asked: the others are served, in the end only as many as are never old; nothing is lost silently."""
    run = verified_run(num_updates=40, verify="key_steps", verify_after=0)
    asked: list[RolloutKey] = []

    async def lose(keys: Any) -> None:
        asked.extend(keys)

    building = run.build

    def build() -> None:
        building()
        for worker in run.workers:
            worker.verify = lose  # type: ignore[method-assign]

    run.build = build  # type: ignore[method-assign]
    run_virtual(run.run())
    assert asked and len(run.learner.selections) == 40
    assert not {m.summary.key for s in run.learner.selections for m in s.members} & set(asked)
    assert run.log.named("ledger")[-1]["ledger"]["trajectories"]["in_flight"] >= len(asked)


def test_with_a_quorum_late_members_are_trained_in_later_batches_against_everybody() -> None:
    """Three decode slots for groups of four: members come back one after another."""
    released = {}
    for quorum in (None, 2):
        settings = run_settings(num_updates=20, groups=2, group_size=4, max_staleness=4, pool={"quorum": quorum})
        run = ScriptedRun(settings=settings, tasks=mixed_tasks(3), learn_seconds=0.2, max_running=3)
        run_virtual(run.run())
        assert all(len(s.members) == 8 for s in run.learner.selections)
        released[quorum] = [(m.summary.key[:2], len(s.group_rewards.get(m.summary.key.group_id, ()))) for s in run.learner.selections for m in s.members]
    assert {known for _, known in released[None]} == {0}, "whole groups need no rewards beside them"
    known: dict[int, list[int]] = {}
    for (group_id, _), number in released[2]:
        known.setdefault(group_id, []).append(number)
    pieces = [numbers for numbers in known.values() if any(numbers)]
    assert len(pieces) > 2 and all(numbers == sorted(numbers) and min(numbers) >= 2 for numbers in pieces), "more are known with each later piece"
    assert len({key for key, _ in released[2]}) == len(released[2])


def test_pace_says_what_it_does_and_what_it_costs() -> None:
    run = verified_run(num_updates=40, verify="off", pace_key_steps=True, max_key_staleness=0)
    run_virtual(run.run())
    judged = run.log.named("paced")
    assert judged[0]["limit_groups"] < judged[0]["max_groups"] and judged[0]["over_share"] > 0.05
    assert judged[-1]["wait_seconds"] > 0
    plain = verified_run(num_updates=40, verify="off", max_key_staleness=0)
    run_virtual(plain.run())
    over = [each.log.named("ledger")[-1]["ledger"]["key_steps"]["over_bound"] for each in (run, plain)]
    assert over[0] < over[1]


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
