"""The server lets itself have a file open for each connection, as far as it may."""

from __future__ import annotations

import resource

import pytest

from loraserve.api.http.listener import raise_file_limit
from loraserve.limits import Limits

LIMITS = Limits(max_connections=8192)
BESIDE = 256 + LIMITS.max_ephemeral_versions


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "num_connections"),
    [
        (1024, 1 << 20, 8192 + BESIDE, 8192),
        (1024, resource.RLIM_INFINITY, 8192 + BESIDE, 8192),
        # connections leave files to blobs, the database and the engine
        (1024, 4096, 4096, 4096 - BESIDE),
        (200, 200, 200, 100),
        (1, 1, 1, 1),
        (1 << 20, 1 << 20, None, 8192),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 8192),
    ],
)
def test_soft_file_limit_is_raised_and_bounds_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None, num_connections: int
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))
    budget = raise_file_limit(LIMITS)
    assert budget.max_connections == num_connections
    assert asked == ([] if raised_to is None else [(raised_to, hard)])
    allowed = soft if raised_to is None else raised_to
    reserved = None if soft == resource.RLIM_INFINITY else allowed - min(BESIDE, allowed // 2)
    assert budget.first_reserved == reserved
