"""How arms are set, what is refused, in which order they run, and when a directory goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import compare as command
from headrace.cli.main import build_parser
from headrace.compare import Arm, Plan, held_directory, make_arms, ordered_jobs, seconds_left
from headrace.config_loading import plain_values
from headrace.errors import ConfigError

RECIPE = """
[run]
name = "tiny"
num_updates = 40
num_samplers = 1
num_learner_ranks = 1
[model]
architecture = {model_type = "qwen2"}
characters = "abc"
[task]
source = "task:tasks"
reward = "task:reward"
evaluate = "task:evaluate"
"""

Make = Callable[..., Plan]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "task.py").write_text("def tasks():\n    return []\n")
    (tmp_path / "tiny" / "recipe.toml").write_text(RECIPE)
    return tmp_path / "tiny"


@pytest.fixture
def make(recipe: Path) -> Make:
    """A plan from what one would type after `headrace compare tiny`."""

    def plan(*words: str) -> Plan:
        return command.make_plan(arguments(recipe, *words))

    return plan


def arguments(recipe: Path, *words: str) -> argparse.Namespace:
    parsed, rest = build_parser().parse_known_args(["compare", str(recipe), "--run-dir", "out", *words])
    parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def values(plan: Plan, name: str, seed: int = 0) -> dict[str, Any]:
    arm = next(arm for arm in plan.arms if arm.name == name)
    return plain_values(plan.resolve(arm, seed).settings)


def test_sync_and_async_get_equally_many_devices(make: Make) -> None:
    sync, asynchronous = values(make(), "sync"), values(make(), "async")
    assert (sync["run.mode"], sync["run.placement"], sync["run.num_samplers"], sync["run.num_learner_ranks"]) == ("sync", "colocated", 2, 2)
    assert (asynchronous["run.mode"], asynchronous["run.placement"]) == ("async", "split")
    assert asynchronous["run.num_samplers"] + asynchronous["run.num_learner_ranks"] == 2


def test_arms_differ_in_nothing_but_mode_placement_and_devices(make: Make) -> None:
    sync, asynchronous = values(make("pool.groups_per_batch=8"), "sync"), values(make("pool.groups_per_batch=8"), "async")
    differing = {key for key in sync if sync[key] != asynchronous[key]}
    assert differing == {"run.mode", "run.placement", "run.num_samplers", "run.num_learner_ranks"}
    assert sync["pool.groups_per_batch"] == 8


@pytest.mark.parametrize(("devices", "split"), [(2, (1, 1)), (3, (2, 1)), (4, (3, 1)), (8, (6, 2))])
def test_a_quarter_of_more_devices_learns(make: Make, devices: int, split: tuple[int, int]) -> None:
    plan = make("--devices", str(devices))
    assert (values(plan, "async")["run.num_samplers"], values(plan, "async")["run.num_learner_ranks"]) == split
    assert values(plan, "sync")["run.num_samplers"] == values(plan, "sync")["run.num_learner_ranks"] == devices


def test_the_recipes_own_split_is_kept(recipe: Path) -> None:
    path = recipe / "recipe.toml"
    path.write_text(RECIPE.replace("num_samplers = 1", "num_samplers = 2").replace("num_learner_ranks = 1", "num_learner_ranks = 2"))
    plan = command.make_plan(arguments(recipe))
    assert (values(plan, "async")["run.num_samplers"], values(plan, "async")["run.num_learner_ranks"]) == (2, 2)
    assert values(plan, "sync")["run.num_samplers"] == 4


def test_settings_for_sync_tune_the_baseline_and_leave_async_alone(make: Make) -> None:
    plan = make("--arm", "sync", "sampler.max_running=128")
    assert [arm.name for arm in plan.arms] == ["sync", "async"]
    assert values(plan, "sync")["sampler.max_running"] == 128
    assert values(plan, "async")["sampler.max_running"] == 64


def test_another_arm_starts_from_async_or_from_sync_if_it_says_so(make: Make) -> None:
    plan = make("--arm", "fresh", "pool.max_staleness=1", "--arm", "big", "run.mode=sync", "pool.groups_per_batch=32")
    assert [arm.name for arm in plan.arms] == ["sync", "async", "fresh", "big"]
    assert (values(plan, "fresh")["run.mode"], values(plan, "fresh")["pool.max_staleness"]) == ("async", 1)
    assert (values(plan, "big")["run.placement"], values(plan, "big")["run.num_samplers"]) == ("colocated", 2)


def test_runs_save_checkpoints_and_evaluate_nothing_themselves(make: Make) -> None:
    found = values(make(), "async")
    assert found["checkpoint.every_updates"] == 2, "a twentieth of 40"
    assert found["checkpoint.keep"] > 40
    assert found["evaluation.every_updates"] == 0
    assert values(make("--evaluate-every", "8"), "sync")["checkpoint.every_updates"] == 8


def test_an_exact_metric_is_not_sampled_beside_unless_asked_for(make: Make) -> None:
    assert values(make(), "sync")["evaluation.samples_per_task"] == 1
    assert values(make("evaluation.metric=success"), "sync")["evaluation.samples_per_task"] == 0
    assert values(make("evaluation.metric=success", "evaluation.samples_per_task=4"), "sync")["evaluation.samples_per_task"] == 4


def test_seeds_start_at_the_recipes(make: Make) -> None:
    assert list(make("--seeds", "3").seeds()) == [0, 1, 2]
    assert list(make("--seeds", "2", "run.seed=7").seeds()) == [7, 8]
    assert values(make(), "async", seed=5)["run.seed"] == 5


def test_order_of_the_arms_alternates_by_seed(make: Make) -> None:
    jobs = ordered_jobs(make("--seeds", "3"))
    assert [(job.seed, job.arm.name) for job in jobs] == [(0, "sync"), (0, "async"), (1, "async"), (1, "sync"), (2, "sync"), (2, "async")]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["run.mode=sync"], "'run.mode' cannot be given here: an arm decides that. Write --arm"),
        (["run.num_samplers=4"], "an arm decides that"),
        (["checkpoint.keep=1"], "compare sets it"),
        (["--arm", "a", "evaluation.every_updates=3"], "compare sets it"),
        (["--arm", "a", "run.seed=3"], "seeds are paired"),
        (["--arm", "a"], "it has no settings"),
        (["--arm", "a", "door"], "'door' is not of the form KEY=VALUE"),
        (["--arm", "x=1", "y=2"], "'x=1' is not a name"),
        (["--arm", "a/b", "pool.max_staleness=1"], "is not a name for an arm"),
        (["--arm", "a", "pool.max_staleness=1", "--arm", "a", "pool.max_staleness=2"], "two arms are called 'a'"),
        (["--seeds", "0"], "--seeds is '0', it must be a whole number, at least 1"),
        (["--devices", "1"], "--devices is '1', it must be a whole number, at least 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(make: Make, words: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(*words)
    assert what in str(caught.value)


def test_problems_of_an_arm_name_it(make: Make) -> None:
    plan = make("--arm", "bold", "pool.max_stalness=1")
    with pytest.raises(ConfigError, match=r"arm 'bold': unknown key 'pool.max_stalness'\. Did you mean 'pool.max_staleness'"):
        values(plan, "bold")


def test_too_few_evaluations_for_a_final_mean_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="fewer than 3"):
        values(make("--evaluate-every", "14"), "sync")
    values(make("--evaluate-every", "13"), "sync")


def test_an_unknown_baseline_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="'synk' is no arm"):
        command._baseline(make(), "synk")
    assert command._baseline(make(), None) == "sync"


def test_a_directory_goes_on_with_more_seeds_and_more_arms_but_not_with_other_settings(make: Make) -> None:
    with held_directory(make("--seeds", "1")):
        pass
    with held_directory(make("--seeds", "5", "--arm", "fresh", "pool.max_staleness=1")):
        pass
    with (
        pytest.raises(ConfigError, match=r"arm 'fresh' with other settings \(pool.max_staleness was 1, is 2\)"),
        held_directory(make("--arm", "fresh", "pool.max_staleness=2")),
    ):
        pass
    with pytest.raises(ConfigError, match=r"learner\.learning_rate was"), held_directory(make("learner.learning_rate=1e-5")):
        pass
    with held_directory(make()):
        kept = json.loads(Path("out/comparison.json").read_text())["arms"]
    assert set(kept) == {"sync", "async", "fresh"}, "an arm that is left out once is not forgotten"


def test_a_directory_does_not_go_on_with_another_task(recipe: Path, make: Make) -> None:
    with held_directory(make()):
        pass
    (recipe / "task.py").write_text("def tasks():\n    return [1]\n")
    with pytest.raises(ConfigError, match="another version of the recipe's Python"), held_directory(make()):
        pass


def test_a_directory_of_something_else_is_left_alone(make: Make) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds no comparison"), held_directory(make()):
        pass
    assert [path.name for path in Path("out").iterdir()] == ["thesis.tex"]


def test_two_comparisons_cannot_share_a_directory(make: Make) -> None:
    with held_directory(make()), pytest.raises(ConfigError, match="another comparison is running there"), held_directory(make()):
        pass


def test_time_to_finish_counts_each_arm_at_its_own_pace() -> None:
    assert seconds_left({}, ["sync", "async"]) is None
    assert seconds_left({"sync": [100.0, 140.0]}, ["async", "sync"]) == pytest.approx(240.0), "an arm not seen yet: like the others"
    assert seconds_left({"sync": [100.0, 140.0], "async": [30.0]}, ["async", "async", "sync"]) == pytest.approx(180.0)


def test_the_way_on_after_an_interruption_is_the_same_command(recipe: Path) -> None:
    given = arguments(recipe, "pool.groups_per_batch=8", "--seeds", "2", "--arm", "fresh", "pool.max_staleness=1", "--target", "0.5")
    text = command._again(given, command.make_plan(given))
    assert f"compare {recipe} pool.groups_per_batch=8 --arm fresh pool.max_staleness=1 --seeds 2 --target 0.5 --run-dir" in text


def test_arms_are_plain_settings(recipe: Path) -> None:
    arms = make_arms(str(recipe), [], [Arm(name="fresh", settings=("pool.max_staleness=1",))], None)
    assert arms[2].settings[-1] == "pool.max_staleness=1"
