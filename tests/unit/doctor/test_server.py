"""What a running server says of its memory is compared with the plan."""

from __future__ import annotations

import http.server
import json
import threading

from loraserve.doctor.server import check_budget, check_counters, check_probes, is_there
from loraserve.memory.memory_plan import MemoryPlan
from loraserve.planning.memory import ArenaPlan
from loraserve.sdk.types.samples import parse_metrics

TEXT = """\
# HELP loraserve_kv_blocks KV blocks by state.
loraserve_kv_blocks{state="used"} 10.0
loraserve_kv_blocks{state="cached"} 30.0
loraserve_kv_blocks{state="free"} 60.0
loraserve_adapter_budget_bytes{tier="device"} 3.6864e+05
loraserve_device_memory_budget_bytes 409600.0
loraserve_invariant_violations_total 0.0
odd line
"""


def arena(num_pages: int = 100, source: str = "--memory-budget") -> ArenaPlan:
    return ArenaPlan(num_pages * 4096, source, MemoryPlan(num_pages, 4096, 4096, num_kv_pages=10), 4096, 16, 10)


def test_samples_are_read_with_labels() -> None:
    samples = parse_metrics(TEXT)
    assert samples['loraserve_kv_blocks{state="free"}'] == 60
    assert len(samples) == 6


def test_server_with_planned_numbers_passes() -> None:
    assert [check.status for check in check_budget(parse_metrics(TEXT), arena())] == ["ok"] * 3


def test_each_deviating_number_is_reported() -> None:
    found = {check.name: check.status for check in check_budget(parse_metrics(TEXT), arena(105))}
    assert found == {"budget": "warn", "kv_blocks": "warn", "adapter_budget": "warn"}
    # a GPU's budget is an estimate here, and measured there
    assert {check.status for check in check_budget(parse_metrics(TEXT), arena(105, "what is left"))} == {"ok"}
    assert {check.status for check in check_budget({}, arena())} == {"warn"}


def test_a_broken_invariant_fails_and_failed_loads_warn() -> None:
    assert [c.status for c in check_counters(parse_metrics(TEXT))] == ["ok"]
    broken = {"loraserve_invariant_violations_total": 2.0, "loraserve_adapter_load_failures_total": 1.0}
    assert [(c.name, c.status) for c in check_counters(broken)] == [("invariants", "fail"), ("loads", "warn")]


def test_unused_address_is_reported_as_no_server() -> None:
    assert not is_there("http://127.0.0.1:9")


def test_cause_of_unready_server_is_reported() -> None:
    class Loading(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": "unavailable", "detail": "The engine is loading shard 3 of 4."}).encode()
            self.send_response(200 if self.path == "/livez" else 503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (check,) = check_probes(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert check.status == "warn"
    assert "503: The engine is loading shard 3 of 4." in check.found
