"""Who asks for traces, and what is said where they can't be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loraserve.api.metrics.counters import ServerMetrics
from loraserve.api.tracing import collector
from loraserve.api.tracing.collector import open_tracer
from loraserve.errors import ConfigError
from loraserve.settings import Settings

URL = "http://127.0.0.1:9/v1/traces"


def settings(tmp_path: Path, **values: object) -> Settings:
    return Settings.load(model="m", data_dir=tmp_path, **values)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


async def is_traced(tmp_path: Path, **values: object) -> bool:
    tracer = open_tracer(settings(tmp_path, **values), ServerMetrics())
    if tracer is not None:
        await tracer.close()
    return tracer is not None


async def test_tracing_is_off_by_default(tmp_path: Path) -> None:
    assert not await is_traced(tmp_path)


async def test_flag_and_each_opentelemetry_variable_enable_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await is_traced(tmp_path, trace_endpoint=URL)
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "http://127.0.0.1:9")
            assert await is_traced(tmp_path)
            assert await is_traced(tmp_path, trace_sample=0.5)
            for off, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
                with monkeypatch.context() as inner:
                    inner.setenv(off, value)
                    assert not await is_traced(tmp_path)


async def test_missing_extra_is_named_with_requesting_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--trace-endpoint asks for traces.*isn't installed") as raised:
        open_tracer(settings(tmp_path, trace_endpoint=URL), ServerMetrics())
    assert "loraserve[otel]" in str(raised.value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT asks"):
        open_tracer(settings(tmp_path), ServerMetrics())
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert open_tracer(settings(tmp_path), ServerMetrics()) is None


def test_absent_package_is_reported_as_not_installed() -> None:
    assert not collector._is_installed("no_such_package.sdk")


@pytest.mark.parametrize(
    ("variables", "values", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, {"trace_endpoint": URL}, "by http/protobuf alone"),
        ({"OTEL_BSP_SCHEDULE_DELAY": "-1"}, {"trace_endpoint": URL}, "Traces can't be sent"),
        ({}, {"trace_sample": 0.5}, "nothing says where traces go"),
    ],
)
def test_impossible_settings_are_refused_at_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    values: dict[str, object],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        open_tracer(settings(tmp_path, **values), ServerMetrics())


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_otlps(tmp_path: Path, given: str, kept: str) -> None:
    assert settings(tmp_path, trace_endpoint=given).trace_endpoint == kept


@pytest.mark.parametrize(
    "value",
    [
        *("", "collector:4318", "grpc://collector:4317", "http://", "http://c?a=b", "http://c#a", "http://ö:1"),
        *("http://user:secret@collector", "http://token@collector", "http://[::1", "http://c:99999", "x" * 3000),
    ],
)
def test_invalid_endpoint_is_refused_without_repeating_url(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="trace-endpoint") as raised:
        settings(tmp_path, trace_endpoint=value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("value", [-0.1, 1.1, "often", float("nan")])
def test_a_share_is_between_0_and_1(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="trace-sample"):
        settings(tmp_path, trace_sample=value)


def test_server_without_tracing_loads_no_exporter() -> None:
    # FastAPI itself loads OpenTelemetry's API, which does nothing without these
    code = (
        "import sys, loraserve.api.server as _; heavy = ('opentelemetry.sdk.trace', 'opentelemetry.exporter'); "
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
