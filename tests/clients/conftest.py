"""One server for all clients, and the answers that each client gets."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess

from loraserve import Client
from loraserve.demo.pack import adapter_dirs, pack_dir

from .table import ROOT, Row

ADAPTERS = ("sql", "json", "french")
TIMEOUT_S = 300
ENVIRONMENTS = Path(os.environ.get("LORASERVE_TEST_CLIENTS", ROOT / ".clients"))


@dataclass(frozen=True)
class ServedPack:
    """A server on the bundled pack, and a tenant's key."""

    url: str
    key: str
    limited_key: str
    """Key of a tenant that may send one request a minute, to the base."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPack]:
    # trainers load their adapters from a folder
    flags = ("--memory-budget", "64MiB", "--host-cache", "64MiB", "--ephemeral-loads")
    server = ServerProcess(
        tmp_path_factory.mktemp("clients") / "data", flags=(*flags, "--lora-dir", str(pack_dir() / "adapters"))
    )
    server.start()
    key = server.make_tenant("acme")
    directories = adapter_dirs()
    with Client(server.url, api_key=key) as client:
        for name in ADAPTERS:
            client.adapters.push(directories[name], name=name)
    limited_key = server.make_tenant("limited", {"requests_per_minute": 1})
    yield ServedPack(server.url, key, limited_key)
    assert server.stop() == 0


def command(row: Row) -> list[str]:
    """Return the interpreter of the client's environment, and its script.

    The test is skipped where the environment isn't installed.
    """
    folder = ENVIRONMENTS / row.group
    if not (folder / ".installed").is_file():
        pytest.skip(f"{row.group} isn't installed: make clients CLIENTS={row.group} installs and tests it")
    if row.group == "node":
        # the scripts are reached by a link beside the packages, from where they import these
        return ["node", "--preserve-symlinks", "--preserve-symlinks-main", str(folder / "scripts" / row.script)]
    return [str(folder / "bin" / "python"), "-B", str(row.path)]


@pytest.fixture
def answers_of(request: pytest.FixtureRequest) -> Callable[[Row], tuple[ServedPack, dict[str, Any]]]:
    """A function that runs a client's script for all features that are tested, in one process.

    It returns the server and what the script printed for each feature. The server is started after
    the environment was found.
    """

    def answers_of(row: Row) -> tuple[ServedPack, dict[str, Any]]:
        interpreter = command(row)
        served: ServedPack = request.getfixturevalue("served")
        options = [f"--{option}" for option in row.options]
        done = subprocess.run(
            [*interpreter, served.url, served.key, *options, *row.tested],
            env={**os.environ, "NO_COLOR": "1", "LORASERVE_LIMITED_KEY": served.limited_key},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
        named = {line["feature"]: line for line in lines}
        failed = {"error": f"{row.script} ended with {done.returncode}:\n{done.stderr[-4000:]}"}
        return served, {feature: named.get(feature, failed) for feature in row.tested}

    return answers_of
