"""The scripted tour: its checks find what is wrong, and a server that is all right passes them."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from loraserve import Client
from loraserve.demo.card import EXAMPLE, read_card, reliable_frames
from loraserve.demo.checks import Access, Check, check_answers, check_chat, check_models, check_stranger
from loraserve.demo.demo_server import DemoServer, check_port, choose_port
from loraserve.demo.frames import ADAPTERS, STYLES
from loraserve.demo.pack import adapter_dirs, pack_dir
from loraserve.demo.side_by_side import ask_all
from loraserve.errors import ConfigError


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_refused_with_a_way_out(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"Port {taken_port} .* loraserve demo --port 0"):
        check_port(taken_port)


def test_port_zero_is_any_free_port() -> None:
    port = choose_port(0)
    check_port(port)
    assert port > 0


def test_a_port_that_was_asked_for_is_kept() -> None:
    assert choose_port(4711) == 4711


def test_a_server_shows_no_admin_key(tmp_path: Path) -> None:
    server = DemoServer(tmp_path, 4711)
    assert server.admin_key not in repr(server)


@pytest.mark.parametrize(("num_right", "num_tried", "is_right"), [(3, 3, True), (2, 3, False), (0, 0, False)])
def test_a_check_is_right_if_all_that_was_tried_was(num_right: int, num_tried: int, is_right: bool) -> None:
    assert Check("answers", num_right, num_tried).is_right is is_right


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    with DemoServer(tmp_path_factory.mktemp("demo"), choose_port(0)) as server:
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
    checks = [*check_answers(access, frames), check_chat(access, frames[0]), check_models(access)]
    assert [check for check in checks if not check.is_right] == []


@pytest.mark.slow
def test_adapters_that_changed_places_are_found(server: DemoServer) -> None:
    access = make_access(server, "swapped", sql="pirate", pirate="sql")
    wrong = [check for check in check_answers(access, [EXAMPLE]) if not check.is_right]
    assert [check.what for check in wrong] == ["sql", "pirate"]
    assert wrong[0].problem is not None
    assert "was answered 'Arr! Here be the tickets" in wrong[0].problem
    assert not check_chat(access, EXAMPLE).is_right


@pytest.mark.slow
def test_a_model_too_many_is_found(server: DemoServer) -> None:
    access = make_access(server, "crowded")
    with Client(access.url, api_key=access.api_key) as client:
        client.adapters.push(adapter_dirs()["sql"], name="surprise")
    assert not check_models(access).is_right


@pytest.mark.slow
def test_a_stranger_who_sees_the_adapters_is_found(server: DemoServer, access: Access) -> None:
    with Client(server.url, api_key=server.admin_key) as admin:
        admin.tenants.create("stranger")
        stranger_key = admin.keys.create("stranger", name="tour").key
        insider_key = admin.keys.create("right", name="insider", scopes=["inference", "adapters:read"]).key
    assert check_stranger(access, stranger_key).is_right
    assert not check_stranger(access, insider_key).is_right


@pytest.mark.slow
async def test_answers_are_shown_side_by_side_on_a_terminal(server: DemoServer, access: Access) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    models = [access.model(style) for style in STYLES]
    answers = await ask_all(access.url, access.api_key, models, EXAMPLE.prompt, console)
    assert answers == {access.model(style): EXAMPLE.render(style) for style in STYLES}
    assert all(line in screen.getvalue() for style in STYLES for line in EXAMPLE.render(style).splitlines())


@pytest.mark.slow
def test_the_tour_is_right_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loraserve.cli.main", "demo", "--once", "--port", "0"]
    done = subprocess.run(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All of it is right" in done.stdout
    assert "Authorization: Bearer sk-lora-" in done.stdout
    assert list(tmp_path.iterdir()) == []
