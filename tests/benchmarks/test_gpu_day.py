"""What a run on a GPU meets that a dry run doesn't: failing peers and tools, memory held by cycles,
packages built for other versions, and the time that there is.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import bench_tools, budget, peers, report, stand_ins, summary, varlen
from benchmarks.gpu.limits import Rates
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Outcome

ROOT = Path(__file__).resolve().parents[2]


def make_machine(**changes: object) -> Machine:
    machine = Machine(torch.device("cpu"), True, Rates(1.0, 1.0, 1.0), 1 << 16, None)
    for name, value in changes.items():
        setattr(machine, name, value)
    return machine


@pytest.mark.parametrize("call", budget.CALLS)
def test_call_fits_the_time(call: str) -> None:
    parts, budget_s = budget.CALLS[call]
    found = budget.estimate(parts, num_cores=16, is_compiling=False)
    assert found.total_s <= budget_s + 20
    # the first is what the issue of the day allows, the second what a lease of a quarter leaves
    assert found.total_s <= {"first": 440, "second": 220}[call]


def test_calls_of_the_page_have_estimated_parts() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    found = re.findall(r"--only (\S+) --budget-s (\d+)", text)
    assert found == [(",".join(parts), f"{budget_s:.0f}") for parts, budget_s in budget.CALLS.values()]


def test_row_without_a_check_may_fail(tmp_path: Path) -> None:
    rows = [{"site": "qkv", "base": "int8", "rows": 64, "us": 3.0, "ok": False}]
    outcomes = {"linears": Outcome("complete", rows=rows)}
    assert summary.failed_checks(outcomes) == ["linears: qkv, int8, 64 rows"]
    report.write(tmp_path, "gpu", outcomes, {}, command="", date="", seconds=1.0)
    assert "linears: qkv, int8, 64 rows" in report.brief(outcomes, {}, seconds=1.0)


def test_memory_held_by_a_cycle_is_freed() -> None:
    class Steps:
        def __init__(self) -> None:
            self.run = self.__init__  # type: ignore[misc]

    gc.disable()
    try:
        steps = weakref.ref(Steps())
        assert steps() is not None
        make_machine().free()
        assert steps() is None
    finally:
        gc.enable()


def test_broken_package_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokenpackage.py").write_text("raise ImportError('needs another numpy')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_spec("brokenpackage") is not None
    assert stand_ins.leave_out_broken("brokenpackage")
    assert find_spec("brokenpackage") is None
    monkeypatch.delitem(sys.modules, "brokenpackage")
    assert not stand_ins.leave_out_broken("nosuchpackage")
    assert "nosuchpackage" not in sys.modules


def test_unloadable_peer_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("vllm/lora/ops/triton_ops", "sglang/kernels/ops/lora/dense"):
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "vllm/lora/ops/triton_ops/lora_shrink_op.py").write_text("import vllm.something.new")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "sglang")]:
        monkeypatch.delitem(sys.modules, name)
    found = peers.load(make_machine(peers=tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "sglang")]:
        del sys.modules[name]
    assert found.kernels == {}
    assert sorted(found.failed) == ["csgmv", "vllm"]
    assert "vllm.something" in found.failed["vllm"]


def test_hanging_tool_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_tools, "LEAST_S", 0.5)
    mark = tmp_path / "mark"
    script = f"(sleep 2; touch {mark}) & wait"
    assert bench_tools.run(make_machine(deadline=0.0), ["sh", "-c", script]) is None
    assert bench_tools.run(make_machine(), ["sh", "-c", "sleep 2"]) is not None
    assert not mark.exists()


def test_counter_without_a_value_is_left_out() -> None:
    text = (
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","shrink_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","n/a"\n'
        '"0","shrink_kernel","gpu__time_duration.sum","ns","1,500"\n'
    )
    assert bench_tools.parse(text) == [{"what": "ncu, shrink_kernel", "us": 1.5}]


def test_torch_without_flash_attention_registry_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "attention", SimpleNamespace())
    assert varlen._implementation() == "FA2"
