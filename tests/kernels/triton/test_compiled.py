"""What the compiler makes of every shipped configuration, for two generations of GPUs.

No GPU is needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraserve_kernels.gpu import device as gpu_device
from loraserve_kernels.gpu.lora import apply as gpu_lora
from loraserve_kernels.gpu.lora.plan import HEADER, REPLACED_AT, ROWS_OF_A_TILE

from .ahead_of_time import dump

pytestmark = pytest.mark.usefixtures("compiler_cache")

ALIGNED = 16

POOL = {"weights_ptr": "*{x}", "codes_ptr": "*i8", "records_ptr": "*i32", "plan_ptr": "*i32", "scratch_ptr": "*fp32"}
SHRINK = {**POOL, "x_ptr": "*{x}", "K": "i32", "stride_x": "i32", "stride_tile": "i32"}
EXPAND = {
    **POOL,
    "deltas_ptr": "*fp32",
    "y_ptr": "*{y}",
    "bias_ptr": "*{x}",
    "stride_y": "i32",
    "stride_tile": "i32",
    "N0": "i32",
    "N1": "i32",
    "N2": "i32",
}
NO_SCRATCH = {name: kind for name, kind in POOL.items() if name != "scratch_ptr"}
REPLACE = {
    **NO_SCRATCH,
    "x_ptr": "*{x}",
    "y_ptr": "*{y}",
    "bias_ptr": "*{x}",
    **dict.fromkeys(("K", "stride_x", "stride_y", "stride_tile"), "i32"),
}
REPLACE_EMBEDDING = {
    **NO_SCRATCH,
    "token_ids_ptr": "*i64",
    "y_ptr": "*{y}",
    "N": "i32",
    "stride_y": "i32",
    "stride_tile": "i32",
}
LOOK_UP = {**POOL, "token_ids_ptr": "*i64", "stride_tile": "i32"}
# a multiprocessor's registers, and the shared memory of one of the smaller generation
REGISTERS, SHARED_BYTES, THREADS = 65536, 164 * 1024, 128


def compile_kernel(
    kernel: str,
    x: str,
    capability: int,
    block_m: int,
    *,
    y: str = "",
    split: int = 8,
    is_even: bool = True,
    has_bias: bool = False,
) -> Any:
    """As the first launch would: with pointers and widths that are multiples of 16, as every
    supported base has them, unless not `is_even`.
    """
    constants: dict[str, Any] = {"HEADER_AT": 4, "PERM_AT": HEADER, "BLOCK_M": block_m}
    config, uneven = gpu_lora.KernelConfig(0, 4, 3), {"K", "stride_x", "N", "N0", "N1", "N2", "stride_y"}
    if kernel == "shrink":
        fn, signature, config = gpu_lora.shrink_kernel, SHRINK, gpu_lora.SHRINK_CONFIGS[block_m]
        constants |= {"BLOCK_K": config.block, "EVEN_K": is_even}
    elif kernel == "expand":
        fn, signature = gpu_lora.expand_kernel, EXPAND
        config = gpu_lora.expand_config(block_m, split, torch.float32 if y == "fp32" else torch.float16)
        constants |= {"BLOCK_N": config.block, "EVEN_N": is_even}
    elif kernel == "replace":
        fn, signature, config = gpu_lora.replace_kernel, REPLACE, gpu_lora.SHRINK_CONFIGS[block_m]
        constants |= {"BLOCK_K": config.block, "EVEN_K": is_even, "WORKS_AT": REPLACED_AT}
    elif kernel == "replace_embedding":
        fn, signature, config = gpu_lora.replace_embedding_kernel, REPLACE_EMBEDDING, gpu_lora.REPLACE_EMBEDDING_CONFIG
        constants |= {"BLOCK_N": config.block, "CHUNK_N": gpu_lora.REPLACE_CHUNK, "WORKS_AT": REPLACED_AT}
    else:
        fn, signature = gpu_lora.look_up_kernel, LOOK_UP
    if "bias_ptr" in signature and not has_bias:
        constants["bias_ptr"] = None
    if kernel in ("shrink", "expand", "replace"):
        constants |= {"NUM_STAGES": config.num_stages, "WIDEN": False}
    if kernel in ("shrink", "expand"):
        constants["SPLIT_K"] = split
    names = fn.arg_names
    assert set(names) == set(signature) | set(constants)
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    source = ASTSource(
        fn,
        signature={name: signature.get(name, "constexpr").format(x=x, y=y or x) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", ALIGNED]] for name in signature if is_even or name not in uneven
        },
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    if kernel == "expand" and is_even:
        options["maxnreg"] = gpu_lora.MAX_REGISTERS
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assert_lean(compiled: Any, folder: Path, *, is_resident: bool = True, multiplies: bool = True) -> set[str]:
    """No spills, few enough resources for the grid to be resident at once if it must be;
    the instructions.
    """
    usage, instructions = dump(compiled, folder)
    assert usage["STACK"] == usage["LOCAL"] == "0"
    programs = gpu_device.PROGRAMS_PER_MULTIPROCESSOR
    assert int(usage["REG"]) * THREADS * programs <= REGISTERS or not is_resident
    assert (compiled.metadata.shared + 1024) * programs <= SHARED_BYTES
    opcodes = {opcode for opcode, _ in instructions}
    assert not {op for op in opcodes if op.split(".")[0] in ("LDL", "STL")}
    # tensor cores take a first operand that was just computed safely in this form only
    assert any(op.startswith("HMMA") for op in opcodes) is multiplies
    assert not any(op.startswith("HGMMA") for op in opcodes)
    assert not any(op.startswith(("ATOM", "RED.")) for op in opcodes)
    return opcodes


# float16 compiles to the same but for the name of its products
@pytest.mark.parametrize(
    ("x", "capability", "block_m"),
    default_and_campaign(
        [
            *(("bf16", capability, block_m) for capability in (80, 90) for block_m in ROWS_OF_A_TILE),
            ("fp16", 80, 16),
        ],
        default=[("bf16", 90, max(ROWS_OF_A_TILE))],
    ),
)
@pytest.mark.parametrize(("kernel", "y"), [("shrink", ""), ("expand", ""), ("expand", "fp32")])
def test_every_configuration_loads_weights_wide_and_ahead(
    kernel: str, y: str, x: str, block_m: int, capability: int, tmp_path: Path
) -> None:
    opcodes = assert_lean(compile_kernel(kernel, x, capability, block_m, y=y), tmp_path)
    copies = {op for op in opcodes if op.startswith("LDGSTS")}
    # sixteen bytes at a time, eight of them for a tile of int8 where each thread of expand has no
    # more; nothing is loaded by the element
    assert any(op.endswith(".128") for op in copies), copies
    assert all(op.endswith((".64", ".128")) for op in copies), copies
    assert not [op for op in opcodes if op.startswith("LDG.") and re.search(r"\.[US](8|16)\b", op)]


@pytest.mark.parametrize(("split", "capability"), default_and_campaign([(1, 80), (16, 90)], default=[(16, 90)]))
@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_any_number_of_parts_is_lean(kernel: str, split: int, capability: int, tmp_path: Path) -> None:
    assert_lean(compile_kernel(kernel, "bf16", capability, 16, split=split), tmp_path)


def test_float32_embeddings_of_prompts_are_lean(tmp_path: Path) -> None:
    assert_lean(compile_kernel("expand", "bf16", 90, 32, y="fp32", split=1), tmp_path)


@pytest.mark.parametrize(
    ("kernel", "capability"), default_and_campaign([("shrink", 90), ("expand", 80)], default=[("expand", 80)])
)
def test_widths_not_divisible_by_16_load_weights_wide(kernel: str, capability: int, tmp_path: Path) -> None:
    opcodes = assert_lean(
        compile_kernel(kernel, "bf16", capability, 16, split=2, is_even=False), tmp_path, is_resident=False
    )
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in opcodes)


def test_a_bias_is_lean(tmp_path: Path) -> None:
    assert_lean(compile_kernel("expand", "bf16", 80, 16, has_bias=True), tmp_path)


@pytest.mark.parametrize(
    ("capability", "block_m"), default_and_campaign([(80, 16), (90, 16), (90, 32)], default=[(90, 32)])
)
def test_head_rows_are_loaded_wide_and_ahead(capability: int, block_m: int, tmp_path: Path) -> None:
    opcodes = assert_lean(compile_kernel("replace", "bf16", capability, block_m, y="fp32"), tmp_path)
    copies = {op for op in opcodes if op.startswith("LDGSTS")}
    assert any(op.endswith(".128") for op in copies), copies
    assert all(op.endswith((".64", ".128")) for op in copies), copies


@pytest.mark.parametrize(("capability", "block_m"), default_and_campaign([(80, 16), (90, 32)], default=[(90, 32)]))
def test_rows_of_the_embedding_are_copied_wide(capability: int, block_m: int, tmp_path: Path) -> None:
    compiled = compile_kernel("replace_embedding", "bf16", capability, block_m, y="fp32")
    opcodes = assert_lean(compiled, tmp_path, multiplies=False)
    assert not [op for op in opcodes if op.startswith(("LDG.", "STG.")) and re.search(r"\.[US](8|16)\b", op)]
    assert any(op.startswith("STG.") and op.endswith(".128") for op in opcodes)


def test_looking_up_is_lean(tmp_path: Path) -> None:
    assert_lean(compile_kernel("look_up", "bf16", 90, 32), tmp_path, multiplies=False)
