"""A real server's traces: where a cold adapter's first token got its time from, and what the end
of the server does with spans that wait.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx2
from otlp_collector import collecting
from server_process import ADMIN_KEY, ServerProcess

from loraserve.demo.pack import adapter_dirs

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"authorization": f"Bearer {ADMIN_KEY}", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
BODY = {"model": "sql", "prompt": "list the tickets with age over 81", "max_tokens": 20, "temperature": 0}


def test_spans_name_adapter_tier_and_precede_shutdown(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    server.start()
    with server.admin() as client:
        client.adapters.push(adapter_dirs()["sql"], name="sql")
    assert server.stop() == 0
    with collecting() as collector:
        # the collector is named by OpenTelemetry's own variable, as peers have it
        server.variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        server.start()
        try:
            timings = [
                httpx2.post(f"{server.url}/v1/completions", json=BODY, headers=HEADERS, timeout=60).headers[
                    "server-timing"
                ]
                for _ in range(2)
            ]
        finally:
            assert server.stop() == 0
        loads = sorted(
            (span for span in collector.traced(TRACE) if span.name == "adapter_load"), key=lambda span: span.start_ns
        )
        reads = [span for span in collector.traced(TRACE) if span.name == "adapter_read"]
    assert [load.attributes["loraserve.adapter.tier"] for load in loads] == ["disk", "device"]
    [read] = reads
    assert read.parent_id == loads[0].span_id
    assert 0 < read.duration_s <= loads[0].duration_s
    assert f"adapter;dur={loads[0].duration_s * 1000:.1f}" in timings[0]
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if '"loraserve.access"' in line]
    told = [line for line in lines if line.get("trace_id") == TRACE]
    assert [(line["model"], line["version"], line["finish_reason"]) for line in told] == [("sql", 1, "stop")] * 2


def test_hanging_collector_does_not_delay_shutdown(tmp_path: Path) -> None:
    with collecting() as collector:
        collector.delay_s = 30.0
        flags = ("--memory-budget", "64MiB", "--trace-endpoint", collector.url, "--no-access-log")
        server = ServerProcess(tmp_path / "data", flags=flags)
        server.start()
        answer = httpx2.post(f"{server.url}/v1/completions", json=BODY | {"model": "base"}, headers=HEADERS, timeout=60)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15
        assert answer.status_code == 200
    text = server.log.read_text()
    assert "loraserve.access" not in text
    assert "Traceback" not in text
