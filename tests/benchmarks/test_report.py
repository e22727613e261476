"""What a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import report, summary
from benchmarks.gpu.parts import BY_NAME, Outcome

FACTS = {
    "device": "A GPU",
    "capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes": 141 << 30,
    "cache_bytes": 50 << 20,
    "cuda": "13.0",
    "python": "3.12",
    "versions": {"torch": "2.13"},
    "copy_bytes_per_s": 4.3e12,
    "operations_per_s": 7.9e14,
    "load_bytes_per_s": 5.5e10,
    "is_dry_run": False,
}
CHECK = {"check": "LoRA qkv", "error": 0.004, "bound": 0.0078, "ok": True, "note": ""}


def kernel_row(**changes: object) -> dict[str, object]:
    row = {"site": "qkv", "ranks": "16", "rows": 64, "adapters": 64, "us": 40.0, "share": 0.8, "vllm_best": 2.0}
    return {**row, **changes}


def page(outcomes: dict[str, Outcome], **facts: object) -> str:
    return report.markdown(outcomes, {**FACTS, **facts}, command="make gpu", date="2026-01-02", seconds=61.0)


def test_page_says_machine_limits_versions_date_and_command() -> None:
    text = page({"check-lora": Outcome("complete", rows=[CHECK])})
    for words in ("A GPU", "4.30 TB/s", "790 TFLOP/s", "55.0 GB/s", "torch 2.13", "2026-01-02", "`make gpu`"):
        assert words in text


def test_brief_tables_fit_a_terminals_end() -> None:
    rows = [kernel_row(rows=number) for number in range(900)]
    outcomes = {"check-lora": Outcome("complete", rows=[CHECK] * 3, num_cases=3)}
    outcomes |= {"kernels": Outcome("complete", rows=rows), "tools": Outcome("out of time")}
    text = report.brief(outcomes, FACTS, seconds=61.0)
    assert len(text) <= report.MOST_CHARACTERS
    assert text.splitlines()[0] == "A GPU; 61 s"
    assert "check-lora: complete, 0 s, 3 cases, 3 checks hold" in text
    assert "qkv|16|0|64|40|" in text
    assert text.rstrip().splitlines()[-1].startswith("- ")
    assert "3 of 3 checks hold." in text


def test_dry_run_states_lack_of_measurements() -> None:
    assert "Nothing is measured" in page({}, is_dry_run=True)
    assert "Nothing is measured" not in page({})


def test_failed_check_and_broken_case_appear_in_summary() -> None:
    outcomes = {
        "check-lora": Outcome("complete", rows=[CHECK, {**CHECK, "check": "LoRA o", "ok": False}]),
        "check-gemm": Outcome("complete", problems=["int8: RuntimeError: broken"]),
    }
    assert summary.failed_checks(outcomes) == ["check-lora: LoRA o", "check-gemm: int8: RuntimeError: broken"]
    text = page(outcomes)
    assert "1 of 2 checks hold." in text
    assert "**Not so:** check-lora: LoRA o" in text
    assert "| LoRA o | 4.0e-03 | 7.8e-03 | **no** |" in text


def test_part_out_of_time_is_named() -> None:
    assert "Not complete: kernels (out of time)." in page({"kernels": Outcome("out of time")})


def test_kernels_are_summarised_by_share_and_peer() -> None:
    rows = [
        kernel_row(),
        kernel_row(share=0.2, vllm_best=0.5),
        # few adapters: launches decide, and the goal isn't about them
        kernel_row(adapters=8, share=0.01, vllm_best=8.0),
        kernel_row(us=None, share=None, vllm_best=None),
    ]
    said = "\n".join(summary.lines({"kernels": Outcome("complete", rows=rows)}))
    assert "40 % of the limit (geometric mean), 20 % at the least" in said
    assert "2.00 times as fast as vLLM's best (geometric mean of 3 shapes); slower on 1 of them, 0.50 times" in said
    assert "SGLang" not in said


def test_decode_summary_shows_tax_of_64_adapters() -> None:
    row = {"base": "bf16", "rows": 64, "adapters": 64, "share": 0.61, "tax": 1.2, "bytes_tax": 1.1}
    said = summary.lines({"decode": Outcome("complete", rows=[row, {**row, "adapters": 0, "share": 0.7, "tax": 1.0}])})
    assert "Decode, bf16: 61 % to 70 % of the limit." in said
    assert (
        "Decode, bf16, 64 rows of 64 adapters: 1.200 times the step without adapters; the extra bytes cost 1.100."
        in said
    )


def test_empty_columns_are_omitted_and_missing_numbers_dashed() -> None:
    text = report.table(BY_NAME["kernels"], [kernel_row(), kernel_row(us=None)])
    header, _, first, second = text.splitlines()
    assert "vLLM best ÷" in header
    assert "csgmv" not in header
    assert "| 40 | 80 % |" in first
    assert "| – | 80 % |" in second


def test_bar_in_note_is_escaped() -> None:
    assert "a\\|b" in report.table(BY_NAME["check-lora"], [{**CHECK, "note": "a|b"}])


def test_page_and_json_are_written_and_overwritten(tmp_path: Path) -> None:
    for rows in ([], [CHECK]):
        outcomes = {"check-lora": Outcome("complete", rows=rows)}
        paths = report.write(tmp_path / "new", "gpu", outcomes, FACTS, command="make gpu", date="d", seconds=1.0)
    document = json.loads(paths[0].read_text())
    assert document["parts"]["check-lora"]["rows"] == [CHECK]
    assert document["machine"]["device"] == "A GPU"
    assert "LoRA qkv" in paths[1].read_text()
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["gpu.json", "gpu.md"]
