"""What answers when the version that was asked for can't."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx2
import msgspec
import pytest

from loraserve.api.inference.target import TargetSelector
from loraserve.errors import AdapterCorrupt, AdapterNotReady, AdapterNumerics, AdapterUnavailable, Overloaded
from loraserve.registry.binding import Binding, Fallback
from loraserve.registry.model_name import parse_model
from loraserve.types import AdapterRef

BASE = "org/base:1"
pytestmark = pytest.mark.usefixtures("no_leaks")


async def ask(client: httpx2.AsyncClient, path: str = "completions", **body: Any) -> httpx2.Response:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    return await client.post(f"/v1/{path}", json={"model": "sql", "max_tokens": 4, "seed": 1, **prompt, **body})


@pytest.fixture
def failing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int | None, Exception]:
    """Versions (None: the base) that fail before their first token, and why."""
    failures: dict[int | None, Exception] = {}
    generate = engine.generate

    async def failing_generate(request: Any) -> AsyncGenerator[Any, None]:
        error = failures.get(request.adapter and request.adapter.version)
        if error is not None:
            engine.seen.append(request)
            raise error
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", failing_generate)
    return failures


class _Strikes:
    def __init__(self) -> None:
        self.versions: list[int] = []

    def report(self, tenant: Any, adapter: AdapterRef) -> None:
        self.versions.append(adapter.version)


async def test_non_finite_fallback_gets_own_strike(
    client: httpx2.AsyncClient,
    services: Any,
    versions: Any,
    failing: Any,
    bind: Callable[[Binding], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strikes = _Strikes()
    monkeypatch.setattr(services.registry, "numeric_failures", strikes)
    bind(Binding(versions[2], fallback=Fallback(versions[1])))
    failing.update({1: AdapterNumerics("Not finite."), 2: AdapterNumerics("Not finite.")})
    assert (await ask(client, n=2)).status_code == 503
    assert strikes.versions == [2, 1]


@pytest.fixture
async def versions(services: Any, acme: Any, publish: Callable[..., Any]) -> dict[int, AdapterRef]:
    """Three versions of ``sql``."""
    numbers = [await publish(seed=seed) for seed in range(3)]
    return {
        number: await services.registry.resolve(acme.caller.tenant, parse_model(f"sql@{number}", BASE))
        for number in numbers
    }


@pytest.fixture
def bind(services: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Binding], None]:
    """Whatever is asked for is bound so."""

    def bind(binding: Binding) -> None:
        async def bound(*_: Any, **__: Any) -> Binding:
            return binding

        monkeypatch.setattr(services.registry, "bind", bound)

    return bind


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_fallback_answers_for_unready_adapter(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any, path: str, is_stream: bool
) -> None:
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    failing[3] = AdapterNotReady("It is still being read.")
    response = await ask(client, path, stream=is_stream, n=3)
    assert response.status_code == 200
    told = "sql@1; fallback-from=sql@3; reason=adapter_not_ready"
    assert response.headers["x-loraserve-adapter"] == told
    assert "error" not in response.text
    answered = [request for request in engine.seen if request.adapter.version == 1]
    assert len({request.request_id for request in engine.seen}) == len(engine.seen), "no name is given twice"
    assert len(answered) == 3, "all choices are one model's"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_lone_stream_of_fallback_has_whole_text(
    client: httpx2.AsyncClient, versions: Any, bind: Any, failing: Any, path: str
) -> None:
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    whole = (await ask(client, path)).json()["choices"][0]
    failing[3] = AdapterNotReady("It is still being read.")
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    lines = (await ask(client, path, stream=True)).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [choice for event in events for choice in event["choices"]]
    streamed = "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)
    assert streamed == (whole["text"] if "text" in whole else whole["message"]["content"])
    assert len(streamed) > 0


async def test_the_base_can_be_a_fallback(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any, services: Any
) -> None:
    bind(Binding(versions[3], fallback=Fallback(None)))
    failing[3] = AdapterCorrupt("Its bytes are damaged.")
    response = await ask(client)
    assert response.headers["x-loraserve-adapter"] == f"{BASE}; fallback-from=sql@3; reason=adapter_corrupt"
    assert response.json()["choices"][0]["text"] == "base"
    assert response.json()["model"] == "sql", "a client finds the name that it asked for"
    assert services.metrics.registry.get_sample_value("loraserve_fallbacks_total", {"reason": "adapter_corrupt"}) == 1


async def test_fallback_answers_at_once_for_quarantined_version(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, services: Any
) -> None:
    bind(Binding(versions[2], fell_back_from=versions[3], fell_back_for="adapter_quarantined"))
    response = await ask(client)
    assert response.headers["x-loraserve-adapter"] == "sql@2; fallback-from=sql@3; reason=adapter_quarantined"
    assert [request.adapter.version for request in engine.seen] == [2]
    value = services.metrics.registry.get_sample_value("loraserve_fallbacks_total", {"reason": "adapter_quarantined"})
    assert value == 1


@pytest.mark.parametrize("second", [AdapterNotReady("Nor is this one."), AdapterCorrupt("Damaged.")])
async def test_requested_adapter_is_reported_if_fallback_also_fails(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any, second: AdapterUnavailable
) -> None:
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    failing.update({3: AdapterNotReady("sql@3 is still being read."), 1: second})
    response = await ask(client)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_not_ready")
    assert "sql@3" in response.json()["error"]["message"]
    assert [request.adapter.version for request in engine.seen] == [3, 1], "each is tried once"


async def test_overloaded_fallback_is_reported_with_retry_after(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any
) -> None:
    bind(Binding(versions[3], fallback=Fallback(None)))
    failing.update({3: AdapterCorrupt("Damaged."), None: Overloaded("The queue is full.")})
    response = await ask(client)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in response.headers


async def test_without_a_fallback_the_error_stands(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any
) -> None:
    bind(Binding(versions[3]))
    failing[3] = AdapterNotReady("It is still being read.")
    response = await ask(client)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_not_ready")


async def test_unrelated_failure_does_not_trigger_fallback(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any, failing: Any
) -> None:
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    failing[3] = Overloaded("The queue is full.")
    assert (await ask(client)).json()["error"]["code"] == "overloaded"
    assert len(engine.seen) == 1


async def test_no_fallback_occurs_after_first_token(
    client: httpx2.AsyncClient, engine: Any, versions: Any, bind: Any
) -> None:
    bind(Binding(versions[3], fallback=Fallback(versions[1])))
    engine.fail_after, engine.failure = 2, AdapterCorrupt("Damaged.")
    response = await ask(client, stream=True)
    assert response.headers["x-loraserve-adapter"] == "sql@3"
    assert "adapter_corrupt" in response.text
    assert len(engine.seen) == 1


def test_a_fallback_is_taken_once() -> None:
    ref = AdapterRef(tenant="t", name="sql", version=3, digest="", config_blob="", weights_blob="")  # type: ignore[arg-type]
    target = TargetSelector(Binding(ref, fallback=Fallback(ref)), "base")
    error = AdapterNotReady("It is still being read.")
    assert [target.fall_back(error), target.fall_back(error)] == [True, False]


def test_granted_adapter_and_fallback_are_named_with_owner() -> None:
    ref = AdapterRef(tenant="t", name="sql", version=3, digest="", config_blob="", weights_blob="")  # type: ignore[arg-type]
    spare = msgspec.structs.replace(ref, version=1)
    target = TargetSelector(Binding(ref, fallback=Fallback(spare), owners={ref.tenant: "acme"}), "base")
    assert target.fall_back(AdapterNotReady("It is still being read."))
    told = "acme/sql@1; fallback-from=acme/sql@3; reason=adapter_not_ready"
    assert target.headers() == {"x-loraserve-adapter": told}


def test_a_base_of_any_name_fits_the_header() -> None:
    ref = AdapterRef(tenant="t", name="sql", version=3, digest="", config_blob="", weights_blob="")  # type: ignore[arg-type]
    told = TargetSelector(
        Binding(None, fell_back_from=ref, fell_back_for="adapter_quarantined"), "modèle/日本\n"
    ).headers()
    value = told["x-loraserve-adapter"]
    assert value.isascii()
    assert value.isprintable()
    assert value.endswith("; fallback-from=sql@3; reason=adapter_quarantined")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_non_finite_answer_is_single_strike_per_request(
    client: httpx2.AsyncClient, engine: Any, services: Any, acme: Any, is_stream: bool
) -> None:
    engine.fail_after, engine.failure = 2, AdapterNumerics("Its logits were not finite.")
    for _ in range(2):
        assert "adapter_numerics" in (await ask(client, n=3, stream=is_stream)).text
    await services.registry.numeric_failures.close()
    version = await services.registry.get_version(acme.caller.tenant, "sql", 1)
    assert [check["strikes"] for check in version.checks if check["name"] == "numerics"] == [2]
    await ask(client)
    await services.registry.numeric_failures.close()
    assert (await ask(client)).json()["error"]["code"] == "adapter_quarantined"
