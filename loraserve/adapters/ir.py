"""Intermediate form of an adapter: its changes of each module, in the base's own names.

NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
"""float32, float16, or uint16 for the bit patterns of bfloat16."""

ITEM_SIZES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""The stored dtypes, by safetensors' names → bytes per element."""

OUTSIDE_LAYERS: tuple[str, ...] = ("lm_head", "embed_tokens")
"""The modules that are in no layer."""

SCORE = "score"
"""Name of a classification head, as transformers calls the module."""

NUMPY_DTYPES: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class TensorView:
    """Stored tensor, not copied: `array` shares memory with the file's bytes.

    Attributes:
        dtype: "F32", "F16" or "BF16".
        shape: as stored, at most 2 dims.
        array: of that shape; uint16 bit patterns for BF16. It may be unaligned and read-only.
    """

    dtype: str
    shape: tuple[int, ...]
    array: Array


def label_of(module: str, expert: int) -> str:
    """Format a module's name for people: ``q_proj``, ``experts.3.gate_proj``."""
    return module.replace("experts.", f"experts.{expert}.")


@dataclass(frozen=True, slots=True, eq=False)
class ModuleIR:
    """Changes that an adapter makes to a linear.

    For an input x and the base's weight W and bias b, the output is::

        output_scale · ((magnitude / ‖W' + scaling · B A‖) · (W' x + scaling · B A x)
                        + b' + scaling · lora_bias)

    where W' and b' are W and b, or what stands in their place, and what is None isn't there. (With
    a magnitude there is no lora_bias, and in a file no weight.)

    The embedding is a linear whose input is one-hot: its weight is the table, transposed.

    Attributes:
        layer: 0 … num_layers - 1 of the base; 0 for modules in no layer.
        module: the module's short name in the base (``q_proj``, ``experts.gate_proj``).
        rank: rows of lora_a; 0 where there is no LoRA.
        scaling: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
        lora_a: [rank, in_features]; None at rank 0.
        lora_b: [out_features, rank]; None at rank 0.
        magnitude: [out_features], DoRA's.
        lora_bias: [out_features], of lora_B.
        bias: [out_features], in the place of the base's.
        output_scale: [out_features], IA3's: of all that the linear gives, its bias among it.
        weight: in the place of the base's, as the base's checkpoint has it: [out_features,
            in_features], of the embedding [vocab_size, hidden_size].
        token_ids: ascending; rows of the embedding, or of the head, that have others in their
            place.
        token_rows: [len(token_ids), hidden_size]: those others.
        expert: number of the expert whose linear it is; 0 for one that isn't an expert's.
    """

    layer: int
    module: str
    rank: int = 0
    scaling: float = 1.0
    lora_a: TensorView | None = None
    lora_b: TensorView | None = None
    magnitude: TensorView | None = None
    lora_bias: TensorView | None = None
    bias: TensorView | None = None
    output_scale: TensorView | None = None
    weight: TensorView | None = None
    token_ids: tuple[int, ...] = ()
    token_rows: TensorView | None = None
    expert: int = 0

    @property
    def place(self) -> tuple[int, str, int]:
        """Layer, module and expert, which no two modules of an adapter share."""
        return self.layer, self.module, self.expert

    @property
    def label(self) -> str:
        """Module's name for people."""
        return label_of(self.module, self.expert)

    @property
    def tensors(self) -> dict[str, TensorView]:
        """Arrays that it has, by their names above."""
        names = ("lora_a", "lora_b", "magnitude", "lora_bias", "bias", "output_scale", "weight", "token_rows")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, eq=False)
class NormIR:
    """A norm's weight in the place of the base's.

    Attributes:
        layer: 0 for `norm`, which is in none.
        norm: a key of the base's `norm_paths`.
        weight: [hidden_size], as a checkpoint has it: the base's `norm_offset` isn't added yet.
    """

    layer: int
    norm: str
    weight: TensorView


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRowsIR:
    """Rows beyond the base's, for the tokens from ``vocab_size`` on; float32.

    Attributes:
        embedding: [num_rows, hidden_size].
        head: [num_rows, hidden_size].
    """

    embedding: TensorView
    head: TensorView

    @property
    def num_rows(self) -> int:
        return self.embedding.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterIR:
    """An adapter that fits its base; modules in order of layer, then of the base's modules.

    Attributes:
        modules: empty only where there are norms.
        dtype: the narrowest stored dtype that holds every lora_a, lora_b, weight and token row
            exactly: the common one, or "F32".
        saved_base: what PEFT saves of the base along with LoRA on the head or the embedding, and
            loads in the base's place: module → [vocab_size, hidden_size]. Mostly it is the base's
            own, which takes the base's weights to decide: `memory.lowering.with_saved_base`.
        invocation_token_ids: aLoRA's: the adapter acts from their last occurrence in a prompt on,
            and not at all where they don't occur. Empty: it acts on every token.
        kind: PEFT's name for it: ``LORA``, ``LOHA`` …
        head: weight of its classification head, [num_labels, hidden_size].
        extra_rows: rows of the embedding and the head beyond the base's.
        renames: what was left out of its tensors' names or added to them, for people.
        absent_targets: listed in the config's target_modules, of which the base has no module and
            the file no tensors.
    """

    modules: tuple[ModuleIR, ...]
    dtype: str
    saved_base: Mapping[str, TensorView] = field(default_factory=dict)
    norms: tuple[NormIR, ...] = ()
    invocation_token_ids: tuple[int, ...] = ()
    kind: str = "LORA"
    head: TensorView | None = None
    extra_rows: ExtraRowsIR | None = None
    renames: tuple[str, ...] = ()
    absent_targets: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max((m.rank for m in self.modules), default=0)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Short names of the modules that carry an update anywhere, in first-seen order.

        The head's comes last.
        """
        return (*dict.fromkeys(m.module for m in self.modules), *((SCORE,) if self.head is not None else ()))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that carry an update, ascending."""
        return tuple(sorted({m.layer for m in self.modules if m.module not in OUTSIDE_LAYERS}))

    @property
    def num_bytes(self) -> int:
        """Bytes of the modules' tensors as stored."""
        return sum(t.array.nbytes for t in self._tensors())

    @property
    def num_parameters(self) -> int:
        return sum(t.array.size for t in self._tensors())

    def _tensors(self) -> Iterator[TensorView]:
        for m in self.modules:
            yield from m.tensors.values()
        for norm in self.norms:
            yield norm.weight
        if self.head is not None:
            yield self.head
        if self.extra_rows is not None:
            yield self.extra_rows.embedding
            yield self.extra_rows.head
