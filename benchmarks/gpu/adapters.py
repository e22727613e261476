"""Random adapters in a paged pool on the device: few with weights that are known exactly, to check;
or many at once, to measure.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.limits import SiteShape
from benchmarks.gpu.machine import Machine
from loraserve_kernels.common.modules import LAYER_MODULES, MODULE_INDEX, MODULES, SITES, LoraModule, ReplacedRows
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.gpu.paged.layout import A_UNITS, B_UNITS, RANK_TILE, REPLACED_SITES, UNIT_BYTES, AdapterPages
from loraserve_kernels.gpu.paged.packing import make_pages
from loraserve_kernels.gpu.paged.pool import PagedPool

Shapes = Mapping[str, tuple[int, int]]
Ranks = int | Mapping[str, int]


def exact_modules(
    ranks: Ranks,
    shapes: Shapes,
    stored: torch.dtype,
    generator: torch.Generator,
    *,
    num_layers: int = 1,
    has_more: Container[str] = (),
    strength: float = 1.0,
) -> list[LoraModule]:
    """Modules on the CPU whose weights `stored` holds without rounding:
    int8 with the scales that it will choose.

    Args:
        has_more: modules with a δ; with a shift, but for the embedding; and with some rows in the
            place of the base's, at the head and the embedding.
        strength: a power of two.
    """
    by_module = dict.fromkeys((m for m in MODULES if m in shapes), ranks) if isinstance(ranks, int) else ranks
    made = []
    for layer in range(num_layers):
        for module, rank in by_module.items():
            if layer and module not in LAYER_MODULES:
                continue
            out_features, in_features = shapes[module]
            delta = shift = rows = None
            if module in has_more:
                delta = torch.randn(out_features, generator=generator) / 4
                shift = None if module == "embed_tokens" else torch.randn(out_features, generator=generator)
                rows = _some_rows(module, shapes[module], stored, generator)
            a, b = (_exact(rank, width, stored, generator) for width in (in_features, out_features))
            scaling = 0.5 + 0.25 * layer + 0.125 * MODULE_INDEX[module]
            made.append(LoraModule(layer, module, a, strength * b.T, scaling, delta, shift, rows))
    return made


def _some_rows(
    module: str, shape: tuple[int, int], stored: torch.dtype, generator: torch.Generator
) -> ReplacedRows | None:
    """Every third row, at most 1000 of them; None where a GPU replaces none."""
    if module not in REPLACED_SITES.values():
        return None
    most, width = reversed(shape) if module == "embed_tokens" else shape
    ids = torch.arange(most % 3, most, 3, dtype=torch.int32)[-1000:]
    return ReplacedRows(ids, _exact(len(ids), width, stored, generator))


def _exact(rank: int, width: int, stored: torch.dtype, generator: torch.Generator) -> Tensor:
    if stored != torch.int8:
        return (torch.randn(rank, width, generator=generator) / width**0.5).to(stored).float()
    codes = torch.randint(-127, 128, (rank, width), generator=generator).float()
    codes[:, 0] = 127
    # by powers of two: what is stored is the codes again, and each rank's scale is exact
    return codes * 2.0 ** torch.randint(-12, -9, (rank, 1), generator=generator)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Adapters whose weights are known, in a pool whose every other byte is NaN.

    Attributes:
        modules: of each slot, by (layer, module), on the device in float64.
    """

    pool: PagedPool
    modules: dict[int, dict[tuple[int, str], LoraModule]]

    @property
    def slots(self) -> list[int]:
        return list(self.modules)

    def add_to(
        self, x: Tensor, y: Tensor, row_slots: Sequence[int], site: str, layer: int, bias: Tensor | None
    ) -> Tensor:
        """Return what the site's rows of `y` should become, in float64.

        Args:
            x: [num_rows, in_features], or token ids for the embedding.
            y: [num_rows, sum of the site's out_features] before.
        """
        out = y.double().clone()
        for slot in sorted(set(row_slots) - {0}):
            rows = torch.tensor([i for i, s in enumerate(row_slots) if s == slot], device=y.device)
            column = 0
            for name in SITES[site]:
                width = self.pool.module_shapes[MODULE_INDEX[name]][0]
                columns = slice(column, column := column + width)
                module = self.modules[slot].get((layer, name))
                if module is None:
                    continue
                part, added = out[rows, columns], 0 if bias is None else bias[columns].double()
                part -= added
                if module.row_overrides is not None:
                    _replace(part, x[rows], module.row_overrides, site)
                shrunk = module.lora_a.T[x[rows].long()] if site == "embed" else x[rows].double() @ module.lora_a.T
                part += module.scaling * shrunk @ module.lora_b.T
                if module.dora_delta is not None:
                    part *= 1 + module.dora_delta
                out[rows, columns] = part + added + (0 if module.bias_delta is None else module.bias_delta)
        return out


def _replace(part: Tensor, x: Tensor, rows: ReplacedRows, site: str) -> None:
    """Put what an adapter's own rows give in the place of what the base's do."""
    if site != "embed":
        part[:, rows.ids] = x.double() @ rows.weight.T
        return
    places = torch.searchsorted(rows.ids, x).clamp(max=len(rows.ids) - 1)
    found = rows.ids[places] == x
    part[found] = rows.weight[places[found]]


def make_fleet(
    machine: Machine,
    shapes: Shapes,
    all_ranks: Sequence[Ranks],
    dtype: torch.dtype,
    *,
    stored: Sequence[torch.dtype] = (),
    has_more: Container[str] = (),
    num_layers: int = 1,
    seed: int = 0,
    strength: float = 1.0,
) -> Fleet:
    """A fleet with an adapter for each of `all_ranks`.

    Args:
        stored: what each adapter is stored in; `dtype` behind its end.
        has_more: of every second adapter, as `exact_modules` takes it.
    """
    generator = torch.Generator().manual_seed(seed)
    page = -(-max(max(shape) for shape in shapes.values()) * 4 // 256) * 256 * 8
    packed: list[AdapterPages] = []
    modules = []
    for i, ranks in enumerate(all_ranks):
        kept = stored[i] if i < len(stored) else dtype
        more = has_more if i % 2 else ()
        modules.append(
            exact_modules(ranks, shapes, kept, generator, num_layers=num_layers, has_more=more, strength=strength)
        )
        packed.append(
            make_pages(modules[-1], num_layers=num_layers, module_shapes=shapes, page_num_bytes=page, dtype=kept)
        )
    pool = PagedPool(
        num_pages=sum(p.num_pages for p in packed) + 3,
        page_num_bytes=page,
        num_layers=num_layers,
        max_tiles=sum(p.num_tiles for p in packed) + 3,
        max_slots=len(packed) + 2,
        module_shapes=shapes,
        dtype=dtype,
        device=machine.device,
    )
    # NaN in either 16-bit dtype and in float32
    pool.data.view(torch.int16).fill_(0x7FFF)
    loaded = {pool.load(p): of_one for p, of_one in zip(packed, modules, strict=True)}
    return Fleet(pool, {slot: _on_device(of_one, machine.device) for slot, of_one in loaded.items()})


def _on_device(modules: Sequence[LoraModule], device: torch.device) -> dict[tuple[int, str], LoraModule]:
    def wide(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float64)

    return {
        (m.layer, m.module): replace(
            m,
            lora_a=wide(m.lora_a),
            lora_b=wide(m.lora_b),
            # a multiplier is a float32
            scaling=float(np.float32(m.scaling)),
            dora_delta=None if m.dora_delta is None else wide(m.dora_delta),
            bias_delta=None if m.bias_delta is None else wide(m.bias_delta),
            row_overrides=None
            if m.row_overrides is None
            else ReplacedRows(m.row_overrides.ids.to(device, torch.int64), wide(m.row_overrides.weight)),
        )
        for m in modules
    }


class SiteAdapters:
    """Many adapters of one site over several layers, whose weights are drawn on the device.

    No two share memory.

    Attributes:
        slots: of the adapters, in the order of their ranks.
        num_layers: copies of the site, each with weights of its own.
    """

    def __init__(
        self, machine: Machine, site: str, shape: SiteShape, ranks: Sequence[int], num_layers: int, dtype: torch.dtype
    ) -> None:
        """Ranks must divide the largest: then each page holds whole layers,
        and every matrix is contiguous.
        """
        self.site, self.ranks, self.num_layers, self._dtype = site, list(ranks), num_layers, dtype
        shapes = {name: (out, shape.in_features) for name, out in zip(SITES[site], shape.out_features, strict=True)}
        page = max(ranks) * shape.weights_per_rank * dtype.itemsize
        patterns = {rank: self._pattern(rank, shapes, page, machine.device) for rank in sorted(set(ranks))}
        wanted = [patterns[rank] for rank in ranks]
        self.pool = PagedPool(
            num_pages=sum(p.num_pages for p in wanted),
            page_num_bytes=page,
            num_layers=num_layers,
            max_tiles=sum(p.num_tiles for p in wanted),
            max_slots=len(wanted) + 1,
            module_shapes=shapes,
            dtype=dtype,
            device=machine.device,
        )
        self.slots = [self.pool.load(p) for p in wanted]
        # small enough for float16, and a row's own part of y stays the larger one
        self.pool.weights.normal_(std=0.02)
        self._records = self.pool.records.cpu()

    def _pattern(self, rank: int, shapes: Shapes, page: int, device: torch.device) -> AdapterPages:
        modules = [
            LoraModule(layer, name, torch.zeros(1).expand(rank, k), torch.zeros(1).expand(n, rank), 0.5)
            for layer in range(self.num_layers)
            for name, (n, k) in shapes.items()
        ]
        pages = make_pages(
            modules, num_layers=self.num_layers, module_shapes=shapes, page_num_bytes=page, dtype=self._dtype
        )
        # copied on the device, not from the host, once for each adapter
        return replace(pages, pages=pages.pages.to(device))

    def matrices(self, adapter: int, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Views of each slice's A [rank, in] and B transposed [rank, out].

        B A is multiplied by 0.5.
        """
        found = []
        for i, name in enumerate(SITES[self.site]):
            out_features, in_features = self.pool.module_shapes[MODULE_INDEX[name]]
            tile = int(self.pool.sites[self.slots[adapter], list(SITES).index(self.site), 4 + 4 * i + 2])
            units = self._records[tile, layer, [A_UNITS, B_UNITS]].tolist()
            found.append((self._rows(units[0], adapter, in_features), self._rows(units[1], adapter, out_features)))
        return found

    def _rows(self, unit: int, adapter: int, width: int) -> Tensor:
        start = unit * UNIT_BYTES // self._dtype.itemsize
        return self.pool.weights[start : start + self.ranks[adapter] * width].view(-1, width)

    def plan(self, row_adapters: Sequence[int | None], block_m: int) -> GpuLoraPlan:
        """A plan of rows, each an adapter's or the base's."""
        slots = np.array([0 if a is None else self.slots[a] for a in row_adapters], dtype=np.int32)
        tiles = sum(
            -(-list(row_adapters).count(a) // block_m) * -(-self.ranks[a] // RANK_TILE)
            for a in set(row_adapters) - {None}
        )
        plan = GpuLoraPlan(
            self.pool,
            max_num_tokens=len(slots),
            max_work_items=max(1, tiles * len(SITES[self.site])),
            block_m=block_m,
        )
        plan.fill(slots)
        return plan
