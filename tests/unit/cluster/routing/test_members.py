"""What an ingress knows of replicas, and what it sent there since."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraserve.cluster.routing.members import REPORT, Members, ReplicaReport, encode_report
from loraserve.cluster.routing.routed_request import RoutedRequest
from loraserve.types import Digest, EngineStats, RequestId, TenantId

DIGEST = Digest("a" * 64)


def stats(
    *,
    status: str | None = None,
    node: str = "n",
    device: tuple[Digest, ...] = (),
    running: int = 0,
    memory: EngineStats | None = None,
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
        stats=memory or EngineStats(num_running=running),
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
def make_request() -> Callable[..., RoutedRequest]:
    def make(request_id: str = "r", digest: Digest | None = DIGEST, **fields: object) -> RoutedRequest:
        return RoutedRequest(
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


def test_dead_replica_stays_out_while_serve_lists_replica(table: Members) -> None:
    table.remove("one")
    table.update([("one", stats()), ("two", stats())])
    assert table.ids == {"two"}


def test_requests_go_to_home_of_adapter_until_overload(
    table: Members, make_request: Callable[..., RoutedRequest]
) -> None:
    home, other = table.order(make_request())
    for number in range(3):
        assert table.order(make_request(str(number)))[0] == home
        table.note_routed(make_request(str(number)), home)
    assert (table.num_routed["hash"], table.num_routed["resident"]) == (1, 2)
    busy = {home: stats(running=40), other: stats(running=0)}
    table.update(busy.items())
    asked = make_request("late")
    assert table.order(asked)[0] == other
    table.note_routed(asked, other)
    assert table.num_routed["load"] == 1


def test_open_requests_are_counted_until_end(table: Members, make_request: Callable[..., RoutedRequest]) -> None:
    table.note_routed(make_request("first"), "one")
    assert table.place(RequestId("first")) == "one"
    assert table.num_open("one") == 1
    table.note_ended(RequestId("first"))
    table.note_ended(RequestId("first"))
    assert table.num_open("one") == 0


def test_requests_ended_since_last_report_are_no_load(
    table: Members, make_request: Callable[..., RoutedRequest]
) -> None:
    def serve(replica_id: str) -> None:
        for number in range(40):
            table.note_routed(make_request(f"{replica_id}-{number}", Digest(f"{number:064x}")), replica_id)
        for number in range(40):
            table.note_ended(RequestId(f"{replica_id}-{number}"))

    home, other = table.order(make_request())
    # as many requests went to either, so that neither is beyond its share
    serve(other)
    table.update([(one, stats(running=2)) for one in (home, other)])
    serve(home)
    assert table.order(make_request())[0] == home
    # those that are open count, reported or not
    for number in range(40):
        table.note_routed(make_request(f"open-{number}", None), home)
    assert table.order(make_request())[0] == other


def test_replica_with_unavailable_engine_comes_last(table: Members, make_request: Callable[..., RoutedRequest]) -> None:
    first = table.order(make_request())[0]
    away = {one: stats(status="The engine is being started." if one == first else None) for one in table.ids}
    table.update(away.items())
    assert table.order(make_request())[-1] == first


def test_a_target_is_the_only_choice(table: Members, make_request: Callable[..., RoutedRequest]) -> None:
    assert table.order(make_request(target="two")) == ["two"]
    assert table.order(make_request(target="gone")) == []


def test_adapter_in_machine_memory_stays_on_machine(table: Members, make_request: Callable[..., RoutedRequest]) -> None:
    table.update([("one", stats(node="here")), ("two", stats(node="there"))])
    assert table.order(make_request(node_id="there")) == ["two"]
    assert table.order(make_request(node_id="nowhere")) == []


def test_the_same_beginning_goes_to_the_same_replica(
    table: Members, make_request: Callable[..., RoutedRequest]
) -> None:
    homes = {table.order(make_request("r", None, prefixes=(number, 7)))[0] for number in range(20)}
    assert homes == {"one", "two"}
    asked = make_request("first", None, prefixes=(1, 2, 3))
    home = table.order(asked)[0]
    table.note_routed(asked, home)
    assert table.order(make_request("second", None, prefixes=(1, 5)))[0] == home
    assert table.num_routed["prefix"] == 1


def test_unheld_adapter_is_loaded_where_memory_is_free(
    table: Members, make_request: Callable[..., RoutedRequest]
) -> None:
    def memory(num_adapters: int) -> EngineStats:
        return EngineStats(device_adapters=num_adapters, device_adapter_bytes=num_adapters, max_device_adapters=8)

    home, other = table.order(make_request())
    held = tuple(Digest(f"{number:064x}") for number in range(8))
    full = stats(device=held, memory=memory(8))
    table.update([(home, full), (other, stats(device=held[:3], memory=memory(3)))])
    # the home has room for as many as have a copy, three; the other for eight, as all of its do
    assert table.order(make_request())[0] == other
    table.update([(home, full), (other, stats(device=held, memory=memory(8)))])
    assert table.order(make_request())[0] == home
    table.update([(home, full), (other, stats(device=held[:3], memory=memory(3)))])
    assert table.order(make_request())[0] == other
    table.update([(home, full)])
    assert table.order(make_request()) == [home]


def test_hot_versions_are_bounded_by_adapter_memory(table: Members, make_request: Callable[..., RoutedRequest]) -> None:
    def num_hot(num_places: int) -> int:
        """Route 300 requests of 20 versions to replicas of so many places; count the hot ones."""
        mib = 1 << 20
        memory = EngineStats(
            device_adapters=2,
            device_adapter_bytes=2 * mib,
            max_device_adapters=num_places // 2,
            host_adapters=1,
            host_adapter_bytes=mib,
            host_adapter_budget_bytes=num_places // 2 * mib,
        )
        members = Members(clock=lambda: 1.0)
        members.update([("one", stats(memory=memory)), ("two", stats(memory=memory)), ("new", stats())])
        for number in range(300):
            asked = make_request(str(number), Digest(f"{number % 20:064x}"))
            members.note_routed(asked, members.order(asked)[0])
            members.note_ended(asked.request_id)
        return members.num_hot_versions

    assert num_hot(1000) == 20
    assert num_hot(20) == 0
