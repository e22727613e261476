"""A version of another base over HTTP: shown as what it is, refused with 409,
and moved by an explicit word.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import msgspec
import pytest

from loraserve.errors import AdapterBaseMismatch
from loraserve.types import Digest

OTHER = Digest("c" * 64)
VERIFY = "/adapters/sql/versions/1/verify"


@pytest.fixture
async def swapped(push: Any, acme: httpx2.AsyncClient, engine: Any) -> str:
    """The digest of the base that sql@1 was made for; the server has another one now."""
    assert (await push(acme)).status_code == 201
    before: str = engine.base.digest
    engine.base = msgspec.structs.replace(engine.base, id="org/other", digest=OTHER)
    return before


async def test_version_reports_other_base_and_stays_unchanged(
    acme: httpx2.AsyncClient, engine: Any, swapped: str
) -> None:
    version = (await acme.get("/adapters/sql/versions/1")).json()
    assert (version["state"], version["base_digest"]) == ("other_base", swapped)
    assert [one["state"] for one in (await acme.get("/adapters/sql/versions")).json()["data"]] == ["other_base"]
    for path in ("/adapters/sql", "/adapters"):
        found = (await acme.get(path)).json()
        adapter = found["data"][0] if "data" in found else found
        assert (adapter["num_versions"], adapter["num_versions_of_another_base"]) == (1, 1)
    edited = await acme.patch("/adapters/sql/versions/1", json={"notes": "x"})
    assert edited.json()["state"] == "other_base"
    # each server judges by its own base
    engine.base = msgspec.structs.replace(engine.base, digest=Digest(swapped))
    assert (await acme.get("/adapters/sql/versions/1")).json()["state"] == "ready"
    assert (await acme.get("/adapters/sql")).json()["num_versions_of_another_base"] == 0


@pytest.mark.parametrize("action", ["warm", "pin", "verify"])
async def test_warm_pin_and_verify_get_409_naming_version(
    acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any, swapped: str, action: str
) -> None:
    refused = await admin.post(f"/adapters/sql/versions/1/{action}", headers={"X-Tenant": "acme"})
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (409, "adapter_base_mismatch")
    assert problem["errors"] == [{"detail": problem["errors"][0]["detail"], "field": "sql@1"}]
    assert "--rebase" in problem["detail"]
    assert refused.headers["x-should-retry"] == "false"
    assert engine.resident == {}


async def test_repeated_push_and_alias_to_version_get_409(push: Any, acme: httpx2.AsyncClient, swapped: str) -> None:
    for params in (None, {"dry_run": "true"}):
        assert (await push(acme, params=params)).status_code == 409
    assert (await acme.put("/adapters/sql/aliases/canary", json={"version": 1})).json()["code"] == (
        "adapter_base_mismatch"
    )


async def test_pin_is_not_held_on_different_base(
    services: Any, push: Any, acme: httpx2.AsyncClient, admin: httpx2.AsyncClient, engine: Any
) -> None:
    await push(acme)
    assert (await admin.post("/adapters/sql/versions/1/pin", headers={"X-Tenant": "acme"})).status_code == 200
    own = engine.base
    engine.base = msgspec.structs.replace(own, digest=OTHER)
    engine.resident.clear()
    engine.num_restarts += 1
    pins = services.registry.pins
    await pins.sync()
    await pins.close()
    assert (engine.resident, pins.num_wanted) == ({}, 0)


async def test_explicit_rebase_moves_version_to_fitting_base(
    acme: httpx2.AsyncClient, engine: Any, swapped: str
) -> None:
    certificate, engine.certificate = engine.certificate, AdapterBaseMismatch("q_proj is 2×8; this base has 16.")
    refused = await acme.post(VERIFY, params={"rebase": "true"})
    assert (refused.status_code, refused.json()["code"]) == (422, "adapter_base_mismatch")
    engine.certificate = certificate
    assert (await acme.post(VERIFY, params={"rebase": "false"})).status_code == 409
    misspelt = await acme.post(VERIFY, params={"rebased": "true"})
    assert (misspelt.status_code, misspelt.json()["errors"][0]["field"]) == (400, "rebased")
    moved = await acme.post(VERIFY, params={"rebase": "true"})
    assert (moved.status_code, moved.json()["state"], moved.json()["base_digest"]) == (200, "ready", OTHER)
    entry = (await acme.get("/audit")).json()["data"][0]
    assert entry["action"] == "version.verify"
    assert (entry["detail"]["base_before"], entry["detail"]["base_after"]) == (swapped, OTHER)


async def test_foreign_version_cannot_be_rebased(
    globex: httpx2.AsyncClient, acme: httpx2.AsyncClient, swapped: str
) -> None:
    assert (await globex.post(VERIFY, params={"rebase": "true"})).status_code == 404
    assert (await acme.get("/adapters/sql/versions/1")).json()["base_digest"] == swapped


async def test_naming_different_base_adds_warning_to_201(acme: httpx2.AsyncClient, make_upload: Any) -> None:
    config, weights = make_upload()
    config = json.dumps({**json.loads(config), "base_model_name_or_path": "acme/other"}).encode()
    files = {"config": ("adapter_config.json", config), "weights": ("adapter_model.safetensors", weights)}
    made = await acme.post("/adapters/sql/versions", files=files)
    assert made.status_code == 201
    (warning,) = made.json()["warnings"]
    assert warning.startswith("base_model_name_or_path is 'acme/other'; this server serves org/base:1")
    (check,) = (check for check in made.json()["checks"] if check["name"] == "base_name")
    assert (check["status"], check["detail"]) == ("warned", warning)
