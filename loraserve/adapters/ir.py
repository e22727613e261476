"""What an adapter is once it has been understood: per module A, B and scale, in the base's own names. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
"""float32, float16, or uint16 for the bit patterns of bfloat16."""

ITEM_SIZES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""The stored dtypes, by safetensors' names → bytes per element."""

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
    """One linear's update, ``scaling · lora_b @ lora_a``.

    Attributes:
        layer: 0 … num_layers - 1 of the base.
        module: the linear's short name in the base (``q_proj``).
        rank: rows of lora_a.
        scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        lora_a: [rank, in_features].
        lora_b: [out_features, rank].
    """

    layer: int
    module: str
    rank: int
    scaling: float
    lora_a: TensorView
    lora_b: TensorView


@dataclass(frozen=True, slots=True, eq=False)
class AdapterIR:
    """An adapter that fits its base; modules in order of layer, then of the base's modules.

    Attributes:
        modules: never empty.
        dtype: the narrowest stored dtype that holds every tensor exactly: the common one, or "F32".
    """

    modules: tuple[LoraIR, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(m.rank for m in self.modules)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Short names of the linears that carry an update anywhere, in first-seen order."""
        return tuple(dict.fromkeys(m.module for m in self.modules))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that carry an update, ascending."""
        return tuple(sorted({m.layer for m in self.modules}))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors as stored."""
        return sum(m.lora_a.array.nbytes + m.lora_b.array.nbytes for m in self.modules)

    @property
    def num_parameters(self) -> int:
        return sum(m.lora_a.array.size + m.lora_b.array.size for m in self.modules)
