"""Inspection of an upload before it becomes a version: parse, compile for the base, check.

Runs on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraserve.adapters.compiler import Reserve, compile_adapter
from loraserve.adapters.digest import adapter_digest
from loraserve.adapters.extra_files import NO_EXTRA_FILES, ExtraFiles
from loraserve.adapters.format.peft_format import Buffer, read_adapter
from loraserve.adapters.format.tensor_names import modelled_names, shown_modules
from loraserve.adapters.ir import AdapterIR
from loraserve.adapters.strict_json import shown
from loraserve.adapters.validation import check_finite
from loraserve.registry.health.base_names import BaseNames
from loraserve.registry.health.checks import WARNED
from loraserve.registry.served_base import BASE
from loraserve.types import BaseSpec, Digest, VersionExtras

CheckFit = Callable[[AdapterIR, BaseSpec], object]
"""Function that raises AdapterRejected for an adapter that the device can never hold."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """Upload that can be served on the base that it was checked against."""

    digest: Digest
    rank: int
    target_modules: tuple[str, ...]
    dtype: str
    checks: tuple[Mapping[str, Any], ...]
    """Entry of each passed check: ``{"name", "status", "detail"}``."""
    num_extra_rows: int = 0
    """Rows of its embedding and head beyond the base's."""
    extras: VersionExtras | None = None
    """Extra files of the version, apart from its config and its weights; `digest` covers them."""
    files: ExtraFiles = NO_EXTRA_FILES
    """Files of `extras`: what was uploaded, less what is the base's."""


def inspect_upload(
    config: bytes,
    weights: Buffer,
    base: BaseSpec,
    *,
    names: BaseNames | None = None,
    check_fit: CheckFit = lambda ir, base: None,
    reserve: Reserve = lambda num_bytes: None,
    pause: Callable[[], object] = lambda: None,
) -> Inspected:
    """Inspect the two files; `weights` isn't referred to after the return.

    Args:
        names: names of the base; None: its id alone.
        check_fit: refuses what the device can never hold.
        reserve: as in `compile_adapter`.
        pause: called between pieces of the work (`background.Throttle`).

    Raises:
        AdapterRejected: the adapter can't be served; `problems` lists every reason that one stage
            finds.
    """
    adapter = read_adapter(config, weights)
    pause()
    ir = compile_adapter(adapter.config, adapter.tensors, base, reserve=reserve)
    pause()
    named = (names or BaseNames()).inspect(adapter.config, base)
    check_fit(ir, base)
    check_finite(ir, names=modelled_names(base), pause=pause)
    return Inspected(
        digest=adapter_digest(adapter.config, adapter.tensors, pause=pause),
        rank=ir.rank,
        target_modules=shown_modules(base, ir.target_modules),
        dtype=ir.dtype,
        num_extra_rows=_num_extra_rows(ir),
        checks=(
            _passed("format", f"{_kind(ir)}: {len(adapter.tensors)} tensors, {ir.num_parameters} parameters"),
            base_check(base, f"fits {base.id} ({base.digest[:12]}) in {len(ir.layers)} of {base.num_layers} layers"),
            *([_passed("names", f"renamed: {'; '.join(ir.renames)}")] if ir.renames else []),
            *([_untrained(ir.absent_targets, base)] if ir.absent_targets else []),
            *named,
            _passed("finite", "no NaN, no infinity, no update out of range"),
        ),
    )


def base_check(base: BaseSpec, detail: str) -> dict[str, Any]:
    """Build the check that names the base for which a version was compiled."""
    return {**_passed(BASE, detail), "base_id": base.id}


def _kind(ir: AdapterIR) -> str:
    """Format PEFT's name of the kind, and its extra features.

    An example is ``LORA with magnitudes (DoRA), norms``.
    """
    modules = ir.modules
    features = (
        ("magnitudes (DoRA)", any(module.magnitude is not None for module in modules)),
        ("biases", any(module.bias is not None or module.lora_bias is not None for module in modules)),
        ("output scales", any(module.output_scale is not None for module in modules)),
        ("whole weights", any(module.weight is not None for module in modules)),
        ("token rows", any(module.token_rows is not None for module in modules)),
        ("norms", bool(ir.norms)),
        (f"{_num_extra_rows(ir):,} rows beyond the base's", ir.extra_rows is not None),
        (f"a classification head of {_labels(ir)}", ir.head is not None),
        (f"the invocation tokens {_some(ir.invocation_token_ids)} (aLoRA)", bool(ir.invocation_token_ids)),
    )
    has = ", ".join(name for name, is_there in features if is_there)
    return f"{ir.kind} with {has}" if has else ir.kind


def _untrained(targets: tuple[str, ...], base: BaseSpec) -> dict[str, Any]:
    """Build the warning about targets that the base doesn't have."""
    listed = ", ".join(shown(target, 80) for target in targets[:8]) + (" …" if len(targets) > 8 else "")
    detail = f"target_modules lists {listed}, which {base.id} doesn't have: nothing of it is trained, as in PEFT"
    return {"name": "targets", "status": WARNED, "detail": detail}


def _labels(ir: AdapterIR) -> str:
    count = 0 if ir.head is None else ir.head.shape[0]
    return f"{count} label{'s' * (count != 1)}"


def _num_extra_rows(ir: AdapterIR) -> int:
    return 0 if ir.extra_rows is None else ir.extra_rows.num_rows


def _some(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids[:16])) + (" …" if len(ids) > 16 else "")


def _passed(name: str, detail: str) -> dict[str, Any]:
    return {"name": name, "status": "passed", "detail": detail}
