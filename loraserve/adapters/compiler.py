"""(config, tensors, base) → AdapterIR.

The tensors decide, the config must agree, and every tensor is consumed exactly once.

Problems are collected and reported together, so that one corrected upload fixes all of them. Each
of PEFT's kinds has a module in `tuners`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loraserve.adapters.config.kinds import check_kind
from loraserve.adapters.format.foreign_names import refuse_foreign_names
from loraserve.adapters.format.peft_format import Buffer, read_adapter
from loraserve.adapters.format.tensor_names import PREFIX
from loraserve.adapters.format.wrappers import unwrap
from loraserve.adapters.ir import SCORE, AdapterIR, TensorView
from loraserve.adapters.problems import Problems
from loraserve.adapters.saved_modules import shape_words
from loraserve.adapters.tuners import TUNERS
from loraserve.adapters.tuners.compilation import FoldedAdapter
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterRejected, AdapterUnsupported
from loraserve.limits import LIMITS, Limits
from loraserve.types import BaseSpec

Reserve = Callable[[int], object]

_HEAD = f"{PREFIX}{SCORE}.weight"
"""Weight of the linear without a bias by which transformers' models for sequence classification
read the last token's hidden state. PEFT saves it with an adapter of the task SEQ_CLS; it is no part
of the base.
"""


def compile_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorView],
    base: BaseSpec,
    limits: Limits = LIMITS,
    *,
    reserve: Reserve = lambda num_bytes: None,
) -> AdapterIR:
    """Compile the adapter into the base's terms.

    Its arrays are those of `tensors`, or slices of them; rows are copied only where they had to be
    reordered.

    Args:
        config: contents of ``adapter_config.json``.
        tensors: contents of ``adapter_model.safetensors``, under the names that PEFT's
            save_pretrained writes, or with what wrappers around a model add to them.
        reserve: called before an adapter of products of small matrices is unfolded, with the bytes
            that it will take; what it raises ends the compilation.

    Raises:
        AdapterFormatError: malformed config values, tensors missing or unknown, ranks that disagree
            with the config.
        AdapterUnsupported: a config field that would change the answers and isn't implemented.
        AdapterBaseMismatch: shapes, layers or modules that the base doesn't have.
            With several kinds of problems, the first of these; `problems` lists all.
    """
    check_kind(config)
    compiled = TUNERS[str(config["peft_type"])]
    named = unwrap(tensors, base)
    refuse_foreign_names(named.tensors)
    head, others = _split_head(named.tensors)
    if head is None:
        ir = _unfold(compiled(config, named.tensors, named.base, limits), reserve)
        return replace(ir, renames=named.notes) if named.notes else ir
    problems = Problems()
    _check_head(head, config, base, limits, problems)
    try:
        folded = compiled(config, others, named.base, limits)
    except AdapterRejected as error:
        error.problems = (*error.problems, *problems.texts)
        raise
    problems.raise_if_any()
    return replace(_unfold(folded, reserve), head=head, renames=named.notes)


def open_adapter(
    config: Buffer, weights: Buffer, base: BaseSpec, *, reserve: Reserve = lambda num_bytes: None
) -> AdapterIR:
    """Read an adapter's two files and compile them for the base; the arrays are views of `weights`.

    Args:
        reserve: as in `compile_adapter`.

    Raises:
        AdapterRejected: as `read_adapter` and `compile_adapter`.
    """
    adapter = read_adapter(config, weights)
    return compile_adapter(adapter.config, adapter.tensors, base, reserve=reserve)


def _unfold(adapter: AdapterIR | FoldedAdapter, reserve: Reserve) -> AdapterIR:
    if isinstance(adapter, AdapterIR):
        return adapter
    reserve(adapter.num_bytes)
    return adapter.unfold()


def _split_head(tensors: Mapping[str, TensorView]) -> tuple[TensorView | None, dict[str, TensorView]]:
    """Separate the head's weight, if the file has one, from all other tensors."""
    return tensors.get(_HEAD), {name: tensor for name, tensor in tensors.items() if name != _HEAD}


def _check_head(
    head: TensorView, config: Mapping[str, Any], base: BaseSpec, limits: Limits, problems: Problems
) -> None:
    """Add a problem for each reason why the head can't be served."""
    saved = config.get("modules_to_save")
    names = [name for name in saved if isinstance(name, str) and name] if isinstance(saved, list) else []
    # as `is_saved` reads them
    if not any(SCORE.endswith(name) for name in names):
        problems.add(
            AdapterFormatError,
            f"The file holds a weight of {SCORE}, a classification head, which the config's modules_to_save doesn't "
            "name.",
        )
    if len(head.shape) != 2 or head.shape[1] != base.hidden_size:
        problems.add(
            AdapterBaseMismatch,
            f"{SCORE}.weight is {shape_words(head)}; expected a row of {base.hidden_size} numbers for each label on "
            "this base.",
        )
    elif head.shape[0] > limits.max_labels:
        problems.add(
            AdapterUnsupported,
            f"{SCORE}.weight has {head.shape[0]:,} labels; at most {limits.max_labels} are served.",
        )
