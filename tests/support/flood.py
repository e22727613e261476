"""Floods of connections that hold what they get, beside streams and requests of another client."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2
from attack import MIB, resident_bytes
from server_process import ServerProcess
from stalled import head, stalled

FLOODS = ("silent", "half-heads", "bad-keys", "bodies")


@dataclass
class Report:
    """What a flood did to the others: their answers, and the server's descriptors and memory."""

    flood: str
    num_connections: int
    num_streams: int
    statuses: Counter[int | str] = field(default_factory=Counter)
    """Answers to the others' requests; an error's name where there was none."""
    seconds: list[float] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    most_descriptors: int = 0
    grown_bytes: int = 0
    num_open_at_end: int = 0

    def __str__(self) -> str:
        seconds = sorted(self.seconds)
        return (
            f"{self.flood}: {self.num_connections} connections beside {self.num_streams} streams: answers "
            f"{dict(self.statuses)}, p50 {seconds[len(seconds) // 2]:.2f} s, longest {seconds[-1]:.2f} s; at most "
            f"{self.most_descriptors} descriptors, {self.grown_bytes / MIB:.0f} MiB more; "
            f"{self.num_open_at_end} of the flood open at its end"
        )


def flood_bytes(flood: str, key: str) -> bytes:
    """Return what each connection of a flood sends before it falls silent."""
    if flood == "silent":
        return b""
    if flood == "half-heads":
        return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "
    secret = key if flood == "bodies" else "sk-lora-none"
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    return head("POST", "/v1/completions", headers, length=100_000) + b'{"prompt": "'


async def run_flood(
    server: ServerProcess,
    flood: str,
    count: int,
    *,
    key: str,
    others_key: str,
    url: str | None = None,
    flood_at: str = "127.0.0.2",
    others_at: str = "127.0.0.1",
    num_streams: int = 16,
    num_rounds: int = 1,
    tls: ssl.SSLContext | None = None,
    shakes_hands: bool = True,
    every_s: float = 0.0,
) -> Report:
    """Flood a server from one address while another tenant's streams and requests go on.

    Args:
        url: of a proxy before the server; None: the server's own.
        num_rounds: floods, one after the other, each beside streams of its own.
        shakes_hands: whether the flood's connections do, of a server that speaks TLS.
        every_s: between two of the flood's connections.
    """
    url = url or server.url
    report = Report(flood, count, num_streams)
    assert server.process is not None
    pid = server.process.pid
    before = resident_bytes(pid)
    transport = httpx2.AsyncHTTPTransport(
        local_address=others_at, verify=tls or False, limits=httpx2.Limits(max_connections=num_streams + 8)
    )
    headers = {"Authorization": f"Bearer {others_key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, transport=transport) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        for _ in range(num_rounds):
            # half of the streams have begun before the flood
            first = [asyncio.create_task(_stream(client, models[0]["id"], report)) for _ in range(num_streams // 2)]
            async with stalled(
                url,
                flood_bytes(flood, key),
                count,
                source=flood_at,
                tls=tls if shakes_hands else None,
                every_s=every_s,
            ) as connections:
                second = [
                    asyncio.create_task(_stream(client, models[0]["id"], report))
                    for _ in range(num_streams - num_streams // 2)
                ]
                streams = asyncio.gather(*first, *second)
                while not streams.done():
                    report.most_descriptors = max(report.most_descriptors, len(os.listdir(f"/proc/{pid}/fd")))
                    await _ask(url, headers, others_at, tls, report)
                    await asyncio.sleep(0.05)
                await streams
                report.num_open_at_end = sum(not connection.is_closed for connection in connections)
    report.grown_bytes = resident_bytes(pid) - before
    return report


async def _stream(client: httpx2.AsyncClient, model: str, report: Report) -> None:
    body = {"model": model, "prompt": "list the tickets", "max_tokens": 60, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True}
    began, text = time.monotonic(), ""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            report.statuses[answer.status_code] += 1
            async for line in answer.aiter_lines():
                text += line
    except httpx2.HTTPError as error:
        report.statuses[type(error).__name__] += 1
        return
    report.seconds.append(time.monotonic() - began)
    report.texts.add(text.rpartition("data: ")[2])


async def _ask(url: str, headers: dict[str, str], address: str, tls: ssl.SSLContext | None, report: Report) -> None:
    """Make a request over a connection of its own, as a new client would."""
    began = time.monotonic()
    transport = httpx2.AsyncHTTPTransport(local_address=address, verify=tls or False)
    try:
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=20, transport=transport) as client:
            report.statuses[(await client.get("/api/v1/adapters?limit=1")).status_code] += 1
    except httpx2.HTTPError as error:
        report.statuses[type(error).__name__] += 1
    report.seconds.append(time.monotonic() - began)
