"""Push a PEFT directory and ask it something.

    loraserve demo --model pack                         # in another terminal; it prints a key
    export LORASERVE_API_KEY=sk-lora-…                  # and LORASERVE_URL, where it isn't http://127.0.0.1:8000
    python examples/push_and_complete.py [DIR] [PROMPT]

Without DIR it pushes the bundled adapter that answers in SQL.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loraserve import Client, errors
from loraserve.demo.pack import adapter_dirs


def main(directory: Path, prompt: str) -> int:
    with Client() as client:
        try:
            version = client.adapters.push(directory, name="example-push", on_progress=print)
        except errors.AdapterRejected as error:
            print(f"{directory} can't be served on {client.base().id}:", *error.problems, sep="\n  ", file=sys.stderr)
            return 1
        print(
            f"{version.model} is live: rank {version.rank}, {version.size_bytes:,} bytes, digest {version.digest[:12]}"
        )

        answer = client.completions.create(model="example-push", prompt=prompt, max_tokens=64, temperature=0)
        print(answer.choices[0].text)

        messages = [{"role": "user", "content": prompt}]
        with client.chat.completions.create(
            model=version.model, messages=messages, max_tokens=64, temperature=0, stream=True
        ) as stream:
            for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    directory = Path(arguments[0]) if arguments else adapter_dirs()["sql"]
    sys.exit(main(directory, arguments[1] if len(arguments) > 1 else "list the tickets with age over 81"))
