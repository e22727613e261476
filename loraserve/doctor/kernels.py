"""Kernels that compute a CPU's linears on this machine.

Formats that are slower than float32 are listed too. A process of its own tries them, which imports
torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from loraserve.doctor.checks import Check, ok, warn

TIMEOUT_S = 300.0
"""Timeout in seconds.

Trying every format takes about 15 on two cores, and ten more while kernels are compiled.
"""

_MODULE = "loraserve_kernels.cpu.linear.kernel_table"
_HEADS = {"int4": ("int8",), "nf4": ("int8",)}
"""Formats of the head, by the format of the layers."""


def tried(formats: Sequence[str] = (), *, is_quick: bool = False) -> dict[str, Any]:
    """Run `loraserve_kernels.cpu.linear.kernel_table`, and read the table that it prints.

    Args:
        formats: of its table; empty: all.
        is_quick: only what a load would find.

    Raises:
        OSError: the process can't be started, doesn't answer, or breaks; the text explains how.
    """
    # keys are none of its business
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith("LORASERVE_")}
    command = [sys.executable, "-P", "-m", _MODULE, *formats, *(["--quick"] if is_quick else [])]
    try:
        done = subprocess.run(  # noqa: S603 (our own words)
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"timing the kernels took longer than {TIMEOUT_S:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    try:
        found: dict[str, Any] | None = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    except ValueError:
        found = None
    if found is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"the kernels can't be timed: {last[:300]}")
    return found


def formats_of(quantize: str, dtype: str, activation_dtype: str) -> tuple[str, ...]:
    """Choose the formats, as the table names them, that settings mean on a CPU.

    None where linears are float32.
    """
    if quantize == "none":
        return (dtype,) if dtype in ("bfloat16", "float16") else ()
    is_float = activation_dtype == "float"
    by_channel = "int8-weights" if is_float else "int8"
    heads = tuple(by_channel for _ in _HEADS.get(quantize, ()))
    own = {"int8": by_channel, "int4": "int4-zeros" if is_float else "int4-rounded"}
    return (own.get(quantize, quantize), *heads)


def check(found: dict[str, Any]) -> Iterator[Check]:
    """Report what each format takes; warn where float32 is faster."""
    for one in found["formats"]:
        ratios = ", ".join(f"{row['ratio']} at {row['rows']}" for row in one["rows"])
        how = f"{one['format']}: {one['arithmetic']} ({one['kernel']}, {one['instructions']})"
        words = f"{how}, time as a multiple of float32's by rows: {ratios}"
        if one["is_slower"]:
            advice = (
                "This format only saves memory: use another --quantize, or none. loraserve doctor --kernels shows all."
            )
            yield warn("kernels", words, "no slower than float32", advice)
        else:
            yield ok("kernels", words)


def records(found: dict[str, Any]) -> list[dict[str, object]]:
    """Format the table for people: a line for each format, shape and number of rows."""
    return [
        {
            "format": one["format"],
            "shape": f"{one['out_features']}×{one['in_features']}",
            "rows": row["rows"],
            "arithmetic": one["arithmetic"],
            "kernel": one["kernel"],
            "instructions": one["instructions"],
            "gop/s": row["gops"],
            "× float32": row["ratio"],
        }
        for one in found["formats"]
        for row in one["rows"]
    ]
