"""What a GPU's machine without a network is given, and what it does without."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import bench_tools, prepared, run, stand_ins
from benchmarks.gpu.close import same_bits

ROOT = Path(__file__).resolve().parents[2]


def make_cache(folder: Path) -> None:
    kernel = folder / "HASH"
    kernel.mkdir(parents=True)
    for name in ("shrink.cubin", "shrink.json", "shrink.ttir", "shrink.ptx"):
        (kernel / name).write_text(name)
    paths = {path.name: str(path) for path in kernel.iterdir()}
    (kernel / "__grp__shrink.json").write_text(json.dumps({"child_paths": paths}))


def test_unpacked_cache_names_files_in_place(tmp_path: Path) -> None:
    make_cache(tmp_path / "made")
    packed, cache = tmp_path / "cache.tar.xz", tmp_path / "elsewhere"
    prepared.pack(tmp_path / "made", packed)
    assert prepared.unpack(packed, cache) == 1
    paths = json.loads((cache / "HASH" / "__grp__shrink.json").read_text())["child_paths"]
    assert {Path(path).parent for path in paths.values()} == {cache / "HASH"}
    assert all(Path(path).exists() for path in paths.values())
    assert Path(paths["shrink.cubin"]).read_text() == "shrink.cubin"
    assert Path(paths["shrink.ptx"]).read_text() == ""


def test_stand_in_cache_evicts_at_maximum_size() -> None:
    cache: stand_ins.Cache[str, int] = stand_ins.Cache(10, getsizeof=lambda size: size)
    for name, size in (("a", 4), ("b", 4), ("c", 6)):
        cache[name] = size
    assert list(cache) == ["b", "c"]
    assert cache.currsize == 10
    with pytest.raises(ValueError, match="too large"):
        cache["d"] = 11
    recent: stand_ins.LRUCache[str, int] = stand_ins.LRUCache(2)
    recent["a"], recent["b"] = 1, 2
    assert recent["a"] == 1
    recent["c"] = 3
    assert list(recent) == ["a", "c"]


def test_stand_in_value_is_frozen_and_replaceable() -> None:
    struct = stand_ins._Values("Struct", (), {"__module__": __name__})
    value = stand_ins._Values(
        "Value", (struct,), {"__module__": __name__, "__annotations__": {"a": "int", "b": "dict"}, "b": {}}, tag="value"
    )
    one = value(a=1)
    assert one == value(a=1, b={})
    assert dataclasses.replace(one, a=2).a == 2
    with pytest.raises(AttributeError):
        one.a = 3
    with pytest.raises(TypeError):
        value(b={})


def test_old_interpreter_with_new_numpy_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(numpy, "__version__", "2.5.1")
    assert "numpy below 2.4" in (run.interpreter_obstacle() or "")
    monkeypatch.setattr(numpy, "__version__", "2.3.5")
    assert run.interpreter_obstacle() is None


def test_products_are_bounded_in_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([1.0, 2.002], dtype=torch.float16)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    row = same_bits("rows", a, b, products_in=torch.float16)
    assert row["ok"]
    assert "within a bound" in row["note"]
    assert not same_bits("rows", a, b * 1.1, products_in=torch.float16)["ok"]
    assert not same_bits("rows", a, b)["ok"]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not same_bits("rows", a, b, products_in=torch.float16)["ok"]


def test_figures_of_ncu_are_read_by_kernel() -> None:
    text = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","shrink_kernel(int)","gpu__time_duration.sum","ns","12,000"\n'
        '"0","shrink_kernel(int)","launch__registers_per_thread","register/thread","72"\n'
    )
    assert bench_tools.parse(text) == [{"what": "ncu, shrink_kernel", "us": 12.0, "registers": 72.0}]
    assert bench_tools.parse("==ERROR== no permission") == []


def test_kernels_of_part_are_compiled_without_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    packed, environment = tmp_path / "cache.tar.xz", {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", str(ROOT / "tools" / "gpu_cache.py"), "--only", "check-rows", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--out", str(packed)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert prepared.unpack(packed, tmp_path / "cache") >= 4
    assert {path.stem for path in (tmp_path / "cache").glob("*/*.cubin")} >= {"embed_kernel", "swiglu_kernel"}
