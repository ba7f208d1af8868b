"""Devices by name, or from a device.toml of one's own: what a roofline needs to know of them."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from headrace.errors import ConfigError, Problem

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Dense peaks, without structured sparsity, as data sheets give them."""

    name: str
    peak_flops: dict[str, Positive]
    """Floating-point operations per second by dtype: float32, bfloat16, float16, fp8."""
    memory_bandwidth: Positive
    """Bytes per second."""
    memory_bytes: Positive
    link_bandwidth: Positive = 50e9
    """Bytes per second to the other devices of an engine, each direction (NVLink or PCIe)."""

    def flops(self, dtype: str) -> float:
        """float16 counts as bfloat16 and the other way round; where fp8 has no units of its own, weights are widened to bfloat16."""
        order = {"float16": ("bfloat16",), "bfloat16": ("float16",), "fp8": ("bfloat16", "float16"), "float32": ("bfloat16",)}
        for name in (dtype, *order.get(dtype, ())):
            if name in self.peak_flops:
                return self.peak_flops[name]
        return next(iter(self.peak_flops.values()))


def _device(name: str, *, float32: float, bfloat16: float, fp8: float | None, bandwidth: float, memory_gb: float, link: float) -> Device:
    peaks = {"float32": float32 * 1e12, "bfloat16": bfloat16 * 1e12, **({} if fp8 is None else {"fp8": fp8 * 1e12})}
    return Device(name=name, peak_flops=peaks, memory_bandwidth=bandwidth * 1e12, memory_bytes=memory_gb * 1e9, link_bandwidth=link * 1e9)


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA's data sheets, SXM versions: TFLOP/s, TB/s, GB, GB/s each direction
        _device("A100", float32=19.5, bfloat16=312, fp8=None, bandwidth=2.039, memory_gb=80, link=300),
        _device("H100", float32=67, bfloat16=989, fp8=1979, bandwidth=3.35, memory_gb=80, link=450),
        _device("H200", float32=67, bfloat16=989, fp8=1979, bandwidth=4.8, memory_gb=141, link=450),
        _device("H20", float32=44, bfloat16=148, fp8=296, bandwidth=4.0, memory_gb=96, link=450),
        _device("B200", float32=80, bfloat16=2250, fp8=4500, bandwidth=8.0, memory_gb=180, link=900),
        _device("L40S", float32=91.6, bfloat16=362, fp8=733, bandwidth=0.864, memory_gb=48, link=32),
    )
}
_ADAPTER: TypeAdapter[Device] = TypeAdapter(Device)


def find_device(name: str) -> Device:
    """A known name, in any case, or the path of a device.toml. Raises ConfigError."""
    known = {each.lower(): device for each, device in DEVICES.items()}
    if name.lower() in known:
        return known[name.lower()]
    path = Path(name)
    if path.suffix == ".toml":
        return load_device(path)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    remedy = f"Did you mean '{known[near[0]].name}'? " if near else ""
    remedy += "Or describe it in a device.toml: name, peak_flops, memory_bandwidth, memory_bytes."
    problem = Problem(
        key="--device", value=name, limit=", ".join(DEVICES), message=f"'{name}' is no device that is known ({', '.join(DEVICES)}).", remedy=remedy
    )
    raise ConfigError([problem])


def load_device(path: Path) -> Device:
    """From TOML: name, peak_flops = {bfloat16 = ...}, memory_bandwidth, memory_bytes, link_bandwidth. Raises ConfigError."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([Problem(file=str(path), key="--device", value=str(path), message=f"it cannot be read: {error.strerror}.")]) from error
    except ValueError as error:
        raise ConfigError([Problem(file=str(path), message=f"it is no TOML: {error}.", remedy="Correct that line.")]) from error
    names = ("name", "peak_flops", "memory_bandwidth", "memory_bytes", "link_bandwidth")
    problems = []
    for key in values.keys() - set(names):
        near = difflib.get_close_matches(key, names, n=1)
        remedy = f"Did you mean '{near[0]}'?" if near else "Remove it."
        problems.append(Problem(file=str(path), key=key, value=str(values[key]), limit=", ".join(names), message=f"unknown key '{key}'.", remedy=remedy))
    peaks = values.get("peak_flops")
    if isinstance(peaks, dict) and (unknown := [each for each in peaks if each not in DTYPE_BYTES] or not peaks):
        what = f"unknown dtype {unknown}" if peaks else "'peak_flops' is empty"
        problems.append(Problem(file=str(path), key="peak_flops", value=str(peaks), limit=", ".join(DTYPE_BYTES), message=f"{what}."))
    try:
        device = _ADAPTER.validate_python(values)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            key = ".".join(map(str, one["loc"]))
            value = None if one["type"] == "missing" else str(one.get("input"))
            problems.append(Problem(file=str(path), key=key, value=value, message=f"'{key}': {one['msg']}.", remedy="In bytes, and operations, per second."))
        raise ConfigError(problems) from error
    if problems:
        raise ConfigError(problems)
    return device
