"""Adapters that a running engine can never hold, found by their shape."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from loraserve.adapters.ir import AdapterIR, ModuleIR
from loraserve.errors import AdapterUnsupported
from loraserve.planning.adapters import DeviceFit
from loraserve.types import BaseSpec, EngineStats


@pytest.fixture
def base(make: Any) -> BaseSpec:
    return msgspec.structs.replace(make.base().spec, device="cpu")


def make_ir(base: BaseSpec, rank: int, **fields: Any) -> AdapterIR:
    out_features, in_features = base.modules["q_proj"]
    module = ModuleIR(
        layer=0,
        module="q_proj",
        rank=rank,
        scaling=1.0,
        lora_a=np.zeros((rank, in_features), np.float32),
        lora_b=np.zeros((out_features, rank), np.float32),
        **fields,
    )
    return AdapterIR(modules=(module,), dtype="F32")


def check(
    ir: AdapterIR, base: BaseSpec, budget_bytes: int, dtype: str = "auto", *, has_one_process: bool = True
) -> None:
    stats = EngineStats(device_adapter_budget_bytes=budget_bytes)
    DeviceFit(lambda: stats, dtype, has_one_process).check(ir, base)


def test_adapter_is_refused_over_budget(base: BaseSpec) -> None:
    ir = make_ir(base, 8)
    out_features, in_features = base.modules["q_proj"]
    num_bytes = 4 * 8 * (in_features + out_features)
    with pytest.raises(AdapterUnsupported, match=r"needs [0-9,]+ bytes on the device; the memory for adapters has"):
        check(ir, base, num_bytes - 1)
    check(ir, base, num_bytes + 4096)
    # in bytes it takes less
    check(ir, base, num_bytes // 2, "int8")


def test_adapter_with_inconclusive_shape_is_left_to_load(base: BaseSpec) -> None:
    ir = make_ir(base, 8)
    check(ir, base, 0)
    check(ir, base, 1, has_one_process=False)
    check(ir, msgspec.structs.replace(base, device="cuda"), 1)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_doubt_covers_every_refusal(base: BaseSpec, rank: int) -> None:
    modules = tuple(base.modules)
    irs = [make_ir(base, rank), make_ir(base, rank, magnitude=np.zeros(4, np.float32))]
    for budget_bytes in range(256, 1 << 20, 4099):
        fit = DeviceFit(lambda budget=budget_bytes: EngineStats(device_adapter_budget_bytes=budget), "auto", True)
        if fit.may_exceed(base, rank=rank, modules=modules, stored="F32", size_bytes=1000):
            continue
        for ir in irs:
            fit.check(ir, base)


def test_no_doubt_where_adapter_is_small(base: BaseSpec) -> None:
    def doubts(budget_bytes: int, *, rank: int = 8, has_one_process: bool = True) -> bool:
        stats = EngineStats(device_adapter_budget_bytes=budget_bytes)
        fit = DeviceFit(lambda: stats, "auto", has_one_process)
        return fit.may_exceed(base, rank=rank, modules=("q_proj",), stored="F32", size_bytes=1000)

    assert (doubts(1 << 30), doubts(4096), doubts(0), doubts(1, has_one_process=False)) == (False, True, False, False)
