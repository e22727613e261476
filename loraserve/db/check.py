"""``python -m loraserve.db.check``: check the migrations.

Run on an empty database, they must create what the models define, and what is recorded of them for
SQLite. With ``--record``, record it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loraserve.db import migrate, recorded


def main(arguments: Sequence[str] = ()) -> int:
    """Return 0 if they agree; otherwise print all differences to stderr and return 1."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        url = f"sqlite:///{path}"
        asyncio.run(migrate.upgrade(url))
        found = asyncio.run(migrate.differences(url))
        made = recorded.dump(path)
    for difference in found:
        sys.stderr.write(f"{difference}\n")
    if found:
        sys.stderr.write(
            "The models and the migrations disagree. Write a migration: "
            "LORASERVE_DATABASE_URL=sqlite:///PATH alembic revision"
            " --autogenerate -m WHAT\n"
        )
        return 1
    if "--record" in arguments:
        recorded.RECORD.write_text(made)
    elif recorded.RECORD.read_text("utf-8") != made:
        sys.stderr.write(
            f"{recorded.RECORD.name} isn't what the migrations make. Run: python -P -m loraserve.db.check --record\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
