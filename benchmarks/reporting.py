"""Results of a run, left in benchmarks/results/: a page and its numbers, with the machine,
the command and who else was on it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.machine import processor
from benchmarks.serving import HERE, say

RESULTS = HERE / "results"
PACKAGES = ("torch", "numba", "numpy")


def facts() -> dict[str, Any]:
    """The machine as it is before the start: nothing that names it."""
    return {
        **processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "load_average": os.getloadavg()[0],
    }


def command(part: str, arguments: Sequence[str]) -> str:
    """Return the command line of the same run."""
    return f"make bench ARGS='{' '.join([part, *arguments])}'"


def describe(machine: Mapping[str, Any], command: str, load_after: float, date: str) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"""- Machine: {machine["processor"]}, {machine["cores"]} threads, {machine["memory_bytes"] / 2**30:.0f} \
GiB; {", ".join(machine["instructions"])}.
- Versions: Python {machine["python"]}, {versions}.
- Date: {date}. Command: `{command}`.
- Others on the machine: a load average of {machine["load_average"]:.1f} on {machine["cores"]} cores before the start, \
{load_after:.1f} at the end, this run's own load included.
"""


def write(
    name: str, title: str, text: str, numbers: Mapping[str, Any], machine: Mapping[str, Any], folder: Path = RESULTS
) -> tuple[Path, Path]:
    """`name`.md and `name`.json are there, over what was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    page, document = folder / f"{name}.md", folder / f"{name}.json"
    page.write_text(f"# {title}\n\n{text.strip()}\n")
    document.write_text(json.dumps(_plain({"machine": machine, **numbers}), indent=1, allow_nan=False) + "\n")
    return page, document


def dated(part: str, size: str, *, is_quick: bool) -> str:
    return f"{part}-{size}-{today()}{'-quick' if is_quick else ''}"


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def finish(
    part: str,
    title: str,
    text: str,
    machine: Mapping[str, Any],
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
    *,
    variant: str = "",
    **numbers: Any,
) -> None:
    """The page is printed, and it and its numbers are written.

    Args:
        variant: what the run differs in from another of the day, which keeps its page.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    head = describe(machine, command(part, typed), os.getloadavg()[0], today())
    page = f"{head}\n{text}"
    print(page)
    name = dated(f"{part}-{variant}" if variant else part, options.size, is_quick=options.quick)
    written = write(name, title, page, {"options": vars(options), **numbers}, machine)
    say(f"written: {' and '.join(f'benchmarks/results/{path.name}' for path in written)}")


def _plain(value: Any) -> Any:
    """As JSON has it, which has no NaN."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
