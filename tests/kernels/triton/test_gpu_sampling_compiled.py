"""What the compiler makes of the sampling kernels, for two generations of GPUs.

No GPU is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from loraserve_kernels.gpu.sampling import draw as draw_kernels
from loraserve_kernels.gpu.sampling import kernels as sampling_kernels
from loraserve_kernels.gpu.sampling import masks, sampling_rows
from loraserve_kernels.gpu.sampling import sampling as gpu_sampling

from .ahead_of_time import CAPABILITIES, Machine, compile_for

pytestmark = pytest.mark.usefixtures("compiler_cache")

VOCAB_SIZE = 128_256
KERNELS = {
    "scan": sampling_kernels.scan_kernel,
    "pick": sampling_kernels.pick_kernel,
    "weigh": sampling_kernels.weigh_kernel,
    "draw": draw_kernels.draw_kernel,
    "search": draw_kernels.search_kernel,
    "mask": masks.mask_kernel,
}
DTYPES = {
    "seed_ptr": "i64",
    "position_ptr": "i64",
    "top_k_ptr": "i32",
    "top_p_ptr": "fp64",
    "depth_ptr": "fp64",
    "chunk_tokens_ptr": "i32",
    "chunk_finite_ptr": "i32",
    "ways_ptr": "i32",
    "counts_ptr": "i32",
    "candidate_ids_ptr": "i32",
    "masses_ptr": "i64",
    "tokens_ptr": "i64",
    "finite_ptr": "i1",
    "words_ptr": "i32",
    "is_masked_ptr": "i32",
}


def compile_kernel(name: str, capability: int, folder: Path, *, has_draws: bool = True) -> Machine:
    """As `sample` launches it for a vocabulary of 128256."""
    kernel, group = KERNELS[name], sampling_rows.group_size(VOCAB_SIZE)
    num_chunks, num_groups = -(-VOCAB_SIZE // sampling_rows.CHUNK), -(-VOCAB_SIZE // group)
    constants: dict[str, Any] = {
        "HAS_DRAWS": has_draws,
        "CHUNK": sampling_rows.CHUNK,
        "GROUP": group,
        "MAX_CANDIDATES": sampling_rows.MAX_CANDIDATES,
        "BLOCK": gpu_sampling.BLOCK,
        "BLOCK_CHUNKS": triton.next_power_of_2(num_chunks),
        "BLOCK_GROUPS": triton.next_power_of_2(num_groups),
    }
    names = kernel.arg_names
    signature = {n: f"*{DTYPES.get(n, 'fp32')}" if n.endswith("_ptr") else "i32" for n in names if n not in constants}
    return compile_for(
        capability,
        kernel,
        signature,
        {n: value for n, value in constants.items() if n in names},
        folder,
        num_warps=gpu_sampling.NUM_WARPS,
        has_fp_fusion=False,
        # the words of a row and whether it has a mask lie side by side
        uneven=("num_chunks", "num_groups", "num_wanted", "stride_words", "words_ptr", "is_masked_ptr"),
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_reads_wide_without_spilling(kernel: str, capability: int, tmp_path: Path) -> None:
    machine = compile_kernel(kernel, capability, tmp_path)
    assert machine.is_lean
    # all but `pick` read logits or candidates, which `search` copies ahead
    assert kernel == "pick" or machine.count(r"(LDG\.E|LDGSTS\.E)(\.\w+)*\.128") >= 1, machine.opcodes
