"""What the compiler makes of attention's configurations, for two generations of GPUs.

No GPU is needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from campaigns import default_and_campaign

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraserve_kernels.gpu import device as gpu_device
from loraserve_kernels.gpu.attention import paged as gpu_attention
from loraserve_kernels.gpu.attention import plan
from loraserve_kernels.gpu.attention.kernel import attend_kernel, combine_kernel

from .ahead_of_time import CAPABILITIES, dump

pytestmark = pytest.mark.usefixtures("compiler_cache")

ATTEND = {
    "q_ptr": "*{x}",
    "k_ptr": "*{x}",
    "v_ptr": "*{x}",
    "plan_ptr": "*i32",
    "partials_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "out_ptr": "*{x}",
    "scale": "fp32",
    "cap": "fp32",
    "window": "i32",
    "stride_q": "i32",
    "stride_out": "i32",
    "stride_k_block": "{stride}",
    "stride_v_block": "{stride}",
    "num_kv_heads": "i32",
}
COMBINE = {
    "plan_ptr": "*i32",
    "partials_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "out_ptr": "*{x}",
    "stride_out": "i32",
    "num_heads": "i32",
}
# a multiprocessor's registers, and the shared memory of one of the smaller generation
REGISTERS, SHARED_BYTES = 65536, 164 * 1024


def compile_kernel(
    fn: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    num_stages: int,
    max_registers: int | None = None,
    **types: str,
) -> Any:
    """As the first launch would: with pointers and strides that are multiples of 16."""
    names = fn.arg_names
    assert set(names) == set(signature) | set(constants)
    # in order: Triton's cache finds an entry by it
    wide = [name for name in signature if name.endswith("_ptr") or name.startswith("stride_")]
    source = ASTSource(
        fn,
        signature={name: signature.get(name, "constexpr").format(**types) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in wide},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_attend(
    kind: str,
    group: int,
    head_dim: int,
    capability: int,
    *,
    x: str = "bf16",
    stride: str = "i32",
    block_size: int = 16,
    has_cap: bool = False,
) -> tuple[Any, gpu_attention.AttendConfig]:
    config = (
        gpu_attention.decode_config(head_dim, group)
        if kind == "decode"
        else gpu_attention.chunk_config(head_dim, group)
    )
    constants = {
        "CHUNKS": kind == "chunks",
        "NUM_DECODE_ITEMS": plan.NUM_DECODE_ITEMS,
        "NUM_ITEMS": plan.NUM_ITEMS,
        "ITEMS_AT": plan.ITEMS_AT,
        "TABLES_AT": plan.TABLES_AT,
        "TABLE_WIDTH": plan.TABLE_WIDTH,
        "GROUP": group,
        "HEADS": min(group, config.block_m),
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_STAGES": config.num_stages,
        "HAS_CAP": has_cap,
        "WIDEN": False,
    }
    compiled = compile_kernel(
        attend_kernel,
        ATTEND,
        constants,
        capability,
        config.num_warps,
        config.num_stages,
        config.max_registers,
        x=x,
        stride=stride,
    )
    return compiled, config


def assert_lean(compiled: Any, folder: Path, num_warps: int, num_programs: int) -> set[str]:
    """No spills, and few enough resources for so many programs on a multiprocessor;
    the instructions.
    """
    usage, instructions = dump(compiled, folder)
    assert usage["STACK"] == usage["LOCAL"] == "0"
    assert int(usage["REG"]) * 32 * num_warps * num_programs <= REGISTERS
    assert (compiled.metadata.shared + 1024) * num_programs <= SHARED_BYTES
    opcodes = {opcode for opcode, _ in instructions}
    assert not {op for op in opcodes if op.split(".")[0] in ("LDL", "STL")}
    assert not any(op.startswith(("ATOM", "RED.")) for op in opcodes)
    # no number that is narrower than a word is loaded by itself
    assert not [op for op in opcodes if op.startswith("LDG.") and re.search(r"\.[US](8|16)\b", op)]
    return opcodes


def assert_fetches_keys_wide_and_ahead(opcodes: set[str]) -> None:
    copies = {op for op in opcodes if op.startswith("LDGSTS")}
    assert copies
    assert all(op.endswith(".128") for op in copies), copies
    # tensor cores take a first operand that was just computed safely in this form only
    assert any(op.startswith("HMMA") for op in opcodes)
    assert not any(op.startswith("HGMMA") for op in opcodes)


# one head_dim of each power of two that is compiled apart
CONFIGURATIONS = default_and_campaign([(7, 64), (4, 128), (8, 256)], default=[(4, 128)])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("group", "head_dim"), CONFIGURATIONS)
def test_decoding_fetches_keys_wide_and_ahead(group: int, head_dim: int, capability: int, tmp_path: Path) -> None:
    compiled, config = compile_attend("decode", group, head_dim, capability)
    num_programs = gpu_device.PROGRAMS_PER_MULTIPROCESSOR if head_dim <= 128 else 2
    assert_fetches_keys_wide_and_ahead(assert_lean(compiled, tmp_path, config.num_warps, num_programs))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("group", "head_dim"), CONFIGURATIONS)
def test_chunks_fetch_keys_wide_and_ahead(group: int, head_dim: int, capability: int, tmp_path: Path) -> None:
    compiled, config = compile_attend("chunks", group, head_dim, capability)
    num_programs = 2 if head_dim <= 128 else 1
    assert_fetches_keys_wide_and_ahead(assert_lean(compiled, tmp_path, config.num_warps, num_programs))


@pytest.mark.parametrize("kind", default_and_campaign(["decode", "chunks"], default=["chunks"]))
def test_soft_caps_cost_no_spills(kind: str, tmp_path: Path) -> None:
    compiled, config = compile_attend(kind, 2, 256, 80, has_cap=True)
    assert_fetches_keys_wide_and_ahead(assert_lean(compiled, tmp_path, config.num_warps, 2 if kind == "decode" else 1))


@pytest.mark.parametrize("kind", default_and_campaign(["decode", "chunks"], default=["decode"]))
def test_other_types_heads_and_blocks_are_as_lean(kind: str, tmp_path: Path) -> None:
    compiled, config = compile_attend(kind, 32, 80, 90, x="fp16", stride="i64", block_size=24)
    assert_fetches_keys_wide_and_ahead(assert_lean(compiled, tmp_path, config.num_warps, 2))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("head_dim", "max_splits"), default_and_campaign([(64, 64), (256, 16)], default=[(256, 16)]))
def test_splits_are_summed_without_spills(head_dim: int, max_splits: int, capability: int, tmp_path: Path) -> None:
    constants = {
        "ROWS_AT": plan.ROWS_AT,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "MAX_SPLITS": max_splits,
        "BLOCK_S": gpu_attention.COMBINE_SPLITS,
    }
    compiled = compile_kernel(combine_kernel, COMBINE, constants, capability, gpu_attention.COMBINE_WARPS, 1, x="bf16")
    opcodes = assert_lean(compiled, tmp_path, gpu_attention.COMBINE_WARPS, 12)
    assert any(op.startswith("LDG.E.128") for op in opcodes)
