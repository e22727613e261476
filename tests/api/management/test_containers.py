"""Adapters in other containers become the versions that PEFT's own files make."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import torch
from gguf_files import write_gguf_adapter
from safetensors.torch import load, save

from adapters_store import LocalStore
from loraserve.api.services import Services

Upload = tuple[bytes, bytes]
NAMES = ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors")


def archive_of(weights: bytes, **others: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({**load(weights), **others}, buffer)
    return buffer.getvalue()


def shards_of(weights: bytes) -> tuple[list[bytes], bytes]:
    """The weights as two files, and their index."""
    tensors = load(weights)
    places = {name: NAMES[i % 2] for i, name in enumerate(tensors)}
    files = [save({name: tensors[name] for name in tensors if places[name] == shard}) for shard in NAMES]
    return files, json.dumps({"weight_map": places}).encode()


def form(config: bytes, *weights: bytes, index: bytes | None = None) -> list[tuple[str, Any]]:
    parts = [("config", ("adapter_config.json", config))]
    if index is not None:
        parts.append(("index", ("adapter_model.safetensors.index.json", index)))
    return parts + [("weights", ("weights", data)) for data in weights]


async def publish(client: httpx2.AsyncClient, parts: list[tuple[str, Any]], **params: str) -> httpx2.Response:
    return await client.post("/adapters/sql/versions", files=parts, params=params)


async def send_blob(client: httpx2.AsyncClient, data: bytes) -> str:
    digest = hashlib.sha256(data).hexdigest()
    upload = (await client.post("/uploads", json={"sha256": digest, "size": len(data)})).json()
    headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}
    assert (await client.patch(f"/uploads/{upload['id']}", content=data, headers=headers)).status_code == 200
    return digest


def container_of(version: Any) -> str:
    details: list[str] = [check["detail"] for check in version["checks"] if check["name"] == "container"]
    return details[0]


async def test_archive_makes_version_of_plain_file(
    push: Any, acme: httpx2.AsyncClient, make_upload: Callable[..., Upload], services: Services
) -> None:
    config, weights = make_upload()
    response = await publish(acme, form(config, archive_of(weights)))
    assert response.status_code == 201, response.text
    version = response.json()
    assert "adapter_model.bin (torch.save's archive)" in container_of(version)
    stored = (await acme.get("/adapters/sql/versions/1/files/adapter_model.safetensors")).content
    assert load(stored).keys() == load(weights).keys()
    assert all(torch.equal(load(stored)[name], load(weights)[name]) for name in load(weights))
    assert (await acme.get("/adapters/sql/versions/1/files/adapter_config.json")).content == config
    # the same tensors are the same version, whatever they came in
    again = await push(acme)
    assert (again.status_code, again.json()["digest"]) == (200, version["digest"])
    assert services.registry.uploads.shares()[2].total == 0


async def test_archive_sent_in_pieces_leaves_no_upload(
    acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]
) -> None:
    config, weights = make_upload()
    body = {"config": json.loads(config), "blob": await send_blob(acme, archive_of(weights))}
    dry = await acme.post("/adapters/sql/versions", json=body, params={"dry_run": "true"})
    assert (dry.status_code, dry.json()["version"]) == (200, None)
    response = await acme.post("/adapters/sql/versions", json=body)
    assert response.status_code == 201, response.text
    assert "torch.save" in container_of(response.json())
    again = await acme.post("/adapters/sql/versions", json=body)
    assert (again.status_code, again.json()["code"]) == (404, "upload_not_found")


async def test_mlx_adapter_makes_version_of_plain_file(
    push: Any, acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]
) -> None:
    config, weights = make_upload()
    peft = json.loads(config)
    tensors = {
        name.removeprefix("base_model.model.")
        .replace(".lora_A.weight", ".lora_a")
        .replace(".lora_B.weight", ".lora_b"): tensor.T.contiguous()
        for name, tensor in load(weights).items()
    }
    parameters = {"rank": peft["r"], "scale": peft["lora_alpha"] / peft["r"], "dropout": 0.1}
    mlx = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, "iters": 600}
    response = await publish(acme, form(json.dumps(mlx).encode(), save(tensors)))
    assert response.status_code == 201, response.text
    assert "scale 2 as lora_alpha / r = 4 / 2" in container_of(response.json())
    assert (response.json()["rank"], response.json()["target_modules"]) == (peft["r"], peft["target_modules"])
    stored = load((await acme.get("/adapters/sql/versions/1/files/adapter_model.safetensors")).content)
    assert all(torch.equal(stored[name], tensor) for name, tensor in load(weights).items())
    full = await publish(acme, form(json.dumps({**mlx, "fine_tune_type": "full"}).encode(), save(tensors)))
    assert (full.status_code, "fine_tune_type is full" in full.text) == (422, True)


async def test_gguf_adapter_needs_no_config(
    acme: httpx2.AsyncClient, make_upload: Callable[..., Upload], tmp_path: Path
) -> None:
    config, weights = make_upload()
    values = {name: tensor for name, tensor in load(weights).items() if "v_proj" in name}
    base = SimpleNamespace(model_type="llama", num_hidden_layers=2)
    data = write_gguf_adapter(values, base, tmp_path / "x.gguf", alpha=4.0).read_bytes()
    response = await publish(acme, [("weights", ("x.gguf", data))])
    assert response.status_code == 201, response.text
    assert "a GGUF file of llama.cpp's (llama)" in container_of(response.json())
    in_pieces = await acme.post("/adapters/sql/versions", json={"blob": await send_blob(acme, data)})
    assert (in_pieces.status_code, in_pieces.json()["digest"]) == (200, response.json()["digest"])
    both = await publish(acme, form(config, data))
    assert (both.status_code, "holds its own config" in both.text) == (422, True)
    model = data.replace(b"general.type", b"general.kind")
    refused = await publish(acme, [("weights", ("x.gguf", model))])
    assert (refused.status_code, "loraserve serve --model" in refused.text) == (422, True)


async def test_weights_without_config_are_refused(acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]) -> None:
    _, weights = make_upload()
    for data in (weights, archive_of(weights)):
        response = await publish(acme, [("weights", ("weights", data))])
        assert (response.status_code, 'config\\" is missing' in response.text) == (400, True), response.text
        response = await acme.post("/adapters/sql/versions", json={"blob": await send_blob(acme, data)})
        assert (response.status_code, "no adapter_config.json" in response.text) == (422, True), response.text


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


async def test_malicious_archive_is_refused_by_name(
    acme: httpx2.AsyncClient, make_upload: Callable[..., Upload], tmp_path: Path, store: LocalStore
) -> None:
    config, weights = make_upload()
    target = tmp_path / "boom"
    data = archive_of(weights, bomb=Bomb(target))
    refused = await publish(acme, form(config, data))
    body = {"config": json.loads(config), "blob": await send_blob(acme, data)}
    for response in (refused, await acme.post("/adapters/sql/versions", json=body)):
        assert (response.status_code, response.json()["code"]) == (422, "adapter_format")
        assert "posix.system" in response.json()["detail"]
    assert not target.exists()
    assert (await acme.get("/adapters/sql")).status_code == 404


async def test_converted_weights_count_in_quota(
    acme: httpx2.AsyncClient, make_upload: Callable[..., Upload], admin: httpx2.AsyncClient, services: Services
) -> None:
    config, weights = make_upload(rank=6)
    data = archive_of(weights)
    quota = len(data) + len(weights) - 200
    assert (await admin.patch("/tenants/acme", json={"limits": {"max_stored_bytes": quota}})).status_code == 200
    response = await publish(acme, form(config, data))
    assert (response.status_code, response.json()["code"]) == (429, "insufficient_quota"), response.text
    assert list(services.store.iter_digests()) == []
    assert services.registry.uploads.shares()[2].total == 0


async def test_shards_make_version_of_plain_file(
    push: Any, acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]
) -> None:
    config, weights = make_upload()
    files, index = shards_of(weights)
    response = await publish(acme, form(config, *files, index=index))
    assert response.status_code == 201, response.text
    assert container_of(response.json()).startswith("2 files of weights")
    assert (await push(acme)).json()["digest"] == response.json()["digest"]
    body = {"config": json.loads(config), "blob": await send_blob(acme, b"".join(files)), "index": index.decode()}
    in_pieces = await acme.post("/adapters/sql/versions", json=body)
    assert (in_pieces.status_code, in_pieces.json()["digest"]) == (200, response.json()["digest"])


async def test_shards_are_refused_by_name(acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]) -> None:
    config, weights = make_upload()
    (first, second), index = shards_of(weights)
    for parts, status, words in (
        (form(config, first, index=index), 422, NAMES[1]),
        (form(config, first, first, index=index), 422, "in two of the weights' files"),
        (form(config, first, second), 400, "index"),
        (form(config, first[:-3], second, index=index), 422, "shorter than its header says"),
        (form(config, first, second, index=index.replace(NAMES[0].encode(), b"../x.safetensors")), 422, "../x"),
        (form(config, archive_of(weights), first, index=index), 422, "isn't a safetensors file"),
    ):
        response = await publish(acme, parts)
        assert (response.status_code, words in response.text) == (status, True), response.text
