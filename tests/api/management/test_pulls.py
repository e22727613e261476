"""Operations over HTTP, and the pulls that are some: allowed, bounded, watched, cancelled."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
import torch
from safetensors.numpy import load, save
from sqlalchemy import update

from adapters_store import LocalStore
from loraserve.api.services import Services
from loraserve.db.models import OperationRow
from loraserve.db.session import utc_now
from loraserve.errors import Overloaded, StorageError, StorageFull
from loraserve.limits import LIMITS
from loraserve.registry import operations
from loraserve.registry.operations import OperationProgress, Operations
from loraserve.registry.publishing import pulls, sources
from loraserve.registry.publishing.pulls import Pulls

Upload = tuple[bytes, bytes]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "c" * 40


@pytest.fixture
def files(make_upload: Callable[..., Upload]) -> dict[str, bytes]:
    config, weights = make_upload()
    return {CONFIG: config, WEIGHTS: weights}


class Origin:
    """A source in memory, which waits before the weights until it may go on."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.address = "s3://models/sql"
        self.revision = None
        self.files = files
        self.told_size: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def open(self, file: str) -> tuple[int | None, Iterator[bytes]]:
        if file not in self.files:
            raise sources.NoSuchFile(f"{self.address} has no file {file}.")
        data = self.files[file]

        def read() -> Iterator[bytes]:
            for start in range(0, len(data), 100):
                self.gate.wait(10)
                yield data[start : start + 100]

        return self.told_size if file == WEIGHTS and self.told_size else len(data), read()


@pytest.fixture
def origin(files: dict[str, bytes], services: Services, monkeypatch: pytest.MonkeyPatch) -> Origin:
    origin = Origin(files)
    monkeypatch.setattr(pulls, "parse_source", lambda text: origin)
    allow(services, "s3://models/*")
    return origin


def allow(services: Services, *patterns: str) -> None:
    registry = services.registry
    registry.pulls = Pulls(registry.uploads, registry.inspector, registry.publisher, registry.operations, patterns)


async def begin(admin: httpx2.AsyncClient, source: str = "s3://models/sql", **body: Any) -> httpx2.Response:
    return await admin.post("/adapters/sql/pulls", json={"source": source, **body}, headers={"X-Tenant": "acme"})


async def until_ended(client: httpx2.AsyncClient, begun: httpx2.Response) -> dict[str, Any]:
    assert begun.status_code == 202, begun.text
    async with asyncio.timeout(20):
        while True:
            found: dict[str, Any] = (await client.get(f"/operations/{begun.json()['id']}")).json()
            if found["state"] != "running":
                return found
            await asyncio.sleep(0.02)


async def test_pulled_adapter_becomes_ordinary_version(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, files: dict[str, bytes]
) -> None:
    begun = await begin(admin)
    assert begun.headers["location"] == f"/api/v1/operations/{begun.json()['id']}"
    assert (begun.json()["state"], begun.json()["kind"]) == ("running", "pull")
    ended = await until_ended(acme, begun)
    assert (ended["state"], ended["error"]) == ("done", None)
    total = sum(map(len, files.values()))
    assert ended["progress"] == {"bytes_done": total, "bytes_total": total}
    version = (await acme.get("/adapters/sql/versions/1")).json()
    assert (version["digest"], version["aliases"]) == (ended["result"]["digest"], ["live"])
    assert [row["id"] for row in (await acme.get("/operations")).json()["data"]] == [ended["id"]]


async def test_extra_files_are_pulled_too(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin) -> None:
    origin.files |= {"chat_template.jinja": b"{{ messages[0].content }}", "tool_parser": b"hermes\n"}
    assert (await until_ended(acme, await begin(admin)))["state"] == "done"
    version = (await acme.get("/adapters/sql/versions/1")).json()
    assert ([file["name"] for file in version["extra_files"]], version["tool_parser"]) == (
        ["chat_template.jinja"],
        "hermes",
    )
    origin.files["generation_config.json"] = b" " * (LIMITS.max_generation_config_bytes + 1)
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], "exceeds the limit" in ended["error"]["message"]) == ("failed", True)


async def test_pull_joins_shards(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin) -> None:
    digest = (await until_ended(acme, await begin(admin)))["result"]["digest"]
    tensors = load(origin.files.pop(WEIGHTS))
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        origin.files[shard] = save({name: tensors[name] for name in tensors if places[name] == shard})
    origin.files[f"{WEIGHTS}.index.json"] = json.dumps({"weight_map": places}).encode()
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], ended["result"]["digest"]) == ("done", digest), ended
    del origin.files["part-1.safetensors"]
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], "part-1.safetensors" in ended["error"]["message"]) == ("failed", True)
    origin.files.clear()
    ended = await until_ended(acme, await begin(admin))
    assert "no file adapter_config.json" in ended["error"]["message"]


async def test_older_weights_are_pulled(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin) -> None:
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in load(origin.files[WEIGHTS]).items()}, buffer)
    plain = (await until_ended(acme, await begin(admin)))["result"]["digest"]
    del origin.files[WEIGHTS]
    ended = await until_ended(acme, await begin(admin))
    assert "has no file adapter_model.safetensors" in ended["error"]["message"]
    origin.files["adapter_model.bin"] = buffer.getvalue()
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], ended["result"]["digest"]) == ("done", plain), ended


async def test_without_promotion_no_alias_moves(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin
) -> None:
    await until_ended(acme, await begin(admin, promote=False))
    assert (await acme.get("/adapters/sql/versions/1")).json()["aliases"] == []


async def test_only_an_admin_pulls(acme: httpx2.AsyncClient, origin: Origin) -> None:
    answer = await acme.post("/adapters/sql/pulls", json={"source": "s3://models/sql"})
    assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


@pytest.mark.parametrize(
    ("source", "patterns", "status"),
    [
        ("s3://models/sql", (), 403),
        ("s3://models/sql", ("s3://model/*", "hf://models/*"), 403),
        ("s3://models-of-others/sql", ("s3://models/*",), 403),
        ("hf://acme/sql@main", ("hf://acme",), 403),
        ("https://example.org/sql", ("*",), 400),
        ("file:///etc", ("*",), 400),
        ("/etc/passwd", ("*",), 400),
        ("s3://models/../other", ("*",), 400),
        ("hf://acme/sql/more", ("*",), 400),
        ("hf://acme/../../x", ("*",), 400),
        ("hf://acme/sql@a..b", ("*",), 400),
        ("hf://acme/sql@refs/pr/7", ("hf://acme/*",), 400),
        ("s3://models//sql", ("s3://models//*",), 403),
        ("s3://KEY:SECRET@models/sql", ("*",), 400),
    ],
)
async def test_disallowed_source_is_refused(
    admin: httpx2.AsyncClient,
    acme: httpx2.AsyncClient,
    services: Services,
    source: str,
    patterns: tuple[str, ...],
    status: int,
) -> None:
    allow(services, *patterns)
    answer = await begin(admin, source)
    assert answer.status_code == status
    assert "SECRET" not in answer.text
    assert (await acme.get("/operations")).json()["data"] == []


async def test_cancelled_pull_leaves_no_trace(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, store: LocalStore
) -> None:
    origin.gate.clear()
    begun = await begin(admin)
    cancelled = await acme.delete(f"/operations/{begun.json()['id']}")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "running")
    origin.gate.set()
    assert (await until_ended(acme, begun))["state"] == "cancelled"
    assert (await acme.get("/adapters/sql")).status_code == 404
    assert list(store.iter_digests()) == []
    # what has ended stays as it is
    assert (await acme.delete(f"/operations/{begun.json()['id']}")).json()["state"] == "cancelled"


async def test_cancellation_reaches_different_server(
    admin: httpx2.AsyncClient,
    acme: httpx2.AsyncClient,
    origin: Origin,
    services: Services,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraserve.registry.operations._BEAT_S", 0.02)
    origin.gate.clear()
    begun = await begin(admin)
    other = Operations(services.registry.operations._database, clock=utc_now)
    await other.cancel(None, begun.json()["id"], actor="x")
    progress = services.registry.operations._running[begun.json()["id"]][1]
    async with asyncio.timeout(10):
        while not progress.cancelled.is_set():
            await asyncio.sleep(0.01)
    origin.gate.set()
    assert (await until_ended(acme, begun))["state"] == "cancelled"


async def test_foreign_operation_is_absent(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, globex: httpx2.AsyncClient, origin: Origin
) -> None:
    begun = await begin(admin)
    await until_ended(acme, begun)
    assert (await globex.get("/operations")).json()["data"] == []
    for method in ("GET", "DELETE"):
        answers = [await globex.request(method, f"/operations/{id}") for id in (begun.json()["id"], "0" * 26)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert {**answers[0].json(), "request_id": ""} == {**answers[1].json(), "request_id": ""}
    assert (await admin.get("/operations")).json()["data"][0]["id"] == begun.json()["id"]


async def test_source_exceeding_size_limit_is_cut_off(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin
) -> None:
    origin.files = {CONFIG: b" " * (LIMITS.max_adapter_config_bytes + 1), WEIGHTS: b""}
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], ended["error"]["code"]) == ("failed", "adapter_format")
    assert "exceeds the limit" in ended["error"]["message"]


async def test_truncated_source_fails(admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin) -> None:
    origin.told_size = 5000
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], ended["error"]["code"]) == ("failed", "adapter_format")


@pytest.mark.parametrize(("piece_s", "state"), [(20.0, "failed"), (0.001, "done")])
async def test_dripping_source_is_abandoned(
    admin: httpx2.AsyncClient,
    acme: httpx2.AsyncClient,
    origin: Origin,
    store: LocalStore,
    services: Services,
    piece_s: float,
    state: str,
) -> None:
    registry, clock = services.registry, itertools.count()
    # each piece of 100 bytes takes so long, the first one too
    registry.pulls = Pulls(
        registry.uploads,
        registry.inspector,
        registry.publisher,
        registry.operations,
        ["*"],
        monotonic=lambda: next(clock) // 2 * piece_s,
    )
    ended = await until_ended(acme, await begin(admin))
    assert ended["state"] == state
    if state == "done":
        return
    assert ended["error"]["code"] == "source_too_slow"
    for text in (origin.address, str(LIMITS.min_pull_bytes_per_s), "push the files"):
        assert text in ended["error"]["message"]
    assert ended["progress"]["bytes_done"] < 1000
    assert list(store.iter_digests()) == []


async def test_unservable_adapter_fails_with_reasons(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin
) -> None:
    origin.files[WEIGHTS] = b"no safetensors"
    ended = await until_ended(acme, await begin(admin))
    assert (ended["state"], ended["error"]["code"]) == ("failed", "adapter_format")


async def test_operation_of_lost_server_has_failed(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, services: Services
) -> None:
    ended = await until_ended(acme, await begin(admin))
    async with services.registry.operations._database.write() as session:
        await session.execute(
            update(OperationRow).values(state="running", updated_at=utc_now().replace(year=2020), result=None)
        )
    lost = (await acme.get(f"/operations/{ended['id']}")).json()
    assert (lost["state"], lost["error"]["code"]) == ("failed", "operation_lost")


async def test_stopping_server_marks_operations_stopped(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, services: Services
) -> None:
    origin.gate.clear()
    begun = await begin(admin)
    closing = asyncio.create_task(services.registry.operations.close())
    await asyncio.sleep(0)
    origin.gate.set()
    await closing
    ended = (await acme.get(f"/operations/{begun.json()['id']}")).json()
    assert (ended["state"], ended["error"]["code"]) == ("failed", "operation_stopped")


async def test_number_of_running_operations_is_bounded(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin
) -> None:
    origin.gate.clear()
    begun = [await begin(admin) for _ in range(LIMITS.max_concurrent_operations)]
    assert (await begin(admin)).status_code == 503
    origin.gate.set()
    for one in begun:
        await until_ended(acme, one)


async def test_simultaneous_operations_stay_within_limit(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, services: Services
) -> None:
    origin.gate.clear()
    tenant = (await services.authenticator.tenants.get("acme")).id
    pull = services.registry.pulls.begin
    beginning = [
        pull(tenant, "sql", "s3://models/sql", actor="test") for _ in range(LIMITS.max_concurrent_operations + 3)
    ]
    begun = await asyncio.gather(*beginning, return_exceptions=True)
    origin.gate.set()
    assert sum(isinstance(one, Overloaded) for one in begun) == 3
    async with asyncio.timeout(20):
        while services.registry.operations.num_running:
            await asyncio.sleep(0.02)
    # what was refused holds no place
    await until_ended(acme, await begin(admin))


def refuse_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> asyncio.Event:
    """The next write of an operation's progress fails; the event is set then."""
    as_json, refused = operations._as_json, asyncio.Event()

    def refuse(progress: OperationProgress) -> dict[str, int | None]:
        if not refused.is_set():
            refused.set()
            raise error
        return as_json(progress)

    monkeypatch.setattr(operations, "_as_json", refuse)
    monkeypatch.setattr(operations, "_BEAT_S", 0.02)
    return refused


async def test_unwritten_operation_end_is_written_on_retry(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rest(*args: object) -> None:
        pass

    monkeypatch.setattr(Operations, "_beat", rest)
    origin.gate.clear()
    begun = await begin(admin)
    refused = refuse_once(monkeypatch, StorageFull("The disk is full."))
    origin.gate.set()
    assert (await until_ended(acme, begun))["state"] == "done"
    assert refused.is_set()


async def test_operation_is_renewed_after_any_failure(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.gate.clear()
    refused = refuse_once(monkeypatch, RuntimeError("a bug"))
    refused.set()
    begun = await begin(admin)
    refused.clear()
    async with asyncio.timeout(5):
        await refused.wait()
    failed_at = utc_now()
    async with asyncio.timeout(5):
        while (
            datetime.fromisoformat((await acme.get(f"/operations/{begun.json()['id']}")).json()["updated_at"])
            < failed_at
        ):
            await asyncio.sleep(0.02)
    origin.gate.set()
    await until_ended(acme, begun)


async def test_the_same_idempotency_key_pulls_once(
    admin: httpx2.AsyncClient, acme: httpx2.AsyncClient, origin: Origin
) -> None:
    headers = {"X-Tenant": "acme", "Idempotency-Key": "k"}
    answers = [
        await admin.post("/adapters/sql/pulls", json={"source": "s3://models/sql"}, headers=headers) for _ in range(2)
    ]
    assert [answer.json()["id"] for answer in answers] == [answers[0].json()["id"]] * 2
    await until_ended(acme, answers[0])


class Hub(ThreadingHTTPServer):
    """The two files of acme/sql, as the hub gives them."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.files = files
        self.asked: list[str] = []
        self.encoding: str | None = None
        self.redirect: str | None = None
        """Where a file is instead, as the hub's are at a CDN."""
        self.gate = threading.Event()
        """For the rest of a body, after its first bytes."""
        self.gate.set()


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.server.asked.append(self.path)
        if with_body and self.server.redirect is not None:
            self.send_response(302)
            self.send_header("Location", self.server.redirect.replace("{path}", self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = self.server.files.get(self.path.rpartition("/")[2])
        if data is None or not self.path.startswith("/acme/sql/resolve/"):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        if self.server.encoding is not None:
            self.send_header("Content-Encoding", self.server.encoding)
        self.end_headers()
        if with_body:
            self.wfile.write(data[:10])
            self.server.gate.wait(5)
            self.wfile.write(data[10:])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    hub = Hub(dict(files))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def read(source: sources.Source, file: str) -> bytes:
    size, pieces = source.open(file)
    data = b"".join(pieces)
    assert size == len(data)
    return data


def test_hub_repository_is_read_at_single_commit(hub: Hub, files: dict[str, bytes]) -> None:
    source = sources.parse_source("hf://acme/sql@main")
    assert {file: read(source, file) for file in files} == files
    assert source.revision == COMMIT
    assert [path for path in hub.asked if "/resolve/main/" in path] == [f"/acme/sql/resolve/main/{CONFIG}"]


@pytest.mark.parametrize(
    ("redirect", "found"),
    [
        ("http://127.0.0.1:9/latest", "isn't public"),
        ("http://169.254.169.254/latest/meta-data", "isn't public"),
        ("http://[::1]:9/", "isn't public"),
        ("http://[::ffff:10.0.0.1]/", "isn't public"),
        ("http://localhost:9/", "isn't public"),
        ("ftp://203.0.113.7/x", "to ftp"),
        # to itself, without an end
        ("{path}", "more than 8 times"),
    ],
)
def test_redirect_to_private_address_is_refused(hub: Hub, redirect: str, found: str) -> None:
    hub.redirect = redirect
    with pytest.raises(StorageError, match=found):
        read(sources.parse_source("hf://acme/sql"), CONFIG)


def test_redirect_from_https_to_http_is_refused() -> None:
    secure, plain = httpx2.URL("https://hub.example.org/x"), httpx2.URL("http://1.1.1.1/x")
    with httpx2.Client() as client, pytest.raises(StorageError, match="from https to http"):
        sources._request_elsewhere(client, secure, plain, {}, "hf://acme/sql")


def test_redirect_connects_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has a private address when it is looked up a second time is no way in."""
    answers = iter(["93.184.216.34", "169.254.169.254"])

    def look_up(host: str, port: int | str, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 443))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    source, target = httpx2.URL("https://hub.example.org/x"), httpx2.URL("https://cdn.example.org:8443/y?z=1")
    with httpx2.Client() as client:
        request = sources._request_elsewhere(client, source, target, {"Authorization": "Bearer hf_x"}, "hf://acme/sql")
    assert str(request.url) == "https://93.184.216.34:8443/y?z=1"
    assert request.headers["host"] == "cdn.example.org:8443"
    assert request.extensions["sni_hostname"] == "cdn.example.org"
    assert "authorization" not in request.headers


def test_redirect_behind_proxy_keeps_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    source, target = httpx2.URL("https://hub.example.org/x"), httpx2.URL("https://1.1.1.1/y")
    with httpx2.Client() as client:
        request = sources._request_elsewhere(client, source, target, {}, "hf://acme/sql")
    assert (str(request.url), "sni_hostname" in request.extensions) == ("https://1.1.1.1/y", False)


def test_file_missing_on_hub_is_named(hub: Hub) -> None:
    del hub.files[WEIGHTS]
    source = sources.parse_source("hf://acme/sql")
    with pytest.raises(sources.AdapterFormatError, match=WEIGHTS):
        source.open(WEIGHTS)


def test_hub_bytes_are_delivered_on_arrival(hub: Hub, files: dict[str, bytes]) -> None:
    hub.gate.clear()
    _, pieces = sources.parse_source("hf://acme/sql").open(WEIGHTS)
    first = next(pieces)
    hub.gate.set()
    assert first == files[WEIGHTS][:10]
    assert first + b"".join(pieces) == files[WEIGHTS]


def test_unrequested_hub_encoding_is_refused(hub: Hub) -> None:
    hub.encoding = "gzip"
    _, pieces = sources.parse_source("hf://acme/sql").open(CONFIG)
    with pytest.raises(StorageError, match=r"encoding that wasn.t requested \(gzip\)"):
        next(pieces)


def test_a_folder_of_a_bucket_is_read(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="needs obstore")
    from bucket import bucket_service

    with bucket_service() as service:
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        url = service.make("models") + "/sql"
        for name, data in files.items():
            service.put(f"models/sql/{name}", data)
        source = sources.parse_source(url)
        assert {file: read(source, file) for file in files} == files
        with pytest.raises(sources.AdapterFormatError, match=r"none\.json"):
            source.open("none.json")
