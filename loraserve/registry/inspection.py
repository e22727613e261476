"""What an upload is, before it may become a version: its files read, compiled for the base, and checked. Runs on a thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.peft_format import Buffer, read_adapter
from loraserve.adapters.validation import check_finite
from loraserve.types import BaseSpec, Digest


@dataclass(frozen=True, slots=True)
class Inspected:
    """An upload that can be served on the base it was checked against."""

    digest: Digest
    rank: int
    target_modules: tuple[str, ...]
    dtype: str
    checks: tuple[Mapping[str, Any], ...]
    """One entry per check that it passed: ``{"name", "status", "detail"}``."""


def inspect_upload(config: bytes, weights: Buffer, base: BaseSpec) -> Inspected:
    """What the two files hold. Nothing of `weights` is referred to afterwards.

    Raises:
        AdapterRejected: it can't be served; `problems` lists every reason that one stage finds.
    """
    adapter = read_adapter(config, weights)
    ir = compile_adapter(adapter.config, adapter.tensors, base)
    check_finite(ir)
    return Inspected(
        digest=adapter_digest(adapter.config, adapter.tensors),
        rank=ir.rank,
        target_modules=ir.target_modules,
        dtype=ir.dtype,
        checks=(
            _passed("format", f"{len(adapter.tensors)} tensors, {ir.num_parameters} parameters"),
            _passed("base", f"fits {base.id} ({base.digest[:12]}) in {len(ir.layers)} of {base.num_layers} layers"),
            _passed("finite", "no NaN, no infinity, no update out of range"),
        ),
    )


def _passed(name: str, detail: str) -> dict[str, Any]:
    return {"name": name, "status": "passed", "detail": detail}
