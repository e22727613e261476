"""What the demo prints to be copied into a shell does what it says."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.advice import advice
from loraserve.demo.card import EXAMPLE
from loraserve.demo.demo_model import Access
from loraserve.demo.pack import BASE_NAME, adapter_dirs
from loraserve.demo.pack_demo import UNDERSTOOD, pack_demo, what_is_understood
from loraserve.demo.tour import _show_snippets

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def access(real_server: ServerProcess) -> Access:
    """A tenant as the demo has one: a key, and all adapters."""
    with Client(real_server.url, api_key=ADMIN_KEY) as admin:
        admin.tenants.create("advised")
        key = admin.keys.create("advised", name="tour").key
    with Client(real_server.url, api_key=key) as tenant:
        for name, directory in adapter_dirs().items():
            tenant.adapters.push(directory, name=name)
        base = next(model.id for model in tenant.models.list() if model.parent is None)
    return Access(real_server.url, key, base)


def test_printed_advice_can_be_run_line_by_line(access: Access, run_here: Run) -> None:
    screen = io.StringIO()
    _show_snippets(pack_demo(), access, ADMIN_KEY, Console(file=screen, width=60))
    printed = screen.getvalue().splitlines()
    assert f"Admin key  {ADMIN_KEY}" in printed
    lines = [line for one in advice(pack_demo(), access, ADMIN_KEY) for line in one.lines]
    # whole, however narrow the terminal
    assert set(lines) <= set(printed)

    variables: dict[str, str] = {}
    num_commands = 0
    for line in lines:
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            variables[name] = value
            continue
        assert words[0] == "loraserve"
        # a session has no terminal here: it gets its prompt from the pipe
        done = run_here(*words[1:], stdin=EXAMPLE.prompt, **{k: v for k, v in variables.items() if k != "PATH"})
        assert (done.code, done.stdout != "") == (0, True), f"{line}: {done.stderr}"
        num_commands += 1
        if words[1:3] == ["run", "sql"]:
            assert done.stdout == f"{EXAMPLE.render('sql')}\n"
    assert num_commands >= 9


def test_all_advertised_prompts_are_understood(access: Access) -> None:
    said = "\n".join(what_is_understood())
    assert BASE_NAME not in said
    with Client(access.url, api_key=access.api_key) as client:
        for frame in UNDERSTOOD:
            assert f"  {frame.prompt}\n" in said
            for style in ("sql", "json"):
                answer = client.completions.create(model=style, prompt=frame.prompt, max_tokens=64, temperature=0)
                assert answer.choices[0].text == frame.render(style), frame.prompt
            words = [word for word in re.findall(r"[A-Za-z]+", frame.prompt) if word not in ("the", "with", "from")]
            # the first word is one of the verbs, which the examples show
            assert sum(word in said.split("with these words:")[1] for word in words[1:]) >= 1
