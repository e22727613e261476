"""LoRA adapters in GGUF files, read as PEFT's.

llama.cpp's converter writes PEFT's factors under the names of its own tensors, and the rows of
queries and keys in the order in which it has those of their base. Imports no torch.

Source: llama.cpp's `convert_lora_to_gguf.py`; for the scaling, its `llama-adapter.cpp`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from loraserve.adapters.format.containers import ConvertedFiles
from loraserve.adapters.format.peft_format import STORED_DTYPES, STORED_SIZES, Buffer, check_name
from loraserve.adapters.format.target_fields import target_fields
from loraserve.adapters.format.tensor_names import PREFIX
from loraserve.adapters.ir import Array, TensorView
from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch, AdapterFormatError, AdapterUnsupported, ModelError
from loraserve.limits import Limits
from loraserve.model.config.gguf_types import FLOAT_TYPES
from loraserve.model.gguf.gguf_file import MAGIC, Gguf, GgufTensor, HeaderIncomplete, parse_gguf
from loraserve.model.gguf.gguf_layout import LAYOUTS, GgufLayout, layer_paths
from loraserve.types import BaseSpec

_FILE = "The GGUF file"
_NAME = re.compile(r"(?P<weight>(?:blk\.(?P<layer>\d{1,6})\.)?(?P<linear>[a-z_]+))\.weight\.lora_(?P<part>[ab])")
_TYPES = (*FLOAT_TYPES, "Q8_0")
_BLOCK = 32
_ALIGNMENT = 1 << 20
"""Bytes that may lie between a header and the first tensor, or after the last one."""
_HINT = "Convert the adapter again with llama.cpp's convert_lora_to_gguf.py, or send PEFT's own files."
_SAME_BASES: Mapping[str, tuple[str, ...]] = {"llama": ("MistralForCausalLM",)}
"""Architectures of bases that llama.cpp counts to another one."""


class GgufAdapter:
    """Container of one GGUF file, which holds its config too."""

    magic = MAGIC
    has_config = True

    def read_beginning(self, beginning: Buffer, limits: Limits) -> int | None:
        """Bound the bytes of a file from its beginning; None: its header isn't complete.

        Raises:
            AdapterRejected: no adapter begins so.
        """
        try:
            gguf = _parse(beginning, None, limits)
        except HeaderIncomplete:
            return None
        _check_kind(gguf)
        return max((tensor.end for tensor in gguf.tensors.values()), default=0) + _ALIGNMENT

    def read(self, config: bytes, weights: Buffer, base: BaseSpec, limits: Limits) -> ConvertedFiles:
        """Convert the file to PEFT's config and tensors.

        Raises:
            AdapterFormatError: the file isn't one that llama.cpp's converter writes.
            AdapterUnsupported: it holds something else than LoRA, or in another type of numbers.
            AdapterBaseMismatch: it is of another architecture.
        """
        if config:
            raise AdapterFormatError(
                f"{_FILE} holds its own config, and an adapter_config.json came with it.",
                hint="Send the file alone, or PEFT's own files.",
            )
        data = memoryview(weights)
        try:
            gguf = _parse(data, len(data), limits)
        except HeaderIncomplete as error:
            raise AdapterFormatError(error.message, hint=error.hint) from None
        _check_kind(gguf)
        _check_size(gguf, limits)
        layout = _find_layout(gguf, base)
        tensors: dict[str, TensorView] = {}
        modules: dict[str, dict[str, tuple[int, ...]]] = {}
        for tensor in gguf.tensors.values():
            module, part, linear = _place(tensor, layout, base)
            array = _read_numbers(tensor, data)
            if part == "b" and layout.is_permuted and linear in ("attn_q", "attn_k"):
                array = _unpermuted(tensor, array, base)
            if linear == "token_embd":
                name = f"{PREFIX}{module}.lora_embedding_{part.upper()}"
                array = array.T if part == "a" else array
            else:
                name = f"{PREFIX}{module}.lora_{part.upper()}.weight"
            problem = check_name(name, limits)
            if problem is not None:
                raise AdapterFormatError(problem)
            modules.setdefault(module, {})[part] = array.shape
            dtype = tensor.type.name if tensor.type.name in FLOAT_TYPES else "F32"
            tensors[name] = TensorView(dtype, array.shape, array)
        alpha = _alpha(gguf)
        peft = _config(modules, alpha, gguf, base)
        notes = [f"a GGUF file of llama.cpp's ({gguf.architecture}) was read as PEFT's LoRA"]
        if layout.is_permuted and any("q_proj" in module or "k_proj" in module for module in modules):
            notes.append("rows of queries and keys put back into their order")
        if any(tensor.type.name not in FLOAT_TYPES for tensor in gguf.tensors.values()):
            notes.append("Q8_0 unfolded to float32")
        return ConvertedFiles(json.dumps(peft).encode(), tensors, tuple(notes))


def _parse(data: Buffer, file_bytes: int | None, limits: Limits) -> Gguf:
    try:
        gguf = parse_gguf(_FILE, data, file_bytes=file_bytes, max_header_bytes=limits.max_adapter_header_bytes)
    except HeaderIncomplete:
        raise
    except ModelError as error:
        raise AdapterFormatError(error.message, hint=error.hint or _HINT) from None
    if len(gguf.tensors) > limits.max_adapter_tensors:
        raise AdapterFormatError(
            f"{_FILE} holds {len(gguf.tensors):,} tensors; at most {limits.max_adapter_tensors:,} are allowed."
        )
    return gguf


def _check_kind(gguf: Gguf) -> None:
    kind, adapter = gguf.metadata.get("general.type"), gguf.metadata.get("adapter.type")
    if kind != "adapter":
        raise AdapterUnsupported(
            f"general.type is {shown(kind)}; an adapter's is 'adapter'.",
            hint="A whole model is served as a base: loraserve serve --model FILE.gguf.",
        )
    if adapter != "lora":
        raise AdapterUnsupported(f"adapter.type is {shown(adapter)}; of llama.cpp's adapters, lora is served.")
    if not gguf.tensors:
        raise AdapterFormatError(f"{_FILE} holds no tensors.", hint=_HINT)
    for tensor in gguf.tensors.values():
        if tensor.type.name not in _TYPES:
            raise AdapterUnsupported(
                f"{shown(tensor.name, 200)} has the type {tensor.type.name}; expected one of {', '.join(_TYPES)}.",
                hint="Convert the adapter again with --outtype f16, or send PEFT's own files.",
            )
        if "_exps." in tensor.name:
            raise AdapterUnsupported(
                f"{shown(tensor.name, 200)} is for all experts of a mixture, which isn't read from GGUF files.",
                hint="Send PEFT's own files.",
            )
        if len(tensor.shape) != 2:
            raise AdapterUnsupported(
                f"{shown(tensor.name, 200)} has {len(tensor.shape)} dims; expected 2, of lora_a or lora_b."
            )


def _check_size(gguf: Gguf, limits: Limits) -> None:
    """Check that the numbers have room once they are unfolded."""
    num_bytes = sum(
        prod(tensor.shape) * STORED_SIZES.get(tensor.type.name, STORED_SIZES["F32"]) for tensor in gguf.tensors.values()
    )
    if num_bytes > limits.max_upload_bytes:
        raise AdapterFormatError(
            f"{_FILE}'s tensors take {num_bytes:,} bytes as floats; at most {limits.max_upload_bytes:,} are allowed."
        )


def _find_layout(gguf: Gguf, base: BaseSpec) -> GgufLayout:
    layout = LAYOUTS.get(gguf.architecture)
    same = _SAME_BASES.get(gguf.architecture, ())
    if layout is None or base.architecture not in (*layout.architectures, *same):
        raise AdapterBaseMismatch(
            f"The adapter was trained for the architecture {shown(gguf.architecture)} (general.architecture); this "
            f"base is a {base.architecture}.",
            hint="Serve the base that it was trained on.",
        )
    return layout


def _place(tensor: GgufTensor, layout: GgufLayout, base: BaseSpec) -> tuple[str, str, str]:
    """Find the module's path in the base, the factor, and the linear's name in the file."""
    match = _NAME.fullmatch(tensor.name)
    if match is None:
        raise AdapterUnsupported(
            f"{shown(tensor.name, 200)} isn't a factor of LoRA; expected one, such as blk.0.attn_q.weight.lora_a.",
            hint="Norms and whole weights in an adapter's GGUF file aren't served: send PEFT's own files.",
        )
    linear, part = match["linear"], match["part"]
    if match["layer"] is not None:
        inner = layer_paths(layout).get(linear)
        if inner is None:
            raise AdapterBaseMismatch(f"{shown(tensor.name, 200)} is for a linear that this base doesn't have.")
        return f"{base.layers_path}.{int(match['layer'])}.{inner}", part, linear
    outside = {"token_embd": "embed_tokens", "output": "lm_head"}.get(linear)
    if outside is None:
        raise AdapterBaseMismatch(f"{shown(tensor.name, 200)} is for a linear that this base doesn't have.")
    if base.is_head_tied:
        raise AdapterUnsupported(
            f"{shown(tensor.name, 200)} is for the embedding or the head, which are one on this base: the file doesn't "
            "say which of them it changes.",
            hint="Send PEFT's own files.",
        )
    return base.module_paths[outside], part, linear


def _read_numbers(tensor: GgufTensor, data: memoryview) -> Array:
    """Read the tensor's numbers, of Q8_0 as the float32 that they mean exactly."""
    content = data[tensor.begin : tensor.end]
    if tensor.type.name in FLOAT_TYPES:
        return np.frombuffer(content, STORED_DTYPES[tensor.type.name]).reshape(tensor.shape)
    blocks = np.frombuffer(content, np.dtype([("scale", "<f2"), ("codes", "i1", _BLOCK)]))
    numbers: Array = blocks["codes"].astype("<f4") * blocks["scale"].astype("<f4")[:, None]
    return numbers.reshape(tensor.shape)


def _unpermuted(tensor: GgufTensor, array: Array, base: BaseSpec) -> Array:
    """Put the rows of queries or keys into a checkpoint's order, as halves."""
    head_dim = base.head_dim
    if not head_dim or array.shape[0] % head_dim:
        raise AdapterBaseMismatch(
            f"{shown(tensor.name, 200)} has {array.shape[0]} rows; this base has heads of {head_dim}."
        )
    pairs = array.reshape(-1, head_dim // 2, 2, array.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _alpha(gguf: Gguf) -> float:
    """Read lora_alpha; 0, as llama.cpp takes it: the update isn't scaled."""
    alpha = gguf.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise AdapterFormatError(f"adapter.lora.alpha is {shown(alpha)}; expected a finite number.", hint=_HINT)
    return float(alpha)


def _config(
    modules: Mapping[str, Mapping[str, tuple[int, ...]]], alpha: float, gguf: Gguf, base: BaseSpec
) -> dict[str, Any]:
    """Build PEFT's config of these modules."""
    ranks: dict[str, int] = {}
    for module, shapes in modules.items():
        if "a" not in shapes or "b" not in shapes:
            raise AdapterFormatError(
                f"{_FILE} has no lora_{'b' if 'a' in shapes else 'a'} of {shown(module, 200)}.", hint=_HINT
            )
        ranks[module] = shapes["b"][1]
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: other for module, other in ranks.items() if other != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha or rank,
        **target_fields(modules, base),
        "rank_pattern": others,
        "alpha_pattern": {} if alpha else others,
    }
    tokens = gguf.metadata.get("adapter.alora.invocation_tokens")
    return config if tokens is None else {**config, "alora_invocation_tokens": tokens}
