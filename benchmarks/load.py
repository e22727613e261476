"""Load a server of OpenAI's completions API: N requests at a time, streamed, greedy, each with a
fresh prompt, random or cut out of a text, and say how fast it answered.

    LORASERVE_API_KEY=… python benchmarks/load.py --url http://127.0.0.1:8000 \\
        --models lora-{:04d} --adapters 32 --concurrency 32

Request i asks for model i of ``--adapters``. Prints one JSON object. A server that takes adapters
in another way gets them by ``--body '{"lora": [{"id": "{}", "scale": 1.0}]}'``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

TIMEOUT_S = 900.0


@dataclass(slots=True)
class Answer:
    """One streamed answer: when it was asked for, when each piece came,
    and how many tokens the server counted.
    """

    started_s: float
    piece_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def filled(value: Any, number: int) -> Any:
    """The same value with the adapter's number in place of each string ``{}``."""
    if isinstance(value, dict):
        return {key: filled(item, number) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, number) for item in value]
    return number if value == "{}" else value


class Stream(asyncio.Protocol):
    """One request and its streamed answer, over a connection of its own.

    A client library takes a tenth of a millisecond for each token, on the cores that the server
    computes with; with a parser in C it is a third of that.
    """

    def __init__(self, answer: Answer) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer, self._text = answer, b""
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError, KeyError) as error:
            self._fail(f"an answer that can't be read: {error!r}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended: {error!r}")

    def on_body(self, body: bytes) -> None:
        self._text += body
        if self._parser.get_status_code() == 200:
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                self._take(line)

    def on_message_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 200:
            self._fail(f"{status}: {self._text[:500]!r}")
        elif not self.ended.done():
            self.ended.set_result(None)

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self._fail(line[:500].decode(errors="replace"))
        elif event["choices"]:
            self._answer.piece_times_s.append(time.perf_counter())
        if event.get("usage"):
            self._answer.num_tokens = event["usage"]["completion_tokens"]

    def _fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(reason))


async def ask(url: str, model: str, prompt: list[int], output_tokens: int, fields: dict[str, Any]) -> Answer:
    """Ask for one answer.

    Raises:
        RuntimeError: the server refused, or ended the answer with an error.
        OSError: it can't be reached.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    content, host = json.dumps(body).encode(), urlsplit(url)
    head = (
        f"POST {host.path}/v1/completions HTTP/1.1\r\nHost: {host.netloc}\r\n"
        f"Authorization: Bearer {os.environ.get('LORASERVE_API_KEY', 'none')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    answer = Answer(time.perf_counter())
    loop = asyncio.get_running_loop()
    transport, stream = await loop.create_connection(lambda: Stream(answer), host.hostname, host.port or 80)
    try:
        transport.write(head.encode() + content)
        async with asyncio.timeout(TIMEOUT_S):
            await stream.ended
    finally:
        transport.close()
    return answer


def draw(rng: random.Random, options: argparse.Namespace) -> list[int]:
    """Return a prompt: a window of the text, or random ids."""
    if options.text_tokens is None:
        return [rng.randrange(260, options.vocab) for _ in range(options.prompt_tokens)]
    text: list[int] = json.loads(options.text_tokens.read_text())
    first = rng.randrange(len(text) - options.prompt_tokens)
    return text[first : first + options.prompt_tokens]


async def load(options: argparse.Namespace) -> dict[str, Any]:
    """Run all requests, ``concurrency`` at a time, and return the figures."""
    rng = random.Random(options.seed)
    prompts = [draw(rng, options) for _ in range(options.requests or options.concurrency)]
    waiting = list(enumerate(prompts))[::-1]
    answers: list[Answer] = []

    async def work() -> None:
        while waiting:
            i, prompt = waiting.pop()
            number = i % options.adapters
            model, fields = options.models.format(number), filled(options.body, number)
            answers.append(await ask(options.url, model, prompt, options.output_tokens, fields))

    start, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(options.concurrency):
            group.create_task(work())
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    tokens = sum(answer.num_tokens for answer in answers)
    short = sum(answer.num_tokens != options.output_tokens for answer in answers)
    if short:
        raise RuntimeError(f"{short} of {len(answers)} answers have fewer tokens than asked for")
    ttft = sorted(answer.piece_times_s[0] - answer.started_s for answer in answers)
    tpot = [(a.piece_times_s[-1] - a.piece_times_s[0]) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1]
    return {
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "output_tokens": tokens,
        "ttft_p50_ms": 1e3 * statistics.median(ttft),
        "ttft_max_ms": 1e3 * ttft[-1],
        "tpot_p50_ms": 1e3 * statistics.median(tpot) if tpot else 0.0,
        "client_cpu_s": cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--models", required=True, help="the request's model; {} is the adapter's number")
    parser.add_argument("--adapters", type=int, default=1, help="how many models to go through")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0, help="0: as many as are asked for at a time")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--text-tokens", type=Path, help="file of a text's token ids, as JSON (default: random ids)")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--body", type=json.loads, default={}, help='more of the body; a string "{}" in it is the adapter\'s number'
    )
    print(json.dumps(asyncio.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
