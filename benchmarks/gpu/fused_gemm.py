"""A linear for up to 64 rows and LoRA's expand in one launch, after shrink: a candidate for the
engine's two steps, measured beside them.

A column tile has `SPLIT_K` programs that sum the linear's products, as in `decode_gemm`, and
`LORA_PARTS` programs that multiply the shrunk sums of some of the step's row tiles by their
adapters' B meanwhile. The last to arrive puts them together: ``(1 + δ) (sums + Δ) + bias + shift``,
rounded once. Rows without an adapter get the bits that `decode_gemm` gives them, and a row's Δ is
one program's work: its bits depend neither on the other rows nor on how many parts there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.common.quantized import QuantizedWeight
from loraserve_kernels.gpu.device import registers, roomy
from loraserve_kernels.gpu.gemm import gemm
from loraserve_kernels.gpu.gemm.decode_gemm import arrive, part_of_sums, scaled, store_part, sum_of_parts
from loraserve_kernels.gpu.lora.apply import shrink, site_widths
from loraserve_kernels.gpu.lora.expand import add_products
from loraserve_kernels.gpu.lora.plan import HEADER, SITE_INDEX, GpuLoraPlan
from loraserve_kernels.gpu.paged import layout as paged_layout

DELTA_UNIT = tl.constexpr(paged_layout.DELTA_UNIT)
HAS_DELTA = tl.constexpr(paged_layout.HAS_DELTA)
SHIFT_UNIT = tl.constexpr(paged_layout.SHIFT_UNIT)
HAS_SHIFT = tl.constexpr(paged_layout.HAS_SHIFT)
UNIT_BITS = tl.constexpr(8 * paged_layout.UNIT_BYTES)


# programs that multiply by adapters' B, over all column tiles: enough to fill a GPU beside the
# others
_LORA_PROGRAMS = 512
# registers of a thread by warps and rows of a tile, for four programs at once or three: left alone,
# some versions of the compiler aim at more programs, and keep registers in memory for it
_MAX_REGISTERS = {(4, 16): registers(4, 4), (4, 32): registers(4, 3)}


def weight_only_linear_lora(
    x: Tensor, weight: QuantizedWeight | Tensor, plan: GpuLoraPlan, site: str, layer: int
) -> Tensor:
    """Return what `weight_only_linear` and then `apply_lora` give, up to rounding, by shrink and
    one launch for everything else.

    Rows without an adapter have the bits of `weight_only_linear`; those of a row with one depend on
    that row alone.

    Args:
        x: [1 to 64, in_features], the pool's dtype.
        weight: of a site whose slices are filled by column tiles; not the head, of which adapters
            may replace rows.
        plan: the last `fill` was True.
    """
    out_features, in_features = gemm._check(x, weight, None, None)
    config, widths = gemm.decode_config(x.shape[0], weight), site_widths(plan, site)
    assert out_features == sum(widths), "the weight isn't the site's"
    assert not any(width % config.block_n for width in widths), "column tiles don't fill the slices"
    shrink(x, plan, site, layer)
    pool = plan.pool
    out = torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device)
    tiles, parts = out_features // config.block_n, gemm.split_k(out_features, in_features)
    lora_parts = max(1, min(gemm._MAX_PARTS, _LORA_PROGRAMS // tiles))
    tensors, numbers, constants = gemm._decode_launch(x, weight, None, out, in_features, config)
    decode_lora_gemm_kernel[(tiles * (parts + lora_parts),)](
        *tensors,
        gemm._planes(x, tiles, parts + 3, config),
        gemm._counters(x.device),
        plan.scratch,
        pool.weights,
        pool.codes,
        pool.deltas,
        pool.records[0, layer],
        plan.buffer,
        *numbers,
        pool.records.stride(0),
        *widths[:2],
        HEADER_AT=4 * SITE_INDEX[site],
        PERM_AT=HEADER,
        LORA_PARTS=lora_parts,
        LORA_SPLIT_K=plan.split_k(site),
        LORA_BLOCK_M=plan.block_m,
        LORA_STAGES=2,
        maxnreg=roomy(_MAX_REGISTERS.get((config.num_warps, config.block_m)), registers(config.num_warps, 1)),
        **constants,
    )
    return out


# one compiled kernel for any number of rows, whatever it can be divided by
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def decode_lora_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # as in decode_gemm_kernel, down to counters_ptr
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    planes_ptr,  # [tiles, SPLIT_K + 3, HALVES * BLOCK_M, BLOCK_N] float32: the sums' parts, Δ, δ, shifts
    counters_ptr,
    scratch_ptr,  # as in expand_kernel, down to plan_ptr
    weights_ptr,
    lora_codes_ptr,
    deltas_ptr,
    records_ptr,
    plan_ptr,
    num_rows,
    N,
    K,
    stride_x,
    stride_scale_n,
    stride_scale_g,
    stride_zero_g,
    stride_out,
    stride_tile,  # from one tile's record to the next
    N0,  # columns of the site's slices, multiples of BLOCK_N; 0 where it has fewer
    N1,
    FORMAT: tl.constexpr,
    IS_BF16: tl.constexpr,
    BY_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    HEADER_AT: tl.constexpr,  # where the site's counts stand in the plan's buffer
    PERM_AT: tl.constexpr,
    LORA_PARTS: tl.constexpr,
    LORA_SPLIT_K: tl.constexpr,  # shrink's
    LORA_BLOCK_M: tl.constexpr,  # rows of the plan's tiles
    LORA_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in float32: for the interpreter, which can't compute in bf16
):
    PARTS: tl.constexpr = SPLIT_K + LORA_PARTS
    PLANE: tl.constexpr = HALVES * BLOCK_M * BLOCK_N
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    planes = planes_ptr + tile.to(tl.int64) * ((SPLIT_K + 3) * PLANE)
    num_row_tiles = tl.load(plan_ptr + HEADER_AT + 2)
    tiles_at = tl.multiple_of(tl.load(plan_ptr + HEADER_AT + 3), 16)
    in1 = (tile * BLOCK_N >= N0).to(tl.int32)
    in2 = (tile * BLOCK_N >= N0 + N1).to(tl.int32)
    slice_ = in1 + in2
    first_column = tl.multiple_of(tile * BLOCK_N - in1 * N0 - in2 * N1, 16)
    if part < SPLIT_K:
        acc, acc2 = part_of_sums(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, tile, part, num_rows, N, K, stride_x, stride_scale_n,
            stride_scale_g, stride_zero_g, FORMAT, IS_BF16, BY_GROUP, GROUP, GROUPS, SPLIT_K, BLOCK_M, HALVES, BLOCK_N,
            HAS_ZEROS, True, EVEN_K, NUM_STAGES, WIDEN,
        )  # fmt: skip
        store_part(planes, part, acc, acc2, num_rows, BLOCK_M, HALVES, BLOCK_N)
    else:
        expand_tiles(
            planes + SPLIT_K * PLANE, scratch_ptr, weights_ptr, lora_codes_ptr, deltas_ptr, records_ptr,
            plan_ptr + tiles_at, plan_ptr + PERM_AT, part - SPLIT_K, num_row_tiles, slice_, first_column, stride_tile,
            LORA_PARTS, LORA_SPLIT_K, LORA_BLOCK_M, BLOCK_N, PLANE, LORA_STAGES, WIDEN,
        )  # fmt: skip
    if arrive(counters_ptr + tile, PARTS):
        with_lora, states = rows_with_lora(plan_ptr + tiles_at, plan_ptr + PERM_AT, num_row_tiles, slice_)
        offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        for half in tl.static_range(HALVES):
            rows = tl.arange(0, BLOCK_M) + half * BLOCK_M
            # 0: the base's; 1: has an adapter; 2: which has a δ or a shift
            state = tl.max(tl.where(rows[:, None] == with_lora[None, :], states[None, :], 0), axis=1)
            y = sum_of_parts(planes, half, num_rows, SPLIT_K, BLOCK_M, HALVES, BLOCK_N)
            if FORMAT != "plain" and not BY_GROUP:
                y = scaled(y, scales_ptr, stride_scale_n, offs_n, N)
            delta_ptrs = planes + SPLIT_K * PLANE + rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            has_lora, has_ending = (state > 0)[:, None], (state > 1)[:, None]
            # not even a zero is added to the base's rows
            y = tl.where(has_lora, y + tl.load(delta_ptrs, mask=has_lora, other=0.0, cache_modifier=".cg"), y)
            delta = tl.load(delta_ptrs + PLANE, mask=has_ending, other=0.0, cache_modifier=".cg")
            y = tl.where(has_ending, y + delta * y, y)
            if HAS_BIAS:
                y = y + tl.load(bias_ptr + offs_n).to(tl.float32)[None, :]
            shift = tl.load(delta_ptrs + 2 * PLANE, mask=has_ending, other=0.0, cache_modifier=".cg")
            y = tl.where(has_ending, y + shift, y)
            out = out_ptr + rows[:, None].to(tl.int64) * stride_out + offs_n[None, :]
            tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def expand_tiles(  # type: ignore[no-untyped-def]
    plane,  # Δ's; δ's and the shifts' follow
    scratch_ptr,
    weights_ptr,
    lora_codes_ptr,
    deltas_ptr,
    records_ptr,
    tiles_ptr,  # the site's first row tile
    perm_ptr,
    lora_part,
    num_row_tiles,
    slice_,
    first_column,  # of the slice
    stride_tile,
    LORA_PARTS: tl.constexpr,
    LORA_SPLIT_K: tl.constexpr,
    LORA_BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLANE: tl.constexpr,
    LORA_STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Leave Δ, and where there is a δ or a shift both, of every so many-th row tile's rows in the
    rows' places of their planes.
    """
    offs_m = tl.arange(0, LORA_BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    for row_tile in range(lora_part, num_row_tiles, LORA_PARTS):
        tile_ptr = tiles_ptr + row_tile * 16
        row0 = tl.load(tile_ptr)
        num_rows = tl.load(tile_ptr + 1)
        kind = tl.load(tile_ptr + 2)
        first_item = tl.load(tile_ptr + 4 + slice_ * 4)
        num_items = tl.load(tile_ptr + 5 + slice_ * 4)
        first_tile = tl.load(tile_ptr + 6 + slice_ * 4)
        has_ending = tl.load(tile_ptr + 7 + slice_ * 4)
        is_row = offs_m < tl.where(num_items > 0, num_rows, 0)
        rows = tl.load(perm_ptr + row0 + offs_m, mask=is_row, other=0)
        h_ptr = scratch_ptr + first_item.to(tl.int64) * (LORA_SPLIT_K * LORA_BLOCK_M * 16)
        record_ptr = records_ptr + first_tile.to(tl.int64) * stride_tile
        acc = tl.full((LORA_BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
        # slices are so wide that every column is stored
        if kind == 0:
            acc = add_products(
                acc, h_ptr, weights_ptr, record_ptr, stride_tile, num_items, first_column, is_row, offs_n >= 0,
                weights_ptr.dtype.element_ty, LORA_SPLIT_K, LORA_BLOCK_M, BLOCK_N, LORA_STAGES, WIDEN,
            )  # fmt: skip
        else:
            acc = add_products(
                acc, h_ptr, lora_codes_ptr, record_ptr, stride_tile, num_items, first_column, is_row, offs_n >= 0,
                weights_ptr.dtype.element_ty, LORA_SPLIT_K, LORA_BLOCK_M, BLOCK_N, LORA_STAGES, WIDEN,
            )  # fmt: skip
        out = plane + rows[:, None] * BLOCK_N + offs_n[None, :]
        tl.store(out, acc, mask=is_row[:, None])
        if has_ending != 0:
            delta = tl.full((BLOCK_N,), 0.0, dtype=tl.float32)
            shift = tl.full((BLOCK_N,), 0.0, dtype=tl.float32)
            # at another layer, if not at this
            if tl.load(record_ptr + HAS_DELTA) != 0:
                start = tl.load(record_ptr + DELTA_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column
                delta = tl.load(deltas_ptr + tl.multiple_of(start, 8) + offs_n)
            if tl.load(record_ptr + HAS_SHIFT) != 0:
                start = tl.load(record_ptr + SHIFT_UNIT).to(tl.int64) * (UNIT_BITS // 32) + first_column
                shift = tl.load(deltas_ptr + tl.multiple_of(start, 8) + offs_n)
            tl.store(out + PLANE, tl.broadcast_to(delta[None, :], (LORA_BLOCK_M, BLOCK_N)), mask=is_row[:, None])
            tl.store(out + 2 * PLANE, tl.broadcast_to(shift[None, :], (LORA_BLOCK_M, BLOCK_N)), mask=is_row[:, None])


@triton.jit
def rows_with_lora(tiles_ptr, perm_ptr, num_row_tiles, slice_):  # type: ignore[no-untyped-def]
    """For up to 64 places of the permutation: the row, and 1 if its adapter has the slice's module,
    2 if with a δ or a shift; -1 and 0 where there is none.
    """
    offs = tl.arange(0, 64)
    is_tile = offs < num_row_tiles
    tile_ptrs = tiles_ptr + offs * 16
    row0 = tl.load(tile_ptrs, mask=is_tile, other=1 << 30)
    num_rows = tl.load(tile_ptrs + 1, mask=is_tile, other=0)
    num_items = tl.load(tile_ptrs + 5 + slice_ * 4, mask=is_tile, other=0)
    has_ending = tl.load(tile_ptrs + 7 + slice_ * 4, mask=is_tile, other=0)
    state_of_tile = tl.where(num_items > 0, tl.where(has_ending != 0, 2, 1), 0)
    # a site's row tiles stand in the order of the permutation, and no step that comes here has more
    # than 64 rows
    places = tl.min(row0, axis=0) + offs
    is_in = (places[:, None] >= row0[None, :]) & (places[:, None] - row0[None, :] < num_rows[None, :])
    states = tl.max(tl.where(is_in, state_of_tile[None, :], 0), axis=1)
    rows = tl.load(perm_ptr + places, mask=states > 0, other=-1)
    return rows, states
