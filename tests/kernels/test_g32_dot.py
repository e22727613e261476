"""Products of weights in 4 and 8 bits by activations in int8, rounded in groups of 32 inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pairwise import pairwise_and_campaign
from torch import Tensor

from loraserve_kernels.common.arithmetic import OUTLIERS
from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.linear import g32_dot
from loraserve_kernels.cpu.lora.apply import HAS_NUMBA
from loraserve_kernels.errors import InvalidWeight, TensorMismatch

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")

KINDS = [
    ("int4", False, "float32"),
    ("int4", True, "bfloat16"),
    ("int4", True, "float16"),
    ("int8", False, "float16"),
    ("int8", True, "float32"),
    ("mxfp4", False, "bfloat16"),
]
ZEROS = ["whole", "float"]
# out_features, in_features, inputs of a weight's group
SHAPES = [(61, 32, 32), (40, 96, 32), (128, 576, 64), (33, 1536, 128)]


def make_weight(
    out_features: int,
    in_features: int,
    group_size: int,
    kind: tuple[str, bool, str] = KINDS[0],
    zeros: str = "whole",
) -> QuantizedWeight:
    format, has_zeros, scales = kind
    weight = torch.randn(out_features, in_features) * 10.0 ** torch.randint(-2, 2, (out_features, 1)) + 0.2
    made = quantize(weight, format, None if format == "mxfp4" else group_size, has_zeros=has_zeros)
    made = replace(made, scales=made.scales.to(getattr(torch, scales)).float())
    if zeros == "float" and made.zeros is not None:
        made = replace(made, zeros=made.zeros + torch.rand(made.zeros.shape) - 0.5)
    return made


def make_rows(num_tokens: int, in_features: int) -> Tensor:
    """Rows of very different sizes, with outliers."""
    x = torch.randn(num_tokens, in_features) * 10.0 ** torch.randint(-6, 6, (num_tokens, 1))
    x[:, 5] *= 100
    return x


def rounded(x: Tensor) -> Tensor:
    """Each group of 32 inputs rounded to 127 steps both ways."""
    groups = x.double().view(x.shape[0], -1, 32)
    step = groups.abs().amax(2, keepdim=True) / 127
    return torch.where(step > 0, (groups / step).round() * step, 0.0).view(x.shape)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "kind", "zeros", "num_outliers"),
    pairwise_and_campaign(SHAPES, [1, 3, 8, 33], KINDS, ZEROS, [0, OUTLIERS]),
)
def test_product_equals_rounded_groups(
    shape: tuple[int, int, int], num_tokens: int, kind: tuple[str, bool, str], zeros: str, num_outliers: int
) -> None:
    out_features, in_features, group_size = shape
    weight, x = make_weight(out_features, in_features, group_size, kind, zeros), make_rows(num_tokens, in_features)
    bias = torch.randn(out_features) if num_tokens % 3 == 0 else None
    codes, scales, starts, outliers = g32_dot.quantize_groups(x, num_outliers)
    largest = x.abs().sort(dim=1, descending=True, stable=True).indices[:, :num_outliers]
    assert torch.equal(outliers[..., 0].long(), largest)
    assert torch.equal(outliers[..., 1], x.gather(1, largest))
    groups = codes.view(num_tokens, -1, 32)
    assert torch.equal(starts, -groups.sum(2).float())
    again = (groups.double() * scales[..., None]).view(x.shape)
    # a number in the middle between two codes may go to either
    step, rest = scales.repeat_interleave(32, 1), x.scatter(1, largest, 0.0)
    assert ((again - rounded(rest)).abs() <= 1.001 * step).all()
    assert ((again - rest).abs() <= 0.501 * step).all()
    again = again.scatter(1, largest, x.gather(1, largest).double())
    wide = weight.dequantize(torch.float64)
    group_size = weight.group_size
    expected = again @ wide.T + (0 if bias is None else bias.double())
    # zeros make terms that cancel
    spread = 1 if weight.zeros is None else 1 + 256 * (weight.format == "int8") + 16
    top = (wide.abs() + weight.scales.repeat_interleave(group_size, 1) * spread * (weight.zeros is not None)).T
    bound = 1e-6 * (again.abs() @ top + (0 if bias is None else bias.abs()))
    y = g32_dot.linear(x, g32_dot.pack(weight), bias, num_outliers)
    assert y.shape == (num_tokens, out_features)
    assert ((y - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("shape", "kind", "zeros", "num_outliers"), pairwise_and_campaign(SHAPES, KINDS, ZEROS, [0, OUTLIERS])
)
def test_bits_of_rows_are_independent_of_batch(
    shape: tuple[int, int, int], kind: tuple[str, bool, str], zeros: str, num_outliers: int
) -> None:
    out_features, in_features, group_size = shape
    packed = g32_dot.pack(make_weight(out_features, in_features, group_size, kind, zeros))
    x = make_rows(70, in_features)
    together = g32_dot.linear(x, packed, None, num_outliers)
    for count in (1, 2, 4, 5, 8, 9, 64, 65):
        assert torch.equal(g32_dot.linear(x[:count].clone(), packed, None, num_outliers), together[:count])
        assert torch.equal(g32_dot.linear(x[-count:].clone(), packed, None, num_outliers), together[-count:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zeros", ZEROS)
def test_weight_rows_match_reference_bit_for_bit(kind: tuple[str, bool, str], zeros: str) -> None:
    weight = make_weight(101, 192, 64, kind, zeros)
    packed = g32_dot.pack(weight)
    assert packed.kernel.split("-")[2] == kind[2]
    assert torch.equal(g32_dot.unpack(packed, 30, 99), weight.dequantize(torch.float32)[30:99])
    num_bytes = weight.num_bytes - weight.scales.numel() * (4 - packed.scales.element_size())
    assert packed.num_bytes == num_bytes


@pytest.mark.parametrize(
    ("format", "code", "value"),
    [("int4", 0xFF, 7), ("int8", -128, -128), ("int8", 127, 127), ("mxfp4", 0x77, 6), ("mxfp4", 0xFF, -6)],
)
def test_largest_codes_are_summed_exactly(format: str, code: int, value: int) -> None:
    width = 1024
    is_packed, group_size = format != "int8", 32 if format == "mxfp4" else 128
    codes = torch.full((32, width // 2 if is_packed else width), code, dtype=torch.int32)
    codes = codes.to(torch.uint8 if is_packed else torch.int8)
    weight = QuantizedWeight(format, codes, torch.ones(32, width // group_size), None, group_size, width, 32)
    x = torch.full((2, width), 127.0)
    x[1] = -x[1]
    y = g32_dot.linear(x, g32_dot.pack(weight))
    assert torch.equal(y, torch.tensor([[1.0], [-1.0]]).expand(2, 32) * value * 127 * width)


def test_extreme_zeros_are_summed_exactly() -> None:
    """255 · 127 in every place, less a zero that leaves 0 or -255 of each."""
    codes = torch.full((2, 64), 127, dtype=torch.int8)
    codes[1] = -128
    zeros = torch.full((2, 2), 255, dtype=torch.uint8)
    packed = g32_dot.pack(QuantizedWeight("int8", codes, torch.ones(2, 2), zeros, 32, 64, 2))
    y = g32_dot.linear(torch.full((1, 64), 127.0), packed)
    assert torch.equal(y, torch.tensor([[0.0, -255.0 * 127 * 64]]))


def test_outlier_spoils_only_own_group() -> None:
    weight, x = make_weight(64, 256, 32), torch.randn(4, 256)
    exact = x @ weight.dequantize(torch.float32).T
    x[:, 40] = 0
    quiet = g32_dot.linear(x, g32_dot.pack(weight))
    loud = x.clone()
    loud[:, 40] = 1000
    codes, scales, *_ = g32_dot.quantize_groups(loud)
    assert torch.equal(codes[:, :32], g32_dot.quantize_groups(x)[0][:, :32])
    assert (scales[:, 2:] < 0.1).all()
    assert (quiet - exact).norm() < exact.norm()


@pytest.mark.parametrize("num_outliers", [0, OUTLIERS])
def test_infinite_row_is_nan_alone(num_outliers: int) -> None:
    packed, x = g32_dot.pack(make_weight(64, 128, 64)), torch.randn(9, 128)
    quiet = g32_dot.linear(x, packed, None, num_outliers)
    x[3, 0], x[7, 100] = torch.inf, torch.nan
    y = g32_dot.linear(x, packed, None, num_outliers)
    assert y[[3, 7]].isnan().all()
    rest = [row for row in range(9) if row not in (3, 7)]
    assert torch.equal(y[rest], quiet[rest])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [1.0, 0.0])
def test_lone_number_is_multiplied_exactly(kind: tuple[str, bool, str], value: float) -> None:
    """In each place of a run of codes; a row of zeros has no outlier."""
    weight, x = make_weight(40, 96, 32, kind, "float"), torch.eye(96) * value
    y = g32_dot.linear(x, g32_dot.pack(weight), None, OUTLIERS)
    assert torch.equal(y, weight.dequantize(torch.float32).T * value)


def test_unfit_weights_are_refused() -> None:
    assert g32_dot.can_round_groups(make_weight(8, 64, 32))
    assert g32_dot.can_round_groups(quantize(torch.randn(8, 96), "int8"))
    for weight in (
        quantize(torch.randn(8, 48), "int8"),
        quantize(torch.randn(8, 64), "int4", 32, rotation=32),
        quantize(torch.randn(8, 64), "nf4"),
        quantize(torch.randn(8, 64), "fp8"),
    ):
        assert not g32_dot.can_round_groups(weight)
        with pytest.raises(InvalidWeight, match="groups of 32 take int4, int8 and mxfp4"):
            g32_dot.pack(weight)


def test_unfit_input_is_refused() -> None:
    with pytest.raises(TensorMismatch, match="64"):
        g32_dot.linear(torch.randn(2, 32), g32_dot.pack(make_weight(8, 64, 32)))
