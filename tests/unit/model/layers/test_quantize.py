from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraserve.errors import ModelError
from loraserve.model.layers.linears import JoinedLinear, Linear, make_linear, quantize_weight
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.errors import InvalidWeight

FORMATS = {
    "float32": ("none", torch.float32, 1e-6),
    "bfloat16": ("none", torch.bfloat16, 1e-2),
    "float16": ("none", torch.float16, 1e-3),
    "int8": ("int8", torch.float32, 2e-2),
    "int4": ("int4", torch.float32, 0.2),
    "nf4": ("nf4", torch.float32, 0.2),
    "fp8": ("fp8", torch.float32, 5e-2),
}
EXACT_BY_ROW = ["float32", "float16", "int8", "int4", "nf4", "fp8"]
PACKED = ["int4", "nf4", "fp8", "int8"]
WIDTH = 64


def make(
    name: str, *, out_features: int = 70, in_features: int = WIDTH, bias: bool = False
) -> tuple[Linear, Tensor, Tensor | None]:
    quantize, dtype, _ = FORMATS[name]
    weight = torch.randn(out_features, in_features)
    b = torch.randn(out_features) if bias else None
    return make_linear(weight, b, quantize=quantize, dtype=dtype), weight, b


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("name", FORMATS)
def test_linear_error_stays_within_format_bound(name: str, num_tokens: int, bias: bool) -> None:
    torch.manual_seed(num_tokens)
    linear, weight, b = make(name, bias=bias)
    x = torch.randn(num_tokens, WIDTH)
    y = linear(x)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert y.dtype == torch.float32
    assert y.is_contiguous()
    error = (y - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < FORMATS[name][2]


@pytest.mark.parametrize(("out_features", "in_features"), [(70, 52), (128, 64), (96, 2048)])
@pytest.mark.parametrize("name", EXACT_BY_ROW)
def test_row_bits_are_independent_of_batch(name: str, out_features: int, in_features: int) -> None:
    torch.manual_seed(0)
    if name in ("int4", "nf4"):
        # whole groups
        in_features = -(-in_features // 64) * 64
    linear, _, _ = make(name, out_features=out_features, in_features=in_features, bias=True)
    x = torch.randn(130, in_features)
    # an outlier that would spoil a scale shared by the batch
    x[77] *= 1e4
    everything = linear(x)
    for start, end in [(0, 1), (5, 7), (60, 63), (9, 17), (70, 102), (1, 130)]:
        assert torch.equal(linear(x[start:end].clone()), everything[start:end]), (start, end)


@pytest.mark.parametrize("name", FORMATS)
def test_result_is_the_callers_to_change(name: str) -> None:
    linear, _, _ = make(name, bias=True)
    x = torch.randn(1, WIDTH)
    first = linear(x)
    kept = first.clone()
    first.fill_(7)
    assert torch.equal(linear(x), kept)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_copies_given_weight(name: str) -> None:
    linear, weight, _ = make(name)
    x = torch.randn(3, WIDTH)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_num_bytes_follow_the_format() -> None:
    sizes = {name: make(name)[0].num_bytes for name in FORMATS}
    weights = 70 * WIDTH
    assert sizes["float32"] == 4 * weights
    assert sizes["bfloat16"] == sizes["float16"] == 2 * weights
    assert weights <= sizes["int8"] <= weights + 8 * 70
    assert sizes["fp8"] == weights + 4 * 70
    # a float32 scale for each 64 inputs, and a zero beside it for each 32
    assert sizes["nf4"] == weights // 2 + 4 * 70
    assert sizes["int4"] == weights // 2 + 2 * 5 * 70


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", PACKED)
def test_given_codes_are_multiplied_exactly(name: str, num_tokens: int, has_zeros: bool) -> None:
    """Within the rounding of float32 sums: nothing is rounded to 8 bits on the way."""
    given = quantize(
        torch.randn(70, 192),
        name,
        group_size=64 if name in ("int4", "int8") else None,
        has_zeros=has_zeros and name in ("int4", "int8"),
    )
    bias, x = torch.randn(70), torch.randn(num_tokens, 192)
    y = make_linear(given, bias, quantize="none", dtype=torch.float32)(x)
    exact = x.double() @ given.dequantize(torch.float64).T + bias
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-4)


def test_given_int8_codes_match_rounding_at_load() -> None:
    weight, x = torch.randn(70, 52), torch.randn(9, 52)
    given = make_linear(quantize_weight(weight, "int8"), None, quantize="none", dtype=torch.float32)
    assert torch.equal(given(x), make_linear(weight, None, quantize="int8", dtype=torch.float32)(x))


@pytest.mark.parametrize("in_features", [256, 192, 96])
def test_int4_has_groups_of_32_with_zeros(in_features: int) -> None:
    rounded = quantize_weight(torch.randn(8, in_features), "int4")
    assert rounded.group_size == 32
    assert rounded.zeros is not None
    # scales take two bytes
    assert torch.equal(rounded.scales.bfloat16().float(), rounded.scales)


def test_searched_scales_have_the_least_error() -> None:
    weight = torch.randn(40, 128)
    # an outlier in each group, which is cut off a little
    weight[:, ::32] *= 2
    plain = quantize(weight, "int4", 32, has_zeros=True).dequantize(torch.float32)
    searched = quantize(weight, "int4", 32, has_zeros=True, is_searched=True).dequantize(torch.float32)
    assert (searched - weight).norm() < 0.99 * (plain - weight).norm()
    with pytest.raises(InvalidWeight, match="int4 with zeros alone"):
        quantize(weight, "int4", 32, is_searched=True)


def test_non_finite_weight_is_refused() -> None:
    weight = torch.randn(8, 64)
    weight[3, 5] = float("nan")
    with pytest.raises(ModelError, match="quantized to nf4: 1 of 8 output channels hold numbers that aren't finite"):
        quantize_weight(weight, "nf4")


def test_joined_linears_concatenate_outputs() -> None:
    (first, *_), (second, *_) = make("int4", bias=True), make("float32", out_features=30)
    joined, x = JoinedLinear([first, second]), torch.randn(5, WIDTH)
    y = joined(x)
    assert torch.equal(y, torch.cat((first(x), second(x)), 1))
    assert y.is_contiguous()
    assert joined.num_bytes == first.num_bytes + second.num_bytes


@pytest.mark.parametrize(
    ("format", "dtype", "names"),
    [
        ("none", torch.float32, {"fp32"}),
        ("none", torch.bfloat16, {"bf16", "bf16-weights"}),
        ("none", torch.float16, {"fp16"}),
        ("int8", torch.float32, {"w8a8-row", "w8a7-row"}),
        ("int4", torch.float32, {"w4a16"}),
        ("nf4", torch.float32, {"w4a16-nf4"}),
        ("fp8", torch.float32, {"w8a16-fp8"}),
    ],
)
def test_linear_reports_arithmetic_kernel_and_instructions(format: str, dtype: torch.dtype, names: set[str]) -> None:
    linear = make_linear(torch.randn(64, WIDTH), None, quantize=format, dtype=dtype)
    (arithmetic,) = linear.arithmetics
    assert arithmetic.name in names
    assert arithmetic.kernel
    assert arithmetic.instructions
    other = make_linear(torch.randn(8, WIDTH), None, quantize="none", dtype=torch.float32)
    assert JoinedLinear([linear, other]).arithmetics == (arithmetic, *other.arithmetics)
