"""Roles of operators' keys, which were all admins before.

Revision: 0009
Follows: 0008
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_KEYS = sa.table(
    "api_keys",
    sa.column("tenant_id", sa.String),
    sa.column("role", sa.String),
    sa.column("revoked_at", sa.DateTime(timezone=True)),
)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("role", sa.String(length=16), nullable=True))
    op.execute(_KEYS.update().where(_KEYS.c.tenant_id.is_(None)).values(role="admin"))


def downgrade() -> None:
    # before, each key without a tenant was an admin's: the others must not become one
    others = _KEYS.c.tenant_id.is_(None) & (_KEYS.c.role != "admin") & _KEYS.c.revoked_at.is_(None)
    op.execute(_KEYS.update().where(others).values(revoked_at=datetime.now(UTC)))
    op.drop_column("api_keys", "role")
