"""The official OpenAI client against loraserve: an adapter's name is the model.

    pip install "loraserve[openai]"
    loraserve demo --model pack                         # in another terminal; it prints a key
    export LORASERVE_API_KEY=sk-lora-…                  # and LORASERVE_URL, where it isn't http://127.0.0.1:8000
    python examples/openai_client.py [MODEL]

Nothing here is special: OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="sk-lora-…") is the
same client.
"""

from __future__ import annotations

import sys

import openai

from loraserve import Client

PROMPT = "list the tickets with age over 81"


def main(model: str | None) -> int:
    with Client() as loraserve, loraserve.openai() as client:
        models = [one.id for one in client.models.list()]
        print("models:", ", ".join(models))
        model = model or models[-1]

        completion = client.completions.create(model=model, prompt=PROMPT, max_tokens=64, temperature=0)
        print(f"{model}:", completion.choices[0].text)

        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage is not None:
                print(f"\n({chunk.usage.completion_tokens} tokens)")

        try:
            client.completions.create(model="no-such-adapter", prompt=PROMPT)
        except openai.NotFoundError as error:
            print("as expected:", error.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
