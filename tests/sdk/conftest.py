"""A real HTTP server on this machine that answers what a test tells it to,
and remembers what it was asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from loraserve import AsyncClient, Client

KEY = "sk-lora-test"
VERSION = {
    "name": "sql",
    "version": 1,
    "digest": "ab" * 32,
    "state": "ready",
    "size_bytes": 10,
    "rank": 8,
    "target_modules": ["q_proj"],
    "aliases": ["live"],
    "created_at": "2026-01-02T03:04:05Z",
    "checks": [],
}
ALIAS = {"adapter": "sql", "name": "live", "version": 1, "updated_at": "2026-01-02T03:04:05Z"}
ADAPTER = {
    "name": "sql",
    "aliases": {"live": 1},
    "num_versions": 1,
    "latest_version": 1,
    "created_at": "2026-01-02T03:04:05Z",
    "updated_at": "2026-01-02T03:04:05Z",
}
TENANT = {"id": "01J", "name": "acme", "limits": {"max_adapters": None}, "created_at": "2026-01-02T03:04:05Z"}
PEFT_WEIGHTS_BYTES = 1024 * 1024
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "sql",
    "choices": [{"index": 0, "text": "SELECT", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
}


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    """As it was sent, still encoded."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """Answers with `answers` in turn. An answer is a response, or a function that makes one."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    answers: deque[Response | Callable[[], Response]] = field(default_factory=deque)
    late_s: float = 0.0
    """How long the next answer is held back."""

    def answer(self, body: object = None, status: int = 200, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append(
            Response(status_code=status, headers=named) if body is None else JSONResponse(body, status, named)
        )

    def answer_with_completion(self, **headers: str) -> None:
        self.answer(COMPLETION, 200, **headers)

    def answer_with_version(self, **fields: object) -> None:
        self.answer(VERSION | fields, 201)

    def answer_with_upload(self, received: int = 0, *, size: int = PEFT_WEIGHTS_BYTES, **fields: object) -> None:
        body = {"id": "01UP", "sha256": "", "size": size, "received": received, "is_complete": received == size}
        self.answer(body | {"expires_at": "2026-01-02T03:04:05Z"} | fields)

    def answer_with_push(self, **fields: object) -> None:
        """Everything that a push asks for: an upload, its one piece, the version."""
        self.answer_with_upload()
        self.answer_with_upload(PEFT_WEIGHTS_BYTES)
        self.answer_with_version(**fields)

    def break_connection(self) -> None:
        """The answer begins and never ends."""
        self.answer_with_stream(b"{", breaks=True)

    def answer_with_alias(self, status: int = 200, etag: str = '"r1"', **fields: object) -> None:
        self.answer(ALIAS | fields, status, etag=etag)

    def answer_with_adapters(self, *names: str, next_cursor: str | None = None) -> None:
        self.answer({"data": [ADAPTER | {"name": name} for name in names], "next_cursor": next_cursor})

    def answer_with_tenant(self) -> None:
        self.answer(TENANT, 201)

    def refuse(self, status: int, code: str, message: str = "No.", **headers: str) -> None:
        """With OpenAI's envelope."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        self.answer({"error": error}, status, **headers)

    def answer_late(self, seconds: float) -> None:
        self.late_s = seconds
        self.answer_with_completion()

    def answer_with_stream(self, *pieces: bytes, breaks: bool = False, content_type: str = "text/event-stream") -> None:
        """The pieces one by one, each in a packet of its own; then a clean end,
        or a connection that is cut.
        """

        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
                await anyio.sleep(0.005)
            if breaks:
                raise ConnectionResetError("the test cuts the connection")

        headers = {"x-request-id": "req-9", "x-loraserve-adapter": "sql@1"}
        self.answers.append(lambda: StreamingResponse(body(), media_type=content_type, headers=headers))

    async def handle(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append(
            Asked(request.method, request.scope["raw_path"].decode(), dict(request.query_params), request.headers, body)
        )
        answer = self.answers.popleft()
        late_s, self.late_s = self.late_s, 0.0
        await anyio.sleep(late_s)
        return answer() if callable(answer) and not isinstance(answer, Response) else answer


@pytest.fixture(scope="session")
def running_server() -> Iterator[Server]:
    server = Server()

    async def handle(request: Request) -> Response:
        return await server.handle(request)

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])])
    runner = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    port = runner.servers[0].sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    yield server
    runner.should_exit = True
    thread.join(5)


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    running_server.asked.clear()
    running_server.answers.clear()
    yield running_server
    assert not running_server.answers, "the client asked less often than the test expected"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORASERVE_URL", "LORASERVE_API_KEY", "LORASERVE_TENANT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def waits() -> list[float]:
    """How long the clients below would have slept before each retry."""
    return []


@pytest.fixture
def client(server: Server, waits: list[float]) -> Iterator[Client]:
    with Client(server.url, api_key=KEY) as client:
        client._transport._sleep = waits.append  # type: ignore[assignment]
        yield client


@pytest.fixture
async def async_client(server: Server, waits: list[float]) -> AsyncIterator[AsyncClient]:
    async def sleep(delay: float) -> None:
        waits.append(delay)

    async with AsyncClient(server.url, api_key=KEY) as client:
        client._transport._sleep = sleep
        yield client


@pytest.fixture
def peft_dir(tmp_path: Path) -> Path:
    """A directory with an adapter's two files; the weights are more than one piece of an upload."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(bytes(range(256)) * (PEFT_WEIGHTS_BYTES // 256))
    return directory
