"""LoRA's kernels on the device: every site, ranks from 1 to 512 mixed, 16 bits and int8 side by
side, DoRA, shifts, the head, the embedding and rows of adapters' own there; base rows bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.adapters import Fleet, Ranks, make_fleet
from benchmarks.gpu.close import against_float64, dtype_name, same_bits
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row
from benchmarks.gpu.shapes import module_shapes
from loraserve_kernels.common.modules import LAYER_SITES, SITES
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan
from loraserve_kernels.ops import apply_embedding_lora, apply_lora

RANKS: tuple[Ranks, ...] = (
    8,
    16,
    1,
    {"q_proj": 12, "v_proj": 64, "o_proj": 33, "up_proj": 20, "down_proj": 128, "lm_head": 17, "embed_tokens": 18},
    {"k_proj": 512, "gate_proj": 48, "down_proj": 8},
)
TINY_RANKS: tuple[Ranks, ...] = (8, 16, 1, {"q_proj": 12, "v_proj": 40, "up_proj": 20, "down_proj": 33, "lm_head": 17})
WITH_MORE = ("q_proj", "o_proj", "up_proj", "lm_head", "embed_tokens")
LAYER = 1


def cases(machine: Machine) -> Iterator[Case]:
    for dtype in machine.dtypes:
        fleet = cache(lambda dtype=dtype: _fleet(machine, dtype, is_mixed=False))
        mixed = cache(lambda dtype=dtype: _fleet(machine, dtype, is_mixed=True))
        name = dtype_name(dtype)
        decode, chunk = (5, 9) if machine.is_tiny else (61, 700)
        for site in (*LAYER_SITES, "lm_head", "embed"):
            yield Case(f"{site}, {name}", lambda f=fleet, s=site, d=decode: [_check(machine, f(), s, d, 16)])
            if not machine.is_tiny or site in ("qkv", "lm_head", "embed"):
                label = f"{site}, {name} with int8, DoRA and rows"
                yield Case(
                    label,
                    lambda f=mixed, s=site, d=decode: [_check(machine, f(), s, d, 16, "int8, DoRA, shifts and rows")],
                )
        for site in ("qkv",) if machine.is_tiny else LAYER_SITES:
            yield Case(
                f"{site}, {name}, chunk",
                lambda f=mixed, s=site, c=chunk: [_check(machine, f(), s, c, 32, "tiles of 32")],
            )
        yield Case(
            f"o, {name} into float32",
            lambda f=mixed, d=decode: [_check(machine, f(), "o", d, 16, "into float32", y_dtype=torch.float32)],
        )
        yield Case(f"bits, {name}", lambda f=mixed, d=decode: _check_cobatched(machine, f(), d))
        yield Case(f"graph, {name}", lambda f=mixed, d=decode: _check_replay(machine, f(), d))


def _fleet(machine: Machine, dtype: torch.dtype, *, is_mixed: bool) -> Fleet:
    ranks = TINY_RANKS if machine.is_tiny else RANKS
    stored = [(dtype, torch.int8)[i // 2 % 2] for i in range(len(ranks))] if is_mixed else []
    more = WITH_MORE if is_mixed else ()
    return make_fleet(machine, module_shapes(machine.is_tiny), ranks, dtype, stored=stored, has_more=more, num_layers=2)


def row_slots(fleet: Fleet, num_rows: int) -> list[int]:
    """Every adapter and the base, in an order that isn't sorted."""
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows)).tolist()
    kinds = [0, *fleet.slots]
    return [kinds[i % len(kinds)] for i in order]


def make_plan(fleet: Fleet, slots: Sequence[int], block_m: int) -> GpuLoraPlan:
    plan = GpuLoraPlan(fleet.pool, max_num_tokens=max(1, len(slots)), max_work_items=4000, block_m=block_m)
    plan.scratch.fill_(float("nan"))
    plan.fill(np.array(slots, dtype=np.int32))
    return plan


def make_rows(
    machine: Machine, fleet: Fleet, site: str, slots: Sequence[int], y_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the bias that y holds; x of base rows is NaN, since nothing may read it."""
    shapes = module_shapes(machine.is_tiny)
    in_features, width = shapes[SITES[site][0]][1], sum(shapes[name][0] for name in SITES[site])
    is_base = torch.tensor([slot == 0 for slot in slots], device=machine.device)
    if site == "embed":
        x = torch.randint(in_features, (len(slots),), device=machine.device)
        return x, machine.randn(len(slots), width), machine.randn(width)
    x = machine.randn(len(slots), in_features).to(fleet.pool.dtype)
    x[is_base] = float("nan")
    dtype = y_dtype or fleet.pool.dtype
    return x, machine.randn(len(slots), width).to(dtype), machine.randn(width).to(fleet.pool.dtype)


def run(x: Tensor, y: Tensor, plan: GpuLoraPlan, site: str, bias: Tensor | None) -> None:
    if site == "embed":
        apply_embedding_lora(x, y, plan)
    else:
        apply_lora(x, y, plan, site, LAYER if site in LAYER_SITES else 0, bias)


def _check(
    machine: Machine,
    fleet: Fleet,
    site: str,
    num_rows: int,
    block_m: int,
    what: str = "",
    *,
    y_dtype: torch.dtype | None = None,
) -> Row:
    slots = row_slots(fleet, num_rows)
    x, y, bias = make_rows(machine, fleet, site, slots, y_dtype)
    layer = LAYER if site in LAYER_SITES else 0
    expected = fleet.add_to(x, y, slots, site, layer, None if site == "embed" else bias)
    before, is_base = y.clone(), torch.tensor([slot == 0 for slot in slots], device=machine.device)
    run(x, y, make_plan(fleet, slots, block_m), site, bias)
    # shrunk sums are rounded to the pool's dtype, also where y is float32
    factor = torch.finfo(fleet.pool.dtype).eps / torch.finfo(y.dtype).eps
    note = f"{dtype_name(fleet.pool.dtype)}, {num_rows} rows" + (f", {what}" if what else "")
    row = against_float64(f"LoRA {site}", y[~is_base], expected[~is_base], factor=factor, note=note)
    base = same_bits("", y[is_base], before[is_base])
    if not base["ok"]:
        row |= {"ok": False, "note": f"{note}; base rows: {base['note']}"}
    return row


def _check_cobatched(machine: Machine, fleet: Fleet, num_rows: int) -> list[Row]:
    """A row's bits are the same alone, in the step, and in one of other rows."""
    slots, rows = row_slots(fleet, num_rows), []
    for site in ("qkv", "down") if not machine.is_tiny else ("qkv",):
        x, y, bias = make_rows(machine, fleet, site, slots)
        together, alone = y.clone(), y.clone()
        run(x, together, make_plan(fleet, slots, 16), site, bias)
        chosen = range(0, num_rows, max(1, num_rows // 8))
        for i in chosen:
            run(x[i : i + 1], alone[i : i + 1], make_plan(fleet, [slots[i]], 16), site, bias)
        picked = torch.tensor(list(chosen), device=machine.device)
        name = dtype_name(fleet.pool.dtype)
        rows.append(
            same_bits(
                f"LoRA {site}: a row alone and cobatched",
                together[picked],
                alone[picked],
                note=name,
                products_in=fleet.pool.dtype,
            )
        )
    return rows


def _check_replay(machine: Machine, fleet: Fleet, num_rows: int) -> list[Row]:
    """A graph that was captured with one step's rows computes a later step's as eager launches
    do.
    """
    slots, checks = row_slots(fleet, num_rows), []
    for site in ("qkv", "lm_head", "embed"):
        x, y, bias = make_rows(machine, fleet, site, slots)
        x = x.nan_to_num()
        plan, out = make_plan(fleet, [fleet.slots[0]] * num_rows, 16), y.clone()
        replay = machine.capture(lambda x=x, out=out, plan=plan, site=site, bias=bias: run(x, out, plan, site, bias))
        plan.fill(np.array(slots, dtype=np.int32))
        out.copy_(y)
        replay()
        eager = y.clone()
        run(x, eager, make_plan(fleet, slots, 16), site, bias)
        what = f"LoRA {site}: a graph's replay and eager launches"
        checks.append(same_bits(what, out, eager, note=dtype_name(fleet.pool.dtype)))
    return checks
