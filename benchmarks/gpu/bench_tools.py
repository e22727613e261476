"""Nsight Compute's figures of three kernels, where the machine has it."""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row

PLACES = ("usr/local/cuda/bin", "usr/local/cuda/compute-sanitizer", "opt/nvidia/nsight-compute/*")
LEAST_S, MOST_S = 15.0, 75.0
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
    yield Case("ncu", lambda: _profile(machine))


def find(tool: str) -> str | None:
    """The program's path, on PATH or where CUDA's packages put it; None: it isn't there."""
    places = (path for place in PLACES for path in Path("/").glob(f"{place}/{tool}") if path.is_file())
    return shutil.which(tool) or next(map(str, places), None)


def _missing(tool: str) -> Row:
    return {"what": tool, "note": f"left out: {tool} isn't on this machine."}


def launches(case: str) -> list[str]:
    """Return the command that makes a case's launches."""
    return [sys.executable, "-P", "-m", "benchmarks.gpu.few_launches", case]


def run(machine: Machine, command: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run it within the part's time; None: it didn't end, and nothing of it is left."""
    seconds = max(LEAST_S, min(MOST_S, machine.deadline - time.time()))
    # a tool starts what it watches: with a signal to the group both end
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _unfinished(tool: str) -> Row:
    return {"what": tool, "note": "it didn't end within the part's time"}


def checked(done: subprocess.CompletedProcess[str] | None) -> None:
    if done is None:
        raise RuntimeError("the launches didn't end")
    if done.returncode:
        raise RuntimeError(f"the launches failed: {(done.stderr or done.stdout)[-300:]}")


def _profile(machine: Machine) -> list[Row]:
    tool = find("ncu")
    if tool is None or machine.is_tiny:
        if machine.is_tiny:
            checked(run(machine, launches("three")))
        return [_missing("ncu")]
    names = "|".join(KERNELS)
    # clocks are left alone
    command = [tool, "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", f"regex:{names}", "--launch-count", "6"]
    done = run(machine, [*command, *launches("three")])
    if done is None:
        return [_unfinished("ncu")]
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
        try:
            value = float(line["Metric Value"].replace(",", ""))
        except ValueError:
            # n/a: a counter that this device hasn't
            continue
        row = found.setdefault(name, {"what": f"ncu, {name}"})
        row["us" if metric == "time" else metric] = value / 1e3 if metric == "time" else value
    return list(found.values())
