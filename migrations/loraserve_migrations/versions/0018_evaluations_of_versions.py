"""Results of versions' evaluations on files of data.

Revision: 0018
Follows: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "evaluations",
        sa.Column("adapter_id", sa.String(length=26), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("data_sha256", sa.String(length=64), nullable=False),
        sa.Column("data_name", sa.String(length=255), nullable=False),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("base_metrics", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("base_digest", sa.String(length=64), nullable=False),
        sa.Column("arithmetic", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(length=128), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_evaluations_adapter_id")),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["adapter_versions.adapter_id", "adapter_versions.number"],
            name=op.f("fk_evaluations_adapter_id_version"),
        ),
        sa.PrimaryKeyConstraint("adapter_id", "version", "data_sha256", name=op.f("pk_evaluations")),
    )


def downgrade() -> None:
    refuse_loss("evaluations of versions", "SELECT count(*) FROM evaluations")
    op.drop_table("evaluations")
