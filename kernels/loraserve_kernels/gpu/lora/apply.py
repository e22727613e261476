"""LoRA on a GPU for one site of one layer: shrink, then expand.

Where adapters may replace rows of the base's weight, those come before them. Needs Triton; nothing
that runs on a CPU imports this module.

With ``TRITON_INTERPRET=1`` in the environment before Triton's first import, the same entry runs the
kernels on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.common.modules import MODULE_INDEX, SITES
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.device import INTERPRETED, MAX_REGISTERS, num_programs, registers, roomy
from loraserve_kernels.gpu.lora.expand import expand_kernel
from loraserve_kernels.gpu.lora.plan import BLOCK_K, HEADER, REPLACED_AT, SITE_INDEX, GpuLoraPlan
from loraserve_kernels.gpu.lora.replace import replace_embedding_kernel, replace_kernel
from loraserve_kernels.gpu.lora.shrink import look_up_kernel, shrink_kernel
from loraserve_kernels.gpu.paged.layout import REPLACED_SITES
from loraserve_kernels.gpu.tuning import tuned


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Tile sizes of a kernel for a height of row tiles.

    Chosen by reasoning about bytes in flight and by reading compiled code; not measured.
    """

    block: int
    num_warps: int
    num_stages: int


SHRINK_CONFIGS: dict[int, KernelConfig] = {16: KernelConfig(BLOCK_K, 4, 4), 32: KernelConfig(BLOCK_K, 4, 3)}
EXPAND_CONFIGS: dict[int, KernelConfig] = {16: KernelConfig(256, 4, 2), 32: KernelConfig(128, 4, 2)}
NARROW_EXPAND_CONFIGS: dict[int, KernelConfig] = {16: KernelConfig(128, 4, 2), 32: KernelConfig(64, 4, 2)}
"""Tile sizes by block_m.

A block is columns of x (shrink) or of y (expand; narrow where y is float32 or sums have few parts:
twice as many columns would spill there).
"""

FEW_PARTS = {16: 1, 32: 4}
"""Maximum of parts of a sum, by block_m, with which expand has narrow tiles."""

REPLACE_EMBEDDING_CONFIG = KernelConfig(128, 4, 2)
REPLACE_CHUNK = 1024
"""Columns that one search for a row's token serves."""


def shrink_config(block_m: int, in_features: int) -> KernelConfig:
    """Choose shrink's tile sizes for rows of a tile and the width of x."""
    return tuned("shrink", f"{in_features}/{block_m}", SHRINK_CONFIGS[block_m])


def expand_config(block_m: int, split: int, y_dtype: torch.dtype, widths: Sequence[int] = ()) -> KernelConfig:
    """Choose expand's tile sizes for rows of a tile, parts of a sum, the dtype and slices of y."""
    is_narrow = y_dtype == torch.float32 or split <= FEW_PARTS[block_m]
    config = (NARROW_EXPAND_CONFIGS if is_narrow else EXPAND_CONFIGS)[block_m]
    name = "fp32" if y_dtype == torch.float32 else "16"
    return tuned("expand", f"{'+'.join(str(width) for width in widths if width)}/{name}/{block_m}", config)


def apply_lora(x: Tensor, y: Tensor, plan: GpuLoraPlan, site: str, layer: int, bias: Tensor | None = None) -> None:
    """Turn `y` from ``W x + bias`` into what each row's adapter makes of it, in place.

    That is ``(1 + δ) (W' x + B diag(scaling) A x) + bias + shift``, for every row that has an
    adapter and every slice of the site that the adapter has; other rows stay as they are.
    (`modules.LoraModule` has the terms.)

    Two launches, three at ``lm_head``, no synchronisation, no allocation: may be captured in a CUDA
    graph and replayed after any later ``plan.fill``.

    Args:
        x: [at least num_tokens, in_features] of the pool's dtype, contiguous in the last dim. At
            ``lm_head``, the sampled rows: at least num_sampled.
        y: [as many rows, sum of the site's out_features], x's dtype or float32, contiguous in the
            last dim; slices in the order of ``SITES[site]``.
        plan: the step's.
        site: ``qkv``, ``o``, ``gate_up``, ``down`` or ``lm_head``.
        layer: which decoder layer; 0 for ``lm_head``.
        bias: [sum of the site's out_features], contiguous: what y already holds of the linears'
            biases. Only δ and replaced rows need it.

    Raises:
        TensorMismatch: x, y, the bias and the plan disagree on rows, widths, dtypes or devices.
    """
    plan.check_layer(site, layer)
    if site == "embed":
        raise TensorMismatch("the embedding takes token ids, not rows of numbers: call apply_embedding_lora")
    _check_output(y, x, plan, site, bias)
    _check_input(x, plan, site)
    if site in REPLACED_SITES:
        _replace(x, y, plan, site, bias)
    _shrink(x, plan, site, layer)
    _expand(y, plan, site, layer, bias)


def shrink(x: Tensor, plan: GpuLoraPlan, site: str, layer: int) -> None:
    """Leave the sums of each row's x with its adapter's A in the plan's scratch memory.

    An expand uses them. x is as `apply_lora` takes it.

    Raises:
        TensorMismatch: x and the plan disagree on rows, widths or dtypes.
    """
    _check_input(x, plan, site)
    _shrink(x, plan, site, layer)


def _check_input(x: Tensor, plan: GpuLoraPlan, site: str) -> None:
    pool, in_features = plan.pool, _in_features(plan, site)
    num_rows = plan.num_sampled if site == "lm_head" else plan.num_tokens
    if x.shape[0] < num_rows or x.shape[1:] != (in_features,) or x.dtype != pool.dtype or x.stride(1) != 1:
        raise TensorMismatch(
            f"x is {x.dtype} {tuple(x.shape)}; site {site} of this plan takes at least {num_rows} rows of "
            f"{in_features}, "
            f"{pool.dtype} and contiguous in the last dim"
        )


def _in_features(plan: GpuLoraPlan, site: str) -> int:
    return plan.pool.module_shapes[MODULE_INDEX[SITES[site][0]]][1]


def _shrink(x: Tensor, plan: GpuLoraPlan, site: str, layer: int) -> None:
    pool, in_features = plan.pool, _in_features(plan, site)
    split, config = plan.split_k(site), shrink_config(plan.block_m, in_features)
    shrink_kernel[(num_programs(x.device),)](
        x,
        pool.weights,
        pool.codes,
        pool.records[0, layer],
        plan.buffer,
        plan.scratch,
        in_features,
        x.stride(0),
        pool.records.stride(0),
        HEADER_AT=4 * SITE_INDEX[site],
        PERM_AT=HEADER,
        SPLIT_K=split,
        BLOCK_M=plan.block_m,
        BLOCK_K=config.block,
        EVEN_K=in_features % config.block == 0,
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # left alone, Triton 3.9 aims at seven programs of small tiles, and spills for it
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )


def apply_embedding_lora(token_ids: Tensor, y: Tensor, plan: GpuLoraPlan) -> None:
    """Turn `y` into what each row's adapter makes of the embedding, in place.

    That is ``(1 + δ) (row token_id of the table + B diag(scaling) (column token_id of
    A))``, for every row whose adapter has the module ``embed_tokens``; other rows stay as they are.
    The table's rows are the base's, which `y` holds, but for those that the adapter replaces.

    Three launches, as `apply_lora` does.

    Args:
        token_ids: [at least num_tokens] int64 or int32, contiguous; those of rows with an adapter
            are in the vocabulary.
        y: [as many rows, hidden_size] float32 or the pool's dtype, contiguous in the last dim: the
            rows of the base's embedding.
        plan: the step's.

    Raises:
        TensorMismatch: the token ids, y and the plan disagree on rows, widths, dtypes or devices.
    """
    pool = plan.pool
    if token_ids.dim() != 1 or token_ids.shape[0] < plan.num_tokens or token_ids.stride(0) != 1:
        raise TensorMismatch(
            f"token_ids is {tuple(token_ids.shape)}; this plan takes at least {plan.num_tokens} of them, contiguous"
        )
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TensorMismatch(f"token_ids is {token_ids.dtype}, not int64 or int32")
    _check_output(y, token_ids, plan, "embed", None)
    _replace_embeddings(token_ids, y, plan)
    look_up_kernel[(num_programs(y.device),)](
        token_ids,
        pool.weights,
        pool.codes,
        pool.records,
        plan.buffer,
        plan.scratch,
        pool.records.stride(0),
        HEADER_AT=4 * SITE_INDEX["embed"],
        PERM_AT=HEADER,
        BLOCK_M=plan.block_m,
        num_warps=4,
    )
    _expand(y, plan, "embed", 0, None)


def site_widths(plan: GpuLoraPlan, site: str) -> list[int]:
    """Columns of the site's three slices; 0 where it has fewer."""
    first, num_slices = MODULE_INDEX[SITES[site][0]], len(SITES[site])
    return [plan.pool.module_shapes[first + s][0] if s < num_slices else 0 for s in range(3)]


def _check_output(y: Tensor, x: Tensor, plan: GpuLoraPlan, site: str, bias: Tensor | None) -> None:
    pool, width = plan.pool, sum(site_widths(plan, site))
    if y.shape != (x.shape[0], width) or y.dtype not in (pool.dtype, torch.float32) or y.stride(1) != 1:
        raise TensorMismatch(
            f"y is {y.dtype} {tuple(y.shape)} beside {x.shape[0]} rows; "
            f"site {site} of this plan takes as many rows of {width}, "
            f"{pool.dtype} or float32 and contiguous in the last dim"
        )
    if bias is not None and (bias.shape != (width,) or not bias.is_floating_point() or bias.stride(0) != 1):
        raise TensorMismatch(f"bias is {bias.dtype} {tuple(bias.shape)}; site {site} takes {width} numbers, contiguous")
    devices = {t.device for t in (x, y, pool.data, *(() if bias is None else (bias,)))}
    if len(devices) > 1:
        raise TensorMismatch(f"x is on {x.device}, y on {y.device}, the adapters on {pool.data.device}")


def _expand(y: Tensor, plan: GpuLoraPlan, site: str, layer: int, bias: Tensor | None) -> None:
    pool, widths, split = plan.pool, site_widths(plan, site), plan.split_k(site)
    is_even = all(width % 16 == 0 for width in widths)
    config = expand_config(plan.block_m, split, y.dtype, widths)
    expand_kernel[(num_programs(y.device),)](
        plan.scratch,
        pool.weights,
        pool.codes,
        pool.deltas,
        pool.records[0, layer],
        plan.buffer,
        y,
        bias,
        y.stride(0),
        pool.records.stride(0),
        *widths,
        HEADER_AT=4 * SITE_INDEX[site],
        PERM_AT=HEADER,
        SPLIT_K=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=config.block,
        EVEN_N=is_even,
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # widths that no known base has take what they need
        maxnreg=roomy(MAX_REGISTERS, registers(4, 3)) if is_even else None,
        enable_fp_fusion=True,
    )


def _replace(x: Tensor, y: Tensor, plan: GpuLoraPlan, site: str, bias: Tensor | None) -> None:
    """Write each row's products with the rows that its adapter replaces, over the base's."""
    pool, in_features, config = plan.pool, _in_features(plan, site), SHRINK_CONFIGS[plan.block_m]
    replace_kernel[(num_programs(x.device),)](
        x,
        pool.weights,
        pool.codes,
        pool.records,
        plan.buffer,
        y,
        bias,
        in_features,
        x.stride(0),
        y.stride(0),
        pool.records.stride(0),
        HEADER_AT=4 * SITE_INDEX[site],
        WORKS_AT=REPLACED_AT + SITE_INDEX[site],
        PERM_AT=HEADER,
        BLOCK_M=plan.block_m,
        BLOCK_K=config.block,
        EVEN_K=in_features % config.block == 0,
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )


def _replace_embeddings(token_ids: Tensor, y: Tensor, plan: GpuLoraPlan) -> None:
    """Write the rows of tokens that the row's adapter replaces over the base's."""
    pool, config = plan.pool, REPLACE_EMBEDDING_CONFIG
    replace_embedding_kernel[(num_programs(y.device),)](
        token_ids,
        pool.weights,
        pool.codes,
        pool.records,
        plan.buffer,
        y,
        y.shape[1],
        y.stride(0),
        pool.records.stride(0),
        HEADER_AT=4 * SITE_INDEX["embed"],
        WORKS_AT=REPLACED_AT + SITE_INDEX["embed"],
        PERM_AT=HEADER,
        BLOCK_M=plan.block_m,
        BLOCK_N=config.block,
        CHUNK_N=REPLACE_CHUNK,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
