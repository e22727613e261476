"""A whole plan: what the base takes and what the budget leaves.

It shows which adapters fit with how many sequences, and what that means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from loraserve.config import EngineConfig
from loraserve.planning.adapters import AdapterPlan
from loraserve.planning.base import BasePlan
from loraserve.planning.base_formats import FormatPlan
from loraserve.planning.draft import DraftPlan
from loraserve.planning.memory import ArenaPlan, StepPlan, load_bytes

LINK_BYTES_PER_S = 12e9
"""Bytes per second from pinned host memory to a GPU: PCIe 4.0 x16 carries about 25e9,
3.0 half of it.
"""


class Level(StrEnum):
    REFUSED = "refused"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to know before the server is started.

    Attributes:
        code: stable, for programs.
    """

    level: Level
    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory left for adapters while sequences run.

    Attributes:
        num_sequences, num_tokens: sequences at once, and tokens of each.
        adapter_bytes: None: as many sequences can't run at once.
        num_adapters: how many of average size that holds, of those planned; None without adapters,
            or where the sequences can't run.
    """

    num_sequences: int
    num_tokens: int
    adapter_bytes: int | None
    num_adapters: int | None


@dataclass(frozen=True, slots=True)
class Loads:
    """Time to load an adapter onto the device.

    Attributes:
        disk_bytes_per_s: reading and hashing.
        disk_s, largest_disk_s: from disk, of average and of the largest; packing not included.
        host_s: from the host's memory: the copy to a GPU; 0 on a CPU, where nothing is copied.
        max_loads_per_s: what all loaders bring from disk together at most.
    """

    disk_bytes_per_s: float
    disk_s: float
    largest_disk_s: float
    host_s: float
    max_loads_per_s: float


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Memory of one of the processes that share a base.

    Attributes:
        layers: range of the base's that it has.
        weights_bytes: of its part of the base.
        kv_bytes_per_sequence: of its part of the KV of one sequence of full length.
        adapter_bytes: of its parts of all planned adapters.
    """

    rank: int
    layers: tuple[int, int]
    weights_bytes: int
    kv_bytes_per_sequence: int
    adapter_bytes: int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The whole plan.

    `fits` is in the order of sequences; `loads` is None without adapters or a rate; `ranks` is
    empty where one process has the base; `formats` where its checkpoint is rounded already.
    """

    base: BasePlan
    step: StepPlan
    arena: ArenaPlan
    adapters: tuple[AdapterPlan, ...]
    fits: tuple[Fit, ...]
    loads: Loads | None
    notices: tuple[Notice, ...]
    host_cache_bytes: int
    num_in_host_cache: int
    load_bytes: int
    draft: DraftPlan | None = None
    ranks: tuple[RankPlan, ...] = ()
    formats: tuple[FormatPlan, ...] = ()

    @property
    def served(self) -> list[AdapterPlan]:
        """Adapters that can be served."""
        return [adapter for adapter in self.adapters if adapter.refusal is None]

    @property
    def is_refused(self) -> bool:
        """Whether part of it can't be served."""
        return any(notice.level is Level.REFUSED for notice in self.notices)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with names that stay."""
        base, arena = self.base, self.arena
        served, num_pages = self.served, total_pages(self.served)
        return {
            "device": base.device,
            "base": {
                "architecture": base.spec.architecture,
                "dtype": base.dtype,
                "quantization": base.spec.quantization,
                "num_parameters": base.spec.num_parameters,
                "size_bytes": base.num_bytes,
                "parts": [asdict(part) for part in base.parts],
                "max_model_len": base.max_model_len,
                "formats": [asdict(one) for one in self.formats],
            },
            "ranks": [asdict(rank) for rank in self.ranks],
            "draft": None if self.draft is None else self.draft.as_dict(),
            "step": {
                "activations_bytes": self.step.activations_bytes,
                "buffers_bytes": self.step.buffers_bytes,
                "reserved_bytes": self.step.reserved_bytes,
                "is_estimate": True,
            },
            "budget": {
                "bytes": arena.budget_bytes,
                "source": arena.source,
                "page_bytes": arena.page_bytes,
                "num_pages": arena.num_pages,
            },
            "kv": {
                "block_size": arena.block_size,
                "block_bytes": arena.kv_block_bytes,
                "bytes_per_token": arena.kv_block_bytes // arena.block_size,
                "bytes_per_sequence": arena.kv_bytes(base.max_model_len),
                "max_tokens": arena.kv_tokens_beside(0),
                "max_sequences": arena.max_sequences(base.max_model_len),
                "tokens_beside_all_adapters": arena.kv_tokens_beside(min(num_pages, arena.max_adapter_pages))
                if self.adapters
                else None,
            },
            "adapters": {
                "count": sum(adapter.count for adapter in self.adapters),
                "num_refused": sum(adapter.count for adapter in self.adapters if adapter.refusal is not None),
                "total_bytes": num_pages * arena.page_bytes,
                "max_bytes": arena.max_adapter_pages * arena.page_bytes,
                "host_cache_bytes": self.host_cache_bytes,
                "num_in_host_cache": self.num_in_host_cache,
                "load_bytes": self.load_bytes,
                "fit": [asdict(fit) for fit in self.fits],
                "loads": None if self.loads is None else asdict(self.loads),
                "each": [
                    {**asdict(adapter), "device_bytes": adapter.num_pages * arena.page_bytes}
                    for adapter in self.adapters
                ],
                "num_served": sum(adapter.count for adapter in served),
            },
            "notices": [asdict(notice) for notice in self.notices],
            "is_refused": self.is_refused,
        }


def make_plan(
    base: BasePlan,
    step: StepPlan,
    arena: ArenaPlan,
    config: EngineConfig,
    adapters: Sequence[AdapterPlan],
    *,
    running: Sequence[tuple[int, int]] = (),
    disk_bytes_per_s: float | None = None,
    available_bytes: int | None = None,
    draft: DraftPlan | None = None,
    formats: tuple[FormatPlan, ...] = (),
) -> CapacityPlan:
    """Put the plan together.

    Args:
        running: (sequences, tokens of each) to look at, in addition to one sequence and the most,
            of full length.
        available_bytes: what the host's memory has left now; None: unknown.
        draft: the draft base, whose cache the arena leaves room for.
        formats: that the base can be served in.
    """
    served = [adapter for adapter in adapters if adapter.refusal is None]
    looked_at = dict.fromkeys([(1, base.max_model_len), (config.max_num_seqs, base.max_model_len), *running])
    fits = tuple(_fit(arena, served, *pair) for pair in sorted(looked_at))
    loads = None
    if served and disk_bytes_per_s:
        loads = _loads(base, arena, config, served, disk_bytes_per_s)
    num_in_host = _count_in(config.host_cache_bytes, _mean([(a.packed_bytes, a.count) for a in served]), served)
    plan = CapacityPlan(
        base,
        step,
        arena,
        tuple(adapters),
        fits,
        loads,
        (),
        config.host_cache_bytes,
        num_in_host,
        load_bytes(config, arena),
        draft,
        tuple(_ranks(base, arena, served)) if base.grid.size > 1 else (),
        formats,
    )
    return replace(plan, notices=tuple(_notices(plan, config, available_bytes)))


def _ranks(base: BasePlan, arena: ArenaPlan, served: Sequence[AdapterPlan]) -> Iterator[RankPlan]:
    parts = base.kv_rank_bytes(arena.block_size)
    for place in base.places:
        layers, page = place.stage.layers, arena.page_bytes
        yield RankPlan(
            place.rank,
            (layers.start, layers.stop),
            base.rank_bytes[place.rank],
            arena.sequence_blocks * -(-parts[place.rank] // page) * page,
            sum(adapter.rank_bytes[place.rank] * adapter.count for adapter in served),
        )


def total_pages(adapters: Sequence[AdapterPlan]) -> int:
    """Sum the pages of all adapters."""
    return sum(adapter.num_pages * adapter.count for adapter in adapters)


def _mean(sizes: Sequence[tuple[int, int]]) -> float:
    """Compute the mean of sizes, weighted by their counts."""
    count = sum(count for _, count in sizes)
    return sum(size * count for size, count in sizes) / count if count else 0.0


def _count_in(room: int, each: float, served: Sequence[AdapterPlan]) -> int:
    num_all = sum(adapter.count for adapter in served)
    return num_all if each == 0 else min(num_all, int(room / each))


def _fit(arena: ArenaPlan, served: Sequence[AdapterPlan], num_sequences: int, num_tokens: int) -> Fit:
    num_pages = arena.adapter_pages_beside(num_sequences, num_tokens)
    if num_pages is None or not served:
        return Fit(num_sequences, num_tokens, None if num_pages is None else num_pages * arena.page_bytes, None)
    count = _count_in(num_pages, _mean([(adapter.num_pages, adapter.count) for adapter in served]), served)
    if arena.max_tiles:
        tiles = _mean([(adapter.num_tiles, adapter.count) for adapter in served])
        count = min(count, _count_in(arena.max_tiles, tiles, served))
    return Fit(num_sequences, num_tokens, num_pages * arena.page_bytes, count)


def _loads(base: BasePlan, arena: ArenaPlan, config: EngineConfig, served: Sequence[AdapterPlan], rate: float) -> Loads:
    disk_s = _mean([(adapter.file_bytes, adapter.count) for adapter in served]) / rate
    copied = _mean([(adapter.num_pages * arena.page_bytes, adapter.count) for adapter in served])
    return Loads(
        disk_bytes_per_s=rate,
        disk_s=disk_s,
        largest_disk_s=max(adapter.file_bytes for adapter in served) / rate,
        host_s=0.0 if base.device == "cpu" else copied / LINK_BYTES_PER_S,
        max_loads_per_s=config.loader_threads / disk_s if disk_s else 0.0,
    )


def _notices(plan: CapacityPlan, config: EngineConfig, available_bytes: int | None) -> Iterator[Notice]:
    yield from _of_adapters(plan)
    if plan.served:
        yield from _of_thrashing(plan)
    arena, base = plan.arena, plan.base
    most = arena.max_sequences(base.max_model_len)
    if most < config.max_num_seqs:
        yield Notice(
            Level.WARNING,
            "kv_below_max_num_seqs",
            f"The KV of {most} sequences of full length ({base.max_model_len:,} tokens) fits; "
            f"up to {config.max_num_seqs} may run at once. "
            "If more of them run at once, some are preempted and computed again.",
            "Raise --memory-budget, or lower --max-num-seqs or --max-model-len.",
        )
    if base.device == "cpu" and available_bytes is not None:
        needed = base.num_bytes + plan.step.reserved_bytes + arena.budget_bytes + config.host_cache_bytes
        needed += plan.load_bytes
        if plan.draft is not None:
            needed += plan.draft.base.num_bytes + plan.draft.kv_bytes
        if needed > available_bytes:
            yield Notice(
                Level.WARNING,
                "memory_overcommitted",
                f"Base, step, budget, host cache and loads may take {needed:,} bytes together; "
                f"this machine has {available_bytes:,} available now.",
                "Lower --memory-budget or --host-cache, or quantize the base.",
            )
    if base.device == "cuda":
        yield Notice(
            Level.NOTE,
            "gpu_is_estimated",
            "The memory that steps take on a GPU is an estimate here; the engine measures it when it starts.",
        )


def _of_adapters(plan: CapacityPlan) -> Iterator[Notice]:
    for adapter in plan.adapters:
        if adapter.refusal is not None:
            is_large = adapter.num_pages > plan.arena.max_adapter_pages or adapter.num_tiles > plan.arena.max_tiles
            yield Notice(
                Level.REFUSED,
                "adapter_too_large" if is_large else "adapter_unservable",
                f"{adapter.name} can never be served: {adapter.refusal}",
                "Raise --memory-budget, lower --max-model-len, or use --adapter-dtype int8." if is_large else "",
            )
    if any(adapter.is_upper_bound for adapter in plan.served):
        yield Notice(
            Level.NOTE,
            "adapter_is_bounded",
            "Some adapters hold whole weights, of which only the rows that differ from the base's are kept: "
            "their sizes here are upper bounds.",
        )


def _of_thrashing(plan: CapacityPlan) -> Iterator[Notice]:
    """Yield a notice if the adapters don't all fit at once, and its cost.

    The cost is for one running sequence: the best case.
    """
    count = sum(adapter.count for adapter in plan.served)
    best, full = plan.fits[0], plan.fits[-1]
    in_best = best.num_adapters or 0
    if in_best < count:
        missed = 1 - in_best / count
        cost = ""
        if plan.loads is not None:
            cost = (
                f" If all are used equally often, {missed:.0%} of the uses wait for a load: "
                f"{plan.loads.host_s * 1e3:.1f} ms from host memory, "
                f"{plan.loads.disk_s * 1e3:.1f} ms from disk, at most {plan.loads.max_loads_per_s:,.0f} "
                "loads per second."
            )
        yield Notice(
            Level.WARNING,
            "adapters_take_turns",
            f"{in_best:,} of {count:,} adapters fit on the device at once.{cost} Popular ones stay resident.",
            "Raise --memory-budget or use --adapter-dtype int8.",
        )
        # on a CPU an adapter is in one of the two, on a GPU what is on the device may be in both
        in_memory = in_best + plan.num_in_host_cache if plan.base.device == "cpu" else plan.num_in_host_cache
        if in_memory < count:
            yield Notice(
                Level.WARNING,
                "adapters_exceed_host",
                f"{min(count, in_memory):,} of {count:,} adapters fit into host memory at once; "
                "the others are loaded from disk.",
                "Raise --host-cache.",
            )
    elif full.num_adapters is not None and full.num_adapters < count:
        yield Notice(
            Level.WARNING,
            "adapters_yield_to_kv",
            f"All {count:,} adapters fit beside {best.num_sequences} sequence; "
            f"beside {full.num_sequences} of full length, {full.num_adapters:,} do.",
            "Raise --memory-budget, or lower --max-num-seqs or --max-model-len.",
        )
