"""Splits, shadows, pins, grants, resumable uploads, operations, usage.

Revision: 0002
Follows: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "doomed_blobs",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("doomed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_doomed_blobs")),
    )
    op.create_table(
        "servers",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("num_beats", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_servers")),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("holder", sa.String(length=26), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "usage_journals",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_journals")),
    )
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("kind", sa.String(length=63), nullable=False),
        sa.Column("target", sa.String(length=255), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("is_cancelling", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_operations_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
    )
    with op.batch_alter_table("operations", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_operations_tenant_id_id"), ["tenant_id", "id"], unique=False)

    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_uploads_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    with op.batch_alter_table("uploads", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_uploads_expires_at"), ["expires_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_uploads_tenant_id_id"), ["tenant_id", "id"], unique=False)

    op.create_table(
        "usage_hours",
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("owner", sa.String(length=26), server_default=sa.text("''"), nullable=False),
        sa.Column("adapter", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("price", sa.String(length=64), server_default=sa.text("''"), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("undelivered_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_hours_tenant_id")),
        sa.PrimaryKeyConstraint(
            "tenant_id", "hour", "owner", "adapter", "version", "price", name=op.f("pk_usage_hours")
        ),
    )
    with op.batch_alter_table("usage_hours", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_usage_hours_hour"), ["hour"], unique=False)

    op.create_table(
        "grants",
        sa.Column("adapter_id", sa.String(length=26), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_grants_adapter_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_grants_tenant_id")),
        sa.PrimaryKeyConstraint("adapter_id", "tenant_id", name=op.f("pk_grants")),
    )
    with op.batch_alter_table("grants", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_grants_tenant_id"), ["tenant_id"], unique=False)

    op.create_table(
        "shadow_hours",
        sa.Column("adapter_id", sa.String(length=26), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("shadow_version", sa.Integer(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), nullable=False),
        sa.Column("num_equal", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_agreed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("live_ms", sa.BigInteger(), nullable=False),
        sa.Column("shadow_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_shadow_hours_adapter_id")),
        sa.PrimaryKeyConstraint(
            "adapter_id", "alias", "hour", "version", "shadow_version", name=op.f("pk_shadow_hours")
        ),
    )
    with op.batch_alter_table("shadow_hours", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_shadow_hours_hour"), ["hour"], unique=False)

    op.create_table(
        "upload_chunks",
        sa.Column("upload_id", sa.String(length=26), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_upload_chunks_upload_id")),
        sa.PrimaryKeyConstraint("upload_id", "start", name=op.f("pk_upload_chunks")),
    )
    with op.batch_alter_table("upload_chunks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_upload_chunks_digest"), ["digest"], unique=False)

    op.create_table(
        "operator_pins",
        sa.Column("adapter_id", sa.String(length=26), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.number"],
            name=op.f("fk_operator_pins_adapter_id_version"),
        ),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_operator_pins_adapter_id")),
        sa.PrimaryKeyConstraint("adapter_id", "version", name=op.f("pk_operator_pins")),
    )
    with op.batch_alter_table("adapter_versions", schema=None) as batch_op:
        batch_op.add_column(sa.Column("notes", sa.Text(), server_default=sa.text("''"), nullable=False))
        batch_op.add_column(sa.Column("tags", sa.JSON(), server_default="{}", nullable=False))

    with op.batch_alter_table("adapters", schema=None) as batch_op:
        batch_op.add_column(sa.Column("notes", sa.Text(), server_default=sa.text("''"), nullable=False))
        batch_op.add_column(sa.Column("tags", sa.JSON(), server_default="{}", nullable=False))
        batch_op.add_column(sa.Column("fallback", sa.String(length=63), nullable=True))

    with op.batch_alter_table("aliases", schema=None) as batch_op:
        batch_op.add_column(sa.Column("split", sa.JSON(), nullable=True))
        batch_op.add_column(sa.Column("shadow", sa.JSON(), nullable=True))
        batch_op.add_column(sa.Column("previous", sa.JSON(), nullable=True))

    with op.batch_alter_table("tenants", schema=None) as batch_op:
        batch_op.add_column(sa.Column("weight", sa.Float(), server_default="1", nullable=False))
        batch_op.add_column(sa.Column("prices", sa.JSON(), server_default="{}", nullable=False))
