"""The device of resident adapters: its room, and how an adapter gets there and leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraserve.errors import AdapterUnservable
from loraserve.memory.arena import ArenaClient
from loraserve_kernels.common.sites import label_of
from loraserve_kernels.cpu.lora.layout import ExtraRows, LoraModule, PackedAdapter, ReplacedNorm
from loraserve_kernels.errors import TensorMismatch

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that adapters take of a device, or that it has; each number must fit.

    Attributes:
        num_bytes: bytes of weights: whole pages where the device has pages.
        num_tiles: tiles of the tables through which a GPU's kernels find an adapter's ranks; 0 on a
            CPU.
        num_slots: slots of a GPU, one per adapter; 0 on a CPU.
    """

    num_bytes: int = 0
    num_tiles: int = 0
    num_slots: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.num_bytes + other.num_bytes, self.num_tiles + other.num_tiles, self.num_slots + other.num_slots
        )

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.num_bytes - other.num_bytes, self.num_tiles - other.num_tiles, self.num_slots - other.num_slots
        )

    def fits(self, room: Footprint) -> bool:
        return (
            self.num_bytes <= room.num_bytes and self.num_tiles <= room.num_tiles and self.num_slots <= room.num_slots
        )

    def excess(self, limits: Footprint) -> str:
        """Describe the first number that is over these limits.

        The footprint doesn't fit them.
        """
        if self.num_bytes > limits.num_bytes:
            return f"{self.num_bytes:,} bytes; the memory for adapters has {limits.num_bytes:,}"
        if self.num_tiles > limits.num_tiles:
            return f"{self.num_tiles:,} rank tiles; the tables for adapters have {limits.num_tiles:,}"
        return f"{self.num_slots:,} slots; there are {limits.num_slots:,}"


NOTHING = Footprint()

AdapterHandle = PackedAdapter | int
"""Name by which a step finds an adapter: its packed tensors on a CPU, its slot on a GPU.

A type parameter in its place would go through nine classes between device and runner, to spare four
checks at their edges.
"""


class HostAdapter(Protocol):
    """An adapter in host memory, in one device's form."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        ...

    @property
    def head(self) -> Tensor | None:
        """Classification head, [num_labels, hidden_size] float32, counted in `num_bytes`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedAdapter:
    """An adapter on a device, from `place` to `remove`.

    Attributes:
        handle: name by which a step finds it.
        footprint: memory that it takes.
    """

    handle: AdapterHandle
    footprint: Footprint


class AdapterDevice(Protocol):
    """Memory of one device for adapters.

    Any thread may call `footprint` and `pack`, the step's thread alone the rest; nothing waits for
    the device.
    """

    @property
    def arena_client(self) -> ArenaClient:
        """The arena client whose pages adapters lie in.

        Only `place` allocates them, and only `remove` frees them.
        """
        ...

    @property
    def limits(self) -> Footprint:
        """Memory that adapters may take at most.

        The rest of the arena holds one sequence of the model's full length.
        """
        ...

    @property
    def is_host_memory(self) -> bool:
        """Whether the device's memory is the host's: tiers change without a copy."""
        ...

    def held_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Choose the dtype in which the device holds matrices and rows that are stored in this one.

        Rounding to int8 is `kernels.reference.quantize_rows`.
        """
        ...

    def footprint(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> Footprint:
        """Compute what all of these take once they are packed, without reading a weight.

        A classification head takes memory where prompts are pooled: in the host's. Extra rows are
        those of embedding and head beyond the base's.

        Raises:
            TensorMismatch (the kernels'): the adapter doesn't fit the base, or the device's kernels
            lack a rank, rows or a norm of it.
        """
        ...

    def pack(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> HostAdapter:
        """Pack the adapter in host memory, ready to be placed. A loader's thread does this.

        Raises:
            TensorMismatch (the kernels'): as `footprint`.
            AdapterUnservable: a weight is out of the range of the dtype that the device holds it
                in.
        """
        ...

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        """Compute the footprint of a packed adapter."""
        ...

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[PlacedAdapter] = ()) -> bool:
        """Check whether a footprint that fits by its numbers finds a free run of tiles too.

        Adapters in `leaving` count as gone.
        """
        ...

    def place(self, packed: HostAdapter) -> PlacedAdapter:
        """Allocate the adapter's memory and start its copy.

        The copy runs after the steps launched before, which may still read what lay there.

        Raises:
            InvariantViolation: there is no room. The caller has made sure that there is.
        """
        ...

    def is_ready(self, placed: PlacedAdapter) -> bool:
        """Check whether the adapter has landed: steps launched from now on may use it."""
        ...

    def remove(self, placed: PlacedAdapter) -> HostAdapter | None:
        """Free the adapter's memory and return what moves to host memory, if anything."""
        ...

    def step_launched(self) -> None:
        """Let memory that is freed from now on be written after the step that was just launched."""
        ...

    def check(self, placed: Sequence[PlacedAdapter]) -> list[str]:
        """List the broken invariants, given all that is placed; empty when all hold."""
        ...


def refuse_extra_rows(extra_rows: ExtraRows | None, where: str) -> None:
    """Raise an error if an adapter has rows beyond the base's.

    Args:
        where: what doesn't serve them, as in "aren't served …".

    Raises:
        TensorMismatch: it has some.
    """
    if extra_rows is not None:
        raise TensorMismatch(
            f"the adapter's embedding and head have {extra_rows.num_rows} rows beyond the base's, which aren't served "
            f"{where}; serve the adapter on a CPU without ranks, or train it without resize_token_embeddings, with "
            "added tokens in the base's unused rows"
        )


def refuse_out_of_range(modules: Iterable[LoraModule], stored: torch.dtype, dtype: torch.dtype) -> None:
    """Raise an error unless every weight is finite in a floating-point `dtype` too.

    Raises:
        AdapterUnservable: one isn't; the message names its module.
    """
    if not dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(stored).max:
        return
    for m in modules:
        rows = m.lora_a[:0] if m.row_overrides is None else m.row_overrides.weight
        for name, matrix in (("lora_A", m.lora_a), ("lora_B", m.lora_b), ("weight", rows)):
            # a module may have no ranks
            # no copy of a whole head
            largest = torch.stack(matrix.aminmax()).abs().amax() if matrix.numel() else matrix.new_zeros(())
            if largest.to(dtype).isinf():
                raise AdapterUnservable(
                    f"Layer {m.layer} {label_of(m.module, m.expert)}.{name} has a weight of size {float(largest):.4g}; "
                    f"adapters are held in "
                    f"{DTYPE_NAMES[dtype]}, whose largest number is {torch.finfo(dtype).max:.4g}.",
                    hint="Serve with an --adapter-dtype of a larger range, such as bf16.",
                )
