"""A campaign against one server: attack after attack, beside another tenant's streams, which must
all say what they say alone.

The default run is small. The whole of it:

    LORASERVE_CAMPAIGN=full python -P -m pytest tests/faults/test_campaign.py -s
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
from attack import MIB, endless, post, resident_bytes, send, watch
from server_process import ADMIN_KEY, ServerProcess, environment, events
from stalled import head, stalled, statuses

from loraserve import Client
from loraserve.demo.frames import ADAPTERS, fresh_prompts
from loraserve.demo.pack import adapter_dirs

IS_FULL = os.environ.get("LORASERVE_CAMPAIGN") == "full"
TRAILER_MIB = 64 if IS_FULL else 8
NUM_BODIES = 4300 if IS_FULL else 300
NUM_UPLOADS = 16
NUM_STREAMS = 16
HANG_TIMEOUT_S = 5
LIVEZ_S = 1.0
"""Bounds each probe beside the attacks: streams, server and attackers share the cores here.

A quiet machine's figures are printed.
"""


@dataclass
class Streams:
    """A tenant's streams, one after the other in each of several places,
    compared with what they said alone.
    """

    server: ServerProcess
    key: str
    wanted: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    num_answered: int = 0
    is_over: bool = False

    def works(self) -> list[tuple[str, str]]:
        models = ("base", *ADAPTERS)
        return [(models[i % len(models)], frame.prompt) for i, frame in enumerate(fresh_prompts(NUM_STREAMS, 17))]

    async def ask(self, client: httpx2.AsyncClient, model: str, prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0, "stream": True}
        said = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code} {(await response.aread()).decode()[:300]}"
            async for line in response.aiter_lines():
                for event in events([line]):
                    if "error" in event:
                        return str(event["error"])
                    said += "".join(choice["text"] for choice in event["choices"])
        return said

    async def run(self, work: tuple[str, str]) -> None:
        async with self.connect() as client:
            while not self.is_over:
                said = await self.ask(client, *work)
                self.num_answered += 1
                if said != self.wanted[work]:
                    self.wrong.append(f"{work}: said {said!r}, alone {self.wanted[work]!r}")
                    await asyncio.sleep(0.5)

    def connect(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.AsyncClient(base_url=self.server.url, headers=headers, timeout=120)

    async def learn(self) -> None:
        async with self.connect() as client:
            for work in self.works():
                self.wanted[work] = await self.ask(client, *work)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ("--model-id", "base", "--memory-budget", "32MiB", "--host-cache", "64MiB")
    flags += ("--engine-hang-timeout", str(HANG_TIMEOUT_S))
    server = ServerProcess(tmp_path / "data", flags=flags, is_forked=False)
    server.start()
    yield server
    server.kill()


@pytest.mark.campaign
@pytest.mark.alone
async def test_attacks_leave_victim_streams_and_store_unchanged(
    server: ServerProcess, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    victim, *attackers = (server.make_tenant(name) for name in ("acme", "mallory", "eve"))
    with Client(server.url, api_key=victim) as client:
        for name, path in adapter_dirs().items():
            client.adapters.push(str(path), name=name)
    streams = Streams(server, victim)
    await streams.learn()
    assert server.process is not None
    words: list[str] = []
    tasks = [asyncio.create_task(streams.run(work)) for work in streams.works()]
    try:
        for name, attack in (
            ("no attack", lambda: asyncio.sleep(3)),
            (f"{TRAILER_MIB} MiB of trailers in each of four ways, without a key", lambda: trailers(server)),
            (f"{NUM_BODIES} stalled bodies", lambda: bodies(server, attackers[0])),
            (f"{NUM_UPLOADS} stalled uploads of two tenants", lambda: uploads(server, attackers, victim, tmp_path)),
            ("eight prompts of 1 MiB", lambda: prompts(server, attackers[0], "/v1/completions")),
            ("eight texts of 1 MiB to tokenize", lambda: prompts(server, attackers[0], "/tokenize")),
        ):
            before, resident = streams.num_answered, resident_bytes(server.process.pid)
            async with watch(server.url, pid=server.process.pid) as seen:
                await asyncio.sleep(0.5)
                outcome = await attack()
                # what an attack leaves behind delays probes too
                await asyncio.sleep(0.5)
            more = (resident_bytes(server.process.pid) - resident) / MIB
            words.append(
                f"{name}: {seen}; {streams.num_answered - before} streams answered; resident {more:+.0f} MiB; {outcome}"
            )
            assert seen.longest_s < LIVEZ_S, words
        words.append(await freeze_the_engine(server))
    finally:
        streams.is_over = True
        await asyncio.gather(*tasks)
        pytestconfig.get_terminal_writer().line("\n" + "\n".join(words))
    assert not streams.wrong, streams.wrong[:3]
    assert streams.num_answered > 2 * NUM_STREAMS
    assert server.stop() == 0
    await an_empty_registry(server)
    server.start()
    async with streams.connect() as client:
        for work, text in streams.wanted.items():
            assert await streams.ask(client, *work) == text
    assert server.stop() == 0


async def trailers(server: ServerProcess) -> str:
    tried = [
        send(server.url, endless(name), max_bytes=TRAILER_MIB * MIB, max_s=60, rest_s=5)
        for name in ("trailers", "trailer-value", "trailer-name", "chunk-extension")
    ]
    outcomes = await asyncio.gather(*tried)
    assert all(outcome.is_closed for outcome in outcomes)
    # the sockets' buffers alone take some
    assert all(outcome.num_sent_bytes < TRAILER_MIB * MIB for outcome in outcomes)
    return f"answered {[(outcome.status, outcome.num_sent_bytes) for outcome in outcomes]} (status, bytes)"


async def bodies(server: ServerProcess, key: str) -> str:
    """Bodies of 2 MiB that are half sent, from a tenant with a key."""
    data = head("POST", "/v1/completions", {"Authorization": f"Bearer {key}"}, length=2 * MIB) + b" " * (64 << 10)
    async with stalled(server.url, data, NUM_BODIES) as connections:
        await asyncio.sleep(5)
        found = Counter(statuses(connections))
    return f"answered {dict(found)}"


async def uploads(server: ServerProcess, attackers: list[str], victim: str, folder: Path) -> str:
    """Uploads that begin and stall, of two tenants; the victim pushes an adapter meanwhile."""
    begun = []
    for key in attackers:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "multipart/form-data; boundary=x"}
        part = b'--x\r\nContent-Disposition: form-data; name="weights"; filename="adapter_model.safetensors"\r\n\r\n'
        begun.append(head("POST", "/api/v1/adapters/stalled/versions", headers, length=64 * MIB) + part + b"\0" * 1000)
    source = shutil.copytree(adapter_dirs()["sql"], folder / f"pushed-{len(os.listdir(folder))}")
    count = NUM_UPLOADS // len(attackers)
    async with stalled(server.url, begun[0], count) as first, stalled(server.url, begun[1], count) as second:
        await asyncio.sleep(1)
        with Client(server.url, api_key=victim) as client:
            began = time.monotonic()
            version = await asyncio.to_thread(client.adapters.push, str(source), name="pushed")
        assert version.state == "ready"
        found = Counter(statuses(first)) + Counter(statuses(second))
    return f"answered {dict(found)}; the other tenant's push took {time.monotonic() - began:.1f} s"


async def prompts(server: ServerProcess, key: str, path: str) -> str:
    text = ("the quick brown fox jumps over the lazy dog " * (MIB // 44 + 1))[: MIB - 4096]
    data = post(
        path, {"model": "base", "prompt": text}, authorization=f"Bearer {key}", connection="close", user_agent="x"
    )
    outcomes = await asyncio.gather(*(send(server.url, [data], max_s=60, rest_s=60) for _ in range(8)))
    found = Counter(outcome.status for outcome in outcomes)
    assert set(found) <= {200, 400, 413, 429}, found
    return f"answered {dict(found)}"


async def freeze_the_engine(server: ServerProcess) -> str:
    """Stop the engine's process: not ready within five seconds, and replaced; streams go on."""
    engine = server.engine_pid()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    began = time.monotonic()
    async with httpx2.AsyncClient(base_url=server.url, timeout=5) as client:
        while (await client.get("/readyz")).status_code == 200:
            assert time.monotonic() < began + 5, "a stopped engine is said to be ready"
            await asyncio.sleep(0.1)
        noticed_s = time.monotonic() - began
        while (await client.get("/readyz")).status_code != 200:
            assert time.monotonic() < began + 60, "a stopped engine isn't replaced"
            await asyncio.sleep(0.1)
    assert server.engine_pid() != engine
    return f"engine stopped: not ready after {noticed_s:.1f} s, replaced after {time.monotonic() - began:.1f} s"


async def an_empty_registry(server: ServerProcess) -> None:
    """Start a server with an empty registry over the store: it must refuse,
    and every blob must be there afterwards.
    """
    blobs = {path for path in server.data_dir.rglob("*") if path.is_file() and len(path.name) == 64}
    assert blobs
    other = server.data_dir.parent / "other.db"
    command = [sys.executable, "-P", "-m", "loraserve.cli.main", "serve", "--model", str(server.model)]
    command += ["--port", str(server.port), "--data-dir", str(server.data_dir), "--database-url", f"sqlite:///{other}"]
    ended = await asyncio.to_thread(
        subprocess.run,
        [*command, *server.flags],
        env=environment(LORASERVE_ADMIN_KEY=ADMIN_KEY),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode not in (0, None)
    assert "adopt-store" in ended.stderr, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    assert all(path.exists() for path in blobs)
