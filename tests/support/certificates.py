"""Read the system's trusted certificates once a process.

httpx2 reads them for each client, in 60 ms of a slow core, which is longer than most tests take.
"""

from __future__ import annotations

import functools

import httpcore2
import pytest


def pytest_configure(config: pytest.Config) -> None:
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
