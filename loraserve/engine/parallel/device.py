"""A machine's memory as the device of adapters whose parts several ranks compute with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve.engine.parallel.messages import DropAdapter, ToRank
from loraserve.engine.parallel.part_memory import PartMemory
from loraserve.errors import InvariantViolation
from loraserve.memory.arena import ArenaClient
from loraserve.memory.devices.base import AdapterHandle, Footprint, HostAdapter, PlacedAdapter, refuse_extra_rows
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.model.parallel.grid import RankPlace
from loraserve.model.parallel.part_bytes import region_bytes
from loraserve.types import BaseSpec
from loraserve_kernels.cpu.lora.cut import cut_adapter, lay_out_part, norm_widths
from loraserve_kernels.cpu.lora.layout import ExtraRows, LoraModule, PackedAdapter, ReplacedNorm


@dataclass(frozen=True, slots=True, eq=False)
class AdapterParts:
    """An adapter in memory that all ranks can map, a part for each.

    Attributes:
        parts: by rank, as rank 0 sees them.
    """

    memory: PartMemory
    parts: tuple[PackedAdapter, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts' pages, and of the classification head."""
        return self.memory.num_bytes + (0 if self.head is None else self.head.nbytes)

    @property
    def head(self) -> Tensor | None:
        return self.parts[0].head


class GroupDevice:
    """Host memory of all ranks: parts are resident at once, and nothing is copied.

    An adapter's handle is rank 0's part. Its footprint is that of all parts together, as the budget
    is all ranks'. A part has the layers of its stage alone, and of these A whole and some of B's
    rows of column-parallel linears, some of A's columns and B whole of row-parallel ones.

    Args:
        places: each rank's, in order.
        send: sends a message to one rank.
    """

    is_host_memory = True

    def __init__(
        self,
        base: BaseSpec,
        budget_bytes: int,
        dtype: torch.dtype | None,
        arena_client: ArenaClient,
        places: Sequence[RankPlace],
        send: Callable[[int, ToRank], None],
    ) -> None:
        self._whole = CpuDevice(base, budget_bytes, dtype, arena_client)
        self.arena_client, self.limits = arena_client, self._whole.limits
        self._parts = [(place.rank, place.cut, place.modules) for place in places]
        self._send = send
        self._numbers = itertools.count()
        self._placed: dict[AdapterHandle, tuple[int, AdapterParts]] = {}

    def number(self, handle: AdapterHandle) -> int:
        """Look up the number by which ranks identify an adapter that is placed.

        Raises:
            InvariantViolation: it isn't.
        """
        if handle not in self._placed:
            raise InvariantViolation("an adapter of the step isn't placed on the ranks")
        return self._placed[handle][0]

    def footprint(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> Footprint:
        refuse_extra_rows(extra_rows, "by tensor or pipeline parallel ranks")
        # refuses what doesn't fit the base
        self._whole.footprint(modules, stored, norms, head)
        dtype = self.held_dtype(stored)
        widths = [(norm.layer, norm.norm, int(norm.weight.shape[0])) for norm in norms]
        num_bytes = 0 if head is None else 4 * head.numel()
        for _, cut, shapes in self._parts:
            layout = lay_out_part(modules, cut, module_shapes=shapes, dtype=dtype)
            num_bytes += region_bytes(layout, dtype, norm_widths(widths, cut))
        arena = self.arena_client.arena
        return Footprint(arena.pages_of(num_bytes) * arena.page_num_bytes)

    def pack(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> AdapterParts:
        refuse_extra_rows(extra_rows, "by tensor or pipeline parallel ranks")
        packed = self._whole.pack(modules, stored, norms, head)
        widths = [(layer, norm, weight.numel()) for (layer, norm), weight in packed.norms.items()]
        dtype = packed.data.dtype
        memory = PartMemory(
            [
                region_bytes(
                    lay_out_part(modules, cut, module_shapes=shapes, dtype=dtype), dtype, norm_widths(widths, cut)
                )
                for _, cut, shapes in self._parts
            ]
        )
        parts = tuple(
            cut_adapter(
                packed,
                cut,
                module_shapes=shapes,
                allocate=memory.region(rank).allocate,
                keeps_head=rank == 0,
            )
            for rank, cut, shapes in self._parts
        )
        return AdapterParts(memory, parts)

    def held_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self._whole.held_dtype(stored)

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        return self._whole.footprint_of(packed)

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[PlacedAdapter] = ()) -> bool:
        return True

    def is_ready(self, placed: PlacedAdapter) -> bool:
        return True

    def step_launched(self) -> None:
        pass

    def check(self, placed: Sequence[PlacedAdapter]) -> list[str]:
        return self._whole.check(placed)

    def place(self, packed: HostAdapter) -> PlacedAdapter:
        if not isinstance(packed, AdapterParts):
            raise InvariantViolation("An adapter that was packed for another device can't be placed on these ranks.")
        footprint = self.footprint_of(packed)
        self.arena_client.allocate(footprint.num_bytes // self.arena_client.arena.page_num_bytes)
        number = next(self._numbers)
        for rank in range(1, len(self._parts)):
            self._send(rank, packed.memory.hold_message(number, rank, packed.parts[rank]))
        self._placed[packed.parts[0]] = number, packed
        return PlacedAdapter(packed.parts[0], footprint)

    def remove(self, placed: PlacedAdapter) -> HostAdapter | None:
        self._whole.remove(placed)
        number, packed = self._placed.pop(placed.handle)
        for rank in range(1, len(self._parts)):
            self._send(rank, DropAdapter(number=number))
        return packed
