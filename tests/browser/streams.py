"""Streams that run beside a test, and must each say what the same request says alone."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from loraserve import Client


@dataclass(slots=True)
class Streams:
    """What they have said so far.

    Attributes:
        wrong: answers that weren't the solo run's, and failures, as words.
    """

    num_ended: Counter[str] = field(default_factory=Counter)
    num_open: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def streaming(url: str, key: str, models: Sequence[str], prompt: str, *, count: int) -> Iterator[Streams]:
    """Keep `count` streams open, each asking one model after the other; stopped afterwards."""
    with Client(url, api_key=key) as client:
        alone = {
            model: client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0).choices[0].text
            for model in models
        }
    streams, ended, lock = Streams(), threading.Event(), threading.Lock()

    def ask(first: int) -> None:
        turns = itertools.cycle([*models[first % len(models) :], *models[: first % len(models)]])
        with Client(url, api_key=key) as client:
            while not ended.is_set():
                model, text = next(turns), ""
                with lock:
                    streams.num_open += 1
                try:
                    chunks = client.completions.create(
                        model=model, prompt=prompt, max_tokens=64, temperature=0, stream=True
                    )
                    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
                except Exception as error:
                    streams.wrong.append(f"{model}: {error!r}")
                    ended.set()
                finally:
                    with lock:
                        streams.num_open -= 1
                        streams.num_ended[model] += 1
                if text != alone[model] and not streams.wrong:
                    streams.wrong.append(f"{model}: {text!r} in place of {alone[model]!r}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
