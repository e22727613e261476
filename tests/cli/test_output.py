from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from loraserve.cli.output import Column, Format, Output, size
from loraserve.cli.ps import parse_metrics, summary
from loraserve.sdk.resources import Adapter

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_adapter(name: str, aliases: dict[str, int], latest: int | None) -> Adapter:
    return Adapter(
        name=name, aliases=aliases, num_versions=latest or 0, latest_version=latest, created_at=NOW, updated_at=NOW
    )


ROWS = [make_adapter("sql", {"live": 2, "canary": 3}, 3), make_adapter("a-longer-name", {}, None)]
COLUMNS = (Column("NAME", "name"), Column("ALIASES", "aliases"), Column("LATEST", "latest_version"))


def test_table_in_a_pipe_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Format.HUMAN).rows(ROWS, COLUMNS, name="name", empty="none")
    assert capsys.readouterr().out.splitlines() == [
        "NAME           ALIASES           LATEST",
        "sql            live=2, canary=3  3",
        "a-longer-name  -                 -",
    ]


def test_json_is_an_array_of_whole_objects(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Format.JSON).rows(ROWS, COLUMNS, name="name", empty="none")
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["sql", "a-longer-name"]
    assert rows[0]["created_at"] == "2026-01-01T00:00:00Z"


def test_quiet_is_a_name_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Format.QUIET)
    output.rows(ROWS, COLUMNS, name="name", empty="none")
    output.note("not for programs")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("sql\na-longer-name\n", "")


def test_empty_list_is_no_data_and_a_word_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Format.HUMAN).rows([], COLUMNS, name="name", empty="No adapters yet.")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "No adapters yet.\n")


def test_text_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(Format.HUMAN)
    output.text("\x1b]0;owned\x07é\n")
    assert capsys.readouterr().out == "\x1b]0;owned\x07é\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.text("\x1b]0;owned\x07é\n")
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}é\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_metrics_text_becomes_what_the_engine_does() -> None:
    text = """# HELP loraserve_requests_running Sequences that are scheduled.
# TYPE loraserve_requests_running gauge
loraserve_requests_running 3.0
loraserve_kv_blocks{state="used"} 10.0
loraserve_kv_blocks{state="cached"} 2.0
loraserve_kv_blocks{state="free"} 88.0
loraserve_engine_generation_tokens_total 1e+06
"""
    engine = summary(parse_metrics(text))
    assert engine["requests_running"] == 3
    assert (engine["kv_blocks_used"], engine["kv_blocks"]) == (10, 100)
    assert engine["generation_tokens"] == 1_000_000
