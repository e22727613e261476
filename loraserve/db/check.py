"""``python -m loraserve.db.check``: check the migrations.

Run on an empty database, they must create what the models define.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from loraserve.db import migrate


def main() -> int:
    """Check whether they agree: return 0, or print all differences to stderr and return 1."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/registry.db"
        asyncio.run(migrate.upgrade(url))
        found = asyncio.run(migrate.differences(url))
    for difference in found:
        sys.stderr.write(f"{difference}\n")
    if found:
        sys.stderr.write(
            "The models and the migrations disagree. Write a migration: "
            "LORASERVE_DATABASE_URL=sqlite:///PATH alembic revision"
            " --autogenerate -m WHAT\n"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
