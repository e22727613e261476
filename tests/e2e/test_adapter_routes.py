"""Every route by which an adapter is brought takes every container: one table of both, whose cells
are the same version.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hub_server import running_hub
from server_process import ServerProcess

from loraserve import Client
from loraserve.adapter_folder import CONFIG_FILE, INDEX_FILE, find_weights, holds_config, shard_names
from loraserve.demo.pack import base_dir

from .test_containers import CONTAINERS, train

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

CONSOLE = Path(__file__).parents[2] / "loraserve/api/console/static"
SCRIPT = Path(__file__).parents[1] / "support/console_upload.mjs"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter in each container, in folders below this one."""
    root = tmp_path_factory.mktemp("adapters")
    source = root / "peft"
    train(base_dir(), source, target_modules=["q_proj", "k_proj", "down_proj"])
    # PEFT's card isn't an adapter's
    (source / "README.md").unlink(missing_ok=True)
    for name, (adapter, write, _, _) in CONTAINERS.items():
        if adapter == "lora":
            (root / name).mkdir()
            write(source, root / name, base_dir())
    (root / "shards").mkdir()
    CONTAINERS["shards"][1](source, root / "shards", base_dir())
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folders: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("data") / "data")
    server.flags += ("--lora-dir", str(folders))
    server.start()
    server.variables = {**server.variables, "LORASERVE_URL": server.url, "LORASERVE_API_KEY": server.make_tenant("t")}
    yield server
    assert server.stop() == 0


def key_of(server: ServerProcess) -> str:
    return server.variables["LORASERVE_API_KEY"]


def sdk(server: ServerProcess, folder: Path, name: str) -> None:
    with Client(server.url, api_key=key_of(server)) as client:
        client.adapters.push(str(folder), name=name)


def command_line(server: ServerProcess, folder: Path, name: str) -> None:
    done = server.run("adapter", "push", str(folder), "--name", name)
    assert done.returncode == 0, done.stderr


def weights_of(folder: Path) -> tuple[bytes | None, bytes | None, list[bytes]]:
    """The config, the index and the files of weights."""
    found = find_weights([path.name for path in folder.iterdir()])
    assert found is not None
    config = None if holds_config(found) else (folder / CONFIG_FILE).read_bytes()
    if found != INDEX_FILE:
        return config, None, [(folder / found).read_bytes()]
    index = (folder / INDEX_FILE).read_bytes()
    return config, index, [(folder / shard).read_bytes() for shard in shard_names(index)]


def request(server: ServerProcess, method: str, path: str, **how: Any) -> Any:
    headers = {"Authorization": f"Bearer {key_of(server)}", **how.pop("headers", {})}
    answer = httpx2.request(method, server.url + path, headers=headers, timeout=120, **how)
    assert answer.status_code < 300, answer.text
    return answer.json()


def form(server: ServerProcess, folder: Path, name: str) -> None:
    config, index, weights = weights_of(folder)
    short = [(part, data) for part, data in (("config", config), ("index", index)) if data is not None]
    files = [*short, *(("weights", data) for data in weights)]
    request(server, "POST", f"/api/v1/adapters/{name}/versions", files=[(part, (part, data)) for part, data in files])


def pieces(server: ServerProcess, folder: Path, name: str) -> None:
    config, index, weights = weights_of(folder)
    data = b"".join(weights)
    digest = hashlib.sha256(data).hexdigest()
    upload = request(server, "POST", "/api/v1/uploads", json={"sha256": digest, "size": len(data)})
    if not upload["is_complete"]:
        span = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Content-Type": "application/octet-stream"}
        request(server, "PATCH", f"/api/v1/uploads/{upload['id']}", content=data, headers=span)
    body: dict[str, Any] = {"blob": digest}
    body |= {} if config is None else {"config": json.loads(config)}
    body |= {} if index is None else {"index": index.decode()}
    request(server, "POST", f"/api/v1/adapters/{name}/versions", json=body)


def console(server: ServerProcess, folder: Path, name: str) -> None:
    assert "version" in upload_by_console(server, folder, name)


def upload_by_console(server: ServerProcess, folder: Path, name: str) -> Any:
    if NODE is None:
        pytest.skip("Node isn't installed")
    modules = folder.parent.parent / "console"
    if not modules.exists():
        shutil.copytree(CONSOLE, modules)
        (modules / "package.json").write_text('{"type": "module"}')
    files = [str(path) for path in sorted(folder.iterdir())]
    command = [NODE, str(SCRIPT), str(modules), server.url, key_of(server), name, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def vllm(server: ServerProcess, folder: Path, name: str) -> None:
    load(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def sglang(server: ServerProcess, folder: Path, name: str) -> None:
    load(server, "/load_lora_adapter", {"lora_name": name, "lora_path": folder.name})


def load(server: ServerProcess, path: str, body: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {key_of(server)}"}
    answer = httpx2.post(server.url + path, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text


def hub(server: ServerProcess, folder: Path, name: str) -> None:
    with running_hub({"acme/adapter": {path.name: path.read_bytes() for path in folder.iterdir()}}) as hub:
        before = dict(server.variables)
        cache = folder.parent.parent / f"hub-{name}"
        server.variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
        try:
            done = server.run("adapter", "push", "hf:acme/adapter", "--name", name)
        finally:
            server.variables = before
    assert done.returncode == 0, done.stderr


ROUTES: dict[str, Callable[[ServerProcess, Path, str], None]] = {
    "sdk": sdk,
    "command-line": command_line,
    "form": form,
    "pieces": pieces,
    "console": console,
    "vllm": vllm,
    "sglang": sglang,
    "hub": hub,
}
KINDS = ("peft", "archive", "mlx-lora", "gguf", "shards")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_route_takes_container(kind: str, route: str, server: ServerProcess, folders: Path) -> None:
    with Client(server.url, api_key=key_of(server)) as client:
        expected = client.adapters.push(str(folders / "peft"), name="expected").digest
        name = f"{route}.{kind}"
        ROUTES[route](server, folders / kind, name)
        version = client.adapters.version(name, 1)
    assert version.state == "ready"
    assert version.digest == expected
    assert any(check["name"] == "container" for check in version.checks) == (kind != "peft")


@pytest.mark.parametrize("route", ["sdk", "command-line", "vllm"])
def test_route_takes_gguf_file_by_path(route: str, server: ServerProcess, folders: Path) -> None:
    ROUTES[route](server, folders / "gguf/adapter.gguf", f"file.{route}")
    with Client(server.url, api_key=key_of(server)) as client:
        assert client.adapters.version(f"file.{route}", 1).state == "ready"


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard-missing": (
        lambda folder: next(folder.glob("*-00002-of-00002.safetensors")).unlink(),
        "-00002-of-00002.safetensors",
    ),
    "no-index": (lambda folder: (folder / INDEX_FILE).write_text("{}"), "isn't an index of weights"),
    "no-config": (lambda folder: (folder / CONFIG_FILE).unlink(), CONFIG_FILE),
}


@pytest.mark.parametrize("bad", BAD)
def test_console_names_missing_file(bad: str, server: ServerProcess, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters/bad"
    shutil.copytree(folders / "shards", folder)
    spoil, words = BAD[bad]
    spoil(folder)
    assert words in upload_by_console(server, folder, "bad")["error"]


def test_console_mentions_tokenizer_left_out(server: ServerProcess, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters/own"
    shutil.copytree(folders / "peft", folder)
    shutil.copy(base_dir() / "tokenizer.json", folder)
    assert upload_by_console(server, folder, "own")["hasTokenizer"]
