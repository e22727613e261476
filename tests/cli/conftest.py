"""The command line as people run it: a process of its own,
and a real server with the bundled pack behind it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import command_line
import pytest
from command_line import Done, environment
from hub_server import running_hub
from server_process import ADMIN_KEY, ServerProcess

from loraserve import Client
from loraserve.demo.pack import BASE_NAME, adapter_dirs

Run = Callable[..., Done]


@pytest.fixture
def run_cli(tmp_path: Path) -> Run:
    """Runs ``loraserve ARGUMENTS`` in an empty directory and waits for its end; `variables` are
    added to the environment.
    """

    def run(*arguments: str | Path, stdin: str = "", **variables: str) -> Done:
        command = [sys.executable, "-m", "loraserve.cli.main", *map(str, arguments)]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment(**variables)
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_here() -> Run:
    """As `run_cli`, in this process and where it stands: for the many small things."""
    return command_line.run_here


def variables_for(server: ServerProcess) -> dict[str, str]:
    """Return the variables by which a command finds the server, with its admin key."""
    return {"LORASERVE_URL": server.url, "LORASERVE_API_KEY": ADMIN_KEY}


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    """The URL of a hub on this machine with the bundled adapters: ``acme/STYLE``."""
    files = {
        f"acme/{style}": {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for style, folder in adapter_dirs().items()
    }
    with running_hub(files) as hub:
        yield hub.url


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, hub: str) -> Iterator[ServerProcess]:
    """A server on the bundled base, with no adapters but those that tests push (each test under its
    own names).
    """
    root = tmp_path_factory.mktemp("server")
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--num-threads", "1", "--base-names", BASE_NAME)
    variables = {"HF_ENDPOINT": hub, "HF_HOME": str(root / "hub"), "LORASERVE_PULL_ALLOW": "hf://acme/*"}
    # not a fork: the hub's library reads its variables when it is imported
    server = ServerProcess(root / "data", flags=flags, variables=variables, is_forked=False)
    try:
        yield server.start()
        assert server.stop() == 0, server.tail()
    finally:
        server.kill()


@pytest.fixture
def loraserve(run_cli: Run, real_server: ServerProcess) -> Run:
    """As `run_cli`, for the real server with its admin key."""

    def run(*arguments: str | Path, stdin: str = "", **variables: str) -> Done:
        return run_cli(*arguments, stdin=stdin, **(variables_for(real_server) | variables))

    return run


@pytest.fixture
def here(run_here: Run, real_server: ServerProcess) -> Run:
    """As `run_here`, for the real server with its admin key."""

    def run(*arguments: str | Path, stdin: str = "", **variables: str) -> Done:
        return run_here(*arguments, stdin=stdin, **(variables_for(real_server) | variables))

    return run


@pytest.fixture
def start_cli(real_server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command for the real server and doesn't wait for it.

    Both of its outputs are pipes.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "loraserve.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables_for(real_server)),
            cwd=tmp_path,
            # A shell starts its background jobs with SIGINT ignored, and children inherit that:
            # these shall hear it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def variables_of(real_server: ServerProcess) -> Callable[[], dict[str, str]]:
    """Makes the environment of a process that talks to the real server with its admin key."""
    return lambda: environment(**variables_for(real_server))


@pytest.fixture
def client(real_server: ServerProcess) -> Iterator[Client]:
    with Client(real_server.url, api_key=ADMIN_KEY) as client:
        yield client


@pytest.fixture
def sql_dir() -> Path:
    """The bundled adapter that answers in SQL."""
    return adapter_dirs()["sql"]


@pytest.fixture
def pirate_dir() -> Path:
    return adapter_dirs()["pirate"]
