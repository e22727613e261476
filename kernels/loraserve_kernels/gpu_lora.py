"""LoRA on a GPU: shrink, then expand, for one site of one layer. Needs Triton; nothing that runs on a CPU imports this module.

With ``TRITON_INTERPRET=1`` in the environment before Triton's first import, the same entry runs the kernels on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.expand import expand_kernel
from loraserve_kernels.gpu_device import INTERPRETED, num_programs
from loraserve_kernels.gpu_plan import BLOCK_K, HEADER, SITE_INDEX, GpuLoraPlan, split_k
from loraserve_kernels.layout import MODULE_INDEX, SITES
from loraserve_kernels.paged_layout import row_stride
from loraserve_kernels.shrink import shrink_kernel


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How one kernel is cut for one height of row tiles. Chosen by reasoning about bytes in flight and by reading compiled code; not measured."""

    block: int
    num_warps: int
    num_stages: int


SHRINK_CONFIGS: dict[int, KernelConfig] = {16: KernelConfig(BLOCK_K, 4, 4), 32: KernelConfig(BLOCK_K, 4, 3)}
EXPAND_CONFIGS: dict[int, KernelConfig] = {16: KernelConfig(256, 4, 2), 32: KernelConfig(128, 4, 2)}
"""By block_m. A block is columns of x (shrink) or of y (expand)."""


def apply_lora(x: Tensor, y: Tensor, plan: GpuLoraPlan, site: str, layer: int) -> None:
    """Add ``scaling · B A x`` to `y` in place, for every row that has an adapter and every slice of the site; leave other rows as they are.

    Two launches, no synchronisation, no allocation: may be captured in a CUDA graph and replayed after any later ``plan.fill``.

    Args:
        x: [at least num_tokens, in_features] bfloat16 or float16, contiguous in the last dim.
        y: [as many rows, sum of the site's out_features], x's dtype, contiguous in the last dim; slices in the order of ``SITES[site]``.
        plan: the step's.
        site: ``qkv``, ``o``, ``gate_up`` or ``down``.
        layer: which decoder layer.

    Raises:
        ShapeMismatch: x, y and the plan disagree on rows, widths, dtypes or devices.
    """
    plan.check_layer(site, layer)
    pool, first = plan.pool, MODULE_INDEX[SITES[site][0]]
    in_features = pool.module_shapes[first][1]
    widths = [pool.module_shapes[first + s][0] if s < len(SITES[site]) else 0 for s in range(3)]
    num_rows = x.shape[0]
    if num_rows < plan.num_tokens or x.shape != (num_rows, in_features) or y.shape != (num_rows, sum(widths)):
        raise ShapeMismatch(
            f"x is {tuple(x.shape)} and y is {tuple(y.shape)}; site {site} of this plan takes at least "
            f"{plan.num_tokens} rows of {in_features} and {sum(widths)}"
        )
    dtypes = (torch.bfloat16, torch.float16) if pool.data.dtype == torch.int8 else (pool.data.dtype,)
    if x.dtype != y.dtype or x.dtype not in dtypes or x.stride(1) != 1 or y.stride(1) != 1:
        raise ShapeMismatch(
            f"x is {x.dtype} and y is {y.dtype}; with a pool of {pool.data.dtype} both must be one of {dtypes} and contiguous in the last dim"
        )
    if x.device != pool.data.device or y.device != pool.data.device:
        raise ShapeMismatch(f"x is on {x.device}, y on {y.device}, the adapters on {pool.data.device}")
    grid = (num_programs(x.device),)
    split, header_at = split_k(in_features), 4 * SITE_INDEX[site]
    config = SHRINK_CONFIGS[plan.block_m]
    shrink_kernel[grid](
        x,
        pool.data,
        pool.a_units[layer],
        pool.multipliers[layer],
        plan.buffer,
        plan.scratch,
        in_features,
        x.stride(0),
        row_stride(in_features),
        HEADER_AT=header_at,
        PERM_AT=HEADER,
        SPLIT_K=split,
        BLOCK_M=plan.block_m,
        BLOCK_K=config.block,
        EVEN_K=in_features % config.block == 0,
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    config = EXPAND_CONFIGS[plan.block_m]
    expand_kernel[grid](
        plan.scratch,
        pool.data,
        pool.b_units[layer],
        pool.multipliers[layer],
        plan.buffer,
        y,
        y.stride(0),
        *widths,
        HEADER_AT=header_at,
        PERM_AT=HEADER,
        SPLIT_K=split,
        BLOCK_M=plan.block_m,
        BLOCK_N=config.block,
        EVEN_N=all(width % 16 == 0 for width in widths),
        NUM_STAGES=config.num_stages,
        WIDEN=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
