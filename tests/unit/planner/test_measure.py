"""A profile made from events alone finds what the run was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import profiled_run as run
from headrace.errors import ConfigError
from headrace.planner.measure import measure, read_recording
from headrace.planner.profile import Profile, profile_as_json, profile_from_json


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled") / "run"
    run.write_run(path)
    return path


@pytest.fixture(scope="module")
def profile(directory: Path) -> Profile:
    return measure(directory)


def test_decode_fit_gives_the_latency_that_the_steps_had(profile: Profile) -> None:
    for running in (1, 6, 24, 64):
        for context in (15, 50):
            assert profile.decode.fit.seconds(running, context, running) == pytest.approx(run.DECODE.seconds(running, context, running), rel=0.1)
    assert sum(point.count for point in profile.decode.points) == run.NUM_UPDATES * 50


def test_learner_fit_gives_the_seconds_of_other_batches(profile: Profile) -> None:
    for tokens in (300, 800):
        assert profile.learn.fit.seconds(1, 4096, tokens) == pytest.approx(run.LEARN.seconds(1, 4096, tokens), rel=0.05)
    assert profile.learn.handover_seconds == pytest.approx(0.01)


def test_learner_tokens_of_a_trajectory_count_filtered_ones_as_none(profile: Profile) -> None:
    mean = profile.distributions.prompt_tokens.mean + profile.distributions.answer_tokens.mean
    assert profile.learn.tokens_per_trajectory == pytest.approx(mean / 2, rel=0.02)


def test_waits_of_single_steps_follow_from_those_of_whole_rollouts(profile: Profile) -> None:
    waits = profile.distributions.tool_wait_seconds
    assert waits.deviation / waits.mean == pytest.approx(run.WAIT_DEVIATION / run.WAIT_MEAN, rel=0.15)
    assert waits.mean + profile.decode.answer_delay_steps * token_step_seconds(profile) == pytest.approx(run.WAIT_MEAN, rel=0.03)


def token_step_seconds(profile: Profile) -> float:
    """What the step of the mean token takes, with what lies between two steps."""
    decode = profile.decode
    tokens = sum(point.running * point.count for point in decode.points)
    gaps = sum((decode.gap_seconds + decode.gap_seconds_per_sequence * point.running) * point.running * point.count for point in decode.points)
    return (sum(point.seconds * point.running * point.count for point in decode.points) + gaps) / tokens


@pytest.mark.parametrize(("wait", "kept"), [(1e-2, 1e-2), (1e-4, 0.0)])
def test_the_delay_of_answers_is_taken_off_the_waits_only_where_rollouts_really_wait(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: float, kept: float
) -> None:
    """Waits far below a step are an environment that answers at once: its rollouts are all back before the next step."""
    assert profile.decode.answer_delay_steps > 0
    monkeypatch.setattr(run, "WAIT_MEAN", wait)
    monkeypatch.setattr(run, "WAIT_DEVIATION", wait)
    run.write_run(tmp_path / "quick")
    quick = measure(tmp_path / "quick")
    assert quick.decode.answer_delay_steps == 0.0
    assert quick.distributions.tool_wait_seconds.mean == pytest.approx(kept, rel=0.05)


def test_curves_give_the_whole_time_that_was_measured(directory: Path, profile: Profile) -> None:
    """Rare long steps and updates are outliers of a curve, but a run waits for them too."""
    recording = read_recording(directory)
    updates = [(line["statistics"]["padded_tokens"], line["seconds"]) for line in recording.updated[1:]]
    assert sum(profile.learn.fit.seconds(1, 4096, tokens) for tokens, _ in updates) == pytest.approx(sum(seconds for _, seconds in updates))
    busy = sum(line["activity"]["step_seconds"] for line in recording.active)
    steps = [(profile.decode.fit.seconds(point.running, point.context_tokens, point.tokens - point.running), point.count) for point in profile.decode.points]
    assert sum(seconds * count for seconds, count in steps) == pytest.approx(busy)


def test_weight_update_and_gaps_are_means_of_what_was_reported(profile: Profile) -> None:
    assert profile.weight_update.bytes == 400_000
    assert profile.weight_update.publish_seconds == pytest.approx(0.002)
    assert profile.weight_update.pause_seconds == pytest.approx(0.004)
    assert profile.decode.gap_seconds == pytest.approx(run.GAP_SECONDS)
    assert profile.decode.work_share == pytest.approx(run.WORK_SHARE)


def test_groups_capacity_and_steady_state_are_those_of_the_run(profile: Profile) -> None:
    assert profile.group.size == run.GROUP_SIZE and profile.group.tailness == pytest.approx(1.0)
    assert profile.group.seconds_tailness is not None and profile.group.seconds_tailness > 1.1
    assert profile.decode.saturation.running == 48 and profile.decode.saturation.tokens_per_second == 9000.0
    assert profile.observed is not None
    assert profile.observed.step_seconds == pytest.approx(run.STEP_SECONDS)
    assert profile.observed.batch_trajectories == run.GROUP_SIZE * run.BATCH_GROUPS
    assert profile.observed.staleness_mean == pytest.approx(2.0)


def test_the_profile_survives_json(profile: Profile) -> None:
    assert profile_from_json(json.loads(json.dumps(profile_as_json(profile)))) == profile


def test_events_of_older_versions_make_a_profile_too(tmp_path: Path) -> None:
    run.write_run(tmp_path / "old", detail=False)
    profile = measure(tmp_path / "old")
    mean = sum(running for running in (1, 2, 4, 8, 16, 32, 64)) / 7
    half = (profile.distributions.prompt_tokens.mean + profile.distributions.answer_tokens.mean) / 2  # contexts are not told, and taken to be that
    assert profile.decode.fit.seconds(mean, half, mean) == pytest.approx(run.DECODE.seconds(mean, 35, mean), rel=0.1)
    assert profile.distributions.prompt_tokens.mean == pytest.approx(profile.distributions.answer_tokens.mean)


def test_a_run_that_was_cut_in_the_middle_of_a_line_is_measured_as_far_as_it_goes(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.mkdir()
    whole = (directory / "events.jsonl").read_bytes()
    (path / "events.jsonl").write_bytes(whole[: 2 * len(whole) // 3])
    profile = measure(path)
    assert profile.distributions.steps.mean == pytest.approx(measure(directory).distributions.steps.mean, rel=0.2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "holds no events.jsonl"),
        ("", "holds no event of a run yet"),
        ("not json\n", "holds no event of a run yet"),
        ('{"event":"run_started","time":0.0,"devices":[],"mode":"async","placement":"split"}\n', "finished no rollout"),
    ],
)
def test_what_cannot_be_profiled_is_refused_with_a_remedy(tmp_path: Path, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=what) as caught:
        measure(tmp_path)
    assert caught.value.problems[0].key == "RUN" and caught.value.problems[0].remedy


@pytest.mark.parametrize("damage", ['"statistics":7', '"seconds":"soon"', '"activity":[]'])
def test_damaged_events_are_refused_and_not_a_bug(directory: Path, tmp_path: Path, damage: str) -> None:
    key, lines = damage.partition(":")[0], (directory / "events.jsonl").read_text().splitlines()
    damaged = [line if f"{key}:" not in line else json.dumps({**json.loads(line), **json.loads(f"{{{damage}}}")}) for line in lines]
    (tmp_path / "events.jsonl").write_text("\n".join(damaged) + "\n")
    with pytest.raises(ConfigError, match="damaged events"):
        measure(tmp_path)


def test_a_log_of_another_schema_is_not_profiled(directory: Path, tmp_path: Path) -> None:
    first, *rest = (directory / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text("\n".join([json.dumps({**json.loads(first), "schema": 99}), *rest]) + "\n")
    with pytest.raises(ConfigError, match="schema 99"):
        measure(tmp_path)


def test_a_run_without_an_update_is_refused(tmp_path: Path) -> None:
    run.write_run(tmp_path / "one", num_updates=1)
    path = tmp_path / "one" / "events.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"event":"updated"' not in line))
    with pytest.raises(ConfigError, match="made no update"):
        measure(tmp_path / "one")
