"""Long texts: refused before they take time where they can't fit, tokenized beside everything else
where they can, and their memory given back.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

import attack
import httpx2
import pytest
from attack import KIB, MIB
from core_clock import scheduled_s

from loraserve.api.http import text_threads

LONG = "The quick brown fox jumps over the lazy dog. " * 23_300  # nearly a mebibyte
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.fixture
def encoded_in(services: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each text that is tokenized."""
    threads: list[str] = []
    encode = type(services.tokenizer).encode

    def recording(self: Any, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(type(services.tokenizer), "encode", recording)
    return threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": ["short", LONG]}),
        ("chat/completions", {"messages": MESSAGES}),
    ],
)
async def test_overlong_text_is_refused_before_tokenization(
    client: httpx2.AsyncClient, encoded_in: list[str], path: str, body: dict[str, Any]
) -> None:
    response = await client.post(f"/v1/{path}", json={"model": "sql", **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens" in error["message"]
    assert error["param"].startswith("messages" if "messages" in body else "prompt")
    assert encoded_in == []


@pytest.mark.parametrize(
    ("path", "body", "is_on_loop"),
    [
        ("v1/completions", {"prompt": "short"}, True),
        ("v1/completions", {"prompt": ["x" * 50] * 100}, False),
        ("v1/completions", {"prompt": "short", "user": "u" * 4000}, False),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 90}, False),
        (
            "v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 200}]},
            False,
        ),
        ("tokenize", {"prompt": "y" * 4000}, False),
    ],
)
async def test_total_text_size_moves_tokenization_off_event_loop(
    client: httpx2.AsyncClient, encoded_in: list[str], path: str, body: dict[str, Any], is_on_loop: bool
) -> None:
    response = await client.post(f"/{path}", json={"model": "sql", "max_tokens": 1, **body})
    assert response.status_code in (200, 400)
    # the engine's stand-in tokenizes its answers, on the loop and afterwards
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert {name.startswith("text") for name in encoded_in[:num_prompts]} == {not is_on_loop}


@pytest.mark.parametrize(
    "body",
    [
        {"tokens": [5] * 200_000},
        {"tokens": [5] * 200_000 + [99_999]},
    ],
)
async def test_tokens_are_read_and_decoded_off_the_loop(
    client: httpx2.AsyncClient, services: Any, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    decoded_in = []
    decode = services.tokenizer.decode
    monkeypatch.setattr(
        type(services.tokenizer),
        "decode",
        lambda self, ids, skip_special_tokens=True: (
            decoded_in.append(threading.current_thread().name) or decode(ids, skip_special_tokens)
        ),
    )
    response = await client.post("/detokenize", json=body)
    is_good = len(body["tokens"]) == 200_000
    assert response.status_code == (200 if is_good else 400)
    assert [name[:4] for name in decoded_in] == (["text"] if is_good else [])


def resident() -> int:
    return attack.resident_bytes(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_long_texts_delay_no_tenant_and_release_memory(
    client: httpx2.AsyncClient, url: str, acme: Any, make_tenant: Any, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "_TRIM_DELAY_S", 0.2)
    globex = await make_tenant("globex")
    before = resident()
    key = f"Bearer {acme.key}"
    kinds = [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": LONG[: 256 * KIB], "return_token_strs": True}),
        ("/detokenize", {"tokens": [5] * 400_000}),
        ("/v1/completions", {"model": "sql", "prompt": LONG}),
        ("/v1/chat/completions", {"model": "sql", "messages": MESSAGES}),
        ("/v1/completions", {"model": "sql", "prompt": [[5] * 200] * 128, "max_tokens": 1}),
        ("/tokenize", {"prompt": [[]] * 300_000}),
    ]
    flood = [attack.post(path, body, authorization=key, connection="close") for path, body in kinds]
    latencies = []
    async with attack.watch(url) as seen:
        running = [asyncio.create_task(attack.send(url, [data], rest_s=60)) for data in flood]
        async with httpx2.AsyncClient(base_url=url, headers=globex.headers, timeout=30) as other:
            while not all(task.done() for task in running):
                began = scheduled_s()
                body = {"model": base.id, "prompt": "x" * 100, "user": "u" * 3000, "max_tokens": 4}
                assert (await other.post("/v1/completions", json=body)).status_code == 200
                latencies.append(scheduled_s() - began)
                await asyncio.sleep(0.02)
    outcomes = [task.result() for task in running]
    assert [outcome.status for outcome in outcomes[:4]] == [200] * 4
    assert {outcome.status for outcome in outcomes[4:]} <= {200, 400, 429}
    # quiet: some tens of milliseconds; each text alone took the loop for seconds when it kept the
    # interpreter's lock
    assert seen.longest_s < 1.0
    assert max(latencies) < 3.0
    assert f'"count":{len(LONG)},'.encode() in outcomes[0].answer
    del outcomes, running, flood, kinds
    deadline = time.monotonic() + 10
    while resident() - before > 150 * MIB and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert resident() - before < 150 * MIB
