"""LiteLLM's proxy in front of the server, asked by OpenAI's client.

A wildcard of its configuration hands each name on, by the provider ``hosted_vllm/`` or (option
``openai``) ``openai/``. Another entry has the key of a tenant that may send one request a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from probe import (
    BASE_URL,
    JSON_MODEL,
    KEY,
    LIMITED_KEY,
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    RESULT,
    SCRIPT_OPTIONS,
    TEXT_MODEL,
    feature,
    query_type,
    run,
)

PROVIDER = "openai" if "openai" in SCRIPT_OPTIONS else "hosted_vllm"
MASTER_KEY = "sk-proxy"
START_S = 180
Query = query_type()
TOOL = openai.pydantic_function_tool(Query, name="query")
FORCED: dict[str, Any] = {"model": JSON_MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
FORCED |= {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _entry(name: str, model: str, key: str) -> dict[str, Any]:
    return {
        "model_name": name,
        "litellm_params": {"model": f"{PROVIDER}/{model}", "api_base": BASE_URL, "api_key": key},
    }


@contextlib.contextmanager
def proxied() -> Iterator[str]:
    """Start the proxy; yield its address."""
    config = {
        "model_list": [
            _entry("*", "*", KEY),
            _entry(TEXT_MODEL, TEXT_MODEL, KEY),
            _entry("limited", "base", LIMITED_KEY),
        ],
        "general_settings": {"master_key": MASTER_KEY},
        "litellm_settings": {"num_retries": 0},
        "router_settings": {"num_retries": 0},
    }
    with tempfile.TemporaryDirectory(prefix="litellm-", ignore_cleanup_errors=True) as folder:
        # YAML takes JSON
        (Path(folder) / "config.yaml").write_text(json.dumps(config))
        port = _free_port()
        command = [str(Path(sys.executable).parent / "litellm"), "--config", "config.yaml"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
        # prices are otherwise fetched
        environment = {**os.environ, "HOME": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(f"{url}/health/liveliness", process, log)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    raise AssertionError(f"the proxy wasn't ready in {START_S} s:\n{log.read_text()[-4000:]}")


@feature
def chat() -> str:
    answer = client.chat.completions.with_raw_response.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0)
    assert answer.headers["llm_provider-x-loraserve-adapter"] == f"{TEXT_MODEL}@1", dict(answer.headers)
    assert "llm_provider-x-loraserve-ignored" not in answer.headers, dict(answer.headers)
    return answer.parse().choices[0].message.content


@feature
def stream() -> list[str]:
    chunks = client.chat.completions.create(model=TEXT_MODEL, messages=MESSAGES, temperature=0, stream=True)
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


@feature
def call() -> dict[str, Any]:
    (made,) = client.chat.completions.parse(**FORCED).choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.parsed_arguments.model_dump()}


@feature
def stream_call() -> dict[str, Any]:
    with client.chat.completions.stream(**FORCED) as chunks:
        (made,) = chunks.get_final_completion().choices[0].message.tool_calls
    return {"name": made.function.name, "arguments": made.function.parsed_arguments.model_dump()}


@feature
def result() -> str:
    first = client.chat.completions.create(**FORCED).choices[0].message
    tool = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": RESULT}
    second = client.chat.completions.create(
        model=TEXT_MODEL, messages=[*MESSAGES, first, tool], tools=[TOOL], temperature=0, max_tokens=MAX_TOKENS
    )
    return second.choices[0].message.content


@feature
def parse() -> dict[str, Any]:
    answer = client.chat.completions.parse(model=JSON_MODEL, messages=MESSAGES, response_format=Query, temperature=0)
    return answer.choices[0].message.parsed.model_dump()


@feature
def stream_parse() -> dict[str, Any]:
    with client.chat.completions.stream(
        model=JSON_MODEL, messages=MESSAGES, response_format=Query, temperature=0
    ) as chunks:
        return chunks.get_final_completion().choices[0].message.parsed.model_dump()


@feature
def embeddings() -> list[list[float]]:
    answer = client.embeddings.create(model=TEXT_MODEL, input=[QUESTION, "greet Anna"])
    return [item.embedding for item in answer.data]


@feature
def logprobs() -> list[Any]:
    answer = client.chat.completions.create(
        model=TEXT_MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
    )
    return [[item.token, item.logprob] for item in answer.choices[0].logprobs.content]


@feature
def completion() -> str:
    return client.completions.create(model=TEXT_MODEL, prompt=QUESTION, max_tokens=48, temperature=0).choices[0].text


@feature
def unknown_model() -> str:
    try:
        client.chat.completions.create(model="absent", messages=MESSAGES)
    except openai.NotFoundError as error:
        return error.message
    raise AssertionError("an absent model answered")


@feature
def context_window() -> str:
    try:
        client.chat.completions.create(model=TEXT_MODEL, messages=[{"role": "user", "content": "word " * 5000}])
    except openai.BadRequestError as error:
        return error.message
    raise AssertionError("too long a prompt was answered")


@feature
def rate_limit() -> dict[str, Any]:
    """Return the message and the wait of a request too many."""
    # one a minute, of which other rows' scripts may have had the first
    for _ in range(2):
        try:
            client.chat.completions.create(model="limited", messages=MESSAGES)
        except openai.RateLimitError as error:
            wait = error.response.headers["llm_provider-retry-after"]
            return {"message": error.message, "retry_after_s": float(wait)}
    raise AssertionError("a request too many was answered")


with proxied() as address:
    client: Any = openai.OpenAI(base_url=f"{address}/v1", api_key=MASTER_KEY, max_retries=0, timeout=60)
    run()
