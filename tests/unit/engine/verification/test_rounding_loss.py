"""What rounding a base costs an adapter, from logits alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loraserve.engine.verification.rounding_loss import MIN_EFFECT_KEPT, RoundingLoss, add_loss, measure
from loraserve.types import Certificate

GENERATOR = torch.Generator().manual_seed(0)


def logits(scale: float = 1.0) -> list[torch.Tensor]:
    return [scale * torch.randn(count, 50, generator=GENERATOR) for count in (12, 5)]


def plus(*parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [sum(rows[1:], rows[0]) for rows in zip(*parts, strict=True)]


BASE, EFFECT = logits(2.0), logits(3.0)
ADAPTED = plus(BASE, EFFECT)


def test_identical_logits_have_zero_loss() -> None:
    found = measure(BASE, ADAPTED, BASE, ADAPTED)
    assert found == RoundingLoss(1.0, 0.0, 1.0, 0.0, 1.0, 17)


def test_adapter_without_changes_has_no_effect() -> None:
    assert measure(BASE, BASE, BASE, BASE).effect_kept is None


def test_lost_effect_is_measured_as_zero() -> None:
    found = measure(BASE, BASE, BASE, ADAPTED)
    assert found.effect_kept == pytest.approx(0.0, abs=1e-6)
    assert found.divergence > 1
    assert found.base_divergence == 0


def test_half_of_effect_is_kept_as_half() -> None:
    half = plus(BASE, [rows / 2 for rows in EFFECT])
    assert measure(BASE, half, BASE, ADAPTED).effect_kept == pytest.approx(0.5, abs=1e-6)


def test_loss_of_base_alone_is_not_adapters() -> None:
    noise = logits(1.0)
    found = measure(plus(BASE, noise), plus(ADAPTED, noise), BASE, ADAPTED)
    assert found.effect_kept == pytest.approx(1.0, abs=1e-6)
    assert found.base_divergence > 0.1
    assert found.base_agreement < 1


def test_constant_added_to_logits_loses_no_effect() -> None:
    moved = [rows + 7 for rows in ADAPTED]
    assert measure(BASE, moved, BASE, ADAPTED).effect_kept == pytest.approx(1.0, abs=1e-6)


def test_likely_tokens_weigh_more() -> None:
    kept = []
    for token in (torch.argmin, torch.argmax):
        moved = [
            rows.scatter_add(1, token(rows, 1, keepdim=True), rows.new_full((len(rows), 1), -5)) for rows in ADAPTED
        ]
        kept.append(measure(BASE, moved, BASE, ADAPTED).effect_kept)
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[0] > 0.95 > 0.7 > kept[1]


CERTIFICATE = Certificate(
    verdict="passed",
    max_difference=0.0,
    mean_difference=0.0,
    base_difference=0.0,
    tolerance=1.0,
    max_effect=1.0,
    top1_agreement=1.0,
    precision_loss=0.0,
    num_probe_tokens=30,
    seconds=1.0,
)
LOSS = RoundingLoss(MIN_EFFECT_KEPT, 0.2, 0.9, 0.1, 0.95, 60)


def test_verdict_is_degraded_below_bound() -> None:
    assert add_loss(CERTIFICATE, LOSS).verdict == "passed"
    assert add_loss(CERTIFICATE, dataclasses.replace(LOSS, effect_kept=None)).verdict == "passed"
    for kept in (MIN_EFFECT_KEPT - 0.01, -0.3, float("nan")):
        found = add_loss(CERTIFICATE, dataclasses.replace(LOSS, effect_kept=kept))
        assert (found.verdict, found.num_answer_tokens) == ("degraded", 60)
        assert "of the adapter's effect" in found.reason
    assert "leaves 0%" in add_loss(CERTIFICATE, dataclasses.replace(LOSS, effect_kept=-0.3)).reason
