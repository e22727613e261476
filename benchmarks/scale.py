"""What 1, 10 and 1,000 machines and ten million adapters take, calculated from measured results.

    python -m benchmarks.scale      # the tables of docs/scale.md, which a test compares

Nothing is measured here: figures are those of benchmarks/results, and the assumptions below.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from adapters_store.objects import PIECE_BYTES
from benchmarks import figures
from benchmarks.registry_rows import NUM_SERVERS
from loraserve.db.session import POSTGRES_CONNECTIONS
from loraserve.limits import LIMITS

RESULTS = Path(__file__).resolve().parent / "results"
MACHINES = (1, 10, 1000)
CALLS = (
    "bind, cached",
    "bind, looked up",
    "bind, 16 at once, looked up",
    "list adapters, in the middle",
    "list versions, in the middle",
    "get the trainer's adapter",
    "residency page, all, in the middle",
    "audit page, largest tenant",
    "models of the largest tenant",
    "move an alias",
    "push a version, small tenant",
    "push a version, largest tenant",
    "delete an adapter",
)
"""Calls of a `million` result that docs/scale.md shows."""
NUM_VERSIONS = 10_000_000
ZIPF = 0.9
MONTH_S = 30 * 86_400
MARKER_LOOKS_PER_S = 2 / 60
OBJECTS_PER_LIST = 1000
PUTS_PER_VERSION = 2
DAYS_TO_PUBLISH = 365
"""Days in which the ten million versions are published, once each."""


@dataclass(frozen=True, slots=True)
class Prices:
    """List prices of an object store in dollars."""

    per_gb_month: float
    per_million_writes: float
    """Puts and lists."""
    per_million_reads: float
    source: str


R2 = Prices(0.015, 4.50, 0.36, "https://developers.cloudflare.com/r2/pricing/")


def newest(kind: str) -> Path:
    """Return the newest complete result of a kind."""
    found = [path for path in RESULTS.glob(f"{kind}-*.json") if not path.stem.endswith("-quick")]
    return max(found, key=lambda path: path.stem[-10:])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of results, by their names there."""

    registries: tuple[dict[str, Any], ...]
    """Of a `million` result, from the smallest to the largest, which is meant where one is."""
    idle_per_s: float
    placement: dict[str, Any]
    adapter_bytes: int
    load_s: float
    sources: tuple[str, ...]

    @classmethod
    def load(cls) -> Measured:
        paths = newest("million"), newest("placement")
        million, placement = map(read, paths)
        costs = placement["costs"]
        return cls(
            tuple(million["registries"]),
            million["idle_transactions_per_s"],
            next(one for one in placement["results"] if one["scenario"]["name"] == "centre"),
            costs["adapter_bytes"],
            costs["load_s"],
            tuple(f"benchmarks/results/{path.stem}.md" for path in paths),
        )

    @property
    def registry(self) -> dict[str, Any]:
        return self.registries[-1]

    @property
    def smallest(self) -> Measured:
        return replace(self, registries=self.registries[:1])

    def call(self, name: str) -> dict[str, Any]:
        parts = (self.registry[part] for part in ("binds", "calls", "passes"))
        found: dict[str, Any] = next(one for part in parts for one in part if one["name"] == name)
        return found

    @property
    def num_versions(self) -> int:
        return int(self.registry["num_versions"])

    @property
    def growth(self) -> float:
        """Times that the registry of the calculation is as large as the measured one."""
        return NUM_VERSIONS / self.num_versions

    @property
    def adapters_per_machine(self) -> int:
        return int(self.placement["pooled_adapters"] // self.placement["scenario"]["num_replicas"])

    @property
    def requests_per_s(self) -> float:
        """Requests per second and machine."""
        return float(self.placement["rate_per_s"] / self.placement["scenario"]["num_replicas"])


@cache
def zipf_sum(count: int, exponent: float) -> float:
    """Return the sum of rank ** -exponent over so many ranks; large ranks by their integral."""
    exact = min(count, 100_000)
    total = math.fsum(rank**-exponent for rank in range(1, exact + 1))
    if count > exact:
        power = 1 - exponent
        total += (count**power - exact**power) / power + (count**-exponent - exact**-exponent) / 2
    return total


def in_memory(num_machines: int, measured: Measured) -> float:
    """Return the share of requests for adapters that fit into memory, the most popular ones."""
    held = min(NUM_VERSIONS, num_machines * measured.adapters_per_machine)
    return zipf_sum(held, ZIPF) / zipf_sum(NUM_VERSIONS, ZIPF)


def gets_per_load(adapter_bytes: int) -> int:
    """Return the requests to a bucket for a load: the config, and the weights in pieces."""
    return 1 + math.ceil(adapter_bytes / PIECE_BYTES)


def loads_per_s(num_machines: int, measured: Measured) -> float:
    return num_machines * measured.requests_per_s * (1 - in_memory(num_machines, measured))


def machines_table(measured: Measured) -> str:
    """Return the table of what grows with the machines."""
    bind, beat = measured.call("bind, looked up"), measured.call(f"heartbeat among {NUM_SERVERS:,} servers")
    each = measured.adapter_bytes

    def row(name: str, value: Any) -> list[str]:
        return [name, *(value(count) for count in MACHINES)]

    def busy(seconds: float) -> str:
        return f"{100 * seconds:,.1f} %"

    beats_per_s = 1 / LIMITS.server_beat_s
    rows = [
        row("connections to PostgreSQL, at most", lambda m: f"{m * POSTGRES_CONNECTIONS:,}"),
        row("transactions a second before any request", lambda m: f"{m * measured.idle_per_s:,.0f}"),
        row("requests a second", lambda m: f"{m * measured.requests_per_s:,.1f}"),
        row("names looked up a second, at most", lambda m: f"{m * measured.requests_per_s:,.1f}"),
        row("… busy with them", lambda m: busy(m * measured.requests_per_s * bind["database_s"])),
        row("rows that heartbeats read a second", lambda m: f"{m * (m - 1) * beats_per_s:,.0f}"),
        row("… busy with them", lambda m: busy(m * beats_per_s * beat["database_s"] * (m - 1) / NUM_SERVERS)),
        row("adapters in memory", lambda m: f"{m * measured.adapters_per_machine:,}"),
        row("requests that find theirs there, at most", lambda m: figures.percent(in_memory(m, measured))),
        row("loads a second", lambda m: f"{loads_per_s(m, measured):,.1f}"),
        row("a machine's loaders, busy", lambda m: busy(loads_per_s(m, measured) / m * measured.load_s)),
        row("requests to the store a second", lambda m: f"{loads_per_s(m, measured) * gets_per_load(each):,.0f}"),
        row("MB a second from the store", lambda m: f"{loads_per_s(m, measured) * each / 1e6:,.0f}"),
    ]
    return figures.table(["machines", *(f"{count:,}" for count in MACHINES)], rows)


def versions_table(measured: Measured) -> str:
    """Return the table of what grows with the versions."""
    sizes = measured.registry["sizes"]
    rows_of = sum(rows for _, rows, _, _ in sizes)
    table, indexes = (sum(one[place] for one in sizes) for place in (2, 3))
    lists, deletes = measured.call("collector: pass that lists"), measured.call("collector: pass that deletes")
    backup = measured.call("backup: rows")
    growth = measured.growth

    def row(name: str, value: float, unit: str = "", digits: int = 0) -> list[str]:
        return [name, *(f"{value * times:,.{digits}f}{unit}" for times in (1, growth))]

    num_lists = lists["num_items"] / OBJECTS_PER_LIST
    rows = [
        row("rows, with audit and a month's usage", rows_of),
        row("GiB of tables", table / 2**30, digits=1),
        row("GiB of indexes", indexes / 2**30, digits=1),
        row("TB in the store", measured.num_versions * measured.adapter_bytes / 1e12, digits=1),
        row("a pass of the collector that lists", lists["p50_s"] / 60, " min", 1),
        row("… requests to the store for it", num_lists),
        row("a pass that deletes the same share", deletes["p50_s"] / 60, " min", 1),
        row("a sweep for certificates", measured.call("certificates: first sweep")["p50_s"] / 60, " min", 1),
        row("reading all rows for a backup", backup["p50_s"] / 60, " min", 1),
    ]
    return figures.table(["versions", f"{measured.num_versions:,}", f"{NUM_VERSIONS:,}, calculated"], rows)


def costs_table(measured: Measured, prices: Prices = R2) -> str:
    """Dollars a month for the store of ten million versions."""
    stored_gb = NUM_VERSIONS * measured.adapter_bytes / 1e9
    puts = NUM_VERSIONS * PUTS_PER_VERSION * MONTH_S / (DAYS_TO_PUBLISH * 86_400)
    passes = MONTH_S / LIMITS.gc_interval_s
    lists = passes * NUM_VERSIONS / OBJECTS_PER_LIST

    def gets(num_machines: int) -> float:
        return loads_per_s(num_machines, measured) * gets_per_load(measured.adapter_bytes) * MONTH_S

    def looks(num_machines: int) -> float:
        return num_machines * MARKER_LOOKS_PER_S * MONTH_S

    def dollars(value: float) -> str:
        return f"{value:,.2f}"

    def row(name: str, value: Any) -> list[str]:
        return [name, *(dollars(value(count)) for count in MACHINES)]

    rows = [
        row("bytes", lambda _: stored_gb * prices.per_gb_month),
        row("puts", lambda _: puts / 1e6 * prices.per_million_writes),
        row("lists, for the collector", lambda _: lists / 1e6 * prices.per_million_writes),
        row("gets, for loads", lambda m: gets(m) / 1e6 * prices.per_million_reads),
        row("gets of the marker", lambda m: looks(m) / 1e6 * prices.per_million_reads),
    ]
    return figures.table(["$ a month", *(f"{count:,}" for count in MACHINES)], rows)


def calls_table(measured: Measured) -> str:
    """Return the table of what calls took on the smallest and the largest registry."""
    registries = (measured.smallest, measured)
    header = [
        "call",
        *(f"{quantile} ms, {one.num_versions:,} versions" for quantile in ("p50", "p99") for one in registries),
    ]
    rows = [
        [name, *(figures.ms(one.call(name)[f"{quantile}_s"]) for quantile in ("p50", "p99") for one in registries)]
        for name in CALLS
    ]
    return figures.table(header, rows)


def tables() -> list[str]:
    measured = Measured.load()
    return [calls_table(measured), machines_table(measured), versions_table(measured), costs_table(measured)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    print("\n\n".join(tables()))


if __name__ == "__main__":
    main()
