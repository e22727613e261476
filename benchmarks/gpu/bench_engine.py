"""The engine as a server's worker runs it, on a base of Llama-3.1-8B's shape: time to first token,
time between tokens, tokens a second; beside prompts, without graphs, with a penalised row, with an
adapter that no step has seen.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from benchmarks.gpu.engine_world import EngineWorld, Stream, gaps_s, make_engine
from benchmarks.gpu.limits import quantile
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Case, Row

MAX_NUM_SEQS, MAX_NUM_TOKENS = 256, 2048
PROMPTS = (128, 512, 2048)
STREAMS = 32
CONTEXT = 256
STEPS = 150
REPEATS = 5
THROUGHPUT_S = 1.5
"""Figures of steps at one number of rows."""


class Bench:
    """One engine, whose cases leave it without requests."""

    def __init__(self, machine: Machine, format: str) -> None:
        self.machine, self.format = machine, format
        self.is_tiny = machine.is_tiny
        self.streams = 2 if machine.is_tiny else STREAMS
        self.context = 8 if machine.is_tiny else CONTEXT
        self.steps = 3 if machine.is_tiny else STEPS
        self.prompts = (12,) if machine.is_tiny else PROMPTS
        self._world: EngineWorld | None = None
        self._failure: str | None = None

    @property
    def world(self) -> EngineWorld:
        if self._failure is not None:
            # it would fail again, for as long
            raise RuntimeError(f"no engine: {self._failure}")
        if self._world is None:
            seqs, tokens = (4, 16) if self.is_tiny else (MAX_NUM_SEQS, MAX_NUM_TOKENS)
            try:
                self._world = make_engine(self.machine, self.format, max_num_seqs=seqs, num_tokens=tokens)
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"[:200]
                raise
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None
        # the engine refers to itself, and holds most of the device's memory
        gc.collect()
        self.machine.free()

    def row(self, what: str, **figures: Any) -> Row:
        """A row of the table; figures are None where nothing is timed."""
        is_timed = self.machine.is_timing
        base = ("fp16" if self.is_tiny else "bf16") if self.format == "none" else self.format
        return {"base": base, "what": what} | {
            key: value if is_timed or key in ("note", "tokens") else None for key, value in figures.items()
        }

    def run(self, case: Callable[[], list[Row]]) -> list[Row]:
        try:
            return case()
        finally:
            if self._world is not None:
                self._world.finish()

    # cases

    def ready(self) -> list[Row]:
        world = self.world
        sizes = (
            f"{len(world.sizes)} sizes of steps, {world.num_blocks} KV blocks of {world.engine.stats().kv_block_size}"
        )
        return [self.row("ready", ms=world.ready_s * 1e3, note=f"{sizes}; base made in {world.base_s:.1f} s")]

    def first_tokens(self) -> list[Row]:
        rows = []
        for num_tokens in self.prompts:
            self._first_token(num_tokens)
            found = [self._first_token(num_tokens) for _ in range(1 if self.is_tiny else REPEATS)]
            rows.append(
                self.row(f"first token, {num_tokens} idle", tokens=num_tokens, ms=statistics.median(found) * 1e3)
            )
        return rows

    def _first_token(self, num_tokens: int) -> float:
        stream = self.world.add(num_tokens, 1)
        self.world.run_until(lambda: stream.is_over)
        return stream.ttft_s

    def start_streams(self, count: int, *, with_adapters: bool = False, **params: Any) -> list[Stream]:
        """Streams that have their first tokens, and go on until they are ended."""
        world, streams = self.world, []
        for i in range(count):
            adapter = world.adapters[i % (len(world.adapters) - 1)] if with_adapters else None
            more = params if i == 0 else {}
            streams.append(world.add(self.context, 4000 if not self.is_tiny else 60, adapter, **more))
        world.run_until(lambda: all(len(stream.times_s) > 2 for stream in streams))
        return streams

    def between_tokens(self, *, with_adapters: bool) -> list[Row]:
        streams = self.start_streams(self.streams, with_adapters=with_adapters)
        what = f"{self.streams} streams{', each an adapter' if with_adapters else ''}"
        rows = [self.row(f"{what}, no prompts", **self._gaps(streams))]
        for num_tokens in self.prompts:
            first: list[float] = []
            since = time.perf_counter()
            for _ in range(1 if self.is_tiny else REPEATS):
                prompt = self.world.add(num_tokens, 1)
                self.world.run_until(lambda s=prompt: s.is_over)
                first.append(prompt.ttft_s)
                for _ in range(2 if self.is_tiny else 10):
                    self.world.step()
            gaps = gaps_s(streams, since)
            rows.append(
                self.row(
                    f"{what}, prompts of {num_tokens}",
                    tokens=num_tokens,
                    ms=statistics.median(first) * 1e3,
                    p50_ms=quantile(gaps, 0.5) * 1e3,
                    p99_ms=quantile(gaps, 0.99) * 1e3,
                )
            )
        return rows

    def _gaps(self, streams: list[Stream], steps: int | None = None) -> dict[str, float]:
        since = time.perf_counter()
        for _ in range(steps or self.steps):
            self.world.step()
        gaps = gaps_s(streams, since)
        return {
            "p50_ms": quantile(gaps, 0.5) * 1e3,
            "p99_ms": quantile(gaps, 0.99) * 1e3,
            "tokens_per_s": len(streams) / statistics.mean(gaps),
        }

    def throughput(self, count: int) -> list[Row]:
        streams = self.start_streams(count, with_adapters=True)
        if self.is_tiny:
            return [self.row(f"{count} streams, adapters", **self._gaps(streams))]
        before, since = sum(len(s.times_s) for s in streams), time.perf_counter()
        while time.perf_counter() - since < (THROUGHPUT_S if self.machine.is_timing else 0.1):
            self.world.step()
        made, took = sum(len(s.times_s) for s in streams) - before, time.perf_counter() - since
        gaps = gaps_s(streams, since)
        return [
            self.row(
                f"{count} streams, {min(count, len(self.world.adapters) - 1)} adapters",
                tokens_per_s=made / took,
                p50_ms=quantile(gaps, 0.5) * 1e3,
                p99_ms=quantile(gaps, 0.99) * 1e3,
            )
        ]

    def without_graphs(self) -> list[Row]:
        self.world.without_graphs(True)
        try:
            streams = self.start_streams(self.streams)
            return [self.row(f"{self.streams} streams, graphs off", **self._gaps(streams, 2 if self.is_tiny else 60))]
        finally:
            self.world.finish()
            self.world.without_graphs(False)

    def penalised(self) -> list[Row]:
        streams = self.start_streams(self.streams, repetition_penalty=1.2)
        return [self.row(f"{self.streams} streams, one penalised", **self._gaps(streams))]

    def cold_adapter(self) -> list[Row]:
        """An adapter is read, packed and copied while the streams go on."""
        streams = self.start_streams(self.streams, with_adapters=True)
        since = time.perf_counter()
        cold = self.world.add(self.context, 1, self.world.adapters[-1])
        self.world.run_until(lambda: cold.is_over)
        gaps = gaps_s(streams, since)
        figures = {"p50_ms": quantile(gaps, 0.5) * 1e3, "p99_ms": quantile(gaps, 0.99) * 1e3} if gaps else {}
        what = f"{self.streams} streams, one adapter cold"
        return [self.row(what, tokens=self.context, ms=cold.ttft_s * 1e3, **figures)]


def cases(machine: Machine) -> Iterator[Case]:
    formats = ("none",) if machine.is_tiny else ("none", "int8")
    # at most one engine at a time: each takes what is free
    current: list[Bench] = []

    def bench(format: str) -> Bench:
        if not current or current[0].format != format:
            for old in current:
                old.close()
            current[:] = [Bench(machine, format)]
        return current[0]

    try:
        for format in formats:
            get = cache(lambda f=format: bench(f))
            steps: list[tuple[str, Callable[[Bench], list[Row]]]] = [
                ("ready", Bench.ready),
                ("first tokens", Bench.first_tokens),
                ("between tokens", lambda b: b.between_tokens(with_adapters=False)),
                ("between tokens, adapters", lambda b: b.between_tokens(with_adapters=True)),
                *(
                    (f"{count} streams", lambda b, c=count: b.throughput(c))  # type: ignore[misc]
                    for count in ((3,) if machine.is_tiny else (32, 256, 64, 1))
                ),
                ("cold adapter", Bench.cold_adapter),
                ("graphs off", Bench.without_graphs),
                ("penalised", Bench.penalised),
            ]
            if machine.is_tiny:
                steps = [step for step in steps if step[0] not in ("between tokens", "first tokens", "3 streams")]
            if format != "none":
                steps = [step for step in steps if step[0] not in ("graphs off", "penalised", "between tokens")]
            for name, case in steps:
                yield Case(f"{format}, {name}", lambda g=get, c=case: g().run(lambda: c(g())), group=format)
    finally:
        # also where the time was over before the last case
        for old in current:
            old.close()
