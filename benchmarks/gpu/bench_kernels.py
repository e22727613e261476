"""Shrink and expand alone, over sites, ranks, rows and adapters; beside a torch loop, and other
projects' kernels where there is a folder of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.adapters import SiteAdapters
from benchmarks.gpu.limits import SiteShape, lora_work, share
from benchmarks.gpu.machine import REPLAYS, Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import site_shapes
from loraserve_kernels.ops import apply_lora

MIXES = ((1, 1), (8, 8), (32, 1), (32, 32), (64, 64), (256, 32), (256, 256))
RANKS = (16, 64, 8, 128)
OTHER_MIXES = ((64, 64),)
"""Of ranks behind the first."""
MIXED_RANKS = (8, 16, 32, 64)
PREFILL = ((512, 4), (2048, 4), (2048, 32))
MAX_DECODE_ROWS = 256
LOOP_LAUNCHES = 1000
SWEEP_REPLAYS = 10
SWEEP_CALLS = 128
"""Layers at most that other tile sizes are timed on: still more than the cache holds."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Who is in a step.

    Attributes:
        ranks: of the adapters.
        base_share: of the rows.
    """

    name: str
    num_rows: int
    ranks: tuple[int, ...]
    base_share: float = 0.0

    @property
    def row_adapters(self) -> list[int | None]:
        """Base rows first, then adapter by adapter, as the engine orders them."""
        num_base = int(self.num_rows * self.base_share)
        owners = sorted(i % len(self.ranks) for i in range(self.num_rows - num_base))
        return [None] * num_base + [*owners]


def mixes(is_tiny: bool) -> list[Mix]:
    """The most telling first."""
    if is_tiny:
        return [Mix("8", 3, (8, 8)), Mix("mixed", 6, (8, 16, 32), 0.5), Mix("16, prefill", 40, (16, 16))]
    found = [Mix(str(rank), rows, (rank,) * adapters) for rank in RANKS[:1] for rows, adapters in MIXES]
    mixed = [tuple(MIXED_RANKS[i % 4] for i in range(n)) for n in (64, 128)]
    found += [Mix("mixed", 64, mixed[0]), Mix("mixed, half base", 128, mixed[0], 0.5), Mix("mixed", 256, mixed[1])]
    found += [Mix("16, prefill", rows, (16,) * adapters) for rows, adapters in PREFILL]
    found += [Mix("mixed, half base, prefill", 2048, mixed[0][:8], 0.5)]
    return found + [Mix(str(rank), rows, (rank,) * adapters) for rank in RANKS[1:] for rows, adapters in OTHER_MIXES]


def cases(machine: Machine) -> Iterator[Case]:
    others = cache(lambda: peers.load(machine))
    wanted = mixes(machine.is_tiny)
    if machine.is_warming:
        # one of each kind has all kernels: of a step's kind, and of each slab's height for peers
        many = [mix for mix in wanted if mix.num_rows >= 32]
        wanted = list({(mix.num_rows <= MAX_DECODE_ROWS, max(mix.ranks)): mix for mix in reversed(many)}.values())
    for number, mix in enumerate(wanted):
        for site, shape in site_shapes(machine.is_tiny).items():
            if machine.is_tiny and site != ("qkv", "gate_up", "o")[number]:
                # interpreted, one takes long enough
                continue
            # a site's kernels are its own
            name = f"{site}, rank {mix.name}, {mix.num_rows} rows, {len(mix.ranks)} adapters"
            yield Case(
                name,
                lambda s=site, h=shape, m=mix, n=number: [
                    Bench(machine, s, h, m).run(others() if n == 0 or not machine.is_tiny else peers.Peers({}, {}))
                ],
            )


@dataclass(slots=True)
class Bench:
    """One site and one mix: its adapters, its rows, and y before anything was added."""

    machine: Machine
    site: str
    shape: SiteShape
    mix: Mix
    adapters: SiteAdapters = field(init=False)
    x: Tensor = field(init=False)
    before: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def run(self, others: peers.Peers) -> Row:
        machine, mix = self.machine, self.mix
        # others' kernels can't be interpreted in bfloat16
        dtype = torch.float16 if machine.is_tiny else torch.bfloat16
        per_layer = sum(mix.ranks) * self.shape.weights_per_rank * dtype.itemsize
        self.adapters = SiteAdapters(machine, self.site, self.shape, mix.ranks, machine.num_copies(per_layer), dtype)
        self.x = machine.randn(mix.num_rows, self.shape.in_features, dtype=dtype)
        self.before = machine.randn(mix.num_rows, self.shape.width, dtype=dtype)
        # what is timed adds to it again and again
        self.y = self.before.clone()
        plan = self.adapters.plan(mix.row_adapters, 16 if mix.num_rows <= MAX_DECODE_ROWS else 32)
        expected = self._expected()

        def ours(x: Tensor, y: Tensor, layer: int) -> None:
            apply_lora(x, y, plan, self.site, layer)

        row_ranks = [mix.ranks[i] for i in mix.row_adapters if i is not None]
        used = {i for i in mix.row_adapters if i is not None}
        limit_s = machine.rates.seconds(lora_work(self.shape, [mix.ranks[i] for i in used], row_ranks))
        row: Row = {
            "site": self.site,
            "ranks": mix.name,
            "rows": mix.num_rows,
            "adapters": len(mix.ranks),
            "layers": self.adapters.num_layers,
            "error": self._error(ours, expected),
        }
        row["ok"] = row["error"] <= torch.finfo(dtype).eps
        timing = machine.time(self._calls(ours))
        us = timing.us if timing else None
        row |= {
            "us": us,
            "low_us": timing.low_us if timing else None,
            "host_us": timing.host_us if timing else None,
            "limit_us": None if machine.is_tiny else limit_s * 1e6,
            "share": share(limit_s, us / 1e6 if us else None),
        }
        row |= self._compare("loop", [peers.PeerCall("", self._loop)], us, expected)
        for name, kernels in list(others.kernels.items()):
            try:
                row |= self._compare(name, kernels.calls(machine, self.adapters, mix.row_adapters), us, expected)
            except Exception as error:
                # raises where the device is lost
                machine.synchronize()
                others.fail(name, error)
        row["note"] = "; ".join(f"{name} left out: {why}" for name, why in others.failed.items())
        return row

    def _calls(self, add: Callable[[Tensor, Tensor, int], None], most: int = 1 << 30) -> list[Callable[[], None]]:
        """A call for each layer."""
        return [lambda i=i: add(self.x, self.y, i) for i in range(min(most, self.adapters.num_layers))]

    def _compare(self, name: str, ways: Iterable[peers.PeerCall], ours_us: float | None, expected: Tensor) -> Row:
        """A peer's default and its best way; its error, that of its first."""
        found: Row = {}
        best: tuple[float, str] | None = None
        launches = 2 * len(self.mix.ranks) * len(self.shape.out_features)
        most = max(1, LOOP_LAUNCHES // launches) if name == "loop" else 1 << 30
        is_searched = set(self.mix.ranks) == {RANKS[0]} and not self.machine.is_tiny
        for number, way in enumerate(ways):
            if number == 0:
                found[f"{name}_error"] = self._error(way.add, expected)
            elif not is_searched:
                break
            calls = self._calls(way.add, min(most, SWEEP_CALLS) if number else most)
            timing = self.machine.time(calls, SWEEP_REPLAYS if number else REPLAYS)
            if timing is None or ours_us is None:
                continue
            if number == 0:
                found |= {f"{name}_us": timing.us, name: timing.us / ours_us}
            if best is None or timing.us < best[0]:
                best = timing.us, way.config
        if best is not None and name != "loop" and ours_us is not None:
            key = f"{name}_best" if name == "vllm" else name
            found |= {f"{name}_best_us": best[0], f"{name}_config": best[1], key: best[0] / ours_us}
        return found

    def _segments(self) -> list[tuple[int, int, int]]:
        """(adapter, first row, end)."""
        owners = self.mix.row_adapters
        used = sorted({i for i in owners if i is not None})
        return [(i, owners.index(i), owners.index(i) + owners.count(i)) for i in used]

    def _loop(self, x: Tensor, y: Tensor, layer: int) -> None:
        """What one writes without kernels: two products for each adapter and slice."""
        for adapter, start, end in self._segments():
            column = 0
            for a, b in self.adapters.matrices(adapter, layer):
                columns = slice(column, column := column + b.shape[1])
                y[start:end, columns].addmm_(x[start:end] @ a.T, b, alpha=peers.SCALING)

    def _expected(self) -> Tensor:
        """Of layer 0, in float64."""
        y = self.before.double()
        for adapter, start, end in self._segments():
            column = 0
            for a, b in self.adapters.matrices(adapter, 0):
                columns = slice(column, column := column + b.shape[1])
                y[start:end, columns] += peers.SCALING * (self.x[start:end].double() @ a.double().T) @ b.double()
        return y

    def _error(self, add: Callable[[Tensor, Tensor, int], None], expected: Tensor) -> float:
        """By the largest number; infinite where a base row has changed."""
        result = self.before.clone()
        add(self.x, result, 0)
        num_base = self.mix.row_adapters.count(None)
        if not torch.equal(result[:num_base], self.before[:num_base]):
            return float("inf")
        return float((result.double() - expected).abs().max() / expected.abs().max())
