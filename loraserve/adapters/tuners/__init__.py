"""The kinds of adapters beside LoRA that PEFT trains and that lower to the same form. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loraserve.adapters.ir import AdapterIR, TensorView
from loraserve.limits import Limits
from loraserve.types import BaseSpec

Compile = Callable[[Mapping[str, Any], Mapping[str, TensorView], BaseSpec, Limits], AdapterIR]
Canonical = Callable[[Mapping[str, Any]], list[tuple[str, str]]]

TUNERS: Mapping[str, Compile] = {}
"""PEFT's name of a kind (``LOHA``) → (config, tensors, base, limits) → the adapter in the base's terms."""

CANONICAL: Mapping[str, Canonical] = {}
"""PEFT's name of a kind → the fields of a config that decide the arithmetic of an adapter of it, as an adapter's digest frames them."""
