"""Prints which kernel each format takes on this machine, and how fast each candidate is.

The output is one JSON object. `loraserve doctor` runs it in a process of its own.

python -m loraserve_kernels.cpu.linear.kernel_table             # every format, two shapes
python -m loraserve_kernels.cpu.linear.kernel_table int8 --quick
"""

from __future__ import annotations

import functools
import json
import math
import sys
from typing import Any

from loraserve_kernels.cpu import instructions, threads
from loraserve_kernels.cpu.linear import cuts
from loraserve_kernels.cpu.linear.candidates import FORMATS, compile_candidate
from loraserve_kernels.cpu.linear.chooser import Choice, Chooser, probe

SHAPES = ((2048, 768), (2048, 4096))
"""Shapes of the weights that are timed: out_features, in_features.

One that a core's own cache holds in 8 bits, and one that none does.
"""
_RUNS, _RUN_S = 40, 0.05


def table(formats: list[str], *, is_quick: bool) -> dict[str, Any]:
    """Measure or look up what each format takes.

    Args:
        formats: of `FORMATS`; empty: all.
        is_quick: what a load would find in a fraction of a second, instead of the best of many runs
            on whole shapes.
    """
    found: list[Choice] = []
    chooser = Chooser()
    cut_s = functools.partial(cuts.cut_s, threads.num_threads())
    for format in formats or FORMATS:
        if is_quick:
            found.append(chooser.choose(format, *SHAPES[0]))
            continue
        for candidate in FORMATS[format]:
            if candidate.is_there():
                compile_candidate(candidate, format)
        for shape in SHAPES:
            found.append(probe(format, *shape, runs=_RUNS, run_s=_RUN_S, cut_s=cut_s))
    sets = {
        "onednn": instructions.onednn(),
        "fbgemm": instructions.fbgemm(),
        "torch": instructions.aten(),
        "numba": instructions.numba(),
    }
    return {"instructions": sets, "cut_s": _rounded(cut_s()), "formats": [_entry(choice) for choice in found]}


def _entry(choice: Choice) -> dict[str, Any]:
    operations = 2e-9 * choice.out_features * choice.in_features

    def row(num_rows: int, seconds: float) -> dict[str, Any]:
        return {
            "rows": num_rows,
            "gops": _rounded(num_rows * operations / seconds),
            "ratio": _rounded(seconds / choice.float_s[num_rows]),
        }

    return {
        "format": choice.format,
        "out_features": choice.out_features,
        "in_features": choice.in_features,
        "arithmetic": choice.arithmetic.name,
        "kernel": choice.kernel,
        "instructions": choice.arithmetic.instructions,
        "is_slower": choice.is_slower,
        "mean_ratio": _rounded(choice.mean_ratio),
        "rows": [row(n, choice.seconds(n)) for n in choice.float_s],
        "candidates": [
            {
                "kernel": measured.arithmetic.kernel,
                "arithmetic": measured.arithmetic.name,
                "instructions": measured.arithmetic.instructions,
                "verdict": measured.verdict or "usable",
                "rows": [row(n, seconds) for n, seconds in measured.seconds.items()],
            }
            for measured in choice.measured
        ],
    }


def _rounded(number: float) -> float | None:
    """Three digits; None for what isn't known, which JSON has no number for."""
    return float(f"{number:.3g}") if math.isfinite(number) else None


def main() -> None:
    arguments = sys.argv[1:]
    formats = [argument for argument in arguments if not argument.startswith("-")]
    unknown = [format for format in formats if format not in FORMATS]
    if unknown:
        sys.exit(f"unknown formats: {', '.join(unknown)}; known are {', '.join(FORMATS)}")
    sys.stdout.write(json.dumps(table(formats, is_quick="--quick" in arguments)) + "\n")


if __name__ == "__main__":
    main()
