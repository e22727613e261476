"""What the compiler makes of the row kernels, for two generations of GPUs. No GPU is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from campaigns import default_and_campaign

pytest.importorskip("triton")


from loraserve_kernels.gpu.rows import kernels as rows_kernels
from loraserve_kernels.gpu.rows import rows as gpu_rows

from . import ahead_of_time
from .ahead_of_time import Machine, compile_for

pytestmark = pytest.mark.usefixtures("compiler_cache")

CAPABILITIES = pytest.mark.parametrize("capability", ahead_of_time.CAPABILITIES)
X = "bf16"


def compile_norm(
    capability: int, size: int, folder: Path, *, has_delta: bool = True, has_delta_norm: bool = False
) -> Machine:
    block, num_warps = gpu_rows.norm_config(size)
    signature = {"hidden_ptr": "*fp32", "delta_ptr": f"*{X}", "weight_ptr": "*fp32", "out_ptr": f"*{X}"}
    signature["delta_weight_ptr"] = "*fp32"
    signature |= dict.fromkeys(["stride_hidden", "stride_delta", "stride_out", "size"], "i32")
    signature |= {"eps": "fp32", "delta_scale": "fp32"}
    constants: dict[str, Any] = {
        "HAS_DELTA": has_delta,
        "HAS_DELTA_NORM": has_delta_norm,
        "HAS_NORM": True,
        "BLOCK": block,
    }
    return compile_for(capability, rows_kernels.add_rms_norm_kernel, signature, constants, folder, num_warps=num_warps)


def compile_heads(
    capability: int, head_dim: int, num_heads: int, folder: Path, *, has_norm: bool, dtype: str = X
) -> Machine:
    block_heads, block_half = gpu_rows.heads_config(head_dim, num_heads)
    signature = {"qkv_ptr": f"*{dtype}", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "slots_ptr": "*i64"}
    signature |= {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "q_norm_ptr": "*fp32", "k_norm_ptr": "*fp32"}
    sizes = ["stride_qkv", "stride_block", "stride_head", "stride_slot", "max_len", "num_slots"]
    signature |= dict.fromkeys([*sizes, "num_heads", "num_kv_heads"], "i32") | {"eps": "fp32"}
    constants: dict[str, Any] = {"HAS_NORM": has_norm, "ROTATES": True, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16}
    constants |= {"IS_NORM_LAST": False, "ROTATED": head_dim, "IS_INTERLEAVED": False}
    constants |= {"BLOCK_HEADS": block_heads, "BLOCK_HALF": block_half}
    return compile_for(
        capability,
        rows_kernels.rotate_and_store_kernel,
        signature,
        constants,
        folder,
        num_warps=gpu_rows.NUM_WARPS,
        uneven=("max_len", "num_heads", "num_kv_heads"),
    )


def assert_wide(machine: Machine, *, loads: int, stores: int) -> None:
    """No spills; at least so many loads and stores of 16 bytes,
    and none of an activation that is one element.
    """
    assert machine.is_lean
    assert machine.count(r"LDG\.E(\.\w+)*\.128") >= loads, machine.opcodes
    assert machine.count(r"STG\.E(\.\w+)*\.128") >= stores, machine.opcodes
    assert machine.count(r"(LDG|STG)\.E(\.\w+)*\.[US](8|16)") == 0, machine.opcodes


@CAPABILITIES
def test_embedding_reads_and_writes_wide(capability: int, tmp_path: Path) -> None:
    signature = {"ids_ptr": "*i64", "table_ptr": f"*{X}", "out_ptr": "*fp32"}
    signature |= dict.fromkeys(["stride_table", "stride_out", "vocab_size", "size"], "i32")
    machine = compile_for(
        capability,
        rows_kernels.embed_kernel,
        signature,
        {"BLOCK": gpu_rows.BLOCK},
        tmp_path,
        num_warps=gpu_rows.NUM_WARPS,
    )
    assert_wide(machine, loads=1, stores=2)


@CAPABILITIES
@pytest.mark.parametrize(
    "size", default_and_campaign([896, 4096, gpu_rows.MAX_HIDDEN_SIZE], default=[896, gpu_rows.MAX_HIDDEN_SIZE])
)
def test_norms_of_every_width_stay_in_registers(size: int, capability: int, tmp_path: Path) -> None:
    # the smallest rows leave a thread fewer than eight elements of sixteen bits
    assert_wide(compile_norm(capability, size, tmp_path), loads=2, stores=1)


def test_norm_of_sum_stays_in_registers(tmp_path: Path) -> None:
    assert_wide(compile_norm(80, gpu_rows.MAX_HIDDEN_SIZE, tmp_path, has_delta_norm=True), loads=3, stores=1)


@CAPABILITIES
def test_rows_are_normed_in_place_wide(capability: int, tmp_path: Path) -> None:
    block, num_warps = gpu_rows.norm_config(4096)
    signature = {"x_ptr": f"*{X}", "weight_ptr": "*fp32", "stride_x": "i32", "size": "i32", "eps": "fp32"}
    constants = {"BLOCK": block}
    machine = compile_for(
        capability, rows_kernels.norm_in_place_kernel, signature, constants, tmp_path, num_warps=num_warps
    )
    assert_wide(machine, loads=2, stores=1)


@CAPABILITIES
@pytest.mark.parametrize(
    ("head_dim", "num_heads"),
    default_and_campaign([(64, 24), (80, 96), (128, 48), (256, 12)], default=[(80, 96), (256, 12)]),
)
def test_heads_of_every_dim_are_moved_wide(head_dim: int, num_heads: int, capability: int, tmp_path: Path) -> None:
    machine = compile_heads(capability, head_dim, num_heads, tmp_path, has_norm=True)
    # halves of the queries, of the keys and of the values
    assert_wide(machine, loads=2, stores=6)


@CAPABILITIES
def test_swiglu_reads_and_writes_wide(capability: int, tmp_path: Path) -> None:
    signature = {"gate_up_ptr": f"*{X}", "out_ptr": f"*{X}", "stride_gate_up": "i32", "stride_out": "i32"}
    machine = compile_for(
        capability,
        rows_kernels.swiglu_kernel,
        signature | {"size": "i32"},
        {"GELU": True, "BLOCK": gpu_rows.BLOCK},
        tmp_path,
        num_warps=gpu_rows.NUM_WARPS,
    )
    assert_wide(machine, loads=2, stores=1)


def test_heads_without_norms_move_as_wide_as_rest(tmp_path: Path) -> None:
    assert_wide(compile_heads(90, 128, 48, tmp_path, has_norm=False, dtype="fp16"), loads=2, stores=6)
    assert_wide(compile_norm(90, 4096, tmp_path, has_delta=False), loads=2, stores=1)
