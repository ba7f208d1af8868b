"""`headrace doctor`: will it run on this machine? Every check ends as ok, warn or fail, and says what to do."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headrace.cli.output import Output
from headrace.sandbox import SandboxResult, run_python_blocking

GIBIBYTE = 2**30
_PROBE_LIMIT_SECONDS = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str | None = None


def execute(arguments: argparse.Namespace, output: Output) -> int:
    checks = []
    for check in all_checks():
        _print(check, output)
        checks.append(check)
    failed = [check for check in checks if check.status == "fail"]
    error = None
    if failed:
        error = {"kind": "DoctorFailed", "message": "; ".join(f"{check.name}: {check.found}" for check in failed), "remedy": failed[0].remedy}
    output.result({"checks": [asdict(check) for check in checks]}, status="failed" if failed else "done", error=error)
    return 1 if failed else 0


def all_checks() -> Iterator[Check]:
    yield check_python(sys.version_info[:3])
    yield check_cores(_num_cores())
    yield check_memory(available_memory_bytes())
    yield from (check_disk("disk", Path.cwd()), check_disk("temporary files", Path(tempfile.gettempdir())), check_shared_memory())
    for package in ("torch", "transformers"):
        yield check_package(package)
    yield check_sandbox(run_python_blocking("pass"))
    yield from check_processes(probe_in_process(_PROBE_LIMIT_SECONDS))


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return Check(name="python", status="fail", found=found, remedy="Install Python 3.11 or newer.")
    if platform.system() != "Linux":
        return Check(name="python", status="warn", found=found, remedy="Headrace is tested on Linux.")
    return Check(name="python", status="ok", found=found)


def check_cores(count: int) -> Check:
    if count < 2:
        remedy = "A sampler and a learner share this core: it works, but neither is ever alone on it."
        return Check(name="cores", status="warn", found=str(count), remedy=remedy)
    return Check(name="cores", status="ok", found=str(count))


def check_memory(available: int | None) -> Check:
    if available is None:
        return Check(name="memory", status="warn", found="unknown", remedy="A run of the door recipe needs about 4 GiB.")
    found = f"{available / GIBIBYTE:.1f} GiB available"
    if available < 2 * GIBIBYTE:
        return Check(name="memory", status="fail", found=found, remedy="Close other programs: even a tiny model needs about 2 GiB for its processes.")
    if available < 4 * GIBIBYTE:
        return Check(name="memory", status="warn", found=found, remedy="Use few samplers and one learner rank.")
    return Check(name="memory", status="ok", found=found)


def check_disk(name: str, directory: Path) -> Check:
    """Free space and the right to write."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return Check(name=name, status="fail", found=f"{directory}: {error.strerror}", remedy="Work in a directory that you may write to, or set TMPDIR.")
    found = f"{directory}: {free / GIBIBYTE:.1f} GiB free"
    if free < GIBIBYTE // 10:
        return Check(name=name, status="fail", found=found, remedy="Free some space: a run writes events and checkpoints.")
    if free < 2 * GIBIBYTE:
        return Check(name=name, status="warn", found=found, remedy="Free some space, or keep few checkpoints (checkpoint.keep).")
    return Check(name=name, status="ok", found=found)


def check_shared_memory(directory: Path = Path("/dev/shm")) -> Check:
    """Published weights lie twice in shared memory; without /dev/shm the channel uses a temporary file."""
    name = "shared memory"
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        return Check(name=name, status="warn", found=f"no {directory} to write to", remedy="Weights go through a temporary file instead: slower on a disk.")
    free = shutil.disk_usage(directory).free
    found = f"{directory}: {free / 2**20:,.0f} MiB free"
    if free < 64 * 2**20:
        remedy = "It must hold the weights twice: enlarge it (docker run --shm-size=1g)."
        return Check(name=name, status="warn", found=found, remedy=remedy)
    return Check(name=name, status="ok", found=found)


def check_package(name: str) -> Check:
    try:
        return Check(name=name, status="ok", found=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name=name, status="fail", found="not installed", remedy=f"pip install {name}")


def check_sandbox(result: SandboxResult) -> Check:
    """What programs that a model wrote are kept from here, for rewards and tools that run any (sandbox.py)."""
    if not result.ok:
        return Check(name="sandbox", status="warn", found=f"runs nothing: {result.stderr.strip() or result.end}", remedy="It needs Linux (docs/security.md).")
    if missing := result.protections.missing:
        remedy = "Matters only where a reward or tool runs code that a model wrote: docs/security.md."
        return Check(name="sandbox", status="warn", found="; ".join(missing), remedy=remedy)
    return Check(name="sandbox", status="ok", found="no network, and nothing of a program outlives it")


def probe_in_process(limit_seconds: float) -> dict[str, Any]:
    """Starts a role process the way a run does and collects what learner/probe.py finds; `process` says how that went."""
    from headrace.learner.probe import probe
    from headrace.runtime.processes import context, end_forkserver

    results: dict[str, Any] = {}
    started = time.monotonic()
    forkserver = context()
    ours, theirs = forkserver.Pipe(duplex=False)
    process = forkserver.Process(target=probe, args=(theirs,), daemon=True)
    try:
        process.start()
        theirs.close()
        while "model" not in results:
            if not ours.poll(max(0.0, started + limit_seconds - time.monotonic())):
                results["process"] = f"no answer in {limit_seconds:g} s"
                return results
            name, facts = ours.recv()
            results.setdefault("process", {"seconds": time.monotonic() - started})
            results[name] = facts
    except (EOFError, OSError) as error:
        process.join(5.0)
        results["process"] = f"ended with exit code {process.exitcode} ({type(error).__name__})"
    finally:
        if process.is_alive():
            process.join(5.0)
            process.kill()
            process.join()
        ours.close()
        end_forkserver()
    return results


def check_processes(results: dict[str, Any]) -> Iterator[Check]:
    facts = results["process"]
    if isinstance(facts, str):
        yield Check(name="forkserver", status="fail", found=facts, remedy="Look at the lines above; too little memory is the usual cause.")
    else:
        yield Check(name="forkserver", status="ok", found=f"a process with torch answers after {facts['seconds']:.1f} s")
    if "devices" in results:
        yield _devices(results["devices"])
    for name, what, unit in (("matmul", "gigaflops_per_second", "GFLOP/s, float32, one thread"), ("model", "seconds", "s for one update of a tiny model")):
        facts = results.get(name)
        if isinstance(facts, dict):
            yield Check(name=name, status="ok", found=f"{facts[what]:.3g} {unit}")
        else:
            found = facts or "not reached"
            yield Check(name=name, status="fail", found=found, remedy="Reinstall torch and transformers at the versions of constraints.txt.")


def _devices(facts: Any) -> Check:
    if isinstance(facts, str):
        return Check(name="devices", status="fail", found=facts, remedy="Reinstall torch at the version of constraints.txt.")
    names = [*facts["accelerators"], *(["mps"] if facts["mps"] else [])]
    return Check(name="devices", status="ok", found=", ".join(names) if names else "cpu only")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes() -> int | None:
    """MemAvailable of Linux; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _print(check: Check, output: Output) -> None:
    line = f"{check.status:<5} {check.name:<16} {check.found}"
    output.show(line + (f"\n      {check.remedy}" if check.remedy and check.status != "ok" else ""))
    output.people.flush()
