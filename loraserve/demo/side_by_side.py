"""Show a prompt answered by several models at once, each answer streamed, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loraserve import AsyncClient

MAX_TOKENS = 96
_REFRESH_PER_S = 20
_ANSWER_WIDTH = 52


@dataclass(slots=True)
class StreamedAnswer:
    """A model's answer so far."""

    model: str
    text: str = ""
    ttft_s: float | None = None
    is_done: bool = False


async def ask_all(
    url: str, api_key: str, models: Sequence[str], prompt: str, console: Console, *, max_tokens: int = MAX_TOKENS
) -> dict[str, str]:
    """Send every model the prompt at once, show the answers as they come, and return them by model.

    On a terminal they grow in a table; elsewhere each is a line when it is complete.

    Raises:
        LoraserveError: one of them failed.
    """
    columns = [StreamedAnswer(model) for model in models]
    screen: Live | None = None
    if console.is_terminal:
        screen = Live(_table(prompt, columns), console=console, refresh_per_second=_REFRESH_PER_S)
    else:
        console.print(f"> {prompt}", markup=False, highlight=False)
    context: AbstractContextManager[object] = screen or nullcontext()
    with context:
        async with AsyncClient(url, api_key=api_key) as client:
            streams = [_stream(client, column, columns, prompt, max_tokens, screen, console) for column in columns]
            await asyncio.gather(*streams)
    return {column.model: column.text for column in columns}


async def _stream(
    client: AsyncClient,
    column: StreamedAnswer,
    columns: Sequence[StreamedAnswer],
    prompt: str,
    max_tokens: int,
    screen: Live | None,
    console: Console,
) -> None:
    start = time.perf_counter()
    stream = await client.completions.create(
        model=column.model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    async with stream:
        async for chunk in stream:
            if column.ttft_s is None:
                column.ttft_s = time.perf_counter() - start
            column.text += "".join(choice.text for choice in chunk.choices)
            if screen is not None:
                screen.update(_table(prompt, columns))
    column.is_done = True
    if screen is not None:
        screen.update(_table(prompt, columns))
    else:
        answer = column.text.replace("\n", " / ")
        console.print(f"  {column.model:<8}{answer}", markup=False, highlight=False, soft_wrap=True)


def _table(prompt: str, columns: Sequence[StreamedAnswer]) -> Table:
    # A model's text and a person's prompt are text: nothing in them is markup.
    table = Table(title=Text(prompt, style="bold"), title_justify="left")
    table.add_column("model", style="cyan", no_wrap=True)
    # wide from the start, so that the table doesn't jump as answers grow
    table.add_column("answer", overflow="fold", min_width=_ANSWER_WIDTH)
    table.add_column("first token", justify="right", style="dim", no_wrap=True)
    for column in columns:
        ttft = f"{column.ttft_s * 1000:.0f} ms" if column.ttft_s is not None else ""
        table.add_row(column.model, Text(column.text + ("" if column.is_done else "▌")), ttft)
    return table
