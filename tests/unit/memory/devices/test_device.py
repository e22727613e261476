"""What a device has room for is counted in every dimension,
and what its dtype can't hold is refused by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraserve.errors import AdapterUnavailable, ConfigError, InvariantViolation
from loraserve.memory.devices.base import Footprint, refuse_out_of_range
from loraserve.memory.devices.copies import DirectCopies
from loraserve.memory.devices.cpu import CpuDevice, cpu_adapter_dtype
from loraserve.memory.devices.gpu import GpuDevice
from loraserve_kernels.cpu.lora.layout import LoraModule


@pytest.mark.parametrize("over", [Footprint(11, 5, 1), Footprint(10, 6, 1), Footprint(10, 5, 2)], ids=str)
def test_footprint_over_single_limit_does_not_fit(over: Footprint) -> None:
    limits = Footprint(10, 5, 1)
    assert limits.fits(limits)
    assert not over.fits(limits)
    assert over.excess(limits).split()[0] in ("11", "6", "2")


def test_predicted_footprint_equals_packed_footprint(make: Any) -> None:
    modules = make.modules(5, names=("q_proj", "down_proj"))
    # its matrices fill their pages to the last byte
    with_delta = LoraModule(1, "q_proj", torch.ones(4, 32), torch.ones(32, 4), 1.0, dora_delta=torch.ones(32))
    for device in (CpuDevice(make.base, 1 << 20), GpuDevice(make.base, make.pool(), DirectCopies())):
        for some in (modules, [with_delta]):
            assert device.footprint(some, torch.float32) == device.footprint_of(device.pack(some, torch.float32))


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_weight_beyond_dtype_range_is_refused_by_name(make: Any, side: str) -> None:
    modules = make.modules(2, names=("q_proj", "v_proj"))
    matrix = modules[3].lora_a if side == "lora_A" else modules[3].lora_b
    matrix[1, 1] = -7e4
    with pytest.raises(
        AdapterUnavailable, match=rf"Layer 1 v_proj\.{side} has a weight of size 7e\+04.*fp16"
    ) as caught:
        refuse_out_of_range(modules, torch.float32, torch.float16)
    assert "bf16" in (caught.value.hint or "")
    refuse_out_of_range(modules, torch.float32, torch.bfloat16)
    matrix[1, 1] = 65519.0
    refuse_out_of_range(modules, torch.float32, torch.float16)


def test_adapter_packed_for_other_device_is_refused(make: Any) -> None:
    cpu, gpu = CpuDevice(make.base, 1 << 20), GpuDevice(make.base, make.pool(), DirectCopies())
    modules = make.modules()
    with pytest.raises(InvariantViolation, match="another device"):
        gpu.place(cpu.pack(modules, torch.float32))
    with pytest.raises(InvariantViolation, match="another device"):
        cpu.place(gpu.pack(modules, torch.float32))


def test_cpu_holds_adapters_in_configured_or_stored_dtype(make: Any) -> None:
    assert [cpu_adapter_dtype(name) for name in ("auto", "fp32", "int8")] == [None, torch.float32, torch.int8]
    assert CpuDevice(make.base, 1, cpu_adapter_dtype("bf16")).held_dtype(torch.float32) is torch.bfloat16
    assert CpuDevice(make.base, 1, cpu_adapter_dtype("auto")).held_dtype(torch.float16) is torch.float16
    with pytest.raises(ConfigError, match="expected one of auto, fp32, bf16, fp16, int8"):
        cpu_adapter_dtype("fp8")
