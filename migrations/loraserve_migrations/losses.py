"""Refusal to lose rows on the way back to an older revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context, op

from loraserve.errors import Conflict


def refuse_loss(what: str, count: str) -> None:
    """Refuse a downgrade that would lose rows, unless the operator accepts it.

    Args:
        what: name of the rows in the message.
        count: statement that counts them.

    Raises:
        Conflict: there are some.
    """
    if context.config.attributes.get("is_loss_accepted"):
        return
    num_rows = op.get_bind().scalar(sa.text(count))
    if num_rows:
        raise Conflict(
            f"Going back would lose {num_rows:,} rows: {what}. Nothing was changed.",
            hint="Make a backup, then repeat it with --discard.",
        )
