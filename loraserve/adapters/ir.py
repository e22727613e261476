"""What an adapter is once it has been understood: per module A, B and scale, in the base's own names. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
"""float32, float16, or uint16 for the bit patterns of bfloat16."""

ITEM_SIZES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""The stored dtypes, by safetensors' names → bytes per element."""

OUTSIDE_LAYERS: tuple[str, ...] = ("lm_head", "embed_tokens")
"""The modules that are in no layer."""

NUMPY_DTYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """One stored tensor, not copied: `array` shares memory with the file's bytes.

    Attributes:
        dtype: "F32", "F16" or "BF16".
        shape: as stored, at most 2 dims.
        array: of that shape; uint16 bit patterns for BF16. It may be unaligned and read-only.
    """

    dtype: str
    shape: tuple[int, ...]
    array: Array


@dataclass(frozen=True, slots=True, eq=False)
class LoraIR:
    """One module's update, ``scaling · lora_b @ lora_a``; with DoRA, the magnitudes that the updated weight's rows are then given.

    The embedding is a linear whose input is one-hot: its weight is the table, transposed.

    Attributes:
        layer: 0 … num_layers - 1 of the base; 0 for modules in no layer.
        module: the module's short name in the base (``q_proj``).
        rank: rows of lora_a.
        scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        lora_a: [rank, in_features].
        lora_b: [out_features, rank].
        magnitude: [out_features], DoRA's; None without it.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    lora_a: TensorView
    lora_b: TensorView
    magnitude: TensorView | None = None

    @property
    def tensors(self) -> tuple[TensorView, ...]:
        pair = (self.lora_a, self.lora_b)
        return pair if self.magnitude is None else (*pair, self.magnitude)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterIR:
    """An adapter that fits its base; modules in order of layer, then of the base's modules.

    Attributes:
        modules: never empty.
        dtype: the narrowest stored dtype that holds every lora_a and lora_b exactly: the common one, or "F32".
        saved_base: what PEFT saves of the base beside LoRA on the head or the embedding: module → [vocab_size, hidden_size]. It says which weights the
            adapter was trained on.
    """

    modules: tuple[LoraIR, ...]
    dtype: str
    saved_base: Mapping[str, TensorView] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(m.rank for m in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Short names of the modules that carry an update anywhere, in first-seen order."""
        return tuple(dict.fromkeys(m.module for m in self.modules))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that carry an update, ascending."""
        return tuple(sorted({m.layer for m in self.modules if m.module not in OUTSIDE_LAYERS}))

    @property
    def num_bytes(self) -> int:
        """Bytes of the modules' tensors as stored."""
        return sum(t.array.nbytes for m in self.modules for t in m.tensors)

    @property
    def num_parameters(self) -> int:
        return sum(t.array.size for m in self.modules for t in m.tensors)
