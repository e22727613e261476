"""``loraserve demo``: a tour of a server on the bundled pack.

Seven adapters are pushed through the public API, and one prompt is answered by all of them. Imports
no torch: the server is another process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraserve import Client
from loraserve.demo.advice import advice, what_is_understood
from loraserve.demo.card import EXAMPLE, read_card, reliable_frames
from loraserve.demo.checks import (
    Access,
    TourCheck,
    ask_for_call,
    ask_for_query,
    check_answers,
    check_chat,
    check_models,
    check_schema,
    check_stranger,
    check_time,
    check_tools,
)
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.frames import STYLES
from loraserve.demo.pack import adapter_dirs, base_dir, pack_dir
from loraserve.demo.side_by_side import ask_all
from loraserve.errors import LoraserveError

TENANT, STRANGER = "demo", "stranger"
_NUM_CHECKED_PROMPTS = 8
_MAX_ANSWERS_S = 20.0
"""Longest time for all checked prompts together, about 1,500 tokens: a second or two where the
kernels are what they should be. One that is correct and a hundred times too slow fails the tour.
"""


def run_tour(*, once: bool, port: int | None = None, quantize: str = "none", console: Console | None = None) -> int:
    """Show the bundled models; 0 when all went well.

    What is right is the same in every format: the answers' margins are wide enough. Of 1,536
    answers to prompts that no training has seen (192 of them, by the base and seven adapters), none
    was another in int8, int4, nf4 or fp8 than in float32.

    Args:
        once: check every answer, restart the server, check again, and end; 1 if anything was wrong.
            Otherwise the server stays up until Ctrl-C.
        port: None: 8000, or any free one if that is taken; 0: any free one.
        quantize: what the base's linears are rounded to, as for ``serve``.

    Raises:
        ConfigError: the pack is incomplete, or the port is another's.
        LoraserveError: the server doesn't start, or refuses what it should do.
    """
    console = console or Console()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="loraserve-demo-") as directory, _terminable():
        try:
            with DemoServer(Path(directory), choose_port(port), quantize, tell=_teller(console)) as server:
                access, stranger_key = _set_up(server, console)
                models = [access.model(style) for style in STYLES]
                _show_snippets(access, server.admin_key, console)
                asyncio.run(ask_all(access.url, access.api_key, models, EXAMPLE.prompt, console))
                query = ask_for_query(access, access.base_id, EXAMPLE.prompt)
                console.print(f"The base's answer as JSON of a schema: {query}", markup=False, highlight=False)
                for call in ask_for_call(access, access.base_id, EXAMPLE.prompt):
                    arguments = "" if call.function is None else call.function.arguments
                    console.print(f"The base's tool call: query({arguments})", markup=False, highlight=False)
                if once:
                    checks = _check_everything(server, access, stranger_key, console)
                    return _report(checks, time.perf_counter() - start, console)
                return _stay(server, access, models, console)
        except KeyboardInterrupt:
            console.print("\nStopped.")
            # Without --once, Ctrl-C is how the demo ends.
            return 130 if once else 0


def _teller(console: Console) -> Callable[[str], object]:
    return lambda detail: console.print(f"  {detail}", markup=False, highlight=False, soft_wrap=True)


def _set_up(server: DemoServer, console: Console) -> tuple[Access, str]:
    """Start the server, make two tenants with a key each, and push the adapters for the first."""
    began = time.perf_counter()
    rounded = "" if server.quantize == "none" else f" in {server.quantize}"
    console.print(f"Starting the server on the bundled base{rounded} …")
    server.start()
    console.print(f"Ready at {server.url} after {time.perf_counter() - began:.1f} s.")
    with Client(server.url, api_key=server.admin_key) as admin:
        keys = []
        for tenant in (TENANT, STRANGER):
            admin.tenants.create(tenant)
            keys.append(admin.keys.create(tenant, name="tour").key)
        console.print(f'Created the tenant "{TENANT}" and a key for it.')
    with Client(server.url, api_key=keys[0]) as client:
        began = time.perf_counter()
        for name, directory in adapter_dirs().items():
            version = client.adapters.push(directory, name=name)
            console.print(
                f"  pushed {version.model:<10}rank {version.rank}, {version.size_bytes / 1024:.0f} KiB, "
                f"SHA-256 {version.digest[:12]}…",
                highlight=False,
            )
        console.print(f"Pushed {len(adapter_dirs())} adapters in {time.perf_counter() - began:.1f} s.")
    return Access(server.url, keys[0], base_dir().name), keys[1]


def _check_everything(server: DemoServer, access: Access, stranger_key: str, console: Console) -> list[TourCheck]:
    frames = [EXAMPLE, *reliable_frames(read_card(pack_dir()))[: _NUM_CHECKED_PROMPTS - 1]]
    console.print(
        f"\nAsking {len(frames)} prompts of {len(STYLES)} models, {len(frames) * len(STYLES)} streams at once …"
    )
    began = time.perf_counter()
    checks = check_answers(access, frames)
    took_s = time.perf_counter() - began
    console.print(f"Answered in {took_s:.1f} s.")
    checks.append(check_time(took_s, _MAX_ANSWERS_S))
    checks += [check_chat(access, frames[1]), check_schema(access, frames[1]), check_tools(access, frames[1])]
    checks += [check_models(access), check_stranger(access, stranger_key)]

    console.print("Stopping the server, and starting it again on its stored data …")
    code = server.stop()
    checks.append(
        TourCheck("the server stopped cleanly", int(code == 0), 1, None if code == 0 else f"exit code {code}")
    )
    server.start()
    checks += check_answers(access, frames[:2], when=" after the restart")
    checks.append(check_models(access))
    return checks


def _report(checks: Sequence[TourCheck], duration_s: float, console: Console) -> int:
    table = Table(title="The tour", title_justify="left")
    table.add_column("checked")
    table.add_column("right", justify="right")
    table.add_column("", justify="center")
    for check in checks:
        mark = Text("ok", style="green") if check.is_right else Text("WRONG", style="bold red")
        table.add_row(check.what, f"{check.num_right} of {check.num_tried}", mark)
    console.print(table)
    wrong = [check for check in checks if not check.is_right]
    for check in wrong:
        console.print(f"{check.what}: {check.problem}", markup=False, highlight=False, soft_wrap=True)
    verdict = "All checks passed" if not wrong else f"{len(wrong)} of {len(checks)} checks failed"
    console.print(f"{verdict}, after {duration_s:.1f} s.")
    return 1 if wrong else 0


def _show_snippets(access: Access, admin_key: str, console: Console) -> None:
    body = json.dumps({"model": "sql", "prompt": EXAMPLE.prompt, "max_tokens": 64, "temperature": 0})
    lines = (
        "",
        f"URL        {access.url}",
        f"Key        {access.api_key}",
        f"Admin key  {admin_key}",
        f"Console    {access.url}/console/  (sign in with either key)",
        "",
        "curl:",
        "",
        f"curl {access.url}/v1/completions \\",
        f"  -H {shlex.quote(f'Authorization: Bearer {access.api_key}')} \\",
        "  -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(body)}",
        "",
        "Python, with OpenAI's client:",
        "",
        "from openai import OpenAI",
        "",
        f'client = OpenAI(base_url="{access.url}/v1", api_key="{access.api_key}")',
        f'messages = [{{"role": "user", "content": "{EXAMPLE.prompt}"}}]',
        'print(client.chat.completions.create(model="french", messages=messages, '
        "temperature=0).choices[0].message.content)",
        "",
        *(line for one in advice(access, admin_key) for line in (one.title, "", *one.lines, "")),
        *what_is_understood(),
        "",
    )
    for line in lines:
        # Whole lines, however narrow the terminal: they are made to be copied.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _stay(server: DemoServer, access: Access, models: Sequence[str], console: Console) -> int:
    """Answer what is typed, until Ctrl-C or the end of input; without a terminal, just stay."""
    if not (console.is_terminal and console.is_interactive):
        console.print("The server stays up until Ctrl-C.")
        while server.is_running:
            time.sleep(0.5)
        return _ended(server, console)
    frames = reliable_frames(read_card(pack_dir()))
    console.print("Type a question for all of them, or nothing for one of the demo's own. Ctrl-C ends.")
    for index in itertools.count():
        try:
            prompt = console.input("[bold]> [/]").strip()
        except EOFError:
            return 0
        if not server.is_running:
            return _ended(server, console)
        try:
            asyncio.run(
                ask_all(access.url, access.api_key, models, prompt or frames[index % len(frames)].prompt, console)
            )
        except LoraserveError as error:
            console.print(str(error), markup=False, style="red")
    raise AssertionError("count() doesn't end")


def _ended(server: DemoServer, console: Console) -> int:
    console.print("The server ended by itself. Its log ends:")
    console.print(server.log_tail(), markup=False, highlight=False)
    return 1


@contextmanager
def _terminable() -> Iterator[None]:
    """End the tour on SIGTERM or a closed terminal as on Ctrl-C.

    So no server is left behind.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    kept = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
