"""What adapters are probed with, and when their answers are far enough from what they should be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from loraserve.adapters.ir import AdapterIR, ModuleIR, TensorView
from loraserve.engine.probe import NUM_DECODED
from loraserve.engine.verification.comparison import Answers, Noise, judge, probe_sequences, spread_of
from loraserve.model.reference_pass import Evaluation, invocation_start
from loraserve.types import BaseSpec, Certificate


def adapter(*token_ids: int, invocation: tuple[int, ...] = ()) -> AdapterIR:
    rows = TensorView("F32", (len(token_ids), 8), np.zeros((len(token_ids), 8), np.float32))
    module = ModuleIR(0, "embed_tokens", token_ids=token_ids, token_rows=rows)
    return AdapterIR((module,), "F32", invocation_token_ids=invocation)


def test_probes_are_deterministic_and_within_vocabulary(small_base: BaseSpec) -> None:
    first, second = probe_sequences(small_base, [adapter()])
    assert [first, second] == probe_sequences(small_base, [adapter()])
    assert len(first) != len(second)
    assert len(set(first)) > 5
    assert max(*first, *second) < small_base.vocab_size


def test_probes_contain_tokens_with_trained_rows(small_base: BaseSpec) -> None:
    sequences = probe_sequences(small_base, [adapter(2, 30, 31)])
    assert all({2, 30, 31} <= set(sequence) for sequence in sequences)


@pytest.mark.parametrize("size", [1, 3, 20])
def test_probes_invoke_activated_adapter_before_answers(size: int, small_base: BaseSpec) -> None:
    base = msgspec.structs.replace(small_base, vocab_size=1000)
    invocation = tuple(range(900, 900 + size))
    for sequence in probe_sequences(base, [adapter(invocation=invocation)]):
        prompt = sequence[:-NUM_DECODED]
        assert 0 < (invocation_start(prompt, invocation) or 0) < len(prompt)
        assert not set(invocation) & set(sequence[-NUM_DECODED:])


def test_probes_fit_a_short_model(small_base: BaseSpec) -> None:
    base = msgspec.structs.replace(small_base, max_model_len=5)
    assert [len(sequence) for sequence in probe_sequences(base, [adapter(1, 2)])] == [4, 4]


BASE = torch.randn(12, 100, generator=torch.Generator().manual_seed(0))
EFFECT = 0.5 * torch.randn(12, 100, generator=torch.Generator().manual_seed(1))
# a base that rounds activations
INT8 = {"is_quantized": True, "spread": Noise(0.05, 0.02, 0.02)}
NOISE = torch.randn(12, 100, generator=torch.Generator().manual_seed(2))


def judged(base: torch.Tensor, adapted: torch.Tensor, effect: torch.Tensor = EFFECT, **options: object) -> Certificate:
    settings = {"dtype": "float32", "precision_loss": 0.0, "seconds": 0.0, **options}
    reference = Evaluation((BASE,), (BASE + effect,))
    return judge(Answers([base], [[BASE + effect], [adapted]]), reference, **settings)  # type: ignore[arg-type]


def test_single_differing_round_fails() -> None:
    assert judged(BASE, BASE + EFFECT).verdict == "passed"
    found = judged(BASE, BASE + 1.01 * EFFECT)
    assert found.verdict == "failed"
    assert found.max_difference > found.tolerance


def test_single_differing_token_fails() -> None:
    adapted = BASE + EFFECT
    adapted[7] -= 0.0013 * EFFECT[7]
    found = judged(BASE, adapted)
    assert "probe token 7" in found.reason


def test_bounds_are_as_wide_as_the_base_rounds() -> None:
    noisy = BASE + 0.02 * NOISE
    assert judged(noisy, BASE + EFFECT + 0.03 * NOISE.flip(0), **INT8).verdict == "passed"
    assert judged(BASE, BASE + EFFECT + 0.03 * NOISE.flip(0), is_quantized=True).verdict == "failed"
    assert judged(noisy, BASE + EFFECT + 0.2 * NOISE.flip(0), **INT8).verdict == "failed"


def test_rounded_weights_alone_widen_no_bound() -> None:
    found = judged(BASE + 0.02 * NOISE, BASE + EFFECT, is_quantized=True)
    assert found.verdict == "not_possible"
    assert "differ from those of its weights in float32 by 0.0" in found.reason
    assert judged(BASE + 1e-4 * NOISE, BASE + EFFECT, is_quantized=True).verdict == "passed"


def test_spread_equals_change_by_nudge() -> None:
    assert spread_of(Evaluation((BASE,), (BASE,))) == Noise()
    nudged = Evaluation((BASE, BASE), (BASE, BASE), nudged=(BASE + 0.1, BASE - 0.1))
    found = spread_of(nudged)
    assert (found.largest, found.rms, found.token_rms) == pytest.approx((0.1, 0.1, 0.1), rel=1e-4)


def test_effect_smaller_than_rounding_is_judged_by_size() -> None:
    noisy, effect = BASE + 0.02 * NOISE, 0.02 * EFFECT
    assert judged(noisy, noisy + effect, effect, **INT8).verdict == "passed"
    assert "0.5 times the reference's" in judged(noisy, noisy + 0.5 * effect, effect, **INT8).reason


def test_noise_of_reference_makes_no_effect_too_small() -> None:
    noisy, effect = BASE + 0.02 * NOISE, 0.02 * EFFECT
    found, reference = effect + 0.02 * NOISE.flip(0), effect + 0.02 * NOISE.flip(1)
    assert judged(noisy, noisy + found, reference, **INT8).verdict == "passed"
    for multiple in (-1, 0, 0.5, 3):
        wrong = judged(noisy, noisy + multiple * reference, reference, **INT8)
        assert f"{multiple} times the reference's" in wrong.reason
    # a base without rounding has none
    assert judged(BASE, BASE + found, reference).verdict == "failed"


def test_precision_allowed_by_operator_passes() -> None:
    adapted = BASE + EFFECT * (1 + 0.05 * NOISE)
    assert judged(BASE, adapted).verdict == "failed"
    assert judged(BASE, adapted, precision_loss=0.02).verdict == "passed"


def test_non_finite_evaluation_fails() -> None:
    assert judged(BASE, BASE, EFFECT * torch.inf).verdict == "failed"


@pytest.mark.parametrize("wrong", [BASE.flip(0), BASE * torch.nan], ids=["another", "NaN"])
def test_wrong_base_gives_no_verdict(wrong: torch.Tensor) -> None:
    for options in ({}, INT8, {"dtype": "bfloat16"}):
        found = judged(wrong, BASE + EFFECT, **options)
        assert found.verdict == "not_possible"
        assert "the base itself isn't computed as it should be" in found.reason
