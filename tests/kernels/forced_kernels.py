"""Tries every kernel of a CPU's linears with the instruction sets that the environment allows, and
prints what was found as JSON. Run by `test_chooser` in a process of its own.

ONEDNN_MAX_CPU_ISA=AVX2 python -P tests/kernels/forced_kernels.py
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraserve_kernels.common.arithmetic import LEVELS
from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.cpu import instructions
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.linear.candidates import FORMATS, Candidate, _of_codes, compile_candidate, example
from loraserve_kernels.cpu.linear.chooser import Chooser
from loraserve_kernels.cpu.linear.widen import widen

CHANNELS, WIDTH = 80, 768
TIMED = (1024, 768)
TIMED_ROWS = (1, 8, 64)
WINDOWS = 5
IN_GROUPS = ("int8-g32", "int4-g32", "mxfp4-g32")


def lower_fbgemm() -> None:
    """Have fbgemm use AVX2 alone: it knows no variable for that."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library._ZN6fbgemm14fbgemmForceIsaENS_10inst_set_tE(1)


def worst(num_rows: int, top: int, bottom: int) -> Tensor:
    """Return rows of the largest codes: of one sign, of the other, in turn,
    by pairs and by fours.
    """
    kinds = []
    for period in (0, 1, 2, 4):
        positive = torch.ones(WIDTH, dtype=torch.bool) if period == 0 else torch.arange(WIDTH) // period % 2 == 0
        kinds += [torch.where(positive, top, bottom), torch.where(positive, bottom, top)]
    return torch.stack(kinds).repeat(-(-num_rows // len(kinds)), 1)[:num_rows]


def saturates(candidate: Candidate, format: str) -> bool:
    """Return whether a product of int8 by int8 is wrong anywhere, by sums in int64."""
    codes = worst(CHANNELS, 127, -128).to(torch.int8)
    scales = torch.ones(CHANNELS, 1)
    product = candidate.make(QuantizedWeight("int8", codes, scales, None, WIDTH, WIDTH, CHANNELS))
    levels = LEVELS[candidate.name]
    for num_rows in (1, 2, 8, 17, 64):
        for x in (worst(num_rows, levels, -levels), worst(num_rows, levels, -levels).flip(0)):
            exact = x.long() @ codes.long().T
            # sums of this size are whole in float32 to within two
            if ((product(x.float()).double() - exact).abs() > exact.abs() * 4e-7 + 0.01).any():
                return True
    return False


def follows_weight(candidate: Candidate, format: str) -> bool:
    """Return whether products of the largest codes are those of the dequantized weight,
    within rounding.
    """
    weight = _of_codes(format, worst(CHANNELS, 127, -128).to(torch.int8))
    wide = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)
    product = candidate.make(weight)
    tolerance = 1e-2 if candidate.name == "bf16" else 2e-5
    for num_rows in (1, 8, 64):
        for x in (worst(num_rows, 127, -127).float(), torch.randn(num_rows, WIDTH)):
            bound = tolerance * (x.double().abs() @ wide.abs().T)
            if ((product(x) - x.double() @ wide.T).abs() > bound).any():
                return False
    return True


def follows_codes(candidate: Candidate, format: str) -> bool:
    """Return whether products of int4 or groups by int8 are exact but for their scales' rounding.

    Rows are their own codes: the largest of each is 127.
    """
    weight = _of_codes(format, worst(CHANNELS, 127, -128).to(torch.int8))
    wide = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)
    product = candidate.make(weight)
    for num_rows in (1, 2, 8, 17, 64):
        for x in (worst(num_rows, 127, -127), worst(num_rows, 127, -127).flip(0)):
            bound = 1e-6 * (x.double().abs() @ wide.abs().T)
            if ((product(x.float()) - x.double() @ wide.T).abs() > bound).any():
                return False
    return True


def loud_row_spoils_others(candidate: Candidate, format: str) -> bool:
    """Return whether a row fifty times as loud as the others changes their bits."""
    product = candidate.make(example(format, CHANNELS, WIDTH))
    for num_rows in (2, 8, 64):
        x = torch.randn(num_rows, WIDTH)
        quiet = product(x)
        x[num_rows // 2] *= 50
        rest = torch.arange(num_rows) != num_rows // 2
        if not torch.equal(product(x)[rest], quiet[rest]):
            return True
    return False


def batch_changes_bits(candidate: Candidate, format: str) -> bool:
    product, x = candidate.make(example(format, CHANNELS, WIDTH)), torch.randn(64, WIDTH)
    together = product(x)
    return not all(torch.equal(product(x[:n].clone()), together[:n]) for n in (1, 2, 5, 8, 9, 33))


def ratio(product: Callable[[Tensor], Tensor], packed: gemm.FloatWeight, x: Tensor) -> float:
    """Return the time as a multiple of float32's: the least of each, in pairs.

    What looks slow is timed again, as `chooser.probe` does: another process may have had the
    processor for all of a window, which takes a tenth of a second.
    """
    times: dict[str, float] = {"own": math.inf, "float32": math.inf}
    for window in range(WINDOWS):
        time.sleep(window * 0.1)
        for _ in range(25):
            for name in times:
                start = time.perf_counter()
                if name == "own":
                    product(x)
                else:
                    gemm.float_linear(x, packed)
                times[name] = min(times[name], time.perf_counter() - start)
        if times["own"] < 2 * times["float32"]:
            break
    return times["own"] / times["float32"]


def look_at(format: str) -> dict[str, Any]:
    began = time.perf_counter()
    chooser = Chooser()
    for candidate in FORMATS[format]:
        if candidate.is_there():
            compile_candidate(candidate, format)
    compiled = time.perf_counter()
    choice = chooser.choose(format, *TIMED)
    chosen_s = time.perf_counter() - compiled
    found: dict[str, Any] = {}
    for candidate in FORMATS[format]:
        if not candidate.is_there() or (format, candidate.kernel) in chooser._hopeless:
            continue
        if format in ("int4-rounded", *IN_GROUPS) and candidate.name in LEVELS:
            is_right = follows_codes(candidate, format)
        elif candidate.name in LEVELS:
            is_right = not saturates(candidate, format)
        else:
            is_right = follows_weight(candidate, format)
        found[candidate.kernel] = {
            "name": candidate.name,
            "is_right": is_right,
            "is_taken_for_right": candidate.is_exact(candidate, format, WIDTH),
            "loud_row_spoils": loud_row_spoils_others(candidate, format),
            "batch_changes_bits": batch_changes_bits(candidate, format),
        }
    taken = next(c for c in FORMATS[format] if c.arithmetic == choice.arithmetic)
    weight = example(format, *TIMED)
    wide = weight.float() if isinstance(weight, Tensor) else widen(weight)
    product, packed = taken.make(weight), gemm.pack_float(wide)
    return {
        "kernel": choice.kernel,
        "name": choice.arithmetic.name,
        "chosen_s": chosen_s,
        "compiled_s": compiled - began,
        "ratios": {str(n): ratio(product, packed, torch.randn(n, TIMED[1])) for n in TIMED_ROWS},
        "candidates": found,
        "digest": _digest(product),
        "rotated_digest": None
        if isinstance(weight, Tensor) or format in IN_GROUPS
        else _digest(taken.make(replace(weight, rotation=64))),
    }


def _digest(product: Callable[[Tensor], Tensor]) -> str:
    """Return the digest of a product's bits, to compare between instruction sets."""
    import hashlib

    x = torch.linspace(-3, 3, 5 * TIMED[1]).view(5, TIMED[1])
    return hashlib.sha256(product(x).numpy().tobytes()).hexdigest()


def main() -> None:
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        lower_fbgemm()
    torch.manual_seed(0)
    sets = {"onednn": instructions.onednn(), "fbgemm": instructions.fbgemm(), "numba": instructions.numba()}
    formats = sys.argv[1:] or list(FORMATS)
    seen = {"instructions": sets, "formats": {format: look_at(format) for format in formats}}
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
