"""What is billed is what clients were given, to the token."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from loraserve.api.inference.answering.metering import RequestUsage
from loraserve.api.inference.prompts import Prompt
from loraserve.engine_client.output import Chunk
from loraserve.errors import AdapterNotReady, EngineCrashed
from loraserve.tenancy.billing.journal import Amounts
from loraserve.tenancy.billing.meter import UsageEvent
from loraserve.tenancy.billing.usage_report import UsageQuery, UsageReports, UsageSum
from loraserve.tenancy.prices import Price, PriceTable

pytestmark = pytest.mark.usefixtures("no_leaks")


async def sums(services: Any, *group_by: str) -> list[UsageSum]:
    reports = UsageReports(services.usage)
    return await reports.all(UsageQuery(group_by=group_by))


async def billed(services: Any) -> Amounts:
    """Everyone's usage together."""
    total = Amounts()
    for item in await sums(services):
        total += item.amounts
    return total


async def complete(client: httpx2.AsyncClient, path: str = "completions", **body: Any) -> dict[str, Any]:
    """The answer's usage."""
    prompt = {"prompt": "x" * 20} if path == "completions" else {"messages": [{"role": "user", "content": "x" * 20}]}
    whole = {"model": "sql", "max_tokens": 8, "seed": 1, **prompt, **body}
    if whole.get("stream"):
        whole["stream_options"] = {"include_usage": True}
    response = await client.post(f"/v1/{path}", json=whole)
    assert response.status_code == 200, response.text
    if not whole.get("stream"):
        usage: dict[str, Any] = response.json()["usage"]
        return usage
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    usage = json.loads(lines[-1])["usage"]
    return usage


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen in time"
        await asyncio.sleep(0.002)


async def until_over(services: Any) -> None:
    """Every request has ended, and what was made for it is counted."""
    await until(lambda: services.metrics.live_requests._value.get() == 0)


class Leaver:
    """A client that stops asking and reads what is on its way: so it knows what it was given."""

    def __init__(self, url: str, key: str, body: dict[str, Any], *, path: str = "/v1/completions") -> None:
        self._url, self._path = url, path
        data = json.dumps({"model": "sql", "prompt": "x" * 20, "max_tokens": 200, "seed": 1, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nAuthorization: Bearer {key}\r\n"
        self._request = f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        self.received = b""
        self.text = ""

    async def run(self, *, num_events: int = 0, wait_s: float = 0.0) -> int:
        """How many tokens it was given before it left: so many events later, and then so long."""
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(self._url).port)
        writer.write(self._request)
        reading = asyncio.create_task(self._read(reader))
        await until(lambda: reading.done() or self.received.count(b"data: {") >= num_events)
        await asyncio.sleep(wait_s)
        writer.write_eof()
        await reading
        writer.close()
        events = [line[6:] for line in self.received.split(b"\n") if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        self.text = "".join(choice.get("text", "") for choice in choices)
        return sum(len(choice.get("token_ids", ())) for choice in choices)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            self.received += data
            if b"[DONE]" in data or b'"usage"' in data:
                return


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_complete_answer_is_billed_as_reported(
    client: httpx2.AsyncClient, services: Any, path: str, is_stream: bool
) -> None:
    usage = await complete(client, path, n=2, stream=is_stream)
    assert usage["completion_tokens"] == 16
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == 16
    assert await billed(services) == Amounts(1, usage["prompt_tokens"], cached, 16)


CHUNK = Chunk(
    text="a",
    token_ids=(1,),
    logprobs=None,
    prompt_logprobs=None,
    finish_reason=None,
    stop_reason=None,
    num_cached_tokens=16,
    queue_s=0.0,
    adapter_s=0.0,
    prefill_s=0.0,
)


def make_usage(services: Any, acme: Any, meter: Any, *, admitted: Any = None) -> RequestUsage:
    """Meter a prompt of 20 tokens with two choices."""
    context: Any = SimpleNamespace(
        prompts=[Prompt(tuple(range(20)), None)],
        body=SimpleNamespace(n=2),
        services=SimpleNamespace(usage=meter, clock=time.time, admissions=services.admissions),
        adapter=None,
        target=SimpleNamespace(candidates=(None,)),
    )
    return RequestUsage(context, acme.caller, admitted or services.admissions.enter(acme.caller))


def test_meter_expects_a_request_once_until_recorded(services: Any, acme: Any) -> None:
    events: list[UsageEvent] = []
    expected: list[RequestUsage] = []
    counted: list[int] = []
    meter = SimpleNamespace(record=events.append, expect=expected.append, persist=lambda: None)
    usage = make_usage(services, acme, meter, admitted=SimpleNamespace(collected=None, count=counted.append))
    for num_before in (0, 1):
        for _ in range(3):
            usage.add(0, CHUNK)
            usage.bill_last()
        assert (len(expected), len(events), counted) == (num_before + 1, num_before, [3] * num_before)
        expected[-1].record()
    assert [(event.num_requests, event.prompt_tokens, event.completion_tokens) for event in events] == [
        (1, 20, 3),
        (0, 0, 3),
    ]
    assert counted == [3, 3]


def test_rate_counts_tokens_without_visible_text(services: Any, acme: Any) -> None:
    counted: list[int] = []
    admitted = SimpleNamespace(collected=None, count=counted.append)
    sources: list[RequestUsage] = []
    meter = SimpleNamespace(record=None, expect=sources.append, persist=lambda: None)
    usage = make_usage(services, acme, meter, admitted=admitted)
    usage.add(0, CHUNK)
    sources[0].record()
    assert counted == [1]
    usage = make_usage(services, acme, None, admitted=admitted)
    usage.add(0, CHUNK)
    assert counted == [1, 1]


def test_cached_count_is_billed_regardless_of_choice_order(services: Any, acme: Any) -> None:
    events: list[UsageEvent] = []
    meter = SimpleNamespace(record=events.append, expect=lambda source: source.record(), persist=lambda: None)
    usage = make_usage(services, acme, meter)
    for index in (1, 0):
        usage.add(index, CHUNK)
        usage.bill_last()
    assert [(event.prompt_tokens, event.cached_tokens) for event in events] == [(20, 16), (0, 0)]
    assert usage.as_dict()["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_each_prompt_is_billed_once(client: httpx2.AsyncClient, services: Any) -> None:
    usage = await complete(client, prompt=["x" * 20, "y" * 30], n=3, max_tokens=2)
    assert usage["prompt_tokens"] == 50
    assert await billed(services) == Amounts(1, 50, 32, 12)


async def test_a_scored_prompt_is_billed_without_an_answer(client: httpx2.AsyncClient, services: Any) -> None:
    await complete(client, max_tokens=0, echo=True, logprobs=0)
    assert await billed(services) == Amounts(1, 20, 16, 0)


async def test_abandoned_stream_is_billed_for_delivered_tokens(
    client: httpx2.AsyncClient, url: str, acme: Any, services: Any, engine: Any
) -> None:
    engine.step_s = 0.002
    rng = random.Random(1)
    bodies = [{"stream": True, "return_token_ids": True, "n": rng.choice([1, 1, 3])} for _ in range(20)]
    leavers = [Leaver(url, acme.key, body) for body in bodies]
    received = sum(await asyncio.gather(*(leaver.run(num_events=rng.randint(0, 30)) for leaver in leavers)))
    await until_over(services)
    found = await billed(services)
    assert received > 50
    assert found.completion_tokens == received
    assert engine.num_aborted > 0


async def test_stalled_reader_is_billed_for_tokens_sent(
    client: httpx2.AsyncClient, url: str, acme: Any, services: Any, engine: Any
) -> None:
    engine.script = "word " * 45
    leaver = Leaver(url, acme.key, {})
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", urlsplit(url).port))
    body = {
        "n": 16,
        "stream": True,
        "logprobs": 20,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    await asyncio.get_running_loop().sock_sendall(sock, Leaver(url, acme.key, body)._request)
    # its buffers are full, and the engine's answers wait
    await until(lambda: len(engine.live) > 0)
    await asyncio.sleep(0.3)
    sock.shutdown(socket.SHUT_WR)
    while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
        leaver.received += data
    sock.close()
    await until_over(services)
    events = [line[6:] for line in leaver.received.split(b"\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    received = sum(len(choice["token_ids"]) for choice in choices)
    found = await billed(services)
    assert 0 < received < 16 * 200
    assert found.completion_tokens == received
    assert found.undelivered_tokens > 0


async def test_disconnect_before_complete_answer_records_only_undelivered_tokens(
    client: httpx2.AsyncClient, url: str, acme: Any, services: Any, engine: Any
) -> None:
    engine.step_s = 0.02
    await Leaver(url, acme.key, {}).run(wait_s=0.4)
    await until_over(services)
    found = await billed(services)
    assert found.undelivered_tokens > 0
    assert replace_undelivered(found) == Amounts()


def replace_undelivered(amounts: Amounts) -> Amounts:
    return Amounts(amounts.num_requests, amounts.prompt_tokens, amounts.cached_tokens, amounts.completion_tokens)


async def test_withheld_text_is_billed_only_after_delivery(
    client: httpx2.AsyncClient, url: str, acme: Any, services: Any, engine: Any
) -> None:
    engine.script, engine.step_s = "ab" + "c" * 95, 0.01
    # every c may be the beginning of the stop string
    stop = "c" * 100
    leaver = Leaver(url, acme.key, {"stream": True, "stop": [stop]})
    await leaver.run(num_events=2, wait_s=0.2)
    await until_over(services)
    found = await billed(services)
    assert leaver.text == "ab"
    assert found.completion_tokens == 2
    assert found.undelivered_tokens > 0


@pytest.mark.parametrize(("is_stream", "given", "lost"), [(True, 5, 0), (False, 0, 5)])
async def test_failing_answer_is_billed_for_delivered_tokens(
    client: httpx2.AsyncClient, services: Any, engine: Any, is_stream: bool, given: int, lost: int
) -> None:
    engine.fail_after, engine.failure = 5, EngineCrashed("The engine died twice under this request.")
    body = {"model": "sql", "prompt": "x" * 20, "max_tokens": 8, "stream": is_stream}
    await client.post("/v1/completions", json=body)
    found = await billed(services)
    assert (found.completion_tokens, found.undelivered_tokens, found.prompt_tokens) == (given, lost, 4 * given)


async def test_refused_request_is_not_billed(client: httpx2.AsyncClient, services: Any) -> None:
    for body in ({"model": "nobody"}, {"max_tokens": -2}):
        whole = {"model": "sql", "prompt": "x", **body}
        assert (await client.post("/v1/completions", json=whole)).status_code >= 400
    assert await billed(services) == Amounts()


async def test_usage_is_kept_by_adapter_and_version(
    client: httpx2.AsyncClient, services: Any, publish: Callable[..., Any], engine: Any
) -> None:
    await publish("sql", 1)
    await publish("law", 5)
    sums_of_two = ("sql@1+0.5*law@1", "0.25*sql@1+law@1")
    for model in ("sql", "sql@1", "law", *sums_of_two, engine.base.id):
        await complete(client, model=model)
    found = {(item.group["adapter"], item.group["version"]) for item in await sums(services, "adapter", "version")}
    assert found == {("sql", 2), ("sql", 1), ("law", 1), ("law@1+sql@1", None), (None, None)}
    # weights are the clients' own: each would be a row
    assert len(await sums(services, "adapter", "version")) == 5


async def test_long_named_sums_with_same_prefix_stay_separate(
    client: httpx2.AsyncClient, services: Any, publish: Callable[..., Any]
) -> None:
    names = [f"{letter}{'x' * 60}" for letter in "abcdefg"]
    for seed, name in enumerate(names):
        await publish(name, seed)
    for weight, left_out in ((0.5, "f"), (0.5, "g"), (0.25, "g")):
        await complete(client, model="+".join(f"{weight}*{name}" for name in names if name[0] != left_out))
    labels = [str(item.group["adapter"]) for item in await sums(services, "adapter")]
    assert len(labels) == 2
    assert {len(one) for one in labels} == {255}


PRICES = PriceTable(
    "EUR",
    Price(Decimal("0.5"), Decimal("0.05"), Decimal("1.5")),
    {"law": Price(Decimal(1), Decimal(1), Decimal(1)), "globex/sql": Price(Decimal(2), Decimal(2), Decimal(2))},
)


@pytest.fixture
def prices(services: Any, acme: Any, monkeypatch: pytest.MonkeyPatch) -> PriceTable:
    """What acme pays."""
    authenticate = services.authenticator.authenticate

    async def with_prices(secret: str, **holder: Any) -> Any:
        caller = await authenticate(secret, **holder)
        return replace(caller, policy=replace(caller.policy, prices=PRICES))

    monkeypatch.setattr(services.authenticator, "authenticate", with_prices)
    return PRICES


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answer_reports_cost_matching_usage_sum(
    client: httpx2.AsyncClient, services: Any, prices: PriceTable, is_stream: bool
) -> None:
    usage = await complete(client, stream=is_stream)
    # 4 prompt tokens computed, 16 cached, 8 made
    assert (usage["cost"], usage["currency"]) == ("0.0000148", "EUR")
    (whole,) = await sums(services)
    assert (whole.cost, whole.currency) == (Decimal("0.0000148"), "EUR")


async def test_ollama_answer_reports_cost(client: httpx2.AsyncClient, services: Any, prices: PriceTable) -> None:
    body = {"model": "sql", "prompt": "x" * 20, "raw": True, "options": {"num_predict": 8}}
    lines = (await client.post("/api/generate", json=body)).text.splitlines()
    assert (json.loads(lines[-1])["cost"], json.loads(lines[-1])["currency"]) == ("0.0000148", "EUR")
    assert "cost" not in json.loads(lines[0])
    (whole,) = await sums(services)
    assert (whole.cost, whole.currency) == (Decimal("0.0000148"), "EUR")
    embedded = await client.post("/api/embed", json={"model": "sql", "input": "x"})
    assert embedded.json()["currency"] == "EUR"


async def test_adapter_has_specific_price(
    client: httpx2.AsyncClient, services: Any, publish: Callable[..., Any], prices: PriceTable
) -> None:
    await publish("law")
    assert (await complete(client, model="law"))["cost"] == "0.000028"


@pytest.mark.parametrize(
    ("model", "cost"),
    # 4 prompt tokens computed, 16 cached, 8 made
    [("0.999999*law", "0.000028"), ("law+0.000001*sql", "0.000032"), ("0.5*sql", "0.0000148")],
)
async def test_sum_costs_as_much_as_dearest_part(
    client: httpx2.AsyncClient,
    services: Any,
    publish: Callable[..., Any],
    prices: PriceTable,
    model: str,
    cost: str,
) -> None:
    await publish("law", 5)
    assert (await complete(client, model=model))["cost"] == cost


async def test_without_prices_an_answer_says_no_cost(client: httpx2.AsyncClient) -> None:
    assert "cost" not in await complete(client)


async def test_end_of_answer_is_journaled_before_delivery(client: httpx2.AsyncClient, services: Any) -> None:
    def written() -> int:
        number: int = services.usage.journal_bytes
        return number

    before = written()
    body = {"model": "sql", "prompt": "x", "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"length"' in line:
                break
        assert written() > before
    before = written()
    await complete(client)
    assert written() > before


async def test_fallback_answer_is_billed_to_fallback_version(
    client: httpx2.AsyncClient, services: Any, publish: Callable[..., Any], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await publish("sql", 1) == 2
    assert (await client.patch("/api/v1/adapters/sql", json={"fallback": 1})).status_code == 200
    generate = engine.generate

    async def generate_but_the_second(request: Any) -> Any:
        if request.adapter.version == 2:
            raise AdapterNotReady("It wasn't on the device in time.")
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", generate_but_the_second)
    await complete(client)
    (only,) = await sums(services, "adapter", "version")
    assert (only.group, only.amounts.completion_tokens) == ({"adapter": "sql", "version": 1}, 8)


@pytest.mark.parametrize(
    "named",
    [
        {"model": "globex/sql"},
        {"model": "1*globex/sql"},
        {"model": "globex/sql+0*sql"},
        {"adapters": [{"name": "globex/sql"}]},
    ],
)
async def test_grantee_pays_own_prices_under_owner_name(
    url: str,
    client: httpx2.AsyncClient,
    services: Any,
    make_tenant: Callable[..., Any],
    publish: Callable[..., Any],
    prices: PriceTable,
    engine: Any,
    named: dict[str, Any],
) -> None:
    globex = await make_tenant("globex")
    await publish("sql", 3, globex)
    async with httpx2.AsyncClient(base_url=url, headers=globex.headers) as owner:
        assert (await owner.put("/api/v1/adapters/sql/grants/acme")).status_code < 300
    usage = await complete(client, **{"model": engine.base.id, **named})
    # 2 a million, whatever kind
    assert usage["cost"] == "0.000056"
    (only,) = await sums(services, "tenant", "adapter")
    assert (only.group["tenant"], only.group["adapter"], only.cost) == ("acme", "globex/sql", Decimal("0.000056"))
