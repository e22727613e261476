"""Ask the base and every adapter the same thing at once,
and watch the answers grow side by side out of one batch.

loraserve demo --model pack                         # in another terminal; it prints a key
export LORASERVE_API_KEY=sk-lora-…                  # and LORASERVE_URL, where it isn't http://127.0.0.1:8000
python examples/stream_many.py ["PROMPT"]
"""

from __future__ import annotations

import asyncio
import sys

from loraserve import AsyncClient, errors

CLEAR = "\x1b[H\x1b[2J"


async def ask(client: AsyncClient, model: str, prompt: str, answers: dict[str, str]) -> None:
    """Fill ``answers[model]`` piece by piece.

    One model's failure is its answer, and nobody else's.
    """
    try:
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=64, temperature=0, stream=True
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    answers[model] += choice.delta.content or ""
    except errors.LoraserveError as error:
        answers[model] += f"[{error.code}: {error.message}]"


def table(answers: dict[str, str]) -> str:
    return "\n".join(f"{model:>12}  {text.replace(chr(10), ' / ')}" for model, text in answers.items())


async def show(answers: dict[str, str]) -> None:
    """Redraw the terminal a few times a second, until cancelled."""
    while sys.stdout.isatty():
        print(CLEAR + table(answers), flush=True)
        await asyncio.sleep(0.1)


async def main(prompt: str) -> None:
    async with AsyncClient() as client:
        answers = {model.id: "" for model in await client.models.list()}
        showing = asyncio.create_task(show(answers))
        await asyncio.gather(*(ask(client, model, prompt, answers) for model in answers))
        showing.cancel()
    print((CLEAR if sys.stdout.isatty() else "") + table(answers))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "list the tickets with age over 81"))
