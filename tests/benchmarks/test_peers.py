"""What is made of the turns beside other servers; none of them is installed here."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks import load, peers, peers_installing, peers_limits, peers_quality, peers_rows, peers_serving
from benchmarks.peers_installing import PeerUnavailableError
from benchmarks.peers_rows import BASE, MIXED, Pair, Row, Turn
from benchmarks.peers_serving import Running, Work
from benchmarks.quality import Loss

PAIR = Pair("llama.cpp", "Q8_0", "int8")
OPTIONS = argparse.Namespace(size="S", rounds=3, adapters=32, requests=(1, 8), prompts=(64,), alone=False, quiet=None)


def make_turns(*speeds: float, others: float = 0.05, idle: float = 0.0) -> list[Turn]:
    return [Turn(speed, others, idle) for speed in speeds]


def make_row(**fields: Any) -> Row:
    turns = {"peer": make_turns(100.0, 50.0, 80.0), "ours": make_turns(200.0, 60.0, 40.0, idle=0.02)}
    return Row(**{"pair": PAIR, "requests": 8, "mode": MIXED, **turns, **fields})


def make_work() -> Work:
    return Work(Path("model"), (), 512, 8, (0, 1))


def test_row_has_best_turns_and_two_ratios() -> None:
    assert make_row(num_dropped=3).cells() == [
        *("llama.cpp", "Q8_0", "int8", "64", "8", "an adapter each", "default"),
        *("100.0 (80.0)", "200.0 (60.0)", "**2.00**", "1.20 (0.50 to 2.00)", "0.05", "0.02", "3"),
    ]
    assert len(make_row().cells()) == len(peers_rows.HEADER)


def test_unmeasured_row_states_reason() -> None:
    cells = make_row(peer=[], ours=[], reason="no compiler").cells()
    assert cells[7] == "not measured: no compiler"
    assert len(cells) == len(peers_rows.HEADER)
    assert str(make_row(peer=[]).ratio) == "nan"


def test_first_tokens_have_a_table_of_servers_alone() -> None:
    def streamed(*times: tuple[float, float]) -> list[Turn]:
        figures = [{"tokens_per_s": 1.0, "ttft_p50_ms": p50, "ttft_max_ms": last} for p50, last in times]
        return [Turn.of(one, 0.0, 0.0) for one in figures]

    server = make_row(peer=streamed((900.0, 1500.0), (700.0, 1300.0)), ours=streamed((300.0, 500.0), (302.0, 498.0)))
    assert server.ttft_cells() == [*server.where, "800", "301", "1400", "499"]
    assert make_row().ttft_cells() == make_row(reason="no compiler").ttft_cells() == []
    assert peers_rows.tables([server, make_row()])[1].count("\n") == 2


def test_default_formats_match_processor_instructions() -> None:
    wide = [
        Pair("vllm", "bfloat16", "int8"),
        Pair("peft", "float32", "float32"),
        Pair("peft", "bfloat16", "bfloat16"),
    ]
    assert peers.default_pairs(["vllm", "peft"], ["avx2", "avx512_bf16"]) == wide
    assert peers.default_pairs(["vllm"], ["avx2"]) == [Pair("vllm", "float32", "int8")]
    assert [pair.format for pair in peers.default_pairs(["llama.cpp"], [])] == [
        "Q4_0",
        "Q4_0+Q8_0",
        "Q8_0",
        "Q8_0+Q8_0",
    ]


def test_formats_are_selectable_and_wrong_format_is_named() -> None:
    chosen = peers.parse_pairs("llama.cpp:F16=bfloat16, vllm:float32=float32", ["llama.cpp", "vllm"])
    assert chosen == [Pair("llama.cpp", "F16", "bfloat16"), Pair("vllm", "float32", "float32")]
    held = peers.parse_pairs("llama.cpp:Q4_0+Q8_0=int4-rounded+int8", ["llama.cpp"])
    assert held == [Pair("llama.cpp", "Q4_0+Q8_0", "int4-rounded+int8")]
    assert peers.parse_pairs("llama.cpp:Q6_K=gguf", ["llama.cpp"]) == [Pair("llama.cpp", "Q6_K", "gguf-Q6_K")]
    for wrong in (
        "",
        "vllm",
        "vllm:x",
        "vllm:=int8",
        "peft:float32=float32",
        "vllm:bfloat16=bf16",
        "vllm:bfloat16=gguf",
    ):
        with pytest.raises(ValueError, match="expected PEER:FORMAT=OURS"):
            peers.parse_pairs(wrong, ["llama.cpp", "vllm"])


def test_options_naming_no_peer_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--peers", "sglang"], ["--modes", "all"], ["--formats", "vllm:x"]):
        with pytest.raises(SystemExit):
            peers.main(arguments)
        assert "expected" in capsys.readouterr().err


def make_running(speed: float, failure: str = "") -> Running:
    def burst(requests: int, mode: str, prompt_tokens: int, seed: int) -> dict[str, Any]:
        if failure and seed:
            raise PeerUnavailableError(failure)
        return {"tokens_per_s": speed}

    return Running(0, f"{speed} threads", burst)


@pytest.mark.parametrize("is_alone", [False, True])
def test_turns_alternate_and_starter_changes_each_round(monkeypatch: pytest.MonkeyPatch, is_alone: bool) -> None:
    begun: list[str] = []

    @contextmanager
    def started_peer(*_: object) -> Iterator[Running]:
        begun.append("peer")
        yield make_running(10.0)

    @contextmanager
    def ours(*_: object) -> Iterator[Running]:
        begun.append("ours")
        yield make_running(20.0)

    monkeypatch.setattr(peers, "started_peer", started_peer)
    monkeypatch.setattr(peers, "ours", ours)
    monkeypatch.setattr(Work, "num_bytes", 1)
    options = argparse.Namespace(**{**vars(OPTIONS), "alone": is_alone})
    settings: dict[str, str] = {}
    rows = peers.measure(PAIR, MIXED, make_work(), options, settings)
    assert [(row.requests, row.ratio, len(row.peer), len(row.ours)) for row in rows] == [(1, 2.0, 3, 3), (8, 2.0, 3, 3)]
    assert begun == (["peer", "ours", "ours", "peer", "peer", "ours"] * 2 if is_alone else ["peer", "ours"])
    assert settings == {"llama.cpp Q8_0, an adapter each": "10.0 threads", "loraserve int8": "20.0 threads"}


def test_reason_of_failed_peer_appears_on_missing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started_peer(*_: object) -> Iterator[Running]:
        raise PeerUnavailableError("the build ended with 2")
        yield

    monkeypatch.setattr(peers, "started_peer", started_peer)
    rows = peers.measure(PAIR, MIXED, make_work(), OPTIONS, {})
    assert [row.reason for row in rows] == ["the build ended with 2"] * 2
    assert "not measured: the build ended with 2" in peers.text(OPTIONS, rows, {}, {})


def test_turn_beside_other_work_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(make_turns(1.0, 2.0, others=0.4) + make_turns(3.0))
    monkeypatch.setattr(peers, "take_turn", lambda *_: next(turns))
    row = make_row()
    turn = peers.take_quiet_turn(make_running(1.0), None, row, 1, None)
    assert turn is not None
    assert (turn.tokens_per_s, row.num_dropped) == (3.0, 2)
    monkeypatch.setattr(peers, "take_turn", lambda *_: make_turns(1.0, others=0.4)[0])
    assert peers.take_quiet_turn(make_running(1.0), None, row, 1, None) is None
    assert row.num_dropped == peers.MAX_DROPPED


def test_long_prompts_are_asked_by_fewer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(*_: object) -> Iterator[Running]:
        yield make_running(1.0)

    monkeypatch.setattr(peers, "started_peer", started)
    monkeypatch.setattr(peers, "ours", started)
    monkeypatch.setattr(Work, "num_bytes", 1)
    options = argparse.Namespace(**{**vars(OPTIONS), "rounds": 1, "requests": (1, 32), "prompts": (64, 2000)})
    asked = {
        speculation: [
            (row.prompt_tokens, row.requests)
            for row in peers.measure(PAIR, MIXED, replace(make_work(), speculation=speculation), options, {})
        ]
        for speculation in ("off", "on")
    }
    assert asked == {"off": [(64, 1), (64, 32), (2000, 1)], "on": [(64, 1), (64, 32)]}


LOST = {
    ("llama.cpp", "Q8_0"): 0.005,
    ("llama.cpp", "Q6_K"): 0.011,
    ("llama.cpp", "Q4_K_M"): 0.06,
    ("llama.cpp", "Q4_0"): 0.3,
}


def test_pairs_have_nearest_losses() -> None:
    ours = {("ours", "bfloat16"): 0.0004, ("ours", "int8"): 0.007, ("ours", "int4-calibrated"): 0.05}
    qualities = {key: Loss(lost, 0.9, 1.0) for key, lost in {**LOST, **ours}.items()}
    assert peers.pairs_by_quality(["llama.cpp", "vllm"], qualities, is_wide_fast=True) == [
        Pair("llama.cpp", "Q8_0", "int8"),
        Pair("llama.cpp", "Q4_K_M", "int4-calibrated"),
        Pair("llama.cpp", "Q4_0", "int4-calibrated"),
        *(Pair("llama.cpp", name, f"gguf-{name}") for name in ("Q8_0", "Q4_K_M", "Q4_0")),
        Pair("llama.cpp", "Q8_0", "bfloat16"),
        Pair("llama.cpp", "Q6_K", "int8"),
        Pair("vllm", "bfloat16", "bfloat16"),
        Pair("vllm", "bfloat16", "int8"),
    ]
    only_ours = {key: lost for key, lost in qualities.items() if key[0] == "ours"}
    assert peers.pairs_by_quality(["llama.cpp"], only_ours, is_wide_fast=True) == [Pair("llama.cpp", "Q8_0", "int8")]
    assert peers_quality.nearest_not_better(0.4, {"Q4_0": 0.3}) is None
    page = peers.text(argparse.Namespace(**{**vars(OPTIONS), "size": "real"}), [], {}, qualities)
    assert page.index("| loraserve | int8 | 0.0070 |") < page.index("| llama.cpp | Q6_K | 0.0110 |")


def test_llama_cpps_figures_are_read_or_missed() -> None:
    said = (
        "Mean PPL(Q)/PPL(base)  :   1.00624 ±   0.002\nMean    KLD:   0.003812 ±   0.0001\nSame top p: 96.25 ± 0.2 %\n"
    )
    assert peers_quality.parse_llama_cpp(said) == Loss(0.003812, 0.9625, 1.00624)
    with pytest.raises(PeerUnavailableError, match="didn't say"):
        peers_quality.parse_llama_cpp("Mean    KLD:   0.003812 ±   0.0001\n")


def test_prompts_are_windows_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(range(100, 150))))
    options = argparse.Namespace(text_tokens=path, prompt_tokens=8, vocab=512)
    first, other = (load.draw(random.Random(seed), options) for seed in (1, 2))
    assert first == list(range(first[0], first[0] + 8)) != other
    assert len(load.draw(random.Random(1), argparse.Namespace(text_tokens=None, prompt_tokens=8, vocab=512))) == 8


def test_contenders_run_together_only_if_memory_suffices() -> None:
    assert peers.fits(1 << 30, 6 << 30)
    assert not peers.fits(4 << 30, 10 << 30)


def test_turn_waits_for_quiet_second_only_until_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.5, 10.0, 10.1])
    monkeypatch.setattr(peers, "busy_s", lambda: next(now))
    monkeypatch.setattr(peers.time, "sleep", lambda _: None)
    clock = iter([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr(peers.time, "monotonic", lambda: next(clock))
    assert peers.wait_until_quiet(0.3)
    assert not peers.wait_until_quiet(0.3, timeout_s=0.0)


def test_load_fills_the_adapters_number_into_a_body() -> None:
    body = {"lora": [{"id": "{}", "scale": 1.0}], "cache_prompt": False, "name": "lora-{}"}
    assert load.filled(body, 3) == {"lora": [{"id": 3, "scale": 1.0}], "cache_prompt": False, "name": "lora-{}"}


def test_steps_run_once_and_again_after_recipe_change(tmp_path: Path) -> None:
    made: list[str] = []
    for recipe in ("a", "a", "b"):
        peers_installing.once(tmp_path, "x", [recipe], "making it", lambda recipe=recipe: made.append(recipe))
    assert made == ["a", "b"]


def test_failed_step_reports_last_words_without_local_folders(tmp_path: Path) -> None:
    code = f"print('fine'); print('error: no room in {peers_installing.ROOT}/x'); raise SystemExit(3)"
    with pytest.raises(PeerUnavailableError, match=r"^A step ended with 3: error: no room in \./x$"):
        peers_installing.run("A step", [sys.executable, "-c", code], tmp_path / "log")
    with pytest.raises(PeerUnavailableError, match="there is no no-such-program here"):
        peers_installing.run("A step", ["no-such-program"], tmp_path / "log")


def test_failed_start_gives_reason_and_running_server_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_serving, "CACHE", tmp_path)
    failing = [sys.executable, "-c", "raise SystemExit('error: no such model')"]
    words = "ended with 1 at its start: error: no such model"
    with pytest.raises(PeerUnavailableError, match=words), peers_serving._started("x", failing, 1, {}):
        pass
    monkeypatch.setattr(peers_serving, "_is_healthy", lambda url: True)
    waiting = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with peers_serving._started("x", [sys.executable, "-c", waiting], 1, {}) as (process, _):
        while not (children := peers_serving.psutil.Process(process.pid).children()):
            pass
    assert process.returncode is not None
    assert not children[0].is_running() or children[0].status() == "zombie"


def test_instruction_sets_come_from_llama_cpp_build() -> None:
    info = "CPU : SSE3 = 1 | AVX512_VNNI = 1 | AMX_INT8 = 0 | LLAMAFILE = 1 | OPENMP = 1 | "
    assert peers_serving.instructions_of(info) == "SSE3 AVX512_VNNI LLAMAFILE OPENMP"
    assert peers_serving.instructions_of("") == ""


def test_pages_numbers_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(peers.reporting._plain([make_row()])))[0]["pair"]["peer"] == "llama.cpp"


def test_limits_divide_read_rate_by_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    file = tmp_path / "base.gguf"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr(peers_installing, "gguf_base", lambda *_: file)
    # q and o, k and v, and the three of the MLP
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64
    assert peers_limits.token_bytes(tmp_path, "ours", "int8") == weights
    assert peers_limits.token_bytes(tmp_path, "vllm", "bfloat16") == 2 * weights
    for whose, format in (("ours", "gguf-Q8_0"), ("llama.cpp", "Q8_0")):
        assert peers_limits.token_bytes(tmp_path, whose, format) == 1000
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path)
    read = 1000 * weights / (weights + 512 * 64)
    assert peers_limits.token_bytes(tmp_path, "llama.cpp", "Q8_0") == pytest.approx(read)
    config.tie_word_embeddings = True
    config.save_pretrained(tmp_path)
    other = Pair("vllm", "fp8", "int8")
    rows = [make_row(requests=1, mode=BASE), make_row(requests=1, mode=BASE, speculation="on")]
    rows.append(make_row(requests=1, mode=BASE, pair=other))
    page = peers_limits.text(tmp_path, rows, rate=1e6)
    assert "| llama.cpp | Q8_0 | 0 | 1000.0 | 100.0 | 10% |" in page
    assert page.count("loraserve") == 1
    assert peers_limits.text(tmp_path, [make_row(mode=BASE)], rate=1e6) == ""
