"""Keep what tenants have used of their rates on each server, so that idle ones lend their part.

Revision: 0013
Follows: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("servers", sa.Column("rates", sa.JSON(), server_default="{}", nullable=False))


def downgrade() -> None:
    op.drop_column("servers", "rates")
