"""The registry's hot statements on PostgreSQL: each uses an index, and reads few rows.

The benchmark of a million versions on a registry so small that a test can fill it: PostgreSQL plans
the statements as if it had a million.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from benchmarks.million import PLOTTED, PLOTTED_PASSES, text
from benchmarks.registry_sites import Server, Site, execute, make_site, measure

pytestmark = pytest.mark.postgres

NUM_VERSIONS, NUM_TENANTS = 3000, 100


@pytest.fixture(scope="module")
def filled(
    make_postgres_url: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Site]]:
    """A server with a filled registry, which tests copy."""
    server = Server(make_postgres_url())
    yield server, asyncio.run(make_site(server, NUM_VERSIONS, tmp_path_factory.mktemp("million"), NUM_TENANTS))
    for name in server.databases:
        asyncio.run(execute(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
async def site(filled: tuple[Server, Site]) -> Site:
    server, template = filled
    url = make_url(await server.create(f"million_{uuid.uuid4().hex}", template=make_url(template.url).database))
    return Site(url.render_as_string(hide_password=False), template.num_versions, template.filled, template.fill_s)


def faults(site: Site) -> list[str]:
    return [fault for timed in site.all for fault in timed.faults]


async def test_requests_and_collectors_never_scan_whole_tables(
    filled: tuple[Server, Site], site: Site, tmp_path: Path
) -> None:
    await measure(filled[0], [site], tmp_path, num_rounds=1, num_binds=40)
    assert faults(site) == []
    assert len(site.calls) > 20
    assert all(timed.plans for timed in site.calls.values())
    page = text([site], 1.0, "plot.svg")
    assert "| collector: pass that lists | 3,000 |" in page
    assert page.endswith("- None.")
    pytest.importorskip("matplotlib")
    from benchmarks.plotting import plot_registry

    plot_registry([site], PLOTTED, PLOTTED_PASSES, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ("ix_adapter_versions_weights_blob", "collector: pass that lists reads"),
        ("ix_aliases_adapter_id_version", None),
        ("ix_audit_tenant_id_id", "audit page, largest tenant reads"),
    ],
)
async def test_missing_index_is_found(
    filled: tuple[Server, Site], site: Site, tmp_path: Path, index: str, fault: str | None
) -> None:
    await execute(site.url, f"DROP INDEX {index}")
    await measure(filled[0], [site], tmp_path, num_rounds=1, num_binds=10)
    found = faults(site)
    assert found == [] if fault is None else any(one.startswith(fault) for one in found)
