"""An OTLP collector in the test's process: it decodes what is posted to it, as late as it is told
to.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class CollectedSpan:
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    status: int
    trace_state: str

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class OTLPCollector:
    """Attributes:
    delay_s: how long each export waits for its answer.
    may_answer: cleared to hold every answer until it is set, or for a minute.
    status: of the answers.
    bodies: what was posted, unpacked.
    """

    url: str = ""
    delay_s: float = 0.0
    may_answer: threading.Event = field(default_factory=threading.Event)
    status: int = 200
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    spans: list[CollectedSpan] = field(default_factory=list)

    def wait_for(self, is_there: Callable[[CollectedSpan], bool], num: int = 1, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while sum(map(is_there, self.spans)) < num:
            assert time.monotonic() < deadline, f"no such span among {[span.name for span in self.spans]}"
            time.sleep(0.02)

    def traced(self, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource_spans in request.resource_spans:
            resource = _attributes(resource_spans.resource.attributes)
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.append(
                        CollectedSpan(
                            span.name,
                            span.kind,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _attributes(span.attributes),
                            resource,
                            span.status.code,
                            span.trace_state,
                        )
                    )
        self.bodies.append(body)
        self.paths.append(path)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _attributes(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


@contextmanager
def collecting() -> Iterator[OTLPCollector]:
    """A collector on a free port, until the end of the block."""
    collector = OTLPCollector()
    collector.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.delay_s:
                time.sleep(collector.delay_s)
            collector.may_answer.wait(60)
            if collector.status == 200:
                collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            try:
                self.send_response(collector.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                pass  # the server has given up

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
