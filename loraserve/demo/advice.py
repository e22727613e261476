"""Next steps for a user of the demo.

Each command that is printed is one that a test runs.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from loraserve.demo.demo_model import Access, DemoModel


@dataclass(frozen=True, slots=True)
class Advice:
    """Lines to copy into a shell, and what they are for."""

    title: str
    lines: tuple[str, ...]


def advice(model: DemoModel, access: Access, admin_key: str) -> tuple[Advice, ...]:
    """List the next steps for another terminal, in the order in which they are run."""
    program = shutil.which("loraserve")
    here = Path(sys.executable).parent
    path = () if program is not None else (f"export PATH={shlex.quote(str(here))}:$PATH",)
    return (
        Advice(
            "In another terminal:",
            (*path, f"export LORASERVE_URL={access.url}", f"export LORASERVE_API_KEY={access.api_key}"),
        ),
        Advice(
            "Then try:",
            (
                *(f"loraserve {example}" for example in model.examples),
                "loraserve adapter list",
                f"loraserve adapter show {model.session}",
                "loraserve usage",
            ),
        ),
        Advice("Talk to an adapter (/help shows what else can be typed):", (f"loraserve run {model.session}",)),
        Advice(
            "As the operator, with the admin key (it is gone with this demo):",
            (
                f"export LORASERVE_API_KEY={shlex.quote(admin_key)}",
                "loraserve ps",
                "loraserve tenant list",
                "loraserve audit",
            ),
        ),
    )


def snippets(model: DemoModel, access: Access, admin_key: str) -> tuple[str, ...]:
    """Write address, keys, the same request by curl and by Python, and the next steps."""
    name, prompt = model.example
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0})
    return (
        "",
        f"URL        {access.url}",
        f"Key        {access.api_key}",
        f"Admin key  {admin_key}",
        f"Console    {access.url}/console/  (sign in with either key)",
        "",
        "curl:",
        "",
        f"curl {access.url}/v1/chat/completions \\",
        f"  -H {shlex.quote(f'Authorization: Bearer {access.api_key}')} \\",
        "  -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(body)}",
        "",
        "Python, with OpenAI's client:",
        "",
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{access.url}/v1", api_key="{access.api_key}")',
        f"messages = {json.dumps(messages, ensure_ascii=False)}",
        f'print(client.chat.completions.create(model="{name}", messages=messages, '
        "temperature=0).choices[0].message.content)",
        "",
        *(line for one in advice(model, access, admin_key) for line in (one.title, "", *one.lines, "")),
        *model.help,
        "",
    )
