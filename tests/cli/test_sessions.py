"""``loraserve run`` without a prompt, typed at through a terminal of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from command_line import environment

from loraserve import Client
from loraserve.cli.session.waiting import FIRST_LOOK_S, term_names, wait_reason
from loraserve.sdk.types.residency import AdapterResidency

Run = Callable[..., Any]
QUESTION, SQL = "list the tickets with age over 81", "SELECT * FROM tickets WHERE age > 81;"
CTRL_C, CTRL_D, TAB, UP = "\x03", "\x04", "\t", "\x1b[A"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A session in a process whose terminal is ours."""

    def __init__(self, variables: dict[str, str], *arguments: str) -> None:
        self._ours, theirs = os.openpty()
        # wide enough for any line, so that none is broken
        termios.tcsetwinsize(theirs, (50, 300))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loraserve.cli.main", "run", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=variables | {"TERM": "xterm"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def say(self, line: str, model: str) -> str:
        """Type a line; return what is shown up to the next prompt, which has `model`."""
        self.type(line + "\n")
        return self.read(f"\n{model}> ")

    def _poll(self, timeout_s: float) -> bool:
        # not select(), which refuses descriptors over 1,023
        waiting = select.poll()
        waiting.register(self._ours, select.POLLIN)
        return bool(waiting.poll(1000 * timeout_s))

    def read(self, until: str, timeout_s: float = 60.0) -> str:
        """Return what is shown up to and with `until`, which isn't shown again."""
        deadline = time.monotonic() + timeout_s
        while until not in self.shown:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._poll(left_s):
                raise AssertionError(f"{until!r} isn't shown in {timeout_s:g} s, only {self.shown!r}")
            self.shown += _ESCAPES.sub("", os.read(self._ours, 65_536).decode())
        before, _, self.shown = self.shown.partition(until)
        return before + until

    def interrupt(self, until: str) -> str:
        """Press Ctrl-C until the line is given up; return what is shown up to `until`.

        Between two of readline's waits for a key a signal is only noted: a person presses again.
        """
        for _ in range(20):
            self.type(CTRL_C)
            with contextlib.suppress(AssertionError):
                return self.read(until, timeout_s=1.0)
        return self.read(until)

    def end(self) -> int:
        """Return the exit code once the process has ended; what it says last is in `shown`."""
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while part := os.read(self._ours, 65_536):
                self.shown += _ESCAPES.sub("", part.decode())
        return self._process.wait(20)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def start_session(
    variables_of: Callable[[], dict[str, str]], client: Client, sql_dir: Path, pirate_dir: Path, tmp_path: Path
) -> Iterator[Callable[..., Terminal]]:
    """Starts ``loraserve run ARGUMENTS`` on a terminal, where talk-sql and talk-pirate are."""
    client.adapters.push(sql_dir, name="talk-sql")
    client.adapters.push(pirate_dir, name="talk-pirate")
    started: list[Terminal] = []

    def start(*arguments: str, **variables: str) -> Terminal:
        all_variables = variables_of() | {"LORASERVE_HISTORY": str(tmp_path / "kept" / "history")} | variables
        started.append(Terminal(all_variables, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_session_answers_switches_models_and_ends(start_session: Callable[..., Terminal], tmp_path: Path) -> None:
    session = start_session("talk-sql")
    session.read("talk-sql> ")
    assert SQL in session.say(QUESTION, "talk-sql")
    assert "/adapters [SUM|none]" in session.say("/help", "talk-sql")
    assert "  talk-pirate" in session.say("/adapters", "talk-sql")
    assert "The model is talk-pirate." in session.say("/model talk-pirate", "talk-pirate")
    assert "SELECT" not in session.say(QUESTION, "talk-pirate")
    model = "talk-sql+0.0*talk-pirate"
    assert f"The model is {model}." in session.say("/adapters talk-sql + 0.0*talk-pirate", model)
    assert SQL in session.say(QUESTION, model)
    assert "error: " in session.say("/model talk-sql+nobody", model)
    assert "The model is base." in session.say("/adapters none", "base")
    session.say("/model talk-sql", "talk-sql")

    # several lines are one prompt
    session.type('"""list the tickets\n')
    session.read("... ")
    assert session.say('with age over 81"""', "talk-sql").count("... ") == 0
    session.type(CTRL_D)
    assert session.end() == 0
    kept = tmp_path / "kept" / "history"
    assert QUESTION in kept.read_text().splitlines()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600

    again = start_session("talk-sql")
    again.read("talk-sql> ")
    again.type(UP)
    again.read('with age over 81"""')  # of the earlier session
    assert "Ctrl-D ends." in again.interrupt("\ntalk-sql> ")
    again.type("/mod" + TAB)
    again.read("/model ")
    again.type("talk-pi" + TAB + "\n")
    again.read("\ntalk-pirate> ")
    again.type("/bye\n")
    assert again.end() == 0


def test_settings_of_a_session_are_checked_and_sent(start_session: Callable[..., Terminal]) -> None:
    session = start_session("talk-sql", "--field", "store=true")
    session.read("talk-sql> ")
    for line, said in (
        ("/set temperature 0.2", "temperature is 0.2."),
        ("/set temprature 0.2", "Did you mean temperature?"),
        ("/set temperature hot", "temperature should be a number"),
        ("/set seed 1.5", "seed should be a whole number"),
        ("/set temperature", "temperature is 0.2."),
        ("/set", "top_p               not set"),
        ("/modle", "Did you mean /model?"),
        ("/set max_tokens 2", "max_tokens is 2."),
        (QUESTION, "The answer was cut"),
        ("/set max_tokens none", "max_tokens is not set."),
        # an error of the server's ends the answer, not the session
        ("/set top_p 7", "top_p is 7.0."),
        (QUESTION, "error: top_p"),
        ("/set top_p none", "top_p is not set."),
        ("/set temperature 0", "temperature is 0.0."),
        (QUESTION, "Ignored by the server: store."),
        ("/set", "store               True"),
        ("/set store none", "store is not set."),
        ("/set store none", "There is no setting store."),
        (QUESTION, SQL),
        ("/clear", "forgotten"),
    ):
        assert said in session.say(line, "talk-sql"), line


class SlowServer(BaseHTTPRequestHandler):
    """A server whose first answer is refused once, and waits for weights; then it never ends."""

    protocol_version = "HTTP/1.1"
    num_chats = 0
    asked: ClassVar[list[Any]] = []
    is_left = threading.Event()
    ROW: ClassVar[dict[str, Any]] = {
        **{"tenant": "t", "name": "slow", "version": 3, "digest": "d", "size_bytes": 5 << 20, "tier": "loading"},
        **{"device_bytes": 0, "host_bytes": 0, "num_pins": None, "is_pinned": False, "last_used_s": None},
    }

    def do_GET(self) -> None:
        row = {"id": "slow", "object": "model", "created": 0, "owned_by": "t", "root": "slow", "parent": None}
        model = row | {"max_model_len": 64}
        if self.path.startswith("/api/v1/residency"):
            self._answer(200, {"data": [self.ROW], "next_cursor": None, "memory": None})
        else:
            self._answer(200, {"object": "list", "data": [model]} if self.path == "/v1/models" else model)

    def do_POST(self) -> None:
        kind = type(self)
        kind.num_chats += 1
        kind.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if kind.num_chats == 1:
            error = {"message": "Over the tenant's 60 requests a minute.", "code": "rate_limit_exceeded"}
            self._answer(429, {"error": error}, {"retry-after-ms": "400"})
            return
        if kind.num_chats == 2:
            time.sleep(FIRST_LOOK_S + 1.0)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Server-Timing", "queue;dur=1, adapter;dur=2500, prefill;dur=3")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number in range(3 if kind.num_chats > 2 else 10_000):
                self._chunk({"content": f"word{number} "}, None)
                time.sleep(0.02)
            self._chunk({}, "stop")
            self.wfile.write(b"data: [DONE]\n\n")
            return
        kind.is_left.set()

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> None:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "slow", "choices": choices}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a test's output is the test's."""


@pytest.fixture
def slow_session() -> Iterator[Terminal]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    session = Terminal(environment(LORASERVE_URL=url, LORASERVE_API_KEY="sk-lora-x", LORASERVE_HISTORY=""))
    yield session
    session.close()
    server.shutdown()
    server.server_close()


def test_session_shows_wait_reason_and_survives_cancelled_answer(slow_session: Terminal) -> None:
    session = slow_session
    session.read("slow> ")
    session.type("hello\n")
    session.read("60 requests a minute: trying again in 0.4 s.")
    session.read("Waiting: the server is loading the weights of slow@3 (5.0 MiB). (Ctrl-C cancels.)")
    session.read("word5 ")
    session.type(CTRL_C)
    assert "Cancelled." in session.read("slow> ")
    # the connection is closed: the server stops computing
    assert SlowServer.is_left.wait(10)
    assert "word2" in session.say("again", "slow")
    # what was said before the cancelling is part of the conversation
    roles = [message["role"] for message in SlowServer.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert SlowServer.asked[-1]["messages"][1]["content"].startswith("word0 word1 ")
    session.say("/clear", "slow")
    session.say("anew", "slow")
    assert [message["content"] for message in SlowServer.asked[-1]["messages"]] == ["anew"]
    session.type(CTRL_D)
    assert session.end() == 0


def test_session_without_a_model_talks_to_the_base(start_session: Callable[..., Terminal]) -> None:
    session = start_session(LORASERVE_HISTORY="")
    assert "Talking to base." in session.read("base> ")
    session.type(CTRL_D)
    assert session.end() == 0


def test_session_on_an_unknown_model_does_not_begin(start_session: Callable[..., Terminal]) -> None:
    session = start_session("nobody")
    assert session.end() == 1
    assert "next: loraserve adapter list" in session.shown


def test_prompt_is_read_from_pipe_without_flag(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="piped")
    assert here("run", "piped", stdin=f"{QUESTION}\n").stdout == f"{SQL}\n"
    assert here("run", "piped", "-", stdin=f"{QUESTION}\n").stdout == f"{SQL}\n"
    nothing = here("run", "piped", stdin="")
    assert nothing.code == 2
    assert "Give a PROMPT" in nothing.stderr
    assert here("run", stdin=f"{QUESTION}\n").stdout == here("run", "base", QUESTION).stdout


def test_fields_ignored_by_server_are_listed(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="ignoring")
    done = here("run", "ignoring", QUESTION, "--field", "temprature=0.5", "--field", "store=true", "--field", "top_k=1")
    assert (done.code, done.stdout) == (0, f"{SQL}\n")
    assert done.stderr == "Ignored by the server: temprature (did you mean temperature?), store.\n"
    for field, what in (("temperature=1", "a flag for it"), ("model=x", "a flag for it"), ("top_k", "NAME=JSON")):
        refused = here("run", "ignoring", QUESTION, "--field", field)
        assert refused.code == 2
        assert what in " ".join(refused.stderr.split()), field
    assert "error: top_k" in here("run", "ignoring", QUESTION, "--field", "top_k=high").stderr


def make_residency(name: str, tier: str) -> AdapterResidency:
    fields = {"device_bytes": 0, "host_bytes": 0, "num_pins": 0, "is_pinned": False, "last_used_s": None}
    values = {"tenant": "acme", "name": name, "version": 1, "digest": name, "size_bytes": 2048, "tier": tier}
    return AdapterResidency.model_validate(fields | values)


def test_wait_reason_names_loading_adapter() -> None:
    rows = [make_residency("a", "device"), make_residency("b", "loading"), make_residency("other", "loading")]
    assert term_names("a+0.5*b@3") == ["a", "b@3"]
    assert wait_reason("a+0.5*b@1", rows) == "the server is loading the weights of b@1 (2.0 KiB)."
    assert "See: loraserve ps" in wait_reason("a", rows)
