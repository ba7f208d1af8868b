"""Verification in the worker with the real sampler on a tiny model: whole rollouts checked, cut, restored and gone on with."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
import torch

from fakes.rollouts import LoopUserCode, scripted_settings
from fakes.sampling import make_sampler, plain_model
from fakes.tiny_models import LETTERS, VOCABULARY, perturbed, tiny_tokenizer
from fakes.weights import FakeWeights
from headrace.rollout.worker import RolloutWorkerCore
from headrace.types import Action, Observation, PolicyVersion, RolloutKey, RolloutRequest, SamplingParameters, Task, Trajectory

TASK = Task(id="two", data={})


class TwoAnswers:
    """One letter, then a letter to a sign that depends on the first; the reward is about both."""

    first = -1

    async def reset(self, task: Task) -> Observation:
        return Observation(text="ab")

    async def step(self, action: Action) -> tuple[Observation | None, float, bool]:
        letter = action.tokens[0]
        if self.first < 0:
            self.first = letter
            return Observation(text=sign(letter)), 0.0, False
        return None, reward_of(self.first, letter), True

    def snapshot(self) -> int:
        return self.first

    def restore(self, snapshot: int) -> None:
        self.first = snapshot


def sign(letter: int) -> str:
    return LETTERS[letter % 3 + 5]


def reward_of(first: int, second: int) -> float:
    return float((first + second) % 4 == 0)


def verified(count: int, batch: int) -> tuple[list[Trajectory], list[Trajectory], dict[str, torch.Tensor]]:
    """(as drawn, as verified, the newest weights); weights change also while a batch is drawn."""

    async def main() -> tuple[list[Trajectory], list[Trajectory], dict[str, torch.Tensor]]:
        weights = FakeWeights()
        sampler = make_sampler(weights=weights, max_running=batch)
        settings = scripted_settings(pool={"verify": "all"}, rollout={"max_steps": 2, "max_tokens": 64, "max_action_tokens": 1})
        worker = RolloutWorkerCore("worker-0", sampler=sampler, code=LoopUserCode(make_environment=TwoAnswers), tokenizer=tiny_tokenizer(), settings=settings)
        first = {name: tensor.clone() for name, tensor in sampler._model.parameters.items()}
        older, newest = perturbed(first, seed=1, scale=0.03), perturbed(first, seed=2, scale=0.03)
        number = 0

        async def publish(parameters: dict[str, torch.Tensor]) -> None:
            nonlocal number
            number += 1
            await worker.announce(weights.publish(parameters, PolicyVersion(0, number)))

        async def collect(keys: list[RolloutKey]) -> list[Trajectory]:
            found: list[Trajectory] = []
            while len(found) < len(keys):
                report = await worker.next_report()
                found += [Trajectory.from_bytes(finished.payload) for finished in report.finished]
            return found

        drawn: list[Trajectory] = []
        checked: list[Trajectory] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            for begin in range(0, count, batch):
                keys = [RolloutKey(member, 0, 0) for member in range(begin, begin + batch)]
                sampling = SamplingParameters(max_action_tokens=1)
                await publish(first)
                await sampler.applied(PolicyVersion(0, number))
                await worker.start([RolloutRequest(key=key, task=TASK, seed=3, sampling=sampling) for key in keys])
                await asyncio.sleep(0)
                await publish(older)
                drawn += await collect(keys)
                await publish(newest)
                await sampler.applied(PolicyVersion(0, number))
                await worker.verify(keys)
                checked += await collect(keys)
                await worker.forget(keys)
            await worker.stop()
        refreshed = sum(trajectory.refreshed_tokens for trajectory in checked)
        assert sampler.generated_tokens == sum(trajectory.num_action_tokens + trajectory.discarded_tokens for trajectory in checked) + refreshed
        return drawn, checked, newest

    return asyncio.run(main())


def exact(parameters: dict[str, torch.Tensor]) -> dict[tuple[int, int], float]:
    """Log-probability of each pair of answers, by plain transformers."""
    model = plain_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
        contexts = [[0, 1, first, LETTERS.index(sign(first))] for first in range(VOCABULARY)]
        logprobs = torch.log_softmax(model(input_ids=torch.tensor(contexts)).logits.double(), -1)
    return {(a, b): float(logprobs[a, 1, a] + logprobs[a, 3, b]) for a in range(VOCABULARY) for b in range(VOCABULARY)}


def pair(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.tokens[2], trajectory.tokens[4]


def test_verified_rollouts_of_the_real_sampler_are_of_the_newest_weights() -> None:
    drawn, checked, parameters = verified(128, 64)
    values = exact(parameters)
    assert {trajectory.round for trajectory in checked} == {1}
    assert 0 < sum(trajectory.refreshed_tokens > 0 for trajectory in checked) < len(checked)
    assert len({count.version.number for trajectory in drawn for count in trajectory.summary().versions}) > 2
    for trajectory in checked:
        assert {count.version.number % 3 for count in trajectory.summary().versions} == {0}
        newest = dict.fromkeys(range(len(trajectory.tokens)), math.nan)
        actions = [index for step in trajectory.steps for index in range(step.action_start, step.action_end)]
        newest |= dict(zip(actions, trajectory.sampler_logprobs, strict=True))
        said = [index for span in trajectory.verified_spans for index in range(span.start, span.end)]
        newest |= dict(zip(said, trajectory.verified_logprobs, strict=True))
        assert sum(newest[index] for index in actions) == pytest.approx(values[pair(trajectory)], abs=2e-4)  # I3
        assert trajectory.reward == reward_of(*pair(trajectory))


@pytest.mark.slow
def test_the_real_sampler_and_worker_give_verified_rollouts_the_newest_distribution_and_mean_reward() -> None:
    drawn, checked, parameters = verified(12_800, 256)
    values = {outcome: math.exp(logprob) for outcome, logprob in exact(parameters).items()}
    mean = sum(probability * reward_of(*outcome) for outcome, probability in values.items())
    deviation = math.sqrt(mean * (1 - mean) / len(checked))
    assert abs(sum(trajectory.reward for trajectory in checked) / len(checked) - mean) < 4 * deviation

    def normal(trajectories: list[Trajectory]) -> float:
        """Chi-square as a standard normal (Wilson and Hilferty 1931); rare outcomes share a cell."""
        counts, cells, rare = Counter(map(pair, trajectories)), [], [0.0, 0]
        for outcome, probability in values.items():
            if probability * len(trajectories) >= 5:
                cells.append((probability * len(trajectories), counts[outcome]))
            else:
                rare = [rare[0] + probability * len(trajectories), rare[1] + counts[outcome]]
        cells.append((rare[0], int(rare[1])))
        freedom = len(cells) - 1
        statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
        return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))

    assert normal(checked) < 3.5
    assert normal(drawn) > 8
