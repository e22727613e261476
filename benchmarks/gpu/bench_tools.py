"""NVIDIA's own tools on a few launches, where the machine has them: compute-sanitizer on LoRA's
kernels, and Nsight Compute's figures of three kernels.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row

FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")
MOST_S = 60.0
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors",
    "launch__registers_per_thread": "registers",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps",
}
"""Nsight Compute's names of what is shown: nanoseconds, and shares in percent."""
KERNELS = ("decode_gemm_kernel", "shrink_kernel", "attend_kernel")


def cases(machine: Machine) -> Iterator[Case]:
    yield Case("compute-sanitizer", lambda: [_sanitize(machine)])
    yield Case("ncu", lambda: _profile(machine))


def find(tool: str) -> str | None:
    """The program's path, on PATH or where CUDA's packages put it; None: it isn't there."""
    found = shutil.which(tool)
    return found or next((str(Path(folder) / tool) for folder in FOLDERS if (Path(folder) / tool).is_file()), None)


def _missing(tool: str) -> Row:
    return {"what": tool, "note": f"left out: {tool} isn't on this machine."}


def _command(case: str) -> list[str]:
    return [sys.executable, "-P", "-m", "benchmarks.gpu.few_launches", case]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)


def _sanitize(machine: Machine) -> Row:
    tool = find("compute-sanitizer")
    if tool is None or machine.is_tiny:
        # a dry run makes the same launches, unwatched
        if machine.is_tiny:
            _checked(_run(_command("lora")))
        return _missing("compute-sanitizer")
    done = _run([tool, "--tool", "memcheck", "--error-exitcode", "9", *_command("lora")])
    last = next((line for line in reversed(done.stdout.splitlines()) if "ERROR SUMMARY" in line), done.stdout[-200:])
    return {"what": "compute-sanitizer memcheck, LoRA", "ok": done.returncode == 0, "note": last.strip("= ")}


def _checked(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"the launches failed: {(done.stderr or done.stdout)[-300:]}")


def _profile(machine: Machine) -> list[Row]:
    tool = find("ncu")
    if tool is None or machine.is_tiny:
        if machine.is_tiny:
            _checked(_run(_command("three")))
        return [_missing("ncu")]
    names = "|".join(KERNELS)
    command = [tool, "--csv", "--metrics", ",".join(METRICS), "--kernel-name", f"regex:{names}"]
    done = _run([*command, "--launch-count", "6", *_command("three")])
    rows = parse(done.stdout)
    if not rows:
        # counters may be the administrator's alone
        return [{"what": "ncu", "note": f"no figures: {(done.stderr or done.stdout).strip()[-160:]}"}]
    return rows


def parse(text: str) -> list[Row]:
    """Return a row for each kernel's last launch in what ``ncu --csv`` wrote."""
    start = text.find('"ID"')
    found: dict[str, Row] = {}
    for line in csv.DictReader(io.StringIO(text[start:])) if start >= 0 else ():
        name, metric = line["Kernel Name"].split("(")[0], METRICS.get(line["Metric Name"])
        if metric is None:
            continue
        value = float(line["Metric Value"].replace(",", ""))
        row = found.setdefault(name, {"what": f"ncu, {name}"})
        row["us" if metric == "time" else metric] = value / 1e3 if metric == "time" else value
    return list(found.values())
