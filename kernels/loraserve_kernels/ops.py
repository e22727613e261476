"""The entries that model code calls.

Each checks its tensors and picks the kernel for their device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraserve_kernels.common.plan import LoraPlan
from loraserve_kernels.common.sites import CALLED_SITES, EXPERT_INDEX, EXPERT_SITES, MODULE_INDEX
from loraserve_kernels.cpu.attention import paged as cpu_attention
from loraserve_kernels.cpu.compilation import catalog, helper
from loraserve_kernels.cpu.compilation.kernel_cache import kernel_cache
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.lora import apply as cpu_lora
from loraserve_kernels.cpu.lora import experts as cpu_experts
from loraserve_kernels.cpu.program import program
from loraserve_kernels.cpu.sampling import drawing, likeliest
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.lora.plan import GpuLoraPlan


def apply_lora(
    x: Tensor, y: Tensor, plan: LoraPlan | GpuLoraPlan, site: str, layer: int, bias: Tensor | None = None
) -> None:
    """Turn `y` from ``W x + bias`` into what the row's adapter makes of it, in place.

    `modules.LoraModule` defines what that is. It is done for every row that has an adapter and
    every slice of the site; other rows stay as they are. The order is: columns whose rows of W the
    adapter has replaced are recomputed, ``B diag(scaling) A x`` is added, what is there apart from
    the bias is multiplied by 1 + δ, and the bias delta is added.

    Args:
        x: [num_tokens, in_features] float32, or bfloat16 or float16 on a GPU, contiguous in the
            last dim.
        y: [num_tokens, sum of the site's out_features], x's dtype, contiguous in the last dim;
            slices in the order of ``SITES[site]``. On a GPU it may be float32 whatever x is.
        plan: the step's: a `GpuLoraPlan` for tensors on a GPU, a `LoraPlan` for others. On a CPU
            the rows of ``lm_head`` have a plan of their own.
        site: ``qkv``, ``o``, ``gate_up``, ``down`` or ``lm_head``, or on a CPU one linear of a
            layer (``q_proj``). (For the embedding there is `apply_embedding_lora`.)
        layer: which decoder layer; 0 for ``lm_head``.
        bias: [sum of the site's out_features] float32, contiguous (on a GPU any float dtype): what
            y already holds of the linears' biases. δ and replaced rows need it.

    Raises:
        TensorMismatch: x, y and the plan disagree on rows or devices, or x and y on the adapters'
            widths.
    """
    if not _may_meet(x, plan):
        raise TensorMismatch(
            f"x is on {x.device} and the plan is a {type(plan).__name__}; GPUs take a GpuLoraPlan, CPUs a LoraPlan"
        )
    if isinstance(plan, GpuLoraPlan):
        # Triton is loaded by the first step on a GPU alone
        from loraserve_kernels.gpu.lora import apply as gpu_lora

        gpu_lora.apply_lora(x, y, plan, site, layer, bias)
        return
    if site == "embed":
        raise TensorMismatch("the embedding takes token ids, not rows of numbers: call apply_embedding_lora")
    adapter, first = plan.segments[0].adapter, MODULE_INDEX[CALLED_SITES[site][0]]
    in_features = adapter.in_features[first]
    out_features = sum(adapter.out_features[first : first + len(CALLED_SITES[site])])
    if x.shape != (plan.num_tokens, in_features) or y.shape != (plan.num_tokens, out_features):
        raise TensorMismatch(
            f"x is {tuple(x.shape)} and y is {tuple(y.shape)}; site {site} of this plan takes "
            f"({plan.num_tokens}, {in_features}) and ({plan.num_tokens}, {out_features})"
        )
    if x.dtype != torch.float32 or y.dtype != torch.float32 or x.stride(1) != 1 or y.stride(1) != 1:
        raise TensorMismatch(f"x is {x.dtype} and y is {y.dtype}; both must be float32 and contiguous in the last dim")
    if not 0 <= layer < adapter.num_layers:
        raise TensorMismatch(f"layer {layer}; the adapters of this plan have layers 0 to {adapter.num_layers - 1}")
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != torch.float32 or bias.stride(0) != 1):
        raise TensorMismatch(f"bias is {bias.dtype} {tuple(bias.shape)}; site {site} takes float32 ({out_features},)")
    cpu_lora.apply_lora(x, y, plan, site, layer, bias)


def apply_embedding_lora(token_ids: Tensor, y: Tensor, plan: LoraPlan | GpuLoraPlan) -> None:
    """Add ``B diag(scaling) (column token_id of A)`` to `y` in place.

    It is done for every row whose adapter has the module ``embed_tokens``; other rows stay as they
    are. Where the adapter has a row of its own for the token, that takes the base's place before;
    where it has a δ, the row is multiplied by 1 + δ after.

    Args:
        token_ids: [num_tokens] int64, every one in the vocabulary.
        y: [num_tokens, hidden_size] float32, contiguous in the last dim: the rows of the base's
            embedding.
        plan: the step's: a `GpuLoraPlan` for tensors on a GPU, a `LoraPlan` for others.

    Raises:
        TensorMismatch: the token ids, y and the plan disagree on rows or devices, or y and the
            adapters on the width.
    """
    if not _may_meet(y, plan):
        raise TensorMismatch(
            f"y is on {y.device} and the plan is a {type(plan).__name__}; GPUs take a GpuLoraPlan, CPUs a LoraPlan"
        )
    if isinstance(plan, GpuLoraPlan):
        from loraserve_kernels.gpu.lora import apply as gpu_lora

        gpu_lora.apply_embedding_lora(token_ids, y, plan)
        return
    hidden_size = plan.segments[0].adapter.out_features[MODULE_INDEX["embed_tokens"]]
    if token_ids.shape != (plan.num_tokens,) or y.shape != (plan.num_tokens, hidden_size):
        raise TensorMismatch(
            f"token_ids is {tuple(token_ids.shape)} and y is {tuple(y.shape)}; the embedding of this plan takes "
            f"({plan.num_tokens},) and ({plan.num_tokens}, {hidden_size})"
        )
    if token_ids.dtype != torch.int64 or y.dtype != torch.float32 or y.stride(1) != 1:
        raise TensorMismatch(
            f"token_ids is {token_ids.dtype} and y is {y.dtype}; they must be int64 and float32, "
            "y contiguous in the last dim"
        )
    cpu_lora.apply_embedding_lora(token_ids, y, plan)


def apply_expert_lora(x: Tensor, y: Tensor, segments: Sequence[cpu_experts.ExpertSegment], site: str) -> None:
    """Turn `y` from ``W x`` of an expert into what each row's adapter makes of it, in place.

    As `apply_lora`, on CPUs alone; rows in no segment stay as they are.

    Args:
        x: [num_rows, in_features] float32, contiguous in the last dim: the expert's rows.
        y: [num_rows, sum of the site's out_features] float32, contiguous in the last dim.
        segments: the rows' of `LayerExperts.segments`, in their order.
        site: one of `EXPERT_SITES`.

    Raises:
        TensorMismatch: x, y and the segments disagree on rows or widths.
    """
    if not segments:
        return
    index, experts = [EXPERT_INDEX[module] for module in EXPERT_SITES[site]], segments[0].experts
    in_features, out_features = experts.in_features[index[0]], sum(experts.out_features[i] for i in index)
    if x.shape[1:] != (in_features,) or y.shape != (x.shape[0], out_features) or segments[-1].row_end > x.shape[0]:
        raise TensorMismatch(
            f"x is {tuple(x.shape)} and y is {tuple(y.shape)}; site {site} of these segments takes "
            f"({segments[-1].row_end} or more, {in_features}) and as many rows of {out_features}"
        )
    if x.dtype != torch.float32 or y.dtype != torch.float32 or x.stride(1) != 1 or y.stride(1) != 1:
        raise TensorMismatch(f"x is {x.dtype} and y is {y.dtype}; both must be float32 and contiguous in the last dim")
    cpu_experts.apply_expert_lora(x, y, segments, site)


def _may_meet(rows: Tensor, plan: LoraPlan | GpuLoraPlan) -> bool:
    """Check whether the plan is of the rows' kind of device.

    In Triton's interpreter a GPU's plan is on the CPU.
    """
    if isinstance(plan, GpuLoraPlan):
        return rows.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return not rows.is_cuda


def warm_up(adapter_dtype: torch.dtype) -> None:
    """Compile all kernels of steps with adapters of this dtype, or read them from the cache.

    For programs that compute without an engine, which calls `compile_kernels` instead.
    """
    compile_kernels([adapter_dtype])


def can_compile_apart() -> bool:
    """Check whether processes share compiled kernels here: there is a folder for them."""
    return cpu_lora.HAS_NUMBA and kernel_cache() is not None


def start_compiling(adapter_dtypes: Sequence[torch.dtype], later_dtypes: Sequence[torch.dtype] = ()) -> None:
    """Have a process beside this one compile kernels of the CPU that the cache lacks.

    `compile_kernels` then finds about half of them there.

    Args:
        adapter_dtypes: dtypes of adapters that steps need from the start.
        later_dtypes: others, for whose kernels `prepare_adapters` waits.
    """
    if cpu_lora.HAS_NUMBA:
        helper.start_helper(_names(adapter_dtypes), list(map(_adapter_kernel, later_dtypes)))


def compile_kernels(
    adapter_dtypes: Sequence[torch.dtype],
    on_begin: Callable[[int], object] = lambda num_kernels: None,
    on_compiled: Callable[[int], object] = lambda num_done: None,
    on_wait: Callable[[], object] = lambda: None,
) -> None:
    """Compile the CPU's kernels, so that no step waits for a compiler; no-op without numba.

    Args:
        adapter_dtypes: dtypes of adapters that can be computed when this returns.
        on_begin: called with the number of kernels.
        on_compiled: called with how many are there, after each.
        on_wait: called about every 50 ms while another process compiles the last ones.
    """
    if not cpu_lora.HAS_NUMBA:
        return
    from loraserve_kernels.cpu.compilation.compiler import compile_all

    names = _names(adapter_dtypes)
    on_begin(len(names))
    # a process that `start_compiling` started begins at the other end
    compile_all(reversed(names), on_compiled, on_wait)
    _bind_kernels()


def prepare_adapters(dtype: torch.dtype) -> None:
    """Have the kernel of adapters in this dtype ready; it may take seconds, once on a machine.

    A process beside this one compiles it, so that steps continue. No-op without numba.
    """
    if can_compile_apart():
        helper.compile_apart(_adapter_kernel(dtype))
    cpu_lora.warm_up(dtype)


def _names(adapter_dtypes: Sequence[torch.dtype]) -> list[str]:
    return [*catalog.STEP_KERNELS, *map(_adapter_kernel, adapter_dtypes)]


def _adapter_kernel(dtype: torch.dtype) -> str:
    return catalog.LORA_KERNELS[str(dtype).removeprefix("torch.")]


def _bind_kernels() -> None:
    """Have the addresses of compiled kernels at hand where steps call them."""
    cpu_attention.warm_up()
    gemm.warm_up()
    program.warm_up()
    likeliest.warm_up()
    drawing.warm_up()
