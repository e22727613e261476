"""The collector that traces go to, by the settings and OpenTelemetry's own variables.

Loads nothing of OpenTelemetry unless there is one.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from loraserve.errors import ConfigError

if TYPE_CHECKING:
    from loraserve.api.metrics.counters import ServerMetrics
    from loraserve.api.tracing.span_tracer import SpanTracer
    from loraserve.settings import Settings

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def open_tracer(settings: Settings, metrics: ServerMetrics) -> SpanTracer | None:
    """Open the tracer of the settings or OpenTelemetry's variables; None: none is configured.

    Raises:
        ConfigError: OpenTelemetry isn't installed, or a variable requires what isn't possible.
    """
    asked_by = _asked_by(settings)
    if asked_by is None:
        return None
    if not all(_is_installed(name) for name in _NEEDED):
        raise ConfigError(
            f"{asked_by} asks for traces, and OpenTelemetry isn't installed.",
            hint="Install the extra otel: pip install 'loraserve[otel]'; or leave it out.",
        )
    name = next((name for name in _PROTOCOLS if os.environ.get(name)), None)
    if name is not None and os.environ[name] != _PROTOCOL:
        raise ConfigError(
            f"{name} is {os.environ[name]!r}; this server sends traces by {_PROTOCOL} alone.",
            hint=f"Set it to {_PROTOCOL}, with the collector's port for it, mostly 4318.",
        )
    from loraserve.api.tracing.span_tracer import SpanTracer

    try:
        return SpanTracer.to_collector(settings.trace_endpoint, settings.trace_sample, metrics)
    except ValueError as error:
        raise ConfigError(f"Traces can't be sent: {error}") from error


def _asked_by(settings: Settings) -> str | None:
    """Find the flag or the variable that turns traces on; None: none does, or one forbids it."""
    if settings.trace_endpoint is not None:
        return "--trace-endpoint"
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if is_off or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return None
    asked_by = next((name for name in (TRACES_ENDPOINT, ENDPOINT) if os.environ.get(name)), None)
    if asked_by is None and settings.trace_sample is not None:
        raise ConfigError(
            "--trace-sample says which requests are traced, and nothing says where traces go.",
            hint=f"Add --trace-endpoint, or set {ENDPOINT}.",
        )
    return asked_by


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False
