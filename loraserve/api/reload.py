"""Settings that change while the server runs: SIGHUP reads flags, variables and file again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loraserve.api.http.tls import TlsFiles
from loraserve.api.logs import set_log_level
from loraserve.api.services import Services
from loraserve.api.tracing.collector import open_tracer
from loraserve.errors import ConfigError, LoraserveError
from loraserve.settings import Settings

if TYPE_CHECKING:
    from loraserve.api.http.guard import RequestTracer

logger = logging.getLogger("loraserve.server")

LIVE_SETTINGS = frozenset(
    {
        "log_level",
        "access_log",
        "trace_endpoint",
        "trace_sample",
        "cors_allow_origins",
        "management_requests_per_minute",
        "ssl_certfile",
        "ssl_keyfile",
        "grace_s",
        "admin_key",
        "base_names",
        "model_aliases",
        "strict_base",
        "certify",
        "strict_certificates",
        "retention_s",
        "lora_dir",
        "pull_allow",
        "store_responses",
        "result_cache_bytes",
        "ephemeral_loads",
        "ephemeral_ttl_s",
        "whole_answer_keep_alive_s",
        "ephemeral_memory",
    }
)
"""Settings that a running server takes over; others need a restart."""
_SECRET = frozenset({"admin_key"})


class SettingsReload:
    """Takes changed settings over, all or none of those that can be.

    Args:
        read: returns the settings as a start would have them now.
    """

    def __init__(self, services: Services, read: Callable[[], Settings], tls: TlsFiles | None) -> None:
        self._services = services
        self._read = read
        self._tls = tls
        self._count = services.metrics.settings_reloads
        for outcome in ("done", "failed"):
            # shown as 0 before the first: an alert sees the first rise too
            self._count.labels(outcome)
        self._closing: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Read and take over. Whatever is wrong is logged, and everything stays as it was."""
        try:
            self._take_over(self._read())
        except LoraserveError as error:
            self._count.labels("failed").inc()
            logger.error("the settings stay as they are: %s", error)
        except Exception:
            self._count.labels("failed").inc()
            logger.exception("the settings stay as they are")
        else:
            self._count.labels("done").inc()

    def _take_over(self, new: Settings) -> None:
        old = self._services.settings
        changed = {name for name in Settings.model_fields if getattr(new, name) != getattr(old, name)}
        if (new.ssl_certfile is None) != (self._tls is None):
            raise ConfigError("TLS can't be turned on or off while the server runs.", hint="Restart it.")
        # first what may fail
        tracer = self._services.tracer
        if changed & {"trace_endpoint", "trace_sample"}:
            tracer = open_tracer(new, self._services.metrics)
        if self._tls is not None and new.ssl_certfile is not None:
            try:
                self._tls.reload(new.ssl_certfile, new.ssl_keyfile)
            except BaseException:
                self._close(tracer, unless=self._services.tracer)
                raise
        if "admin_key" in changed:
            key = new.admin_key.get_secret_value() if new.admin_key else None
            self._services.authenticator.set_admin_key(key)
        # a level that hides the lines below holds after them
        set_log_level(min(old.log_level, new.log_level, key=_level))
        self._take_over_registry(new)
        self._replace_tracer(tracer)
        services = self._services
        if services.responses is not None:
            services.responses.is_storing = new.store_responses
        services.result_cache.resize(new.result_cache_bytes)
        services.settings = old.model_copy(update={name: getattr(new, name) for name in LIVE_SETTINGS})
        told = ", ".join(_change(name, old, new) for name in sorted(changed & LIVE_SETTINGS))
        logger.info("the settings were read again; changed: %s", told or "none")
        if waiting := sorted(changed - LIVE_SETTINGS):
            logger.warning("changed settings that need a restart: %s", ", ".join(waiting))
        set_log_level(new.log_level)

    def _take_over_registry(self, new: Settings) -> None:
        registry = self._services.registry
        registry.base_names.change(new.base_names, is_strict=new.strict_base)
        registry.certificates.is_at_upload = new.certify == "at-upload"
        registry.certificates.is_strict = new.strict_certificates
        registry.retain_deleted(new.retention_s)
        registry.local_folders.root = new.lora_dir
        registry.pulls.allowed = new.pull_allow
        registry.ephemeral.ttl_s = new.ephemeral_ttl_s
        registry.ephemeral.bytes.capacity = new.ephemeral_memory

    def _replace_tracer(self, tracer: RequestTracer | None) -> None:
        """Trace by `tracer` from now on; what the one before has queued is still sent."""
        before, self._services.tracer = self._services.tracer, tracer
        self._close(before, unless=tracer)

    def _close(self, tracer: RequestTracer | None, *, unless: RequestTracer | None) -> None:
        """Close a tracer during requests, if it isn't the other one."""
        if tracer is None or tracer is unless:
            return
        closing = asyncio.get_running_loop().create_task(tracer.close(), name="close-tracer")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _level(name: str) -> int:
    return logging.getLevelNamesMapping()[name.upper()]


def _change(name: str, old: Settings, new: Settings) -> str:
    """Format a changed setting with its old and its new value, unless it is a secret."""
    if name in _SECRET:
        return name
    return f"{name} ({_shown(getattr(old, name))} -> {_shown(getattr(new, name))})"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
