"""nginx and Caddy, configured as deploy/ has them, hand on each event of a stream at once, and
leave tenants their answers while bodies of another one stall.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from campaigns import default_and_campaign
from flood import run_flood
from server_process import ServerProcess, free_port

PROGRAMS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
NGINX, CADDY = (shutil.which(name, path=PROGRAMS) for name in ("nginx", "caddy"))
DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
EVENTS, PAUSE_S = 4, 0.4


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """A server that sends an event now and then, to any request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            # a proxy that still sends a body when the answer comes may cut the answer
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(EVENTS):
                data = b"data: %d\n\n" % number
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
                await asyncio.sleep(PAUSE_S)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def nginx(folder: Path, port: int, config: str) -> AsyncIterator[int]:
    """nginx with this server before the port; yields its own port."""
    listen = free_port()
    config = config.replace("server 127.0.0.1:8000;", f"server 127.0.0.1:{port};")
    config = config.replace("listen 80;", f"listen 127.0.0.1:{listen};")
    assert f"127.0.0.1:{port};" in config
    assert f"127.0.0.1:{listen};" in config
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log; {user}\n"
        f"worker_rlimit_nofile 18000; events {{ worker_connections 18000; }}\n"
        f"http {{ access_log off; {paths}\n{config}\n}}\n"
    )
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    checked = await asyncio.to_thread(subprocess.run, [*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    async with running(command, listen):
        yield listen


@asynccontextmanager
async def caddy(folder: Path, port: int, config: str) -> AsyncIterator[int]:
    """Caddy with this server before the port; yields its own port."""
    listen = free_port()
    for own, tested in (
        ("reverse_proxy 127.0.0.1:8000", f"reverse_proxy 127.0.0.1:{port}"),
        ("loraserve.example.org {", f"http://127.0.0.1:{listen} {{"),
    ):
        assert own in config
        config = config.replace(own, tested)
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + config)
    environment = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    command = [str(CADDY), "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]
    async with running(command, listen, env=environment):
        yield listen


@asynccontextmanager
async def running(command: list[str], listen: int, env: dict[str, str] | None = None) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(*command, env=env)
    try:
        end = time.monotonic() + 20
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", listen)
            except OSError:
                assert process.returncode is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def arrivals(port: int) -> list[float]:
    """The times of the events' arrivals, from the first one on."""
    found: list[float] = []
    async with (
        httpx2.AsyncClient(timeout=30) as client,
        client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json={}) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                found.append(time.monotonic())
    assert len(found) == EVENTS
    return [one - found[0] for one in found]


@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
async def test_nginx_forwards_events_individually(tmp_path: Path) -> None:
    config = (DEPLOY / "nginx" / "loraserve.conf").read_text()
    async with upstream() as port, nginx(tmp_path, port, config) as listen:
        assert (await arrivals(listen))[-1] > (EVENTS - 2) * PAUSE_S
        assert httpx2.get(f"http://127.0.0.1:{listen}/metrics").status_code == 403


@pytest.mark.skipif(CADDY is None, reason="Caddy isn't installed")
async def test_caddy_forwards_events_individually(tmp_path: Path) -> None:
    config = (DEPLOY / "caddy" / "Caddyfile").read_text()
    async with upstream() as port, caddy(tmp_path, port, config) as listen:
        assert (await arrivals(listen))[-1] > (EVENTS - 2) * PAUSE_S
        assert httpx2.get(f"http://127.0.0.1:{listen}/metrics").status_code == 403


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that answers with the path of a request, as it came."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1]
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(path), path))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def path_through(listen: int) -> None:
    async with httpx2.AsyncClient() as client:
        for path in (
            "/api/v1/adapters/Qwen%2FMy-LoRA/versions",
            "/api/v1/adapters/x%3Av2",
            "/v1/models/Qwen%2FMy-LoRA",
        ):
            assert (await client.get(f"http://127.0.0.1:{listen}{path}")).text == path


@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
async def test_nginx_keeps_encoded_slash_of_name(tmp_path: Path) -> None:
    config = (DEPLOY / "nginx" / "loraserve.conf").read_text()
    async with echo() as port, nginx(tmp_path, port, config) as listen:
        await path_through(listen)


@pytest.mark.skipif(CADDY is None, reason="Caddy isn't installed")
async def test_caddy_keeps_encoded_slash_of_name(tmp_path: Path) -> None:
    config = (DEPLOY / "caddy" / "Caddyfile").read_text()
    async with echo() as port, caddy(tmp_path, port, config) as listen:
        await path_through(listen)


@pytest.fixture(params=default_and_campaign([400, 4300], default=[400]))
def flooded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A server that trusts no proxy, so that all have the proxy's address; and how many bodies of
    one tenant stall.
    """
    count: int = request.param
    max_files = 700 if count < 1000 else None
    server = ServerProcess(tmp_path / "data", is_forked=max_files is None, max_files=max_files)
    server.start()
    yield server, count
    server.kill()


async def check_tenants_behind(listen: int, server: ServerProcess, count: int) -> None:
    report = await run_flood(
        server,
        "bodies",
        count,
        key=server.make_tenant("acme"),
        others_key=server.make_tenant("globex"),
        url=f"http://127.0.0.1:{listen}",
        # of a server with few connections: until its head is read, each is its address's
        every_s=0.005 if count < 1000 else 0.0,
    )
    print(report)  # noqa: T201 - the campaign's figures
    assert set(report.statuses) == {200}, str(report)
    assert report.texts == {"[DONE]"}


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
@pytest.mark.parametrize("buffering", ["shipped", "off"])
async def test_nginx_leaves_tenants_answers_beside_stalled_bodies(
    flooded: tuple[ServerProcess, int], tmp_path: Path, buffering: str
) -> None:
    server, count = flooded
    config = (DEPLOY / "nginx" / "loraserve.conf").read_text()
    if buffering == "off":
        # each stalled body takes a connection of the server, too
        config = config.replace("proxy_buffering off;", "proxy_buffering off; proxy_request_buffering off;", 1)
    async with nginx(tmp_path, server.port, config) as listen:
        await check_tenants_behind(listen, server, count)


@pytest.mark.slow
@pytest.mark.skipif(CADDY is None, reason="Caddy isn't installed")
async def test_caddy_leaves_tenants_answers_beside_stalled_bodies(
    flooded: tuple[ServerProcess, int], tmp_path: Path
) -> None:
    server, count = flooded
    async with caddy(tmp_path, server.port, (DEPLOY / "caddy" / "Caddyfile").read_text()) as listen:
        await check_tenants_behind(listen, server, count)
