"""What starts with a light step stays light."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

HEAVY = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "fastapi",
    "uvicorn",
    "sqlalchemy",
    "alembic",
    "zmq",
    "loraserve.api",
)


@pytest.mark.parametrize(
    "module",
    [
        "loraserve",
        "loraserve.errors",
        "loraserve.sdk",
        "loraserve.cli.main",
        "loraserve.cli.local.serve",
        "loraserve.cli.local.db",
        "loraserve.cli.local.plan",
        "loraserve.cli.local.doctor",
    ],
)
def test_import_loads_no_heavy_module(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_client_import_from_package_loads_no_heavy_module() -> None:
    code = f"import sys; from loraserve import AsyncClient, Client; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_no_module_needed_only_by_commands() -> None:
    """Parts of the standard library that take a third as long as the rest of what is ours."""
    needless = ("asyncio", "ssl", "socket", "httpx2", "pydantic", "loraserve.sdk", "loraserve.settings")
    code = (
        "import sys\nfrom loraserve.cli.main import main\nsys.argv[1:] = ['--help']\ntry:\n    main()\nfinally:\n"
        f"    print([name for name in {needless + HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.alone
def test_help_answers_at_once(run_cli: Callable[..., Any]) -> None:
    """What is ours takes no more than what any command line of this kind loads:
    the bound goes with the machine.
    """

    def cpu_s(start: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def ask_help() -> None:
        assert run_cli("--help").code == 0

    def load_framework() -> None:
        subprocess.run([sys.executable, "-P", "-c", "import typer, typer.rich_utils"], check=True)

    # Seconds of the processor, the best of a few in turn: the machine may be busy, the program
    # isn't allowed to be.
    pairs = [(cpu_s(ask_help), cpu_s(load_framework)) for _ in range(4)]
    assert min(own for own, _ in pairs) < 2.5 * min(framework for _, framework in pairs)
