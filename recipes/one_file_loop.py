"""The whole algorithm in one file and one process, for reading and for trying things.

    python recipes/one_file_loop.py arithmetic --updates 50 learner.loss=cispo

Again and again: sample groups of rollouts with the newest weights, reward them, make one update, hand the new weights over. The parts are headrace's own; only
the loop is the simplest there is. One thing happens after another, so every token is trained by the weights that drew it (staleness 0), and whoever is not at
work waits. `headrace run` has the same parts at work at the same time, each in a process of its own, an experience pool between them (conductor.py).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from transformers import AutoTokenizer

from headrace.config_loading import load_settings
from headrace.errors import HeadraceError, NoProgressError, first_error
from headrace.learner.core import LearnerRank
from headrace.learner.warm_start import prepare_model
from headrace.pool.selection import has_signal
from headrace.recipe import RecipeCode
from headrace.rollout.render import end_tokens
from headrace.rollout.roll_out import roll_out
from headrace.rollout.user_code import RecipeUserCode
from headrace.runtime.local import cache_directory, sampling_parameters
from headrace.sampler.transformers_sampler import TransformersSampler
from headrace.tasks.source import make_task_source
from headrace.types import PolicyVersion, RolloutKey, RolloutRequest, Trajectory
from headrace.updates import SelectedMember, Selection, UpdateResult, WeightUpdate


class Weights:
    """The weight channel, both ends in one: what the learner publishes is what the sampler loads."""

    def publish(self, parameters: Mapping[str, torch.Tensor], version: PolicyVersion) -> WeightUpdate:
        self.parameters = {name: parameter.clone() for name, parameter in parameters.items()}  # the learner goes on changing its own
        self.version = version
        return WeightUpdate(version=version, num_bytes=sum(parameter.nbytes for parameter in parameters.values()), publish_seconds=0.0)

    def newest_version(self) -> PolicyVersion:
        return self.version

    def load_into(self, parameters: Mapping[str, torch.Tensor]) -> PolicyVersion:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.parameters[name])
        return self.version


class Loop:
    """The parts, and the three things the loop does with them. Raises HeadraceError for what is wrong with recipe or settings."""

    def __init__(self, recipe: str, overrides: Sequence[str] = ()) -> None:
        resolved = load_settings(recipe, overrides)
        self.settings = settings = resolved.settings
        self.code = code = RecipeCode(resolved.task_module, settings.task.options)
        model = prepare_model(settings, code, cache_directory=cache_directory(), progress=_show)  # a short supervised start, or model.path
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.sampling = sampling_parameters(settings, end_tokens(self.tokenizer))[0]
        self.tasks = make_task_source(settings, code)
        self.user_code = RecipeUserCode(code, settings)  # the recipe's environment and reward
        weights = Weights()
        self.learner = LearnerRank(model, settings, writer=weights)
        self.learner.publish()
        self.sampler = TransformersSampler(
            str(model), settings=settings.sampler, max_context_tokens=settings.rollout.max_tokens, device=settings.model.device,
            dtype=settings.model.dtype, weights=weights, tokenizer=self.tokenizer,
        )  # fmt: skip

    async def sample(self, number: int) -> list[Trajectory]:
        """Batch `number`: groups of rollouts of one task each. All run at once; the sampler decodes them together, token by token."""
        num_groups, rollouts = self.settings.pool.groups_per_batch, []
        async with asyncio.TaskGroup() as running:
            for group_id in range(number * num_groups, (number + 1) * num_groups):
                task = self.tasks.next()
                for member in range(self.settings.rollout.group_size):
                    request = RolloutRequest(key=RolloutKey(group_id, member, 0), task=task, seed=self.settings.run.seed, sampling=self.sampling)
                    rollouts.append(running.create_task(self.roll_out(request)))
        return [rollout.result() for rollout in rollouts]

    async def roll_out(self, request: RolloutRequest) -> Trajectory:
        """Observation -> action -> observation -> ... until the environment is done; one action where the task has no environment."""
        return await roll_out(request, sampler=self.sampler, tokenizer=self.tokenizer, user_code=self.user_code, settings=self.settings.rollout)

    def select(self, trajectories: Sequence[Trajectory], number: int, *, max_staleness: int) -> Selection:
        """What the learner gets: the groups whose rewards differ. In the others every advantage is 0: nothing to learn from them."""
        members: list[SelectedMember] = []
        for _, group in itertools.groupby(trajectories, key=lambda trajectory: trajectory.key.group_id):
            sound = [trajectory for trajectory in group if not trajectory.failed]
            if has_signal([trajectory.reward for trajectory in sound], self.settings.learner.advantage):
                members += [SelectedMember(summary=trajectory.summary(), payload=trajectory.to_bytes()) for trajectory in sound]
        return Selection(id=number, learner_version=self.learner.version, members=tuple(members), max_staleness=max_staleness)

    async def learn(self, selection: Selection) -> UpdateResult | None:
        """Advantages, loss, gradient, optimizer step; then the sampler takes the new weights. None: there was nothing to learn from."""
        if not selection.members:
            return None
        result = self.learner.learn(selection)
        if result.version_after > result.version_before:
            self.learner.publish()
            self.sampler.wake()
            await self.sampler.applied(result.version_after)
        return result


async def train(loop: Loop, num_updates: int) -> list[float]:
    """The loop. Returns the mean reward of each batch. Raises NoProgressError when a whole batch failed."""
    rewards = []
    try:
        async with asyncio.TaskGroup() as background:
            engine = background.create_task(loop.sampler.run(lambda: "environment"))
            for number in range(num_updates):
                started = time.perf_counter()
                trajectories = await loop.sample(number)
                # a batch may be cut into several updates (learner.num_minibatches): its last part is trained that many updates later
                await loop.learn(loop.select(trajectories, number, max_staleness=loop.settings.updates_per_batch - 1))
                sound = [trajectory.reward for trajectory in trajectories if not trajectory.failed]
                if not sound:
                    raise NoProgressError(f"every rollout failed; the first with {trajectories[0].end_reason}: {trajectories[0].error}")
                rewards.append(statistics.fmean(sound))
                print(f"update {number + 1:3d}  reward {rewards[-1]:.3f}  {time.perf_counter() - started:.2f} s", flush=True)
            engine.cancel()
    finally:
        await loop.user_code.close()
    return rewards


def _show(what: str, fraction: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {fraction:4.0%}", end="" if fraction < 1 else "\n", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a shipped recipe's name, a recipe file, or its folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that win over the recipe's")
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)  # a second thread makes small models slower
    try:
        asyncio.run(train(Loop(arguments.recipe, arguments.overrides), arguments.updates))
    except (HeadraceError, BaseExceptionGroup) as error:  # what a task group raises is in a group
        parser.exit(getattr(first_error(error), "exit_code", 1), f"{first_error(error)}\n")
