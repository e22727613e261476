"""Bytes of running uploads: bounded by tenant and in all, and judged by their header."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters_store import LocalStore
from loraserve.errors import AdapterFormatError, Overloaded, QuotaExceeded, RateLimited
from loraserve.limits import MIB
from loraserve.registry.uploads.staging import BoundedBlob, StagingBudget, WeightsBeginning
from loraserve.types import TenantId

ACME, OTHER = TenantId("acme"), TenantId("other")


def weights_of(num_bytes: int) -> bytes:
    entry = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"a": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def see_bytes(data: bytes) -> None:
    beginning = WeightsBeginning()
    for start in range(len(data)):
        beginning.see(data[start : start + 1])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., BoundedBlob]:
    store = LocalStore(tmp_path / "store")

    def stage(budget: StagingBudget, tenant: TenantId = ACME, room: int | None = None) -> BoundedBlob:
        return BoundedBlob(store.stage(), budget, tenant, room, None)

    return stage


def test_uploads_of_tenant_stay_within_quota_together(make: Callable[..., BoundedBlob]) -> None:
    budget = StagingBudget(1000)
    with make(budget, room=100) as one, make(budget, room=100) as two:
        one.write(bytes(60))
        with pytest.raises(QuotaExceeded, match="may store 100 more bytes, and its running uploads have 60"):
            two.write(bytes(41))
        assert two.num_bytes == 0
        two.write(bytes(40))
        with make(budget, OTHER, 100) as other:
            other.write(bytes(100))
    with make(budget, room=100) as three:
        three.write(bytes(100))
    assert budget.shares.total == 0


def test_uploads_share_bytes_of_server(make: Callable[..., BoundedBlob]) -> None:
    budget = StagingBudget(1000)
    with make(budget) as one:
        one.write(bytes(500))
        with pytest.raises(RateLimited, match="bytes of running uploads"):
            one.write(bytes(1))
        with make(budget, OTHER) as other:
            other.write(bytes(250))
        with make(budget, OTHER) as other, pytest.raises(Overloaded):
            other.write(bytes(501))
    assert budget.shares.num_refused == {"share": 1, "key": 0, "full": 1}


def test_body_is_refused_by_length() -> None:
    budget = StagingBudget(100 * MIB)
    budget.check(ACME, 3 * MIB, room_bytes=2 * MIB)
    with pytest.raises(QuotaExceeded):
        budget.check(ACME, 3 * MIB + 1, room_bytes=2 * MIB)
    with pytest.raises(RateLimited):
        budget.check(ACME, 102 * MIB, room_bytes=None)
    assert budget.shares.total == 0


@pytest.mark.parametrize("piece", [1, 5, 64, 4096])
def test_whole_file_is_judged_right_in_any_pieces(piece: int) -> None:
    data, beginning = weights_of(2000), WeightsBeginning()
    for start in range(0, len(data), piece):
        beginning.see(data[start : start + piece])
    with pytest.raises(AdapterFormatError, match="more came"):
        beginning.see(b"x")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(9), "header"),
        (b"\x80\x04" + bytes(30), "pickle"),
        (b"PK\x03\x04" + bytes(30), "expected a stored data.pkl"),
        ((1 << 40).to_bytes(8, "little") + b"{", "header's length"),
        (len(b"{}").to_bytes(8, "little") + b"{}", "no tensors"),
    ],
)
def test_foreign_file_is_refused_from_first_bytes(data: bytes, words: str) -> None:
    with pytest.raises(AdapterFormatError, match=words):
        see_bytes(data)
