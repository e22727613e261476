"""Keys of adapters' names, which may have capitals, slashes, colons and 128 characters.

Names were lower case before, so that each is its own key.

Revision: 0017
Follows: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from loraserve_migrations.losses import refuse_loss

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("adapters", sa.Column("name_key", sa.String(length=128), nullable=True))
    op.execute("UPDATE adapters SET name_key = name")
    with op.batch_alter_table("adapters") as adapters:
        adapters.alter_column("name", type_=sa.String(length=128), existing_type=sa.String(length=63))
        adapters.alter_column("name_key", nullable=False, existing_type=sa.String(length=128))
        adapters.drop_constraint("uq_adapters_tenant_id_name", type_="unique")
        adapters.create_unique_constraint("uq_adapters_tenant_id_name_key", ["tenant_id", "name_key"])


def downgrade() -> None:
    refuse_loss(
        "adapters whose names have capitals, slashes, colons or over 63 characters",
        "SELECT count(*) FROM adapters"
        " WHERE name <> name_key OR length(name) > 63 OR name LIKE '%/%' OR name LIKE '%:%'",
    )
    # reachable by a name of before
    op.execute(
        "UPDATE adapters SET name = 'adapter-' || lower(id)"
        " WHERE name <> name_key OR length(name) > 63 OR name LIKE '%/%' OR name LIKE '%:%'"
    )
    with op.batch_alter_table("adapters") as adapters:
        adapters.drop_constraint("uq_adapters_tenant_id_name_key", type_="unique")
        adapters.drop_column("name_key")
        adapters.alter_column("name", type_=sa.String(length=63), existing_type=sa.String(length=128))
        adapters.create_unique_constraint("uq_adapters_tenant_id_name", ["tenant_id", "name"])
