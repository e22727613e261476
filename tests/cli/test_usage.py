"""Exit codes and words of commands that get no further than this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters_store import LocalStore
from loraserve.cli.output import Format, Output, next_step
from loraserve.errors import AdapterBaseMismatch, LoraserveError, SchemaOutdated, VersionNotFound
from loraserve.settings import Settings

Run = Callable[..., Any]


NOBODY = {"LORASERVE_URL": "http://127.0.0.1:9", "LORASERVE_API_KEY": "sk-lora-test"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["adapter", "push"],
        ["adapter", "show", "sql@latest"],
        ["adapter", "alias", "sql", "live", "0"],
        ["adapter", "list", "--format", "xml"],
        ["key", "revoke"],
        ["run", "sql", "hello", "--raw", "--system", "x"],
        ["run", "sql", "hello", "--max-tokens", "0"],
        ["adapter", "alias", "sql", "live", "3", "--split", "3=90,4=10"],
        ["adapter", "alias", "sql", "live", "--split", "3=90,3=10"],
        ["adapter", "alias", "sql", "live", "--split", "3:90"],
        ["adapter", "alias", "sql", "live", "--split", "3=0"],
        ["adapter", "alias", "sql", "live", "3", "--shadow", "5=1.5"],
        ["adapter", "alias", "sql", "live", "3", "--shadow", "5=0.1,6=0.1"],
        ["adapter", "pull", "sql"],
        ["adapter", "pull", "sql", "DIR", "--from", "hf://a/b"],
        ["adapter", "pull", "sql@2", "--from", "hf://a/b"],
        ["adapter", "set", "sql"],
        ["adapter", "set", "sql@2", "--fallback", "base"],
        ["adapter", "set", "sql", "--tag", "team"],
        ["tenant", "set", "acme"],
        ["tenant", "set", "acme", "--max-adapters", "many"],
        ["tenant", "set", "acme", "--prices", "no-such-file.json"],
        ["key", "create", "--tenant", "acme", "--expires-in", "soon"],
        ["audit", "--since", "yesterday"],
        ["usage", "--group-by", "adapter,model"],
        ["usage", "--from", "March"],
    ],
)
def test_wrong_usage_exits_2_with_words_on_stderr(run_here: Run, arguments: list[str]) -> None:
    done = run_here(*arguments, **NOBODY)
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr != ""


def test_missing_key_exits_2_and_names_the_variable(run_here: Run) -> None:
    done = run_here("adapter", "list", LORASERVE_URL="https://example.com")
    assert done.code == 2
    assert "LORASERVE_API_KEY" in done.stderr


@pytest.mark.parametrize("arguments", [["adapter", "list"], ["ps"], ["run", "sql", "hello"]])
def test_missing_server_exits_1_with_next_step(run_here: Run, arguments: list[str]) -> None:
    done = run_here(*arguments, **NOBODY)
    assert done.code == 1
    assert done.stdout == ""
    assert "error: No server answers at http://127.0.0.1:9" in done.stderr
    assert "point LORASERVE_URL at one that runs" in done.stderr
    assert "next: loraserve serve" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["adapter", "list", "--format", "json"], ["--format", "json", "adapter", "list"]]
)
def test_failure_is_json_in_json_format(run_here: Run, arguments: list[str]) -> None:
    done = run_here(*arguments, **NOBODY)
    assert done.code == 1
    assert json.loads(done.stderr)["error"]["code"] == "connection_failed"


def test_push_without_adapter_lists_directory_contents(run_cli: Run, tmp_path: Path) -> None:
    directory = tmp_path / "somewhere"
    directory.mkdir()
    (directory / "notes.txt").write_text("x")
    done = run_cli("adapter", "push", directory, "--name", "sql", **NOBODY)
    assert done.code == 1
    assert "it holds notes.txt" in done.stderr
    assert "Expected a directory with adapter_config.json" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--model is required"),
        (["--model", "x", "--quantize", "int3"], "--quantize"),
        (["--model", "x", "--memory-budget", "much"], "--memory-budget: should be a size"),
        (["--model", "x", "--port", "123456"], "--port"),
    ],
)
def test_serve_refuses_a_bad_flag_by_name(run_here: Run, flags: list[str], words: str) -> None:
    done = run_here("serve", *flags)
    assert done.code == 2
    assert words in done.stderr


def test_serve_refuses_an_unknown_variable_by_name(run_cli: Run) -> None:
    done = run_cli("serve", "--model", "x", LORASERVE_MEMORY_BUGDET="1GiB")
    assert done.code == 2
    assert "LORASERVE_MEMORY_BUGDET" in done.stderr


def test_every_setting_but_the_secret_is_a_flag(run_here: Run) -> None:
    shown = run_here("serve", "--help").stdout
    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert {flag for flag in flags if f"{flag} " not in shown} == {"--admin-key"}


def test_version_is_data(run_cli: Run) -> None:
    done = run_cli("--version")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.strip().count(".") == 2


def test_db_commands_make_and_check_the_tables(run_cli: Run, run_here: Run, tmp_path: Path) -> None:
    where = ("--data-dir", tmp_path / "data")
    assert run_here("db", "current", *where).stdout == "none\n"
    behind = run_here("db", "check", *where)
    assert behind.code == 2
    assert "loraserve db upgrade" in behind.stderr
    upgraded = run_cli("db", "upgrade", *where, "--format", "json")
    assert upgraded.code == 0
    assert upgraded.json["is_current"] is True
    assert run_here("db", "check", *where).code == 0
    assert run_here("db", "current", *where).stdout == f"{upgraded.json['head']}\n"


def test_adopt_store_reports_changes_and_applies_on_confirmation(run_here: Run, tmp_path: Path) -> None:
    where = ("--data-dir", tmp_path / "data")
    assert run_here("db", "upgrade", *where).code == 0
    store = LocalStore(tmp_path / "data" / "blobs")
    with store.stage() as staged:
        staged.write(b"somebody's")
        staged.commit()
    looked = run_here("db", "adopt-store", *where, "--format", "json")
    assert (looked.code, looked.json["unknown"], looked.json["is_adopted"]) == (2, 1, False)
    assert store.read_marker() is None
    adopted = run_here("db", "adopt-store", *where, "--yes")
    assert adopted.code == 0
    assert "The 1 blobs that this registry doesn't reference will be deleted" in adopted.stderr
    again = run_here("db", "adopt-store", *where, "--format", "json")
    assert (again.code, again.json["is_adopted"], again.json["marker_of"]) == (0, True, looked.json["registry"])
    store.close()


def test_next_step_belongs_to_the_narrowest_class() -> None:
    assert next_step(VersionNotFound("no")) == "loraserve adapter versions NAME"
    assert next_step(LoraserveError("no")) is None


def test_next_step_names_subject_of_command() -> None:
    named = {"NAME": "sql", "DIR": "./my dir"}
    assert next_step(VersionNotFound("no"), named) == "loraserve adapter versions sql"
    # a push that was refused has said everything that is wrong: a dry run of it would say the same
    assert next_step(AdapterBaseMismatch("no"), named) is None


def test_next_step_named_by_error_takes_precedence() -> None:
    error = VersionNotFound('The adapter "sql" has no such version. See: loraserve adapter versions sql')
    assert next_step(error) == "loraserve adapter versions sql"
    assert next_step(SchemaOutdated("old.", hint="Run: loraserve db upgrade")) == "loraserve db upgrade"


def test_every_reason_of_a_rejected_adapter_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    error = AdapterBaseMismatch("sql has 2 problems.", problems=["layer 9 isn't there", "q_proj is 3x4"])
    error.request_id = "req-1"
    Output(Format.HUMAN).fail(error)
    assert capsys.readouterr().err.splitlines() == [
        "error: sql has 2 problems.",
        "  - layer 9 isn't there",
        "  - q_proj is 3x4",
        "request: req-1",
    ]


def test_serve_takes_base_as_argument(run_here: Run) -> None:
    for arguments in (("/nonexistent",), ("--model", "/nonexistent"), ("--port", "1", "/nonexistent")):
        done = run_here("serve", *arguments)
        assert (done.code, "The model '/nonexistent' doesn't exist" in done.stderr) == (2, True)
    twice = run_here("serve", "one", "--model", "two")
    assert (twice.code, "named twice" in twice.stderr) == (2, True)
