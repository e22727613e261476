"""Rotation by Hadamard blocks, of weights and of rows before they are rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraserve_kernels.common.formats import ROTATION_BLOCKS, rotation_block
from loraserve_kernels.common.quantized import concatenate, quantize
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.linear.candidates import FORMATS
from loraserve_kernels.cpu.linear.decoded import pack_group_dot, unpack_group_dot
from loraserve_kernels.cpu.linear.packed_linear import pack_quantized, packed_linear
from loraserve_kernels.errors import InvalidWeight, TensorMismatch

WIDTHS = [16, 32, 48, 64, 96, 576]


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix, [size, size] float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def loud_rows(num_rows: int, width: int) -> Tensor:
    """Rows of very different sizes, each with an outlier."""
    x = torch.randn(num_rows, width) * 10.0 ** torch.randint(-6, 6, (num_rows, 1))
    x[:, 5] *= 100
    return x


@pytest.mark.parametrize(("width", "block"), [(64, 64), (576, 64), (96, 32), (48, 16), (40, 0), (7, 0)])
def test_largest_fitting_block_is_taken(width: int, block: int) -> None:
    assert rotation_block(width) == block


@pytest.mark.parametrize("block", ROTATION_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_multiplies_with_hadamard_blocks(block: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3 * block, dtype=dtype)
    expected = (x.double().view(-1, block) @ hadamard(block)).view(x.shape)
    torch.testing.assert_close(
        rotate(x, block).double(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12
    )
    torch.testing.assert_close(rotate(rotate(x, block), block) / block, x, rtol=0, atol=1e-5)
    assert rotate(x, 0) is x


@pytest.mark.parametrize(("block", "width"), [(64, 96), (8, 64), (128, 128), (-16, 64)])
def test_unfitting_blocks_are_refused(block: int, width: int) -> None:
    with pytest.raises(InvalidWeight, match=f"{width} inputs rotated by blocks of {block}"):
        rotate(torch.randn(2, width), block)
    with pytest.raises(InvalidWeight, match="expected a divisor"):
        quantize(torch.randn(8, width), "int8", rotation=block)
    with pytest.raises(InvalidWeight, match="expected a divisor"):
        gemm.quantize_rows(torch.randn(2, width), rotation=block)


@pytest.mark.parametrize("has_numba", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [1, 63])
def test_kernel_rounds_rotated_rows_bit_for_bit(
    num_rows: int, width: int, has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, block = loud_rows(num_rows, width), rotation_block(width)
    before = x.clone()
    expected = gemm.quantize_rows(rotate(x, block))
    monkeypatch.setattr(gemm, "HAS_NUMBA", has_numba and gemm.HAS_NUMBA)
    codes, scales = gemm.quantize_rows(x, rotation=block)
    if has_numba:
        assert torch.equal(codes, expected[0])
        assert torch.equal(scales, expected[1])
    else:
        # a quotient instead of a product with the inverse
        assert (codes.int() - expected[0].int()).abs().max() <= 1
        torch.testing.assert_close(scales, expected[1])
    # adapters read the row as it is
    assert torch.equal(x, before)


@pytest.mark.parametrize("format", ["int8", "int4", "nf4", "fp8"])
def test_dequantized_weight_is_rotated_back(format: str) -> None:
    weight = loud_rows(37, 128)
    rounded = quantize(weight, format, rotation=64)
    error = (rounded.dequantize(torch.float32) - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < (0.02 if format == "int8" else 0.25)
    both = concatenate([rounded.rows(0, 11), rounded.rows(11, 37)]).to("cpu")
    assert torch.equal(both.dequantize(torch.float64), rounded.dequantize(torch.float64))
    with pytest.raises(TensorMismatch, match="rotated by"):
        concatenate([rounded, quantize(weight, format)])


@pytest.mark.parametrize("candidate", FORMATS["int8"], ids=lambda candidate: candidate.kernel)
@pytest.mark.parametrize("width", WIDTHS)
def test_rotated_products_follow_the_float_weight(candidate: object, width: int) -> None:
    kernel = getattr(candidate, "kernel", "")
    if not candidate.is_there() or not candidate.is_exact(candidate, "int8", 256):  # type: ignore[attr-defined]
        pytest.skip(f"{kernel} isn't exact on this machine")
    x, weight = loud_rows(9, width), torch.randn(61, width)
    rounded = quantize(weight, "int8", rotation=rotation_block(width))
    expected = x.double() @ weight.double().T
    if kernel == "widened":
        y = packed_linear(x, pack_quantized(rounded, kernel))
    else:
        packed = gemm.pack_int8(rounded.codes, rounded.scales.flatten(), kernel, rounded.rotation)
        y = gemm.int8_linear(x, packed)
    assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.04


@pytest.mark.parametrize("kernel", ["numba", "widened"])
def test_float_rows_are_rotated_for_a_rotated_weight(kernel: str) -> None:
    x, weight = torch.randn(5, 128), quantize(torch.randn(40, 128), "int4", 32, has_zeros=True, rotation=64)
    packed = pack_quantized(weight, kernel)
    expected = x.double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(packed_linear(x, packed).double(), expected, rtol=0, atol=1e-4)
    rows = torch.cat(list(packed.rows(3, 31)))
    torch.testing.assert_close(rows, weight.dequantize(torch.float32)[3:31], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_rotated_int4_follows_rounded_rows(num_rows: int) -> None:
    x, weight = loud_rows(num_rows, 192), quantize(torch.randn(61, 192), "int4", 64, rotation=64)
    packed = pack_group_dot(weight)
    codes, scales = gemm.quantize_rows(x, rotation=64)
    wide = weight.dequantize(torch.float64)
    rounded = rotate(codes.double() * scales, 64) / 64
    y = gemm.int4_linear(x, packed)
    assert ((y - rounded @ wide.T).abs() <= 1e-5 * (rounded.abs() @ wide.abs().T) + 1e-12).all()
    assert torch.equal(unpack_group_dot(packed, 2, 50), weight.dequantize(torch.float32)[2:50])


def test_largest_magnitudes_come_from_rotated_rows() -> None:
    """Parts of a row that are cut at whole blocks, rounded together."""
    x = loud_rows(6, 256)
    tops = torch.maximum(gemm.row_tops(x[:, :128], 64), gemm.row_tops(x[:, 128:], 64))
    assert torch.equal(tops, rotate(x, 64).abs().amax(1, keepdim=True))
    codes, scales = gemm.quantize_rows(x, rotation=64)
    for first in (0, 128):
        part, part_scales = gemm.quantize_rows(x[:, first : first + 128].contiguous(), tops, 64)
        assert torch.equal(part, codes[:, first : first + 128])
        assert torch.equal(part_scales, scales)


def test_non_finite_row_alone_becomes_nan() -> None:
    x, rounded = torch.randn(5, 64), quantize(torch.randn(61, 64), "int8", rotation=64)
    x[1, 7], x[3, 39] = float("nan"), float("-inf")
    y = gemm.int8_linear(x, gemm.pack_int8(rounded.codes, rounded.scales.flatten(), "numba-dot", 64))
    assert y[[1, 3]].isnan().all()
    assert y[[0, 2, 4]].isfinite().all()
