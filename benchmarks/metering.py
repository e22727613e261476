"""Tokens billed against tokens received, over thousands of requests half of whose clients leave
before the end.

    python -m benchmarks.metering              # 10,000 requests: a few minutes on two cores
    python -m benchmarks.metering --quick      # 1,000

Tenants ask for the base, adapters and a sum of two, streamed and in one piece, one answer and
several. Half of the requests are left somewhere: the client closes its half of the connection and
reads what is on its way, so that it knows what it was given; all of that, and nothing else, has to
be billed. One more tenant's clients break the connection off instead: they can't know what was on
its way, and what is billed is at least what they saw. `GET /api/v1/usage` is compared with the
clients' own books, tenant by tenant and adapter by adapter; the program fails where the two differ.
Beside it: what recording takes of the server's time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import reporting
from benchmarks.leaving import Given, Request, Way, draw, send
from benchmarks.make_model import SIZES
from benchmarks.serving import Server, make_base, say, serve
from benchmarks.synthetic import Adapters
from loraserve import Client
from loraserve.db.session import Database
from loraserve.tenancy.billing.meter import UsageEvent, UsageMeter
from loraserve.types import TenantId

NUM_TENANTS, BREAKING = 4, 3
CONCURRENCY = 48
ADAPTERS = (0, 1, 2)
SETTLE_S = 60.0
PRICES = {"currency": "EUR", "prompt": "0.50", "cached": "0.05", "completion": "1.50"}
AMOUNTS = ("num_requests", "prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class Book:
    """Answers that one tenant's clients were given, by model."""

    num_sent: int = 0
    num_to_the_end: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    given: dict[str, Counter[str]] = field(default_factory=dict)
    cached_tokens: int = 0
    """Tokens of the answers that said how many."""
    num_wrong_usages: int = 0
    """Answers that said another number of tokens than they had, or another cost."""

    def add(self, given: Given) -> None:
        request = given.request
        self.num_sent += 1
        if given.error is not None:
            self.errors[given.error] += 1
        if given.has_something:
            amounts = Counter(num_requests=1, prompt_tokens=len(request.prompt), completion_tokens=given.num_tokens)
            self.given.setdefault(request.model, Counter()).update(amounts)
        if given.usage is not None:
            self.num_to_the_end += 1
            self.cached_tokens += given.usage["prompt_tokens_details"]["cached_tokens"]
            self.num_wrong_usages += not _is_right(given)

    def total(self, name: str) -> int:
        return sum(amounts[name] for amounts in self.given.values())


def _is_right(given: Given) -> bool:
    usage = given.usage or {}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prices = {name: Decimal(price) for name, price in PRICES.items() if name != "currency"}
    cost = (
        (usage["prompt_tokens"] - cached) * prices["prompt"]
        + cached * prices["cached"]
        + usage["completion_tokens"] * prices["completion"]
    ) / 1_000_000
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return counts == (len(given.request.prompt), given.num_tokens) and Decimal(usage["cost"]) == cost


def tenant_name(number: int) -> str:
    return f"metered-{number}"


def prepare(server: Server, adapters: Adapters) -> list[str]:
    """A key of each tenant; the tenants have the adapters, and prices."""
    keys = []
    with (
        tempfile.TemporaryDirectory() as folder,
        httpx2.Client(
            base_url=f"{server.url}/api/v1", headers={"Authorization": f"Bearer {server.admin_key}"}, timeout=60
        ) as admin,
    ):
        for number in range(NUM_TENANTS):
            name = tenant_name(number)
            admin.post("/tenants", json={"name": name, "prices": PRICES}).raise_for_status()
            keys.append(admin.post(f"/tenants/{name}/keys", json={"name": "bench"}).raise_for_status().json()["key"])
            with Client(server.url, api_key=keys[-1]) as client:
                for adapter in ADAPTERS:
                    client.adapters.push(adapters.write(adapter, Path(folder)), name=adapters.name(adapter))
    return keys


async def ask_all(server: Server, keys: Sequence[str], requests: Sequence[Request]) -> dict[int, Book]:
    """Every request, so many at a time; then the tenants' books."""
    books = {number: Book() for number in range(NUM_TENANTS)}
    waiting = iter(requests)
    num_done = 0

    async def work() -> None:
        nonlocal num_done
        for request in waiting:
            books[request.tenant].add(await send(server.url, keys[request.tenant], request))
            num_done += 1
            if num_done % 1000 == 0:
                say(f"  {num_done} of {len(requests)} requests …")

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return books


def billed(server: Server) -> dict[int, dict[str, dict[str, Any]]]:
    """Return what `GET /usage` says of each tenant and model once the server is idle."""
    with httpx2.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {server.admin_key}"}, timeout=60
    ) as admin:
        deadline = time.monotonic() + SETTLE_S
        while "loraserve_http_requests_live 1.0" not in admin.get("/metrics").text.splitlines():
            if time.monotonic() > deadline:
                raise SystemExit("the server still answers somebody")
            time.sleep(0.2)
        sums: dict[int, dict[str, dict[str, Any]]] = {}
        for number in range(NUM_TENANTS):
            params = {"tenant": tenant_name(number), "group_by": "adapter,version", "limit": "200"}
            data = admin.get("/api/v1/usage", params=params).raise_for_status().json()["data"]
            sums[number] = {model_of(item): item for item in data}
    return sums


def model_of(item: Mapping[str, Any]) -> str:
    """Tokens that the summed requests asked for."""
    if item["adapter"] is None:
        return "base"
    return f"{item['adapter']}@{item['version']}" if item["version"] else str(item["adapter"])


def differences(book: Book, sums: Mapping[str, Mapping[str, Any]], *, is_exact: bool) -> list[str]:
    """Where the bill isn't what clients were given; where they can't know that,
    where it is less.
    """
    found = []
    for model in sorted(book.given.keys() | sums.keys()):
        given, item = book.given.get(model, Counter()), sums.get(model, {})
        for name in AMOUNTS:
            bill = item.get(name, 0)
            if bill != given[name] if is_exact else bill < given[name]:
                found.append(f"{model}: {name} given {given[name]}, billed {bill}")
    cached = sum(item["cached_tokens"] for item in sums.values())
    if cached < book.cached_tokens:
        found.append(f"cached_tokens told {book.cached_tokens}, billed {cached}")
    if book.num_wrong_usages:
        found.append(f"{book.num_wrong_usages} answers said another usage or cost than theirs")
    return found


HEADER = [
    *("tenant", "its clients", "requests", "answered to the end", "with anything given", "billed"),
    *("prompt tokens given", "billed", "completion tokens given", "billed", "difference", "made for nobody", "cost"),
]


def row(number: int, book: Book, sums: Mapping[str, Mapping[str, Any]]) -> list[str]:
    def total(name: str) -> int:
        return sum(item[name] for item in sums.values())

    cost = sum((Decimal(item["cost"]) for item in sums.values()), Decimal(0))
    way = Way.BREAKS_OFF if number == BREAKING else Way.CLOSES_ITS_HALF
    cells: list[object] = [tenant_name(number), f"half: {way}", book.num_sent, book.num_to_the_end]
    for name in AMOUNTS:
        cells += [book.total(name), total(name)]
    cells += [total("completion_tokens") - book.total("completion_tokens"), total("undelivered_tokens")]
    return [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells] + [f"{cost} {PRICES['currency']}"]


def recording_s(folder: Path, count: int = 20_000) -> tuple[float, float]:
    """Seconds that recording a piece takes, and that writing down the end of an answer does."""
    meter = UsageMeter(Database(f"sqlite:///{folder}/unused.db"), folder)
    event = UsageEvent(TenantId("0" * 26), "", "lora-00001", 1, 0, 0, 0, 1, 1.8e9, price="EUR 0.5 0.05 1.5")
    started = time.perf_counter()
    for _ in range(count):
        meter.record(event)
    recorded = time.perf_counter()
    for _ in range(count):
        meter.record(event)
        meter.persist()
    sealed = time.perf_counter()
    record_s = (recorded - started) / count
    return record_s, (sealed - recorded) / count - record_s


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=sorted(SIZES))
    parser.add_argument("--requests", type=int, help="how many (default: 10,000)")
    parser.add_argument("--quick", action="store_true", help="1,000 requests")
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    options = parser.parse_args(arguments)
    options.requests = options.requests or (1000 if options.quick else 10_000)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    machine = reporting.facts()
    adapters = Adapters(SIZES[options.size], targets=("q_proj", "v_proj"))
    names = [f"{adapters.name(number)}@1" for number in ADAPTERS]
    models = ["base", *names, f"{names[0]}+{names[1]}"]
    model_dir = make_base(options.size)
    say("starting a server …")
    with serve(model_dir, options.quantize, flags=("--memory-budget", "256MiB", "--host-cache", "64MiB")) as server:
        keys = prepare(server, adapters)
        requests = draw(options.requests, NUM_TENANTS, models, SIZES[options.size].vocab, 1, breaking=BREAKING)
        started = time.perf_counter()
        books = asyncio.run(ask_all(server, keys, requests))
        seconds = time.perf_counter() - started
        sums = billed(server)
    with tempfile.TemporaryDirectory() as folder:
        record_s, seal_s = recording_s(Path(folder))
    wrong = {n: differences(books[n], sums[n], is_exact=n != BREAKING) for n in books}
    rows = [HEADER, ["---"] * len(HEADER), *(row(n, books[n], sums[n]) for n in books)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    errors = sum((book.errors for book in books.values()), Counter())
    page = f"""{len(requests):,} requests, {CONCURRENCY} at a time, in {seconds:.0f} s ({len(requests) / seconds:.0f} \
a second); half of them left by their clients.

{table}

- Recording a piece takes {1e6 * record_s:.1f} µs of the server's time; the end of an answer, which is written to the \
journal before it goes out, {1e6 * seal_s:.0f} µs.
- Requests that failed: {dict(errors) or "none"}.
- Differences: {"none" if not any(wrong.values()) else ""}
""" + "".join(f"  - {tenant_name(n)}: {text}\n" for n, texts in wrong.items() for text in texts)
    numbers = {"sums": sums, "seconds": seconds, "record_s": record_s, "seal_s": seal_s, "differences": wrong}
    reporting.finish("metering", "Tokens billed and tokens received", page, machine, options, arguments, **numbers)
    if any(wrong.values()):
        raise SystemExit("tokens billed aren't tokens received")


if __name__ == "__main__":
    main()
