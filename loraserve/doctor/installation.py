"""Python, the packages, and what torch finds of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from loraserve.doctor.checks import Check, fail, ok, warn
from loraserve.limits import GIB

PROBE_TIMEOUT_S = 120.0
"""The first import of torch on a cold disk takes most of a minute."""

_PROBE = """
import json, torch
gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": [], "threads": torch.get_num_threads()}
found["gloo"] = gloo
found["engines"] = list(torch.backends.quantized.supported_engines)
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": of.name, "bytes": of.total_memory, "capability": [of.major, of.minor]})
try:
    import triton
    found["triton"] = triton.__version__
except ImportError as error:
    found["triton_error"] = str(error)[:200]
print(json.dumps(found))
"""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_BOUND = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][^,\s]*)")
_MIN_CAPABILITY = (8, 0)
INSTALL = "pip install -c constraints.txt -e ."


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Facts that torch reported, in a separate process.

    Attributes:
        gpu_bytes: the first GPU's memory; None without one.
        engines: of torch's quantized operators.
        gloo: whether several processes on CPUs can share a base.
    """

    torch: str
    cuda: str | None
    gpu_name: str | None
    gpu_bytes: int | None
    capability: tuple[int, int] | None
    triton: str | None
    triton_error: str
    threads: int
    engines: tuple[str, ...]
    gloo: bool = True


def check_python() -> Iterator[Check]:
    """Check the interpreter, by what this package requires."""
    found, wanted = (
        ".".join(map(str, sys.version_info[:3])),
        metadata.metadata("loraserve")["Requires-Python"] or ">=3.11",
    )
    if satisfies(found, wanted):
        yield ok("python", found, wanted)
    else:
        yield fail("python", found, wanted, f"Install Python {wanted}.")


def check_packages() -> Iterator[Check]:
    """Check everything that this package needs, by the versions that are installed.

    Nothing is imported.
    """
    wrong, num_right = [], 0
    for line in metadata.requires("loraserve") or []:
        match = _REQUIREMENT.match(line)
        if match is None or "extra" in (match[3] or "") or "win32" in (match[3] or ""):
            continue
        name, wanted = match[1], match[2].strip()
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing (expected {wanted or 'any'})")
            continue
        if satisfies(found, wanted):
            num_right += 1
        else:
            wrong.append(f"{name} {found} (expected {wanted})")
    if wrong:
        yield fail("packages", "; ".join(wrong), "the versions in pyproject.toml", INSTALL)
    else:
        yield ok("packages", f"{num_right} packages, of versions that are supported")


def probe() -> TorchFacts:
    """Query torch, in a child process and with a time limit.

    Raises:
        OSError: it can't be started, doesn't answer, or breaks; the text explains how.
    """
    # keys are none of its business
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith("LORASERVE_")}
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        done = subprocess.run(  # noqa: S603 (our own words)
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=variables, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"torch didn't answer within {PROBE_TIMEOUT_S:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    except ValueError:
        found = None
    if found is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"torch can't be used: {last[:300]}")
    gpu = found["gpus"][0] if found["gpus"] else None
    return TorchFacts(
        torch=found["torch"],
        cuda=found["cuda"],
        gpu_name=gpu and gpu["name"],
        gpu_bytes=gpu and int(gpu["bytes"]),
        capability=(gpu["capability"][0], gpu["capability"][1]) if gpu else None,
        triton=found.get("triton"),
        triton_error=found.get("triton_error", ""),
        threads=int(found["threads"]),
        engines=tuple(found["engines"]),
        gloo=bool(found["gloo"]),
    )


def check_torch(probed: TorchFacts, dtype: str) -> Iterator[Check]:
    """Check that torch works, and on a CPU supports the dtype."""
    if dtype == "float16" and probed.gpu_bytes is None and "fbgemm" not in probed.engines:
        yield fail(
            "torch",
            f"{probed.torch} without fbgemm",
            "fbgemm, for float16 on a CPU",
            "Use --dtype float32 or bfloat16.",
        )
    else:
        yield ok("torch", f"{probed.torch} computes, with {probed.threads} threads")


def check_gpu(probed: TorchFacts, device: str, driver_bytes: int | None) -> Iterator[Check]:
    """Check that the requested device exists.

    Args:
        device: auto, cpu or cuda.
        driver_bytes: of the GPU that the driver's own program finds; None: it finds none.
    """
    if device == "cpu":
        yield ok("gpu", "not needed (--device cpu)")
    elif probed.gpu_bytes is None and driver_bytes is not None:
        build = f"torch {probed.torch} doesn't find it" + ("" if probed.cuda else " (a build for CPUs)")
        yield (fail if device == "cuda" else warn)(
            "gpu",
            f"the driver has a GPU of {driver_bytes / GIB:.0f} GiB, {build}",
            "a build of torch for CUDA",
            "Install one.",
        )
    elif probed.gpu_bytes is None:
        if device == "cuda":
            yield fail("gpu", "none", "a CUDA device (--device cuda)", "Use --device cpu.")
        else:
            yield ok("gpu", "none: the CPU is used")
    else:
        yield from _check_found_gpu(probed, device)


def _check_found_gpu(probed: TorchFacts, device: str) -> Iterator[Check]:
    capability = probed.capability or (0, 0)
    name = f"{probed.gpu_name}, {(probed.gpu_bytes or 0) / GIB:.1f} GiB, sm_{capability[0]}{capability[1]}"
    if capability < _MIN_CAPABILITY:
        yield warn(
            "gpu", name, "sm_80 or newer: the kernels multiply in bfloat16", "Use --dtype float16, or --device cpu."
        )
    else:
        yield ok("gpu", name)
    wanted = next((line for line in metadata.requires("loraserve") or [] if line.startswith("triton")), "triton>=3.6")
    bounds = wanted.partition(";")[0].removeprefix("triton").strip()
    if probed.triton is None:
        told = fail if device == "cuda" else warn
        yield told("triton", probed.triton_error or "missing", bounds, "pip install 'loraserve[gpu]'")
    elif satisfies(probed.triton, bounds):
        yield ok("triton", probed.triton, bounds)
    else:
        yield fail("triton", probed.triton, bounds, "pip install 'loraserve[gpu]'")


def satisfies(version: str, wanted: str) -> bool:
    """Check whether a version is within bounds such as ``>=2.1,<2.2``.

    Local parts (``+cpu``) and what stands behind numbers don't count.
    """
    found = _numbers(version)
    for sign, text in _BOUND.findall(wanted):
        bound = _numbers(text)
        width = max(len(found), len(bound))
        left, right = (parts + (0,) * (width - len(parts)) for parts in (found, bound))
        holds = {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
        }
        if not holds[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
