"""LoRA's launches watched by NVIDIA's compute-sanitizer, where the machine has it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.bench_tools import checked, find, launches, run
from benchmarks.gpu.close import holds
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row

NAME = "compute-sanitizer memcheck, LoRA"


def cases(machine: Machine) -> Iterator[Case]:
    yield Case("memcheck", lambda: [_sanitize(machine)])


def _sanitize(machine: Machine) -> Row:
    tool = find("compute-sanitizer")
    if machine.is_tiny:
        # a dry run makes the same launches, unwatched
        checked(run(machine, launches("lora")))
    if tool is None or machine.is_tiny:
        return {"check": NAME, "note": "left out: compute-sanitizer isn't on this machine"}
    done = run(machine, [tool, "--tool", "memcheck", "--error-exitcode", "9", *launches("lora")])
    if done is None:
        return {"check": NAME, "note": "it didn't end within the part's time"}
    last = next((line for line in reversed(done.stdout.splitlines()) if "ERROR SUMMARY" in line), done.stdout[-200:])
    return holds(NAME, done.returncode == 0, last.strip("= "))
