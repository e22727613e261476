from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.linear import decoded
from loraserve_kernels.cpu.linear import packed_linear as cpu_packed
from loraserve_kernels.cpu.linear.packed_linear import pack_quantized, packed_linear
from loraserve_kernels.cpu.linear.widen import widen
from loraserve_kernels.errors import TensorMismatch

KINDS = {
    "int4": ("int4", False),
    "int4 with zeros": ("int4", True),
    "int4 with float zeros": ("int4", True),
    "int8": ("int8", False),
    "int8 with zeros": ("int8", True),
    "int8 with float zeros": ("int8", True),
    "int8 by channel": ("int8", False),
    "nf4": ("nf4", False),
    "mxfp4": ("mxfp4", False),
    "fp8": ("fp8", False),
    "fp8 with groups": ("fp8", False),
}


def make(kind: str, out_features: int, in_features: int, group_size: int = 64) -> QuantizedWeight:
    name, has_zeros = KINDS[kind]
    # groups of very different sizes, and far from zero
    weight = torch.randn(out_features, in_features) * 10.0 ** torch.randint(-3, 3, (out_features, 1)) + 0.3
    has_groups = kind == "fp8 with groups" or (name in ("int4", "int8") and kind != "int8 by channel")
    made = quantize(weight, name, group_size if has_groups else None, has_zeros=has_zeros)
    if "float zeros" not in kind or made.zeros is None:
        return made
    return replace(made, zeros=made.zeros + torch.rand(made.zeros.shape) - 0.5)


KERNELS = ["numba", "widened"]


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_packed, "_BLOCK_WEIGHTS", 5000)


@pytest.mark.parametrize("kind", KINDS)
def test_widened_weight_is_the_references_bit_for_bit(kind: str) -> None:
    weight = make(kind, 37, 192, group_size=32)
    assert torch.equal(widen(weight), weight.dequantize(torch.float32))


def test_each_fp8_code_is_widened_as_in_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    weight = QuantizedWeight("fp8", codes, torch.ones(2, 1), None, 128, 128, 2)
    assert torch.equal(widen(weight).nan_to_num(999), codes.float().nan_to_num(999))


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 63])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_product_equals_product_with_widened_weight(kernel: str, kind: str, num_tokens: int, has_bias: bool) -> None:
    weight = make(kind, 101, 192)
    x, bias = torch.randn(num_tokens, 192), torch.randn(101) if has_bias else None
    packed = pack_quantized(weight, kernel)
    assert packed.kernel == kernel
    assert len(packed.blocks) == (7 if kernel == "widened" else 0)
    assert packed.num_bytes == weight.num_bytes
    wide = weight.dequantize(torch.float64)
    exact, magnitude = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + bias.abs()
    assert ((packed_linear(x, packed, bias) - exact).abs() <= 1e-6 * magnitude).all()


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_row_bits_do_not_depend_on_batch(kernel: str, kind: str) -> None:
    packed, row = pack_quantized(make(kind, 101, 192), kernel), torch.randn(1, 192)
    alone = packed_linear(row, packed)[0]
    for num_tokens in (2, 3, 8, 17, 64, 200):
        x = torch.randn(num_tokens, 192)
        x[0] = float("nan")
        x[-1] = row[0]
        assert torch.equal(packed_linear(x, packed)[-1], alone)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "in_features"), [(1, 333), (7, 64), (65, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_decoded_unchanged(
    dtype: torch.dtype, num_tokens: int, in_features: int, has_bias: bool
) -> None:
    weight = torch.randn(101, in_features).to(dtype)
    packed, x = decoded.pack_half(weight), torch.randn(num_tokens, in_features)
    bias = torch.randn(101) if has_bias else None
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + bias.abs()
    y = decoded.linear(x, packed, bias)
    assert ((y - exact).abs() <= 1e-6 * magnitude).all()
    assert y.is_contiguous()
    assert torch.equal(decoded.linear(x[-1:].clone(), packed, bias)[0], y[-1])
    assert torch.equal(decoded.unpack(packed, 30, 99), weight[30:99].float())
    assert packed.num_bytes == weight.nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_weight_rows_equal_reference_bit_for_bit(kernel: str, kind: str) -> None:
    weight = make(kind, 101, 192)
    rows = torch.cat(list(pack_quantized(weight, kernel).rows(30, 99)))
    assert torch.equal(rows, weight.dequantize(torch.float32)[30:99])


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_fp8_stays_nan(kernel: str) -> None:
    """Numba's kernel has no NaN for it, so that such a weight is widened."""
    weight = make("fp8", 40, 64)
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    packed = pack_quantized(weight, kernel)
    assert packed.kernel == "widened"
    is_nan = packed_linear(torch.randn(2, 64), packed).isnan()
    assert is_nan[:, 3].all()
    assert is_nan.sum() == 2


def test_blocks_bound_scratch_memory_and_share_codes() -> None:
    weight = make("nf4", 4100, 1024)
    packed = pack_quantized(weight, "widened")
    assert all(block.out_features * block.in_features <= 1 << 20 for block in packed.blocks)
    assert packed.blocks[0].codes.data_ptr() == weight.codes.data_ptr()
    assert packed.num_bytes == weight.num_bytes


@pytest.mark.parametrize("x", [torch.randn(3, 63), torch.randn(64), torch.randn(3, 64).half()])
def test_mismatched_input_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(TensorMismatch, match="this linear takes"):
        packed_linear(x, pack_quantized(make("nf4", 8, 64), "widened"))
