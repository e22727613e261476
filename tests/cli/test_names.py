"""Names in both cases and with slashes and colons, from a push to a restore, by every client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client, errors

Run = Callable[..., Any]
NAMES = ("Qwen/My-LoRA", "Policy", "x:v2")
HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}


@pytest.mark.parametrize("name", NAMES)
def test_command_line_takes_name(here: Run, client: Client, sql_dir: Path, name: str) -> None:
    name += "-cli"
    pushed = here("adapter", "push", sql_dir, "--name", name, "--format", "json")
    assert (pushed.code, pushed.json["name"]) == (0, name), pushed.stderr
    assert name in here("adapter", "list", "--format", "quiet").stdout.splitlines()
    assert here("adapter", "show", name.upper(), "--format", "json").json["name"] == name
    assert here("adapter", "show", f"{name}@1", "--format", "json").json["version"] == 1
    assert here("adapter", "alias", name, "canary", "1").code == 0
    assert here("adapter", "set", name, "--notes", "n").code == 0
    assert here("grant", "add", name, "globex").code == 0
    assert here("adapter", "verify", f"{name}@1").code == 0
    answer = here("run", name, "list the tickets with age over 81", "--temperature", "0")
    assert (answer.code, "SELECT" in answer.stdout) == (0, True), answer.stderr
    assert here("adapter", "delete", name).code == 0
    assert here("adapter", "show", name).code != 0
    assert here("adapter", "restore", name, "--format", "json").json["name"] == name


@pytest.mark.parametrize("name", NAMES)
def test_sdk_takes_name(client: Client, sql_dir: Path, tmp_path: Path, name: str) -> None:
    name += "-sdk"
    version = client.adapters.push(sql_dir, name=name)
    assert (version.name, version.model) == (name, f"{name}@1")
    assert client.adapters.get(name.lower()).name == name
    assert client.models.get(name.lower()).id == name
    assert client.models.get(f"{name}@1").id == f"{name}@1"
    assert client.adapters.pull(name, tmp_path / "pulled").model == f"{name}@1"
    assert client.completions.create(model=name, prompt="list", max_tokens=2).answer is not None
    used = client.usage.csv(adapter=name.upper(), group_by=["adapter"]).splitlines()
    assert (len(used), name in used[1]) == (2, True)
    assert client.adapters.set_alias(name, "canary", 1).adapter == name
    with pytest.raises(errors.Conflict, match=f'"{name}"'):
        client.adapters.push(sql_dir, name=name.swapcase())
    client.adapters.delete(name.upper())
    with pytest.raises(errors.AdapterNotFound):
        client.adapters.get(name)
    assert client.adapters.restore(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_openai_client_takes_name(real_server: ServerProcess, client: Client, sql_dir: Path, name: str) -> None:
    name += "-openai"
    client.adapters.push(sql_dir, name=name)
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key=ADMIN_KEY, max_retries=0) as peer:
        assert name in {model.id for model in peer.models.list()}
        assert peer.models.retrieve(name).id == name
        assert peer.completions.create(model=name, prompt="list", max_tokens=2).model == name


@pytest.mark.parametrize("name", NAMES)
def test_path_takes_encoded_name(real_server: ServerProcess, client: Client, sql_dir: Path, name: str) -> None:
    name += "-http"
    client.adapters.push(sql_dir, name=name)
    adapter = f"{real_server.url}/api/v1/adapters/{quote(name, safe='')}"
    for path in ("", "/versions", "/versions/1", "/aliases/live", "/grants", "/versions/1/files/adapter_config.json"):
        assert httpx2.get(adapter + path, headers=HEADERS).status_code == 200, path
    for text in (name, quote(name, safe="")):
        model = httpx2.get(f"{real_server.url}/v1/models/{text}", headers=HEADERS)
        assert (model.status_code, model.json()["id"]) == (200, name)
    made = httpx2.put(f"{adapter}/grants/globex", headers=HEADERS)
    assert httpx2.get(f"{real_server.url}{made.headers['location']}", headers=HEADERS).json()["adapter"] == name
    if "/" in name:
        plain = httpx2.get(f"{real_server.url}/api/v1/adapters/{name}", headers=HEADERS)
        assert (plain.status_code, "a slash of an adapter's name is %2F" in plain.text) == (404, True)


@pytest.mark.parametrize("name", NAMES)
def test_live_load_takes_name(real_server: ServerProcess, sql_dir: Path, name: str) -> None:
    name += "-live"
    files = {
        "config": (sql_dir / "adapter_config.json").read_bytes(),
        "weights": (sql_dir / "adapter_model.safetensors").read_bytes(),
    }
    url = f"{real_server.url}/load_lora_adapter_from_tensors"

    def load(name: str) -> httpx2.Response:
        return httpx2.post(
            url, files=files, params={"lora_name": name, "ephemeral": "true"}, headers=HEADERS, timeout=60
        )

    assert load(name).status_code == 200
    assert load(name).status_code == 400
    again = load(name.swapcase())
    assert (again.status_code, name in again.json()["error"]["message"]) == (409, True)
    body = {"model": name.lower(), "prompt": "list", "max_tokens": 2}
    answer = httpx2.post(f"{real_server.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert (answer.status_code, answer.headers["x-loraserve-adapter"]) == (200, f"{name}@1")
    wrong = load("a//b")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_name")
    assert "1 to 128 letters" in wrong.json()["error"]["message"]
    unload = {"lora_name": name.upper()}
    assert httpx2.post(f"{real_server.url}/v1/unload_lora_adapter", json=unload, headers=HEADERS).status_code == 200


def test_wrong_name_is_refused_with_rule(client: Client, sql_dir: Path) -> None:
    for name, found in (("a@b", "'@'"), ("a:", "ends with :"), ("-a", "begins with -"), ("é", "U+00E9")):
        with pytest.raises(errors.InvalidRequest, match="1 to 128 letters") as caught:
            client.adapters.push(sql_dir, name=name)
        assert caught.value.param == "name"
        assert found in caught.value.message
