"""Words of the doctor on rounding; the measurement itself is the engine's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loraserve.config import EngineConfig
from loraserve.doctor import precision
from loraserve.limits import GIB
from loraserve.types import Digest, Rounding, RoundingCost

NOTHING = Rounding(top1_agreement=1.0, mean_difference=0.0, max_difference=0.0, mean_divergence=0.0)
SOME = Rounding(top1_agreement=0.95, mean_difference=0.02, max_difference=0.3, mean_divergence=0.004)
MUCH = Rounding(top1_agreement=0.8, mean_difference=0.6, max_difference=3.0, mean_divergence=0.2)


def cost(**fields: object) -> RoundingCost:
    one = RoundingCost(
        base_id="base",
        base_digest=Digest("b" * 64),
        dtype="float32",
        quantization="int8",
        arithmetic="w8a8-row",
        kernels="onednn-u8",
        instructions="avx512_core_vnni",
        device="cpu",
        num_positions=256,
        weights=SOME,
        activations=SOME,
        total=SOME,
        loss=3.0,
        served_loss=3.01,
        seconds=1.0,
    )
    return msgspec.structs.replace(one, **fields)


def test_small_loss_is_reported_by_cause() -> None:
    checks = {check.name: check for check in precision.check(cost(weights=NOTHING))}
    assert {check.status for check in checks.values()} == {"ok"}
    total = checks["precision"].found
    assert "w8a8-row (onednn-u8, avx512_core_vnni) on cpu" in total
    assert "the same likeliest token at 95.0%" in total
    assert "off by 0.02 on average and 0.3 at most" in total
    assert "256 positions" in total
    assert "100.0%" in checks["precision_weights"].found
    assert "95.0%" in checks["precision_activations"].found


@pytest.mark.parametrize(
    ("weights", "activations", "advice"),
    [(MUCH, SOME, "--quantize none"), (NOTHING, MUCH, "--activation-dtype float")],
    ids=["weights", "activations"],
)
def test_large_loss_is_warning_with_cheaper_settings(weights: Rounding, activations: Rounding, advice: str) -> None:
    found = next(iter(precision.check(cost(weights=weights, activations=activations, total=MUCH))))
    assert (found.name, found.status) == ("precision", "warn")
    assert advice in found.next


def test_base_exceeding_free_memory_is_not_loaded() -> None:
    (found,) = precision.room(10 * GIB, "cpu", 11 * GIB)
    assert (found.name, found.status) == ("precision", "fail")
    assert "11.0 GiB of memory available" in found.found
    assert "12.0 GiB" in found.expected
    assert list(precision.room(10 * GIB, "cpu", 13 * GIB)) == []
    assert list(precision.room(10 * GIB, "cpu", None)) == []
    assert list(precision.room(10 * GIB, "cuda", GIB)) == []


def test_base_problem_is_reported_in_loader_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"the base can't be measured: .*config\.json"):
        precision.measure(EngineConfig(model_dir=str(tmp_path), model_id="base", store_url=""))


def test_measurement_without_result_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_MODULE", "loraserve.nothing")
    with pytest.raises(OSError, match="No module named"):
        precision.measure(EngineConfig(model_dir="/", model_id="base", store_url=""))


def test_endless_measurement_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "TIMEOUT_S", 0.01)
    with pytest.raises(OSError, match="took longer than"):
        precision.measure(EngineConfig(model_dir="/", model_id="base", store_url=""))
