"""An ingress that ends lets each connection have one more answer, and breaks none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, Router

from loraserve.api.http.client_address import TrustedProxies
from loraserve.api.http.listener import open_listener
from loraserve.cluster import front_door
from loraserve.cluster.front_door import FrontDoor
from loraserve.limits import LIMITS
from loraserve.tenancy.limits.shares import Shares

GRACE_S = 20.0


def make_services() -> SimpleNamespace:
    connections = Shares("c", "connections", 100)
    return SimpleNamespace(limits=LIMITS, rooms=SimpleNamespace(connections=connections), proxies=TrustedProxies())


class Application:
    """Answers at once, or once it is told to."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.router = Router([Route("/now", self.now), Route("/stream", self.stream)])

    async def now(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("now")

    async def stream(self, request: Request) -> StreamingResponse:
        async def pieces():  # type: ignore[no-untyped-def]
            yield "begun, "
            await self.may_end.wait()
            yield "ended"

        return StreamingResponse(pieces())


async def test_open_connections_end_after_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "_QUIET_S", 0.5)
    application = Application()
    services = make_services()
    listener = open_listener("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    door = FrontDoor(application.router, services, listener)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=GRACE_S) as client:
        # on two connections
        for answer in await asyncio.gather(client.get("/now"), client.get("/now")):
            assert "connection" not in answer.headers
        async with client.stream("GET", "/stream") as stream:
            pieces = stream.aiter_text()
            assert await anext(pieces) == "begun, "
            closing = asyncio.create_task(door.close(GRACE_S))
            await asyncio.sleep(0.1)
            # the other connection still answers, for the last time
            last = await client.get("/now")
            assert (last.text, last.headers["connection"]) == ("now", "close")
            assert not closing.done()
            with pytest.raises(httpx2.ConnectError):
                await client.get("/now")
            application.may_end.set()
            assert [piece async for piece in pieces] == ["ended"]
        assert not closing.done(), "a connection whose stream ends takes another request"
        # it began before and may be used again: once
        last = await client.get("/now")
        assert (last.text, last.headers["connection"]) == ("now", "close")
        async with asyncio.timeout(GRACE_S):
            await closing


async def test_idle_connections_end_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_door, "_QUIET_S", 0.2)
    services = make_services()
    listener = open_listener("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    door = FrontDoor(Application().router, services, listener)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=GRACE_S) as client:
        assert (await client.get("/now")).text == "now"
        async with asyncio.timeout(GRACE_S):
            await door.close(GRACE_S)
