"""Sends streams of requests to a server and notes when each token came: N at a time, or each at its
own time whether earlier ones were answered or not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.figures import percentile
from benchmarks.traffic import Ask

REFUSALS = (429, 503)
TIMEOUT_S = 900.0


@dataclass(slots=True)
class Answer:
    """One request's answer.

    Attributes:
        due_s, sent_s: when it was to be sent, and when it was, by `time.perf_counter`.
        token_times_s: when each token came.
        prefill_s: how long the prompt was computed, in the server's words.
        status: HTTP's; 0 where there was no answer to the end.
    """

    ask: Ask
    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    status: int = 0
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and len(self.token_times_s) == self.ask.num_output_tokens

    @property
    def ttft_s(self) -> float:
        """From when it was to be sent: a client that lags behind doesn't hide what its users
        wait.
        """
        return self.token_times_s[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]


def prefill_s(server_timing: str) -> float:
    """The prompt's part of a ``Server-Timing`` header, in seconds; 0 where it has none."""
    found = re.search(r"\bprefill;dur=([0-9.]+)", server_timing)
    return float(found[1]) / 1000 if found else 0.0


class Asker:
    """A tenant's connection to one server.

    Args:
        name: the model of an adapter's number.
    """

    def __init__(
        self,
        url: str,
        key: str,
        vocab: int,
        name: str = "lora-{:05d}",
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            limits=limits,
            timeout=TIMEOUT_S,
            transport=transport,
        )
        self._vocab, self._name = vocab, name

    async def __aenter__(self) -> Asker:
        # the first connection and its handshake aren't what is measured
        await self._client.get("/livez")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self,
        ask: Ask,
        *,
        due_s: float | None = None,
        stop: asyncio.Event | None = None,
        into: list[Answer] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Send one request and read its answer to the end, or until `stop` is set.

        What goes wrong is in the answer: nothing is raised for a refusal, an error in the stream or
        a lost connection.

        Args:
            into: the answer is put there before it is sent for, so that others see how far it has
                come.
            fields: more of the request, or others.
        """
        body = {
            "model": self._name.format(ask.adapter),
            "prompt": ask.prompt(self._vocab),
            "max_tokens": ask.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **(fields or {}),
        }
        now = time.perf_counter()
        answer = Answer(ask, now if due_s is None else due_s, now)
        if into is not None:
            into.append(answer)
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    answer.error = (await response.aread())[:500].decode(errors="replace")
                    answer.status = response.status_code
                    return answer
                answer.prefill_s = prefill_s(response.headers.get("server-timing", ""))
                async for line in response.aiter_lines():
                    self._take(answer, line)
                    if stop is not None and stop.is_set():
                        break
            answer.status = 200 if not answer.error else 0
        except httpx2.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended_s = time.perf_counter()
        return answer

    @staticmethod
    def _take(answer: Answer, line: str) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            answer.error = line[:500]
            return
        now = time.perf_counter()
        for choice in event["choices"]:
            answer.token_times_s += [now] * len(choice.get("token_ids") or ())

    async def closed_loop(self, asks: Sequence[Ask], concurrency: int) -> list[Answer]:
        """All of them, so many at a time; whoever is done sends the next."""
        waiting, answers = list(asks)[::-1], []

        async def work() -> None:
            while waiting:
                answers.append(await self.ask(waiting.pop()))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        return answers

    async def open_loop(self, asks: Sequence[Ask]) -> list[Answer]:
        """Each at its own time."""
        start = time.perf_counter()

        async def send(ask: Ask) -> Answer:
            await asyncio.sleep(max(0.0, start + ask.at_s - time.perf_counter()))
            return await self.ask(ask, due_s=start + ask.at_s)

        return list(await asyncio.gather(*map(send, asks)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Sum of a stream's answers.

    Times in seconds; throughput counts complete answers alone, from the first that was due to the
    last's end.
    """

    num_sent: int
    num_complete: int
    num_refused: int
    num_failed: int
    num_tokens: int
    offered_per_s: float
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    wall_s: float
    errors: tuple[str, ...] = ()

    @property
    def refused_share(self) -> float:
        return self.num_refused / self.num_sent if self.num_sent else 0.0

    @staticmethod
    def of(answers: Sequence[Answer]) -> Summary:
        """
        Raises:
            ValueError: there are none.
        """
        if not answers:
            raise ValueError("No request was sent; expected one or more.")
        good = [answer for answer in answers if answer.is_complete]
        refused = [answer for answer in answers if answer.status in REFUSALS]
        failed = [answer for answer in answers if not answer.is_complete and answer.status not in REFUSALS]
        start, last_due = min(answer.due_s for answer in answers), max(answer.due_s for answer in answers)
        wall_s = max((answer.token_times_s[-1] for answer in good), default=last_due) - start
        ttft = [answer.ttft_s for answer in good]
        gaps = [gap for answer in good for gap in answer.gaps_s]
        num_tokens = sum(len(answer.token_times_s) for answer in good)
        return Summary(
            num_sent=len(answers),
            num_complete=len(good),
            num_refused=len(refused),
            num_failed=len(failed),
            num_tokens=num_tokens,
            offered_per_s=len(answers) / (last_due - start) if last_due > start else 0.0,
            tokens_per_s=num_tokens / wall_s if wall_s else 0.0,
            ttft_p50_s=percentile(ttft, 50),
            ttft_p99_s=percentile(ttft, 99),
            gap_p50_s=percentile(gaps, 50),
            gap_p99_s=percentile(gaps, 99),
            wall_s=wall_s,
            errors=tuple(sorted({answer.error[:200] for answer in failed}))[:5],
        )
