"""``hf:`` in the place of a path: fetched from a hub on this machine, then pushed or served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hub_server import COMMIT, Hub, running_hub
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs, base_dir

Run = Callable[..., Any]


def files_of(folder: Path, below: str = "") -> dict[str, bytes]:
    return {f"{below}{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def model_hub() -> Iterator[Hub]:
    name, folder = next(iter(adapter_dirs().items()))
    adapter = {"README.md": b"", **files_of(folder, f"{name}/")}
    with running_hub({"acme/base": files_of(base_dir()), "acme/adapters": adapter}) as hub:
        yield hub


@pytest.fixture
def variables(model_hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": model_hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def test_base_is_pulled_and_served_by_address(run_cli: Run, variables: dict[str, str], tmp_path: Path) -> None:
    pulled = run_cli("pull", "hf:acme/base@v1.0", "--format", "json", **variables)
    assert pulled.code == 0, pulled.stderr
    assert (pulled.json["kind"], pulled.json["revision"]) == ("base", COMMIT)
    assert "config.json" in os.listdir(pulled.json["path"])
    assert "loraserve serve --model hf:acme/base@v1.0" in run_cli("pull", "hf:acme/base@v1.0", **variables).stderr
    checked = run_cli("doctor", "--model", "hf:acme/base@v1.0", **variables)
    assert "LlamaForCausalLM" in checked.stdout, checked.stdout + checked.stderr
    flags = ("--memory-budget", "64MiB", "--num-threads", "1")
    model = Path("hf:acme/base@v1.0")
    server = ServerProcess(tmp_path / "data", model=model, flags=flags, variables=variables, is_forked=False)
    try:
        found = httpx2.get(f"{server.start().url}/v1/models", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert [model["id"] for model in found.json()["data"]] == ["acme/base"]
    finally:
        server.kill()


def test_adapter_from_hub_folder_is_pushed(
    run_cli: Run, real_server: ServerProcess, variables: dict[str, str], client: Client
) -> None:
    name, folder = next(iter(adapter_dirs().items()))
    asked = {**variables, "LORASERVE_URL": real_server.url, "LORASERVE_API_KEY": ADMIN_KEY}
    address = f"hf:acme/adapters:{name}"
    pushed = run_cli("adapter", "push", address, "--name", "of-the-hub", "--format", "json", **asked)
    assert pushed.code == 0, pushed.stderr
    assert pushed.json["digest"] == client.adapters.push(folder, name="of-a-folder").digest
    refused = run_cli("adapter", "push", "hf:acme/adapters", "--name", "of-the-hub", **asked)
    assert (refused.code, "hf:acme/adapters has no adapter_config.json" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("acme/base", "'acme/base' names nothing on the hub"),
        ("hf:acme/absent", "hf:acme/absent can't be fetched from the hub"),
        ("hf:acme/base:Q4_K_M", "hf:acme/base:Q4_K_M has nothing named 'Q4_K_M'; it has no GGUF file"),
    ],
)
def test_pull_of_absent_repository_exits_2(run_cli: Run, variables: dict[str, str], address: str, message: str) -> None:
    done = run_cli("pull", address, **variables)
    assert done.code == 2
    assert message in done.stderr
