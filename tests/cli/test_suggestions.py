"""Words for what was mistyped, mistaken or left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraserve import Client
from loraserve.cli.arguments import folder_name
from loraserve.demo.pack import base_dir

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["adaptr", "list"], "Did you mean 'adapter'?"),
        (["adapter", "versoins", "sql"], "Did you mean 'versions'?"),
        (["ps", "--format", "jsn"], "Did you mean 'json'?"),
        (["--format", "JSN", "ps"], "Did you mean 'json'?"),
        (["ps", "--formt", "json"], "--format"),
        (["serve", "--quantize", "in8"], "did you mean int8?"),
        (["serve", "--reasoning-parser", "qwen"], "did you mean qwen3?"),
    ],
)
def test_mistyped_word_gets_guess(run_here: Run, words: list[str], guess: str) -> None:
    done = run_here(*words, LORASERVE_MODEL="m")
    assert done.code == 2
    assert guess in done.stderr


def test_word_without_likeness_gets_no_guess(run_here: Run) -> None:
    for words in (["ps", "--format", "xml"], ["serve", "--quantize", "gptq"], ["zzz"]):
        done = run_here(*words, LORASERVE_MODEL="m")
        assert done.code == 2
        assert "id you mean" not in done.stderr


def test_mistyped_adapter_gets_own_name_alone(here: Run, client: Client, sql_dir: Path) -> None:
    client.adapters.push(sql_dir, name="Support-Bot")
    client.tenants.create("guessing")
    key = client.keys.create("guessing", name="ci").key
    for words in (["adapter", "show", "suport-bot"], ["adapter", "versions", "support-bit"]):
        shown = here(*words)
        assert shown.code == 1
        assert "  Did you mean Support-Bot?" in shown.stderr
        assert "Did you mean" not in here(*words, LORASERVE_API_KEY=key).stderr
    asked = here("run", "suport-bot@1", "hello")
    assert asked.code == 1
    assert "Did you mean Support-Bot@1?" in asked.stderr
    failed = here("adapter", "show", "suport-bot", "--format", "json")
    assert "Did you mean Support-Bot?" in json.loads(failed.stderr)["error"]["hint"]
    assert "Support" not in here("run", "suport-bot", "hello", LORASERVE_API_KEY=key).stderr


def test_serving_adapter_folder_names_base_and_push(run_here: Run, sql_dir: Path, tmp_path: Path) -> None:
    done = run_here("serve", sql_dir, "--data-dir", tmp_path)
    assert done.code == 2
    assert "is an adapter's folder (it has adapter_config.json)" in done.stderr
    base = json.loads((sql_dir / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert f"Serve its base ({base!r}), then push it" in done.stderr
    assert f"Try: loraserve adapter push {sql_dir}" in done.stderr


def test_pushing_base_folder_names_serve(here: Run) -> None:
    done = here("adapter", "push", base_dir())
    assert done.code == 1
    assert "it holds a whole model" in done.stderr
    assert f"Try: loraserve serve {base_dir()}" in done.stderr


def test_push_takes_name_of_folder(here: Run, client: Client, sql_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "named-by-folder"
    shutil.copytree(sql_dir, folder)
    done = here("adapter", "push", folder)
    assert done.code == 0
    assert "Pushing it as named-by-folder, its folder's name" in done.stderr
    assert client.adapters.get("named-by-folder").latest_version == 1
    for odd in (tmp_path / "my adapter", tmp_path / ".hidden"):
        odd.mkdir()
        refused = here("adapter", "push", odd)
        assert refused.code == 2
        assert "--name" in refused.stderr


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("out/support", "support"),
        ("out/support/", "support"),
        ("out/support/checkpoint-900", "support"),
        ("out/Support.v2", "Support.v2"),
        ("lora.gguf", "lora"),
        ("hf:acme/support-lora", "support-lora"),
        ("hf:acme/support-lora@v2:checkpoint-900", "support-lora"),
        ("hf:acme/loras:sql", "sql"),
    ],
)
def test_name_is_last_folder(source: str, name: str) -> None:
    assert folder_name(source) == name


def test_push_from_mlflow_needs_name(run_here: Run) -> None:
    done = run_here("adapter", "push", "models:/sql/1")
    assert done.code == 2
    assert "--name" in done.stderr


def test_full_tenant_learns_cures(here: Run, client: Client, sql_dir: Path) -> None:
    client.tenants.create("full", limits={"max_adapters": 1})
    key = client.keys.create("full", name="ci").key
    assert here("adapter", "push", sql_dir, "--name", "one", LORASERVE_API_KEY=key).code == 0
    done = here("adapter", "push", sql_dir, "--name", "two", LORASERVE_API_KEY=key)
    assert done.code == 1
    assert "at most 1 are allowed" in done.stderr
    assert "loraserve tenant set TENANT --max-adapters N" in done.stderr
    assert "loraserve adapter list" in done.stderr


def test_rollback_says_both_versions(here: Run, client: Client, sql_dir: Path, pirate_dir: Path) -> None:
    client.adapters.push(sql_dir, name="rolled")
    client.adapters.push(pirate_dir, name="rolled")
    done = here("adapter", "rollback", "rolled")
    assert done.code == 0
    assert "rolled@live means version 1 again, and no longer version 2." in done.stderr
    assert "Undo it: loraserve adapter rollback rolled live" in done.stderr


def test_tables_show_notes_and_tags(here: Run, client: Client, sql_dir: Path) -> None:
    push = ("adapter", "push", sql_dir, "--name", "noted", "--tag", "run=41", "--notes", "first line\nsecond")
    assert here(*push).code == 0
    titles, row = here("adapter", "versions", "noted").stdout.splitlines()
    assert "TAGS" in titles
    assert "run=41" in row
    assert "first line …" in row
    client.adapters.update("noted", notes="x" * 60)
    row = next(line for line in here("adapter", "list").stdout.splitlines() if line.startswith("noted "))
    assert f"{'x' * 38} …" in row
