"""What the compiler makes of the weight-only linears, launched as the server launches them, for two
generations of GPUs. No GPU is needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import default_and_campaign
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.gpu.gemm import gemm as gpu_gemm

from .ahead_of_time import dump

pytestmark = pytest.mark.usefixtures("compiler_cache")

KINDS = ["plain", "int8", "fp8", "nf4", "int4", "int4-32", "int4-zeros", "int8-128"]
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


FETCHES_SCALES_AHEAD = tuple(int(number) for number in triton.__version__.split(".")[:2]) > (3, 6)
"""Triton 3.6 loads the scales of groups when they are needed."""


class Recorder:
    """Stands for a kernel; keeps what it would have been launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[list[Any], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((list(args), options))


def compile_launch(recorder: Recorder, capability: int) -> Any:
    """As Triton specialises a launch: ones are constants, multiples of 16 are known to be."""
    ((args, options),) = recorder.launches
    kernel = recorder.kernel
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    launch = {name: value for name, value in options.items() if name not in names}
    signature = dict.fromkeys(names, "constexpr")
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, value) in enumerate(zip(names, args, strict=False)):
        if isinstance(value, Tensor):
            signature[name], attrs[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif value == 1 and name != "num_rows":
            constants[name] = 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and name != "num_rows":
                attrs[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


def make_weight(kind: str, weight: Tensor) -> Tensor | QuantizedWeight:
    """``int8-32-zeros``: the format, and the size of a group and zeros where there are any."""
    format, *options = kind.split("-")
    if format == "plain":
        return weight
    group_size = next((int(option) for option in options if option.isdigit()), None)
    return quantize(weight, format, group_size, has_zeros="zeros" in options)


def compile_linear(
    kind: str,
    num_rows: int,
    dtype: torch.dtype,
    capability: int,
    patch: pytest.MonkeyPatch,
    *,
    out_features: int = 256,
    in_features: int = 1024,
    has_bias: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Any:
    weight = make_weight(kind, torch.zeros(out_features, in_features, dtype=dtype))
    name = "decode_gemm_kernel" if num_rows <= gpu_gemm.MAX_DECODE_ROWS else "prefill_gemm_kernel"
    recorder = Recorder(getattr(gpu_gemm, name))
    patch.setattr(gpu_gemm, name, recorder)
    bias = torch.zeros(out_features, dtype=dtype) if has_bias else None
    gpu_gemm.weight_only_linear(torch.zeros(num_rows, in_features, dtype=dtype), weight, bias, out_dtype=out_dtype)
    return compile_launch(recorder, capability)


def assert_lean(compiled: Any, folder: Path, *, programs: int) -> list[tuple[str, str]]:
    """No spills, and resources for so many programs on a multiprocessor of the smaller generation;
    the instructions and their operands.
    """
    usage, instructions = dump(compiled, folder)
    assert usage["STACK"] == usage["LOCAL"] == "0"
    assert int(usage["REG"]) * 32 * compiled.metadata.num_warps * programs <= 65536
    assert (compiled.metadata.shared + 1024) * programs <= 164 * 1024
    names = {opcode.split(".")[0] for opcode, _ in instructions}
    assert not names & {"LDL", "STL"}
    # sums are never added to memory atomically
    assert not any(opcode.startswith(("RED", "ATOM")) and "F32" in opcode for opcode, _ in instructions)
    return instructions


def copy_widths(instructions: list[tuple[str, str]]) -> set[int]:
    """Bytes of the asynchronous copies."""
    copies = [opcode for opcode, _ in instructions if opcode.startswith("LDGSTS")]
    return {int(m[1]) // 8 if (m := re.search(r"\.(64|128)$", opcode)) else 4 for opcode in copies}


def assert_decode(compiled: Any, kind: str, num_rows: int, folder: Path) -> None:
    # bytes by groups of 32 with zeros are copied ahead in so many pieces that a third program
    # doesn't fit
    is_wide = num_rows > 16 or kind == "int8-32-zeros"
    instructions = assert_lean(compiled, folder, programs=1 if num_rows > 32 else 2 if is_wide else 3)
    # scales and zeros by four bytes; a group of 32 is 16 bytes of codes, which four threads share
    # with x's tile
    expected = {16} if kind in ("plain", "int8", "fp8") else {8} if kind == "int4-32" else {16}
    if FETCHES_SCALES_AHEAD and kind not in ("plain", "int8", "fp8"):
        expected = {4, *expected}
    assert expected <= copy_widths(instructions) <= {4, 8, 16}
    assert not [opcode for opcode, _ in instructions if re.match(r"LDG\b.*\.[US](8|16)\b", opcode)]
    assert any(opcode.startswith("HMMA") for opcode, _ in instructions)
    # another instruction would add a row's products in another order
    assert not any(opcode.startswith("HGMMA") for opcode, _ in instructions)


# the whole product takes minutes: every height of row tile with every kind, both generations with
# the lowest, every way to unpack
# the default run: a plain weight, bytes with zeros, half bytes and a table's codes, the lowest and
# the highest tile
CONFIGURATIONS = default_and_campaign(
    [
        *[(kind, 16, 80) for kind in ("int8-32-zeros", "plain", "int8", "nf4", "int4-zeros")],
        *[(kind, rows, 90) for kind in KINDS for rows in gpu_gemm.DECODE_CONFIGS],
    ],
    default=[("int8-32-zeros", 16, 80), ("plain", 16, 90), ("int4", 16, 90), ("nf4", max(gpu_gemm.DECODE_CONFIGS), 90)],
)


@pytest.mark.parametrize(("kind", "num_rows", "capability"), CONFIGURATIONS)
def test_few_rows_read_weights_wide_and_ahead(
    kind: str, num_rows: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_decode(compile_linear(kind, num_rows, torch.bfloat16, capability, monkeypatch), kind, num_rows, tmp_path)


@pytest.mark.parametrize("kind", default_and_campaign(["int8", "nf4", "int4-zeros"], default=["nf4"]))
def test_few_rows_in_float16_do_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_decode(compile_linear(kind, 16, torch.float16, 90, monkeypatch), kind, 16, tmp_path)


# those that left alone kept registers in memory for a fifth program
@pytest.mark.parametrize(
    ("kind", "out_dtype"), [("int8", torch.bfloat16), ("int8", torch.float32), ("fp8", torch.float32)]
)
def test_small_tiles_of_bytes_are_lean(
    kind: str, out_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so wide that a sum has one part
    compiled = compile_linear(
        kind, 32, torch.bfloat16, 90, monkeypatch, out_features=16_384, in_features=512, has_bias=False,
        out_dtype=out_dtype,
    )  # fmt: skip
    assert_lean(compiled, tmp_path, programs=3)


def test_partly_filled_tiles_use_few_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_linear("int4", 5, torch.bfloat16, 80, monkeypatch, out_features=100, in_features=1152)
    assert_lean(compiled, tmp_path, programs=2)


MANY = default_and_campaign(
    [
        *[(kind, 90) for kind in (*KINDS[1:], "int8-32-zeros")],
        *[(kind, 80) for kind in ("int8", "nf4", "int8-128")],
    ],
    default=[("int8", 80), ("nf4", 90), ("int4-zeros", 90)],
)


@pytest.mark.parametrize(("kind", "capability"), MANY)
def test_many_rows_feed_tensor_cores_from_shared_memory(
    kind: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_linear(kind, 128, torch.bfloat16, capability, monkeypatch)
    instructions = assert_lean(compiled, tmp_path, programs=1)
    assert 16 in copy_widths(instructions)
    products = [operands for opcode, operands in instructions if opcode.startswith("HGMMA")]
    assert bool(products) == (capability == 90)
    # destination, then both operands by descriptor, then the sum (or zero): a first operand in
    # registers can go wrong
    assert all(
        re.fullmatch(r"x\S+ R\d+, gdesc\[UR\d+\](\.\w+)*, R(\d+|Z, !UPT).*", operands.strip()) for operands in products
    ), products
