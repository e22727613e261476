"""Tile sizes that were measured on a device, read from a file.

`make gpu ARGS='--only tune'` writes the file. Kernels read the one that ``LORASERVE_GPU_TUNING``
names, or else ``tuned/DEVICE.json`` next to this module, if there is one for the device; without
either, each kernel's own tile sizes hold. The file is JSON::

    {"device": "NVIDIA H100 80GB HBM3",
     "kernels": {"decode_gemm": {"int8/6144x4096/64": {"block_n": 64, "num_stages": 5}}}}

Nothing in it may change how a row's sums are formed within one file: the parts that a sum is cut
into, and the inputs of one step of them, aren't tunable.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from loraserve_kernels.errors import InvalidTuning

VARIABLE = "LORASERVE_GPU_TUNING"
FOLDER = Path(__file__).parent / "tuned"

_WARPS, _STAGES, _BLOCKS = (2, 4, 8), (1, 2, 3, 4, 5, 6), (16, 32, 64, 128, 256)
TUNABLE: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_gemm": {"block_n": (32, 64, 128, 256), "num_warps": _WARPS, "num_stages": _STAGES},
    # below 64 rows another instruction adds a row's products in another order
    "prefill_gemm": {
        "block_m": (64, 128, 256),
        "block_n": (64, 128, 256),
        "block_k": (32, 64, 128),
        "rows_first": (1, 4, 8, 16),
        "num_warps": _WARPS,
        "num_stages": _STAGES,
    },
    "shrink": {"num_warps": _WARPS, "num_stages": _STAGES},
    "expand": {"block": (64, 128, 256), "num_warps": _WARPS, "num_stages": _STAGES},
    "attend_decode": {"block_n": _BLOCKS, "num_warps": _WARPS, "num_stages": _STAGES},
    "attend_chunk": {"block_n": _BLOCKS, "num_warps": _WARPS, "num_stages": _STAGES},
}
"""Fields of each kernel's tile sizes, and the values that each may have."""

Sizes = Mapping[str, Mapping[str, Mapping[str, int]]]
Config = TypeVar("Config")


def tuned(kernel: str, key: str, default: Config) -> Config:
    """Replace the default tile sizes by those of the device's file.

    Args:
        kernel: one of `TUNABLE`.
        key: the shape, as the file names it.
        default: a dataclass with the kernel's fields.

    Raises:
        InvalidTuning: the file that ``LORASERVE_GPU_TUNING`` names can't be used.
    """
    sizes = active()
    if not sizes:
        return default
    found: Any = sizes.get(kernel, {}).get(key)
    return replace(default, **found) if found else default  # type: ignore[type-var]


@cache
def active() -> Sizes:
    """Read the sizes in the file that holds here; nothing without a file.

    Raises:
        InvalidTuning: the file can't be used.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return read(Path(named))
    if not torch.cuda.is_available():
        return {}
    path = FOLDER / file_name(torch.cuda.get_device_name())
    return read(path) if path.is_file() else {}


def file_name(device: str) -> str:
    """Format the file's name for a device: ``nvidia-h100-80gb-hbm3.json``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def read(path: Path) -> Sizes:
    """Read the tile sizes in a file.

    Raises:
        InvalidTuning: it can't be read, or a kernel, field or value in it is none that there is.
    """
    try:
        document = json.loads(path.read_text())
        kernels = document["kernels"]
        for kernel, shapes in kernels.items():
            for key, fields in shapes.items():
                _check(path, kernel, key, fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidTuning):
            raise
        raise InvalidTuning(
            f"{path} isn't a file of tile sizes ({type(error).__name__}: {error}). Write one with "
            f"make gpu ARGS='--only tune', or unset {VARIABLE}."
        ) from error
    return kernels  # type: ignore[no-any-return]


def write(path: Path, device: str, kernels: Sizes, facts: Mapping[str, Any]) -> None:
    """Write a file that `read` takes, whole or not at all.

    Args:
        facts: what else a reader of the file should see: versions, the measured times.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    document = {"device": device, "kernels": kernels, **facts}
    partial.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    read(partial)
    partial.replace(path)


def _check(path: Path, kernel: str, key: str, fields: Mapping[str, int]) -> None:
    if kernel not in TUNABLE:
        raise InvalidTuning(f"{path}: no kernel is called {kernel!r}; there are {', '.join(TUNABLE)}.")
    for name, value in fields.items():
        values = TUNABLE[kernel].get(name)
        if values is None or value not in values:
            allowed = f"one of {', '.join(map(str, values))}" if values else f"no field of {kernel}"
            raise InvalidTuning(f"{path}: {kernel} {key}: {name} is {value!r}; it is {allowed}.")
