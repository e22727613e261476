"""The check of migrations that `make check` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, Table

from loraserve.db import check, recorded
from loraserve.db.models import Base


def test_models_and_migrations_that_agree_pass() -> None:
    assert check.main() == 0


def test_a_table_without_a_migration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    extra = Table("forgotten", Base.metadata, Column("id", Integer, primary_key=True))
    try:
        assert check.main() == 1
    finally:
        Base.metadata.remove(extra)
    assert "forgotten" in capsys.readouterr().err


def test_a_stale_record_for_sqlite_is_refused_until_it_is_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    current = recorded.RECORD.read_text()
    monkeypatch.setattr(recorded, "RECORD", tmp_path / "sqlite.sql")
    recorded.RECORD.write_text(current.replace("BIGINT", "INTEGER", 1))
    assert check.main() == 1
    assert "python -P -m loraserve.db.check --record" in capsys.readouterr().err
    assert check.main(["--record"]) == check.main() == 0
    assert recorded.RECORD.read_text() == current
