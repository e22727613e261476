"""The machine's cache of compiled kernels, which processes and checkouts share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraserve_kernels.cpu.compilation import helper, kernel_cache
from loraserve_kernels.cpu.compilation.catalog import KERNELS, LORA_KERNELS, STEP_KERNELS, load_kernel
from loraserve_kernels.cpu.compilation.kernel_cache import KernelCache

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("dot", "int4-dot", "nf4", "int4", "f16")
WARM_UP = "from loraserve_kernels.cpu.linear import decoded; decoded.warm_up({kind!r})"
MULTIPLY = """
import torch
from loraserve_kernels.common.quantized import quantize
from loraserve_kernels.cpu.linear import decoded, gemm

torch.manual_seed(0)
x = torch.randint(-127, 128, (9, 128)).float()
x[:, 0] = 127.0
weight = torch.randn(48, 128)
int8, int4, nf4 = quantize(weight, "int8"), quantize(weight, "int4", 64), quantize(weight, "nf4", 64)
for rounded, y in (
    (int8, gemm.int8_linear(x, gemm.pack_int8(int8.codes, int8.scales.flatten(), "numba-dot"))),
    (int4, gemm.int4_linear(x, decoded.pack_group_dot(int4))),
    (nf4, decoded.linear(x, decoded.pack(nf4))),
    (int4, decoded.linear(x, decoded.pack(int4))),
):
    torch.testing.assert_close(y, x @ rounded.dequantize(torch.float32).T, rtol=1e-4, atol=1e-2)
half = weight.half()
torch.testing.assert_close(decoded.linear(x, decoded.pack_half(half)), x @ half.float().T, rtol=1e-4, atol=1e-2)
"""
CHEAP = "gather_rows"
"""A kernel that compiles in a third of a second."""
LOAD = "from loraserve_kernels.cpu.compilation.catalog import load_kernel; print(load_kernel({name!r}).cache_hits)"


def run(code: str, cache: Path, **variables: str) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **variables}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def only_folder(cache: Path) -> KernelCache:
    (folder,) = (cache / "loraserve").iterdir()
    return KernelCache(folder)


@pytest.mark.campaign
def test_kernels_compiled_by_different_processes_stay_distinct(tmp_path: Path) -> None:
    """Each process numbers anew what it compiles; numba finds machine code by name and number."""
    for code in (*(WARM_UP.format(kind=kind) for kind in KINDS), MULTIPLY):
        run(code, tmp_path)


def test_kernel_is_compiled_once_for_two_checkouts(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(LOAD.format(name=CHEAP), tmp_path) == "0"
    assert run(LOAD.format(name=CHEAP), tmp_path, PYTHONPATH=str(copy)) == "1"
    assert only_folder(tmp_path).is_compiled(CHEAP)


def test_kernel_is_compiled_again_after_change(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(LOAD.format(name=CHEAP), tmp_path) == "0"
    changed = copy / "loraserve_kernels" / "cpu" / "vector_code.py"
    changed.write_text(changed.read_text() + "\n# changed\n")
    assert run(LOAD.format(name=CHEAP), tmp_path, PYTHONPATH=str(copy)) == "0"


def test_helper_compiles_kernels_missing_from_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LORASERVE_ADMIN_KEY", "sk-admin-not-for-children")
    kernel_cache.kernel_cache.cache_clear()
    try:
        process = helper.start_helper((CHEAP,))
        assert process is not None
        environment = b""
        while b"NUMBA_CACHE_DIR" not in environment and process.poll() is None:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        assert b"sk-admin" not in environment
        assert process.wait(60) == 0
        assert only_folder(tmp_path).is_compiled(CHEAP)
        assert helper.start_helper((CHEAP,)) is None
    finally:
        kernel_cache.kernel_cache.cache_clear()
    assert run(LOAD.format(name=CHEAP), tmp_path) == "1"


def test_claim_waits_for_other_process(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from loraserve_kernels.cpu.compilation.kernel_cache import *\n"
        f"with KernelCache(Path({str(tmp_path)!r})).claim('attend'): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other:
        assert other.stdout.readline() == "held\n"
        with cache.claim("attend", patience_s=0) as is_held:
            assert not is_held
        with cache.claim("norm_rows", patience_s=0) as is_held:
            assert is_held
            # by the same process again: a kernel's compilation inside of a list's
            with cache.claim("norm_rows", patience_s=0) as is_held_again:
                assert is_held_again
        waits = 0

        def end_after_three() -> None:
            nonlocal waits
            waits += 1
            if waits == 3 and other.stdin is not None:
                other.stdin.close()

        with cache.claim("attend", on_wait=end_after_three) as is_held:
            assert is_held
        assert waits >= 3


def test_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from loraserve_kernels.cpu.compilation.kernel_cache import *\n"
        f"with KernelCache(Path({str(tmp_path)!r})).claim('attend'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == -9
    with KernelCache(tmp_path).claim("attend", patience_s=0) as is_held:
        assert is_held


def test_cache_writable_by_other_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine code is executed."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernel_cache.kernel_cache.cache_clear()
    try:
        found = kernel_cache.kernel_cache()
        assert found is not None
        assert found.directory.stat().st_mode & 0o777 == 0o700
        found.directory.chmod(0o777)
        kernel_cache.kernel_cache.cache_clear()
        assert kernel_cache.kernel_cache() is None
    finally:
        kernel_cache.kernel_cache.cache_clear()
    # kernels are compiled then, and kept where numba keeps them
    assert run(LOAD.format(name=CHEAP), tmp_path) == "0"


def test_old_caches_are_deleted_with_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "loraserve"
    for name, age_days in (("old", 31), ("young", 29)):
        (base / name).mkdir(parents=True)
        (base / name / "attend.compiled").touch()
        os.utime(base / name, times=(time.time() - age_days * 86400,) * 2)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernel_cache.kernel_cache.cache_clear()
    try:
        found = kernel_cache.kernel_cache()
    finally:
        kernel_cache.kernel_cache.cache_clear()
    assert found is not None
    assert {path.name for path in base.iterdir()} == {"young", found.directory.name}


def test_each_kernel_has_unique_name() -> None:
    assert set(KERNELS) == {*STEP_KERNELS, *LORA_KERNELS.values()}
    assert all(load_kernel(name).__name__ == name for name in STEP_KERNELS)
