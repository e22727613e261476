"""Keep what rounding costs each base in each arithmetic, so that it is measured once.

Revision: 0014
Follows: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "base_precisions",
        sa.Column("base_digest", sa.String(length=64), nullable=False),
        sa.Column("quantization", sa.String(length=32), nullable=False),
        sa.Column("dtype", sa.String(length=32), nullable=False),
        sa.Column("arithmetic", sa.String(length=200), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("num_positions", sa.Integer(), nullable=False),
        sa.Column("top1_agreement", sa.Float(), nullable=False),
        sa.Column("mean_divergence", sa.Float(), nullable=False),
        sa.Column("loss", sa.Float(), nullable=False),
        sa.Column("served_loss", sa.Float(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint(
            *("base_digest", "quantization", "dtype", "arithmetic", "device"), name=op.f("pk_base_precisions")
        ),
    )


def downgrade() -> None:
    op.drop_table("base_precisions")
