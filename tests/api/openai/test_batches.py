"""/v1/files and /v1/batches over the real routes: lines are answered as clients' requests are, but
last; and everything that comes in is checked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from sqlalchemy import update

from loraserve import faults
from loraserve.api.batch_lines import BatchLines
from loraserve.api.inference.context import LAST_PRIORITY
from loraserve.api.openai.files import _plain_name
from loraserve.api.services import Services
from loraserve.batches import stored_files
from loraserve.db.models import FileRow
from loraserve.db.session import utc_now
from loraserve.errors import AdapterNotReady, Overloaded
from loraserve.limits import LIMITS, MIB
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports
from loraserve.tenancy.identity.tenants import TenantChange
from loraserve.types import EngineStats

BODY = {"model": "sql", "prompt": "hello", "max_tokens": 4}
CHAT = {"model": "sql", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
async def lines(services: Services, app: FastAPI) -> AsyncIterator[BatchLines]:
    """Batches run."""
    lines = BatchLines(services, app)
    services.batch_runner.start(lines)
    yield lines
    await services.batch_runner.close()


@pytest.fixture
async def globex(url: str, make_tenant: Callable[[str], Awaitable[Any]]) -> AsyncIterator[httpx2.AsyncClient]:
    tenant = await make_tenant("globex")
    async with httpx2.AsyncClient(base_url=url, headers=tenant.headers, timeout=10) as client:
        yield client


def line_of(custom_id: str, body: dict[str, Any] = BODY, url: str = "/v1/completions", **how: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **how}).encode()


async def upload(client: httpx2.AsyncClient, *lines: bytes, **fields: str) -> httpx2.Response:
    files = {"file": ("a/b\\in.jsonl", b"\n".join(lines), "application/jsonl")}
    return await client.post("/v1/files", files=files, data={"purpose": "batch"} | fields)


async def create(client: httpx2.AsyncClient, *lines: bytes, url: str = "/v1/completions", **how: Any) -> dict[str, Any]:
    file = (await upload(client, *lines)).raise_for_status().json()
    new = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h", **how}
    batch: dict[str, Any] = (await client.post("/v1/batches", json=new)).raise_for_status().json()
    return batch


async def end(client: httpx2.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.02)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).raise_for_status().json()
    return batch


async def content(client: httpx2.AsyncClient, file_id: str) -> dict[str, Any]:
    """The lines of a file by their custom ids."""
    text = (await client.get(f"/v1/files/{file_id}/content")).raise_for_status().text
    return {line["custom_id"]: line for line in map(json.loads, text.splitlines())}


@pytest.mark.usefixtures("lines")
async def test_a_batch_answers_as_the_route_does(client: httpx2.AsyncClient, services: Services, engine: Any) -> None:
    seeded = BODY | {"seed": 1}
    batch = await create(client, line_of("a", seeded), line_of("b", seeded | {"n": 2}), line_of("bad", BODY | {"n": 0}))
    assert (batch["object"], batch["status"], batch["request_counts"]["total"]) == ("batch", "validating", 0)
    ended = await end(client, batch)
    assert (ended["status"], ended["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    output = await content(client, ended["output_file_id"])
    alone = (await client.post("/v1/completions", json=seeded)).json()
    assert output["a"]["response"]["status_code"] == 200
    assert output["a"]["response"]["body"]["choices"] == alone["choices"]
    assert len(output["b"]["response"]["body"]["choices"]) == 2
    (problem,) = (await content(client, ended["error_file_id"])).values()
    refusal = (await client.post("/v1/completions", json=BODY | {"n": 0})).json()
    assert (problem["response"]["status_code"], problem["response"]["body"]) == (400, refusal)
    assert problem["response"]["request_id"].startswith("req_")
    listed = (await client.get("/v1/batches")).json()
    assert ([item["id"] for item in listed["data"]], listed["has_more"]) == ([batch["id"]], False)


@pytest.mark.usefixtures("lines")
async def test_each_endpoint_takes_batches(client: httpx2.AsyncClient, engine: Any) -> None:
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/embeddings": {"model": "sql", "input": "x"},
        "/v1/responses": {"model": "sql", "input": "x", "max_output_tokens": 2},
        "/v1/rerank": {"model": "sql", "query": "x", "documents": ["y"]},
        "/v1/score": {"model": "sql", "text_1": "x", "text_2": "y"},
    }
    for url, body in bodies.items():
        ended = await end(client, await create(client, line_of("one", body, url), url=url))
        assert ended["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, url


@pytest.mark.usefixtures("lines")
async def test_batch_lines_run_last_and_in_background(client: httpx2.AsyncClient, engine: Any) -> None:
    # an admin's priority has no place in a batch
    await end(client, await create(client, line_of("a", BODY | {"priority": 3})))
    assert [(request.priority, request.is_background) for request in engine.seen] == [(LAST_PRIORITY, True)]
    await client.post("/v1/completions", json=BODY | {"priority": 3})
    assert (engine.seen[-1].priority, engine.seen[-1].is_background) == (3, False)


async def test_lines_wait_for_clients_and_busy_engine(lines: BatchLines, engine: Any) -> None:
    assert lines.is_open()
    engine.stats = EngineStats(num_waiting=2)
    assert lines.is_open()  # its own lines wait
    engine.num_waiting_clients = 1
    assert not lines.is_open()
    engine.num_waiting_clients, engine.stats = 0, EngineStats(num_running=48)
    assert not lines.is_open()
    engine.stats = EngineStats(num_running=47, num_kv_blocks=10, num_kv_blocks_used=10)
    assert not lines.is_open()
    engine.stats = EngineStats(num_running=47, num_kv_blocks=10, num_kv_blocks_used=9)
    assert lines.is_open()


@pytest.mark.usefixtures("lines")
async def test_billed_usage_matches_batch_output(client: httpx2.AsyncClient, services: Services) -> None:
    ended = await end(client, await create(client, *(line_of(f"c{number}") for number in range(9))))
    output = await content(client, ended["output_file_id"])
    usages = [line["response"]["body"]["usage"] for line in output.values()]
    assert services.usage is not None
    (sums,) = await UsageReports(services.usage).all(UsageQuery(group_by=("adapter",)))
    assert sums.amounts.num_requests == 9
    assert sums.amounts.completion_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert sums.amounts.completion_tokens == ended["usage"]["output_tokens"]
    assert sums.amounts.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert services.usage.recorded == sums.amounts


@pytest.mark.usefixtures("lines")
async def test_a_refusal_for_now_is_waited_out(client: httpx2.AsyncClient, engine: Any) -> None:
    for failure in (Overloaded("The queue is full.", retry_after_s=0.05), AdapterNotReady("Still loading.")):
        failure.retry_after_s = 0.05  # type: ignore[attr-defined]
        engine.failure, engine.fail_after = failure, 0
        batch = await create(client, line_of("a"))
        seen = len(engine.seen)
        async with asyncio.timeout(10):
            while len(engine.seen) < seen + 2:
                await asyncio.sleep(0.01)
        engine.fail_after = None
        assert (await end(client, batch))["request_counts"]["completed"] == 1


@pytest.mark.usefixtures("lines")
async def test_late_refusal_keeps_line_status(client: httpx2.AsyncClient, services: Services, engine: Any) -> None:
    services.settings = services.settings.model_copy(update={"whole_answer_keep_alive_s": 0.01})
    engine.steps, engine.fail_after = asyncio.Semaphore(0), 0
    engine.failure = Overloaded("The queue is full.", retry_after_s=0.05)
    batch = await create(client, line_of("a"))
    async with asyncio.timeout(10):
        while not engine.seen:
            await asyncio.sleep(0.01)
        # longer than a client's answer would be silent
        await asyncio.sleep(0.05)
        engine.steps.release()
        while len(engine.seen) < 2:
            await asyncio.sleep(0.01)
    engine.fail_after = None
    for _ in range(64):
        engine.steps.release()
    assert (await end(client, batch))["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.usefixtures("lines")
async def test_batch_respects_tenant_rate_and_leaves_half(client: httpx2.AsyncClient, services: Services) -> None:
    change = TenantChange(limits={"requests_per_minute": 10, "max_concurrent_requests": 1})
    await services.authenticator.tenants.update("acme", change, actor="test")
    batch = await create(client, *(line_of(f"c{number}") for number in range(8)))
    async with asyncio.timeout(10):
        while not services.batch_runner.num_lines["retried"]:
            await asyncio.sleep(0.02)
    # a client still gets its answers
    for _ in range(4):
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    await services.authenticator.tenants.update(
        "acme", TenantChange(limits={"requests_per_minute": None}), actor="test"
    )
    assert (await end(client, batch))["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


@pytest.mark.usefixtures("lines")
async def test_impossible_request_fails_alone(client: httpx2.AsyncClient, services: Services) -> None:
    await services.authenticator.tenants.update("acme", TenantChange(limits={"tokens_per_minute": 60}), actor="test")
    ended = await end(client, await create(client, line_of("large", BODY | {"max_tokens": 100}), line_of("small")))
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (problem,) = (await content(client, ended["error_file_id"])).values()
    assert problem["response"]["body"]["error"]["code"] == "insufficient_quota"


@pytest.mark.usefixtures("lines")
async def test_batch_continues_after_key_is_revoked(
    client: httpx2.AsyncClient, services: Services, acme: Any, engine: Any
) -> None:
    engine.fail_after, engine.failure = 0, Overloaded("Later.", retry_after_s=0.05)
    batch = await create(client, line_of("a"))
    await services.authenticator.keys.revoke(acme.caller.tenant, acme.caller.key_id, actor="test")
    engine.fail_after = None
    async with asyncio.timeout(10):
        while not (await services.batches.get(acme.caller.tenant, batch["id"])).has_ended:
            await asyncio.sleep(0.02)
    assert (await services.batches.get(acme.caller.tenant, batch["id"])).num_completed == 1


LINES = {
    "not JSON": (b"{", None),
    "NaN": (line_of("a", BODY | {"temperature": float("nan")}), None),
    "a key twice": (b'{"custom_id": "a", "custom_id": "b"}', None),
    "no object": (b"[]", None),
    "an unknown field": (line_of("a", priority=1), None),
    "no custom_id": (line_of(None), "custom_id"),  # type: ignore[arg-type]
    "a number as custom_id": (line_of(1), "custom_id"),  # type: ignore[arg-type]
    "an empty custom_id": (line_of(""), "custom_id"),
    "a long custom_id": (line_of("x" * 513), "custom_id"),
    "another method": (line_of("a", method="GET"), "method"),
    "another url": (line_of("a", url="/v1/embeddings"), "url"),
    "no body": (line_of("a", None), "body"),  # type: ignore[arg-type]
    "no model": (line_of("a", {"prompt": "x"}), "body.model"),
    "an absent model": (line_of("a", BODY | {"model": "none"}), "body.model"),
    "another tenant's model": (line_of("a", BODY | {"model": "globex/secret"}), "body.model"),
    "a stream": (line_of("a", BODY | {"stream": True}), "body.stream"),
}


@pytest.mark.usefixtures("lines")
async def test_malformed_line_fails_batch_and_is_named(
    client: httpx2.AsyncClient, engine: Any, subtests: pytest.Subtests
) -> None:
    for name, (line, param) in LINES.items():
        with subtests.test(name):
            ended = await end(client, await create(client, line_of("good"), b"", line))
            assert ended["status"] == "failed"
            (error,) = ended["errors"]["data"]
            assert (error["line"], error["param"]) == (3, param)
            assert error["code"]
            assert "secret" not in error["message"] or "globex/secret" in error["message"]
    assert engine.seen == []


EXPIRY = "output_expires_after"
NEW = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
BATCHES = {
    "an unknown field": (NEW | {"foo": 1}, None),
    "no file": ({key: value for key, value in NEW.items() if key != "input_file_id"}, "input_file_id"),
    "a number as file": (NEW | {"input_file_id": 1}, "input_file_id"),
    "another endpoint": (NEW | {"endpoint": "/v1/models"}, "endpoint"),
    "another window": (NEW | {"completion_window": "1h"}, "completion_window"),
    "metadata of numbers": (NEW | {"metadata": {"a": 1}}, "metadata.a"),
    "much metadata": (NEW | {"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    "long metadata": (NEW | {"metadata": {"a": "x" * 513}}, "metadata"),
    "another anchor": (
        NEW | {"output_expires_after": {"anchor": "now", "seconds": 3600}},
        "output_expires_after.anchor",
    ),
    "too short": (
        NEW | {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        "output_expires_after.seconds",
    ),
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, str], str | None]] = {
    "another purpose": ({"file": b"x"}, {"purpose": "fine-tune"}, "purpose"),
    "no purpose": ({"file": b"x"}, {}, "purpose"),
    "no file": ({"purpose": b"batch"}, {}, "file"),
    "an empty file": ({"file": b""}, {"purpose": "batch"}, "file"),
    "an unknown part": ({"file": b"x"}, {"purpose": "batch", "foo": "x"}, None),
    "half an expiry": ({"file": b"x"}, {"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after.anchor"),
    "no number": (
        {"file": b"x"},
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "-1"},
        "expires_after.seconds",
    ),
    "a long purpose": ({"file": b"x"}, {"purpose": "x" * 2000}, "purpose"),
}


async def test_bad_input_is_refused_by_name(client: httpx2.AsyncClient, subtests: pytest.Subtests) -> None:
    for name, (body, param) in BATCHES.items():
        with subtests.test(name):
            answer = await client.post("/v1/batches", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for name, (files, data, param) in FORMS.items():
        with subtests.test(name):
            answer = await client.post("/v1/files", files=files, data=data)
            assert (answer.status_code in (400, 413), answer.json()["error"]["param"]) == (True, param)
    for path in ("files?limit=0", "files?order=up", "files?foo=1", "batches?limit=101", "batches?after=" + "x" * 65):
        with subtests.test(path):
            assert (await client.get(f"/v1/{path}")).status_code == 400
    for path in ("files/%00", "files/" + "x" * 500, "batches/é", "files/file-1/content", "batches/batch_1"):
        with subtests.test(path):
            assert (await client.get(f"/v1/{path}")).status_code == 404
    assert (await client.post("/v1/batches", json=NEW)).status_code == 404


async def test_file_is_returned_as_sent(client: httpx2.AsyncClient, acme: Any, services: Services) -> None:
    data = b"x" * (3 * MIB) + b"\n" + bytes(range(256))
    answer = await client.post("/v1/files", files={"file": ("a/b\\in.jsonl", data)}, data={"purpose": "batch"})
    file = answer.json()
    assert {name: file[name] for name in ("object", "bytes", "filename", "purpose", "status")} == {
        "object": "file",
        "bytes": len(data),
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert file["expires_at"] == file["created_at"] + LIMITS.batch_file_ttl_s
    assert (await client.get(f"/v1/files/{file['id']}/content")).content == data
    short = await upload(client, b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
    assert short.json()["expires_at"] == short.json()["created_at"] + 3600
    listed = (await client.get("/v1/files", params={"order": "asc", "limit": 1})).json()
    assert ([item["id"] for item in listed["data"]], listed["has_more"]) == ([file["id"]], True)
    rest = (await client.get("/v1/files", params={"order": "asc", "after": file["id"]})).json()
    assert [item["id"] for item in rest["data"]] == [short.json()["id"]]
    assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
    gone = await client.delete(f"/v1/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
    async with services.registry.database.write() as session:
        await session.execute(update(FileRow).values(expires_at=utc_now() - timedelta(seconds=1)))
    assert (await client.get("/v1/files")).json()["data"] == []
    assert await services.files.delete_expired() == 1


async def test_a_files_bytes_are_bounded_and_counted(
    client: httpx2.AsyncClient, services: Services, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as bounded:
        bounded.setattr(stored_files, "LIMITS", replace(LIMITS, max_files_per_tenant=1))
        assert (await upload(client, b"x" * 50)).status_code == 200
        many = await upload(client, b"x" * 50)
    assert (many.status_code, many.json()["error"]["code"]) == (429, "insufficient_quota")
    stored = (await client.get("/v1/files")).json()["data"][0]["bytes"]
    change = TenantChange(limits={"max_stored_bytes": 1000})
    await services.authenticator.tenants.update("acme", change, actor="test")
    large = await upload(client, b"x" * (1000 - stored + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (429, "insufficient_quota")


async def test_full_disk_gets_507_and_leaves_no_file(client: httpx2.AsyncClient) -> None:
    with faults.arm("blob.fsync", "ENOSPC"):
        full = await upload(client, b"x" * 50)
    assert (full.status_code, full.json()["error"]["code"]) == (507, "storage_full")
    assert (await client.get("/v1/files")).json()["data"] == []
    assert (await upload(client, b"x" * 50)).status_code == 200


async def test_foreign_files_and_batches_read_as_absent(client: httpx2.AsyncClient, globex: httpx2.AsyncClient) -> None:
    batch = await create(client, line_of("a"))
    file_id, batch_id = batch["input_file_id"], batch["id"]
    for method, path, theirs, absent in (
        ("GET", "/v1/files/{}", file_id, "file-1"),
        ("GET", "/v1/files/{}/content", file_id, "file-1"),
        ("DELETE", "/v1/files/{}", file_id, "file-1"),
        ("GET", "/v1/batches/{}", batch_id, "batch_1"),
        ("POST", "/v1/batches/{}/cancel", batch_id, "batch_1"),
    ):
        found = await globex.request(method, path.format(theirs))
        nothing = await globex.request(method, path.format(absent))
        assert (found.status_code, found.content) == (404, nothing.content)
    used = await globex.post("/v1/batches", json=NEW | {"input_file_id": file_id})
    assert (used.status_code, used.content) == (404, (await globex.post("/v1/batches", json=NEW)).content)
    assert (await globex.get("/v1/files")).json()["data"] == (await globex.get("/v1/batches")).json()["data"] == []
    after = (await globex.get("/v1/files", params={"after": file_id})).json()
    assert after["data"] == []


async def test_batch_is_cancelled_once_and_never_after_end(
    client: httpx2.AsyncClient, services: Services, app: FastAPI
) -> None:
    batch = await create(client, line_of("a"))
    for _ in range(2):
        assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelling"
    services.batch_runner.start(BatchLines(services, app))
    ended = await end(client, batch)
    assert (ended["status"], ended["output_file_id"], ended["error_file_id"]) == ("cancelled", None, None)
    again = await client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    await services.batch_runner.close()


async def test_a_key_without_the_scope_makes_no_batch(
    client: httpx2.AsyncClient, services: Services, acme: Any
) -> None:
    key = await services.authenticator.keys.create(
        acme.caller.tenant, name="reader", scopes=["adapters:read"], actor="test"
    )
    answer = await client.get("/v1/files", headers={"authorization": f"Bearer {key.secret}"})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("in.jsonl", "in.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("..", "file"),
        (".", "file"),
        ("a/..", "file"),
        (" .. ", "file"),
        # shown as exe.jsonl, turned around
        ("invoice\u202elnosj.exe", "invoicelnosj.exe"),
        ("\u2066x\u2069\u200f\ufeff", "x"),
        ('a\x00\r\nb\x7f\x85c"', "abc"),
        ("\u2028", "file"),
        ("données 東京.jsonl", "données 東京.jsonl"),
    ],
)
def test_file_name_keeps_only_visible_characters(given: str, kept: str) -> None:
    assert _plain_name(given.encode()) == kept
