"""``loraserve doctor``: without a server, and against a real one. Once as people run it; then in this process, without asking torch again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loraserve import Client
from loraserve.cli.doctor import _secrets
from loraserve.cli.main import app
from loraserve.demo.pack import base_dir
from loraserve.doctor import installation
from loraserve.doctor.installation import Probe

Run = Callable[..., Any]


@dataclass(frozen=True)
class Done:
    code: int
    output: str

    @property
    def statuses(self) -> dict[str, str]:
        return {check["name"]: check["status"] for check in json.loads(self.output)["checks"]}


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Done]:
    """Runs ``loraserve doctor ARGUMENTS`` in an empty directory of a machine without a GPU, with these variables and none else of ours."""
    monkeypatch.setattr(
        installation, "probe", lambda: Probe("2.13.0", None, None, None, None, None, "", 2, ("fbgemm",))
    )
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LORASERVE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str | Path, **variables: str) -> Done:
        found = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env=variables)
        return Done(found.exit_code, found.output)

    return run


def test_doctor_without_a_server_checks_the_installation(examine: Callable[..., Done], tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    done = examine("--model", base_dir(), "--data-dir", tmp_path / "data", "--url", url, "--format", "json")
    assert done.code == 1
    found = done.statuses
    assert found.pop("server") == "fail"
    assert {"python", "packages", "torch", "gpu", "data_dir", "disk", "database", "model", "memory"} <= found.keys()
    assert "fail" not in found.values()
    assert list(tmp_path.iterdir()) == []


def test_doctor_agrees_with_a_server_of_the_same_settings_and_tells_of_others(
    loraserve: Run, examine: Callable[..., Done], real_server: Any, client: Client, sql_dir: Path
) -> None:
    version = client.adapters.push(sql_dir, name="examined")
    client.adapters.warm("examined", version.version or 0)
    done = loraserve("doctor", "--model", base_dir(), "--memory-budget", "64MiB", "--format", "json")
    assert done.code == 0
    checks = {check["name"]: check for check in done.json["checks"]}
    names = ("server", "base", "limits", "invariants", "budget", "kv_blocks", "adapter_budget", "adapters")
    assert {name: checks[name]["status"] for name in names} == dict.fromkeys(names, "ok")
    assert "compared, as planned" in checks["adapters"]["found"]
    assert " 0 compared" not in checks["adapters"]["found"]

    others = ("--memory-budget", "32MiB", "--max-model-len", "256", "--adapter-dtype", "int8")
    other = examine("--model", base_dir(), *others, "--format", "json", **real_server.variables)
    different = {name for name, status in other.statuses.items() if status == "warn"}
    assert {"base", "budget", "kv_blocks", "adapter_budget", "adapters"} <= different


@pytest.mark.parametrize(
    "place",
    [
        "me:s3cret%2Bp4ss@127.0.0.1/r",
        "127.0.0.1/r?user=me&password=s3cret%2Bp4ss",
        "127.0.0.1/r?sslpassword=s3cret%2Bp4ss",
    ],
)
def test_doctor_knows_the_passwords_of_a_database_url(place: str) -> None:
    assert {"s3cret%2Bp4ss", "s3cret+p4ss"} <= set(_secrets({"database_url": f"postgresql://{place}"}))


def test_doctor_shows_no_secret(examine: Callable[..., Done], real_server: Any) -> None:
    key, url = "sk-lora-not-a-key-of-anybody", "postgresql://somebody:s3cret-p4ss@127.0.0.1:9/registry"
    done = examine("--database-url", url, LORASERVE_URL=real_server.url, LORASERVE_API_KEY=key)
    assert done.code == 1
    assert "fail  database" in done.output
    assert "fail  server" in done.output
    assert [secret for secret in ("s3cret-p4ss", key) if secret in done.output] == []


def test_doctor_without_a_key_compares_nothing(examine: Callable[..., Done], real_server: Any) -> None:
    done = examine("--url", real_server.url, "--format", "quiet")
    assert "key" in done.output.splitlines()


def test_doctor_says_which_setting_is_wrong(examine: Callable[..., Done]) -> None:
    done = examine("--memory-budget", "much", "--format", "quiet")
    assert done.code == 1
    assert "settings" in done.output.splitlines()
