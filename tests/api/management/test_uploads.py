"""POST /adapters/{name}/versions: multipart, streamed, bounded, answered once."""

from __future__ import annotations

import math
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from adapters_store import LocalStore
from loraserve import background, faults
from loraserve.api.management.payloads import multipart
from loraserve.api.services import Services
from loraserve.limits import KIB, LIMITS, MIB

BOUNDARY = "xxBOUNDARYxx"


def body_of(*parts: tuple[str, bytes], end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    """A multipart body with these Content-Disposition (and further) header lines and contents."""
    return b"".join(f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts) + end.encode()


def part(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"; filename="../../{name}"'


async def send(client: httpx2.AsyncClient, body: bytes, piece: int = 1 << 16) -> httpx2.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), piece):
            yield body[start : start + piece]

    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return await client.post("/adapters/sql/versions", content=pieces(), headers=headers)


async def test_a_push_is_a_version_resource(push: Any, acme: httpx2.AsyncClient) -> None:
    response = await push(acme, rank=3)
    assert response.status_code == 201
    assert response.headers["location"] == "/api/v1/adapters/sql/versions/1"
    version = response.json()
    assert {name: version[name] for name in ("name", "version", "state", "rank", "target_modules", "aliases")} == {
        "name": "sql",
        "version": 1,
        "state": "ready",
        "rank": 3,
        "target_modules": ["q_proj", "v_proj"],
        "aliases": ["live"],
    }
    assert len(version["digest"]) == 64
    assert [check["status"] for check in version["checks"]] == ["passed"] * 4
    found = await acme.get("/adapters/sql/versions/1")
    assert found.json() == version
    assert found.headers["etag"] == response.headers["etag"]


async def test_repeated_push_gets_200_with_existing_version(push: Any, acme: httpx2.AsyncClient) -> None:
    first = await push(acme)
    again = await push(acme)
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()


async def test_dry_run_reports_findings_and_keeps_no_bytes(
    push: Any, acme: httpx2.AsyncClient, store: LocalStore
) -> None:
    response = await push(acme, params={"dry_run": "true"})
    assert response.status_code == 200
    assert (response.json()["version"], response.json()["state"]) == (None, "checked")
    assert (await acme.get("/adapters/sql")).status_code == 404
    assert list(store.iter_digests()) == []


async def test_without_promotion_no_alias_moves(push: Any, acme: httpx2.AsyncClient) -> None:
    assert (await push(acme, params={"promote": "false"})).json()["aliases"] == []


async def test_misspelt_parameter_prevents_publishing(push: Any, acme: httpx2.AsyncClient) -> None:
    response = await push(acme, params={"dry-run": "true"})
    assert response.status_code == 400
    assert (await acme.get("/adapters")).json()["data"] == []


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("order", [("config", "weights"), ("weights", "config")])
async def test_parts_arrive_in_any_order_and_pieces(
    acme: httpx2.AsyncClient, make_upload: Any, piece: int, order: tuple[str, str]
) -> None:
    files = dict(zip(("config", "weights"), make_upload(), strict=True))
    response = await send(acme, body_of(*((part(name), files[name]) for name in order)), piece)
    assert response.status_code == 201


async def test_large_body_is_flushed_to_store_while_read(
    acme: httpx2.AsyncClient, make_upload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "_FLUSH_BYTES", 64)
    config, weights = make_upload()
    response = await send(acme, body_of((part("weights"), weights), (part("config"), config)), 50)
    assert response.status_code == 201
    assert response.json()["size_bytes"] == len(config) + len(weights)


CONFIG, WEIGHTS = (part("config"), b"{}"), (part("weights"), b"x" * 100)
MALFORMED = {
    "no parts": body_of(),
    "no weights": body_of(CONFIG),
    "no config": body_of(WEIGHTS),
    "unknown part": body_of(CONFIG, WEIGHTS, (part("extra"), b"x")),
    "config twice": body_of(CONFIG, CONFIG, WEIGHTS),
    "unnamed part": body_of(("Content-Disposition: form-data", b"x")),
    "no disposition": body_of(("Content-Type: text/plain", b"x")),
    "encoded": body_of((f"{part('config')}\r\nContent-Transfer-Encoding: base64", b"e30="), WEIGHTS),
    "cut off": body_of(CONFIG, WEIGHTS)[:-6],
    "not multipart": b"\x80\x04" * 100,
    "endless header": b"--" + BOUNDARY.encode() + b"\r\nContent-Disposition: " + b"x" * 100_000,
    "many headers": body_of(("\r\n".join(f"X-{n}: 1" for n in range(100)), b"x")),
    "empty": b"",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_body_gets_400_and_leaves_no_bytes(
    acme: httpx2.AsyncClient, store: LocalStore, body: bytes
) -> None:
    response = await send(acme, body)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert list(store.iter_digests()) == []
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize("kind", ["text/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71, ""])
async def test_unsupported_content_type_is_refused(acme: httpx2.AsyncClient, kind: str) -> None:
    response = await acme.post("/adapters/sql/versions", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, "Content-Type")


async def test_oversized_part_is_refused_while_read(
    acme: httpx2.AsyncClient, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "LIMITS", replace(LIMITS, max_upload_bytes=1000))
    for parts in ((CONFIG, (part("weights"), b"x" * 1001)), ((part("config"), b" " * 70_000), WEIGHTS)):
        assert (await send(acme, body_of(*parts))).status_code == 413
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("how", "code"),
    [({"fill": math.nan}, "adapter_not_finite"), ({"hidden_size": 16}, "adapter_base_mismatch")],
)
async def test_unservable_adapter_gets_422_with_reason(
    push: Any, acme: httpx2.AsyncClient, how: dict[str, Any], code: str
) -> None:
    response = await push(acme, **how)
    assert (response.status_code, response.json()["code"]) == (422, code)
    assert response.json()["errors"][0]["detail"]


async def test_pickled_weights_are_refused_by_first_bytes(acme: httpx2.AsyncClient, make_upload: Any) -> None:
    config, _ = make_upload()
    response = await send(acme, body_of((part("config"), config), (part("weights"), pickle.dumps({"a": 1}))))
    assert (response.status_code, response.json()["code"]) == (422, "adapter_format")


@pytest.mark.parametrize("name", ["SQL%2F", "a" * 129, "-x", "a%2F..%2Fb", "sql@1", "a%20b", "%F0%9F%98%80"])
async def test_name_outside_pattern_gets_400_naming_field(push: Any, acme: httpx2.AsyncClient, name: str) -> None:
    response = await push(acme, name)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, "name")


async def test_a_retried_push_gets_the_first_answer(push: Any, acme: httpx2.AsyncClient) -> None:
    first = await push(acme, headers={"Idempotency-Key": "k1"})
    await push(acme, seed=1)
    again = await push(acme, headers={"Idempotency-Key": "k1"})
    assert again.status_code == 201
    assert again.content == first.content
    assert again.headers["location"] == first.headers["location"]
    assert again.headers["idempotent-replayed"] == "true"
    assert (await acme.get("/adapters/sql/aliases/live")).json()["version"] == 2


async def test_a_key_used_for_other_bytes_is_refused(push: Any, acme: httpx2.AsyncClient) -> None:
    await push(acme, headers={"Idempotency-Key": "k1"})
    response = await push(acme, seed=1, headers={"Idempotency-Key": "k1"})
    assert (response.status_code, response.json()["code"]) == (422, "idempotency_key_reused")


async def test_two_tenants_may_use_the_same_idempotency_key(
    push: Any, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient
) -> None:
    for client in (acme, globex):
        response = await push(client, headers={"Idempotency-Key": "k1"})
        assert response.status_code == 201
        assert "idempotent-replayed" not in response.headers


@pytest.mark.parametrize("key", ["", "x" * 256, "é"])
async def test_an_impossible_idempotency_key_is_refused(push: Any, acme: httpx2.AsyncClient, key: str) -> None:
    response = await push(acme, headers={"Idempotency-Key": key.encode("latin-1")})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (400, "Idempotency-Key")


async def test_full_disk_gets_507_and_next_push_works(push: Any, acme: httpx2.AsyncClient) -> None:
    for point in ("blob.write", "blob.fsync"):
        with faults.arm(point, "ENOSPC"):
            assert (await push(acme)).status_code == 507
    assert (await push(acme)).status_code == 201


async def test_client_leaving_during_upload_leaves_no_bytes(
    app: FastAPI, push: Any, acme: httpx2.AsyncClient, store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {**acme.headers, "content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/adapters/sql/versions",
        "raw_path": b"/api/v1/adapters/sql/versions",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    for _ in range(LIMITS.max_concurrent_uploads + 1):
        messages = iter(
            [
                {"type": "http.request", "body": body_of(CONFIG, WEIGHTS)[:200], "more_body": True},
                {"type": "http.disconnect"},
            ]
        )

        async def receive(messages: Any = messages) -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            pass

        await app(dict(scope), receive, send)
    assert list((store.root / "staging").iterdir()) == []
    assert "Traceback" not in caplog.text
    assert (await push(acme)).status_code == 201


async def test_pushing_requires_writing_scope(
    push: Any, admin: httpx2.AsyncClient, connect: Callable[[str], httpx2.AsyncClient]
) -> None:
    await admin.post("/tenants", json={"name": "acme"})
    made = await admin.post("/tenants/acme/keys", json={"name": "r", "scopes": ["adapters:read", "inference"]})
    response = await push(connect(made.json()["key"]))
    assert (response.status_code, response.json()["code"]) == (403, "permission_denied")


async def test_admin_pushes_for_named_or_default_tenant(
    push: Any, admin: httpx2.AsyncClient, acme: httpx2.AsyncClient
) -> None:
    assert (await push(admin, "theirs", headers={"X-Tenant": "acme"})).status_code == 201
    assert (await push(admin, "mine")).status_code == 201
    assert [one["name"] for one in (await acme.get("/adapters")).json()["data"]] == ["theirs"]
    default = await admin.get("/adapters", headers={"X-Tenant": "default"})
    assert [one["name"] for one in default.json()["data"]] == ["mine"]


async def test_upload_pauses_between_pieces_while_processors_compute(
    push: Any, acme: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_computing = False
    taken: list[float] = []

    def queue(work_s: float) -> float:
        taken.append(work_s)
        return 0.0

    throttle = services.registry.uploads.throttle
    monkeypatch.setattr(background, "MIN_WORK_S", 0.0)
    monkeypatch.setattr(throttle, "_queue", queue)
    monkeypatch.setattr(throttle, "_is_serving", lambda: is_computing)
    await push(acme, "sql", seed=1)
    assert taken == []
    is_computing = True
    await push(acme, "sql", seed=2)
    # the bytes that came, what was read and compiled, and each module and tensor
    assert len(taken) >= 6


async def test_endless_zeros_are_refused_at_start(acme: httpx2.AsyncClient, store: LocalStore) -> None:
    """The body goes on for gigabytes that nobody reads."""
    num_sent = 0

    async def zeros() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield body_of((part("config"), b"{}"), end="") + f"--{BOUNDARY}\r\n{part('weights')}\r\n\r\n".encode()
        while num_sent < 64 * MIB:
            num_sent += 64 * KIB
            yield bytes(64 * KIB)

    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    refused = await acme.post("/adapters/sql/versions", content=zeros(), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (422, "adapter_format")
    assert num_sent < 8 * MIB
    assert list((store.root / "staging").iterdir()) == []


async def test_body_over_quota_is_refused_unread(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, services: Services
) -> None:
    assert (await admin.patch("/tenants/acme", json={"limits": {"max_stored_bytes": 1000}})).status_code == 200
    was_read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal was_read
        was_read = True
        yield b"x"

    for length in (2 << 30, 3 * MIB):
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Content-Length": str(length)}
        refused = await acme.post("/adapters/sql/versions", content=body(), headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")
    assert services.registry.uploads.shares()[2].total == 0


async def test_version_is_sent_again_at_full_quota(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, push: Any
) -> None:
    """It may be a repair."""
    size = (await push(acme)).json()["size_bytes"]
    assert (await admin.patch("/tenants/acme", json={"limits": {"max_stored_bytes": size}})).status_code == 200
    assert (await push(acme)).status_code == 200
    refused = await push(acme, seed=1)
    assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")
