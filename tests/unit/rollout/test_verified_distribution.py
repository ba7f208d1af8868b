"""Exactness of verification in the worker: verified rollouts are distributed as if the newest weights had drawn them, all of them.

A table-driven sampler makes the distribution of whole rollouts known: every outcome is enumerated with its probability.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fakes.rollouts import CharacterTokenizer, LoopUserCode, rollout_request, scripted_settings
from fakes.table_sampler import TableSampler, table_policy
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import Action, Observation, RolloutKey, SampleRequest, Task, Trajectory

MAX_STEPS, MAX_ACTION_TOKENS = 3, 2
TASK = Task(id="maze", data={"prompt": "p"})
Outcomes = dict[tuple[int, ...], tuple[float, float]]
"""tokens of a trajectory -> (probability, reward)"""


class Maze:
    """Five places; what an answer does depends on all answers before it. It may end early."""

    def __init__(self) -> None:
        self.state = (0, 0)

    async def reset(self, task: Task) -> Observation:
        self.state = (0, 0)
        return Observation(text="@")

    async def step(self, action: Action) -> tuple[Observation | None, float, bool]:
        self.state, reward, done = moved(self.state, action.text)
        return (None if done else Observation(text=sign(self.state))), reward, done


class SnapshotMaze(Maze):
    def snapshot(self) -> tuple[int, int]:
        return self.state

    def restore(self, snapshot: tuple[int, int]) -> None:
        self.state = snapshot


class ReplayableMaze(Maze):
    replayable = True


def moved(state: tuple[int, int], text: str) -> tuple[tuple[int, int], float, bool]:
    place, count = state
    place, count = (2 * place + 1 + len(text) + 3 * text.count("b")) % 5, count + 1
    return (place, count), (1.0 if place in (1, 2) else 0.0) * (count >= 2), place == 4 or count == MAX_STEPS


def sign(state: tuple[int, int]) -> str:
    return "vwxyz"[state[0]]


def text_of(action: tuple[int, ...]) -> str:
    return "".join(chr(token) for token in action if token)


def actions(number: int, context: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
    """Every action with its probability."""
    whole, begun = [], [((), 1.0)]
    while begun:
        action, probability = begun.pop()
        for token, share in table_policy(number, (*context, *action)).items():
            longer = ((*action, token), probability * share)
            (whole if token == 0 or len(longer[0]) == MAX_ACTION_TOKENS else begun).append(longer)
    return whole


def exact_outcomes(number: int, *, markov: bool = False) -> Outcomes:
    outcomes: Outcomes = {}

    def walk(state: tuple[int, int], tokens: tuple[int, ...], shown: tuple[int, ...], probability: float, reward: float) -> None:
        context = shown if markov else (*tokens, *shown)
        for action, share in actions(number, context):
            following, earned, done = moved(state, text_of(action))
            grown = (*tokens, *shown, *action)
            if done:
                outcomes[grown] = (probability * share, reward + earned)
            else:
                begin = (1,) if markov else ()
                walk(following, grown, (*begin, ord(sign(following))), probability * share, reward + earned)

    walk((0, 0), (), (1, ord("@")), 1.0, 0.0)
    assert math.isclose(sum(probability for probability, _ in outcomes.values()), 1.0)
    return outcomes


def one_step_outcomes(number: int) -> Outcomes:
    context = (1, ord("p"))
    return {(*context, *action): (share, grade(text_of(action))) for action, share in actions(number, context)}


def grade(text: str) -> float:
    return float(text.count("b")) - 0.5 * len(text)


async def graded(task: Task, answer: str) -> float:
    return grade(answer)


def worker_of(sampler: TableSampler, code: LoopUserCode, **rollout: Any) -> RolloutWorkerCore:
    settings = scripted_settings(
        pool={"verify": "all", "verify_rounds": 4}, rollout={"max_steps": MAX_STEPS, "max_action_tokens": MAX_ACTION_TOKENS, **rollout}
    )
    return RolloutWorkerCore("worker-0", sampler=sampler, code=code, tokenizer=CharacterTokenizer(), settings=settings)


def aged(request: SampleRequest, index: int) -> int:
    """Weights change between steps and within actions: versions 0 to 3."""
    return request.step + index if request.round == 0 else 0


def drawn(count: int, code: LoopUserCode, rounds: tuple[int, ...], **rollout: Any) -> tuple[list[Trajectory], TableSampler]:
    """Trajectories of `count` rollouts: aged, and then verified under each of `rounds` in turn."""

    async def main() -> tuple[list[Trajectory], TableSampler]:
        sampler = TableSampler(number=aged)
        worker = worker_of(sampler, code, **rollout)
        found: dict[RolloutKey, Trajectory] = {}

        async def collect(keys: set[RolloutKey]) -> None:
            while keys:
                for finished in (await worker.next_report()).finished:
                    keys.remove(finished.summary.key)
                    found[finished.summary.key] = Trajectory.from_bytes(finished.payload)

        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            for first in range(0, count, 400):
                requests = [rollout_request(group_id=number, task=TASK, max_action_tokens=MAX_ACTION_TOKENS) for number in range(first, first + 400)]
                keys = [request.key for request in requests]
                await worker.start(requests)
                await collect(set(keys))
                for number in rounds:
                    sampler.verifying_number = number
                    sampler.number = lambda request, index, number=number: number
                    await worker.verify(keys)
                    await collect(set(keys))
                sampler.number = aged
                await worker.forget(keys)
            await worker.stop()
        assert sampler.generated_tokens >= sum(trajectory.num_action_tokens for trajectory in found.values())
        return list(found.values()), sampler

    return asyncio.run(main())


def chi_square(trajectories: list[Trajectory], exact: Outcomes) -> float:
    """Standard normal under equal distributions (Wilson and Hilferty 1931); outcomes expected fewer than 5 times share a cell."""
    counts = Counter(trajectory.tokens for trajectory in trajectories)
    assert counts.keys() <= exact.keys()
    cells: list[tuple[float, int]] = []
    rest_expected, rest_count = 0.0, 0
    for tokens, (probability, _) in exact.items():
        expected = probability * len(trajectories)
        if expected >= 5:
            cells.append((expected, counts[tokens]))
        else:
            rest_expected, rest_count = rest_expected + expected, rest_count + counts[tokens]
    if rest_expected > 0:
        cells.append((rest_expected, rest_count))
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    freedom = len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def check_mean_reward(trajectories: list[Trajectory], exact: Outcomes) -> None:
    value = sum(probability * reward for probability, reward in exact.values())
    deviation = math.sqrt(sum(probability * (reward - value) ** 2 for probability, reward in exact.values()))
    mean = sum(trajectory.reward for trajectory in trajectories) / len(trajectories)
    assert abs(mean - value) < 4 * deviation / math.sqrt(len(trajectories))


def check(count: int, rounds_of: tuple[tuple[int, ...], ...], code: LoopUserCode, exact: Callable[[int], Outcomes], **rollout: Any) -> None:
    """Verified under each number of `rounds` in turn, against the newest weights; and unverified rollouts are told from them."""
    for rounds in rounds_of:
        trajectories, sampler = drawn(count, code, rounds, **rollout)
        assert sampler.num_rejected > count / 10
        assert {trajectory.round for trajectory in trajectories} == {len(rounds)}
        newest = exact(rounds[-1])
        assert chi_square(trajectories, newest) < 3.5
        check_mean_reward(trajectories, newest)
        for trajectory in trajectories[:200]:
            spans = [span for step in trajectory.steps for span in trajectory.effective_spans(step)]
            assert {span.version.number for span in spans} == {rounds[-1]}
    unverified, _ = drawn(min(count, 2000), code, (), **rollout)
    assert chi_square(unverified, exact(4)) > 6


CASES: dict[str, tuple[LoopUserCode, Callable[[int], Outcomes], dict[str, Any]]] = {
    "snapshots": (LoopUserCode(make_environment=SnapshotMaze), exact_outcomes, {}),
    "replay": (LoopUserCode(make_environment=ReplayableMaze), exact_outcomes, {}),
    "observation": (LoopUserCode(make_environment=SnapshotMaze), lambda number: exact_outcomes(number, markov=True), {"context": "observation"}),
    "one_step": (LoopUserCode(reward=graded), one_step_outcomes, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_verified_rollouts_are_distributed_as_those_of_the_newest_weights(name: str) -> None:
    code, exact, rollout = CASES[name]
    check(800, ((4, 5),), code, exact, **rollout)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verified_rollouts_are_distributed_as_those_of_the_newest_weights_over_86000_draws(name: str) -> None:
    code, exact, rollout = CASES[name]
    check(50_000 if name == "snapshots" else 12_000, ((4,), (4, 5)), code, exact, **rollout)
