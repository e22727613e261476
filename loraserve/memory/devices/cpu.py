"""A CPU as the device of adapters: their packed tensors are used where they are."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from loraserve.errors import ConfigError, InvariantViolation
from loraserve.limits import GIB
from loraserve.memory.arena import Arena, ArenaClient, Owner
from loraserve.memory.devices.base import DTYPE_NAMES, Footprint, HostAdapter, PlacedAdapter, refuse_out_of_range
from loraserve.types import BaseSpec
from loraserve_kernels.cpu.lora.layout import (
    ExtraRows,
    LoraModule,
    PackedAdapter,
    ReplacedNorm,
    pack_adapter,
    packed_num_bytes,
)
from loraserve_kernels.ops import prepare_adapters


class HostMemory:
    """A range of addresses whose pages take memory from their first write until released.

    Attributes:
        data: [num_bytes] uint8; pages that were released or never written have any value.
    """

    def __init__(self, num_bytes: int) -> None:
        """Reserve the addresses.

        Raises:
            ConfigError: the system refuses that many addresses.
        """
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"{num_bytes / GIB:.1f} GiB of memory can't be allocated: {error.strerror}.",
                hint="Lower --memory-budget.",
            ) from error
        self.data: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self, start: int, num_bytes: int) -> None:
        """Give these bytes' memory back to the system; both numbers are multiples of its page."""
        self._map.madvise(mmap.MADV_DONTNEED, start, num_bytes)


def cpu_adapter_dtype(name: str) -> torch.dtype | None:
    """Look up the dtype in which a CPU holds adapters; None for ``auto``, each as it is stored.

    Raises:
        ConfigError: a name that isn't one of auto, fp32, bf16, fp16 and int8.
    """
    names = {"auto": None} | {name: dtype for dtype, name in DTYPE_NAMES.items()}
    if name not in names:
        raise ConfigError(f"Adapters can't be held in {name!r}; expected one of {', '.join(names)}.")
    return names[name]


class CpuDevice:
    """Host memory as the device: packed tensors are resident at once, and nothing is copied.

    An adapter's handle is its tensors.
    """

    is_host_memory = True

    def __init__(
        self,
        base: BaseSpec,
        budget_bytes: int,
        dtype: torch.dtype | None = None,
        arena_client: ArenaClient | None = None,
    ) -> None:
        """Make a device that holds no adapter.

        Args:
            budget_bytes: bytes that adapters may take at most.
            dtype: dtype that adapters are packed in; None: each as it is stored.
            arena_client: client of a counted arena; None: of one of its own, with pages of a byte.
        """
        self._base = base
        self._dtype = dtype
        self.arena_client = Arena(budget_bytes, 1).client(Owner.ADAPTERS) if arena_client is None else arena_client
        page_num_bytes = self.arena_client.arena.page_num_bytes
        self.limits = Footprint(budget_bytes // page_num_bytes * page_num_bytes)

    def held_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None else stored

    def footprint(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> Footprint:
        num_bytes = packed_num_bytes(
            modules,
            num_layers=self._base.num_layers,
            module_shapes=self._base.module_shapes,
            dtype=self.held_dtype(stored),
            norms=norms,
            head=head,
            extra_rows=extra_rows,
        )
        return self._whole_pages(num_bytes)

    def pack(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> PackedAdapter:
        dtype = self.held_dtype(stored)
        refuse_out_of_range(modules, stored, dtype)
        prepare_adapters(dtype)
        return pack_adapter(
            modules,
            num_layers=self._base.num_layers,
            module_shapes=self._base.module_shapes,
            dtype=dtype,
            norms=norms,
            head=head,
            extra_rows=extra_rows,
        )

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        return self._whole_pages(packed.num_bytes)

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[PlacedAdapter] = ()) -> bool:
        return True

    def place(self, packed: HostAdapter) -> PlacedAdapter:
        if not isinstance(packed, PackedAdapter):
            raise InvariantViolation("An adapter that was packed for another device can't be placed on this CPU.")
        footprint = self.footprint_of(packed)
        self.arena_client.allocate(footprint.num_bytes // self.arena_client.arena.page_num_bytes)
        return PlacedAdapter(packed, footprint)

    def is_ready(self, placed: PlacedAdapter) -> bool:
        return True

    def remove(self, placed: PlacedAdapter) -> HostAdapter | None:
        self.arena_client.free(placed.footprint.num_bytes // self.arena_client.arena.page_num_bytes)
        return None if isinstance(placed.handle, int) else placed.handle

    def step_launched(self) -> None:
        pass

    def check(self, placed: Sequence[PlacedAdapter]) -> list[str]:
        num_bytes = sum(p.footprint.num_bytes for p in placed)
        if num_bytes != self.arena_client.num_allocated * self.arena_client.arena.page_num_bytes:
            return [f"adapters of {num_bytes} bytes have {self.arena_client.num_allocated} pages allocated"]
        return []

    def _whole_pages(self, num_bytes: int) -> Footprint:
        arena = self.arena_client.arena
        return Footprint(arena.pages_of(num_bytes) * arena.page_num_bytes)
