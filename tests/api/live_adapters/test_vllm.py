"""vLLM's load and unload, as its clients call them."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer import Connect, Trainer
from whole_app import write_small

from loraserve.api.services import Services
from loraserve.types import Certificate


async def test_loaded_adapter_serves_as_ordinary_version_until_unloaded(acme: Trainer, services: Services) -> None:
    loaded = await acme.load()
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    assert (await acme.models())["policy"]["parent"] == services.engine.base.id
    assert await acme.version() == "policy@1"
    version = await services.registry.get_version(acme.tenant, "policy", 1)
    assert services.store.exists(version.weights_blob)
    assert [check["name"] for check in version.checks][-1] == "parity"
    gone = await acme.unload()
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'policy' removed successfully.")
    assert "policy" not in await acme.models()
    assert (await acme.complete()).status_code == (await acme.unload()).status_code == 404
    restored = await acme.post("/api/v1/adapters/policy/restore")
    assert restored.status_code == 200
    assert await acme.version() == "policy@1"


async def test_reload_requires_in_place_flag_and_adds_version(acme: Trainer, folder: Path) -> None:
    write_small(folder / "step-2", 0.25)
    assert (await acme.load()).status_code == 200
    again = await acme.load(path="step-2")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == (
        "The lora adapter 'policy' has already been loaded. "
        "If you want to load the adapter in place, set 'load_inplace' to True."
    )
    assert again.json()["error"]["param"] == "lora_name"
    assert await acme.version() == "policy@1"
    for _ in range(2):
        # the same bytes make no other version
        assert (await acme.load(path="step-2", load_inplace=True)).status_code == 200
        assert await acme.version() == "policy@2"
    assert await acme.version("policy@1") == "policy@1"


async def test_trainer_loop_loads_new_name_for_each_policy(acme: Trainer, folder: Path) -> None:
    """TRL's AsyncGRPO: no load in place, the name before is unloaded afterwards, absent or not; and
    no key but the URL's, which is sent as Basic.
    """
    key = acme.headers["authorization"].removeprefix("Bearer ")
    acme = replace(acme, headers={"authorization": "Basic " + base64.b64encode(f"x:{key}".encode()).decode()})
    health = await acme.client.get("/health")
    listed = await acme.client.get("/v1/models", headers=acme.headers)
    assert health.status_code == 200
    assert listed.json()["data"][0]["max_model_len"] > 0
    await acme.unload("policy-0")
    for step in range(1, 4):
        write_small(folder / f"step-{step}", step / 8)
        loaded = await acme.load(f"policy-{step}", str(folder / f"step-{step}"), load_inplace=False)
        assert loaded.status_code == 200, loaded.text
        assert await acme.version(f"policy-{step}") == f"policy-{step}@1"
        await acme.unload(f"policy-{step - 1}")
    assert [name for name in await acme.models() if name.startswith("policy")] == ["policy-3"]


async def test_load_fails_when_version_fails_certificate(
    acme: Trainer, services: Services, folder: Path, make_certificate: Callable[..., Certificate]
) -> None:
    assert (await acme.load()).status_code == 200
    write_small(folder / "odd", 0.25)
    services.engine.certificate = make_certificate(verdict="failed", reason="off by 9")  # type: ignore[attr-defined]
    refused = await acme.load(path="odd", load_inplace=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_quarantined")
    assert await acme.version() == "policy@1"


async def test_a_sidecar_may_name_the_base(acme: Trainer, services: Services) -> None:
    assert (await acme.load(base_model_name=services.engine.base.id)).status_code == 200
    refused = await acme.load("other", base_model_name="org/another")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "base_model_name")


async def test_paths_lead_nowhere_but_below_the_allowed_folder(acme: Trainer, folder: Path, tmp_path: Path) -> None:
    write_small(tmp_path / "secret")
    write_small(tmp_path / "lora-beside" / "x")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "nested").mkdir()
    (folder / "nested" / "up").symlink_to("..")
    (folder / "file").write_text("x")
    write_small(folder / "linked-file")
    (folder / "linked-file" / "adapter_model.safetensors").unlink()
    (folder / "linked-file" / "adapter_model.safetensors").symlink_to(tmp_path / "secret" / "adapter_model.safetensors")
    refused = {
        "../secret": 403,
        "small/../../secret": 403,
        str(tmp_path / "secret"): 403,
        str(tmp_path / "lora-beside" / "x"): 403,
        f"{folder}/../secret": 403,
        "link": 404,
        "nested/up/small": 404,
        "file": 404,
        "absent": 404,
        "small\0": 400,
        "x" * 5000: 400,
        "linked-file": 400,
        "nested": 400,
    }
    found = {}
    for path in refused:
        answer = await acme.load(path=path)
        found[path] = answer.status_code
        assert str(tmp_path) not in answer.text
    assert found == refused
    assert (await acme.load(path=f"{folder}/small/")).status_code == 200


async def test_folders_are_refused_unless_operator_allows_directory(acme: Trainer, services: Services) -> None:
    services.registry.local_folders = type(services.registry.local_folders)(None)
    for answer in (
        await acme.load(),
        await acme.post("/load_lora_adapter", json={"lora_name": "policy", "lora_path": "small"}),
    ):
        assert answer.status_code == 403
        assert "--lora-dir" in answer.json()["error"]["message"]


async def test_a_folder_may_be_each_tenants_own(
    acme: Trainer, globex: Trainer, services: Services, tmp_path: Path
) -> None:
    services.registry.local_folders = type(services.registry.local_folders)(str(tmp_path / "of" / "{tenant}"))
    write_small(tmp_path / "of" / "acme" / "run")
    assert (await acme.load(path="run")).status_code == 200
    for path in ("run", "../acme/run", str(tmp_path / "of" / "acme" / "run")):
        assert (await globex.load(path=path)).status_code in (403, 404)
    assert "policy" not in await globex.models()


@pytest.mark.parametrize("is_ephemeral", [False, True])
async def test_folder_with_older_weights_is_read(acme: Trainer, folder: Path, is_ephemeral: bool) -> None:
    write_small(folder / "old")
    weights = folder / "old" / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "old" / "adapter_model.bin")
    weights.unlink()
    assert (await acme.load(path="old", ephemeral=is_ephemeral)).status_code == 200
    assert await acme.version() == "policy@1"


@pytest.mark.parametrize("is_ephemeral", [False, True])
async def test_folder_with_shards_is_read(acme: Trainer, folder: Path, is_ephemeral: bool) -> None:
    write_small(folder / "shards")
    weights = folder / "shards" / "adapter_model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / "shards" / shard)
    index = folder / "shards" / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert (await acme.load(path="shards", ephemeral=is_ephemeral)).status_code == 200
    (folder / "shards" / "part-1.safetensors").unlink()
    answer = await acme.load("other", path="shards")
    assert (answer.status_code, "part-1.safetensors" in answer.text) == (400, True)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(places, "../small/adapter_model.safetensors")}))
    answer = await acme.load("other", path="shards")
    assert (answer.status_code, "names the file" in answer.text) == (400, True)


async def test_pickle_in_folder_is_refused_by_name(acme: Trainer, folder: Path) -> None:
    write_small(folder / "old")
    (folder / "old" / "adapter_model.safetensors").unlink()
    (folder / "old" / "adapter_model.bin").write_bytes(pickle.dumps({"a": 1}))
    answer = await acme.load(path="old")
    assert answer.status_code == 400
    assert "a pickle" in answer.json()["error"]["message"]
    assert "safe_serialization" in answer.json()["error"]["message"]


async def test_only_adapter_writing_key_loads_and_unloads(acme: Trainer, client: httpx2.AsyncClient) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        body = {"lora_name": "policy", "lora_path": "small"}
        assert (await client.post(path, json=body)).status_code == 401


async def test_foreign_adapter_neither_blocks_load_nor_is_unloaded(acme: Trainer, connect: Connect) -> None:
    globex = await connect("globex")
    assert (await acme.load()).status_code == 200
    assert (await globex.unload()).status_code == 404
    assert (await globex.load()).status_code == 200
    assert (await globex.unload()).status_code == 200
    assert await acme.version() == "policy@1"


BAD = (
    ({"lora_name": None}, 400, "lora_name"),
    ({"lora_name": ""}, 400, "lora_name"),
    ({"lora_name": 3}, 400, "lora_name"),
    ({"lora_name": "Org/Base:1"}, 400, "lora_name"),
    ({"lora_name": "a//b"}, 400, "lora_name"),
    ({"lora_name": "x" * 129}, 400, "lora_name"),
    ({"lora_name": "SECRET\0"}, 400, "lora_name"),
    ({"lora_path": None}, 400, "lora_path"),
    ({"lora_path": ""}, 400, "lora_path"),
    ({"lora_path": ["small"]}, 400, "lora_path"),
    ({"load_inplace": "true"}, 400, "load_inplace"),
    ({"is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
    ({"base_model_name": 3}, 400, "base_model_name"),
    ({"ephemeral": 1}, 400, "ephemeral"),
    ({"ttl_s": 10}, 400, "ttl_s"),
    ({"ttl_s": 0.5, "ephemeral": True}, 400, "ttl_s"),
    ({"ttl_s": 1e9, "ephemeral": True}, 400, "ttl_s"),
    ({"unknown": "SECRET"}, 400, None),
)


async def test_each_wrong_field_is_refused_by_name(acme: Trainer) -> None:
    found = []
    for fields, _, _ in BAD:
        answer = await acme.load(**{"name": "policy", "path": "small"} | {"load_inplace": False} | dict(_call(fields)))
        found.append((fields, answer.status_code, answer.json()["error"]["param"]))
        assert "SECRET" not in answer.text
    assert found == [tuple(row) for row in BAD]
    assert list(await acme.models()) == [next(iter(await acme.models()))]
    body = {"lora_name": "policy", "lora_path": "x" * (2 << 20)}
    assert (await acme.post("/v1/load_lora_adapter", json=body)).status_code == 413


def _call(fields: dict[str, object]) -> list[tuple[str, object]]:
    names = {"lora_name": "name", "lora_path": "path"}
    return [(names.get(name, name), value) for name, value in fields.items()]


@pytest.mark.parametrize("how", ["setting", "field"])
async def test_load_is_ephemeral_by_operator_setting_or_request(acme: Trainer, services: Services, how: str) -> None:
    if how == "setting":
        services.settings = services.settings.model_copy(update={"ephemeral_loads": True})
    assert (await acme.load(**({"ephemeral": True} if how == "field" else {}))).status_code == 200
    assert await acme.version() == "policy@1"
    assert services.registry.ephemeral.name_of(acme.tenant, "policy") is not None
    assert (await acme.load("kept", ephemeral=False)).status_code == 200
    assert services.registry.ephemeral.name_of(acme.tenant, "kept") is None
    assert (await acme.unload()).status_code == 200
    assert (await acme.complete()).status_code == 404


async def test_ten_loads_at_once_wait_for_slots(
    acme: Trainer, folder: Path, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may have eight uploads, and certificates, which take seconds, hold none of them."""
    for number in range(10):
        write_small(folder / f"step-{number}", number / 8)
    verify, running = services.engine.verify, 0
    most_held = 0

    async def verify_slowly(*args: object, **fields: object) -> Certificate:
        nonlocal running, most_held
        running += 1
        uploads, *_ = services.registry.uploads.shares()
        most_held = max(most_held, uploads.total)
        if running == 10:
            all_run.set()
        async with asyncio.timeout(20):
            await all_run.wait()
        return await verify(*args, **fields)

    all_run = asyncio.Event()
    monkeypatch.setattr(services.registry.certificates, "_certify", verify_slowly)
    loads = (acme.load(f"policy-{number}", f"step-{number}", load_inplace=False) for number in range(10))
    answers = await asyncio.gather(*loads)
    assert [answer.status_code for answer in answers] == [200] * 10
    assert most_held <= 8
    uploads, _, staged = services.registry.uploads.shares()
    assert (uploads.total, staged.total) == (0, 0)
