"""The comparison of a cluster's routings: its requests, its ratios, its page."""

from __future__ import annotations

import argparse
import importlib.util
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import cluster
from benchmarks.asking import Answer, Summary
from benchmarks.cluster_turn import PREFIX_TOKENS, PREFIXES_PER_ADAPTER, Turn, asks
from benchmarks.traffic import Ask

OPTIONS = argparse.Namespace(adapters=192, requests=4, rounds=2)


def make_turn(disk_loads: float, hits: float, ttft_s: float) -> dict[str, Any]:
    answer = Answer(Ask(0.0, 0, 1, 1, 1), 0.0, token_times_s=[ttft_s], status=200)
    found = {"device": 2.0, "host": 1.0, "disk": 1.0}
    held = {"device": 3.0, "host": 1.0}
    summary = Summary.of([answer])
    return asdict(
        Turn("ours", 2, summary, disk_loads, disk_loads, found, 100.0, hits, held, 0.0, 0.0, {"hash": 1.0}, 1.0)
    )


TURNS = {
    name: [make_turn(10.0 * factor, 80.0 / factor, 0.1 * factor), make_turn(20.0 * factor, 80.0 / factor, 0.2 * factor)]
    for factor, name in enumerate(cluster.ARMS, 1)
}


def test_same_seed_gives_same_requests_with_shared_prefixes() -> None:
    stream = asks(300, 8, seed=3)
    assert stream == asks(300, 8, seed=3) != asks(300, 8, seed=4)
    beginnings: dict[int, set[tuple[int, ...]]] = {}
    for ask in stream:
        prompt = ask.prompt(512)
        assert len(prompt) == ask.num_prompt_tokens
        assert min(prompt) >= 260
        beginnings.setdefault(ask.adapter, set()).add(tuple(prompt[:PREFIX_TOKENS]))
    assert all(len(found) == PREFIXES_PER_ADAPTER for found in beginnings.values())
    assert len({one for found in beginnings.values() for one in found}) == 8 * PREFIXES_PER_ADAPTER
    assert len({tuple(ask.prompt(512)) for ask in stream}) == len(stream)


def test_ratio_is_median_over_rounds_against_loraserve_turn() -> None:
    found = cluster.ratios(TURNS, "two replicas, serve.multiplexed")
    assert found["loads disk → host"] == pytest.approx(3.0)
    assert found["prompt tokens found in a prefix cache"] == pytest.approx(1 / 3)
    assert found["TTFT p99"] == pytest.approx(3.0)


def test_page_has_row_for_each_arm_without_throughput() -> None:
    page = cluster.text(OPTIONS, TURNS)
    assert all(page.count(f"| {name} |") == 1 + (name != cluster.OURS) for name in cluster.ARMS)
    assert "tokens/s" not in page


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray isn't installed (the extra ray)")
# Ray's own use of pydantic
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_targeted_call_reaches_given_replica_in_each_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import cluster_routing
    from loraserve.cluster.ray import OURS
    from loraserve.cluster.routing import router
    from loraserve.cluster.routing.members import Members
    from loraserve.cluster.routing.routed_request import RoutedRequest
    from loraserve.types import RequestId, TenantId

    table = Members()
    table.update([("a", {}), ("b", {})])
    monkeypatch.setattr(router, "members", lambda: table)
    replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b")]

    async def first(routing: str, target: str | None) -> set[str]:
        kind: Any = cluster_routing.parts(routing).router
        placement = RoutedRequest(request_id=RequestId("r"), tenant=TenantId("t"), target=target)
        pending: Any = SimpleNamespace(kwargs={router.PLACEMENT: placement})
        ranks = [await kind.choose_replicas(object.__new__(kind), replicas, pending) for _ in range(40)]
        return {ranked[0][0].replica_id.unique_id for ranked in ranks}

    random.seed(1)
    assert cluster_routing.parts("ours") == OURS
    assert await first("random", None) == {"a", "b"}
    for routing in ("ours", "random", "multiplexed"):
        assert await first(routing, "b") == {"b"}
