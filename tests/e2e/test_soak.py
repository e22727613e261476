"""A soak: streams of base and adapters, some under a grammar, clients that leave, uploads and
deletions, batches, stored responses, live adapters and a tenant at its limits, while engine and
server are killed and frozen.

Every answer equals what the same request said alone, what ended holds nothing, and after the last
disturbance memory stays level. LORASERVE_SOAK_S says how long (default: a minute; 1800 for the
whole of it), LORASERVE_SOAK_SIZE of which base: tiny, or S. LORASERVE_SOAK_MODEL names the folder
of a Llama of your own instead, LORASERVE_SOAK_QUANTIZE its format.

    LORASERVE_SOAK_S=1800 LORASERVE_SOAK_MODEL=DIR python -P -m pytest --all tests/e2e/test_soak.py
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest
from server_process import ServerProcess, events
from soak_beside import LIMITS, Beside

from loraserve import AsyncClient, errors

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from benchmarks.make_model import MODULES, SIZES, Size  # noqa: E402
from benchmarks.serving import make_base  # noqa: E402
from benchmarks.synthetic import Adapters  # noqa: E402

DURATION_S = float(os.environ.get("LORASERVE_SOAK_S", "60"))
MODEL = os.environ.get("LORASERVE_SOAK_MODEL")
SIZE = "S" if MODEL else os.environ.get("LORASERVE_SOAK_SIZE", "tiny")
"""Of a base of one's own it says how long things may take."""
QUANTIZE = os.environ.get("LORASERVE_SOAK_QUANTIZE", "none")
SEED = int(os.environ.get("LORASERVE_SOAK_SEED", "20261123"))
NUM_STREAMS, NUM_ADAPTERS, NUM_UPLOADED = 24, 12, 12
"""Streams at once; adapters that are asked for all the time;
uploaded adapters that are kept at once.
"""
BUDGETS = {"tiny": "24MiB", "S": "1GiB"}
RANKS = (8, 16)
HANG_TIMEOUT_S = {"tiny": 3, "S": 10}[SIZE]
RECOVERY_S = {"tiny": 20.0, "S": 60.0}[SIZE]
"""Time after a disturbance in which requests may be refused; streams that were open go on in any
case, but when the server is killed.
"""
DISTURBED_PART, LEVEL_PART = 0.6, 1 / 3
"""Disturbances are within the first part of the time; memory must be level within the last."""
LEVEL_BYTES, LEVEL_RATIO = 48 << 20, 1.02
BESIDE = "engine beside its budgets"
"""The engine's resident bytes less those that fill its budgets: KV blocks and adapters, kept until
something needs their room.
"""
MAX_OPEN_FILES_MORE = 16
"""The database's connections are opened as they're needed."""


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def has_template(model: Path) -> bool:
    """Return whether a base in a folder has a chat template."""
    return (model / "chat_template.jinja").exists() or "chat_template" in (model / "tokenizer_config.json").read_text()


SHAPE = SIZES[SIZE] if MODEL is None else Size.of(Path(MODEL))


@dataclass
class Work:
    """A request, and the text that it was answered with when it was alone; None:
    it wasn't sent yet.
    """

    model: str
    body: dict[str, object]
    text: str | None = None


@dataclass
class Soak:
    server: ServerProcess
    key: str
    adapters: Adapters
    folder: Path
    has_chats: bool
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    server_is_down: bool = False
    generation: int = 0
    """Number of times that the server was killed."""
    excused_until_s: float = 0.0
    """Time until which refusals are due to a disturbance."""
    end_s: float = 0.0
    rss: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"server": [], "engine": [], BESIDE: []})

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end_s

    @property
    def is_disturbed(self) -> bool:
        return self.server_is_down or time.monotonic() < self.excused_until_s

    def connect(self) -> httpx2.AsyncClient:
        limits = httpx2.Limits(max_connections=200, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.AsyncClient(base_url=self.server.url, headers=headers, timeout=300, limits=limits)

    def make_work(self, model: str, number: int) -> Work:
        vocab = SHAPE.vocab
        drawn = random.Random(SEED + number)
        prompt = [drawn.randrange(4, vocab) for _ in range(drawn.choice((3, 17, 40, 120)))]
        body: dict[str, object] = {"prompt": prompt, "max_tokens": drawn.choice((16, 48, 96)), "temperature": 0}
        if number % 4 == 3:
            body |= {"temperature": 1.0, "seed": number}
        if number % 5 == 2:
            return Work(model, {**body, "structured_outputs": {"json": SCHEMA}, "max_tokens": 64})
        return Work(model, {**body, "ignore_eos": True})

    async def ask(self, client: httpx2.AsyncClient, work: Work, leave_after: int | None = None) -> str | None:
        """Stream one answer and compare it; None: it was refused or cut off by a disturbance,
        which is counted.

        A stream that is cut off must still have said what the reference begins with.
        """
        generation, said = self.generation, ""
        try:
            async with client.stream(
                "POST", "/v1/completions", json={"model": work.model, "stream": True, **work.body}
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode()[:300]
                    if response.status_code == 503 and self.is_disturbed:
                        self.counts["refused in a disturbance"] += 1
                    else:
                        self.wrong.append(f"{work.model}: {response.status_code} {text}")
                    return None
                seen = 0
                async for line in response.aiter_lines():
                    for event in events([line]):
                        if "error" in event:
                            self.wrong.append(f"{work.model}: {event['error']}")
                            return None
                        said += "".join(choice["text"] for choice in event.get("choices", []))
                        seen += 1
                    if leave_after is not None and seen >= leave_after:
                        break
        except httpx2.TransportError as error:
            if generation == self.generation and not self.server_is_down:
                self.wrong.append(f"{work.model}: {type(error).__name__} {error}")
            self.counts["cut off with the server"] += 1
            self.compare(work, said, is_whole=False)
            return None
        self.compare(work, said, is_whole=leave_after is None)
        self.counts["left" if leave_after is not None else "answered"] += 1
        return said

    def compare(self, work: Work, said: str, *, is_whole: bool) -> None:
        if work.text is None:
            return
        if said != work.text if is_whole else not work.text.startswith(said):
            self.wrong.append(f"{work.model} {work.body}: said {said!r}, alone {work.text!r}")

    async def stream(self, pool: list[Work], seed: int) -> None:
        rng = random.Random(SEED * 1000 + seed)
        async with self.connect() as client:
            while not self.is_over:
                leave_after = rng.randint(1, 12) if rng.random() < 0.2 else None
                if await self.ask(client, rng.choice(pool), leave_after) is None:
                    await asyncio.sleep(0.5)

    async def upload_and_delete(self) -> None:
        """Push new adapters, ask each twice at different times, which must say the same,
        and delete the oldest.
        """
        kept: list[Work] = []
        number = NUM_ADAPTERS
        async with AsyncClient(self.server.url, api_key=self.key) as api, self.connect() as client:
            while not self.is_over:
                number += 1
                path = self.adapters.write(number, self.folder)
                name = path.name
                try:
                    await api.adapters.push(str(path), name=name)
                    self.counts["uploaded"] += 1
                    work = self.make_work(name, number)
                    work.text = await self.ask(client, work)
                    kept.append(work)
                    again = self.rng.choice(kept)
                    said = await self.ask(client, again)
                    again.text = again.text if again.text is not None else said
                    if len(kept) > NUM_UPLOADED:
                        oldest = kept.pop(0)
                        await api.adapters.delete(oldest.model)
                        self.counts["deleted"] += 1
                except (errors.ClientError, errors.EngineError, errors.Overloaded) as error:
                    if not self.is_disturbed:
                        self.wrong.append(f"pushing {name}: {type(error).__name__} {error}")
                    self.counts["uploads disturbed"] += 1
                shutil.rmtree(path)
                await asyncio.sleep(DURATION_S / 300)

    async def disturb(self) -> None:
        """Kill the engine, freeze it, kill the server, and so on,
        evenly over the first part of the time.
        """
        kinds: list[Callable[[], Awaitable[None]]] = [self.kill_engine, self.freeze_engine, self.kill_engine]
        kinds += [self.kill_server, self.freeze_engine, self.kill_engine]
        share = DISTURBED_PART * DURATION_S / len(kinds)
        for kind in kinds:
            await asyncio.sleep(share / 2)
            await kind()
            self.counts[kind.__name__.replace("_", " ")] += 1
            await asyncio.sleep(share / 2)

    async def kill_engine(self) -> None:
        await self.end_engine(signal.SIGKILL)

    async def freeze_engine(self) -> None:
        """Stop its process, as a debugger or a driver that hangs does:
        the server must find out and start another.
        """
        await self.end_engine(signal.SIGSTOP)

    async def end_engine(self, how: signal.Signals) -> None:
        engine = self.server.engine_pid()
        while engine is None:
            await asyncio.sleep(0.1)
            engine = self.server.engine_pid()
        within_s = RECOVERY_S + (HANG_TIMEOUT_S if how == signal.SIGSTOP else 0)
        self.excused_until_s = time.monotonic() + within_s
        os.kill(engine, how)
        if not await self.is_ready_again(within_s, lambda: self.server.engine_pid() not in (None, engine)):
            self.wrong.append(f"no other engine within {within_s:.0f} s of {how.name}")

    async def is_ready_again(self, within_s: float, has_changed: Callable[[], bool]) -> bool:
        async with httpx2.AsyncClient(base_url=self.server.url) as client:
            deadline = time.monotonic() + within_s
            while time.monotonic() < deadline:
                await asyncio.sleep(0.2)
                try:
                    if has_changed() and (await client.get("/readyz", timeout=5)).status_code == 200:
                        return True
                except httpx2.TransportError:
                    pass
        return False

    async def kill_server(self) -> None:
        """Kill the server alone: its engine has to notice, and end by itself."""
        assert self.server.process is not None
        engine = self.server.engine_pid()
        self.server_is_down, self.generation = True, self.generation + 1
        self.server.process.kill()
        await asyncio.to_thread(self.server.process.wait)
        await asyncio.to_thread(self.server.start)
        self.excused_until_s = time.monotonic() + 2.0
        self.server_is_down = False
        deadline = time.monotonic() + 60
        while engine is not None and psutil.pid_exists(engine):
            if time.monotonic() > deadline:
                self.wrong.append("the killed server's engine is still there after 60 s")
                os.kill(engine, signal.SIGKILL)
                break
            await asyncio.sleep(0.2)

    async def watch(self) -> None:
        while not self.is_over:
            try:
                held = budgeted_bytes(await asyncio.to_thread(self.server.metrics))
            except httpx2.HTTPError:
                held = None
            for name, pid in self.pids().items():
                try:
                    rss = psutil.Process(pid).memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                self.rss[name].append((time.monotonic(), rss))
                if name == "engine" and held is not None:
                    self.rss[BESIDE].append((time.monotonic(), rss - held))
            await asyncio.sleep(max(DURATION_S / 600, 0.25))

    def pids(self) -> dict[str, int]:
        assert self.server.process is not None
        found = {"server": self.server.process.pid}
        if (engine := self.server.engine_pid()) is not None:
            found["engine"] = engine
        return found

    def num_connections(self) -> int:
        """Count the server's connections from clients."""
        server = psutil.Process(self.pids()["server"])
        return sum(
            one.laddr.port == self.server.port and one.status == psutil.CONN_ESTABLISHED
            for one in server.net_connections("tcp")
        )

    def num_open_files(self) -> dict[str, int]:
        return {name: psutil.Process(pid).num_fds() for name, pid in self.pids().items()}

    def level(self, name: str) -> tuple[float, float]:
        """Return a process's resident bytes at the begin and at the end of the last part of the
        time.

        Both are medians of a fifth of it.
        """
        start_s = self.end_s - LEVEL_PART * DURATION_S
        last = [rss for at_s, rss in self.rss[name] if at_s >= start_s]
        fifth = max(len(last) // 5, 1)
        return statistics.median(last[:fifth]), statistics.median(last[-fifth:])


def budgeted_bytes(metrics: dict[str, float]) -> float:
    """Return the bytes of KV blocks and adapters that the engine holds now,
    on the device and in the host cache.
    """
    uses = ("kv_used", "kv_idle", "adapters_used", "adapters_idle")
    device = sum(metrics[f'loraserve_device_memory_bytes{{use="{use}"}}'] for use in uses)
    return device + metrics['loraserve_adapter_bytes{tier="host"}']


@pytest.fixture
def soak(tmp_path: Path) -> Iterator[Soak]:
    flags = ("--model-id", "base", "--memory-budget", BUDGETS[SIZE], "--host-cache", "128MiB")
    flags += ("--engine-hang-timeout", str(HANG_TIMEOUT_S), "--retention-s", "0", "--quantize", QUANTIZE)
    base = make_base(SIZE) if MODEL is None else Path(MODEL)
    server = ServerProcess(tmp_path / "data", base, flags, is_forked=False)
    server.start()
    adapters = Adapters(SHAPE, ranks=RANKS, targets=MODULES)
    try:
        yield Soak(server, server.make_tenant("acme"), adapters, tmp_path / "adapters", has_template(base))
        assert server.stop() == 0
    finally:
        server.kill()


HELD = ("loraserve_requests_running", "loraserve_requests_waiting", 'loraserve_kv_blocks{state="used"}')
HELD += ("loraserve_adapter_pins", "loraserve_tenants_active")


async def settled(soak: Soak) -> dict[str, float]:
    """Return the metrics once nothing is held any more.

    Raises:
        AssertionError: something is, after fifteen seconds.
    """
    for _ in range(150):
        metrics = await asyncio.to_thread(soak.server.metrics)
        if not any(metrics[name] for name in HELD) and metrics["loraserve_http_requests_live"] <= 1:
            return metrics
        await asyncio.sleep(0.1)
    raise AssertionError({name: metrics[name] for name in HELD})


@pytest.mark.campaign
@pytest.mark.alone
async def test_answers_stay_identical_under_churn_without_leaks(soak: Soak, pytestconfig: pytest.Config) -> None:
    async with AsyncClient(soak.server.url, api_key=soak.key) as api, soak.connect() as client:
        names = []
        for number in range(NUM_ADAPTERS):
            path = soak.adapters.write(number, soak.folder)
            await api.adapters.push(str(path), name=path.name)
            names.append(path.name)
        pool = [soak.make_work(model, i) for i, model in enumerate((["base"] * 4 + names) * 3)]
        for work in pool:
            work.text = await soak.ask(client, work)
            assert work.text, soak.wrong
    beside = Beside(soak, pool, soak.server.make_tenant("globex", limits=LIMITS))
    open_files = soak.num_open_files()
    soak.counts.clear()
    soak.end_s = time.monotonic() + DURATION_S
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_STREAMS):
            group.create_task(soak.stream(pool, i))
        group.create_task(soak.upload_and_delete())
        group.create_task(beside.run(soak.has_chats))
        group.create_task(soak.disturb())
        group.create_task(soak.watch())
    metrics = await settled(soak)
    left, num_connections = soak.num_open_files(), soak.num_connections()
    levels = {name: soak.level(name) for name in soak.rss}
    mib = {name: f"{begin / 2**20:.0f} → {end / 2**20:.0f} MiB" for name, (begin, end) in levels.items()}
    words = f"\nsoak of {DURATION_S:.0f} s, {SIZE}: {dict(soak.counts)}; resident {mib}; files {open_files} → {left}"
    pytestconfig.get_terminal_writer().line(words)
    assert not soak.wrong, f"{len(soak.wrong)} wrong, the first: {soak.wrong[:5]}"
    assert metrics["loraserve_invariant_violations_total"] == 0
    assert soak.counts["kill engine"] == 3
    assert soak.counts["freeze engine"] == 2
    assert soak.counts["kill server"] == 1
    assert soak.counts["answered"] > NUM_STREAMS
    assert soak.counts["uploaded"] > 1
    assert all(soak.counts[name] for name in ("batches", "live adapters", "limited", "limited: 429")), soak.counts
    assert bool(soak.counts["responses"]) == soak.has_chats
    assert num_connections == 0
    for name, num_files in left.items():
        assert num_files <= open_files[name] + MAX_OPEN_FILES_MORE, (name, open_files, left)
    if DURATION_S >= 600:
        # a shorter one's caches are still filling
        for name in ("server", BESIDE):
            begin, end = levels[name]
            assert end <= max(begin + LEVEL_BYTES, begin * LEVEL_RATIO), (name, mib)
