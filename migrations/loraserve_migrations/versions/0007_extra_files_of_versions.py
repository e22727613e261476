"""Extra files of versions: chat template, generation config, parsers.

Revision: 0007
Follows: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, kind in (
        ("chat_template_blob", sa.String(length=64)),
        ("chat_template_bytes", sa.Integer()),
        ("generation_config_blob", sa.String(length=64)),
        ("generation_config_bytes", sa.Integer()),
        ("tool_parser", sa.String(length=64)),
        ("reasoning_parser", sa.String(length=64)),
    ):
        op.add_column("adapter_versions", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    refuse_loss(
        "adapter_versions with files for chats",
        "SELECT count(*) FROM adapter_versions WHERE chat_template_blob IS NOT NULL"
        " OR generation_config_blob IS NOT NULL OR tool_parser IS NOT NULL OR reasoning_parser IS NOT NULL",
    )
    for name in (
        "chat_template_blob",
        "chat_template_bytes",
        "generation_config_blob",
        "generation_config_bytes",
        "tool_parser",
        "reasoning_parser",
    ):
        op.drop_column("adapter_versions", name)
