"""Indexes of versions by their blobs, and of their bases and sizes by adapter.

Without them the collector reads all versions for each four hundred blobs, and a quota or a list of
adapters reads the rows of all versions that it counts.

Revision: 0010
Follows: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_BLOBS = ("config_blob", "weights_blob")
_RARE_BLOBS = ("chat_template_blob", "generation_config_blob")
_COUNTED = ["adapter_id", "base_digest", "size_bytes"]


def upgrade() -> None:
    for column in _BLOBS:
        op.create_index(f"ix_adapter_versions_{column}", "adapter_versions", [column])
    for column in _RARE_BLOBS:
        _create_index_of_some(f"{column} IS NOT NULL", [column])
    _create_index_of_some("deleted_at IS NULL", _COUNTED)


def _create_index_of_some(condition: str, columns: list[str]) -> None:
    name, where = f"ix_adapter_versions_{'_'.join(columns)}", sa.text(condition)
    op.create_index(name, "adapter_versions", columns, sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    for column in (*_BLOBS, *_RARE_BLOBS, "_".join(_COUNTED)):
        op.drop_index(f"ix_adapter_versions_{column}", table_name="adapter_versions")
