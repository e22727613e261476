"""Traces of requests by OpenTelemetry, with the extra ``otel``."""
