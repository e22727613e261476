"""A GPU as the device of adapters.

Loaders pack them into pinned memory, a stream copies them during the steps, kernels find them by
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraserve.errors import AdapterUnservable, ConfigError, InvariantViolation
from loraserve.memory.arena import Arena, ArenaClient, Owner
from loraserve.memory.devices.base import (
    DTYPE_NAMES,
    Footprint,
    HostAdapter,
    PlacedAdapter,
    refuse_extra_rows,
    refuse_out_of_range,
)
from loraserve.memory.devices.copies import Copies, CudaCopies, DirectCopies
from loraserve.memory.memory_plan import MemoryPlan, max_adapter_tiles
from loraserve.types import BaseSpec
from loraserve_kernels.common.modules import ExtraRows, LoraModule, ReplacedNorm, size_of
from loraserve_kernels.common.sizes import num_pages_of, num_tiles_of
from loraserve_kernels.cpu import threads
from loraserve_kernels.errors import PoolFull, TensorMismatch
from loraserve_kernels.gpu.paged.layout import (
    MULTIPLIERS,
    AdapterPages,
    tiles_of_sites,
)
from loraserve_kernels.gpu.paged.packing import make_pages
from loraserve_kernels.gpu.paged.pool import PagedPool


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    """An adapter's pages in host memory, pinned where a GPU copies from them.

    Attributes:
        num_bytes: bytes of host memory, with records, the head and the allocator's rounding.
        head: classification head, [num_labels, hidden_size] float32.
    """

    pages: AdapterPages
    num_bytes: int
    head: Tensor | None = None


def adapter_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """Look up the dtype in which a GPU holds adapters; ``auto`` is that of the activations.

    Raises:
        ConfigError: a name that isn't one of auto, bf16, fp16 and int8, or 16 bits of the other
            kind than the activations'.
    """
    names: Mapping[str, torch.dtype] = {
        "auto": compute_dtype,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "int8": torch.int8,
    }
    if name not in names:
        raise ConfigError(f"Adapters can't be held in {name!r}; expected one of {', '.join(names)}.")
    if names[name] not in (compute_dtype, torch.int8):
        raise ConfigError(
            f"Adapters can't be held in {name} where activations are {DTYPE_NAMES[compute_dtype]}.",
            hint="Use auto or int8, or the same --dtype.",
        )
    return names[name]


class GpuDevice:
    """A GPU's `PagedPool` as the device of adapters. An adapter's handle is its slot.

    An adapter's tiles are one run of the pool's tables, so free tiles may be too scattered for it:
    `can_lay_out` checks. Idle adapters are evicted until a run is free; nothing is moved.

    Invariants (`check`):
        pages of placed adapters == pages that the arena client holds; no tile belongs to two
        adapters; copies in flight go to slots of placed adapters.

    Attributes:
        pool: memory and tables that the kernels' plan and launches take.
    """

    is_host_memory = False

    def __init__(
        self,
        base: BaseSpec,
        pool: PagedPool,
        copies: Copies,
        dtype: torch.dtype | None = None,
        *,
        arena_client: ArenaClient | None = None,
        max_pages: int | None = None,
    ) -> None:
        """Make a device that holds no adapter.

        Args:
            pool: an empty pool for `base`, which this device alone loads into.
            copies: copies to the pool's device.
            dtype: dtype that adapters are packed in: int8, or the pool's (None).
            arena_client: client of an indexed arena whose pages are the pool's; None: of one
                without other clients.
            max_pages: pages of the arena that adapters may take at most; None: all.
        """
        self.pool = pool
        if arena_client is None:
            arena_client = Arena(pool.num_free_pages, pool.page_num_bytes, is_indexed=True).client(Owner.ADAPTERS)
        self.arena_client = arena_client
        pool.pages = arena_client
        self._base = base
        self._copies = copies
        self._dtype = dtype if dtype is not None else pool.dtype
        # copies in flight, whose source is kept until they have landed
        self._landings: dict[int, tuple[Callable[[], bool], HostPages]] = {}
        # a lower bound of the longest run of free tiles: it saves most looks at the tables
        self._known_run = 0
        num_pages = arena_client.arena.num_pages if max_pages is None else max_pages
        self.limits = Footprint(num_pages * pool.page_num_bytes, pool.records.shape[0], pool.max_slots - 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's memory that pool and tables take."""
        return self.pool.data.nbytes + self.pool.records.nbytes

    @classmethod
    def in_arena(
        cls,
        base: BaseSpec,
        data: Tensor,
        arena_client: ArenaClient,
        plan: MemoryPlan,
        budget_bytes: int,
        dtype: torch.dtype,
    ) -> GpuDevice:
        """Build a device whose pages are an arena's.

        Args:
            data: [at least the arena's bytes] uint8: its pages, and what lies behind them.
            arena_client: the adapters' client.
            plan: the plan of that budget, from `plan_gpu_arena`.
            dtype: dtype that adapters are packed in: the activations' or int8.
        """
        pool = PagedPool(
            num_pages=plan.num_pages,
            page_num_bytes=plan.page_num_bytes,
            num_layers=base.num_layers,
            max_tiles=max_adapter_tiles(base, budget_bytes),
            max_slots=plan.num_pages + 1,
            module_shapes=base.modules,
            dtype=getattr(torch, base.dtype) if dtype == torch.int8 else dtype,
            device=data.device,
            data=data[: plan.num_pages * plan.page_num_bytes],
        )
        copies = CudaCopies(data.device) if data.device.type == "cuda" else DirectCopies()
        return cls(base, pool, copies, dtype, arena_client=arena_client, max_pages=plan.max_adapter_pages)

    def held_dtype(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype

    def footprint(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> Footprint:
        _refuse_norms(norms)
        refuse_extra_rows(extra_rows, "on a GPU")
        sizes, num_layers = [size_of(m) for m in modules], self._base.num_layers
        num_pages = num_pages_of(
            sizes,
            num_layers=num_layers,
            module_shapes=self._base.modules,
            page_num_bytes=self.pool.page_num_bytes,
            dtype=self._dtype,
        )
        return Footprint(num_pages * self.pool.page_num_bytes, num_tiles_of(sizes, num_layers=num_layers), 1)

    def pack(
        self,
        modules: Sequence[LoraModule],
        stored: torch.dtype,
        norms: Sequence[ReplacedNorm] = (),
        head: Tensor | None = None,
        extra_rows: ExtraRows | None = None,
    ) -> HostPages:
        _refuse_norms(norms)
        refuse_extra_rows(extra_rows, "on a GPU")
        with threads.alone():
            refuse_out_of_range(modules, stored, self._dtype)
            pages = make_pages(
                modules,
                num_layers=self._base.num_layers,
                module_shapes=self._base.modules,
                page_num_bytes=self.pool.page_num_bytes,
                dtype=self._dtype,
                pin_memory=self._copies.needs_pinned,
            )
        _refuse_infinite_multipliers(pages)
        self._copies.trim()
        num_bytes = self._copies.host_bytes((pages.pages, pages.records))
        # prompts are pooled on the host
        held = None if head is None else head.to(torch.float32, copy=True)
        return HostPages(pages, num_bytes + (0 if held is None else held.nbytes), held)

    def footprint_of(self, packed: HostAdapter) -> Footprint:
        pages = self._host_pages(packed).pages
        return Footprint(pages.num_pages * self.pool.page_num_bytes, pages.num_tiles, 1)

    def can_lay_out(self, footprint: Footprint, leaving: Iterable[PlacedAdapter] = ()) -> bool:
        num_tiles = footprint.num_tiles
        if num_tiles > self._known_run:
            # pages are all alike, and their number has been checked
            if not self.pool.can_load(0, num_tiles):
                return self.pool.can_load(0, num_tiles, [self._slot(p) for p in leaving])
            self._known_run = num_tiles
        return True

    def place(self, packed: HostAdapter) -> PlacedAdapter:
        host = self._host_pages(packed)
        non_blocking = self._copies.needs_pinned
        try:
            slot, has_landed = self._copies.start(lambda: self.pool.load(host.pages, non_blocking=non_blocking))
        except PoolFull as error:
            raise InvariantViolation(f"An adapter was placed without room for it: {error}") from error
        self._known_run = 0
        self._landings[slot] = (has_landed, host)
        return PlacedAdapter(slot, self.footprint_of(packed))

    def is_ready(self, placed: PlacedAdapter) -> bool:
        slot = self._slot(placed)
        if slot in self._landings and self._landings[slot][0]():
            del self._landings[slot]
        return slot not in self._landings

    def remove(self, placed: PlacedAdapter) -> HostAdapter | None:
        self.pool.unload(self._slot(placed))
        self._landings.pop(self._slot(placed), None)
        return None

    def step_launched(self) -> None:
        self._copies.step_launched()

    def check(self, placed: Sequence[PlacedAdapter]) -> list[str]:
        problems: list[str] = []
        num_pages = sum(p.footprint.num_bytes for p in placed) // self.pool.page_num_bytes
        if num_pages != self.arena_client.num_allocated:
            problems.append(f"adapter pages: {num_pages} are in use, {self.arena_client.num_allocated} allocated")
        owners = np.zeros(self.limits.num_tiles, dtype=np.int32)
        for p in placed:
            for _, first, count in tiles_of_sites(self.pool.sites[self._slot(p)], self._base.num_layers):
                owners[first : first + count] += 1
        if (owners > 1).any():
            problems.append("adapter tiles: one belongs to two adapters")
        if owners.sum() != sum(p.footprint.num_tiles for p in placed):
            problems.append("adapter tiles: the tiles in use differ from those that adapters need")
        slots = [self._slot(p) for p in placed]
        if len(set(slots)) != len(slots) or not self._landings.keys() <= set(slots) or 0 in slots:
            problems.append("adapter slots: one belongs to the base, to two adapters, or to an evicted adapter")
        return problems

    def _host_pages(self, packed: HostAdapter) -> HostPages:
        if not isinstance(packed, HostPages):
            raise InvariantViolation("An adapter that was packed for another device can't be placed on this GPU.")
        return packed

    def _slot(self, placed: PlacedAdapter) -> int:
        if not isinstance(placed.handle, int):
            raise InvariantViolation("An adapter on another device has no slot here.")
        return placed.handle


def _refuse_norms(norms: Sequence[ReplacedNorm]) -> None:
    """Raise an error if the adapter replaces a norm.

    Raises:
        TensorMismatch: there is one.
    """
    if norms:
        n = norms[0]
        where = n.norm if n.norm == "norm" else f"layer {n.layer} {n.norm}"
        raise TensorMismatch(
            f"{where}: the adapter has a trained weight for this norm, which isn't served on a GPU; "
            "serve the adapter on a CPU, or train it without"
        )


def _refuse_infinite_multipliers(pages: AdapterPages) -> None:
    """Raise an error unless every multiplier is finite.

    A rank's multiplier is its scaling, times its rows' scales in int8; a replaced row's is its
    scale.

    Raises:
        AdapterUnservable: one isn't.
    """
    infinite = np.argwhere(~np.isfinite(pages.records.view(torch.float32).numpy()[..., MULTIPLIERS:]))
    for tile, layer, _ in infinite.tolist():
        module = next(
            name
            for name, first, count in tiles_of_sites(pages.sites, pages.records.shape[1])
            if first <= tile < first + count
        )
        raise AdapterUnservable(
            f"Layer {layer} {module} has weights so large that "
            f"the product of their scales in {DTYPE_NAMES[pages.dtype]} isn't finite.",
            hint="Serve with --adapter-dtype bf16.",
        )
