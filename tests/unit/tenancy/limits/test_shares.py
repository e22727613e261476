"""Room divided among holders: one may have as much as is free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.errors import Overloaded, RateLimited
from loraserve.limits import Limits
from loraserve.tenancy.limits.shares import (
    Claim,
    ConnectionSlot,
    Holder,
    Rooms,
    Shares,
    address_holder,
    tenant_holder,
)
from loraserve.types import TenantId

ACME, GLOBEX = Holder("tenant:acme"), Holder("tenant:globex")
HERE = Holder("address:here")


def fill(shares: Shares, holder: Holder) -> int:
    """Take until the holder has its share; return what it has."""
    while shares.has_room(holder):
        shares.take(holder)
    return shares.held(holder)


def test_single_holder_gets_half_and_next_finds_capacity() -> None:
    shares = Shares("things", "things", 12)
    assert fill(shares, ACME) == 6
    with pytest.raises(RateLimited, match="You hold 6 of 12 things"):
        shares.take(ACME)
    assert fill(shares, GLOBEX) == 3
    assert shares.num_refused == {"share": 1, "key": 0, "full": 0}


def test_new_holder_is_refused_only_at_full_capacity() -> None:
    shares = Shares("things", "things", 4)
    for number in range(4):
        shares.take(Holder(f"tenant:{number}"))
    with pytest.raises(Overloaded, match="4 of 4 things are in use"):
        shares.take(ACME)
    with pytest.raises(RateLimited):
        shares.take(Holder("tenant:0"))
    assert shares.num_refused == {"share": 1, "key": 0, "full": 1}


def test_holder_bound_applies_in_addition_to_share() -> None:
    shares = Shares("things", "things", 100, max_per_holder=2)
    assert fill(shares, ACME) == 2


@given(st.integers(2, 500), st.integers(1, 40))
def test_next_holder_gets_share_despite_greedy_holders(capacity: int, num_greedy: int) -> None:
    shares = Shares("things", "things", capacity)
    # in turns, as floods come
    greedy = [Holder(f"tenant:{number}") for number in range(num_greedy)]
    while wanting := [holder for holder in greedy if shares.has_room(holder)]:
        for holder in wanting:
            if shares.has_room(holder):
                shares.take(holder)
    assert shares.capacity - shares.total >= capacity // (num_greedy + 1)
    assert fill(shares, ACME) >= capacity // (num_greedy + 1) // 2


@given(st.lists(st.tuples(st.sampled_from([ACME, GLOBEX, HERE]), st.integers(-20, 20)), max_size=60))
def test_returned_amount_is_available_again(moves: list[tuple[Holder, int]]) -> None:
    shares = Shares("bytes", "bytes", 100)
    held = dict.fromkeys((ACME, GLOBEX, HERE), 0)
    for holder, amount in moves:
        if amount > 0 and shares.has_room(holder, amount):
            shares.take(holder, amount)
            held[holder] += amount
        elif amount < 0 and held[holder] >= -amount:
            shares.give_back(holder, -amount)
            held[holder] += amount
        assert {name: shares.held(name) for name in held} == held
        assert shares.total == sum(held.values()) <= shares.capacity
    assert len(shares._held) == sum(amount > 0 for amount in held.values()), "nothing is kept of who holds nothing"


def test_claim_moves_from_address_to_tenant_until_released() -> None:
    rooms = Rooms(Limits(max_body_bytes=100, max_body_bytes_in_flight=1000))
    claim = Claim(rooms, HERE, max_body_bytes=100)
    claim.begin()
    assert rooms.unproven.held(HERE) == 1
    claim.prove(ACME, is_management=True)
    claim.hold_body(60)
    # what is beyond goes to disk
    claim.hold_body(60)
    held = {shares.name: shares.held(ACME) for shares in rooms.all()}
    assert held == {"connections": 0, "unproven": 0, "lingering": 0, "live": 1, "management": 1, "body_bytes": 100}
    assert rooms.unproven.total == 0
    claim.release()
    claim.release()
    assert [shares.total for shares in rooms.all()] == [0] * 6


def test_refused_claim_holds_no_share() -> None:
    rooms = Rooms(Limits(max_live_requests=2, max_management_requests=2))
    first, second = Claim(rooms, HERE), Claim(rooms, HERE)
    for claim in (first, second):
        claim.begin()
    first.prove(ACME, is_management=False)
    with pytest.raises(RateLimited):
        second.prove(ACME, is_management=False)
    second.release()
    assert (rooms.unproven.total, rooms.live.total, rooms.management.total) == (0, 1, 0)


def test_key_leaves_part_of_tenant_share() -> None:
    shares = Shares("things", "things", 70)
    first, second = tenant_holder(TenantId("t"), "first"), tenant_holder(TenantId("t"), "second")
    # of the 35 that a single tenant may have
    assert fill(shares, first) == 30
    with pytest.raises(RateLimited, match="Your key holds 30 of the 30 things of your tenant"):
        shares.take(first)
    assert fill(shares, second) == 30 + 5
    assert fill(shares, ACME) == 18
    assert shares.num_refused == {"share": 0, "key": 1, "full": 0}
    for holder, amount in ((first, 30), (second, 5), (ACME, 18)):
        shares.give_back(holder, amount)
    assert (shares.total, len(shares._held), len(shares._held_by_key)) == (0, 0, 0)


def test_connection_slot_moves_to_tenant_and_stays() -> None:
    rooms = Rooms(Limits(max_connections=8))
    here = address_holder("10.0.0.1")
    slot = ConnectionSlot(rooms.connections, "10.0.0.1")
    assert rooms.connections.held(here) == 1
    claim = Claim(rooms, here, slot=slot)
    claim.begin()
    claim.prove(ACME, is_management=False)
    claim.release()
    # until another tenant's request comes on it
    assert (rooms.connections.held(here), rooms.connections.held(ACME)) == (0, 1)
    claim = Claim(rooms, here, slot=slot)
    claim.prove(GLOBEX, is_management=False)
    assert (rooms.connections.held(ACME), rooms.connections.held(GLOBEX)) == (0, 1)
    for _ in range(2):
        slot.release()
    assert (rooms.connections.total, len(rooms.connections._held)) == (0, 0)


def test_connection_slot_stays_where_a_move_is_refused() -> None:
    rooms = Rooms(Limits(max_connections=4))
    while rooms.connections.has_room(ACME):
        rooms.connections.take(ACME)
    here = address_holder("10.0.0.1")
    slot = ConnectionSlot(rooms.connections, "10.0.0.1")
    claim = Claim(rooms, here, slot=slot)
    with pytest.raises(RateLimited, match="connections"):
        claim.prove(ACME, is_management=False)
    assert claim.is_slot_refused
    assert (rooms.connections.held(here), rooms.connections.held(ACME), rooms.live.total) == (1, 2, 0)


@pytest.mark.parametrize(
    ("host", "holder"),
    [
        ("10.1.2.3", "address:10.1.2.3"),
        ("::ffff:10.1.2.3", "address:10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "address:2001:db8:1:2::"),
        ("2001:db8:1:2::9", "address:2001:db8:1:2::"),
        ("fe80::1%eth0", "address:fe80::"),
        ("a socket", "address:a socket"),
    ],
)
def test_address_is_grouped_by_assigned_network(host: str, holder: str) -> None:
    assert address_holder(host) == Holder(holder)
