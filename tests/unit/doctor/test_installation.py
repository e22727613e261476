"""What is installed is compared with what is needed, and torch is asked in a process that can't
take the doctor with it.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from loraserve.doctor import installation
from loraserve.doctor.checks import Check, masked, ok, run
from loraserve.doctor.installation import (
    TorchFacts,
    check_gpu,
    check_packages,
    check_python,
    check_torch,
    probe,
    satisfies,
)
from loraserve.errors import ConfigError
from loraserve.limits import GIB

NO_GPU = TorchFacts("2.13.0+cpu", None, None, None, None, None, "", 2, ("fbgemm",))
H100 = TorchFacts("2.13.0", "13.0", "H100", 80 * GIB, (9, 0), "3.6.0", "", 2, ())


@pytest.mark.parametrize(
    ("version", "wanted", "is_within"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("2.1", ">=2.1.0,<2.2", True),
        ("2.2.0", ">=2.1.0,<2.2", False),
        ("3.6", "!=3.6", False),
        ("27", "", True),
        ("4.0.0rc1", "<=4", True),
        ("1.0", "==1.0.0", True),
        ("1.0", ">1", False),
    ],
)
def test_versions_are_compared_numerically(version: str, wanted: str, is_within: bool) -> None:
    assert satisfies(version, wanted) is is_within


def test_present_installation_passes() -> None:
    assert [check.status for check in (*check_python(), *check_packages())] == ["ok", "ok"]


def test_missing_or_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "rich>=999",
        "absent-package>=1 ; sys_platform == 'linux'",
        "typer>=0.1",
        "asyncpg>=99; extra == 'postgres'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    (check,) = check_packages()
    assert check.status == "fail"
    assert check.found.startswith(f"rich {metadata.version('rich')} (expected >=999)")
    assert check.found.endswith("; absent-package is missing (expected >=1)")


def test_torch_answers_from_own_process() -> None:
    assert satisfies(probe().torch, ">=2.11")
    assert "torch" not in vars(installation)


def test_keys_do_not_reach_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$LORASERVE_API_KEY" > "$WHERE"\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv("LORASERVE_API_KEY", "sk-lora-secret")
    monkeypatch.setenv("WHERE", str(tmp_path / "seen"))
    with pytest.raises(OSError, match="torch can't be used: exit code 3"):
        probe()
    assert (tmp_path / "seen").read_text() == "\n"


def test_hanging_or_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'ImportError: libcudart.so.13' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(OSError, match=r"libcudart\.so\.13"):
        probe()
    script.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(installation, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(OSError, match=r"didn't answer within"):
        probe()


def told(probed: TorchFacts, device: str, driver_bytes: int | None = None) -> dict[str, str]:
    return {check.name: check.status for check in check_gpu(probed, device, driver_bytes)}


def test_gpu_is_required_where_requested() -> None:
    assert told(NO_GPU, "cpu", 80 * GIB) == {"gpu": "ok"}
    assert told(NO_GPU, "auto") == {"gpu": "ok"}
    assert told(NO_GPU, "cuda") == {"gpu": "fail"}


def test_gpu_invisible_to_torch_is_reported() -> None:
    assert told(NO_GPU, "auto", 80 * GIB) == {"gpu": "warn"}
    assert told(NO_GPU, "cuda", 80 * GIB) == {"gpu": "fail"}


def test_a_gpu_needs_triton_and_bfloat16() -> None:
    assert told(H100, "auto") == {"gpu": "ok", "triton": "ok"}
    without = TorchFacts("2.13.0", "13.0", "T4", 16 * GIB, (7, 5), None, "No module named 'triton'", 2, ())
    assert told(without, "auto") == {"gpu": "warn", "triton": "warn"}
    assert told(without, "cuda") == {"gpu": "warn", "triton": "fail"}
    old = TorchFacts("2.13.0", "13.0", "H100", 80 * GIB, (9, 0), "3.5.1", "", 2, ())
    assert told(old, "auto")["triton"] == "fail"


def test_float16_on_a_cpu_needs_fbgemm() -> None:
    without = TorchFacts("2.13.0", None, None, None, None, None, "", 2, ())
    assert [check.status for check in check_torch(without, "float16")] == ["fail"]
    assert [check.status for check in check_torch(without, "auto")] == ["ok"]
    assert [check.status for check in check_torch(NO_GPU, "float16")] == ["ok"]


def test_crashing_check_counts_as_failed() -> None:
    def broken(error: Exception) -> list[Check]:
        raise error

    (ours,) = run("a", lambda: broken(ConfigError("No.", hint="Do.")))
    (systems,) = run("b", lambda: broken(PermissionError(13, os.strerror(13))))
    assert (ours.status, ours.found, ours.next) == ("fail", "No.", "Do.")
    assert (systems.name, systems.found) == ("b", "Permission denied")


def test_secrets_are_masked_in_every_word() -> None:
    (check,) = masked([Check("a", ok("", "").status, "x p4ss y", "p4ss", "p4ss!")], ["p4ss"])
    assert (check.found, check.expected, check.next) == ("x … y", "…", "…!")
