"""SGLang's load and unload, and loads of tensors in the body."""

from __future__ import annotations

import base64
import json
import pickle
import time
from typing import Any

import pytest
from trainer import Trainer, encoded
from whole_app import SMALL_CONFIG, small_weights

from loraserve.api.live_adapters.tensors_body import TensorsBody
from loraserve.api.services import Services
from loraserve.errors import InvalidRequest

TENSORS = "/load_lora_adapter_from_tensors"


def loaded(name: str, path: str) -> dict[str, Any]:
    return {"success": True, "error_message": "", "loaded_adapters": {name: path}}


async def test_path_is_loaded_and_unloaded_with_sglang_responses(acme: Trainer) -> None:
    body = {"lora_name": "policy", "lora_path": "small", "pinned": False}
    assert (await acme.post("/load_lora_adapter", json=body)).json() == loaded("policy", "small")
    assert await acme.version() == "policy@1"
    again = await acme.post("/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert again.json()["success"] is False
    assert "already been loaded" in again.json()["error_message"]
    assert again.json()["error"]["param"] == "lora_name"
    gone = await acme.post("/unload_lora_adapter", json={"lora_name": "policy"})
    assert gone.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
    absent = await acme.post("/unload_lora_adapter", json={"lora_name": "policy"})
    assert (absent.status_code, absent.json()["success"]) == (404, False)


@pytest.mark.parametrize("is_ephemeral", [True, False])
async def test_tensors_arrive_as_base64_or_form_parts(acme: Trainer, services: Services, is_ephemeral: bool) -> None:
    in_json = await acme.load_tensors(ephemeral=is_ephemeral)
    assert in_json.json() == loaded("policy", "__tensor__"), in_json.text
    assert await acme.version() == "policy@1"
    form = {"config": json.dumps(SMALL_CONFIG).encode(), "weights": small_weights(0.25)}
    query = {"lora_name": "policy", "ephemeral": str(is_ephemeral).lower(), "load_inplace": "true"}
    in_parts = await acme.post(TENSORS, files=form, params=query)
    assert in_parts.json() == loaded("policy", "__tensor__"), in_parts.text
    assert await acme.version() == "policy@2"
    assert (services.registry.ephemeral.name_of(acme.tenant, "policy") is not None) is is_ephemeral
    assert bool(list(services.store.iter_digests())) is not is_ephemeral


async def test_earlier_and_alternative_field_forms_are_accepted(acme: Trainer) -> None:
    for name, fields in {
        "one": {"serialized_named_tensors": encoded()},
        "two": {"serialized_named_tensors": None, "serialized_tensors": encoded()},
        "three": {"pinned": None, "added_tokens_config": {}, "lora_id": None, "load_format": "safetensors"},
    }.items():
        answer = await acme.load_tensors(name, **fields)
        assert answer.status_code == 200, (name, answer.text)
    assert (await acme.load_tensors("one", 0.25, upsert=True)).status_code == 200
    assert await acme.version("one") == "one@2"


async def test_pickles_are_refused_by_name_and_never_read(acme: Trainer, tmp_path: Any) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "boom"), "w"))

    for protocol in range(2, 6):
        pickled = base64.b64encode(pickle.dumps(Bomb(), protocol)).decode()
        answer = await acme.load_tensors(serialized_named_tensors=[pickled])
        assert answer.status_code == 400
        assert "never unpickles" in answer.json()["error_message"]
        assert "safetensors.torch.save" in answer.json()["error_message"]
    zipped = base64.b64encode(b"PK\x03\x04" + bytes(60)).decode()
    assert "never unpickles" in (await acme.load_tensors(serialized_named_tensors=[zipped])).json()["error_message"]
    bucket = await acme.load_tensors(load_format="flattened_bucket")
    assert (bucket.status_code, bucket.json()["error"]["param"]) == (400, "load_format")
    # in the parts of a form, as in any upload
    form = {"config": json.dumps(SMALL_CONFIG).encode(), "weights": pickle.dumps(Bomb(), 4)}
    answer = await acme.post(TENSORS, files=form, params={"lora_name": "policy", "ephemeral": "true"})
    assert (answer.status_code, "pickle" in answer.text) == (400, True)
    assert not (tmp_path / "boom").exists()


BAD: tuple[tuple[dict[str, Any], int, str | None], ...] = (
    ({"lora_name": "a@b"}, 400, "lora_name"),
    ({"config_dict": None}, 400, "config_dict"),
    ({"config_dict": "x"}, 400, "config_dict"),
    ({"config_dict": {"r": "x" * 70_000}}, 413, "config_dict"),
    ({"config_dict": {"peft_type": "LORA", "odd": 1}}, 400, None),
    ({"serialized_named_tensors": None}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": []}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": 3}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": [encoded(), encoded()]}, 400, "serialized_named_tensors"),
    ({"serialized_tensors": encoded()}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": "SECRET!"}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": encoded()[:-1]}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": "AA==" + encoded()}, 400, "serialized_named_tensors"),
    ({"serialized_named_tensors": ""}, 400, None),
    ({"serialized_named_tensors": base64.b64encode(b"SECRET" * 9).decode()}, 400, None),
    ({"load_format": "direct"}, 400, "load_format"),
    ({"expected_checksums": {"a": 1}}, 400, "expected_checksums"),
    ({"added_tokens_config": {"<x>": 1}}, 400, "added_tokens_config"),
    ({"lora_id": "7"}, 400, "lora_id"),
    ({"pinned": True}, 400, "pinned"),
    ({"pinned": "yes"}, 400, "pinned"),
    ({"ttl_s": "soon"}, 400, "ttl_s"),
    ({"ephemeral": False, "ttl_s": 5}, 400, "ttl_s"),
    ({"ephemeral": False, "pinned": True}, 403, None),
    ({"SECRET": 1}, 400, None),
)


async def test_each_wrong_field_is_named_without_leaving_adapter(acme: Trainer, services: Services) -> None:
    found = []
    for fields, _, _ in BAD:
        answer = await acme.load_tensors(
            **{"name": fields.get("lora_name", "policy")}
            | {name: value for name, value in fields.items() if name != "lora_name"}
        )
        assert answer.json()["success"] is False
        found.append((fields, answer.status_code, answer.json()["error"]["param"]))
        assert "SECRET" not in answer.text
    assert found == list(BAD)
    ephemeral = services.registry.ephemeral
    assert (len(ephemeral), ephemeral.bytes.total, ephemeral.versions.total) == (0, 0, 0)
    assert not list(services.store.iter_digests())


async def test_malformed_load_bodies_are_refused(acme: Trainer) -> None:
    query = {"lora_name": "policy"}
    for answer in (
        await acme.post(TENSORS, content=b"x", headers={"content-type": "application/octet-stream"}, params=query),
        await acme.post(TENSORS, content=b"", headers={"content-type": "application/json"}),
        await acme.post(TENSORS, content=b"[]", headers={"content-type": "application/json"}),
        await acme.post(TENSORS, json={"lora_name": "policy"}, params=query),
        await acme.post(TENSORS, files={"config": b"{}"}, params=query),
        await acme.post(TENSORS, files={"config": b"{}", "weights": b""}),
        await acme.post(TENSORS, files={"config": b"{}", "weights": b""}, params=query | {"lora_path": "x"}),
    ):
        assert answer.status_code == 400, answer.text
    long = {"lora_name": "policy", "config_dict": {}, "added_tokens_config": {"x": "y" * (2 << 20)}}
    assert (await acme.post(TENSORS, json=long)).status_code == 413


async def test_a_pin_needs_an_admin_key(acme: Trainer, admin: Trainer, services: Services) -> None:
    assert (await acme.load_tensors(ephemeral=False, pinned=True)).status_code == 403
    assert (await admin.load_tensors(ephemeral=False, pinned=True)).status_code == 200
    pinned = await services.registry.list_owned(acme.tenant, limit=10, cursor=None, digests=None)
    assert [(one.name, one.is_pinned) for one in pinned.items] == [("policy", True)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
def test_tensors_are_extracted_from_body_in_pieces(size: int) -> None:
    data = bytes(range(256)) * 5
    text = json.dumps(
        {"a": '"serialized_named_tensors": ["', "serialized_named_tensors": [_base64(data)], "b": {"c": 1}}
    )
    body = TensorsBody()
    raw = text.encode()
    found = b"".join(body.feed(raw[i : i + size]) for i in range(0, len(raw), size))
    assert (found, body.has_tensors) == (data, True)
    assert json.loads(body.text) == {
        "a": '"serialized_named_tensors": ["',
        "serialized_named_tensors": [""],
        "b": {"c": 1},
    }


def test_body_truncated_within_tensors_has_no_tensors() -> None:
    body = TensorsBody()
    body.feed(b'{"serialized_tensors": "AAAA')
    assert not body.has_tensors
    with pytest.raises(InvalidRequest, match="isn't base64"):
        body.feed(b'A"}')


def test_whitespace_before_tensors_takes_linear_time() -> None:
    # before, it was tried from every place: seconds for these, on the event loop
    body, started = TensorsBody(), time.process_time()
    for _ in range(8):
        body.feed(b'"serialized_named_tensors":' + b" " * 64 * 1024)
    assert time.process_time() - started < 1
    assert not body.has_tensors


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
