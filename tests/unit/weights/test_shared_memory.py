"""The weight channel: atomic, rising, never waiting for a slow reader, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch

from headrace.errors import ModelError
from headrace.types import PolicyVersion
from headrace.weights.channel import NEWEST, STARTED, SharedMemoryChannel
from headrace.weights.shared_memory import ParameterLayout, SharedMemoryReader, SharedMemoryWriter, _buffer


def parameters(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size, 3), float(value)), "b": torch.full((7,), float(value)), "c": torch.full((1,), float(value))}


def channel_for(tensors: dict[str, torch.Tensor]) -> SharedMemoryChannel:
    return SharedMemoryChannel(4 * ParameterLayout.of(tensors, torch.float32).num_elements)


def test_a_reader_gets_exactly_what_was_published() -> None:
    tensors = {"w": torch.randn(5, 4), "v": torch.randn(3)}
    channel = channel_for(tensors)
    writer, reader = SharedMemoryWriter(channel), SharedMemoryReader(channel)
    assert reader.newest_version() is None
    writer.publish(tensors, PolicyVersion(0, 0))
    assert reader.newest_version() == PolicyVersion(0, 0)
    copy = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert reader.load_into(copy) == PolicyVersion(0, 0)
    assert all(torch.equal(copy[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_travel_in_their_dtype_and_take_half_the_memory(dtype: torch.dtype) -> None:
    tensors = {"w": torch.randn(50, 64).to(dtype), "v": torch.randn(3).to(dtype)}
    channel = SharedMemoryChannel(2 * ParameterLayout.of(tensors, dtype).num_elements)
    writer, reader = SharedMemoryWriter(channel), SharedMemoryReader(channel)
    assert writer.publish(tensors, PolicyVersion(0, 0)).num_bytes == 2 * (50 * 64 + 64)
    copy = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reader.load_into(copy)
    assert all(torch.equal(copy[name], tensors[name]) for name in tensors)


def test_parameters_of_several_dtypes_travel_in_the_widest_and_readers_cast_to_their_own() -> None:
    """A writer of a mixed model loses nothing; a reader in bfloat16 that keeps a weight in float32 takes what a narrow writer has."""
    mixed = {"w": torch.randn(5, 4).bfloat16(), "router": torch.randn(3)}
    channel = channel_for(mixed)
    writer, reader = SharedMemoryWriter(channel), SharedMemoryReader(channel)
    writer.publish(mixed, PolicyVersion(0, 0))
    copy = {name: torch.zeros_like(tensor) for name, tensor in mixed.items()}
    reader.load_into(copy)
    assert all(torch.equal(copy[name], mixed[name]) and copy[name].dtype is mixed[name].dtype for name in mixed)
    narrow = {name: tensor.bfloat16() for name, tensor in mixed.items()}
    channel = channel_for(narrow)
    SharedMemoryWriter(channel).publish(narrow, PolicyVersion(0, 0))
    SharedMemoryReader(channel).load_into(copy)
    assert torch.equal(copy["router"], narrow["router"].float())


def test_parameters_that_no_channel_carries_are_refused_by_dtype() -> None:
    tensors = {"w": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ModelError, match="float64"):
        SharedMemoryWriter(SharedMemoryChannel(1024)).publish(tensors, PolicyVersion(0, 0))


def test_versions_must_rise() -> None:
    tensors = parameters(0)
    writer = SharedMemoryWriter(channel_for(tensors))
    writer.publish(tensors, PolicyVersion(0, 3))
    with pytest.raises(ValueError, match="does not rise"):
        writer.publish(tensors, PolicyVersion(0, 3))
    writer.publish(tensors, PolicyVersion(1, 0))


def test_no_read_is_ever_a_mixture_of_two_updates() -> None:
    """A fast writer overtakes the reader again and again: every set read is uniform and of its version."""
    tensors = parameters(0, size=200_000)
    channel = channel_for(tensors)
    writer, reader = SharedMemoryWriter(channel), SharedMemoryReader(channel)
    writer.publish(tensors, PolicyVersion(0, 0))
    done = threading.Event()

    def publish() -> None:
        number = 0
        while not done.is_set():
            number += 1
            writer.publish(parameters(number, size=200_000), PolicyVersion(0, number))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        copy = parameters(-1, size=200_000)
        newest = PolicyVersion(0, 0)
        for _ in range(200):
            version = reader.load_into(copy)
            assert version >= newest
            newest = version
            for tensor in copy.values():
                assert torch.all(tensor == version.number)
    finally:
        done.set()
        thread.join()
    assert newest.number > 2


class _PublishDuringCopy(torch.Tensor):
    """A staging tensor whose copy_ first lets the writer publish `publishes` more times."""

    publishes: list[int]

    def copy_(self, source: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        half = torch.Tensor.clone(source)
        self.hook()  # type: ignore[attr-defined]
        return super().copy_(half)


@pytest.mark.parametrize(("publishes", "retried"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_an_overtaken_reader_retries_with_the_newest(publishes: int, retried: bool) -> None:
    tensors = parameters(0)
    channel = channel_for(tensors)
    writer, reader = SharedMemoryWriter(channel), SharedMemoryReader(channel)
    writer.publish(tensors, PolicyVersion(0, 0))
    copy = parameters(-1)
    reader.load_into(copy)
    pending = iter(range(1, publishes + 1))

    def overtake() -> None:
        for number in pending:
            writer.publish(parameters(number), PolicyVersion(0, number))

    assert reader._staging is not None
    reader._staging = reader._staging.as_subclass(_PublishDuringCopy)
    reader._staging.hook = overtake  # type: ignore[attr-defined]
    version = reader.load_into(copy)
    assert version.number == (publishes if retried else 0)
    assert torch.all(copy["a"] == version.number)


def test_a_writer_killed_in_the_middle_leaves_the_last_whole_set_and_a_successor_goes_on() -> None:
    tensors = parameters(1)
    channel = channel_for(tensors)
    SharedMemoryWriter(channel).publish(tensors, PolicyVersion(0, 1))
    channel.header[STARTED] = int(channel.header[NEWEST]) + 1  # a second writer died while it filled the other buffer
    _buffer(channel, 0, ParameterLayout.of(tensors, torch.float32)).fill_(99)
    reader = SharedMemoryReader(channel)
    copy = parameters(-1)
    assert reader.load_into(copy) == PolicyVersion(0, 1)
    assert torch.all(copy["a"] == 1)
    SharedMemoryWriter(channel).publish(parameters(2), PolicyVersion(1, 1))
    assert reader.load_into(copy) == PolicyVersion(1, 1)
    assert torch.all(copy["a"] == 2)


def test_a_larger_model_than_the_channel_is_refused() -> None:
    channel = SharedMemoryChannel(4096)
    with pytest.raises(ModelError, match="made for"):
        SharedMemoryWriter(channel).publish(parameters(0, size=10_000), PolicyVersion(0, 0))


def _read_in_child(channel: SharedMemoryChannel, answers: object) -> None:
    copy = parameters(-1)
    version = SharedMemoryReader(channel).load_into(copy)
    answers.put((version, float(copy["a"].mean())))  # type: ignore[attr-defined]


def test_the_channel_travels_to_another_process_and_leaves_no_name_behind() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    tensors = parameters(5)
    channel = channel_for(tensors)
    SharedMemoryWriter(channel).publish(tensors, PolicyVersion(0, 5))
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(channel, answers))
    child.start()
    version, mean = answers.get()
    child.join()
    assert (version, mean) == (PolicyVersion(0, 5), 5.0)
    if Path("/dev/shm").is_dir():
        assert {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")} == set()
