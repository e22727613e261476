from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loraserve_kernels import reference
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.linear import gemm
from loraserve_kernels.cpu.linear.candidates import FORMATS
from loraserve_kernels.cpu.linear.chooser import chooser
from loraserve_kernels.cpu.linear.gemm import (
    Int8Weight,
    blocks_in_place,
    float_linear,
    int8_linear,
    pack_float,
    pack_int8,
    quantize_rows,
)
from loraserve_kernels.errors import TensorMismatch

SHAPES = [(61, 40), (128, 64), (96, 333)]


@pytest.fixture(params=["as this machine does", "onednn-s8", "onednn-u8", "numba-dot", "fbgemm"])
def kernel(request: pytest.FixtureRequest) -> str:
    """A kernel of int8, or this machine's where that kernel sums wrongly here: it is never taken
    then, as `test_chooser` shows.
    """
    candidate = next((c for c in FORMATS["int8"] if c.kernel == request.param), None)
    if candidate is not None and candidate.is_exact(candidate, "int8", 256):
        return candidate.kernel
    return chooser().choose("int8", *SHAPES[0]).kernel


def quantize_int8(weight: torch.Tensor, kernel: str) -> Int8Weight:
    rounded = quantize(weight, "int8")
    return pack_int8(rounded.codes, rounded.scales.flatten(), kernel)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 63, 200])
def test_int8_is_within_rounding_of_float(kernel: str, num_tokens: int, out_features: int, in_features: int) -> None:
    x, weight = torch.randn(num_tokens, in_features), torch.randn(out_features, in_features)
    # rows of very different sizes: each keeps its own precision
    x *= 10.0 ** torch.randint(-6, 6, (num_tokens, 1))
    expected = x.double() @ weight.double().T
    y = int8_linear(x, quantize_int8(weight, kernel))
    assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.04
    bias = torch.randn(out_features)
    difference = int8_linear(x, quantize_int8(weight, kernel), bias) - (y + bias)
    assert (difference.abs() <= 1e-6 * (y.abs() + bias.abs())).all()


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_given_int8_codes_are_used_unchanged(kernel: str, num_tokens: int) -> None:
    """-128 among them, which rounding never makes; of rows that int8 and 7 bits hold exactly,
    the products are exact too.
    """
    codes = torch.randint(-128, 128, (61, 40)).to(torch.int8)
    codes[3], codes[:, 5] = -128, -128
    scales = 2.0 ** torch.randint(-9, 3, (61,))
    x = torch.tensor([-1.0, 1.0, 0.0])[torch.randint(0, 3, (num_tokens, 40))]
    x[:, 5] = 1.0
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    torch.testing.assert_close(int8_linear(x, pack_int8(codes, scales, kernel)).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(6, 4, dtype=torch.uint8), torch.ones(6)),
        (torch.zeros(6, 4, dtype=torch.int8), torch.ones(6, dtype=torch.float64)),
        (torch.zeros(6, 4, dtype=torch.int8), torch.ones(4)),
        (torch.zeros(6, 4, dtype=torch.int8), torch.ones(6, 1)),
    ],
)
def test_mismatched_int8_codes_and_scales_are_refused(codes: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(TensorMismatch):
        pack_int8(codes, scales, "fbgemm")


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_int8_row_bits_are_independent_of_batch(kernel: str, out_features: int, in_features: int) -> None:
    weight = quantize_int8(torch.randn(out_features, in_features), kernel)
    row = torch.randn(1, in_features)
    alone = int8_linear(row, weight)[0]
    for num_tokens in (2, 3, 8, 17, 64, 200):
        x = torch.randn(num_tokens, in_features)
        # outliers, a row of zeros and a row that isn't finite among the others
        x[0], x[1] = x[0] * 1e6, 0.0
        if num_tokens > 2:
            x[2] = float("inf")
        x[-1] = row[0]
        assert torch.equal(int8_linear(x, weight)[-1], alone)


def test_only_non_finite_row_becomes_nan(kernel: str) -> None:
    x = torch.randn(5, 40)
    x[1, 7], x[3, 39] = float("nan"), float("-inf")
    y = int8_linear(x, quantize_int8(torch.randn(61, 40), kernel))
    assert y[[1, 3]].isnan().all()
    assert y[[0, 2, 4]].isfinite().all()


def test_rows_and_channels_of_zeros_give_zeros(kernel: str) -> None:
    weight, x = torch.randn(61, 40), torch.randn(3, 40)
    weight[5], x[1] = 0, 0
    y = int8_linear(x, quantize_int8(weight, kernel))
    assert not y[1].any()
    assert not y[:, 5].any()


@pytest.mark.parametrize("has_numba", [True, False])
def test_rows_are_rounded_by_own_maximum(has_numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "HAS_NUMBA", has_numba and gemm.HAS_NUMBA)
    x = torch.randn(11, 45) * 10.0 ** torch.arange(-5, 6)[:, None]
    codes, scales = quantize_rows(x)
    expected, expected_scales = reference.quantize_rows(x.double(), 127)
    assert torch.allclose(scales[:, 0].double(), expected_scales, rtol=1e-6)
    # a product within rounding of a half may go either way
    assert (codes.double() - expected).abs().max() <= 1
    assert (codes.double() != expected).float().mean() < 0.01
    assert (codes.abs().amax(1) == 127).all()


def test_numba_and_torch_row_rounding_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 100)
    x[3], x[4, 5] = 0, float("nan")
    codes, scales = quantize_rows(x)
    monkeypatch.setattr(gemm, "HAS_NUMBA", False)
    codes_torch, scales_torch = quantize_rows(x)
    assert (codes.int() - codes_torch.int()).abs().max() <= 1
    assert torch.allclose(scales, scales_torch, equal_nan=True)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 200])
def test_float_equals_the_reference(num_tokens: int, out_features: int, in_features: int) -> None:
    x, weight, bias = (
        torch.randn(num_tokens, in_features),
        torch.randn(out_features, in_features),
        torch.randn(out_features),
    )
    y = float_linear(x, pack_float(weight), bias)
    assert y.shape == (num_tokens, out_features)
    assert (y - (x.double() @ weight.double().T + bias)).abs().max() < 1e-4


@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (768, 2048)])
def test_float_row_bits_are_independent_of_batch(out_features: int, in_features: int) -> None:
    weight, x = pack_float(torch.randn(out_features, in_features)), torch.randn(300, in_features)
    together = float_linear(x, weight)
    for num_tokens in (1, 2, 3, 8, 17, 64, 130):
        assert torch.equal(float_linear(x[:num_tokens].clone(), weight), together[:num_tokens])


@pytest.mark.parametrize(("out_features", "in_features"), [*SHAPES, (768, 2048), (128, 7)])
def test_blocks_in_place_are_the_weight(out_features: int, in_features: int) -> None:
    weight = torch.randn(out_features, in_features)
    packed = pack_float(weight)
    blocks = blocks_in_place(packed, weight)
    if blocks is None:
        # another order, or none that is known: the whole matrix is unpacked instead
        assert out_features % 64 or in_features < 64 or not has_avx2()
        return
    assert torch.equal(torch.cat([block.T for block in blocks]), weight)
    assert blocks.data_ptr() == torch.ops.mkldnn.data_ptr(packed.packed)
    # one number elsewhere, and it's seen that this isn't the order
    weight[out_features // 2, in_features // 2] += 1
    assert blocks_in_place(packed, weight) is None


def has_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class _Heights(TorchDispatchMode):
    """Notes how many rows each of oneDNN's products has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linear_pointwise" in str(func):
            self.seen.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


# not every processor has oneDNN's products of bfloat16
_ONEDNN = ["float32", "onednn-u8", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


@pytest.mark.parametrize("dtype", _ONEDNN)
def test_onednn_compiles_products_of_few_heights(dtype: str) -> None:
    weight = torch.randn(32, 48)
    if dtype == "float32":
        packed = pack_float(weight)
        multiply = lambda x: float_linear(x, packed)  # noqa: E731
    elif dtype == "bfloat16":
        half = gemm.pack_half(weight, torch.bfloat16, "onednn")
        multiply = lambda x: gemm.half_linear(x, half)  # noqa: E731
    else:
        int8 = quantize_int8(weight, dtype)
        multiply = lambda x: int8_linear(x, int8)  # noqa: E731
    x = torch.randn(300, 48)
    with _Heights() as heights:
        for num_rows in range(1, 301):
            assert multiply(x[:num_rows]).shape == (num_rows, 32)
    # one to sixteen, and then every sixteenth
    assert 16 < len(heights.seen) <= 16 + 300 // 16 + 1


def test_wrong_inputs_are_refused() -> None:
    weight = quantize_int8(torch.randn(8, 16), "fbgemm")
    with pytest.raises(TensorMismatch, match="takes \\(num_tokens, 16\\) float32"):
        int8_linear(torch.randn(2, 17), weight)
    with pytest.raises(TensorMismatch, match="float32"):
        float_linear(torch.randn(2, 16).double(), pack_float(torch.randn(8, 16)))
