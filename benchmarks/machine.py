"""Rates of this machine: the limits that the benchmarks' figures are held against.

Prints one JSON object.

python benchmarks/machine.py
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.linear.chooser import chooser

INSTRUCTION_SETS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def best_s(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several runs: others may share the machine."""
    work()
    elapsed = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        elapsed.append(time.perf_counter() - start)
    return min(elapsed)


def processor() -> dict[str, Any]:
    """The processor's name and instruction sets; nothing that names the machine."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {"processor": platform.processor(), "instructions": []}
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.processor()),
        "instructions": [name for name in INSTRUCTION_SETS if name in flags],
    }


def int8_weight(weight: torch.Tensor) -> gemm.Int8Weight:
    """Return the weight in int8, for the kernel that this machine takes."""
    rounded = quantize(weight, "int8")
    kernel = chooser().choose("int8", *weight.shape).kernel
    return gemm.pack_int8(rounded.codes, rounded.scales.flatten(), kernel)


def measure() -> dict[str, Any]:
    """Bytes and operations a second, with all of torch's threads."""
    large = torch.ones(64 << 20)
    target = torch.empty_like(large)
    # hundreds of runs: a limit that was measured in a noisy moment is no limit
    read_s = best_s(large.sum, 200)
    copy_s = best_s(lambda: target.copy_(large), 50)
    size, rows = 2048, 512
    x, weight = torch.randn(rows, size), torch.randn(4 * size, size)
    packed, rounded = gemm.pack_float(weight), int8_weight(weight)
    float_s = best_s(lambda: gemm.float_linear(x, packed), 30)
    int8_s = best_s(lambda: gemm.int8_linear(x, rounded), 100)
    half, half_weight = x.bfloat16(), weight.bfloat16()
    bfloat16_s = best_s(lambda: torch.nn.functional.linear(half, half_weight), 30)
    operations = 2 * rows * weight.numel()
    return {
        "read_bytes_per_s": large.nbytes / read_s,
        "copy_bytes_per_s": 2 * large.nbytes / copy_s,
        "float32_ops_per_s": operations / float_s,
        "bfloat16_ops_per_s": operations / bfloat16_s,
        "int8_ops_per_s": operations / int8_s,
    }


def main() -> None:
    packages = ("torch", "numba", "numpy", "transformers", "peft")
    facts = {
        **processor(),
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "int8_library": int8_weight(torch.randn(16, 16)).kernel,
        **measure(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
