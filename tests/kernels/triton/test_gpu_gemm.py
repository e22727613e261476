from dataclasses import replace
from typing import Any

import pytest
import torch
from pairwise import pairwise_and_campaign
from torch import Tensor

pytest.importorskip("triton")

from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.errors import TensorMismatch
from loraserve_kernels.gpu.gemm import gemm as gpu_gemm
from loraserve_kernels.gpu.gemm.gemm import split_k, weight_only_linear

pytestmark = pytest.mark.interpreted

# format, group size, zeros
KINDS = [
    ("plain", None, False),
    ("int8", None, False),
    ("fp8", None, False),
    ("nf4", None, False),
    ("int4", 128, False),
    ("int4", 64, True),
    ("int4", 32, True),
    ("int8", 128, False),
    ("int8", 32, True),
    ("fp8", 128, False),
    ("fp8", 32, False),
]
# out_features and in_features: not filling a tile, in one part; filling tiles, in two parts; in
# four parts, of which the last is empty
SHAPES = {"plain": [(70, 333), (128, 512), (33, 1090)], "packed": [(70, 384), (128, 512), (33, 1152)]}


def sizes_of(kind: tuple[str, int | None, bool]) -> str:
    return "packed" if kind[0] == "nf4" or kind[1] else "plain"


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN."""
    torch.manual_seed(0)
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def make_weight(
    kind: tuple[str, int | None, bool], out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor | QuantizedWeight:
    format, group_size, has_zeros = kind
    weight = torch.randn(out_features, in_features)
    return weight.to(dtype) if format == "plain" else quantize(weight, format, group_size, has_zeros=has_zeros)


def make_x(num_rows: int, in_features: int, dtype: torch.dtype, *, gap: int = 24) -> Tensor:
    """Rows inside a wider tensor full of NaN."""
    wide = torch.full((num_rows + 1, in_features + gap), float("nan"), dtype=dtype)
    x = wide[:num_rows, :in_features]
    x.copy_(torch.randn(x.shape))
    return x


def expected(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    exact = weight.double() if isinstance(weight, Tensor) else weight.dequantize(torch.float64)
    y = x.double() @ exact.T
    return y if bias is None else y + bias.double()


def is_right(
    y: Tensor, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, roundings: float = 1
) -> bool:
    """Within so many roundings of the output (the interpreter truncates to bf16)."""
    right = expected(x, weight, bias)
    eps = 2**-18 if y.dtype == torch.float32 else torch.finfo(y.dtype).eps
    return bool((y.double() - right).abs().max() <= roundings * eps * right.abs().max())


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    pairwise_and_campaign(KINDS, [torch.bfloat16, torch.float16], range(3)),
    ids=lambda value: f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value).removeprefix("torch."),
)
def test_few_rows_equal_the_reference(kind: tuple[str, int | None, bool], dtype: torch.dtype, shape: int) -> None:
    out_features, in_features = SHAPES[sizes_of(kind)][shape]
    weight = make_weight(kind, out_features, in_features, dtype)
    # one row tile, two halves of it, one row
    num_rows = (9, 35, 1)[shape]
    x, bias = make_x(num_rows, in_features, dtype), torch.randn(out_features).to(dtype) if shape else None
    assert is_right(weight_only_linear(x, weight, bias), x, weight, bias)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_row_bits_depend_on_row_alone(kind: tuple[str, int | None, bool]) -> None:
    weight = make_weight(kind, 70, 512, torch.float16)
    x = make_x(64, 512, torch.float16)
    x[5], x[6] = float("inf"), 6e4
    together = weight_only_linear(x, weight)
    for rows in ([0], [40, 63, 0], list(range(17)), [*range(30, 64), 5]):
        assert torch.equal(weight_only_linear(x[rows], weight).view(torch.int16), together[rows].view(torch.int16))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "kind", [("int8", None, False), ("int4", 128, False), ("int8", 32, True)], ids=["int8", "int4", "int8-32"]
)
def test_non_finite_row_spoils_no_neighbour(kind: tuple[str, int | None, bool]) -> None:
    weight, x = make_weight(kind, 33, 512, torch.float16), make_x(6, 512, torch.float16)
    x[2, 7], x[4] = float("nan"), float("inf")
    y = weight_only_linear(x, weight)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 5]].isfinite().all()


def test_counters_are_zero_again_after_every_call() -> None:
    weight, x = make_weight(("int4", 128, False), 70, 1024, torch.float16), make_x(3, 1024, torch.float16)
    assert split_k(70, 1024) == 4
    first = weight_only_linear(x, weight)
    assert not gpu_gemm._counters(x.device).any()
    assert torch.equal(weight_only_linear(x, weight), first)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_many_rows_equal_the_reference(kind: tuple[str, int | None, bool]) -> None:
    dtype = torch.bfloat16 if kind[1] == 32 else torch.float16
    in_features = 256 if sizes_of(kind) == "packed" else 250
    weight, bias = make_weight(kind, 150, in_features, dtype), torch.randn(150).to(dtype)
    x = make_x(131, in_features, dtype)
    # the weight itself is rounded too
    assert is_right(weight_only_linear(x, weight, bias), x, weight, bias, roundings=2)


def test_many_row_tiles_are_taken_in_bands() -> None:
    weight, x = make_weight(("int8", None, False), 300, 64, torch.float16), make_x(128 * 9 + 5, 64, torch.float16)
    assert is_right(weight_only_linear(x, weight), x, weight, None, roundings=2)


@pytest.mark.parametrize("num_rows", [3, 80])
@pytest.mark.parametrize("kind", [("plain", None, False), ("int4", 128, False)], ids=["plain", "int4"])
def test_float32_results_arent_rounded(kind: tuple[str, int | None, bool], num_rows: int) -> None:
    weight, x = make_weight(kind, 70, 256, torch.float16), make_x(num_rows, 256, torch.float16)
    y = weight_only_linear(x, weight, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    # above the decode kernel the scaled weight is rounded
    assert is_right(y, x, weight, None, roundings=1 if num_rows == 3 or kind[0] == "plain" else 400)


def test_unaligned_row_pairs_are_moved_first() -> None:
    weight, x = make_weight(("int4", 128, False), 33, 256, torch.float16), make_x(4, 256, torch.float16, gap=23)
    assert is_right(weight_only_linear(x, weight), x, weight, None)


def test_scales_may_lie_in_any_order() -> None:
    made, x = quantize(torch.randn(33, 512), "int4", 32, has_zeros=True), make_x(4, 512, torch.float16)
    assert made.zeros is not None
    other = QuantizedWeight("int4", made.codes, made.scales.contiguous(), made.zeros.contiguous(), 32, 512, 33)
    assert torch.equal(weight_only_linear(x, other), weight_only_linear(x, made))


def test_no_rows_give_no_rows() -> None:
    weight = make_weight(("int8", None, False), 33, 64, torch.float16)
    assert weight_only_linear(make_x(0, 64, torch.float16), weight).shape == (0, 33)


def test_disagreeing_tensors_are_refused() -> None:
    weight, x = make_weight(("int8", None, False), 33, 64, torch.float16), make_x(4, 64, torch.float16)
    for bad in (x[:, 1:], x.float(), x[:, :1].expand(4, 64), x[0]):
        with pytest.raises(TensorMismatch, match="this linear takes"):
            weight_only_linear(bad, weight)
    with pytest.raises(TensorMismatch, match="the bias is"):
        weight_only_linear(x, weight, torch.zeros(32, dtype=torch.float16))
    by_group = make_weight(("int4", 32, True), 33, 64, torch.float16)
    assert by_group.zeros is not None
    with pytest.raises(TensorMismatch, match="zeros are float32"):
        weight_only_linear(x, replace(by_group, zeros=by_group.zeros.float()))
    with pytest.raises(TensorMismatch, match="contiguous matrix of"):
        weight_only_linear(x, torch.zeros(33, 64, dtype=torch.bfloat16))
    with pytest.raises(TensorMismatch, match="or float32"):
        weight_only_linear(x, weight, out_dtype=torch.bfloat16)
