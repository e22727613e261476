"""Names of the CPU's kernels, as their compiled functions and the cache's marks have them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

STEP_KERNELS = (
    "attend",
    "draw_tokens",
    "norm_rows",
    "gate_rows",
    "turn_and_store",
    "store_kv",
    "find_likeliest",
    "run_kernels",
    "gather_rows",
    "quantize_rows",
)
"""Kernels that every base's steps need, those first that take longest to compile."""

LORA_KERNELS: Mapping[str, str] = {
    "float32": "lora_float32",
    "bfloat16": "lora_bfloat16",
    "float16": "lora_float16",
    "int8": "lora_int8",
}
"""Kernels of adapters, by the name of the dtype that they are held in."""

KERNELS: Mapping[str, tuple[str, str]] = {
    "attend": ("attention.kernel", "compiled"),
    "norm_rows": ("program.norm_kernel", "compiled"),
    "gate_rows": ("program.gate_kernel", "compiled"),
    "turn_and_store": ("program.rotary_kernel", "compiled"),
    "store_kv": ("attention.store_kernel", "compiled"),
    "draw_tokens": ("sampling.drawing_kernel", "compiled"),
    "find_likeliest": ("sampling.likeliest_kernel", "compiled"),
    "run_kernels": ("program.runner", "compiled"),
    "gather_rows": ("program.gather_kernel", "compiled"),
    "quantize_rows": ("linear.row_quantization", "compiled"),
    **{name: ("lora.kernel", f"compiled_{dtype}") for dtype, name in LORA_KERNELS.items()},
}
"""Module below `loraserve_kernels.cpu` and its function that compiles the kernel, by its name."""


def load_kernel(name: str) -> Any:
    """Load a kernel, compiled or read from the cache."""
    module, function = KERNELS[name]
    return getattr(importlib.import_module(f"loraserve_kernels.cpu.{module}"), function)()
