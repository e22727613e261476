"""(config, tensors, base) → AdapterIR.

The tensors decide, the config must agree, and every tensor is consumed exactly once.

Problems are collected and reported together, so that one corrected upload fixes all of them. Each
of PEFT's kinds has a module in `tuners`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraserve.adapters.config.kinds import check_kind
from loraserve.adapters.format.peft_format import Buffer, read_adapter
from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.adapters.tuners import TUNERS
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec


def compile_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, TensorView], base: BaseSpec, limits: Limits = LIMITS
) -> AdapterIR:
    """Return the adapter in the base's terms.

    Its arrays are those of `tensors`, or slices of them; rows are copied only where they had to be
    reordered.

    Args:
        config: contents of ``adapter_config.json``.
        tensors: contents of ``adapter_model.safetensors``, under the names that PEFT's
            save_pretrained writes.

    Raises:
        AdapterFormatError: malformed config values, tensors missing or unknown, ranks that disagree
            with the config.
        AdapterUnsupported: a config field that would change the answers and isn't implemented.
        AdapterBaseMismatch: shapes, layers or modules that the base doesn't have.
            With several kinds of problems, the first of these; `problems` lists all.
    """
    check_kind(config)
    return TUNERS[str(config["peft_type"])](config, tensors, base, limits)


def open_adapter(config: Buffer, weights: Buffer, base: BaseSpec) -> AdapterIR:
    """Read an adapter's two files and compile them for the base; the arrays are views of `weights`.

    Raises:
        AdapterRejected: as `read_adapter` and `compile_adapter`.
    """
    adapter = read_adapter(config, weights)
    return compile_adapter(adapter.config, adapter.tensors, base)
