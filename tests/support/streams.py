"""Streams of one tenant, many at once: what each was asked, what came, and which still run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
from server_process import events

SILENCE_S = 120.0
"""Seconds without a byte after which a stream is broken."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class Question:
    model: str
    prompt: str
    seed: int
    max_tokens: int

    @property
    def body(self) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": self.prompt,
            "seed": self.seed,
            # greedy, and by counted randomness
            "temperature": float(self.seed % 2),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@dataclass(frozen=True)
class StreamedAnswer:
    question: Question
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(eq=False)
class LiveStream:
    """A stream that hasn't ended."""

    question: Question
    began_s: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    last_s: float | None = None
    """Time of its last token."""

    def has_token_since(self, at_s: float) -> bool:
        return self.last_s is not None and self.last_s > at_s

    def __str__(self) -> str:
        now_s = time.monotonic()
        last = "" if self.last_s is None else f", the last {now_s - self.last_s:.1f} s ago"
        return (
            f"seed {self.question.seed} of {self.question.model}: {len(self.token_ids)} of"
            f" {self.question.max_tokens} tokens in {now_s - self.began_s:.1f} s{last}"
        )


@dataclass
class Streams:
    """Streams of a tenant's key, at a server or a cluster.

    Attributes:
        live: those that run, or broke.
        answers: of those that ended.
    """

    url: str
    key: str
    live: set[LiveStream] = field(default_factory=set)
    answers: list[StreamedAnswer] = field(default_factory=list)
    num_tokens: int = 0

    async def ask(self, asked: Sequence[Question], *, at_once: int, within_s: float) -> list[StreamedAnswer]:
        """Ask each question once, and return the answers in their order."""
        room = asyncio.Semaphore(at_once)

        async def one(client: httpx2.AsyncClient, question: Question) -> StreamedAnswer:
            async with room:
                return await self._stream(client, question)

        async with self._ending(at_once, within_s) as (client, group):
            asking = [group.create_task(one(client, question)) for question in asked]
        return [task.result() for task in asking]

    @asynccontextmanager
    async def kept_up(self, asked: Sequence[Question], *, within_s: float) -> AsyncIterator[None]:
        """Keep a stream of each question open during the block: the next begins where one ends.

        Those that are open at the block's end have so many seconds from there to theirs.
        """
        is_over = False

        async def again_and_again(client: httpx2.AsyncClient, question: Question) -> None:
            while not is_over:
                await self._stream(client, question)

        async with self._ending(len(asked), within_s) as (client, group):
            for question in asked:
                group.create_task(again_and_again(client, question))
            yield
            is_over = True

    @asynccontextmanager
    async def _ending(
        self, at_once: int, within_s: float
    ) -> AsyncIterator[tuple[httpx2.AsyncClient, asyncio.TaskGroup]]:
        """Wait after the block for its tasks, and say which streams still run after so long."""
        limits = httpx2.Limits(max_connections=at_once)
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            async with (
                asyncio.timeout(None) as bound,
                httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=SILENCE_S, limits=limits) as client,
                asyncio.TaskGroup() as group,
            ):
                yield client, group
                bound.reschedule(asyncio.get_running_loop().time() + within_s)
        except TimeoutError:
            raise AssertionError(f"not over after {within_s:.0f} s; {self}") from None

    async def _stream(self, client: httpx2.AsyncClient, question: Question) -> StreamedAnswer:
        live = LiveStream(question)
        self.live.add(live)
        lines = []
        try:
            async with client.stream("POST", "/v1/completions", json=question.body) as response:
                assert response.status_code == 200, f"{live}: {(await response.aread()).decode()}"
                async for line in response.aiter_lines():
                    lines.append(line)
                    self._note(live, line)
        except httpx2.HTTPError as error:
            raise AssertionError(f"broken by {error!r}: {live}; {self}") from error
        assert "data: [DONE]" in lines[-3:], f"ended early: {live}; its last lines: {lines[-4:]}"
        found = events(lines)
        errors = [event["error"] for event in found if "error" in event]
        assert not errors, f"{errors}: {live}"
        usage = found[-1]["usage"]
        assert isinstance(usage, dict)
        text = "".join(choice["text"] for event in found for choice in event["choices"])  # type: ignore[attr-defined]
        answer = StreamedAnswer(
            question, text, tuple(live.token_ids), usage["prompt_tokens"], usage["completion_tokens"]
        )
        # one that broke stays among those that a message names
        self.live.remove(live)
        self.answers.append(answer)
        return answer

    def _note(self, live: LiveStream, line: str) -> None:
        for event in events([line]):
            choices = event.get("choices", ())
            assert isinstance(choices, list)
            for choice in choices:
                live.token_ids += choice["token_ids"]
                live.last_s = time.monotonic()
                self.num_tokens += len(choice["token_ids"])

    def __str__(self) -> str:
        longest = sorted(self.live, key=lambda one: one.began_s)
        named = "".join(f"\n  {one}" for one in longest[:_MOST_NAMED])
        return f"{len(self.answers)} streams ended, {len(self.live)} didn't, first:{named}"
