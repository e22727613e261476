from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraserve.model.quantize import Linear, make_linear

FORMATS = {
    "float32": ("none", torch.float32, 1e-6),
    "bfloat16": ("none", torch.bfloat16, 1e-2),
    "float16": ("none", torch.float16, 1e-3),
    "int8": ("int8", torch.float32, 2e-2),
}
EXACT_BY_ROW = ["float32", "float16", "int8"]


def make(
    name: str, *, out_features: int = 70, in_features: int = 52, bias: bool = False
) -> tuple[Linear, Tensor, Tensor | None]:
    quantize, dtype, _ = FORMATS[name]
    weight = torch.randn(out_features, in_features)
    b = torch.randn(out_features) if bias else None
    return make_linear(weight, b, quantize=quantize, dtype=dtype), weight, b


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("name", FORMATS)
def test_linear_is_as_near_to_the_exact_product_as_its_format_allows(name: str, num_tokens: int, bias: bool) -> None:
    torch.manual_seed(num_tokens)
    linear, weight, b = make(name, bias=bias)
    x = torch.randn(num_tokens, 52)
    y = linear(x)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert y.dtype == torch.float32
    assert y.is_contiguous()
    error = (y - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < FORMATS[name][2]


@pytest.mark.parametrize(("out_features", "in_features"), [(70, 52), (128, 64), (96, 2048)])
@pytest.mark.parametrize("name", EXACT_BY_ROW)
def test_row_has_the_same_bits_whatever_shares_its_batch(name: str, out_features: int, in_features: int) -> None:
    torch.manual_seed(0)
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
    x = torch.randn(1, 52)
    first = linear(x)
    kept = first.clone()
    first.fill_(7)
    assert torch.equal(linear(x), kept)


@pytest.mark.parametrize("name", FORMATS)
def test_weight_that_was_given_is_not_kept(name: str) -> None:
    linear, weight, _ = make(name)
    x = torch.randn(3, 52)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)


def test_num_bytes_follow_the_format() -> None:
    sizes = {name: make(name)[0].num_bytes for name in FORMATS}
    assert sizes["float32"] == 4 * 70 * 52
    assert sizes["bfloat16"] == sizes["float16"] == 2 * 70 * 52
    assert 70 * 52 <= sizes["int8"] <= 70 * 52 + 8 * 70
