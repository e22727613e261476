"""The registry with a million versions in PostgreSQL: what each call takes, and how it is planned.

    python -m benchmarks.million              # 10,000, 100,000 and 1,000,000 versions
    python -m benchmarks.million --quick      # 2,000 and 20,000

A throwaway PostgreSQL (tests/postgres.sh, with fsync), or the server that
LORASERVE_TEST_POSTGRES_URL names, has a database for each size, filled by COPY with copies of the
rows that the product wrote (`benchmarks.registry_rows`). Then the product's own classes are called
(`benchmarks.registry_calls`), the sizes in turn, round after round, so that a ratio of two sizes is
of calls that followed each other. Their statements are recorded and explained
(`benchmarks.query_plans`). The run fails if a call that answers a request reads a table from one
end to the other, or more rows than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks import figures, reporting
from benchmarks.registry_rows import NUM_SERVERS
from benchmarks.registry_sites import NUM_AT_ONCE, Site, idle_transactions_per_s, make_site, measure, postgres
from benchmarks.registry_timing import HEADER, Timed
from benchmarks.serving import say
from loraserve.limits import LIMITS
from loraserve.registry.storage_totals import TENANTS_AT_ONCE

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000), (2000, 20_000)
NUM_ROUNDS, NUM_BINDS = 3, 3000
IDLE_S = 60.0
PLOTTED = (
    "bind, looked up",
    f"bind, {NUM_AT_ONCE} at once, looked up",
    "list adapters, in the middle",
    "list versions, in the middle",
    "push a version, small tenant",
    "push a version, largest tenant",
)
PLOTTED_PASSES = ("collector: pass that lists", "collector: pass that deletes", "certificates: first sweep")


def _growth(sites: list[Site], part: str) -> str:
    """A table of p99 at each size, and of the largest's times over the smallest's."""
    first, last = sites[0], sites[-1]
    by_name: dict[str, dict[int, Timed]] = {}
    for site in sites:
        for name, timed in getattr(site, part).items():
            by_name.setdefault(name, {})[site.num_versions] = timed
    header = ["call", *(f"p99 ms, {site.num_versions:,}" for site in sites), "largest ÷ smallest"]
    rows = []
    for name, found in by_name.items():
        cells = [found[site.num_versions].row()[2] if site.num_versions in found else "–" for site in sites]
        are_both = first.num_versions in found and last.num_versions in found
        ratio = found[last.num_versions].ratio(found[first.num_versions]) if are_both else float("nan")
        rows.append([name, *cells, figures.number(ratio, 2)])
    return figures.table(header, rows)


def _passes(sites: list[Site]) -> str:
    header = ["pass", "versions", "seconds", "about", "µs each", *HEADER[3:]]
    rows = []
    for name in sites[-1].passes:
        for site in sites:
            one = site.passes[name]
            seconds, items = one.times_s[0], one.num_items or 0
            each = f"{1e6 * seconds / items:,.0f}" if items > 1 else "–"
            rows.append([name, f"{site.num_versions:,}", f"{seconds:.2f}", f"{items:,}", each, *one.row()[3:]])
    return figures.table(header, rows)


def text(sites: list[Site], idle_per_s: float, plot: str) -> str:
    last = sites[-1]
    filled = last.filled
    large, small = filled.tenants[0][0], filled.tenants[len(filled.tenants) // 8][0]
    of_large, of_small = filled.adapters_of[large], filled.adapters_of[small]
    sizes = [
        [name, f"{rows:,}", figures.mib(table), figures.mib(indexes), f"{(table + indexes) / max(1, rows):,.0f}"]
        for name, rows, table, indexes in last.sizes
    ]
    faults = "".join(
        f"\n- **{site.num_versions:,} versions: {x}**" for site in sites for t in site.all for x in t.faults
    )
    return f"""{last.num_versions:,} versions of {len(filled.tenants):,} tenants, by Zipf's law: the largest has \
{sum(one.num_versions for one in of_large):,} versions of {len(of_large):,} adapters, its first adapter \
{of_large[0].num_versions:,}; the small one {sum(one.num_versions for one in of_small):,} of {len(of_small):,}. \
Written in {last.fill_s:.0f} s, by COPY. One process calls the registry's own classes, sizes in turn. Statements and \
their time are those of the last call; rows are those that scans of the large tables returned or threw away for it.

![p99 and passes by the number of versions]({plot})

## By the number of versions

{_growth(sites, "binds")}

Looked up: each name is asked for the first time, one query each; a server asks again after \
{LIMITS.resolve_cache_s:g} s. {NUM_AT_ONCE} at once: as many tasks of one server, which looks up four unknown names \
at a time, two of a tenant. Largest ÷ smallest: of medians, at the median of rounds, in which the sizes took turns.

{_growth(sites, "calls")}

## Of {last.num_versions:,} versions

{figures.table(HEADER, [one.row() for one in (*last.binds.values(), *last.calls.values())])}

## Passes over everything

{_passes(sites)}

Once each. Of a pass, the rows are those of one statement of each kind. The pass that deletes begins with another \
list; what it is about are the blobs that it deletes. Both passes of the collector end with the totals of all tenants, \
{TENANTS_AT_ONCE} at a time, whose statements are listed apart.

## An idle server

{idle_per_s:.1f} transactions a second: heartbeat, pins, batches, usage, and looks for work. Each heartbeat reads the \
other servers' rows, above of {NUM_SERVERS:,}.

## Bytes

{figures.table(["table", "rows", "MiB", "MiB of indexes", "bytes a row"], sizes)}

## Calls that read too much
{faults or chr(10) + "- None."}"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, nargs="+", help="the sizes, ascending")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder in which the server and its rows stay for other runs")
    parser.add_argument("--fill", action="store_true", help="with --keep: write the rows, and measure nothing")
    options = parser.parse_args(arguments)
    options.versions = sorted(options.versions or (QUICK_SIZES if options.quick else SIZES))
    options.size = "postgres"
    if not options.fill:
        # before the twenty minutes, not after them
        from benchmarks.plotting import plot_registry

    machine = reporting.facts()
    with postgres(options.keep) as server, tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        async def run() -> tuple[list[Site], float]:
            sites = [await make_site(server, count, folder) for count in options.versions]
            if options.fill:
                return sites, 0.0
            await measure(server, sites, folder, num_rounds=NUM_ROUNDS, num_binds=NUM_BINDS)
            say("an idle server …")
            return sites, await idle_transactions_per_s(server, IDLE_S)

        sites, idle_per_s = asyncio.run(run())
    if options.fill:
        return
    plot = f"{reporting.dated('million', options.size, is_quick=options.quick)}.svg"
    reporting.RESULTS.mkdir(exist_ok=True)
    plot_registry(sites, PLOTTED, PLOTTED_PASSES, reporting.RESULTS / plot)
    options.keep = None
    found = [site.as_json(has_plans=site is sites[-1]) for site in sites]
    numbers = {"idle_transactions_per_s": idle_per_s, "registries": found}
    title = "A registry of many versions in PostgreSQL"
    reporting.finish("million", title, text(sites, idle_per_s, plot), machine, options, arguments, **numbers)
    if any(one["faults"] for one in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
