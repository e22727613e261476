from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from loraserve.db.session import Database
from loraserve.tenancy.identity.auth import Authenticator

ADMIN_KEY = "an admin key of enough characters"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    yield database
    await database.dispose()


@pytest.fixture
async def authenticator(database: Database) -> Authenticator:
    authenticator = Authenticator(database, admin_key=ADMIN_KEY)
    await authenticator.open()
    return authenticator
