"""Spans of requests, as a collector gets them; what a collector that is slow or away costs."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from core_clock import scheduled_s
from fastapi import FastAPI
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from otlp_collector import CollectedSpan, OTLPCollector, collecting

from loraserve.api.app import create_app
from loraserve.api.services import Services
from loraserve.api.tracing.span_tracer import SpanTracer
from loraserve.limits import LIMITS

from .conftest import ADMIN_KEY, FakeEngine, Tenant

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
SECRET = "the secret prompt"
BODY = {"model": "sql", "prompt": SECRET, "max_tokens": 8, "temperature": 0}
SERVER = 2
"""SpanKind of the request itself."""


@pytest.fixture
def collector() -> Iterator[OTLPCollector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def endpoint(collector: OTLPCollector) -> str:
    return f"{collector.url}/v1/traces"


@pytest.fixture
def sample() -> float | None:
    return None


@pytest.fixture
async def tracer(endpoint: str, sample: float | None, services: Services) -> AsyncIterator[SpanTracer]:
    services.tracer = tracer = SpanTracer.to_collector(endpoint, sample, services.metrics)
    yield tracer
    await tracer.close()


@pytest.fixture
def app(services: Services, tracer: SpanTracer) -> FastAPI:
    assert services.tracer is tracer
    return create_app(services)


async def spans_of(
    tracer: SpanTracer, collector: OTLPCollector, trace_id: str = TRACE
) -> dict[str, list[CollectedSpan]]:
    """The trace's spans by name, once the request's own has come."""
    for _ in range(200):
        await asyncio.to_thread(tracer.flush)
        if any(span.kind == SERVER for span in collector.traced(trace_id)):
            break
        await asyncio.sleep(0.01)
    found: dict[str, list[CollectedSpan]] = {}
    for span in collector.traced(trace_id):
        found.setdefault(span.name, []).append(span)
    return found


def num_spans(services: Services, outcome: str) -> float:
    return services.metrics.registry.get_sample_value("loraserve_trace_spans_total", {"outcome": outcome}) or 0.0


async def test_request_joins_client_trace_and_contains_stage_spans(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    response = await client.post("/v1/completions", json=BODY | {"stream": True}, headers=TRACEPARENT)
    assert response.status_code == 200
    spans = await spans_of(tracer, collector)
    parents = {"admission": "POST /v1/completions", "stream": "POST /v1/completions"}
    parents |= {"text_completion sql": "POST /v1/completions", "adapter_read": "adapter_load"}
    parents |= dict.fromkeys(("queue", "adapter_load", "prefill", "decode"), "text_completion sql")
    assert spans.keys() == {"POST /v1/completions", *parents}
    [root] = spans["POST /v1/completions"]
    assert (root.parent_id, root.kind, root.status) == (PARENT, SERVER, 0)
    for name, parent in parents.items():
        [span], [above] = spans[name], spans[parent]
        assert span.parent_id == above.span_id, name
        assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns, name
    assert root.resource["service.name"] == "loraserve"
    assert collector.paths[0] == "/v1/traces"


async def test_stream_span_counts_pieces_of_several_choices(
    client: httpx2.AsyncClient, engine: FakeEngine, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    engine.step_s = 0.002
    response = await client.post("/v1/completions", json=BODY | {"stream": True, "n": 2}, headers=TRACEPARENT)
    [stream] = (await spans_of(tracer, collector))["stream"]
    num_events = response.text.count("data: ")
    assert 5 < stream.attributes["loraserve.stream.num_pieces"] <= num_events


async def test_span_durations_match_server_timing_and_add_up(
    client: httpx2.AsyncClient, engine: FakeEngine, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    engine.step_s = 0.01
    began = time.monotonic()
    response = await client.post("/v1/completions", json=BODY, headers=TRACEPARENT)
    took_s = time.monotonic() - began
    spans = await spans_of(tracer, collector)
    [root], [answer] = spans["POST /v1/completions"], spans["text_completion sql"]
    stages = [spans[name][0] for name in ("queue", "adapter_load", "prefill", "decode")]
    told = {name: float(ms) / 1000 for name, ms in re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"])}
    for stage, name in zip(stages, ("queue", "adapter", "prefill"), strict=False):
        assert stage.duration_s == pytest.approx(told[name], abs=1e-6), name
    # laid end to end, up to the last token
    for stage, following in itertools.pairwise(stages):
        assert abs(stage.end_ns - following.start_ns) <= 1000
    assert stages[-1].end_ns == answer.end_ns
    # eight steps, of which the decode has all but the first
    assert stages[-1].duration_s >= 7 * engine.step_s
    [admission] = spans["admission"]
    assert admission.start_ns == root.start_ns
    assert admission.end_ns == answer.start_ns
    assert admission.duration_s + answer.duration_s <= root.duration_s <= took_s
    assert abs(root.start_ns / 1e9 - time.time()) < 60


async def test_span_attributes_follow_conventions_and_match_log(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    response = await client.post("/v1/completions", json=BODY, headers=TRACEPARENT)
    spans = await spans_of(tracer, collector)
    [root], [answer] = spans["POST /v1/completions"], spans["text_completion sql"]
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "loraserve.request_id": response.headers["x-request-id"],
        "loraserve.tenant": "acme",
    }
    first_s = answer.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < first_s < root.duration_s
    usage = response.json()["usage"]
    assert answer.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "loraserve",
        "gen_ai.request.model": "sql",
        "gen_ai.response.model": "sql@1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }
    assert spans["adapter_load"][0].attributes == {"loraserve.choice": 0, "loraserve.adapter.tier": "disk"}
    modules = (gen_ai_attributes, http_attributes, error_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    used = {name for span in collector.spans for name in span.attributes}
    assert {name for name in used if not name.startswith("loraserve.")} <= known


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": SECRET}]}, "chat sql"),
        ("/v1/responses", {"model": "sql", "input": SECRET}, "chat sql"),
        (
            "/v1/messages",
            {"model": "sql", "max_tokens": 8, "messages": [{"role": "user", "content": SECRET}]},
            "chat sql",
        ),
        ("/generate", {"inputs": SECRET, "parameters": {"adapter_id": "sql"}}, "text_completion sql"),
        ("/", {"inputs": SECRET}, "text_completion org/base:1"),
        ("/v1/embeddings", {"model": "sql", "input": SECRET}, "embeddings sql"),
        ("/api/chat", {"model": "sql", "messages": [{"role": "user", "content": SECRET}]}, "chat sql"),
        ("/api/generate", {"model": "sql", "prompt": SECRET}, "text_completion sql"),
        ("/api/embed", {"model": "sql", "input": SECRET}, "embeddings sql"),
        ("/v1/rerank", {"model": "sql", "query": SECRET, "documents": ["b"]}, "rerank sql"),
    ],
)
async def test_spans_contain_no_prompt_answer_or_key(
    client: httpx2.AsyncClient,
    acme: Tenant,
    tracer: SpanTracer,
    collector: OTLPCollector,
    path: str,
    body: dict[str, Any],
    name: str,
) -> None:
    response = await client.post(path, json=body, headers=TRACEPARENT)
    assert response.status_code == 200, response.text
    spans = await spans_of(tracer, collector)
    assert name in spans
    posted = b"".join(collector.bodies)
    assert b"acme" in posted
    for secret in (SECRET, "quick brown", acme.key, ADMIN_KEY, acme.key[8:24]):
        assert secret.encode() not in posted, secret


async def test_fastapi_records_no_telemetry_in_any_environment(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    config = create_app(services)._telemetry
    assert not any(config[name] for name in ("tracing", "metrics", "logs", "auto_configure"))


async def test_choices_have_separate_stages_up_to_bound(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    prompts = ["a", "b", "c", "d"]
    response = await client.post("/v1/completions", json=BODY | {"prompt": prompts, "n": 5}, headers=TRACEPARENT)
    assert response.status_code == 200
    spans = await spans_of(tracer, collector)
    assert sorted(span.attributes["loraserve.choice"] for span in spans["prefill"]) == list(
        range(LIMITS.max_traced_choices)
    )
    [answer] = spans["text_completion sql"]
    assert answer.attributes["gen_ai.request.choice.count"] == 20
    assert answer.attributes["gen_ai.usage.output_tokens"] == 160


async def test_refused_request_is_single_span_with_error_code(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    await client.post("/v1/completions", json=BODY | {"model": "absent"}, headers=TRACEPARENT)
    [[root]] = (await spans_of(tracer, collector)).values()
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == ("model_not_found", 404)
    # the client's fault isn't the server's error
    assert root.status == 0


async def test_failing_answer_is_error_span_with_stages(
    client: httpx2.AsyncClient, engine: FakeEngine, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    engine.fail_after = 3
    await client.post("/v1/completions", json=BODY | {"stream": True}, headers=TRACEPARENT)
    spans = await spans_of(tracer, collector)
    [root], [decode] = spans["POST /v1/completions"], spans["decode"]
    assert (root.status, root.attributes["error.type"]) == (2, "overloaded")
    assert decode.attributes["loraserve.finish_reason"] == "overloaded"


async def test_request_without_token_has_only_wait_span(
    client: httpx2.AsyncClient, engine: FakeEngine, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    engine.fail_after = 0
    assert (await client.post("/v1/completions", json=BODY, headers=TRACEPARENT)).status_code == 503
    spans = await spans_of(tracer, collector)
    assert spans.keys() == {"POST /v1/completions", "admission", "text_completion sql", "wait"}
    assert spans["POST /v1/completions"][0].status == 2


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01" + "x" * 4000,
        "00-" + "\xff" * 32 + f"-{PARENT}-01",
    ],
)
async def test_invalid_traceparent_begins_new_trace(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector, value: str
) -> None:
    sent = [*client.headers.raw, (b"traceparent", value.encode("latin-1"))]
    assert (await client.get("/v1/models", headers=sent)).status_code == 200
    for _ in range(200):
        await asyncio.to_thread(tracer.flush)
        if collector.spans:
            break
        await asyncio.sleep(0.01)
    [root] = collector.spans
    assert (root.name, root.parent_id, root.trace_id != TRACE) == ("GET /v1/models", "", True)


async def test_duplicate_traceparent_is_ignored_and_long_tracestate_dropped(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    parent = (b"traceparent", TRACEPARENT["traceparent"].encode())
    twice = [*client.headers.raw, parent, parent]
    await client.get("/v1/models", headers=twice)
    for state in (b"vendor=1", b"vendor=" + b"x" * 5000):
        await client.get("/v1/models", headers=[*client.headers.raw, parent, (b"tracestate", state)])
    await spans_of(tracer, collector)
    for _ in range(200):
        if len(collector.spans) == 3:
            break
        await asyncio.to_thread(tracer.flush)
    assert sorted((span.trace_id == TRACE, span.trace_state) for span in collector.spans) == [
        (False, ""),
        (True, ""),
        (True, "vendor=1"),
    ]


@pytest.mark.parametrize("sample", [0.0])
async def test_sampling_follows_share_unless_client_decided(
    client: httpx2.AsyncClient, services: Services, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    await client.get("/v1/models")
    await client.get("/v1/models", headers={"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"})
    await client.get("/v1/models", headers=TRACEPARENT)
    await spans_of(tracer, collector)
    assert [span.trace_id for span in collector.spans] == [TRACE]
    assert num_spans(services, "exported") == 1


async def test_probes_and_scrapes_are_no_traces(
    client: httpx2.AsyncClient, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    for path in ("/livez", "/readyz", "/health", "/ping", "/metrics"):
        await client.get(path, headers=admin | {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"})
    await client.get("/v1/models", headers=TRACEPARENT)
    await spans_of(tracer, collector)
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


@pytest.mark.alone
async def test_stalled_collector_delays_no_request_and_bounds_queue(
    client: httpx2.AsyncClient, services: Services, tracer: SpanTracer, collector: OTLPCollector
) -> None:
    collector.may_answer.clear()
    # the first batch is on its way meanwhile; the queue fills up behind it
    num_requests = 0
    while not num_spans(services, "dropped"):
        await asyncio.gather(*(client.post("/v1/completions", json=BODY | {"n": 16}) for _ in range(4)))
        num_requests += 4
        assert num_requests * 16 < 4 * LIMITS.max_queued_spans
    assert tracer.num_queued <= LIMITS.max_queued_spans
    # no request waited for the collector, which hasn't answered yet
    assert num_spans(services, "exported") == 0
    before = scheduled_s()
    await tracer.close()
    assert scheduled_s() - before < 2.9
    collector.may_answer.set()
    # its thread ends by itself, with the request that was on its way
    before = scheduled_s()
    while tracer.num_queued:
        await asyncio.sleep(0.02)
        assert scheduled_s() - before < 20


@pytest.mark.alone
async def test_unreachable_collector_delays_no_request_and_logs_once(
    services: Services, publish: Any, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}/v1/traces"
    services.tracer = tracer = SpanTracer.to_collector(endpoint, None, services.metrics)
    await publish("sql")
    transport = httpx2.ASGITransport(create_app(services))
    async with httpx2.AsyncClient(transport=transport, base_url="http://loraserve", headers=acme.headers) as client:
        for _ in range(20):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    before = scheduled_s()
    await tracer.close()
    assert scheduled_s() - before < 4
    for _ in range(500):
        if num_spans(services, "failed"):
            break
        await asyncio.sleep(0.01)
    assert num_spans(services, "failed") > 0
    assert num_spans(services, "exported") == 0
    told = [record for record in caplog.records if record.name.startswith(("loraserve.tracing", "opentelemetry"))]
    assert len(told) == 1
