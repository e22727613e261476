"""Records that are worth a line, and those that are worth a traceback."""

from __future__ import annotations

import asyncio
import logging

import pytest

from loraserve.api.logs import is_news

ORPHAN = "Future exception was never retrieved\nfuture: <Future finished>"


def record(error: BaseException, *, name: str = "asyncio", message: str = ORPHAN) -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, "", 0, message, None, (type(error), error, None))


def test_late_errors_of_abandoned_connection_are_not_logged() -> None:
    assert not is_news(record(ConnectionError("unexpected connection_lost() call")))


@pytest.mark.parametrize(
    "kept",
    [
        record(ValueError("a bug of ours")),
        record(ConnectionError("reset"), message="something else"),
        record(ConnectionError("reset"), name="loraserve.server"),
    ],
)
def test_remaining_errors_keep_traceback(kept: logging.LogRecord) -> None:
    assert is_news(kept)
    assert kept.exc_info is not None


def test_a_cancellation_is_a_line_without_a_traceback() -> None:
    cut = record(asyncio.CancelledError(), name="uvicorn.error", message="Exception in ASGI application")
    assert is_news(cut)
    assert cut.exc_info is None
