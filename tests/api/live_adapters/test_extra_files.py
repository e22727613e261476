"""Files for chats of adapters that are loaded from a folder: in memory, or as ordinary versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer import Trainer
from whole_app import write_small

from loraserve.api.services import Services
from loraserve.tenancy.limits.shares import tenant_holder

TEMPLATE = b"{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("ephemeral", [True, False])
async def test_extra_files_are_loaded_with_adapter_folder(
    acme: Trainer, services: Services, folder: Path, ephemeral: bool
) -> None:
    write_small(folder / "own")
    (folder / "own" / "chat_template.jinja").write_bytes(TEMPLATE)
    (folder / "own" / "generation_config.json").write_text('{"top_k": 3}')
    (folder / "own" / "tool_parser").write_text("hermes")
    before = services.registry.ephemeral.bytes.held(tenant_holder(acme.tenant))
    assert (await acme.load(path="own", ephemeral=ephemeral)).status_code == 200
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    answer = await acme.post("/tokenize", json=body)
    assert services.tokenizer.decode(answer.json()["tokens"]) == "[user]hi"
    used = services.registry.ephemeral.bytes.held(tenant_holder(acme.tenant)) - before
    assert (used > len(TEMPLATE)) == ephemeral
    assert (await acme.unload()).status_code == 200
    (folder / "own" / "chat_template.jinja").write_bytes(b"{% for %}")
    refused = await acme.load(path="own", ephemeral=ephemeral)
    assert (refused.status_code, "line 1" in refused.text) == (400, True)
    assert services.registry.ephemeral.bytes.held(tenant_holder(acme.tenant)) == before


@pytest.mark.parametrize("ephemeral", [True, False])
async def test_tokenizer_of_folder_is_read(
    acme: Trainer, services: Services, folder: Path, model_dir: Path, ephemeral: bool
) -> None:
    write_small(folder / "own")
    file = folder / "own" / "tokenizer.json"
    definition = json.loads((model_dir / "tokenizer.json").read_text())
    first = definition["added_tokens"][0]
    # the base's token, found in a text with the space before it alone
    first["lstrip"] = not first["lstrip"]
    file.write_text(json.dumps(definition))
    assert (await acme.load(path="own", ephemeral=ephemeral)).status_code == 200
    text = f"a {first['content']}"
    (mine, other) = [
        (await acme.post("/tokenize", json={"model": model, "prompt": text})).json()["tokens"]
        for model in ("policy", services.engine.base.id)
    ]
    assert len(mine) == len(other) - 1
    assert (await acme.unload()).status_code == 200
    first["content"] = "<|renamed|>"
    file.write_text(json.dumps(definition))
    refused = await acme.load(path="own", ephemeral=ephemeral)
    assert (refused.status_code, "has the token '<|renamed|>' where the base has" in refused.text) == (400, True)
    file.write_text("{")
    refused = await acme.load(path="own", ephemeral=ephemeral)
    assert (refused.status_code, "tokenizer.json isn't JSON" in refused.text) == (400, True)
