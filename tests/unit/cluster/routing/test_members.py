"""What an ingress knows of replicas, and what it sent there since."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraserve.cluster.routing.members import REPORT, Members, ReplicaReport, encode_report
from loraserve.cluster.routing.ranking import PlacementRequest
from loraserve.types import Digest, EngineStats, RequestId, TenantId

DIGEST = Digest("a" * 64)


def stats(
    *, status: str | None = None, node: str = "n", device: tuple[Digest, ...] = (), running: int = 0
) -> dict[str, object]:
    report = ReplicaReport(
        node_id=node,
        pid=1,
        engine_pid=2,
        status=status,
        num_restarts=0,
        num_hangs=0,
        num_slots=8,
        ttft_s=0.0,
        stats=EngineStats(num_running=running),
        device=device,
    )
    return {REPORT: encode_report(report)}


@pytest.fixture
def now_s() -> list[float]:
    return [100.0]


@pytest.fixture
def table(now_s: list[float]) -> Members:
    members = Members(clock=lambda: now_s[0])
    members.update([("one", stats()), ("two", stats())])
    return members


@pytest.fixture
def make_request() -> Callable[..., PlacementRequest]:
    def make(request_id: str = "r", digest: Digest | None = DIGEST, **fields: object) -> PlacementRequest:
        return PlacementRequest(
            request_id=RequestId(request_id),
            tenant=TenantId("t"),
            digest=digest,
            **fields,  # type: ignore[arg-type]
        )

    return make


def test_changes_are_told(table: Members) -> None:
    told: list[tuple[frozenset[str], frozenset[str]]] = []
    table.on_change = lambda came, left: told.append((came, left))
    table.update([("one", stats()), ("three", stats())])
    table.update([("one", stats()), ("three", stats())])
    assert told == [(frozenset({"three"}), frozenset({"two"}))]


def test_a_dead_replica_stays_out_while_serve_still_lists_it(table: Members) -> None:
    table.remove("one")
    table.update([("one", stats()), ("two", stats())])
    assert table.ids == {"two"}


def test_a_request_follows_the_one_before_it_until_the_report_says_more(
    table: Members, make_request: Callable[..., PlacementRequest], now_s: list[float]
) -> None:
    other = table.order(make_request())[1]
    table.note_routed(make_request("first"), other)
    assert table.order(make_request("second"))[0] == other
    table.note_ended(RequestId("first"))
    now_s[0] += 60
    table.update([("one", stats(running=0)), ("two", stats(running=1))])
    assert table.num_routed["load"] == 1
    assert table.order(make_request("third"))[0] != other


def test_open_requests_are_counted_until_they_end(
    table: Members, make_request: Callable[..., PlacementRequest]
) -> None:
    table.note_routed(make_request("first"), "one")
    assert table.place(RequestId("first")) == "one"
    assert table.num_open("one") == 1
    table.note_ended(RequestId("first"))
    table.note_ended(RequestId("first"))
    assert table.num_open("one") == 0


def test_a_replica_whose_engine_is_away_comes_last(
    table: Members, make_request: Callable[..., PlacementRequest]
) -> None:
    first = table.order(make_request())[0]
    away = {one: stats(status="The engine is being started." if one == first else None) for one in table.ids}
    table.update(away.items())
    assert table.order(make_request())[-1] == first


def test_a_target_is_the_only_choice(table: Members, make_request: Callable[..., PlacementRequest]) -> None:
    assert table.order(make_request(target="two")) == ["two"]
    assert table.order(make_request(target="gone")) == []


def test_an_adapter_in_a_machines_memory_stays_on_it(
    table: Members, make_request: Callable[..., PlacementRequest]
) -> None:
    table.update([("one", stats(node="here")), ("two", stats(node="there"))])
    assert table.order(make_request(node_id="there")) == ["two"]
    assert table.order(make_request(node_id="nowhere")) == []


def test_the_same_beginning_goes_where_it_was_computed(
    table: Members, make_request: Callable[..., PlacementRequest]
) -> None:
    asked = make_request("first", None, prefixes=(1, 2, 3))
    other = table.order(asked)[1]
    table.note_routed(asked, other)
    table.note_ended(RequestId("first"))
    table.update([("one", stats(running=0)), ("two", stats(running=0))])
    assert table.order(make_request("second", None, prefixes=(1, 2, 3, 4)))[0] == other
