"""Bounds of a thread's registers, by the GPU that kernels are compiled for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import triton

from loraserve_kernels.gpu import device


@pytest.mark.parametrize(("num_warps", "num_programs", "most"), [(4, 4, 128), (4, 3, 168), (4, 2, 248), (8, 1, 248)])
def test_registers_leave_room_for_programs(num_warps: int, num_programs: int, most: int) -> None:
    assert device.registers(num_warps, num_programs) == most
    assert most * 32 * num_warps * num_programs <= 65536


class NoDriver:
    @property
    def active(self) -> SimpleNamespace:
        raise RuntimeError("0 active drivers")


def test_bound_is_hoppers_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime, "driver", NoDriver())
    device.is_hopper.cache_clear()
    try:
        assert device.roomy(128, 248) == 128
    finally:
        device.is_hopper.cache_clear()


@pytest.mark.parametrize(("arch", "bound"), [(90, 128), (80, 248), (100, 248), ("gfx942", 248)])
def test_bound_is_hoppers_on_hopper_alone(arch: int | str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=arch))
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=target))
    device.is_hopper.cache_clear()
    try:
        assert device.roomy(128, 248) == bound
    finally:
        device.is_hopper.cache_clear()
