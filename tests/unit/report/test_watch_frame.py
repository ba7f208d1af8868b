"""The frames of headrace watch and the advice in them: made runs whose numbers are known, every phase, every width."""

from __future__ import annotations

import random
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from fakes.made_events import active, evaluated, lines_of, run_started, statistics, taken, updated, window
from fakes.report_runs import verified
from fakes.rollouts import scripted_task
from fakes.runs import ScriptedRun, run_settings
from headrace import events as ev
from headrace.clock import run_virtual
from headrace.report.advice import advice
from headrace.report.summary import summarize
from headrace.report.watch import RECENT_SECONDS, Curve, WatchState, frame, sparkline

SPLIT = [
    {"name": "sampler-0", "role": "sampler", "capacity": 8, "saturated_tokens_per_second": 5000.0},
    {"name": "learner-0", "role": "learner", "capacity": 1},
]


def picture(lines: list[dict[str, Any]], **options: Any) -> str:
    width = options.pop("width", 80)
    state = WatchState(options.pop("settings", None))
    for line in lines:
        state.add(line)
    stream = StringIO()
    Console(file=stream, width=width).print(frame(state, name="door-1", width=width, **options))
    return stream.getvalue()


def levels(**changes: Any) -> ev.PoolLevels:
    values: dict[str, Any] = {
        "max_groups": 20, "outstanding_groups": 12, "waiting_groups": 7, "ready_groups": 3, "taken_groups": 2, "rollouts_in_flight": 64,
        "pooled_trajectories": 30, "pooled_tokens": 900, "staleness_mean": 1.5, "staleness_max": 4, "delivered_per_second": 9.0,
        "retired_per_second": 8.0, "waits": [("learner waits for a batch: 3 of 8 groups ready", 4.0)],
    }  # fmt: skip
    return ev.PoolLevels(**{**values, **changes})


def going_run(*, samplers: str = "busy", updates: int = 4) -> list[dict[str, Any]]:
    """10 s an update; the learner works 2 s of them and waits 8 s for the batch."""
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT, num_updates=10)), (2.0, evaluated(0, 0.2)), (5.0, window("start"))]
    reason = {"busy": {}, "environment": {"environment": 6.0}, "admission": {"admission": 6.0}}[samplers]
    for version in range(1, updates + 1):
        end = 5.0 + 10.0 * version
        timed += [
            (end - 2.0, taken(version, 8.0)),
            (end, updated(version, seconds=2.0, busy=2.0, reward=version / 10, numbers=statistics({1: 30, 3: 10}, key_mean=1.0, key_max=2))),
            (end, active("sampler-0", 10.0, running={8: 10.0 - sum(reason.values())}, idle=reason, tokens=1000)),
            (end, levels()),
        ]
    return lines_of(timed)


def run_finished(status: str, *, error: dict[str, Any] | None = None, time: float = 45.0) -> dict[str, Any]:
    return {**lines_of([(0.0, ev.RunFinished(status=status, error=error, version=4, lineage=0))])[0], "time": time}


def test_frame_shows_progress_pace_curves_staleness_devices_and_waits() -> None:
    text = picture(going_run())
    for shown in (
        "door-1  door async split seed 3",
        "running · 40 s",
        "4/10 updates, 1 min 00 s to go",
        "0.400  ▁▃▆█",
        "0.200",
        "mean 1.50, max 3 updates; key steps 1.00, max 2",
        "100 sampled, 4 trained; full samplers make 5,000",
        "sampler-0",
        "100%  100%",
        "batch 80%",
        "learner waits for a batch: 3 of 8 groups ready (4 s)",
        "12 of 20 groups out: 7 waiting, 3 ready, 2 with the learner",
    ):
        assert shown in text, shown


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    run = ScriptedRun(
        settings=run_settings(num_updates=12, num_samplers=3),
        tasks=[scripted_task("a task with a rather long name " * 4, answers=3, wait_seconds=4.0, reward=1.0), scripted_task("broken", fail_at=0)],
    )
    run_virtual(run.run())
    devices = [{"name": f"sampler-{index}", "role": "sampler", "capacity": 8} for index in range(3)]
    lines = [*lines_of([(0.0, run_started(devices))]), *run.log.lines]
    for end in (1, 5, len(lines) // 2, len(lines)):
        text = picture(lines[:end], width=width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "a task with" in text or end < len(lines) // 2


def test_any_beginning_of_a_run_has_a_frame() -> None:
    lines = [*going_run(), run_finished("done")]
    for end in range(len(lines) + 1):
        assert picture(lines[:end]).startswith("door-1")


def test_run_without_events_is_said_to_be_starting() -> None:
    assert "starting: the roles are not up yet" in picture([])


@pytest.mark.parametrize("status", ["done", "failed", "interrupted"])
def test_finished_run_says_how_it_ended_and_shows_no_wait(status: str) -> None:
    error = {"kind": "NoProgressError", "message": "64 rollouts in a row failed", "remedy": "Mend it."} if status == "failed" else None
    lines = [*going_run(), run_finished(status, error=error)]
    text = picture(lines, silent_seconds=1e6)
    assert f"{status} · 40 s" in text
    assert "waits" not in text
    assert "to go" not in text
    assert ("NoProgressError: 64 rollouts in a row failed Mend it." in text) is (status == "failed")


def test_run_that_is_silent_and_has_not_ended_may_have_been_killed() -> None:
    assert "no event for 45 s" in picture(going_run(), silent_seconds=45.0)
    assert "no event" not in picture(going_run(), silent_seconds=5.0)


def test_devices_are_judged_by_the_last_minute_while_the_run_goes_and_by_all_of_it_afterwards() -> None:
    """200 s idle for environments, then busy: the stretch of the last minute is what matters now."""
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    timed += [(float(second), active("sampler-0", 1.0, running={}, idle={"environment": 1.0})) for second in range(1, 201)]
    timed += [(float(second), active("sampler-0", 1.0, running={8: 1.0})) for second in range(201, 201 + int(RECENT_SECONDS))]
    state = WatchState()
    for line in lines_of(timed):
        state.add(line)
    assert state.recent_utilization()["devices"][0]["busy_fraction"] == pytest.approx(1.0, abs=0.02)
    assert state.summary.result()["utilization"]["devices"][0]["busy_fraction"] == pytest.approx(0.23, abs=0.01)
    state.add(run_finished("done", time=261.0))
    assert state.recent_utilization() == state.summary.result()["utilization"]


def test_memory_of_the_state_does_not_grow_with_the_run() -> None:
    """I15 for watchers: an hour of events each second."""
    state = WatchState()
    for line in lines_of([(0.0, run_started(SPLIT, num_updates=10_000)), (0.0, window("start"))]):
        state.add(line)
    line = lines_of([(0.0, active("sampler-0", 1.0, running={8: 1.0})), (0.0, updated(1, numbers=statistics({0: 1})))])
    for second in range(1, 3600):
        state.add({**line[0], "time": float(second)})
        state.add({**line[1], "time": float(second), "version": second})
    assert len(state._recent) <= 2 * (RECENT_SECONDS + 1)
    assert len(state.rewards.values) <= 512
    left = state.finish()
    assert left is not None and left.seconds == pytest.approx(10_000 - 3599)


def test_promised_and_expected_finish_stand_beside_each_other_and_a_late_run_is_warned_of() -> None:
    lines = going_run()
    start = next(line["time"] for line in lines if line["event"] == "timed_window")
    pace = (max(line["time"] for line in lines if line["event"] == "updated") - start) / 4
    half = dict.fromkeys(("p10", "p50", "p90"), 0.5 * pace * lines[0]["num_updates"])
    promised = {"by": "plan.json, rank 1", "finish_seconds": half, "step_seconds": pace / 2, "staleness_mean": 1.0, "occupancy": 0.9, "busy_fraction": 0.9}
    text = picture([{**lines[0], "promised": promised}, *lines[1:]], width=200)
    assert "promised    by plan.json, rank 1: " in text and "; staleness 1.00, is " in text and "; occupancy 90%, is " in text
    assert "later than plan.json, rank 1 promised" in text
    assert "promised" not in picture(lines, width=200)


def test_slowest_rollouts_are_shown_with_what_they_wait_for() -> None:
    work = active("sampler-0", 1.0, running={8: 1.0})
    slow = ev.WorkerActive(
        role="sampler-0", in_flight=3, activity=work.activity, longest_wait="group 4 member 1, step 2 of task find: waits 41 s for environment"
    )
    text = picture(lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, slow)]), width=120)
    assert "slowest     sampler-0: group 4 member 1, step 2 of task find: waits 41 s for environment" in text


@pytest.mark.parametrize(
    ("samplers", "settings", "words"),
    [
        ("busy", {}, "learner idle 80%: samplers are the bottleneck; try run.num_samplers=2 where another core or GPU is free"),
        (
            "environment",
            {"pool": {"max_staleness": 8}},
            "all rollouts wait for their environments; more in flight would fill it: try pool.max_staleness=16 (now 8)",
        ),
        ("environment", {"sampler": {"max_in_flight": 64}}, "try sampler.max_in_flight=128 (now 64)"),
        ("environment", {}, "try a higher pool.max_staleness"),
        ("admission", {"pool": {"max_staleness": 0}}, "admission lets no more rollouts start; try pool.max_staleness=1 (now 0)"),
    ],
)
def test_warning_names_the_bottleneck_and_the_setting_that_moves_it(samplers: str, settings: dict[str, Any], words: str) -> None:
    text = " ".join(picture(going_run(samplers=samplers), settings=settings, width=200).split())
    assert words in text


def python_run(*, waits: float, idle: dict[str, float]) -> str:
    """10 s, of which the learner waits so many for a batch."""
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start")), (waits, taken(1, waits))]
    timed += [(10.0, updated(1, seconds=10.0 - waits, busy=10.0 - waits)), (10.0, active("sampler-0", 10.0, running={8: 10.0 - sum(idle.values())}, idle=idle))]
    return " ".join(picture(lines_of(timed), width=200).split())


def test_a_sampler_that_is_in_python_is_told_apart_from_one_that_waits_for_environments() -> None:
    text = python_run(waits=6.0, idle={"rollouts": 3.0, "bookkeeping": 1.5, "environment": 3.5})
    assert "samplers are 45% in Python: 30% of rollouts, 15% around the model's steps; try run.num_samplers=2 where" in text
    assert "another core or GPU is free, the learner could take 2.5 x as much" in text
    assert "environments" not in text and "learner idle" not in text
    assert "wait for their environments" in python_run(waits=6.0, idle={"rollouts": 2.0, "bookkeeping": 1.5, "environment": 4.0})


def test_python_of_samplers_that_hold_nobody_up_is_not_warned_of() -> None:
    assert "in Python" not in python_run(waits=0.5, idle={"rollouts": 4.0, "bookkeeping": 1.0})


def test_learner_that_is_the_bottleneck_is_named() -> None:
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    timed += [(10.0, updated(1, seconds=10.0, busy=9.5)), (10.0, active("sampler-0", 10.0, running={8: 4.0}, idle={"admission": 6.0}))]
    assert "samplers idle 60%: the learner is the bottleneck; try run.num_learner_ranks=2" in picture(lines_of(timed), width=200)


def test_data_that_ages_in_the_pool_although_the_learner_never_waits_is_said_to_be_needlessly_old() -> None:
    def text(waits: float, age: int) -> str:
        timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start")), (waits, taken(1, waits))]
        timed += [(10.0, updated(1, seconds=10.0 - waits, busy=10.0 - waits, numbers=statistics({age: 9})))]
        timed += [(10.0, active("sampler-0", 10.0, running={8: 9.5}, idle={"gather": 0.5}))]
        return picture(lines_of(timed), settings={"pool": {"max_staleness": 8}}, width=200)

    assert "what it trains is 6.0 updates old: pool.max_staleness=4 (now 8) gives fresher data at about the same pace" in text(waits=0.2, age=6)
    assert "outrun" not in text(waits=3.0, age=6), "the learner waits: samplers are the slower ones"
    assert "outrun" not in text(waits=0.2, age=3), "it is not the bound that lets data age"


def test_synchronous_run_that_waits_in_turn_is_told_of_async() -> None:
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT, mode="sync")), (0.0, window("start"))]
    timed += [(10.0, updated(1, seconds=5.0, busy=5.0)), (10.0, active("sampler-0", 10.0, running={4: 5.0}, idle={"admission": 5.0}))]
    assert "try run.mode=async" in picture(lines_of(timed), width=200)


def test_few_sequences_at_once_are_told_apart_from_idleness() -> None:
    timed: list[tuple[float, Any]] = [
        (0.0, run_started(SPLIT)),
        (0.0, window("start")),
        (10.0, active("sampler-0", 10.0, running={1: 9.5}, idle={"gather": 0.5})),
    ]
    text = picture(lines_of(timed), settings={"pool": {"max_staleness": 4}}, width=200)
    assert "sampler-0 decodes 95% of its time and is filled 12%: few sequences run at once; try pool.max_staleness=8 (now 4)" in text


def test_run_without_a_fault_gets_no_advice() -> None:
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    timed += [
        (10.0, taken(1, 1.0)),
        (10.0, updated(1, seconds=9.0, busy=8.8, numbers=statistics({0: 9}))),
        (10.0, active("sampler-0", 10.0, running={8: 9.5}, idle={"gather": 0.5})),
    ]
    assert "!" not in picture(lines_of(timed))


def key_step_run(*, over: int = 12, refreshed: int = 4, unkept: int = 0, verify_seconds: float = 1.0, paced: bool = True) -> list[dict[str, Any]]:
    """100 key steps trained of 130 offered; 3 of 8 asked rollouts are back, one of them cut."""
    steps = {"offered": 130, "trained": 100, "over_bound": over, "skipped": {"filtered": 20, "refreshed": 6}, "failed": {"worker_lost": 1}, "pooled": 3}
    work = active("sampler-0", 10.0, running={8: 10.0}, tokens=1000, verify_seconds=verify_seconds, num_unkept=unkept, num_parked=5, applied_updates=2,
                  apply_delay_seconds=0.6)  # fmt: skip
    timed: list[tuple[float, Any]] = [(0.0, run_started(SPLIT)), (0.0, window("start"))]
    if refreshed:
        timed.append((1.0, ev.VerificationAsked(role="sampler-0", rollouts=8)))
        timed += [(2.0, verified(1, member, "short", refreshed=each)) for member, each in enumerate((0, refreshed, 0))]
    if paced:
        timed.append((3.0, ev.Paced(limit_groups=6, max_groups=20, over_share=0.2, reason="r", wait_seconds=7.4)))
    timed += [
        (10.0, work),
        (10.0, updated(1, seconds=9.0, busy=9.0, numbers=statistics({1: 9}, keys={1: 3}))),
        (10.0, ev.LedgerClosed(ledger=ledger_of(steps))),
    ]
    return lines_of(timed)


def ledger_of(key_steps: dict[str, Any]) -> dict[str, Any]:
    return {"closes": True, "tokens": {"generated": 10, "skipped": {}, "expired": 0}, "trajectories": {"generated": 9, "filtered": 0}, "key_steps": key_steps}


def test_key_steps_verification_pace_late_weights_and_parking_have_a_line_each() -> None:
    text = picture(key_step_run(), width=120)
    for shown in (
        "key steps   100 of 130 trained, 12% of them over the bound; 20 filtered, 6 refreshed, 1 worker lost",
        "verified    3 rollouts, 33% of them cut; 4 tokens cut off; 1.0 s of checks; 5 out now",
        "pace        6 of 20 groups may be out; waited 7 s for it",
        "weights     taken up 0.30 s after they arrived, on average",
        "parked      5 times a long rollout gave its slot to short work",
    ):
        assert shown in text, shown
    assert "out now" not in picture([*key_step_run(), run_finished("done")], width=120)
    assert max(map(len, picture(key_step_run()).splitlines())) <= 80


def test_run_without_key_steps_has_none_of_these_lines() -> None:
    text = picture(going_run())
    assert not any(line.startswith(label) for line in text.splitlines() for label in ("key steps", "verified", "pace", "weights", "parked"))


@pytest.mark.parametrize(
    ("changes", "pool", "words"),
    [
        ({"refreshed": 0, "paced": False}, {"max_key_staleness": 2}, "older than 2 updates: try pool.verify=key_steps or pool.pace_key_steps=true"),
        ({"refreshed": 0}, {"max_key_staleness": 2}, "older than 2 updates: try pool.verify=key_steps"),
        ({"paced": False}, {}, "older than pool.max_key_staleness: try pool.pace_key_steps=true"),
        ({}, {}, "older than pool.max_key_staleness: try a lower pool.max_staleness"),
    ],
)
def test_key_steps_trained_too_old_are_warned_of_with_what_is_not_tried_yet(changes: dict[str, Any], pool: dict[str, Any], words: str) -> None:
    summary = summarize(key_step_run(**changes))
    (found,) = [text for text in advice(summary, summary["utilization"], settings={"pool": pool}) if "key steps" in text]
    assert found == f"12% of the key steps are trained {words}"
    summary = summarize(key_step_run(over=5, **changes))
    assert not any("key steps" in text for text in advice(summary, summary["utilization"]))


def test_rollouts_that_could_not_be_kept_for_verification_are_warned_of() -> None:
    settings = {"sampler": {"verify_memory_bytes": 1000}}
    text = " ".join(picture(key_step_run(unkept=3), settings=settings, width=200).split())
    assert "3 rollouts could not be verified, their distributions did not fit: try sampler.verify_memory_bytes=2000 (now 1000)" in text
    assert "could not be verified" not in picture(key_step_run(), settings=settings, width=200)


def test_verification_that_takes_much_of_the_samplers_time_is_warned_of() -> None:
    settings = {"pool": {"verify_after": 1}}
    assert "verification takes 40% of the samplers' busy time: try pool.verify_after=2 (now 1)" in picture(
        key_step_run(verify_seconds=4.0), settings=settings, width=200
    )
    assert "verification takes" not in picture(key_step_run(verify_seconds=2.0), settings=settings, width=200)


def test_caches_that_give_way_are_warned_of_with_the_memory_that_would_hold_them() -> None:
    def found(evicted: int, settings: dict[str, Any]) -> list[str]:
        work = active("sampler-0", 10.0, running={8: 10.0}, prefill_tokens=1000, recomputed_tokens=900, evicted_tokens=evicted, kv_slots=64, in_flight=300)
        lines = lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (10.0, work)])
        return [text for text in advice(summarize(lines), summarize(lines)["utilization"], settings=settings) if "computed again" in text]

    settings = {"sampler": {"kv_memory_bytes": 64 * 2**20}}
    assert found(250, settings) == [], "recomputed for other reasons"
    says = "60% of the computed context tokens are computed again, as the caches of waiting rollouts gave way: try"
    assert found(600, settings) == [f"{says} sampler.kv_memory_bytes={300 * 2**20} (now {64 * 2**20}), which holds the 300 rollouts in flight"]
    assert found(600, {}) == [f"{says} a higher sampler.kv_memory_bytes"]


def test_stale_filtered_and_failed_shares_are_warned_of() -> None:
    ledger = {
        "closes": True,
        "tokens": {"generated": 1000, "skipped": {"stale": 80}, "expired": 20},
        "trajectories": {"generated": 100, "filtered": 60, "trained": 40},
    }
    failed = ev.RolloutFailed(role="sampler-0", group=1, member=0, attempt=1, task_id="find", reason="environment_error", error="KeyError: 'x'", retried=False)
    lines = lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, failed), (2.0, ev.LedgerClosed(ledger=ledger))])
    found = " | ".join(advice(summarize(lines), summarize(lines)["utilization"]))
    assert "10% of the tokens were too stale" in found
    assert "60% of the trajectories were in groups of equal rewards" in found
    assert "1 rollouts failed, most of them of task find: environment_error: KeyError: 'x'" in found


def test_data_far_from_the_policy_and_refused_updates_are_warned_of() -> None:
    refused = ev.Updated(
        role="learner", selection=1, version=0, lineage=0, reward_mean=0.5, seconds=1.0, busy_seconds=1.0, refused="gradient is not finite", statistics=None
    )
    lines = lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, refused)])
    assert "the last update was refused: gradient is not finite" in picture(lines)
    numbers = {**lines_of([(0.0, updated(1, numbers=statistics({0: 4})))])[0]["statistics"], "effective_sample_size": 0.3}
    found = advice(summarize(lines), summarize(lines)["utilization"], newest=numbers)
    says = "effective sample size 0.30: the data is far from the policy; try a lower learner.learning_rate or pool.max_staleness"
    assert found == [f"{says}, or governor.adapt_staleness=true"]
    adapts = {"governor": {"adapt_staleness": True}}
    assert advice(summarize(lines), summarize(lines)["utilization"], newest=numbers, settings=adapts) == [says]


def test_what_the_governor_did_is_one_line_with_its_last_reason() -> None:
    tightened = {"action": "tightened", "reason": "3 updates in a row missed", "version": 5, "lineage": 0, "effective_sample_size": 0.3}
    lines = [(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, updated(1, numbers=statistics({0: 4})))]
    assert "governor" not in picture(lines_of(lines))
    lines += [(2.0, ev.Governed(**tightened, max_staleness=bound)) for bound in (4, 2)]
    shown = " ".join(picture(lines_of(lines), width=200).split())
    assert "governor staleness bound lowered 2x; at most 2 updates old now; last, at version 5: 3 updates in a row missed" in shown


def test_trajectories_that_could_not_be_recorded_are_warned_of() -> None:
    recorded = ev.TrajectoriesRecorded(trajectories=10, files=1, lost=7, failure="OSError: [Errno 28] No space left on device")
    text = picture(lines_of([(0.0, run_started(SPLIT)), (0.0, window("start")), (1.0, recorded)]), width=120)
    assert "7 trajectories were not recorded: OSError: [Errno 28] No space left on device" in text


def test_a_model_whose_steps_could_not_be_recorded_is_warned_of_once_for_all_samplers() -> None:
    devices = [{**SPLIT[0], "name": f"sampler-{index}", "recording_failure": "its forward depends on a tensor's value: x"} for index in range(2)]
    text = " ".join(picture(lines_of([(0.0, run_started([*devices, SPLIT[1]])), (0.0, window("start"))]), width=200).split())
    assert text.count("could not be recorded and run in Python, slower but the same: its forward depends on a tensor's value: x") == 1
    assert "could not be recorded" not in picture(going_run())


def test_curve_in_bounded_memory_keeps_its_shape() -> None:
    curve = Curve()
    draw = random.Random(0)
    for index in range(20_000):
        curve.add(index / 20_000 + draw.uniform(-0.01, 0.01), index)
    assert 256 <= len(curve.values) <= 512
    assert curve.values[0] == pytest.approx(0.0, abs=0.02)
    assert curve.values[len(curve.values) // 2] == pytest.approx(0.5, abs=0.05)
    assert sparkline(curve.values, 8) == "▁▂▃▄▅▆▇█"
    curve.cut(9_999)
    assert max(curve.values) == pytest.approx(0.5, abs=0.05), "a restore undoes what is above its checkpoint"


@pytest.mark.parametrize(("values", "columns", "drawn"), [([], 5, ""), ([1.0], 5, "▄"), ([2.0, 2.0], 5, "▄▄"), ([0.0, 1.0], 1, "▄"), ([0.0, 7.0], 2, "▁█")])
def test_sparkline_of_few_values(values: list[float], columns: int, drawn: str) -> None:
    assert sparkline(values, columns) == drawn


def test_a_call_that_blocked_a_worker_is_a_warning_and_no_current_wait() -> None:
    lines = going_run()
    waits = "group 4 member 1, step 2 of task find: waits 41 s for environment"
    blocked = "Environment.reset held the event loop for 8.80 s and stopped every rollout: use `await` for waits"
    reports = [line for line in lines if line["event"] == "worker_active"]
    reports[-1]["longest_wait"] = f"{blocked}; {waits}"
    shown = picture(lines, width=200)
    assert f"sampler-0: {waits}" in shown and f"! sampler-0: {blocked}" in shown and shown.count("held the event loop") == 1
    reports[-1]["longest_wait"] = blocked
    shown = picture(lines, width=200)
    assert "slowest" not in shown and shown.count("held the event loop") == 1
