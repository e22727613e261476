"""Routers' metrics are served without a key only where the operator says so."""

from __future__ import annotations

import httpx2
import pytest

from loraserve.api.monitoring import ROUTER_METRICS
from loraserve.settings import Settings


async def test_router_metrics_have_no_route_by_default(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/metrics/router")).status_code == 404


def test_the_flag_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load(model="m").router_metrics is False
    monkeypatch.setenv("LORASERVE_ROUTER_METRICS", "true")
    assert Settings.load(model="m").router_metrics is True


def test_each_router_metric_is_in_metric_table() -> None:
    from loraserve.api.metrics import engine_tables, server_tables

    known = {row.name for row in (*engine_tables.VLLM, *server_tables.ROUTING)}
    assert set(ROUTER_METRICS) <= known
