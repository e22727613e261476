"""A tenant that sends more than a server can do, until its time is over:
what it got is printed as one JSON object.

python -m benchmarks.noisy --url URL --vocab 32000 --rate 20 --duration 60 --adapters 8

The key is LORASERVE_API_KEY. A process of its own: what it costs to send and to read isn't the
measured client's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict

from benchmarks.asking import Answer, Asker, Summary
from benchmarks.traffic import slora_trace


async def send(options: argparse.Namespace, key: str) -> list[Answer]:
    """The answers as far as they came within the time;
    requests that wait or run then are given up.
    """
    lengths = {"prompt_tokens": tuple(options.prompt_tokens), "output_tokens": tuple(options.output_tokens)}
    asks = slora_trace(options.adapters, 1.0, options.rate, 1.0, options.duration, options.seed, **lengths)
    answers: list[Answer] = []
    async with Asker(options.url, key, options.vocab, name=options.name) as asker:

        async def at_its_time(number: int) -> None:
            await asyncio.sleep(asks[number].at_s)
            await asker.ask(asks[number], into=answers)

        tasks = [asyncio.create_task(at_its_time(number)) for number in range(len(asks))]
        await asyncio.sleep(options.duration)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--duration", type=float, required=True, help="seconds")
    parser.add_argument("--adapters", type=int, required=True)
    parser.add_argument("--name", default="lora-{:05d}", help="the model of an adapter's number")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(64, 512), metavar=("FROM", "TO"))
    parser.add_argument("--output-tokens", type=int, nargs=2, default=(16, 128), metavar=("FROM", "TO"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    answers = asyncio.run(send(options, os.environ["LORASERVE_API_KEY"]))
    num_tokens = sum(len(answer.token_times_s) for answer in answers)
    got = {"tokens_per_s": num_tokens / options.duration, "summary": asdict(Summary.of(answers))}
    print(json.dumps(got))


if __name__ == "__main__":
    main()
