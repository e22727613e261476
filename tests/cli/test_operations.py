"""What docs/operations.md shows is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from sparse_models import save_sparse
from typer.testing import CliRunner

from loraserve.cli.main import app
from loraserve.doctor import checks
from loraserve.planning import capacity_plan

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_worked_example_matches_command_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LORASERVE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    save_sparse(tmp_path / "Llama-3.1-8B")
    shown = re.search(r"<!-- example -->\n```console\n\$ loraserve (.*)\n((?s:.*?))```\n", DOCS.read_text())
    assert shown is not None
    done = CliRunner().invoke(app, shlex.split(shown[1]))
    assert done.exit_code == 0
    assert done.output == shown[2]


def test_each_check_is_in_documented_table() -> None:
    folder = Path(checks.__file__).parent
    sources = [file.read_text() for file in (*folder.glob("*.py"), folder.parent / "cli" / "local" / "doctor.py")]
    names = {name for source in sources for name in re.findall(r'(?:ok|warn|fail|told|run)\(\s*"([a-z_]+)"', source)}
    assert {"python", "database", "triton", "adapters"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in DOCS.read_text()] == []


def test_each_notice_is_in_documented_table() -> None:
    source = Path(capacity_plan.__file__).read_text()
    codes = set(re.findall(r'Level\.[A-Z]+,\s*"([a-z_]+)"', source)) | {"adapter_too_large", "adapter_unservable"}
    assert len(codes) == 9
    assert [code for code in sorted(codes) if f"`{code}`" not in DOCS.read_text()] == []
