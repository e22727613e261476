"""Index of deleted versions by adapter.

A push sums up what the tenant's deleted versions keep for a restore. Without the index it reads the
rows of all its versions to find the few that are deleted.

Revision: 0011
Follows: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_NAME = "ix_adapter_versions_adapter_id_deleted_at"


def upgrade() -> None:
    where = sa.text("deleted_at IS NOT NULL")
    op.create_index(_NAME, "adapter_versions", ["adapter_id", "deleted_at"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index(_NAME, table_name="adapter_versions")
