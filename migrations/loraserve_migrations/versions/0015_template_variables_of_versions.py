"""Variables that a version sets for its chat template.

Revision: 0015
Follows: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapter_versions", sa.Column("chat_template_kwargs", sa.Text(), nullable=True))


def downgrade() -> None:
    refuse_loss(
        "adapter_versions with variables for chat templates",
        "SELECT count(*) FROM adapter_versions WHERE chat_template_kwargs IS NOT NULL",
    )
    op.drop_column("adapter_versions", "chat_template_kwargs")
