"""Identity of this registry, and the stamps that it put in its store.

Revision: 0004
Follows: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "registry_identity",
        sa.Column("slot", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("slot", name=op.f("pk_registry_identity")),
    )
    op.create_table(
        "store_stamps",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_store_stamps")),
    )
