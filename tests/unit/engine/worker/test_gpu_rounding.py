"""Cost of rounding a base on a GPU, its kernels in Triton's interpreter."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("triton")

from loraserve.engine.worker import rounding
from loraserve.engine.worker.rounding import measure

from .test_rounding import CONFIG

pytestmark = pytest.mark.interpreted


@pytest.mark.campaign
def test_gpu_rounds_activations_to_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "NUM_POSITIONS", 20)
    config = msgspec.structs.replace(CONFIG, quantize="int8", activation_dtype="float")
    cpu = measure(config)
    found = measure(msgspec.structs.replace(config, device="cuda", dtype="float16", activation_dtype="auto"))
    assert (found.arithmetic, found.device, found.num_positions) == ("w8a16", "cuda", 20)
    assert found.weights.mean_difference == pytest.approx(cpu.weights.mean_difference, abs=1e-4)
    assert cpu.activations.max_difference < 1e-4 < found.activations.max_difference < 0.05
