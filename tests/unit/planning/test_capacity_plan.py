"""A whole plan: how many adapters fit beside what, how long loads take, and what is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraserve.errors import StorageError
from loraserve.limits import MIB
from loraserve.planning import machine
from loraserve.planning.adapters import AdapterPlan
from loraserve.planning.capacity_plan import LINK_BYTES_PER_S, CapacityPlan, make_plan
from loraserve.planning.machine import disk_rate
from loraserve.planning.memory import StepPlan

STEP = StepPlan(1000, 500, 2000)


def adapter(count: int, num_pages: int, *, file_bytes: int = 1000, **fields: Any) -> AdapterPlan:
    values = {"held": "bf16", "packed_bytes": num_pages * 4096, "num_tiles": 0, **fields}
    return AdapterPlan("some", count, file_bytes, num_pages=num_pages, **values)


def plan_of(
    make: Any, *adapters: AdapterPlan, num_pages: int = 100, device: str = "cpu", **options: Any
) -> CapacityPlan:
    config = make.config(max_num_seqs=4, host_cache_bytes=options.pop("host_cache_bytes", 100 * 4096))
    arena = make.arena(num_pages, sequence_blocks=8)
    return make_plan(make.base(device), STEP, arena, config, adapters, **options)


def codes(plan: CapacityPlan) -> list[str]:
    return [notice.code for notice in plan.notices]


def test_adapters_of_mean_size_fit_beside_sequences(make: Any) -> None:
    plan = plan_of(make, adapter(10, 5), adapter(10, 15), running=[(2, 64)])
    assert [(f.num_sequences, f.num_tokens, f.num_adapters) for f in plan.fits] == [
        (1, 128, 9),
        (2, 64, 9),
        (4, 128, 6),
    ]
    assert plan.fits[2].adapter_bytes == 68 * 4096


def test_sequences_exceeding_memory_have_no_adapter_count(make: Any) -> None:
    plan = plan_of(make, adapter(1, 1), num_pages=20)
    assert [(f.num_sequences, f.adapter_bytes, f.num_adapters) for f in plan.fits] == [
        (1, 12 * 4096, 1),
        (4, None, None),
    ]
    assert "kv_below_max_num_seqs" in codes(plan)


def test_adapters_fitting_with_all_sequences_raise_no_warning(make: Any) -> None:
    assert codes(plan_of(make, adapter(10, 6))) == []
    assert codes(plan_of(make, adapter(10, 7))) == ["adapters_yield_to_kv"]
    assert codes(plan_of(make, adapter(10, 10))) == ["adapters_take_turns"]


def test_adapters_beyond_host_memory_come_from_disk(make: Any) -> None:
    assert codes(plan_of(make, adapter(20, 10))) == ["adapters_take_turns", "adapters_exceed_host"]
    assert codes(plan_of(make, adapter(19, 10))) == ["adapters_take_turns"]
    # what is on a GPU may have its copy in the host's memory
    assert "adapters_exceed_host" in codes(plan_of(make, adapter(19, 10), device="cuda"))


def test_gpu_tables_may_fill_before_pages(make: Any) -> None:
    plan = plan_of(make, adapter(50, 1, num_tiles=30), device="cuda")
    assert plan.fits[0].num_adapters == 1000 // 30


def test_load_time_includes_reading_hashing_and_gpu_copy(make: Any) -> None:
    parts = (adapter(1, 10, file_bytes=1000), adapter(3, 10, file_bytes=3000))
    loads = plan_of(make, *parts, disk_bytes_per_s=1e6).loads
    assert loads is not None
    assert (loads.disk_s, loads.largest_disk_s, loads.host_s) == (0.0025, 0.003, 0.0)
    # of two loaders
    assert loads.max_loads_per_s == pytest.approx(800)
    on_gpu = plan_of(make, *parts, disk_bytes_per_s=1e6, device="cuda").loads
    assert on_gpu is not None
    assert on_gpu.host_s == pytest.approx(40960 / LINK_BYTES_PER_S)


def test_refused_adapter_refuses_plan_and_is_not_counted(make: Any) -> None:
    large = adapter(1, 93, refusal="It takes too much.")
    odd = adapter(1, 0, held=None, refusal="It is odd.")
    plan = plan_of(make, adapter(1, 1), large, odd)
    assert plan.is_refused
    assert codes(plan)[:2] == ["adapter_too_large", "adapter_unservable"]
    facts = plan.as_dict()["adapters"]
    assert (facts["count"], facts["num_served"], facts["num_refused"], facts["total_bytes"]) == (3, 1, 2, 4096)


def test_kv_gets_remaining_memory_or_single_sequence(make: Any) -> None:
    def beside_all(count: int) -> int:
        return int(plan_of(make, adapter(count, 10)).as_dict()["kv"]["tokens_beside_all_adapters"])

    assert (beside_all(1), beside_all(9), beside_all(10), beside_all(99)) == (90 * 16, 10 * 16, 8 * 16, 8 * 16)


def test_more_than_the_machine_has_is_warned_of(make: Any) -> None:
    # base, step, budget, host cache, and two loads of three times what adapters may take
    needed = (1 << 20) + 2000 + 100 * 4096 + 100 * 4096 + 2 * 3 * 92 * 4096
    assert codes(plan_of(make, available_bytes=needed)) == []
    assert codes(plan_of(make, available_bytes=needed - 1)) == ["memory_overcommitted"]


def test_a_plan_is_json(make: Any) -> None:
    plan = plan_of(make, adapter(2, 3, is_upper_bound=True), disk_bytes_per_s=1e6, device="cuda")
    facts = json.loads(json.dumps(plan.as_dict()))
    assert facts["kv"]["bytes_per_sequence"] == 8 * 4096
    assert [notice["code"] for notice in facts["notices"]] == ["adapter_is_bounded", "gpu_is_estimated"]
    assert not facts["is_refused"]


def test_disk_measurement_leaves_no_files(tmp_path: Path) -> None:
    assert disk_rate(tmp_path, 2 * MIB) > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="can't be written"):
        disk_rate(tmp_path / "absent")


def test_machine_reports_available_and_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (machine.available_memory() or 0) > MIB
    assert machine.nearest_folder(tmp_path / "not" / "there") == tmp_path
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81559\necho 40000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpu_memory() == 81559 * MIB
    program.write_text("#!/bin/sh\necho no devices\nexit 9\n")
    assert machine.gpu_memory() is None
