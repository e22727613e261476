"""Show questions that several models answer at once, each answer streamed, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loraserve import AsyncClient
from loraserve.demo.demo_model import Access, DemoAnswer, Question, ShownQuestion, ToolRequest

_REFRESH_PER_S = 20
_ANSWER_WIDTH = 52
_MIN_MODEL_WIDTH = 8
_TABLE_LINES = 12
"""Lines of a terminal that a question with two answers needs, about."""


@dataclass(slots=True)
class StreamedAnswer:
    """A model's answer so far, and the question that judges it."""

    model: str
    question: Question | None = None
    answer: DemoAnswer = field(default_factory=lambda: DemoAnswer(""))
    ttft_s: float | None = None
    is_done: bool = False

    @property
    def verdict(self) -> str:
        """Finding on a finished answer; empty where nothing judges it."""
        if self.question is None or not self.is_done:
            return ""
        problem = self.question.judge(self.answer)
        return "right" if problem is None else f"wrong: {problem}"


async def stream_answer(
    client: AsyncClient, model: str, prompt: str, tools: Sequence[Mapping[str, Any]], max_tokens: int
) -> AsyncIterator[DemoAnswer]:
    """Ask a model as a chat, and yield its answer as it grows."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        tools=list(tools) or None,
    )
    text = ""
    calls: dict[int, tuple[str, str]] = {}
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    name, arguments = calls.get(call.index or 0, ("", ""))
                    function = call.function
                    if function is not None:
                        calls[call.index or 0] = (
                            name + (function.name or ""),
                            arguments + (function.arguments or ""),
                        )
            yield DemoAnswer(text, tuple(ToolRequest(*call) for call in calls.values()))


@dataclass(slots=True)
class Board:
    """A question, and the answers to it so far."""

    shown: ShownQuestion
    columns: list[StreamedAnswer]

    @property
    def is_done(self) -> bool:
        return all(column.is_done for column in self.columns)


async def ask_all(
    access: Access, questions: Sequence[ShownQuestion], console: Console, *, max_tokens: int
) -> list[dict[str, DemoAnswer]]:
    """Ask all questions at once, each of its models, and show the answers as they come.

    A question is printed when its answers, and those of the questions before it, are complete. On a
    terminal the answers of the next ones grow in tables, of as many as have room.

    Returns:
        For each question, the answers by the model's name in requests.

    Raises:
        LoraserveError: a model failed.
    """
    boards = [
        Board(shown, [StreamedAnswer(access.model(name), question) for name, question in shown.models.items()])
        for shown in questions
    ]
    screen: Live | None = None
    num_growing = max(1, console.height // _TABLE_LINES)
    if console.is_terminal:
        screen = Live(_tables(boards[:num_growing]), console=console, refresh_per_second=_REFRESH_PER_S)
    context: AbstractContextManager[object] = screen or nullcontext()
    num_printed = 0

    def refresh() -> None:
        nonlocal num_printed
        while num_printed < len(boards) and boards[num_printed].is_done:
            if screen is not None:
                console.print(_tables([boards[num_printed]]))
            else:
                for line in _lines(boards[num_printed]):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
            num_printed += 1
        if screen is not None:
            screen.update(_tables(boards[num_printed : num_printed + num_growing]))

    with context:
        async with AsyncClient(access.url, api_key=access.api_key) as client:

            async def show(shown: ShownQuestion, column: StreamedAnswer) -> None:
                start = time.perf_counter()
                async for answer in stream_answer(client, column.model, shown.prompt, shown.tools, max_tokens):
                    if column.ttft_s is None and str(answer):
                        column.ttft_s = time.perf_counter() - start
                    column.answer = answer
                    if screen is not None:
                        refresh()
                column.is_done = True
                refresh()

            await asyncio.gather(*(show(board.shown, column) for board in boards for column in board.columns))
    return [{column.model: column.answer for column in board.columns} for board in boards]


def _lines(board: Board) -> Iterator[str]:
    """Yield a complete question as lines of text."""
    if board.shown.about:
        yield f"\n{board.shown.about}"
    yield f"> {board.shown.prompt}"
    width = max(_MIN_MODEL_WIDTH, *(len(column.model) + 2 for column in board.columns))
    for column in board.columns:
        answer = str(column.answer).replace("\n", " / ")
        verdict = f"  [{column.verdict}]" if column.verdict else ""
        yield f"  {column.model:<{width}}{answer}{verdict}"


def _tables(boards: Sequence[Board]) -> Group:
    parts: list[Text | Table] = []
    for board in boards:
        if board.shown.about:
            parts += [Text(), Text(board.shown.about)]
        parts.append(_table(board.shown.prompt, board.columns))
    return Group(*parts)


def _table(prompt: str, columns: Sequence[StreamedAnswer]) -> Table:
    # A model's text and a person's prompt are text: nothing in them is markup.
    table = Table(title=Text(prompt, style="bold"), title_justify="left")
    table.add_column("model", style="cyan", no_wrap=True)
    # wide from the start, so that the table doesn't jump as answers grow
    table.add_column("answer", overflow="fold", min_width=_ANSWER_WIDTH)
    is_judged = any(column.question is not None for column in columns)
    if is_judged:
        table.add_column("checked")
    table.add_column("first token", justify="right", style="dim", no_wrap=True)
    for column in columns:
        ttft = f"{column.ttft_s * 1000:.0f} ms" if column.ttft_s is not None else ""
        verdict = column.verdict
        style = "green" if verdict == "right" else "red"
        checked = (Text(verdict, style=style),) if is_judged else ()
        table.add_row(column.model, Text(str(column.answer) + ("" if column.is_done else "▌")), *checked, ttft)
    return table
