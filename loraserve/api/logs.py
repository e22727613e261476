"""Logs go to stderr, one event per line: JSON for machines, plain lines on a terminal.

Nothing secret is ever put into one.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import structlog


def configure_logging(level: str) -> None:
    """Send every log of this process, the libraries' included, through structlog."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    is_terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # a terminal's renderer prints tracebacks itself
            *([] if is_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(is_news)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Log what is at least this severe from now on."""
    logging.getLogger().setLevel(level.upper())
    # Alembic and asyncio log noise at INFO.
    for name in ("alembic", "asyncio", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


def is_news(record: logging.LogRecord) -> bool:
    """Decide whether a record is worth a line. The traceback of a cancellation isn't."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, asyncio.CancelledError):
        # A request that a stop cut short, a question to the database that was given up.
        record.exc_info = None
        record.exc_text = None
    # A connection still logs this after a question on it was given up, and its future with it.
    is_orphan = record.name == "asyncio" and record.getMessage().startswith("Future exception was never retrieved")
    return not (is_orphan and isinstance(error, ConnectionError))
