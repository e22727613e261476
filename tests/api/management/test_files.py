"""A version's files come back as they were uploaded, or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from adapters_store import LocalStore
from loraserve.api.http.guard import _AnswerBroken
from loraserve.api.services import Services
from loraserve.limits import LIMITS

WEIGHTS = "/adapters/sql/versions/1/files/adapter_model.safetensors"
CONFIG = "/adapters/sql/versions/1/files/adapter_config.json"


async def test_config_and_weights_are_returned_as_uploaded(
    acme: httpx2.AsyncClient, push: Any, make_upload: Callable[..., tuple[bytes, bytes]]
) -> None:
    config, weights = make_upload()
    await push(acme)
    for path, data in ((CONFIG, config), (WEIGHTS, weights)):
        answer = await acme.get(path)
        assert (answer.status_code, answer.content) == (200, data)
        assert answer.headers["etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert answer.headers["content-length"] == str(len(data))
        again = await acme.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_foreign_file_is_absent(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, push: Any) -> None:
    await push(acme)
    answers = [await globex.get(path) for path in (WEIGHTS, WEIGHTS.replace("sql", "none"))]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json()["detail"].replace("sql", "none") == answers[1].json()["detail"]


@pytest.mark.parametrize("file", ["other.json", "..%2f..%2fetc%2fpasswd", "adapter_model.bin"])
async def test_a_version_has_no_other_file(acme: httpx2.AsyncClient, push: Any, file: str) -> None:
    await push(acme)
    assert (await acme.get(f"/adapters/sql/versions/1/files/{file}")).status_code == 404


async def test_damaged_file_is_refused_and_version_quarantined(
    acme: httpx2.AsyncClient, push: Any, store: LocalStore, services: Services, make_upload: Any
) -> None:
    await push(acme)
    blob = hashlib.sha256(make_upload()[1]).hexdigest()
    path = store.root / blob[:2] / blob[2:4] / blob
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    answer = await acme.get(WEIGHTS)
    assert (answer.status_code, answer.json()["code"]) == (503, "adapter_corrupt")
    await services.registry.corruption.close()
    assert (await acme.get("/adapters/sql/versions/1")).json()["state"] == "quarantined"


async def test_damaged_file_in_many_pieces_is_never_completed(
    acme: httpx2.AsyncClient, push: Any, store: LocalStore, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters_store.local.CHUNK_BYTES", 100)
    await push(acme)
    version = (await services.registry.get_version(await tenant_id(services, "acme"), "sql", 1)).weights_blob
    path = store.root / version[:2] / version[2:4] / version
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(_AnswerBroken):
        (await acme.get(WEIGHTS)).raise_for_status()
    await services.registry.corruption.close()
    assert (await acme.get("/adapters/sql/versions/1")).json()["state"] == "quarantined"
    # and its place was given back
    services.registry.uploads.downloads.acquire(await tenant_id(services, "acme"))


async def tenant_id(services: Services, name: str) -> Any:
    return (await services.authenticator.tenants.get(name)).id


async def test_concurrent_downloads_are_bounded(acme: httpx2.AsyncClient, push: Any, services: Services) -> None:
    await push(acme)
    slots, tenant = services.registry.uploads.downloads, await tenant_id(services, "acme")
    for _ in range(LIMITS.max_concurrent_downloads_per_tenant):
        slots.acquire(tenant)
    assert (await acme.get(WEIGHTS)).status_code == 429
    slots.release(tenant)
    for _ in range(3):
        assert (await acme.get(WEIGHTS)).status_code == 200
