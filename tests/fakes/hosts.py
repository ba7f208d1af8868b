"""Scripted roles in real processes: the local runtime, its wires, processes, journal and files as they are, with roles that cost nothing.

`install_scripted_roles` puts them in the place of headrace.runtime.hosts. No role loads torch, so a run is up in about a second.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import Any

from fakes.learner import ScriptedLearner
from fakes.rollouts import CharacterTokenizer, ScriptedSampler, ScriptedWeights
from headrace.config import Settings
from headrace.learner.state_memory import StateMemory
from headrace.manifest import write_manifest
from headrace.recipe import RecipeCode
from headrace.rollout.evaluation import EvaluationRecord
from headrace.rollout.worker import RolloutWorkerCore
from headrace.runtime import hosts, processes
from headrace.runtime.hosts import HEARTBEAT_SECONDS, REPORT_SECONDS, LearnerStart, _serve
from headrace.runtime.processes import Hello
from headrace.runtime.wire import AsyncWire, BlockingWire
from headrace.types import PolicyVersion, RolloutKey
from headrace.updates import WeightUpdate

LEARN_SECONDS = 0.01
TOKEN_SECONDS = 0.001
FACTS = {"end_tokens": (0,), "has_chat_template": False, "capacity": None, "saturated_tokens_per_second": None}


def install_scripted_roles() -> None:
    """In the process that drives the run, before it starts."""
    hosts.host_preparation, hosts.host_learner = host_preparation, host_learner
    hosts.host_worker, hosts.host_evaluator = host_worker, host_evaluator
    processes._PRELOADED[:] = ["fakes.hosts"]


def host_preparation(end: socket.socket, settings: Settings, code: RecipeCode, cache_directory: Path) -> None:
    wire = BlockingWire(end)
    wire.send(Hello(facts={}))
    wire.send({"directory": cache_directory, "parameter_bytes": 64, "adapters": None})
    wire.receive()


def host_learner(
    end: socket.socket,
    model: Path,
    settings: Settings,
    channel: Any,
    rank: int,
    address: str,
    start: LearnerStart | None = None,
    memory: StateMemory | None = None,
) -> None:
    wire = BlockingWire(end)
    version = PolicyVersion(0, 0)
    if start is not None:
        match start.place:
            case None:
                number = 0
            case Path():
                number = int((start.place / "model.safetensors").read_text().split()[0])
            case _:
                assert memory is not None
                number = int(memory.read(start.place))
        version = PolicyVersion(start.lineage, number)
    learner = ScriptedLearner(settings, lambda version: None, learn_seconds=LEARN_SECONDS, version=version)
    wire.send(Hello(facts={"version": learner.version}))
    with asyncio.Runner() as runner:
        while True:
            method, arguments = wire.receive()
            if method == "save":
                save(arguments[0], learner.version)
            if method == "copy":
                assert memory is not None
                memory.write(learner.version, str(learner.version.number).encode())
            wire.send(runner.run(getattr(learner, method)(*arguments)))
            for grows in (learner.selections, learner.saved, learner.copied):
                grows.clear()
            del learner.published[:-1]


def save(directory: Path, version: PolicyVersion) -> None:
    """Whole or absent, as learner.checkpoints does it."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_text(f"{version.number} " + "weights" * 1000)
    (partial / "learner.json").write_text(f'{{"version": [{version.lineage}, {version.number}]}}')
    write_manifest(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


class FlatSampler(ScriptedSampler):
    """Remembers nothing of rollouts that have ended."""

    def release(self, key: RolloutKey) -> int:
        lost = super().release(key)
        self.requests.clear()
        self.verified.clear()
        self._released.discard(key)
        self._drawn.pop(key, None)
        return lost


def host_worker(
    end: socket.socket, name: str, model: Path, settings: Settings, code: RecipeCode, channel: Any, adapters: object, measures: bool = True
) -> None:
    async def serve() -> None:
        wire = await AsyncWire.open(end)
        weights = ScriptedWeights()
        sampler = FlatSampler(max_running=64, max_context_tokens=settings.rollout.max_tokens, seconds_per_token=TOKEN_SECONDS, weights=weights)
        worker = RolloutWorkerCore(name=name, sampler=sampler, code=code, settings=settings, tokenizer=CharacterTokenizer())
        await wire.send(Hello(facts=FACTS))

        async def send_reports() -> None:
            while True:
                await wire.send(await worker.next_report())
                await asyncio.sleep(REPORT_SECONDS)

        async def obey() -> None:
            while True:
                method, arguments = await wire.receive()
                if method == "announce":
                    update: WeightUpdate = arguments[0]
                    weights.publish(update.version.number, update.version.lineage)
                await getattr(worker, method)(*arguments)

        async def give_signs_of_life() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                worker.report_soon()

        async with asyncio.TaskGroup() as group:
            for work in (worker.run(), send_reports(), obey(), give_signs_of_life()):
                group.create_task(work)

    _serve(serve())


def host_evaluator(end: socket.socket, model: Path, settings: Settings, code: RecipeCode, channel: Any, adapters: object = None) -> None:
    wire = BlockingWire(end)
    wire.send(Hello(facts=FACTS))
    while True:
        version, _, _ = wire.receive()
        wire.send(EvaluationRecord(version=version, finished=(), metrics={settings.evaluation.metric: 0.5}))
