"""Compilers of PEFT's kinds of adapters, all to the same form; NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.adapters.tuners.adalora import compile_adalora
from loraserve.adapters.tuners.compilation import FoldedAdapter
from loraserve.adapters.tuners.ia3 import compile_ia3
from loraserve.adapters.tuners.loha import compile_loha
from loraserve.adapters.tuners.lokr import compile_lokr
from loraserve.adapters.tuners.lora import compile_lora
from loraserve.adapters.tuners.vera import compile_vera
from loraserve.limits import Limits
from loraserve.types import BaseSpec

Compile = Callable[[Mapping[str, Any], Mapping[str, TensorView], BaseSpec, Limits], AdapterIR | FoldedAdapter]

TUNERS: Mapping[str, Compile] = {
    "LORA": compile_lora,
    "LOHA": compile_loha,
    "LOKR": compile_lokr,
    "IA3": compile_ia3,
    "VERA": compile_vera,
    "ADALORA": compile_adalora,
}
"""PEFT's name of a kind → (config, tensors, base, limits) → the adapter in the base's terms.

Of kinds that are products of small matrices, the factors aren't computed yet.
"""
