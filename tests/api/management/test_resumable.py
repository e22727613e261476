"""Resumable uploads over HTTP: announced, sent in pieces, resumed, published by their digest."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from adapters_store import LocalStore
from loraserve.api.services import Services
from loraserve.limits import KIB, LIMITS
from loraserve.types import AdapterRef, Certificate

Upload = tuple[bytes, bytes]


@pytest.fixture
def files(make_upload: Callable[..., Upload]) -> Upload:
    return make_upload()


async def announce(client: httpx2.AsyncClient, data: bytes, **body: Any) -> httpx2.Response:
    return await client.post("/uploads", json={"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), **body})


async def send(
    client: httpx2.AsyncClient, upload: dict[str, Any], data: bytes, start: int = 0, end: int | None = None
) -> httpx2.Response:
    end = len(data) if end is None else end
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
    return await client.patch(f"/uploads/{upload['id']}", content=data[start:end], headers=headers)


async def uploaded(client: httpx2.AsyncClient, data: bytes) -> str:
    upload = (await announce(client, data)).json()
    assert (await send(client, upload, data)).json()["is_complete"]
    return str(upload["sha256"])


async def publish(client: httpx2.AsyncClient, config: bytes, blob: str, **how: Any) -> httpx2.Response:
    return await client.post("/adapters/sql/versions", json={"config": json.loads(config), "blob": blob}, **how)


async def test_pieces_of_any_length_make_the_blob(acme: httpx2.AsyncClient, store: LocalStore, files: Upload) -> None:
    _, data = files
    made = await announce(acme, data)
    assert made.status_code == 201
    upload = made.json()
    assert made.headers["location"] == f"/api/v1/uploads/{upload['id']}"
    assert (upload["received"], upload["is_complete"], upload["size"]) == (0, False, len(data))
    first = await send(acme, upload, data, 0, 7)
    assert (first.status_code, first.json()["received"], first.json()["is_complete"]) == (200, 7, False)
    assert (await acme.get(f"/uploads/{upload['id']}")).json() == first.json()
    await send(acme, upload, data, 7, 8)
    last = await send(acme, upload, data, 8)
    assert (last.json()["received"], last.json()["is_complete"]) == (len(data), True)
    assert bytes(store.read(upload["sha256"])) == data


async def test_json_upload_publishes_same_version_as_multipart(
    acme: httpx2.AsyncClient, push: Any, files: Upload
) -> None:
    config, data = files
    blob = await uploaded(acme, data)
    made = await publish(acme, config, blob)
    assert made.status_code == 201, made.text
    assert (made.json()["version"], made.json()["aliases"]) == (1, ["live"])
    again = await push(acme)
    assert (again.status_code, again.json()["digest"]) == (200, made.json()["digest"])
    assert (await publish(acme, config, blob)).status_code == 200
    assert (await publish(acme, config, blob, params={"dry_run": "true"})).status_code == 200


async def test_misplaced_piece_is_refused_with_expected_offset(acme: httpx2.AsyncClient, files: Upload) -> None:
    _, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data, 0, 10)
    for start in (0, 5, 11):
        answer = await send(acme, upload, data, start, 20)
        assert answer.status_code == 409
        assert (answer.json()["code"], answer.json()["received"]) == ("upload_offset_mismatch", 10)


async def test_repeated_piece_is_accepted_as_done(acme: httpx2.AsyncClient, files: Upload) -> None:
    _, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data, 0, 10)
    repeated = await send(acme, upload, data, 2, 10)
    assert (repeated.status_code, repeated.json()["received"]) == (200, 10)
    await send(acme, upload, data, 10)
    last = await send(acme, upload, data, 10)
    assert (last.status_code, last.json()["is_complete"]) == (200, True)


async def test_announcing_same_bytes_again_resumes_upload(
    acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, files: Upload
) -> None:
    _, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data, 0, 10)
    again = await announce(acme, data)
    assert (again.status_code, again.json()["id"], again.json()["received"]) == (200, upload["id"], 10)
    await send(acme, upload, data, 10)
    # what one tenant has sent is nothing to another
    others = await announce(globex, data)
    assert (others.status_code, others.json()["received"]) == (201, 0)


async def test_bytes_not_matching_announced_digest_restart_upload(
    acme: httpx2.AsyncClient, store: LocalStore, files: Upload
) -> None:
    _, data = files
    upload = (await announce(acme, data)).json()
    wrong = bytearray(data)
    wrong[20] ^= 1
    await send(acme, upload, bytes(wrong), 0, 50)
    answer = await send(acme, upload, bytes(wrong), 50)
    assert (answer.status_code, answer.json()["code"]) == (409, "upload_digest_mismatch")
    assert (await acme.get(f"/uploads/{upload['id']}")).json()["received"] == 0
    assert not store.exists(upload["sha256"])
    assert (await send(acme, upload, data)).json()["is_complete"]


async def test_received_part_of_interrupted_piece_is_kept(acme: httpx2.AsyncClient) -> None:
    data = bytes(300 * KIB)
    upload = (await announce(acme, data)).json()

    async def broken() -> AsyncIterator[bytes]:
        yield data[: 100 * KIB]
        raise ConnectionResetError

    headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Content-Length": str(len(data))}
    assert (await acme.patch(f"/uploads/{upload['id']}", content=broken(), headers=headers)).status_code == 500
    assert (await acme.get(f"/uploads/{upload['id']}")).json()["received"] == 100 * KIB
    assert (await send(acme, upload, data, 100 * KIB)).json()["is_complete"]


async def test_a_large_piece_is_durable_chunk_by_chunk(
    acme: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (5 * KIB * 4)
    upload = (await announce(acme, data)).json()
    seen: list[int] = []
    monkeypatch.setattr("loraserve.registry.uploads.resumable._CHUNK_BYTES", 2 << 20)
    resumable = services.registry.uploads.resumable
    commit = resumable._commit_chunk

    async def watched(tenant: Any, upload_id: str, start: int, staged: Any) -> int:
        size = await commit(tenant, upload_id, start, staged)
        seen.append((await resumable.get(tenant, upload_id)).received)
        return size

    monkeypatch.setattr(resumable, "_commit_chunk", watched)
    pieces = (data[start : start + 64 * KIB] for start in range(0, len(data), 64 * KIB))

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Content-Length": str(len(data))}
    answer = await acme.patch(f"/uploads/{upload['id']}", content=body(), headers=headers)
    assert answer.json()["is_complete"]
    assert seen == [2 << 20, 4 << 20, len(data)]


async def test_foreign_upload_is_absent(acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, files: Upload) -> None:
    config, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data)
    absent = {**upload, "id": "0" * 26}
    for one, other in (
        (await globex.get(f"/uploads/{upload['id']}"), await globex.get(f"/uploads/{absent['id']}")),
        (await send(globex, upload, data), await send(globex, absent, data)),
        (await globex.delete(f"/uploads/{upload['id']}"), await globex.delete(f"/uploads/{absent['id']}")),
        (await publish(globex, config, upload["sha256"]), await publish(globex, config, "0" * 64)),
    ):
        assert (one.status_code, other.status_code) == (404, 404)
        assert {**one.json(), "request_id": ""} == {**other.json(), "request_id": ""}


async def test_a_deleted_upload_is_gone(acme: httpx2.AsyncClient, files: Upload) -> None:
    _, data = files
    upload = (await announce(acme, data)).json()
    assert (await acme.delete(f"/uploads/{upload['id']}")).status_code == 204
    assert (await acme.get(f"/uploads/{upload['id']}")).status_code == 404
    assert (await announce(acme, data)).status_code == 201


async def test_an_incomplete_upload_cannot_be_published(acme: httpx2.AsyncClient, files: Upload) -> None:
    config, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data, 0, 10)
    answer = await publish(acme, config, upload["sha256"])
    assert (answer.status_code, answer.json()["code"]) == (404, "upload_not_found")


async def test_bytes_damaged_after_upload_must_be_sent_again(
    acme: httpx2.AsyncClient, store: LocalStore, files: Upload
) -> None:
    config, data = files
    blob = await uploaded(acme, data)
    path = store.root / blob[:2] / blob[2:4] / blob
    path.unlink()
    path.write_bytes(b"damaged")
    answer = await publish(acme, config, blob)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert await uploaded(acme, data) == blob
    assert (await publish(acme, config, blob)).status_code == 201


async def test_a_refused_publish_leaves_the_upload(
    acme: httpx2.AsyncClient, files: Upload, make_upload: Callable[..., Upload]
) -> None:
    config, data = files
    other = make_upload(1)[1]
    blob, other_blob = await uploaded(acme, data), await uploaded(acme, other)
    headers = {"Idempotency-Key": "k"}
    assert (await publish(acme, config, blob, headers=headers)).status_code == 201
    assert (await publish(acme, config, other_blob, headers=headers)).status_code == 422
    assert (await publish(acme, config, other_blob)).status_code == 201


@pytest.mark.parametrize(
    "content_range",
    ["", "bytes */10", "bytes 5-4/10", "bytes 0-10/10", "items 0-9/10", "bytes 0-9/*", "bytes 0-99999999999999999/9"],
)
async def test_nonsensical_range_is_refused(acme: httpx2.AsyncClient, content_range: str) -> None:
    data = bytes(10)
    upload = (await announce(acme, data)).json()
    answer = await acme.patch(
        f"/uploads/{upload['id']}", content=data, headers={"Content-Range": content_range} if content_range else {}
    )
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, "Content-Range")


async def test_body_length_differing_from_range_is_refused(acme: httpx2.AsyncClient) -> None:
    data = bytes(10)
    upload = (await announce(acme, data)).json()
    answer = await acme.patch(f"/uploads/{upload['id']}", content=data, headers={"Content-Range": "bytes 0-4/10"})
    assert answer.status_code == 400

    async def body() -> AsyncIterator[bytes]:
        yield data

    chunked = await acme.patch(f"/uploads/{upload['id']}", content=body(), headers={"Content-Range": "bytes 0-4/10"})
    assert chunked.status_code == 400
    assert (await acme.get(f"/uploads/{upload['id']}")).json()["received"] == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"size": 0}, 400),
        ({"size": -1}, 400),
        ({"size": "10"}, 400),
        ({"size": LIMITS.max_upload_bytes + 1}, 413),
        ({"sha256": "A" * 64}, 400),
        ({"sha256": "../../etc/passwd"}, 400),
        ({"sizes": 10}, 400),
    ],
)
async def test_invalid_upload_announcement_is_refused(
    acme: httpx2.AsyncClient, body: dict[str, Any], status: int
) -> None:
    assert (await announce(acme, b"0123456789", **body)).status_code == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"config": {}}, 400),
        ({"config": "{}", "blob": "0" * 64}, 400),
        ({"config": {}, "blob": 7}, 400),
        ({"config": {}, "blob": "0" * 64, "more": 1}, 400),
        ({"config": {"a": "x" * (65 * KIB)}, "blob": "0" * 64}, 413),
        ({"config": {"a": "x" * (2049 * KIB)}, "blob": "0" * 64}, 413),
    ],
)
async def test_invalid_publish_request_is_refused(acme: httpx2.AsyncClient, body: Any, status: int) -> None:
    assert (await acme.post("/adapters/sql/versions", json=body)).status_code == status


async def test_the_same_idempotency_key_announces_once(acme: httpx2.AsyncClient, files: Upload) -> None:
    _, data = files
    body = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    first = await acme.post("/uploads", json=body, headers={"Idempotency-Key": "k"})
    again = await acme.post("/uploads", json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotent-replayed"] == "true"


async def test_same_idempotency_key_publishes_once_despite_deleted_upload(
    acme: httpx2.AsyncClient, files: Upload
) -> None:
    config, data = files
    blob = await uploaded(acme, data)
    first = await publish(acme, config, blob, headers={"Idempotency-Key": "k"})
    assert first.status_code == 201
    upload = (await announce(acme, data)).json()
    assert (await acme.delete(f"/uploads/{upload['id']}")).status_code == 204
    again = await publish(acme, config, blob, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.content) == (201, first.content)
    assert (await publish(acme, config, blob)).status_code == 404


async def test_publishing_upload_takes_upload_slot(
    acme: httpx2.AsyncClient, services: Services, files: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, data = files
    blob = await uploaded(acme, data)
    may_end = asyncio.Event()
    certify = services.engine.verify

    async def wait(ref: AdapterRef) -> Certificate:
        await may_end.wait()
        return await certify(ref)

    monkeypatch.setattr(services.registry.certificates, "_certify", wait)
    count = LIMITS.max_concurrent_uploads_per_tenant
    publishing = [asyncio.create_task(publish(acme, config, blob)) for _ in range(count + 1)]
    done, _ = await asyncio.wait(publishing, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    may_end.set()
    assert [(task.result().status_code, task.result().json()["code"]) for task in done] == [
        (429, "rate_limit_exceeded")
    ]
    assert sorted(answer.status_code for answer in await asyncio.gather(*publishing)) == [200] * (count - 1) + [
        201,
        429,
    ]


async def test_uploads_count_towards_tenant_storage_quota(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, files: Upload
) -> None:
    config, data = files
    limit = {"limits": {"max_stored_bytes": len(config) + len(data) + 100}}
    assert (await admin.patch("/tenants/acme", json=limit)).status_code == 200
    blob = await uploaded(acme, data)
    refused = await announce(acme, data + b"x")
    assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")
    assert (await publish(acme, config, blob)).status_code == 201
    # once it is published it counts once
    assert (await announce(acme, bytes(50))).status_code == 201


async def test_unverified_upload_under_published_digest_counts_towards_quota(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, push: Any, files: Upload
) -> None:
    config, data = files
    assert (await push(acme)).status_code == 201
    limit = {"limits": {"max_stored_bytes": len(config) + len(data) + 1000}}
    assert (await admin.patch("/tenants/acme", json=limit)).status_code == 200
    body = {"sha256": hashlib.sha256(data).hexdigest()}
    assert (await acme.post("/uploads", json={**body, "size": 900})).status_code == 201
    refused = await acme.post("/uploads", json={**body, "size": 800})
    assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")


async def test_the_number_of_open_uploads_is_bounded(acme: httpx2.AsyncClient) -> None:
    for number in range(LIMITS.max_open_uploads_per_tenant):
        assert (await announce(acme, bytes([number]))).status_code == 201
    refused = await announce(acme, b"one more")
    assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")


async def test_published_uploads_free_slots_for_new_uploads(
    acme: httpx2.AsyncClient, make_upload: Callable[..., Upload]
) -> None:
    """A tenant that pushes all day isn't refused for what it has pushed,
    nor for what it has deleted again.
    """
    for number in range(LIMITS.max_open_uploads_per_tenant - 1):
        assert (await announce(acme, bytes([number]))).status_code == 201
    for seed in range(3):
        config, data = make_upload(seed)
        assert (await publish(acme, config, await uploaded(acme, data))).status_code == 201
        if seed == 1:
            assert (await acme.delete("/adapters/sql")).status_code == 204


async def test_two_replicas_alternate_on_same_upload(
    acme: httpx2.AsyncClient, services: Services, store: LocalStore, files: Upload
) -> None:
    """Neither keeps anything of it in memory: the second request might as well reach another
    process.
    """
    _, data = files
    upload = (await announce(acme, data)).json()
    await send(acme, upload, data, 0, 100)
    first = services.registry.uploads.resumable
    second = type(first)(
        first._database, LocalStore(store.root), first._slots, clock=first._clock, throttle=first._throttle
    )
    services.registry.uploads.resumable = second
    assert (await send(acme, upload, data, 100)).json()["is_complete"]
