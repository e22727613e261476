"""Totals of each tenant's adapters and bytes of versions, for its quotas.

Without them a push sums up all of its tenant's versions.

Revision: 0012
Follows: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_COUNTED = """INSERT INTO storage_totals (tenant_id, day, num_adapters, num_bytes)
SELECT tenant_id, day, SUM(num_adapters), SUM(num_bytes) FROM (
    SELECT tenant_id, '' AS day, 1 AS num_adapters, 0 AS num_bytes FROM adapters
    UNION ALL SELECT tenant_id, {day_of_adapter}, 1, 0 FROM adapters a WHERE deleted_at IS NOT NULL
    UNION ALL SELECT a.tenant_id, '', 0, v.size_bytes FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
    UNION ALL SELECT a.tenant_id, {day_of_version}, 0, v.size_bytes
        FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id WHERE v.deleted_at IS NOT NULL
) AS counted GROUP BY tenant_id, day"""


def upgrade() -> None:
    op.create_table(
        "storage_totals",
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("num_adapters", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_storage_totals_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "day", name=op.f("pk_storage_totals")),
    )
    op.execute(_COUNTED.format(day_of_adapter=_day("a.deleted_at"), day_of_version=_day("v.deleted_at")))


def _day(column: str) -> str:
    """Return the expression of a time's day in UTC, as 2026-01-31."""
    if op.get_bind().dialect.name == "sqlite":
        return f"strftime('%Y-%m-%d', {column})"
    return f"to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD')"


def downgrade() -> None:
    op.drop_table("storage_totals")
