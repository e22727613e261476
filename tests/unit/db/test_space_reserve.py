"""Space beside a database that deletions use while its disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraserve.db import space_reserve
from loraserve.db.space_reserve import SpaceReserve


def test_reserve_is_given_to_deletions_of_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.db-reserve"
    reserve = SpaceReserve(path)
    free = 100 << 20
    monkeypatch.setattr(SpaceReserve, "_num_free_bytes", lambda self: free)
    # of a program that serves nothing
    reserve.release()
    reserve.restore()
    assert not path.exists()
    reserve.hold()
    assert path.stat().st_size == path.stat().st_blocks * 512 == space_reserve._RESERVE_BYTES
    assert path.stat().st_mode & 0o077 == 0
    reserve.release()
    assert path.stat().st_size == space_reserve._RESERVE_BYTES
    free = 0
    reserve.release()
    reserve.restore()
    assert path.stat().st_size == 0
    free = 100 << 10
    reserve.restore()
    assert path.stat().st_size == space_reserve._RESERVE_BYTES
