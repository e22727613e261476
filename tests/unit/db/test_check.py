"""The check that `make check` runs."""

from __future__ import annotations

import pytest
from sqlalchemy import Column, Integer, Table

from loraserve.db import check
from loraserve.db.models import Base


def test_agreeing_models_and_migrations_pass() -> None:
    assert check.main() == 0


def test_a_table_without_a_migration_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    extra = Table("forgotten", Base.metadata, Column("id", Integer, primary_key=True))
    try:
        assert check.main() == 1
    finally:
        Base.metadata.remove(extra)
    assert "forgotten" in capsys.readouterr().err
