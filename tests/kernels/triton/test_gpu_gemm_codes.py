"""The PTX that unpacks codes, run by a small interpreter of the instructions that it uses,
on every code there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from loraserve_kernels.common.quantized import NF4_CODE
from loraserve_kernels.gpu.gemm import unpack as gpu_unpack

Words = npt.NDArray[np.uint32]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prmt(a: Words, b: Words, selector: Words) -> Words:
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(source | selector)
    for byte in range(4):
        pick = (selector >> np.uint32(4 * byte) & np.uint32(15)).astype(np.uint64)
        value = source >> (pick & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        value = np.where(pick & np.uint64(8), np.where(value & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), value)
        out |= value << np.uint64(8 * byte)
    return out.astype(np.uint32)


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros_like(a | b | c)
    for row in range(8):
        if int(table.max()) >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def numbers(words: Words, dtype: torch.dtype) -> Tensor:
    """[..., 2]: the low halves, then the high ones."""
    halves = torch.from_numpy(np.ascontiguousarray(words).view(np.int16).reshape(*words.shape, 2).copy())
    return halves.view(dtype)


def fma(dtype: torch.dtype) -> Callable[[Words, Words, Words], Words]:
    def run(a: Words, b: Words, c: Words) -> Words:
        a, b, c = (np.broadcast_to(v, np.broadcast_shapes(a.shape, b.shape, c.shape)) for v in (a, b, c))
        exact = numbers(a, dtype).double() * numbers(b, dtype).double() + numbers(c, dtype).double()
        return exact.to(dtype).view(torch.int16).numpy().view(np.uint32)[..., 0]

    return run


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma(torch.bfloat16),
    "fma.rn.f16x2": fma(torch.float16),
}


def run(ptx: str, num_outputs: int, *inputs: Words) -> list[Words]:
    """The output registers. An instruction that reads what nothing has written is a KeyError."""
    registers = {f"${num_outputs + i}": words for i, words in enumerate(inputs)}

    def value(operand: str) -> Words:
        if re.fullmatch(r"0x[0-9A-F]+|\d+", operand):
            return np.array([int(operand, 0)], dtype=np.uint32)
        return registers[operand]

    for statement in re.sub(r"\.reg[^;]*;|[{}]", "", ptx).split(";"):
        if statement.strip():
            operation, rest = statement.split(maxsplit=1)
            target, *operands = (word.strip() for word in rest.split(","))
            registers[target] = OPERATIONS[operation](*map(value, operands))
    return [np.broadcast_to(registers[f"${i}"], inputs[0].shape) for i in range(num_outputs)]


def every_byte() -> tuple[Words, Tensor]:
    """Words in which every byte stands at every place beside others, and their bytes,
    [words, 4].
    """
    generator = np.random.default_rng(0)
    columns = [generator.permutation(256).astype(np.uint8) for _ in range(4)]
    octets = np.stack(columns, axis=1)
    return np.ascontiguousarray(octets).view(np.uint32)[:, 0], torch.from_numpy(octets.astype(np.int64))


def in_order(low: Words, high: Words, dtype: torch.dtype) -> Tensor:
    """Four numbers for each word."""
    return torch.cat((numbers(low, dtype), numbers(high, dtype)), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_unpacked_exactly(dtype: str) -> None:
    words, octets = every_byte()
    values = in_order(*run(gpu_unpack.int8_ptx(dtype, has_zeros=False), 2, words), DTYPES[dtype])
    assert torch.equal(values.long(), octets.to(torch.int8).long())


@pytest.mark.parametrize("zero", [0, 1, 127, 128, 255])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_eight_bits_are_taken_away_exactly(dtype: str, zero: int) -> None:
    words, octets = every_byte()
    # another zero for each of the four
    zeros = (torch.arange(4 * len(words)).view(-1, 4) + zero) % 256
    shift = (128.0 - zeros if dtype == "bf16" else -(zeros + 1024.0)).to(DTYPES[dtype])
    pairs = shift.view(torch.int16).numpy().view(np.uint32)
    outputs = run(gpu_unpack.int8_ptx(dtype, has_zeros=True), 2, words, pairs[:, 0], pairs[:, 1])
    assert torch.equal(in_order(*outputs, DTYPES[dtype]).long(), octets.to(torch.int8).long() + 128 - zeros)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_unpacked_exactly(dtype: str) -> None:
    words, octets = every_byte()
    values = in_order(*run(gpu_unpack.fp8_ptx(dtype), 2, words), DTYPES[dtype]).double()
    expected = octets.to(torch.uint8).view(torch.float8_e4m3fn).double()
    is_number = ~expected.isnan()
    assert is_number.sum() == 4 * 254
    assert torch.equal(values[is_number], expected[is_number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int4", "nf4"])
def test_four_bits_are_unpacked_exactly(format: str, dtype: str) -> None:
    words, octets = every_byte()
    ptx = gpu_unpack.nf4_ptx(dtype) if format == "nf4" else gpu_unpack.int4_ptx(dtype, has_zeros=False)
    outputs = run(ptx, 4, words)
    table = torch.tensor(NF4_CODE).to(DTYPES[dtype]) if format == "nf4" else torch.arange(-8, 8).to(DTYPES[dtype])
    assert torch.equal(in_order(*outputs[:2], DTYPES[dtype]), table[octets & 15])
    assert torch.equal(in_order(*outputs[2:], DTYPES[dtype]), table[octets >> 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_four_bits_are_taken_away_exactly(dtype: str) -> None:
    words, octets = every_byte()
    zeros = torch.arange(4 * len(words)).view(-1, 4) % 16
    shift = (-(zeros + {"bf16": 128, "fp16": 1024}[dtype])).to(DTYPES[dtype])
    pairs = shift.view(torch.int16).numpy().view(np.uint32)
    outputs = run(gpu_unpack.int4_ptx(dtype, has_zeros=True), 4, words, pairs[:, 0], pairs[:, 1])
    assert torch.equal(in_order(*outputs[:2], DTYPES[dtype]).long(), (octets & 15) - zeros)
    assert torch.equal(in_order(*outputs[2:], DTYPES[dtype]).long(), (octets >> 4) - zeros)


def test_words_are_split_into_halves() -> None:
    low, high = run(gpu_unpack.HALVES.value, 2, np.array([0x22221111], np.uint32), np.array([0x44443333], np.uint32))
    assert (hex(low[0]), hex(high[0])) == ("0x33331111", "0x44442222")
