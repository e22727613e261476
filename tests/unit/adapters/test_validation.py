"""Weights that aren't finite, or too large to serve, are refused with their place."""

from __future__ import annotations

import numpy as np
import pytest

from loraserve.adapters.ir import AdapterIR, ModuleIR, NormIR, TensorView
from loraserve.adapters.validation import check_finite
from loraserve.errors import AdapterNotFinite

BF16_ONE, BF16_NAN, BF16_INF, BF16_MAX = 0x3F80, 0x7FC1, 0xFF80, 0x7F7F


def adapter(a: np.ndarray, dtype: str = "F32", scaling: float = 1.0) -> AdapterIR:
    b = np.full((3, a.shape[0]), BF16_ONE, np.uint16) if dtype == "BF16" else np.ones((3, a.shape[0]), a.dtype)
    return AdapterIR(
        (ModuleIR(5, "q_proj", a.shape[0], scaling, TensorView(dtype, a.shape, a), TensorView(dtype, b.shape, b)),),
        dtype,
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_nan_and_infinity_are_refused_with_position(bad: float, dtype: str, numpy_dtype: type) -> None:
    a = np.zeros((2, 4), numpy_dtype)
    a[1, 2] = bad
    with pytest.raises(AdapterNotFinite, match=r"q_proj.lora_A in layer 5 has 1 of 8 weights .* first at \[1, 2\]"):
        check_finite(adapter(a, dtype))


@pytest.mark.parametrize("bad", [BF16_NAN, BF16_INF])
def test_bfloat16_is_checked_by_bits(bad: int) -> None:
    a = np.full((2, 4), BF16_ONE, np.uint16)
    check_finite(adapter(a, "BF16"))
    a[0, 3] = bad
    with pytest.raises(AdapterNotFinite, match=r"first at \[0, 3\]"):
        check_finite(adapter(a, "BF16"))


def test_update_too_large_for_half_precision_is_refused() -> None:
    with pytest.raises(AdapterNotFinite, match="may reach 2e\\+08"):
        check_finite(adapter(np.full((2, 4), 1e4, np.float32), scaling=1e4))
    with pytest.raises(AdapterNotFinite, match="may reach"):
        check_finite(adapter(np.full((1, 4), BF16_MAX, np.uint16), "BF16"))
    check_finite(adapter(np.full((2, 4), 100, np.float32), scaling=2.0))
    check_finite(adapter(np.full((2, 4), 100, np.float16), "F16", scaling=-2.0))


def test_subnormal_and_zero_weights_are_fine() -> None:
    check_finite(adapter(np.array([[0.0, -0.0, 1e-45]], np.float32)))


def test_non_finite_magnitude_is_named() -> None:
    plain = adapter(np.ones((2, 4), np.float32)).modules[0]
    magnitude = TensorView("F32", (3,), np.array([1, 1, np.nan], np.float32))
    module = ModuleIR(0, "embed_tokens", 2, 1.0, plain.lora_a, plain.lora_b, magnitude)
    expected = r"embed_tokens.lora_magnitude_vector has 1 of 3 weights .* first at \[2\]"
    with pytest.raises(AdapterNotFinite, match=expected):
        check_finite(AdapterIR((module,), "F32"))


def vector(*values: float) -> TensorView:
    return TensorView("F32", (len(values),), np.array(values, np.float32))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ModuleIR(3, "q_proj", bias=vector(1, np.inf)), r"q_proj\.bias in layer 3"),
        (ModuleIR(3, "q_proj", lora_bias=vector(1, np.nan)), r"q_proj\.lora_B\.bias in layer 3"),
        (ModuleIR(3, "q_proj", output_scale=vector(1, np.nan)), r"q_proj\.ia3_l in layer 3"),
        (ModuleIR(0, "lm_head", weight=vector(1, np.nan)), r"lm_head\.weight"),
        (
            ModuleIR(0, "embed_tokens", token_ids=(1,), token_rows=vector(1, np.nan)),
            r"embed_tokens\.token_adapter\.trainable_tokens_delta",
        ),
        (ModuleIR(0, "embed_tokens", lora_a=vector(1, np.nan)), r"embed_tokens\.lora_embedding_A"),
        (NormIR(2, "mlp_norm", vector(1, np.nan)), r"The weight of mlp_norm in layer 2"),
        (NormIR(0, "norm", vector(1, np.nan)), r"The weight of norm"),
    ],
    ids=lambda v: v.replace("\\", "") if isinstance(v, str) else "",
)
def test_each_tensor_is_named_as_in_peft_files(module: ModuleIR | NormIR, name: str) -> None:
    ir = AdapterIR((), "F32", norms=(module,)) if isinstance(module, NormIR) else AdapterIR((module,), "F32")
    with pytest.raises(
        AdapterNotFinite, match=name + r" has 1 of 2 weights that are NaN or infinite, the first at \[1\]"
    ):
        check_finite(ir)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ModuleIR(3, "q_proj", bias=vector(-7e4)), "q_proj.bias in layer 3 reaches 7e"),
        (ModuleIR(3, "q_proj", scaling=-1e3, lora_bias=vector(70)), "q_proj.lora_B.bias in layer 3 reaches 7e"),
        (ModuleIR(0, "lm_head", weight=vector(7e4)), "lm_head.weight reaches"),
        (NormIR(0, "norm", vector(7e4)), "The weight of norm reaches"),
    ],
)
def test_half_precision_overflow_is_refused_in_every_tensor(module: ModuleIR | NormIR, name: str) -> None:
    def ir(m: ModuleIR | NormIR) -> AdapterIR:
        return AdapterIR((), "F32", norms=(m,)) if isinstance(m, NormIR) else AdapterIR((m,), "F32")

    with pytest.raises(AdapterNotFinite, match=name):
        check_finite(ir(module))
    check_finite(ir(ModuleIR(3, "q_proj", scaling=1e3, lora_bias=vector(60))))
