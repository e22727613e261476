"""Where resident adapters live: what a device has room for, how an adapter gets there and leaves again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from loraserve.errors import AdapterUnservable
from loraserve.memory.arena import ArenaClient
from loraserve_kernels.cpu.lora.layout import LoraModule, PackedAdapter, ReplacedNorm

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What adapters take of a device, or what it has. Each number has its own limit, and an adapter fits when all of them do.

    Attributes:
        num_bytes: of weights: whole pages where the device has pages.
        num_tiles: of the tables through which a GPU's kernels find an adapter's ranks; 0 on a CPU.
        num_slots: one per adapter on a GPU; 0 on a CPU.
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
        """What is over these limits, in words; the first of it if it's several. For what doesn't fit."""
        if self.num_bytes > limits.num_bytes:
            return f"{self.num_bytes:,} bytes; the memory for adapters has {limits.num_bytes:,}"
        if self.num_tiles > limits.num_tiles:
            return f"{self.num_tiles:,} rank tiles; the tables for adapters have {limits.num_tiles:,}"
        return f"{self.num_slots:,} slots; there are {limits.num_slots:,}"


NOTHING = Footprint()


class HostAdapter(Protocol):
    """An adapter in host memory, as one device wants it."""

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlacedAdapter:
    """An adapter's place on a device, from `place` to `remove`.

    Attributes:
        handle: what a step names it by: its packed tensors on a CPU, its slot on a GPU.
        footprint: what it takes.
    """

    handle: PackedAdapter | int
    footprint: Footprint


class AdapterDevice(Protocol):
    """One device's memory for adapters. `footprint` and `pack` may be called on any thread, the rest on the step's alone; none of it waits for the device."""

    @property
    def arena_client(self) -> ArenaClient:
        """Whose pages adapters lie in. `place` rents them, `remove` gives them back; nobody else does."""
        ...

    @property
    def limits(self) -> Footprint:
        """What adapters may take at most. Of the lease's arena it leaves the KV cache what one sequence needs."""
        ...

    @property
    def is_host_memory(self) -> bool:
        """Whether the device's memory is the host's: an adapter is then in one tier at a time, and moves between them without a copy."""
        ...

    def held_dtype(self, stored: torch.dtype) -> torch.dtype:
        """In what the device holds the matrices and rows of adapters that are stored in this; to int8, `kernels.reference.quantize_rows` rounds."""
        ...

    def footprint(
        self, modules: Sequence[LoraModule], stored: torch.dtype, norms: Sequence[ReplacedNorm] = ()
    ) -> Footprint:
        """What these modules, stored in this dtype, and these norms will take once they are packed. Reads no weight.

        Raises:
            ShapeMismatch (the kernels'): it doesn't fit the base, or has what the device's kernels don't do: a rank, rows or a norm.
        """
        ...

    def pack(
        self, modules: Sequence[LoraModule], stored: torch.dtype, norms: Sequence[ReplacedNorm] = ()
    ) -> HostAdapter:
        """The adapter in host memory, ready to be placed. A worker's thread does this.

        Raises:
            ShapeMismatch (the kernels'): as `footprint`.
            AdapterUnservable: a weight is out of the range of the dtype that the device holds.
        """
        ...

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        """What a packed adapter will take."""
        ...

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[PlacedAdapter] = ()) -> bool:
        """Whether what fits by its numbers has a place too, once those in `leaving` are gone."""
        ...

    def place(self, packed: HostAdapter) -> PlacedAdapter:
        """The adapter has its place, and is on its way there: after steps that were launched before this, which may still read what lay there.

        Raises:
            InvariantViolation: there is no place. The caller has made sure that there is.
        """
        ...

    def is_ready(self, placed: PlacedAdapter) -> bool:
        """Whether the adapter has arrived: steps launched from now on may use it."""
        ...

    def remove(self, placed: PlacedAdapter) -> HostAdapter | None:
        """The place is free. Returns what moves to the host's memory, None where that has its own copy or none."""
        ...

    def step_launched(self) -> None:
        """Places that become free from now on may be written once the step that has just been launched is done."""
        ...

    def check(self, placed: Sequence[PlacedAdapter]) -> list[str]:
        """Every broken invariant, in words, given all that is placed; empty when all hold."""
        ...


def refuse_out_of_range(modules: Iterable[LoraModule], stored: torch.dtype, dtype: torch.dtype) -> None:
    """Return if every weight is finite in a floating-point `dtype` too.

    Raises:
        AdapterUnservable: one isn't; the message names its module.
    """
    if not dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(stored).max:
        return
    for m in modules:
        rows = m.lora_a[:0] if m.rows is None else m.rows.weight
        for name, matrix in (("lora_A", m.lora_a), ("lora_B", m.lora_b), ("weight", rows)):
            # a module may have no ranks
            # no copy of a whole head
            largest = torch.stack(matrix.aminmax()).abs().amax() if matrix.numel() else matrix.new_zeros(())
            if largest.to(dtype).isinf():
                raise AdapterUnservable(
                    f"Layer {m.layer} {m.module}.{name} has a weight of size {float(largest):.4g}; adapters are held in "
                    f"{DTYPE_NAMES[dtype]}, which ends at {torch.finfo(dtype).max:.4g}.",
                    hint="Serve with an adapter dtype of a larger range, such as bf16.",
                )
