"""What the compiler makes of every shipped configuration, for two generations of GPUs. No GPU is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraserve_kernels import gpu_device, gpu_lora
from loraserve_kernels.gpu_plan import HEADER, ROWS_OF_A_TILE
from loraserve_kernels.paged_layout import UNIT

SHRINK = {
    "x_ptr": "*{x}",
    "pool_ptr": "*{pool}",
    "units_ptr": "*i32",
    "multipliers_ptr": "*fp32",
    "plan_ptr": "*i32",
    "scratch_ptr": "*fp32",
    "K": "i32",
    "stride_x": "i32",
    "stride_pool": "i32",
}
EXPAND = {
    "scratch_ptr": "*fp32",
    "pool_ptr": "*{pool}",
    "units_ptr": "*i32",
    "multipliers_ptr": "*fp32",
    "plan_ptr": "*i32",
    "y_ptr": "*{x}",
    "stride_y": "i32",
    "N0": "i32",
    "N1": "i32",
    "N2": "i32",
}
DTYPES = [("bf16", "bf16"), ("fp16", "fp16"), ("i8", "bf16"), ("i8", "fp16")]
# a multiprocessor's registers, and the shared memory of one of the smaller generation
REGISTERS, SHARED_BYTES, THREADS = 65536, 164 * 1024, 128


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton interprets kernels in this process")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compile_kernel(kernel: str, pool: str, x: str, capability: int, block_m: int, *, split: int, is_even: bool) -> Any:
    """As the first launch would: with pointers and widths that are multiples of 16, as every supported base has them, unless not `is_even`."""
    if kernel == "shrink":
        fn, signature, config = gpu_lora.shrink_kernel, SHRINK, gpu_lora.SHRINK_CONFIGS[block_m]
        constants: dict[str, Any] = {"BLOCK_K": config.block, "EVEN_K": is_even}
        uneven: set[str] = {"K", "stride_x"}
    else:
        fn, signature, config = gpu_lora.expand_kernel, EXPAND, gpu_lora.EXPAND_CONFIGS[block_m]
        constants, uneven = {"BLOCK_N": config.block, "EVEN_N": is_even}, {"N0", "N1", "N2", "stride_y"}
    constants |= {"HEADER_AT": 4, "PERM_AT": HEADER, "SPLIT_K": split, "BLOCK_M": block_m}
    constants |= {"NUM_STAGES": config.num_stages, "WIDEN": False}
    names = fn.arg_names
    assert set(names) == set(signature) | set(constants)
    source = ASTSource(
        fn,
        signature={name: signature.get(name, "constexpr").format(x=x, pool=pool) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", UNIT]] for name in signature if is_even or name not in uneven
        },
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def dump(compiled: Any, folder: Path, option: str) -> str:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, str(cubin)], capture_output=True, text=True, check=True).stdout


def assert_lean(compiled: Any, folder: Path, *, is_resident: bool = True) -> set[str]:
    """No spills, few enough resources for the grid to be resident at once if it must be; the instructions."""
    usage = dict(re.findall(r"(\w+):(\d+)", dump(compiled, folder, "-res-usage").split("Function")[-1]))
    assert usage["STACK"] == usage["LOCAL"] == "0"
    programs = gpu_device.PROGRAMS_PER_MULTIPROCESSOR
    assert int(usage["REG"]) * THREADS * programs <= REGISTERS or not is_resident
    assert (compiled.metadata.shared + 1024) * programs <= SHARED_BYTES
    opcodes = set(
        re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", dump(compiled, folder, "-sass"))
    )
    assert not {op for op in opcodes if op.split(".")[0] in ("LDL", "STL")}
    # tensor cores take a first operand that was just computed safely in this form only
    assert any(op.startswith("HMMA") for op in opcodes)
    assert not any(op.startswith("HGMMA") for op in opcodes)
    assert not any(op.startswith(("ATOM", "RED.")) for op in opcodes)
    return opcodes


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("block_m", ROWS_OF_A_TILE)
@pytest.mark.parametrize(("pool", "x"), DTYPES)
@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_every_configuration_loads_weights_wide_and_ahead(
    kernel: str, pool: str, x: str, block_m: int, capability: int, tmp_path: Path
) -> None:
    compiled = compile_kernel(kernel, pool, x, capability, block_m, split=8, is_even=True)
    opcodes = assert_lean(compiled, tmp_path)
    copies = {op for op in opcodes if op.startswith("LDGSTS")}
    # sixteen bytes at a time; a tile of int8 has only eight for each thread of expand
    widths = (".64", ".128") if (kernel, pool, block_m) == ("expand", "i8", 16) else (".128",)
    assert any(op.endswith(widths) for op in copies), copies
    assert not [op for op in opcodes if op.startswith("LDG.") and re.search(r"\.[US](8|16)\b", op)]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("split", [1, 2, 16])
@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_any_number_of_parts_is_lean(kernel: str, split: int, capability: int, tmp_path: Path) -> None:
    assert_lean(compile_kernel(kernel, "bf16", "bf16", capability, 16, split=split, is_even=True), tmp_path)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", ["shrink", "expand"])
def test_widths_that_are_no_multiples_of_16_still_load_weights_wide(
    kernel: str, capability: int, tmp_path: Path
) -> None:
    opcodes = assert_lean(
        compile_kernel(kernel, "bf16", "bf16", capability, 16, split=2, is_even=False), tmp_path, is_resident=False
    )
    assert any(op.startswith("LDGSTS") and op.endswith(".128") for op in opcodes)
