"""Time to the first token of activated LoRAs, which find the conversation in the base's KV cache,
and of the same weights as plain LoRAs, which compute it anew.

    python -m benchmarks.bench_alora                    # about two minutes on two cores
    python -m benchmarks.bench_alora --prompt-tokens 512 --quantize int8

The pipeline: the base answers a long prompt; then three adapters, one after the other, are each
asked with the whole conversation and their invocation behind it. One server has all six adapters;
kinds take turns within a round, and each round has a conversation of its own. The best round of
each adapter counts, since others may share the machine. Nothing is written but the models.
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

import httpx2
import torch

from benchmarks.make_model import MODULES, SIZES, write_adapter
from benchmarks.run import make_models, say, serve

RANKS = (8, 16, 32)
ANSWER_TOKENS = 32
INVOCATION = (300, 301, 302, 303)
KINDS = ("activated", "plain")


@dataclass(slots=True)
class Turn:
    """Seconds of one adapter's answers, round by round."""

    ttft_ms: list[float] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)


def make_adapters(size: str, model: Path) -> list[Path]:
    """Three adapters, each as an activated LoRA and as a plain one of the same weights."""
    folders = []
    for kind in KINDS:
        for i, rank in enumerate(RANKS):
            out = model.with_name(f"{model.name}-adapters") / f"{kind}-{i}"
            write_adapter(
                SIZES[size],
                out,
                rank=rank,
                targets=MODULES,
                dtype=torch.bfloat16,
                seed=5000 + i,
                invocation=INVOCATION if kind == "activated" else None,
            )
            folders.append(out)
    return folders


async def ask(
    client: httpx2.AsyncClient, model: str, prompt: list[int], max_tokens: int
) -> tuple[float, int, list[int]]:
    """Stream an answer; return the milliseconds to its first token,
    how many prompt tokens were cached, and its tokens.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    started, first_s, num_cached, tokens = time.perf_counter(), None, 0, []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(line[:500])
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
                if first_s is None and tokens:
                    first_s = time.perf_counter()
            if event.get("usage"):
                num_cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    if first_s is None:
        raise RuntimeError(f"{model} answered without a token")
    return 1e3 * (first_s - started), num_cached, tokens


async def measure(url: str, key: str, vocab: int, prompt_tokens: int, rounds: int) -> dict[str, list[Turn]]:
    rng = random.Random(0)
    turns = {kind: [Turn() for _ in RANKS] for kind in KINDS}
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=900) as client:
        # an adapter's first request loads it
        for kind in KINDS:
            for i in range(len(RANKS)):
                await ask(client, f"{kind}-{i}", [*range(400, 420), *INVOCATION], 2)
        for number in range(rounds):
            prompt = [rng.randrange(400, vocab) for _ in range(prompt_tokens)]
            _, _, answer = await ask(client, "base", prompt, ANSWER_TOKENS)
            conversation = [*prompt, *answer, *INVOCATION]
            for i in range(len(RANKS)):
                # in turn, so that a noisy moment hits them alike
                for kind in KINDS if number % 2 else KINDS[::-1]:
                    ttft_ms, num_cached, _ = await ask(client, f"{kind}-{i}", conversation, 2)
                    turns[kind][i].ttft_ms.append(ttft_ms)
                    turns[kind][i].num_cached_tokens.append(num_cached)
    return turns


def table(turns: dict[str, list[Turn]], num_tokens: int) -> str:
    """The best of each adapter's rounds, and their ratio, in Markdown."""
    rows = ["| adapter | activated ms | plain ms | plain / activated | cached of the prompt |", "|---|---|---|---|---|"]
    ratios = []
    for i, rank in enumerate(RANKS):
        activated, plain = (turns[kind][i] for kind in KINDS)
        best = min(activated.ttft_ms), min(plain.ttft_ms)
        ratios.append(best[1] / best[0])
        cached = f"{min(activated.num_cached_tokens)}, plain {max(plain.num_cached_tokens)}, of {num_tokens}"
        rows.append(f"| rank {rank} | {best[0]:.1f} | {best[1]:.1f} | {ratios[-1]:.1f} | {cached} |")
    whole = [sum(min(turn.ttft_ms) for turn in turns[kind]) for kind in KINDS]
    rows.append(f"| all three | {whole[0]:.1f} | {whole[1]:.1f} | {whole[1] / whole[0]:.1f} | |")
    medians = [statistics.median(ms for turn in turns[kind] for ms in turn.ttft_ms) for kind in KINDS]
    rows.append(f"| median of all rounds | {medians[0]:.1f} | {medians[1]:.1f} | {medians[1] / medians[0]:.1f} | |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="S", choices=("S", "M"))
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantize", default="none", choices=("none", "int8"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    model = make_models(options.size)
    load = os.getloadavg()[0]
    with serve(model, options.quantize, make_adapters(options.size, model)) as server:
        say(f"{options.rounds} rounds …")
        vocab = SIZES[options.size].vocab
        turns = asyncio.run(measure(server.url, server.key, vocab, options.prompt_tokens, options.rounds))
    print(
        f"Size {options.size}, base in {'float32' if options.quantize == 'none' else options.quantize}, "
        f"{options.prompt_tokens} tokens of prompt and {ANSWER_TOKENS} of the base's answer before the invocation; "
        f"load average {load:.1f} on {os.cpu_count()} cores before the start.\n"
    )
    print(table(turns, options.prompt_tokens + ANSWER_TOKENS + len(INVOCATION)))


if __name__ == "__main__":
    main()
