"""Modules imported on first use: in an engine, torch's operators for tensors without data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loraserve.engine.worker.deferred_import import deferred

TORCH = """
import sys
from loraserve.engine.worker.deferred_import import deferred

with deferred("torch._meta_registrations"):
    import torch
assert "torch._refs" not in sys.modules
assert torch.ones(2, 3).cumsum(1).tolist() == [[1, 2, 3]] * 2
from torch._meta_registrations import register_meta
assert "torch._refs" in sys.modules
few, many = (torch.ones(count, 3, device="meta") for count in (2, 4))
assert torch.ops.aten._cdist_forward(few, many, 2, None).shape == (2, 4)
"""


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a letter for each time that the package ``heavy_package.heavy`` was executed."""
    count = tmp_path / "count"
    count.touch()
    package = tmp_path / "heavy_package"
    package.mkdir()
    (package / "__init__.py").write_text("from heavy_package import heavy\n")
    (package / "heavy.py").write_text(f"with open({str(count)!r}, 'a') as file:\n    file.write('x')\nVALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield count
    for name in ("heavy_package", "heavy_package.heavy"):
        sys.modules.pop(name, None)


def test_a_deferred_module_is_executed_once_at_its_first_use(counted: Path) -> None:
    finders = list(sys.meta_path)
    with deferred("heavy_package.heavy"):
        import heavy_package  # type: ignore[import-not-found]
    assert sys.meta_path == finders
    assert counted.read_text() == ""
    assert heavy_package.heavy.VALUE == 3
    from heavy_package.heavy import VALUE  # type: ignore[import-not-found]

    assert (VALUE, counted.read_text()) == (3, "x")
    with pytest.raises(AttributeError, match=r"heavy_package\.heavy.*ABSENT"):
        heavy_package.heavy.ABSENT  # noqa: B018
    assert counted.read_text() == "x"


def test_other_modules_are_executed_at_once(counted: Path) -> None:
    with deferred("heavy_package.absent"):
        import heavy_package  # noqa: F401
    assert counted.read_text() == "x"


def test_torch_works_without_its_operators_for_tensors_without_data() -> None:
    subprocess.run([sys.executable, "-P", "-c", TORCH], check=True, timeout=120)
