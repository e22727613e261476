"""Load a server of OpenAI's completions API: N requests at a time, streamed, greedy, each with a
fresh random prompt, and say how fast it answered.

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
from typing import Any

import httpx2


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


async def ask(
    client: httpx2.AsyncClient, model: str, prompt: list[int], output_tokens: int, fields: dict[str, Any]
) -> Answer:
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
    answer = Answer(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(line[:500])
            if event["choices"]:
                answer.piece_times_s.append(time.perf_counter())
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
    return answer


async def load(options: argparse.Namespace) -> dict[str, Any]:
    """Run all requests, ``concurrency`` at a time, and return the figures."""
    rng = random.Random(options.seed)
    prompts = [
        [rng.randrange(260, options.vocab) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests or options.concurrency)
    ]
    waiting = list(enumerate(prompts))[::-1]
    answers: list[Answer] = []
    headers = {"Authorization": f"Bearer {os.environ.get('LORASERVE_API_KEY', 'none')}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=900) as client:

        async def work() -> None:
            while waiting:
                i, prompt = waiting.pop()
                number = i % options.adapters
                model, fields = options.models.format(number), filled(options.body, number)
                answers.append(await ask(client, model, prompt, options.output_tokens, fields))

        # the first connection and its handshake aren't what is measured
        await client.get("/livez")
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
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--body", type=json.loads, default={}, help='more of the body; a string "{}" in it is the adapter\'s number'
    )
    print(json.dumps(asyncio.run(load(parser.parse_args()))))


if __name__ == "__main__":
    main()
