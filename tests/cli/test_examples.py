"""The examples run as they say, against a real server with the bundled adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import free_port

from loraserve import Client
from loraserve.demo.pack import adapter_dirs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION, SQL = "list the tickets with age over 81", "SELECT * FROM tickets WHERE age > 81;"


@pytest.fixture
def adapters(client: Client) -> Iterator[Client]:
    """The bundled adapters by their own names, and none beside them."""
    for adapter in list(client.adapters.list()):
        client.adapters.delete(adapter.name)
    for name, directory in adapter_dirs().items():
        client.adapters.push(directory, name=name)
    yield client
    for name in adapter_dirs():
        client.adapters.delete(name)


@pytest.fixture
def run_example(real_server: Any, tmp_path: Path, variables_of: Callable[[], dict[str, str]]) -> Callable[..., str]:
    def run(name: str, *arguments: str | Path) -> str:
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=variables_of())
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_example_is_short_and_tested() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    names = {"push_and_complete.py", "push_checkpoints.py", "stream_many.py", "openai_client.py", "train_and_push.py"}
    assert found.keys() == names
    assert max(found.values()) <= 60


def test_notebook_is_valid_and_without_outputs() -> None:
    (path,) = EXAMPLES.glob("*.ipynb")
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
    compile(code_of(path), path.name, "exec")


def code_of(path: Path) -> str:
    """Return the code of a notebook's cells."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_push_and_complete(run_example: Callable[..., str]) -> None:
    lines = run_example("push_and_complete.py").splitlines()
    assert lines[-2:] == [SQL, SQL]
    assert any("100 %" in line for line in lines)


def test_stream_many_shows_an_answer_of_each_model(run_example: Callable[..., str], adapters: Client) -> None:
    lines = run_example("stream_many.py").splitlines()
    answers = {model: text for model, _, text in (line.strip().partition("  ") for line in lines)}
    assert answers.keys() == {"base", *adapter_dirs()}
    assert answers["sql"] == SQL
    assert len(set(answers.values())) == len(answers)


def test_openai_client(run_example: Callable[..., str], adapters: Client) -> None:
    pytest.importorskip("openai")
    out = run_example("openai_client.py", "sql")
    assert f"sql: {SQL}\n{SQL}\n" in out
    assert "as expected: model_not_found" in out


@pytest.mark.slow
@pytest.mark.campaign
def test_train_and_push(run_example: Callable[..., str]) -> None:
    pytest.importorskip("peft")
    assert "pushed butler@1" in run_example("train_and_push.py", "3")


@pytest.mark.slow
@pytest.mark.campaign
def test_push_checkpoints(run_example: Callable[..., str], client: Client) -> None:
    pytest.importorskip("peft")
    assert "of ['butler@" in run_example("push_checkpoints.py", "4")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("is_away", [False, True])
def test_notebook_runs(
    is_away: bool, tmp_path: Path, variables_of: Callable[[], dict[str, str]], real_server: Any
) -> None:
    pytest.importorskip("peft")
    code = code_of(EXAMPLES / "push_checkpoints.ipynb")
    variables = variables_of() | {"STEPS": "2", "HF_HUB_OFFLINE": "1"}
    if is_away:
        variables["LORASERVE_URL"] = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    if is_away:
        assert done.stdout.count("loraserve adapter push") == 2
        assert (tmp_path / "butler-checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    else:
        assert "'live':" in done.stdout
