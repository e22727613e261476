from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loraserve_kernels.common import row_blocks
from loraserve_kernels.common.quantized import (
    NF4_CODE,
    STORED_FORMATS,
    QuantizedWeight,
    concatenate,
    powers_of_two,
    quantize,
    zero_words,
)
from loraserve_kernels.cpu.linear.candidates import weight_format
from loraserve_kernels.errors import InvalidWeight, TensorMismatch

CONFIGS = [
    ("int8", None, False),
    ("fp8", None, False),
    ("nf4", None, False),
    ("mxfp4", None, False),
    ("fp8", 32, False),
    ("fp8", 128, False),
    *[
        (format, size, has_zeros)
        for format in ("int4", "int8")
        for size in (32, 64, 128)
        for has_zeros in (False, True)
    ],
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_weight(out_features: int = 37, in_features: int = 384) -> Tensor:
    """Channels of very different sizes, one of zeros, one with an outlier,
    one of positive numbers alone.
    """
    weight = torch.randn(out_features, in_features) * 10.0 ** torch.randint(-4, 3, (out_features, 1))
    weight[3], weight[4, 100] = 0, 1e4
    weight[5] = weight[5].abs()
    return weight


def bound(weight: Tensor, quantized: QuantizedWeight) -> Tensor:
    """The largest error that the format may make at each weight."""
    groups = weight.double().view(weight.shape[0], -1, quantized.group_size)
    amax = groups.abs().amax(2, keepdim=True)
    if quantized.zeros is not None:
        span = groups.amax(2, keepdim=True).clamp_min(0) - groups.amin(2, keepdim=True).clamp_max(0)
        steps = span / {"int8": 510, "int4": 30}[quantized.format]
    elif quantized.format == "fp8":
        steps = torch.maximum(groups.abs() / 16, amax / 448 / 1024)
    else:
        steps = amax * {"int8": 1 / 254, "int4": 1 / 15, "nf4": 0.15191, "mxfp4": 0.25}[quantized.format]
    return (steps * torch.ones_like(groups)).view(weight.shape) * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("format", "group_size", "has_zeros"), CONFIGS)
def test_every_weight_is_within_the_formats_half_step(
    format: str, group_size: int | None, has_zeros: bool, dtype: torch.dtype
) -> None:
    weight = random_weight().clamp(-6e4, 6e4).to(dtype)
    quantized = quantize(weight, format, group_size, has_zeros=has_zeros)
    error = (quantized.dequantize(torch.float64) - weight.double()).abs()
    assert (error <= bound(weight, quantized)).all()
    assert not quantized.dequantize(torch.float32)[3].any()


@pytest.mark.parametrize(("format", "group_size", "has_zeros"), CONFIGS)
def test_dequantized_values_quantize_to_same_codes(format: str, group_size: int | None, has_zeros: bool) -> None:
    once = quantize(random_weight(), format, group_size, has_zeros=has_zeros).dequantize(torch.float32)
    twice = quantize(once, format, group_size, has_zeros=has_zeros).dequantize(torch.float32)
    # int4's largest magnitude is a half step short of what it was
    if (format, has_zeros) != ("int4", False):
        assert torch.allclose(once, twice, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_rounds_the_exact_product_once(dtype: torch.dtype) -> None:
    for format in STORED_FORMATS:
        quantized = quantize(torch.randn(9, 128), format)
        assert torch.equal(quantized.dequantize(dtype), quantized.dequantize(torch.float32).to(dtype))
        expected = quantized.dequantize(torch.float64)
        assert torch.allclose(quantized.dequantize(torch.float32).double(), expected, rtol=2**-23)


def test_four_bits_stand_low_nibble_first() -> None:
    codes = torch.tensor([[0x10, 0x98, 0xF7]], dtype=torch.uint8).repeat(1, 11)[:, :32]
    scales, in_features = torch.full((1, 1), 0.5), 64
    int4 = QuantizedWeight("int4", codes, scales, None, 64, in_features, 1)
    assert int4.dequantize(torch.float32)[0, :6].tolist() == [-4.0, -3.5, 0.0, 0.5, -0.5, 3.5]
    zeros = torch.tensor([[3]], dtype=torch.uint8)
    shifted = QuantizedWeight("int4", codes, scales, zeros, 64, in_features, 1)
    assert shifted.dequantize(torch.float32)[0, :6].tolist() == [-1.5, -1.0, 2.5, 3.0, 2.0, 6.0]
    nf4 = QuantizedWeight("nf4", codes, scales, None, 64, in_features, 1)
    assert nf4.dequantize(torch.float32)[0, :6].tolist() == [NF4_CODE[c] / 2 for c in (0, 1, 8, 9, 7, 15)]


def test_eight_bit_zeros_count_from_lowest_code() -> None:
    codes = torch.tensor([-128, -127, 0, 127], dtype=torch.int8).repeat(1, 16)
    zeros = torch.tensor([[0, 200]], dtype=torch.uint8)
    int8 = QuantizedWeight("int8", codes, torch.tensor([[0.5, 2.0]]), zeros, 32, 64, 1)
    assert int8.dequantize(torch.float32)[0, :4].tolist() == [0.0, 0.5, 64.0, 127.5]
    assert int8.dequantize(torch.float32)[0, 32:36].tolist() == [-400.0, -398.0, -144.0, 110.0]


def test_mxfp4_codes_are_numbers_of_e2m1() -> None:
    codes = torch.arange(0, 256, 17, dtype=torch.uint8)[None]
    exponents = torch.tensor([[130]], dtype=torch.uint8)
    made = QuantizedWeight("mxfp4", codes, powers_of_two(exponents), None, 32, 32, 1)
    positive = [0.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0]
    assert made.dequantize(torch.float32)[0, ::2].tolist() == [*positive, *(-number for number in positive)]


def test_exponents_mean_exact_powers_of_two() -> None:
    scales = powers_of_two(torch.arange(256, dtype=torch.uint8))
    assert scales.tolist()[:255] == [2.0 ** (number - 127) for number in range(255)]
    assert scales[255].isinf()


def test_int8_scales_by_channel_unless_groups_are_requested() -> None:
    weight = torch.randn(8, 256)
    channels, groups = quantize(weight, "int8"), quantize(weight, "int8", 64)
    assert (channels.scales.shape, channels.has_groups) == ((8, 1), False)
    assert (groups.scales.shape, groups.has_groups) == ((8, 4), True)
    errors = [(made.dequantize(torch.float32) - weight).norm() for made in (channels, groups)]
    assert errors[1] < 0.95 * errors[0]


def test_nf4_rounds_to_nearest_of_sixteen_numbers() -> None:
    weight = torch.linspace(-1, 1, 64 * 50).view(1, -1)
    weight[0, 0::64], weight[0, 1::64] = -1.0, 1.0
    values = quantize(weight, "nf4").dequantize(torch.float32)
    table = torch.tensor(NF4_CODE)
    nearest = table[(weight[..., None] - table).abs().argmin(-1)]
    assert torch.equal(values, nearest)


def test_zeros_improve_groups_on_single_side_of_zero() -> None:
    weight = 1 + torch.rand(16, 128)
    errors = [
        (quantize(weight, "int4", has_zeros=has_zeros).dequantize(torch.float32) - weight).norm()
        for has_zeros in (False, True)
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_zeros_may_lie_between_codes(format: str) -> None:
    made = quantize(torch.randn(6, 128) + 1, format, 32, has_zeros=True)
    assert made.zeros is not None
    shifted = replace(made, zeros=made.zeros + 0.25)
    step = made.scales.repeat_interleave(32, 1)
    expected = made.dequantize(torch.float64) - step.double() / 4
    torch.testing.assert_close(shifted.dequantize(torch.float64), expected, rtol=0, atol=1e-9)
    joined = concatenate([made, shifted])
    assert joined.has_float_zeros
    parts = [made.dequantize(torch.float32), shifted.dequantize(torch.float32)]
    assert torch.equal(joined.dequantize(torch.float32), torch.cat(parts))


@pytest.mark.parametrize(("format", "group_size", "has_zeros"), CONFIGS)
def test_concatenated_weights_equal_parts_in_order(format: str, group_size: int | None, has_zeros: bool) -> None:
    parts = [quantize(torch.randn(n, 256), format, group_size, has_zeros=has_zeros) for n in (5, 1, 12)]
    whole = concatenate(parts)
    assert (whole.out_features, whole.in_features) == (18, 256)
    assert torch.equal(whole.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in parts]))
    assert whole.num_bytes == sum(p.num_bytes for p in parts)


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_parts_with_zeros_and_without_are_joined(format: str) -> None:
    parts = [quantize(torch.randn(4, 256), format, 64, has_zeros=has_zeros) for has_zeros in (False, True)]
    whole = concatenate(parts)
    assert torch.equal(whole.dequantize(torch.float32), torch.cat([p.dequantize(torch.float32) for p in parts]))


def test_bytes_are_counted() -> None:
    weight = torch.randn(10, 256)
    assert quantize(weight, "int8").num_bytes == quantize(weight, "fp8").num_bytes == 10 * (256 + 4)
    assert quantize(weight, "int4").num_bytes == 10 * (128 + 8)
    assert quantize(weight, "nf4").num_bytes == 10 * (128 + 16)
    assert quantize(weight, "int4", 32, has_zeros=True).num_bytes == 10 * (128 + 8 * 5)
    assert quantize(weight, "int8", 128).num_bytes == 10 * (256 + 8)


def test_transferred_weight_keeps_channel_scales_and_meaning() -> None:
    made = quantize(torch.randn(10, 256), "int4", 32, has_zeros=True)
    assert made.zeros is not None
    loaded = QuantizedWeight("int4", made.codes, made.scales.contiguous(), made.zeros.contiguous(), 32, 256, 10)
    moved = loaded.to("cpu")
    assert moved.zeros is not None
    assert moved.scales.stride() == made.scales.stride() == (1, 10)
    # in words of four
    assert moved.zeros.stride() == made.zeros.stride() == (1, 12)
    assert torch.equal(moved.dequantize(torch.float32), made.dequantize(torch.float32))


def test_zeros_are_read_in_words() -> None:
    made = quantize(torch.randn(10, 256), "int4", 32, has_zeros=True).zeros
    assert made is not None
    words = zero_words(made)
    assert (words.shape, words.data_ptr()) == ((8, 3), made.data_ptr())
    assert torch.equal(words.view(torch.uint8)[:, :10].t(), made)
    assert torch.equal(zero_words(made.contiguous()), words)
    assert torch.equal(zero_words(made[1:]).view(torch.uint8)[:, :9].t(), made[1:])


def test_unknown_formats_and_groups_are_refused() -> None:
    weight = torch.randn(4, 192)
    with pytest.raises(InvalidWeight, match="expected one of int8, int4, nf4, fp8, mxfp4"):
        quantize(weight, "int3")
    with pytest.raises(InvalidWeight, match="groups of 8; the kernels have 16, 32, 64, 128"):
        quantize(weight, "int4", 8)
    with pytest.raises(InvalidWeight, match="192 inputs can't be cut into groups of 128"):
        quantize(weight, "int4")
    with pytest.raises(InvalidWeight, match="groups of 48; the kernels have 16, 32, 64, 128, 192"):
        quantize(weight, "fp8", 48)
    with pytest.raises(InvalidWeight, match="groups of 96; the kernels have 16, 32, 64, 128, 192"):
        quantize(weight, "int8", 96)
    with pytest.raises(InvalidWeight, match="groups of 192 and zeros; the kernels have 16, 32, 64, 128"):
        quantize(weight, "int8", has_zeros=True)
    with pytest.raises(InvalidWeight, match="nf4 with zeros; only int8 and int4"):
        quantize(weight, "nf4", has_zeros=True)
    with pytest.raises(TensorMismatch, match="matrix of floats"):
        quantize(weight.to(torch.int8), "int8")


@pytest.mark.parametrize("format", STORED_FORMATS)
def test_non_finite_weights_are_refused_by_channel(format: str) -> None:
    weight = torch.randn(4, 128)
    weight[2, 7] = float("inf")
    weight[3, 0] = float("nan")
    with pytest.raises(InvalidWeight, match="2 of 4 output channels hold numbers that aren't finite, the first is 2"):
        quantize(weight, format)


@pytest.mark.parametrize(("format", "group_size", "has_zeros"), CONFIGS)
def test_blockwise_rounding_equals_rounding_at_once(
    monkeypatch: pytest.MonkeyPatch, format: str, group_size: int | None, has_zeros: bool
) -> None:
    weight = random_weight()
    whole = quantize(weight, format, group_size, has_zeros=has_zeros)
    # 10 rows, of 37
    monkeypatch.setattr(row_blocks, "BLOCK_WEIGHTS", 10 * 384)
    parts = quantize(weight, format, group_size, has_zeros=has_zeros)
    assert torch.equal(parts.codes.view(torch.uint8), whole.codes.view(torch.uint8))
    assert torch.equal(parts.scales, whole.scales)
    assert parts.scales.stride() == whole.scales.stride()
    assert (parts.zeros is None) == (whole.zeros is None)
    if parts.zeros is not None and whole.zeros is not None:
        assert torch.equal(parts.zeros, whole.zeros)
        assert parts.zeros.stride() == whole.zeros.stride()
    weight[[12, 30], 5] = float("nan")
    with pytest.raises(InvalidWeight, match="2 of 37 output channels hold numbers that aren't finite, the first is 12"):
        quantize(weight, format, group_size, has_zeros=has_zeros)


def permuted(weight: Tensor, order: Tensor) -> QuantizedWeight:
    """The weight in int4, quantized with its inputs in this order."""
    return replace(quantize(weight[:, order], "int4", 32, has_zeros=True), permutation=order.int())


def test_permuted_weight_keeps_input_order() -> None:
    order = torch.randperm(128)
    made = permuted(torch.randn(6, 128), order)
    ordered = made.without_permutation.dequantize(torch.float32)
    assert torch.equal(made.dequantize(torch.float32)[:, order], ordered)
    for moved in (made.to("cpu"), made.rows(0, 6), concatenate([made.rows(0, 2), made.rows(2, 6)])):
        assert torch.equal(moved.dequantize(torch.float32), made.dequantize(torch.float32))
    assert made.num_bytes == made.without_permutation.num_bytes + 4 * 128


def test_weights_with_several_permutations_arent_joined() -> None:
    weight, order = torch.randn(6, 128), torch.randperm(128)
    made = permuted(weight, order)
    for other in (permuted(weight, order.flip(0)), made.without_permutation):
        with pytest.raises(TensorMismatch, match="one permutation of their inputs"):
            concatenate([made, other])


def test_permutation_is_checked() -> None:
    made = quantize(torch.randn(6, 128), "int4", 32)
    with pytest.raises(TensorMismatch, match=r"permutation are \(127,\) torch.int32"):
        replace(made, permutation=torch.randperm(128)[:127].int())
    with pytest.raises(InvalidWeight, match="rotated and permuted"):
        replace(quantize(torch.randn(6, 128), "int4", 32, rotation=32), permutation=torch.randperm(128).int())
    with pytest.raises(TensorMismatch, match="inputs are permuted: gather x"):
        weight_format(permuted(torch.randn(6, 128), torch.randperm(128)), rounded=())


def test_disagreeing_tensors_are_refused() -> None:
    good = quantize(torch.randn(6, 128), "int4", 32)
    for codes, scales in (
        (good.codes.to(torch.int8), good.scales),
        (good.codes[:5], good.scales),
        (good.codes, good.scales.half()),
        (good.codes, good.scales[:, :3]),
        (good.codes.t().contiguous().t(), good.scales),
    ):
        with pytest.raises(TensorMismatch):
            QuantizedWeight("int4", codes, scales, None, 32, 128, 6)
    with pytest.raises(TensorMismatch, match="int4, groups of 32, 128 inputs"):
        concatenate([good, quantize(torch.randn(6, 128), "int4", 64)])
    with pytest.raises(TensorMismatch, match="none"):
        concatenate([])
