"""Products of weights in int4 by activations in int8."""

from __future__ import annotations

import pytest
import torch

from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.linear import decoded
from loraserve_kernels.cpu.linear.gemm import int4_linear, quantize_rows
from loraserve_kernels.errors import TensorMismatch

KINDS = ["symmetric", "with zeros", "searched"]
SHAPES = [(61, 64, 32), (128, 128, 64), (40, 384, 128), (33, 256, 128)]


def random_weight(out_features: int, in_features: int, group_size: int, kind: str = "symmetric") -> QuantizedWeight:
    weight = torch.randn(out_features, in_features) * 10.0 ** torch.randint(-3, 3, (out_features, 1))
    return quantize(weight, "int4", group_size, has_zeros=kind != "symmetric", is_searched=kind == "searched")


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 70])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_product_equals_product_of_rounded_rows(
    out_features: int, in_features: int, group_size: int, num_tokens: int, has_bias: bool, kind: str
) -> None:
    """Nothing is rounded but the rows, and sums to float32."""
    weight = random_weight(out_features, in_features, group_size, kind)
    x = torch.randn(num_tokens, in_features) * 10.0 ** torch.randint(-6, 6, (num_tokens, 1))
    bias = torch.randn(out_features) if has_bias else None
    codes, scales = quantize_rows(x)
    rounded, wide = codes.double() * scales, weight.dequantize(torch.float64)
    expected = rounded @ wide.T + (0 if bias is None else bias.double())
    bound = 1e-6 * (rounded.abs() @ wide.abs().T + (0 if bias is None else bias.abs()))
    y = int4_linear(x, decoded.pack_group_dot(weight), bias)
    assert y.shape == (num_tokens, out_features)
    assert ((y - expected).abs() <= bound).all()


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_rows_are_independent_of_batch(out_features: int, in_features: int, group_size: int, kind: str) -> None:
    packed, x = (
        decoded.pack_group_dot(random_weight(out_features, in_features, group_size, kind)),
        torch.randn(70, in_features),
    )
    together = int4_linear(x, packed)
    for count in (1, 2, 4, 5, 8, 9, 64, 65):
        assert torch.equal(int4_linear(x[:count].clone(), packed), together[:count])
        assert torch.equal(int4_linear(x[-count:].clone(), packed), together[-count:])


@pytest.mark.parametrize(("out_features", "in_features", "group_size"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_rows_match_reference_bit_for_bit(
    out_features: int, in_features: int, group_size: int, kind: str
) -> None:
    weight = random_weight(out_features, in_features, group_size, kind)
    assert (decoded.pack_group_dot(weight).scales.dtype == torch.bfloat16) == (kind == "searched")
    rows = decoded.unpack_group_dot(decoded.pack_group_dot(weight), 5, out_features - 3)
    assert torch.equal(rows, weight.dequantize(torch.float32)[5 : out_features - 3])


def test_largest_codes_are_summed_exactly() -> None:
    """15 · 127 in every place of the largest groups."""
    width = 1024
    codes = torch.full((32, width // 2), 0xFF, dtype=torch.uint8)
    weight = QuantizedWeight("int4", codes, torch.ones(32, 8), None, 128, width, 32)
    assert decoded.can_round_activations(weight)
    x = torch.full((2, width), 127.0)
    x[1] = -x[1]
    y = int4_linear(x, decoded.pack_group_dot(weight))
    assert torch.equal(y, torch.tensor([[7.0 * 127 * width], [-7.0 * 127 * width]]).expand(2, 32))


def test_only_non_finite_row_becomes_nan() -> None:
    packed, x = decoded.pack_group_dot(random_weight(64, 128, 64)), torch.randn(9, 128)
    quiet = int4_linear(x, packed)
    x[3, 5], x[7, 100] = torch.inf, torch.nan
    y = int4_linear(x, packed)
    assert y[[3, 7]].isnan().all()
    rest = [row for row in range(9) if row not in (3, 7)]
    assert torch.equal(y[rest], quiet[rest])


def test_weights_unsupported_by_kernel_are_reported() -> None:
    assert decoded.can_round_activations(random_weight(8, 64, 32))
    assert decoded.can_round_activations(quantize(torch.randn(8, 64), "int4", 32, has_zeros=True))
    assert not decoded.can_round_activations(quantize(torch.randn(8, 64), "nf4"))


def test_mismatched_input_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="64"):
        int4_linear(torch.randn(2, 32), decoded.pack_group_dot(random_weight(8, 64, 32)))
