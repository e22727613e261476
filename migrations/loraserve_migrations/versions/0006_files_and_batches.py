"""Files of tenants, batches of requests, and the results of batches that run.

Revision: 0006
Follows: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("blob", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index(op.f("ix_files_tenant_id_id"), "files", ["tenant_id", "id"])
    op.create_index(op.f("ix_files_expires_at"), "files", ["expires_at"])
    op.create_index(op.f("ix_files_blob"), "files", ["blob"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.Column("input_file_id", sa.String(length=32), nullable=False),
        sa.Column("input_blob", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.String(length=63), nullable=False),
        sa.Column("completion_window", sa.String(length=8), nullable=False),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("output_ttl_s", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("times", sa.JSON(), nullable=False),
        sa.Column("errors", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("num_completed", sa.Integer(), nullable=False),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("num_chunks", sa.Integer(), nullable=False),
        sa.Column("usage", sa.JSON(), nullable=False),
        sa.Column("output_file_id", sa.String(length=32), nullable=True),
        sa.Column("error_file_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_batches_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_tenant_id_id"), "batches", ["tenant_id", "id"])
    op.create_index(op.f("ix_batches_state_id"), "batches", ["state", "id"])
    op.create_index(op.f("ix_batches_input_blob"), "batches", ["input_blob"])
    op.create_table(
        "batch_chunks",
        sa.Column("batch_id", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("lines", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_batch_chunks_batch_id")),
        sa.PrimaryKeyConstraint("batch_id", "sequence", name=op.f("pk_batch_chunks")),
    )
    op.create_index(op.f("ix_batch_chunks_digest"), "batch_chunks", ["digest"])


def downgrade() -> None:
    for name in ("batch_chunks", "batches", "files"):
        refuse_loss(name, f"SELECT count(*) FROM {name}")  # noqa: S608
        op.drop_table(name)
