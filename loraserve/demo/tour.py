"""``loraserve demo``: a tour of a server on a small model with adapters.

The adapters are pushed through the public API, asked side by side with their base, and checked.
Imports no torch: the server is another process.
"""

from __future__ import annotations

import asyncio
import itertools
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

from loraserve import AsyncClient, Client
from loraserve.demo.advice import snippets
from loraserve.demo.checks import check_answers, check_models, check_stranger, check_time
from loraserve.demo.demo_model import BASE, Access, DemoModel, ShownQuestion, TourCheck
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.side_by_side import ask_all
from loraserve.errors import LoraserveError

TENANT, STRANGER = "demo", "stranger"
_NUM_AGAIN = 2
"""Questions of each model that are asked again after the restart."""


def run_tour(
    model: DemoModel, *, once: bool, port: int | None = None, quantize: str = "none", console: Console | None = None
) -> int:
    """Show a model and its adapters; 0 when all went well.

    Args:
        once: check every answer, restart the server, check again, and end; 1 if anything was wrong.
            Otherwise the server stays up until Ctrl-C.
        port: None: 8000, or any free one if that is taken; 0: any free one.
        quantize: what the base's linears are rounded to, as for ``serve``.

    Raises:
        ConfigError: the port is another's, or the base has a format of its own.
        LoraserveError: the server doesn't start, or refuses what it should do.
    """
    console = console or Console()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="loraserve-demo-") as directory, terminable():
        try:
            server = DemoServer(Path(directory), choose_port(port), model, quantize, tell=teller(console))
            with server:
                access, stranger_key = _set_up(server, console)
                _show_snippets(model, access, server.admin_key, console)
                _show(model, access, model.shown[: model.num_first], console)
                if once:
                    checks = _check_everything(server, access, stranger_key, console)
                    return _report(checks, time.perf_counter() - start, console)
                return _stay(server, access, console)
        except KeyboardInterrupt:
            console.print("\nStopped.")
            # Without --once, Ctrl-C is how the demo ends.
            return 130 if once else 0


def teller(console: Console) -> Callable[[str], object]:
    """Build a function that prints a line as it is."""
    return lambda detail: console.print(f"  {detail}", markup=False, highlight=False, soft_wrap=True)


def _set_up(server: DemoServer, console: Console) -> tuple[Access, str]:
    """Start the server, make two tenants with a key each, and push the adapters for the first."""
    began = time.perf_counter()
    model = server.model
    rounded = "" if server.quantize == "none" else f" in {server.quantize}"
    console.print(f"Starting the server on {model.title}{rounded} …")
    server.start()
    console.print(f"Ready at {server.url} after {time.perf_counter() - began:.1f} s.")
    with Client(server.url, api_key=server.admin_key) as admin:
        keys = []
        for tenant in (TENANT, STRANGER):
            admin.tenants.create(tenant)
            keys.append(admin.keys.create(tenant, name="tour").key)
        console.print(f'Created the tenant "{TENANT}" and a key for it.')
    access = Access(server.url, keys[0], model.base_id)
    began = time.perf_counter()
    asyncio.run(_push_all(access, model, console))
    console.print(f"Pushed {len(model.adapters)} adapters in {time.perf_counter() - began:.1f} s.")
    return access, keys[1]


async def _push_all(access: Access, model: DemoModel, console: Console) -> None:
    """Push the adapters at once: the server then verifies up to four in one pass over the base."""
    async with AsyncClient(access.url, api_key=access.api_key) as client:

        async def push(name: str, directory: Path) -> None:
            version = await client.adapters.push(directory, name=name)
            console.print(
                f"  pushed {version.model:<10}rank {version.rank}, {version.size_bytes / 1024:.0f} KiB, "
                f"SHA-256 {version.digest[:12]}…",
                highlight=False,
            )

        await asyncio.gather(*(push(name, directory) for name, directory in model.adapters.items()))


def _show(model: DemoModel, access: Access, questions: Sequence[ShownQuestion], console: Console) -> None:
    asyncio.run(ask_all(access, questions, console, max_tokens=model.max_tokens))


def _check_everything(server: DemoServer, access: Access, stranger_key: str, console: Console) -> list[TourCheck]:
    model = server.model
    num_questions = sum(map(len, model.questions.values()))
    console.print(f"\nAsking {num_questions} questions of {len(model.questions)} models, all at once …")
    for name, truth in model.truths.items():
        console.print(f"  {name:<8}{truth}", markup=False, highlight=False, soft_wrap=True)
    began = time.perf_counter()
    checks = check_answers(access, model.questions, model.max_tokens)
    took_s = time.perf_counter() - began
    console.print(f"Answered in {took_s:.1f} s.")
    checks.append(check_time(took_s, model.max_answers_s))
    checks += [check(access) for check in model.checks]
    checks += [check_models(access, model), check_stranger(access, model, stranger_key)]

    console.print("Stopping the server, and starting it again on its stored data …")
    code = server.stop()
    checks.append(
        TourCheck("the server stopped cleanly", int(code == 0), 1, None if code == 0 else f"exit code {code}")
    )
    server.start()
    again = {name: asked[:_NUM_AGAIN] for name, asked in model.questions.items()}
    checks += check_answers(access, again, model.max_tokens, when=" after the restart")
    checks.append(check_models(access, model))
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


def _show_snippets(model: DemoModel, access: Access, admin_key: str, console: Console) -> None:
    for line in snippets(model, access, admin_key):
        # Whole lines, however narrow the terminal: they are made to be copied.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _stay(server: DemoServer, access: Access, console: Console) -> int:
    """Answer what is typed, until Ctrl-C or the end of input; without a terminal, just stay."""
    if not (console.is_terminal and console.is_interactive):
        console.print("The server stays up until Ctrl-C.")
        while server.is_running:
            time.sleep(0.5)
        return _ended(server, console)
    console.print(
        "Type a question, before it the name of an adapter that should answer (sql: …), or nothing for one of the "
        "demo's own. Ctrl-C ends."
    )
    shown = server.model.shown
    own = itertools.cycle([*shown[server.model.num_first :], *shown[: server.model.num_first]])
    while True:
        try:
            typed = console.input("[bold]> [/]").strip()
        except EOFError:
            return 0
        if not server.is_running:
            return _ended(server, console)
        try:
            _show(server.model, access, [read_typed(server.model, typed) if typed else next(own)], console)
        except LoraserveError as error:
            console.print(str(error), markup=False, style="red")


def read_typed(model: DemoModel, typed: str) -> ShownQuestion:
    """Read a typed question: ``NAME: question`` is for an adapter and the base, another for all."""
    name, colon, question = typed.partition(":")
    if colon and question.strip() and name.strip() in model.adapters:
        adapter = name.strip()
        return ShownQuestion(question.strip(), {BASE: None, adapter: None}, model.tools.get(adapter, ()))
    return ShownQuestion(typed, dict.fromkeys(model.typed_models))


def _ended(server: DemoServer, console: Console) -> int:
    console.print("The server ended by itself. Its log ends:")
    console.print(server.log_tail(), markup=False, highlight=False)
    return 1


@contextmanager
def terminable() -> Iterator[None]:
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
