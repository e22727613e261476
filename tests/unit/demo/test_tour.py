"""The scripted tour: its checks find what is wrong, and a server that is all right passes them."""

from __future__ import annotations

import http.server
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from loraserve import Client
from loraserve.demo import demo_server
from loraserve.demo.card import EXAMPLE, read_card, reliable_frames
from loraserve.demo.checks import check_answers, check_models, check_stranger, check_time
from loraserve.demo.demo_model import BASE, Access, Question, ShownQuestion, TextJudge, TourCheck
from loraserve.demo.demo_server import DemoServer, check_port, choose_port
from loraserve.demo.frames import ADAPTERS, STYLES
from loraserve.demo.pack import adapter_dirs, pack_dir
from loraserve.demo.pack_demo import (
    MAX_TOKENS,
    check_completions,
    check_schema,
    check_tools,
    is_query,
    pack_demo,
    questions_of,
)
from loraserve.demo.side_by_side import ask_all
from loraserve.demo.tour import read_typed
from loraserve.errors import ConfigError, EngineUnavailable


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_taken_port_is_refused_with_solution(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"Port {taken_port} .* loraserve demo --port 0"):
        check_port(taken_port)


def test_port_zero_is_any_free_port() -> None:
    port = choose_port(0)
    check_port(port)
    assert port > 0


def test_requested_port_is_kept() -> None:
    assert choose_port(4711) == 4711


def test_a_server_shows_no_admin_key(tmp_path: Path) -> None:
    server = DemoServer(tmp_path, 4711, pack_demo())
    assert server.admin_key not in repr(server)


@pytest.mark.parametrize(("num_right", "num_tried", "is_right"), [(3, 3, True), (2, 3, False), (0, 0, False)])
def test_check_passes_only_if_all_attempts_pass(num_right: int, num_tried: int, is_right: bool) -> None:
    assert TourCheck("answers", num_right, num_tried).is_right is is_right


def test_right_answers_after_deadline_fail() -> None:
    assert check_time(1.9, 60).is_right
    late = check_time(61, 60)
    assert not late.is_right
    assert late.problem == "they took 61 s, expected 60 s at most"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"table": "tickets", "field": "age", "op": ">", "value": 81}', True),
        ('{"table": "tickets", "field": "age", "op": ">", "value": 810}', False),
        ('{"table": "tickets", "field": "age", "op": ">", "value": true}', False),
        ('{"table": "tickets", "field": "age", "op": "!", "value": 81}', False),
        ('{"table": "tickets", "field": "age", "op": ">"}', False),
        ('{"table": "tickets", "field":', False),
        ("[]", False),
    ],
)
def test_a_query_is_json_of_the_schema(text: str, is_right: bool) -> None:
    assert is_query(text) is is_right


def test_typed_name_chooses_adapter_and_base() -> None:
    model = pack_demo()
    assert read_typed(model, "sql: list the dogs").models.keys() == {"plain", "sql"}
    assert read_typed(model, "sql: list the dogs").prompt == "list the dogs"
    for typed in ("list the dogs", "note: list the dogs", "sql:"):
        assert (read_typed(model, typed).prompt, *read_typed(model, typed).models) == (typed, *STYLES)


class _Running:
    """A process that goes on; its pid is this one's, which waits for a core as the tests do."""

    pid = os.getpid()

    def poll(self) -> None: ...


def test_server_is_awaited_while_loading_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server judges whether its engine goes on; the demo doesn't."""
    asked = itertools.count()

    class Loading(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = next(asked)
            body = json.dumps({"detail": f"The engine is loading shard {number // 15}."}).encode()
            self.send_response(503 if number < 30 else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    monkeypatch.setattr(demo_server, "_SILENCE_S", 1.0)
    monkeypatch.setattr(demo_server, "_FIRST_TOLD_S", 0.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Loading) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        told: list[str] = []
        try:
            DemoServer(tmp_path, listener.server_port, pack_demo(), tell=told.append)._wait_until_ready(_Running())  # type: ignore[arg-type]
        finally:
            listener.shutdown()
    assert next(asked) > 30
    # what it is at, once, with the seconds until then
    assert [line.partition("s  ")[2] for line in told] == [f"The engine is loading shard {n}." for n in (0, 1, 2)][
        : len(told)
    ]
    assert len(told) >= 2


@pytest.mark.parametrize(
    ("log", "end"), [("its last words", "Its log ends:\nits last words"), ("", "Its log is empty.")]
)
def test_server_is_given_up_when_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, end: str) -> None:
    monkeypatch.setattr(demo_server, "_SILENCE_S", 0.5)
    (tmp_path / "server.log").write_text(log)
    with pytest.raises(EngineUnavailable, match=r"said nothing for 0\.5 s") as caught:
        DemoServer(tmp_path, choose_port(0), pack_demo())._wait_until_ready(_Running())  # type: ignore[arg-type]
    assert end in str(caught.value)
    assert "Start it again" in (caught.value.hint or "")


def test_unknown_format_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loraserve.cli.main", "demo", "--quantize", "int3"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "int3" in done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with DemoServer(tmp_path_factory.mktemp("demo"), choose_port(0), pack_demo()) as server:
        server.start()
        yield server


def make_access(server: DemoServer, tenant: str, **pushed_as: str) -> Access:
    """A new tenant with every adapter, some of them under another one's name."""
    with Client(server.url, api_key=server.admin_key) as admin:
        admin.tenants.create(tenant)
        key = admin.keys.create(tenant, name="tour").key
    with Client(server.url, api_key=key) as client:
        for name in ADAPTERS:
            client.adapters.push(adapter_dirs()[pushed_as.get(name, name)], name=name)
    return Access(server.url, key, "base")


@pytest.fixture(scope="module")
def access(server: DemoServer) -> Access:
    return make_access(server, "right")


@pytest.mark.slow
def test_right_adapters_pass_every_check(server: DemoServer, access: Access) -> None:
    frames = reliable_frames(read_card(pack_dir()))[:2]
    checks = check_answers(access, questions_of(frames), MAX_TOKENS)
    checks += [check_completions(access, frames[0]), check_models(access, pack_demo())]
    checks += [check_schema(access, frames[0]), check_tools(access, frames[0])]
    assert [check for check in checks if not check.is_right] == []


@pytest.mark.slow
def test_swapped_adapters_are_detected(server: DemoServer) -> None:
    access = make_access(server, "swapped", sql="pirate", pirate="sql")
    wrong = [check for check in check_answers(access, questions_of([EXAMPLE]), MAX_TOKENS) if not check.is_right]
    assert [check.what for check in wrong] == ["sql", "pirate"]
    assert wrong[0].problem is not None
    assert "was answered 'Arr! Here be the tickets" in wrong[0].problem
    assert not check_completions(access, EXAMPLE).is_right
    tools = check_tools(access, EXAMPLE)
    assert tools.num_right == len(STYLES) - 2
    assert "after its call" in (tools.problem or "")


@pytest.mark.slow
def test_a_model_too_many_is_found(server: DemoServer) -> None:
    access = make_access(server, "crowded")
    with Client(access.url, api_key=access.api_key) as client:
        client.adapters.push(adapter_dirs()["sql"], name="surprise")
    assert not check_models(access, pack_demo()).is_right


@pytest.mark.slow
def test_adapter_leak_to_foreign_tenant_is_detected(server: DemoServer, access: Access) -> None:
    with Client(server.url, api_key=server.admin_key) as admin:
        admin.tenants.create("stranger")
        stranger_key = admin.keys.create("stranger", name="tour").key
        insider_key = admin.keys.create("right", name="insider", scopes=["inference", "adapters:read"]).key
    assert check_stranger(access, pack_demo(), stranger_key).is_right
    assert not check_stranger(access, pack_demo(), insider_key).is_right


@pytest.mark.slow
async def test_answers_are_shown_side_by_side_on_terminal(server: DemoServer, access: Access) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    shown = ShownQuestion(EXAMPLE.prompt, {style: asked[0] for style, asked in questions_of([EXAMPLE]).items()})
    (answers,) = await ask_all(access, [shown], console, max_tokens=MAX_TOKENS)
    assert {model: str(answer) for model, answer in answers.items()} == {
        access.model(style): EXAMPLE.render(style) for style in STYLES
    }
    assert "wrong" not in screen.getvalue()
    assert all(line in screen.getvalue() for style in STYLES for line in EXAMPLE.render(style).splitlines())


@pytest.mark.slow
async def test_small_terminal_cuts_no_answer(access: Access) -> None:
    screen = io.StringIO()
    asked = {style: questions[0] for style, questions in list(questions_of([EXAMPLE]).items())[:2]}
    shown = [ShownQuestion(EXAMPLE.prompt, asked, about=f"question {number}") for number in range(6)]
    await ask_all(access, shown, Console(file=screen, force_terminal=True, width=160, height=24), max_tokens=MAX_TOKENS)
    # rich's mark of what has no room
    assert "..." not in screen.getvalue()
    assert all(question.about in screen.getvalue() for question in shown)


@pytest.mark.slow
async def test_questions_are_printed_in_given_order(access: Access) -> None:
    """The first question has the longer answer."""
    screen = io.StringIO()
    long, short = (
        ShownQuestion(prompt, {BASE: Question(prompt, expected, TextJudge(expected))}, about=about)
        for prompt, expected, about in (
            ("tell a story about Anna and the red bike", "", "long"),
            (EXAMPLE.prompt, EXAMPLE.render("plain"), "short"),
        )
    )
    await ask_all(access, [long, short], Console(file=screen, width=160), max_tokens=MAX_TOKENS)
    lines = screen.getvalue().splitlines()
    assert [line for line in lines if line.startswith((">", "long", "short"))] == [
        "long",
        f"> {long.prompt}",
        "short",
        f"> {short.prompt}",
    ]
    assert lines[-1] == f"  base    {EXAMPLE.render('plain')}  [right]"


# all formats: `make formats`, which `.ci/run` runs
@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("flags", [[], ["--quantize", "int8"]], ids=["none", "int8"])
def test_tour_passes_and_leaves_no_files(tmp_path: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "loraserve.cli.main", "demo", "--model", "pack", "--once", "--port", "0", *flags]
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks passed" in done.stdout
    assert ("bundled pack in int8" in done.stdout) == bool(flags)
    assert "Authorization: Bearer sk-lora-" in done.stdout
    assert "JSON of a schema" in done.stdout
    assert list(tmp_path.iterdir()) == []
