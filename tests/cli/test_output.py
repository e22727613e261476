from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest

from loraserve.cli.output import MAX_CELL, Column, Format, Output, first_line, milliseconds, size
from loraserve.cli.ps import _look, _print, summary
from loraserve.cli.session.asking import tell_answer
from loraserve.errors import AdapterRejected, RateLimited
from loraserve.sdk.answers import Answer
from loraserve.sdk.types.management import Adapter
from loraserve.sdk.types.residency import AdapterResidency, Memory
from loraserve.sdk.types.samples import parse_metrics
from loraserve.sdk.types.server import Base

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_adapter(name: str, aliases: dict[str, int], latest: int | None) -> Adapter:
    return Adapter(
        name=name, aliases=aliases, num_versions=latest or 0, latest_version=latest, created_at=NOW, updated_at=NOW
    )


ROWS = [make_adapter("sql", {"live": 2, "canary": 3}, 3), make_adapter("a-longer-name", {}, None)]
COLUMNS = (Column("NAME", "name"), Column("ALIASES", "aliases"), Column("LATEST", "latest_version"))


def test_table_in_pipe_is_aligned_and_never_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Format.HUMAN).rows(ROWS, COLUMNS, name="name", empty="none")
    assert capsys.readouterr().out.splitlines() == [
        "NAME           ALIASES           LATEST",
        "sql            live=2, canary=3  3",
        "a-longer-name  -                 -",
    ]


def test_rare_column_needs_value(capsys: pytest.CaptureFixture[str]) -> None:
    columns = (COLUMNS[0], Column("NOTES", "notes", is_rare=True))
    Output(Format.HUMAN).rows(ROWS, columns, name="name", empty="none")
    assert "NOTES" not in capsys.readouterr().out
    Output(Format.HUMAN).rows([ROWS[0].model_copy(update={"notes": "x"})], columns, name="name", empty="none")
    assert capsys.readouterr().out.splitlines() == ["NAME  NOTES", "sql   x"]


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


def test_empty_list_prints_only_note_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_text_cannot_control_redrawn_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(Format.HUMAN)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with output.frames() as show:
        show(lambda: output.line("\x1b]0;owned\x07é"))
        show(lambda: (output.line("above"), output.note("a word"), output.line("below")))
    out, err = capsys.readouterr()
    assert "\x1b]0" not in out
    assert "\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}é" in out
    # words are in the frame too: beside it they would tear it
    assert out.index("above") < out.index("a word") < out.index("below")
    assert err == ""


def test_successive_frames_in_pipe_follow_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Format.HUMAN)
    with output.frames() as show:
        for look in ("one", "two"):
            show(lambda look=look: output.line(look))
    assert capsys.readouterr().out == "one\ntwo\n"


def test_refusal_says_when_to_try_again(capsys: pytest.CaptureFixture[str]) -> None:
    error = RateLimited("Over the tenant's 60 requests a minute.", retry_after_s=6.5)
    Output(Format.HUMAN).fail(error)
    assert "try again" not in capsys.readouterr().err
    error.status_code = 429
    Output(Format.HUMAN).fail(error)
    assert "try again: in 6.5 s\nnext: loraserve ps\n" in capsys.readouterr().err
    Output(Format.JSON).fail(error)
    assert json.loads(capsys.readouterr().err)["error"]["retry_after_s"] == 6.5


def test_long_problem_list_ends_after_five_with_count(capsys: pytest.CaptureFixture[str]) -> None:
    error = AdapterRejected("It can't be served.", problems=[f"problem {number}" for number in range(42)])
    output = Output(Format.HUMAN)
    output.how_to_see_all = "--all shows them"
    output.fail(error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:7] == [*(f"  - problem {number}" for number in range(5)), "  and 37 more; --all shows them"]
    output.max_problems = None
    output.fail(error)
    assert capsys.readouterr().err.count("  - problem") == 42
    Output(Format.JSON).fail(error)
    assert len(json.loads(capsys.readouterr().err)["error"]["problems"]) == 42
    error = AdapterRejected("It can't be served.", problems=[f"problem {number}" for number in range(5)])
    Output(Format.HUMAN).fail(error)
    assert "more" not in capsys.readouterr().err


def test_waits_are_reported_with_reason(capsys: pytest.CaptureFixture[str]) -> None:
    output, error = Output(Format.HUMAN), RateLimited("Over the tenant's 60 requests a minute.")
    output.wait(6.5, error)  # it came from no server: an error follows if it stays so
    error.status_code = 429
    output.wait(0.1, error)
    assert capsys.readouterr().err == ""
    output.wait(6.5, error)
    assert capsys.readouterr().err == "Over the tenant's 60 requests a minute: trying again in 6.5 s.\n"


def test_work_without_progress_is_shown_only_on_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Output(Format.HUMAN).working("verifying sql"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Output(Format.HUMAN).working("verifying sql\x1b]0;owned"):
        pass
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "verifying sql" in shown.err
    assert "\x1b]0;" not in shown.err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1260.4, "1,260 ms"), (999.7, "1,000 ms"), (99.96, "100 ms"), (99.9, "99.9 ms"), (0.01234, "0.0123 ms")],
)
def test_milliseconds_are_plain_numbers(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_notes_are_cut_to_first_line() -> None:
    assert (first_line(None), first_line(" \n"), first_line("one")) == (None, None, "one")
    assert first_line("one\ntwo") == "one …"
    assert len(first_line("x" * 60) or "") == MAX_CELL


def test_times_name_zone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for zone, shown in (("Europe/Berlin", "2026-01-01 01:00:00 CET"), ("UTC", "2026-01-01 00:00:00 UTC")):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            Output(Format.HUMAN).pairs({"at": NOW})
            assert capsys.readouterr().out == f"at  {shown}\n"
    finally:
        monkeypatch.undo()
        time.tzset()


STATES = (Column("NAME", "name"), Column("STATE", lambda row: "ready" if row.latest_version else "quarantined", True))


def test_states_have_colors_on_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(Format.HUMAN)

    def shown() -> str:
        output.rows(ROWS, STATES, name="name", empty="none")
        output.one(ROWS[0], STATES, name="name")
        output.state_line("fail", "fail", "  disk")
        return capsys.readouterr().out

    assert "\x1b[" not in shown()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = shown()
    assert colored.count("\x1b[32mready") == 2
    assert "\x1b[1;31mquarantined" in colored
    assert "\x1b[1;31mfail" in colored
    assert "\x1b[32msql" not in colored
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as without:
            without.setenv(name, value)
            assert "\x1b[3" not in shown().replace("\x1b[1m", "")


def test_metrics_text_becomes_engine_summary() -> None:
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


MEMORY = Memory(
    budget_bytes=100 << 20,
    kv_used_bytes=40 << 20,
    kv_idle_bytes=30 << 20,
    adapters_used_bytes=15 << 20,
    adapters_idle_bytes=10 << 20,
    free_bytes=5 << 20,
    num_device_adapters=3,
    host_budget_bytes=8 << 20,
    host_adapter_bytes=1 << 20,
    num_host_adapters=1,
)
BASE = Base(
    id="base",
    digest="b" * 64,
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=8,
    vocab_size=32,
    max_model_len=64,
    modules={"q_proj": (8, 8)},
    dtype="float32",
    quantization="int8",
    arithmetic="w8a8-row",
    kernels="onednn-u8",
    instructions="avx512_core_vnni",
    device="cpu",
    num_parameters=64,
    size_bytes=64,
)
METRICS = """loraserve_requests_running 3.0
loraserve_adapter_lookups_total{tier="device"} 90.0
loraserve_adapter_lookups_total{tier="host"} 7.0
loraserve_adapter_lookups_total{tier="disk"} 3.0
loraserve_adapter_evictions_total{cause="adapter",tier="device"} 1.0
loraserve_adapter_evictions_total{cause="kv",tier="device"} 2.0
loraserve_adapter_evictions_total{cause="adapter",tier="host"} 4.0
loraserve_kv_block_evictions_total{cause="kv"} 9.0
loraserve_kv_block_evictions_total{cause="adapter"} 6.0
"""


def make_row(name: str, tier: str, **fields: object) -> AdapterResidency:
    values = {"device_bytes": 0, "host_bytes": 0, "num_pins": 0, "is_pinned": False, "last_used_s": None, **fields}
    values |= {"tenant": "acme", "name": name, "version": 1, "digest": name, "size_bytes": 4096, "tier": tier}
    return AdapterResidency.model_validate(values)


class Server:
    """The part of a client that ``ps`` asks."""

    def __init__(self, *rows: AdapterResidency, memory: Memory | None = MEMORY) -> None:
        self._rows, self._memory = rows, memory

    def residency(self, *, resident: bool) -> list[AdapterResidency]:
        return [row for row in self._rows if row.tier != "disk" or not resident]

    def memory(self) -> Memory | None:
        return self._memory

    def base(self) -> Base:
        return BASE

    def metrics(self) -> str:
        assert self._memory is not None, "a tenant's key was used to ask for metrics"
        return METRICS


def test_ps_sorts_by_tier_and_lists_disk_optionally() -> None:
    server = Server(
        make_row("cold", "disk"),
        make_row("evicted", "host", last_used_s=2.0),
        make_row("unused", "device"),
        make_row("older", "device", last_used_s=9.0),
        make_row("coming", "loading", last_used_s=0.0),
        make_row("newer", "device", last_used_s=1.0),
    )
    in_memory = ["newer", "older", "unused", "coming", "evicted"]
    assert [row.name for row in _look(server, all_versions=False).rows] == in_memory  # type: ignore[arg-type]
    assert [row.name for row in _look(server, all_versions=True).rows] == [*in_memory, "cold"]  # type: ignore[arg-type]


def test_ps_describes_memory_use_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    row = make_row("sql", "device", device_bytes=2048, dtype="int8", precision_loss=0.0123, uses_per_s=0.5)
    _print(Output(Format.HUMAN), _look(Server(row), all_versions=False), is_line=False)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    said = {line.split("  ", 1)[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}
    assert said["device"] == (
        "100.0 MiB: adapters 15.0 MiB in use and 10.0 MiB idle, KV 40.0 MiB in use and 30.0 MiB kept, 5.0 MiB free"
    )
    assert said["host"] == "1 adapter, 1.0 MiB of 8.0 MiB"
    assert said["found"] == (
        "90.0% on the device, 7.0% in the host's memory, 3.0% on disk, of 100 requests for an adapter"
    )
    assert said["evicted"] == ("1 adapter for adapters, 2 for KV, 4 from the host; 9 KV blocks for KV, 6 for adapters")
    titles, cells = (" ".join(line.split()) for line in lines[-2:])
    assert titles == "ADAPTER TENANT TIER DEVICE HOST DISK DTYPE LOSS RUNNING PINNED LAST USE USES"
    assert cells == "sql@1 acme device 2.0 KiB 0 B 4.0 KiB int8 0.01 0 no - 30.0/min"


def test_ps_of_tenant_requests_no_forbidden_data(capsys: pytest.CaptureFixture[str]) -> None:
    look = _look(Server(make_row("sql", "device"), memory=None), all_versions=False)  # type: ignore[arg-type]
    _print(Output(Format.JSON), look, is_line=False)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["memory"], shown["engine"], len(shown["adapters"])) == (None, None, 1)
    _print(Output(Format.HUMAN), look, is_line=False)
    assert "admin keys" in capsys.readouterr().err


def test_run_names_fallback_and_unavailable_version(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(200, adapter="sql@1", fell_back_from="sql@2", fell_back_for="adapter_quarantined")
    tell_answer(Output(Format.HUMAN), answer)
    tell_answer(Output(Format.HUMAN), Answer(200, adapter="sql@2"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "",
        "sql@1 answered instead of sql@2, which is unavailable (adapter_quarantined).\n",
    )
