"""Usage of answers that were given before: requests, and tokens of their answers.

Revision: 0008
Follows: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COLUMNS = ("num_cached_requests", "cached_completion_tokens")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("usage_hours", sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("usage_hours", name)
