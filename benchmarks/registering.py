"""Registers many adapters with a running server's registry,
without asking its engine for a certificate of each.

    python -m benchmarks.registering DATA_DIR --model benchmarks/models/S --size S \\
        --first 10 --count 990

It is the server's own way in (`loraserve.registry`: checked, digested, stored and committed) from
another process; of the server it shares the database and the store. A certificate takes the engine
longer than everything else of an upload together, and thousands of them would take hours: they
aren't what is measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import torch

from adapters_store import LocalStore
from benchmarks.make_model import SIZES
from benchmarks.pushing import progress
from benchmarks.serving import TENANT
from benchmarks.synthetic import Adapters
from loraserve.db.session import Database
from loraserve.model.checkpoint.loader import load_model
from loraserve.registry.registry import Registry
from loraserve.tenancy.identity.tenants import find_tenant
from loraserve.types import BaseSpec

NUM_WORKERS = 4


def base_spec(model: Path, quantize: str) -> BaseSpec:
    """Return the facts that a server of this base knows of it."""
    decoder = load_model(
        model, model_id="base", dtype=torch.float32, quantize=quantize, device="cpu", max_model_len=None
    )
    return decoder.spec


async def register(data: Path, base: BaseSpec, adapters: Adapters, numbers: range, tenant_name: str = TENANT) -> None:
    """Each adapter has a version that a server of this data directory serves; durable."""
    database, store = Database(f"sqlite:///{data / 'registry.db'}"), LocalStore(data / "blobs")
    registry = Registry(database, store, lambda: base)
    async with database.read() as session:
        tenant = (await find_tenant(session, tenant_name)).id
    turns = progress(numbers)

    async def work() -> None:
        for number in turns:
            config, weights = adapters.files(number)
            staged = await registry.uploads.stage(tenant)
            try:
                await asyncio.to_thread(staged.write, weights)
                await registry.publisher.publish(tenant, adapters.name(number), config, staged, actor="benchmark")
            finally:
                await registry.uploads.release(tenant, staged)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_WORKERS):
                group.create_task(work())
    finally:
        await database.dispose()
        store.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a running server's data directory")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--targets", default="q_proj")
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, required=True)
    options = parser.parse_args(arguments)
    ranks = tuple(int(rank) for rank in options.ranks.split(","))
    adapters = Adapters(SIZES[options.size], ranks=ranks, targets=tuple(options.targets.split(",")))
    base = base_spec(options.model, options.quantize)
    started = time.perf_counter()
    asyncio.run(register(options.data, base, adapters, range(options.first, options.first + options.count)))
    print(json.dumps({"registered": options.count, "wall_s": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
