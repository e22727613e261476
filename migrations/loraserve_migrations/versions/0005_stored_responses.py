"""Responses that later ones continue.

Revision: 0005
Follows: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "stored_responses",
        sa.Column("id", sa.String(length=26), nullable=False),
        sa.Column("tenant_id", sa.String(length=26), nullable=False),
        sa.Column("previous_id", sa.String(length=26), nullable=True),
        sa.Column("input", sa.LargeBinary(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_stored_responses_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stored_responses")),
    )
    with op.batch_alter_table("stored_responses", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_stored_responses_tenant_id_id_num_bytes"), ["tenant_id", "id", "num_bytes"], unique=False
        )
        batch_op.create_index(batch_op.f("ix_stored_responses_expires_at"), ["expires_at"], unique=False)


def downgrade() -> None:
    refuse_loss("stored_responses", "SELECT count(*) FROM stored_responses")
    op.drop_table("stored_responses")
