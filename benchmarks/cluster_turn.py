"""One cluster, fresh, with one way of routing: what it loads and how soon it answers.

    python -m benchmarks.cluster_turn --routing multiplexed --model benchmarks/models/tiny

Prints one JSON object, in its last line. Each turn is a process of its own, as Ray is set up once
per process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import figures
from benchmarks.asking import Answer, Asker, Summary
from benchmarks.figures import Scrape
from benchmarks.make_model import MODULES, SIZES
from benchmarks.registering import base_spec, register
from benchmarks.serving import HERE, free_port, say
from benchmarks.synthetic import Adapters
from benchmarks.traffic import Ask, Zipf
from loraserve import Client
from loraserve.cluster.local import LocalCluster
from loraserve.cluster.options import ClusterOptions
from loraserve.settings import Settings

SIZE = "tiny"
RANK = 32
MEMORY_BUDGET, HOST_CACHE = "8MiB", "12MiB"
NUM_TENANTS = 4
EXPONENT = 0.9
PREFIXES_PER_ADAPTER = 2
PREFIX_TOKENS = 128
OWN_TOKENS, OUTPUT_TOKENS = (16, 49), (4, 9)
CONCURRENCY = 6
SETTLE_S = 2.5
"""Replicas report once a second."""


@dataclass(frozen=True, slots=True)
class SharedAsk(Ask):
    """A request whose prompt begins as others' of its adapter do."""

    prefix_seed: int = 0

    def prompt(self, vocab: int) -> list[int]:
        prefix, own = random.Random(self.prefix_seed), random.Random(self.prompt_seed)
        num_own = self.num_prompt_tokens - PREFIX_TOKENS
        return [prefix.randrange(260, vocab) for _ in range(PREFIX_TOKENS)] + [
            own.randrange(260, vocab) for _ in range(num_own)
        ]


def asks(num_requests: int, num_adapters: int, seed: int) -> list[SharedAsk]:
    """Requests by Zipf's law; streams of one seed are equal."""
    rng, zipf = random.Random(seed), Zipf(num_adapters, EXPONENT)
    found = []
    for _ in range(num_requests):
        adapter = zipf.pick(rng.random())
        lengths = PREFIX_TOKENS + rng.randrange(*OWN_TOKENS), rng.randrange(*OUTPUT_TOKENS)
        prefix = PREFIXES_PER_ADAPTER * adapter + rng.randrange(PREFIXES_PER_ADAPTER)
        found.append(SharedAsk(0.0, adapter, *lengths, rng.getrandbits(48), prefix))
    return found


def once_each(num_adapters: int, seed: int) -> list[SharedAsk]:
    """A request for each adapter, of one token, in a random order."""
    rng = random.Random(seed)
    numbers = rng.sample(range(num_adapters), num_adapters)
    return [
        SharedAsk(0.0, number, PREFIX_TOKENS + 1, 1, rng.getrandbits(48), PREFIXES_PER_ADAPTER * number)
        for number in numbers
    ]


@dataclass(frozen=True, slots=True)
class Turn:
    """Report of what one cluster did with the requests that were measured.

    Attributes:
        disk_loads: adapters that were read from the store into memory.
        device_loads: adapters that were copied to a device's memory, from the host's or after they
            were read.
        found: tier → requests whose adapter was there when they came to their replica.
        prefix_tokens, prefix_hits: prompt tokens that were looked for in a prefix cache, and found.
        held: tier → adapters in memory at the end, of all replicas together.
        reasons: requests by why their replica was chosen.
    """

    routing: str
    num_replicas: int
    summary: Summary
    disk_loads: float
    device_loads: float
    found: dict[str, float]
    prefix_tokens: float
    prefix_hits: float
    held: dict[str, float]
    device_evictions: float
    kv_evictions: float
    reasons: dict[str, float]
    ready_s: float


class Tenants:
    """The tenants' connections; adapter i is the tenant's with the number i % NUM_TENANTS."""

    def __init__(self, url: str, admin_key: str, vocab: int) -> None:
        self._url, self._admin_key, self._vocab = url, admin_key, vocab
        self._stack = AsyncExitStack()
        self._askers: list[Asker] = []

    async def __aenter__(self) -> Tenants:
        for i in range(NUM_TENANTS):
            with Client(self._url, api_key=self._admin_key) as admin:
                key = admin.keys.create(f"tenant-{i}", name="bench").key
            self._askers.append(await self._stack.enter_async_context(Asker(self._url, key, self._vocab)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def closed_loop(self, asked: Sequence[Ask]) -> list[Answer]:
        """Send all of them, some at a time: an answer that ended is followed by a request."""
        waiting, answers = list(asked)[::-1], list[Answer]()

        async def work() -> None:
            while waiting:
                ask = waiting.pop()
                answers.append(await self._askers[ask.adapter % NUM_TENANTS].ask(ask))

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())
        return answers

    async def scrape(self) -> Scrape:
        """Return the metrics, once the replicas have reported."""
        await asyncio.sleep(SETTLE_S)
        headers = {"Authorization": f"Bearer {self._admin_key}"}
        async with httpx2.AsyncClient(base_url=self._url, headers=headers, timeout=60) as client:
            return figures.parse((await client.get("/metrics")).raise_for_status().text)


async def measure(options: argparse.Namespace, url: str, admin_key: str, ready_s: float) -> Turn:
    async with Tenants(url, admin_key, SIZES[SIZE].vocab) as tenants:
        await tenants.closed_loop(once_each(options.adapters, options.seed))
        await tenants.closed_loop(asks(options.warming, options.adapters, 2 * options.seed))
        before = await tenants.scrape()
        answers = await tenants.closed_loop(asks(options.requests, options.adapters, 2 * options.seed + 1))
        after = await tenants.scrape()

    def rose(name: str, **labels: str) -> float:
        return figures.increase(before, after, f"loraserve_{name}", **labels)

    return Turn(
        routing=options.routing,
        num_replicas=options.replicas,
        summary=Summary.of(answers),
        disk_loads=rose("adapter_load_duration_seconds_count", tier="host"),
        device_loads=rose("adapter_load_duration_seconds_count", tier="device"),
        found={tier: rose("adapter_lookups_total", tier=tier) for tier in ("device", "host", "disk")},
        prefix_tokens=rose("prefix_cache_queries_total"),
        prefix_hits=rose("prefix_cache_hits_total"),
        held={tier: figures.total(after, "loraserve_adapters_resident", tier=tier) for tier in ("device", "host")},
        device_evictions=rose("adapter_evictions_total", tier="device"),
        kv_evictions=rose("kv_block_evictions_total"),
        reasons={
            reason: rose("cluster_routed_total", reason=reason) for reason in ("resident", "prefix", "hash", "load")
        },
        ready_s=ready_s,
    )


def run(options: argparse.Namespace) -> Turn:
    # Ray's workers unpickle what is here
    os.environ["PYTHONPATH"] = str(HERE.parent)
    adapters = Adapters(SIZES[SIZE], ranks=(RANK,), targets=MODULES)
    with tempfile.TemporaryDirectory(prefix="loraserve-bench-") as folder:
        admin_key = secrets.token_urlsafe(32)
        settings = Settings.load(
            model=str(options.model),
            model_id="base",
            data_dir=folder,
            port=free_port(),
            admin_key=admin_key,
            dtype="float32",
            memory_budget=MEMORY_BUDGET,
            host_cache=HOST_CACHE,
            max_num_seqs=16,
            max_model_len=512,
            num_threads=1,
            access_log=False,
            log_level="warning",
        )
        replicas = ClusterOptions(replicas=options.replicas, cpus_per_replica=0.5)
        cluster = LocalCluster(settings, replicas, lambda: _parts(options.routing))
        began = time.perf_counter()
        with cluster.running() as state:
            ready_s = time.perf_counter() - began
            with Client(state.url, api_key=admin_key) as admin:
                for i in range(NUM_TENANTS):
                    admin.tenants.create(f"tenant-{i}")
            base = base_spec(options.model, "none")
            for i in range(NUM_TENANTS):
                numbers = range(i, options.adapters, NUM_TENANTS)
                asyncio.run(register(Path(folder), base, adapters, numbers, f"tenant-{i}"))
            return asyncio.run(measure(options, state.url, admin_key, ready_s))


def _parts(routing: str) -> Any:
    from benchmarks.cluster_routing import parts

    return parts(routing)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routing", choices=("ours", "multiplexed", "random"), default="ours")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=192)
    parser.add_argument("--warming", type=int, default=400, help="requests before, after one for each adapter")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    turn = run(options)
    if turn.summary.num_complete < turn.summary.num_sent:
        say(f"{turn.summary.num_sent - turn.summary.num_complete} weren't answered: {turn.summary.errors}")
        sys.exit(1)
    print(json.dumps(asdict(turn)))


if __name__ == "__main__":
    main()
