"""What runs inside each role process: build the role, say hello, serve the wire until it closes.

Every `host_*` function is the `main` of a RoleProcess: it gets its end of the wire and plain, picklable arguments.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import Settings
from headrace.errors import HeadraceError, ModelError
from headrace.learner.state_memory import StateMemory
from headrace.recipe import RecipeCode
from headrace.roles import WeightReader
from headrace.runtime.processes import Alive, Failed, Hello, as_headrace_error
from headrace.runtime.wire import AsyncWire, BlockingWire
from headrace.types import PolicyVersion
from headrace.updates import AdapterLayout

if TYPE_CHECKING:
    from headrace.sampler.transformers_sampler import TransformersSampler

HEARTBEAT_SECONDS = 1.0
"""Between two signs of life of a worker or of a busy evaluator."""
REPORT_SECONDS = 0.01
"""Between two reports of a worker: what finishes meanwhile goes in one message, and the conductor is woken once."""


def host_preparation(end: socket.socket, settings: Settings, code: RecipeCode, cache_directory: Path) -> None:
    """Makes or finds the model to start from; says hello with its directory. Progress goes ahead of it as (what, fraction)."""
    from headrace.learner.lora import adapter_layout
    from headrace.learner.warm_start import prepare_model
    from headrace.weights.adapters import adapter_bytes
    from headrace.weights.shared_memory import parameter_bytes

    wire = BlockingWire(end)
    wire.send(Hello(facts={}))
    directory = prepare_model(settings, code, cache_directory=cache_directory, progress=lambda what, fraction: wire.send((what, fraction)))
    if not directory.is_dir():
        directory = _download(str(directory))
    adapters = adapter_layout(str(directory), settings)
    num_bytes = parameter_bytes(directory) if adapters is None else adapter_bytes(adapters)
    wire.send({"directory": directory, "parameter_bytes": num_bytes, "adapters": adapters})
    wire.receive()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStart:
    """Where the learner of a run that goes on begins."""

    place: Path | PolicyVersion | None
    """A checkpoint; the version of a copy in memory; None: the weights that the run began with."""
    lineage: int
    learning_rate_factor: float


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
    """One learner rank: answers (method, arguments) with the method's result, one at a time. Without `start` the run is new."""
    from headrace.learner.core import LearnerRank, init_ranks, shutdown_ranks
    from headrace.weights.shared_memory import SharedMemoryWriter

    wire = BlockingWire(end)
    world_size = settings.run.num_learner_ranks
    init_ranks(rank, world_size, address)
    try:
        writer = SharedMemoryWriter(channel) if rank == 0 else None
        learner = LearnerRank(str(model), settings, rank=rank, world_size=world_size, writer=writer, memory=memory)
        if start is not None:
            match start.place:
                case Path():
                    learner.load(start.place, lineage=start.lineage)
                case PolicyVersion():
                    learner.load_copy(start.place, lineage=start.lineage)
                case None:
                    learner.begin_again(start.lineage)
            learner.learning_rate_factor = start.learning_rate_factor
        wire.send(Hello(facts={"version": learner.version}))
        while True:
            method, arguments = wire.receive()
            try:
                answer = getattr(learner, method)(*arguments)
            except HeadraceError as error:
                wire.send(Failed(error=error))
            else:
                wire.send(answer)
    finally:
        shutdown_ranks()


def host_worker(
    end: socket.socket, name: str, model: Path, settings: Settings, code: RecipeCode, channel: Any, adapters: AdapterLayout | None, measures: bool = True
) -> None:
    """One rollout worker: takes requests and announcements, sends reports. `measures` its capacity before it says hello."""
    from headrace.rollout.render import end_tokens, has_chat_template
    from headrace.rollout.worker import RolloutWorkerCore

    sampler, tokenizer = _make_sampler(model, settings, channel, adapters)
    started = time.perf_counter()
    capacity, saturated = sampler.measure_capacity() if measures else (None, None)
    facts = {
        "capacity": capacity,
        "saturated_tokens_per_second": saturated,
        "recording_failure": sampler.recording_failure,
        "end_tokens": end_tokens(tokenizer),
        "has_chat_template": has_chat_template(tokenizer),
        "calibration_seconds": time.perf_counter() - started,
    }

    async def serve() -> None:
        wire = await AsyncWire.open(end)
        worker = RolloutWorkerCore(name=name, sampler=sampler, code=code, settings=settings, tokenizer=tokenizer)
        await wire.send(Hello(facts=facts))

        async def send_reports() -> None:
            while True:
                await wire.send(await worker.next_report())
                await asyncio.sleep(REPORT_SECONDS)

        async def obey() -> None:
            while True:
                method, arguments = await wire.receive()
                await getattr(worker, method)(*arguments)

        async def give_signs_of_life() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                worker.report_soon()

        async with asyncio.TaskGroup() as group:
            for work in (worker.run(), send_reports(), obey(), give_signs_of_life()):
                group.create_task(work)

    _serve(serve())


def host_evaluator(end: socket.socket, model: Path, settings: Settings, code: RecipeCode, channel: Any | None, adapters: AdapterLayout | None = None) -> None:
    """Evaluates on its own copy of one version: answers (version, requests, tasks) with an EvaluationRecord."""
    from headrace.rollout.evaluation import EvaluatorCore
    from headrace.rollout.render import end_tokens, has_chat_template

    sampler, tokenizer = _make_sampler(model, settings, channel, adapters)

    async def serve() -> None:
        wire = await AsyncWire.open(end)
        evaluator = EvaluatorCore(sampler=sampler, code=code, settings=settings, tokenizer=tokenizer)
        await wire.send(Hello(facts={"end_tokens": end_tokens(tokenizer), "has_chat_template": has_chat_template(tokenizer)}))

        async def answer() -> None:
            while True:
                version, requests, tasks = await wire.receive()
                async with asyncio.TaskGroup() as group:
                    beating = group.create_task(beat())
                    try:
                        result: Any = await evaluator.evaluate(version, requests, tasks)
                    except HeadraceError as error:
                        result = Failed(error=error)
                    beating.cancel()
                await wire.send(result)

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                await wire.send(Alive())

        async with asyncio.TaskGroup() as group:
            group.create_task(evaluator.run())
            group.create_task(answer())

    _serve(serve())


def _serve(main: Any) -> None:
    """Runs a host until its wire closes: that EOFError, wherever it surfaces, is the ordinary end.

    The garbage collector leaves alone what is loaded now (torch and transformers: most of the heap) and comes by less often; a
    rollout step makes dozens of small objects, and walking the whole heap for them took a tenth of the process's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        asyncio.run(main)
    except BaseExceptionGroup as group:
        _, others = group.split((EOFError, ConnectionError))
        if others is not None:
            raise as_headrace_error(others, "rollout process") from group
        raise EOFError from None


def _make_sampler(model: Path, settings: Settings, channel: Any | None, adapters: AdapterLayout | None) -> tuple[TransformersSampler, Any]:
    from transformers import AutoTokenizer

    from headrace.sampler.transformers_sampler import TransformersSampler
    from headrace.weights.adapters import AdapterReader
    from headrace.weights.shared_memory import SharedMemoryReader

    weights: WeightReader | None = None if channel is None else SharedMemoryReader(channel)
    if weights is not None and adapters is not None:
        weights = AdapterReader(weights, adapters)

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except Exception as error:  # whatever its files or its own code raise
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{model}: the tokenizer cannot be loaded: {what[0]}", remedy="Put the model's tokenizer files beside it.") from error
    sampler = TransformersSampler(
        str(model),
        settings=settings.sampler,
        max_context_tokens=settings.rollout.max_tokens,
        device=settings.model.sampler_device or settings.model.device,
        dtype=settings.model.dtype,
        weights=weights,
        tokenizer=tokenizer,
        measures_entropy=settings.marks.entropy_fraction > 0,
    )
    return sampler, tokenizer


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]))
    except Exception as error:
        raise ModelError(
            f"model.path '{name}' is neither a directory nor a model that could be downloaded: {error}",
            remedy="Give a Hugging Face directory, or a hub name and a connection.",
        ) from error
