"""Blobs with what a version's tokenizer has beside the base's.

Revision: 0016
Follows: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("tokenizer_blob", sa.String(64), nullable=True))
    op.add_column("adapter_versions", sa.Column("tokenizer_bytes", sa.Integer(), nullable=True))
    has_one = sa.text("tokenizer_blob IS NOT NULL")
    op.create_index(
        op.f("ix_adapter_versions_tokenizer_blob"),
        "adapter_versions",
        ["tokenizer_blob"],
        sqlite_where=has_one,
        postgresql_where=has_one,
    )


def downgrade() -> None:
    refuse_loss(
        "adapter_versions with tokenizers of their own",
        "SELECT count(*) FROM adapter_versions WHERE tokenizer_blob IS NOT NULL",
    )
    op.drop_index(op.f("ix_adapter_versions_tokenizer_blob"), "adapter_versions")
    op.drop_column("adapter_versions", "tokenizer_bytes")
    op.drop_column("adapter_versions", "tokenizer_blob")
