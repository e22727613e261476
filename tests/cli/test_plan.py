"""``loraserve plan`` as people run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraserve.demo.pack import adapter_dirs, base_dir

Run = Callable[..., Any]


def test_plan_of_real_adapters_reports_fit(run_cli: Run) -> None:
    folder = next(iter(adapter_dirs().values())).parent
    done = run_cli(
        "plan", "--model", base_dir(), "--adapters", folder, "--memory-budget", "64MiB", "--max-num-seqs", "8"
    )
    assert done.code == 0
    assert "LlamaForCausalLM" in done.stdout
    assert "RUNNING" in done.stdout and "sql" in done.stdout  # noqa: PT018
    assert "recommended" in done.stdout
    assert (
        done.stderr
        == "KL and same top-1 are SmolLM2-135M-Instruct's; a server measures its own base's: loraserve ps.\n"
    )


def add_head(file: Path) -> None:
    """Add a head of the embedding's size to a checkpoint's file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, weights = json.loads(data[8:start]), data[start:]
    table = header["model.embed_tokens.weight"]
    first, last = table["data_offsets"]
    end = len(weights) + last - first
    header["lm_head.weight"] = table | {"data_offsets": [len(weights), end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + weights + weights[first:last])


def test_plan_says_why_tied_head_is_counted(run_here: Run, tmp_path: Path) -> None:
    note = "(the embedding again, in the order that products read)"
    assert note in run_here("plan", "--model", base_dir()).stdout
    untied = shutil.copytree(base_dir(), tmp_path / "base")
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    add_head(untied / "model.safetensors")
    assert note not in run_here("plan", "--model", untied).stdout


def test_plan_of_ranks_warns_of_turns(run_here: Run) -> None:
    arguments = ("--ranks", "16", "--targets", "q_proj,v_proj", "--count", "5000", "--disk-rate", "500MB")
    done = run_here("plan", "--model", base_dir(), *arguments, "--memory-budget", "64MiB", "--format", "json")
    assert done.code == 0
    facts = done.json
    assert facts["budget"]["bytes"] == 64 << 20
    assert facts["adapters"]["count"] == 5000
    assert 0 < facts["adapters"]["fit"][0]["num_adapters"] < 5000
    assert facts["adapters"]["loads"]["disk_bytes_per_s"] == 500_000_000
    assert [notice["code"] for notice in facts["notices"]] == ["adapters_take_turns"]


def test_unservable_plan_exits_1(run_here: Run) -> None:
    arguments = ("--ranks", "64", "--memory-budget", "2MiB", "--disk-rate", "1GB", "--format", "quiet")
    done = run_here("plan", "--model", base_dir(), *arguments)
    assert done.code == 1
    assert done.stdout.splitlines() == ["adapter_too_large", "kv_below_max_num_seqs"]


def test_budget_too_small_to_start_is_refused(run_here: Run) -> None:
    done = run_here("plan", "--model", base_dir(), "--memory-budget", "1MB")
    assert done.code == 2
    assert "--memory-budget" in done.stderr
    assert run_here("plan", "--model", "absent").code == 1
    assert run_here("plan", "--model", base_dir(), "--ranks", "x").code == 2
    assert run_here("plan").code == 2


def test_draft_base_takes_cache_from_budget(run_here: Run, tmp_path: Path) -> None:
    arguments = ("--model", base_dir(), "--memory-budget", "64MiB", "--format", "json")
    plain, drafted = run_here("plan", *arguments), run_here("plan", *arguments, "--draft-model", base_dir())
    assert plain.json["draft"] is None
    facts = drafted.json["draft"]
    assert facts["size_bytes"] == plain.json["base"]["size_bytes"]
    assert (facts["max_sequences"], facts["max_tokens"]) == (4, 512)
    assert facts["kv_bytes"] == 4 * plain.json["kv"]["bytes_per_sequence"]
    assert drafted.json["budget"]["bytes"] == (64 << 20) - facts["kv_bytes"]
    assert "draft base's cache" in drafted.json["budget"]["source"]
    assert "draft base" in run_here("plan", *arguments[:4], "--draft-model", base_dir()).stdout
    rounded = run_here("plan", *arguments, "--draft-model", base_dir(), "--draft-quantize", "int8")
    assert rounded.json["draft"]["quantization"] == "int8"


def test_draft_base_with_different_tokenizer_is_refused(run_here: Run, tmp_path: Path) -> None:
    draft = shutil.copytree(base_dir(), tmp_path / "draft")
    definition = json.loads((draft / "tokenizer.json").read_text())
    definition["added_tokens"][-1]["id"] = 9999
    (draft / "tokenizer.json").write_text(json.dumps(definition))
    done = run_here("plan", "--model", base_dir(), "--draft-model", draft)
    assert done.code != 0
    assert "has the id 9999 in the draft's" in done.stderr
    assert run_here("plan", "--model", base_dir(), "--draft-model", draft, "--device", "cuda").code == 2
    assert run_here("plan", "--model", base_dir(), "--draft-model", tmp_path / "absent").code == 2


def test_processes_sharing_base_are_planned_individually(run_here: Run) -> None:
    arguments = (
        "--model",
        base_dir(),
        "--memory-budget",
        "64MiB",
        "--ranks",
        "8",
        "--count",
        "3",
        "--disk-rate",
        "1GB",
    )
    alone = run_here("plan", *arguments, "--format", "json").json
    assert alone["ranks"] == []
    for flag in ("--tensor-parallel", "--pipeline-parallel"):
        facts = run_here("plan", *arguments, flag, "2", "--format", "json").json
        ranks = facts["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert sum(rank["weights_bytes"] for rank in ranks) == facts["base"]["size_bytes"]
        assert sum(rank["kv_bytes_per_sequence"] for rank in ranks) == facts["kv"]["bytes_per_sequence"]
        assert sum(rank["adapter_bytes"] for rank in ranks) == facts["adapters"]["total_bytes"]
        assert facts["kv"]["bytes_per_token"] == alone["kv"]["bytes_per_token"]
        assert all(0 < rank["weights_bytes"] < alone["base"]["size_bytes"] for rank in ranks)
    # rank 0 is the last stage
    assert [rank["layers"] for rank in ranks] == [[2, 4], [0, 2]]
    assert "2 to 3" in run_here("plan", *arguments, "--pipeline-parallel", "2").stdout


def test_impossible_parallel_size_for_base_is_refused(run_here: Run) -> None:
    done = run_here("plan", "--model", base_dir(), "--pipeline-parallel", "5")
    assert done.code == 2
    assert "--pipeline-parallel 5: this base has 4 layers" in done.stderr
    assert (
        "--tensor-parallel 3: 4 attention heads"
        in run_here("plan", "--model", base_dir(), "--tensor-parallel", "3").stderr
    )
    on_gpu = run_here("plan", "--model", base_dir(), "--pipeline-parallel", "2", "--device", "cuda")
    assert on_gpu.code == 2
    assert "for CPUs" in on_gpu.stderr


def test_gpu_plan_needs_no_gpu(run_here: Run) -> None:
    arguments = ("--device", "cuda", "--device-memory", "24GiB", "--ranks", "16", "--disk-rate", "1GB")
    done = run_here("plan", "--model", base_dir(), *arguments, "--format", "json")
    assert done.code == 0
    assert done.json["device"] == "cuda"
    assert 10 << 30 < done.json["budget"]["bytes"] < 22 << 30
    assert done.json["adapters"]["each"][0]["held"] == "bf16"


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['loraserve', 'plan', '--model', sys.argv[1], '--ranks', '8', '--disk-rate', '1GB']\n"
        "from loraserve.cli.main import app\n"
        "try: app()\nexcept SystemExit as end: assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(base_dir())], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
