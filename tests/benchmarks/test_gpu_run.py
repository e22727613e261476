"""`make gpu` itself: its dry run, and that it needs nothing of the server's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.run import parse

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# whoever has a GPU may have none of these; torch and triton bring what they need themselves
SERVERS = [
    "numba",
    "safetensors",
    "tokenizers",
    "fastapi",
    "uvicorn",
    "pydantic",
    "orjson",
    "sqlalchemy",
    "zmq",
    "msgspec",
    "cachetools",
    "ulid",
    "platformdirs",
    "httpx2",
    "typer",
    "rich",
    "structlog",
    "prometheus_client",
    "transformers",
    "peft",
]
IMPORTS = f"""
import sys, importlib
sys.modules.update(dict.fromkeys({SERVERS!r}))
from benchmarks.gpu import stand_ins
assert stand_ins.install() == ["msgspec", "cachetools"]
from benchmarks.gpu.parts import PARTS
for part in PARTS:
    importlib.import_module("benchmarks.gpu." + part.module)
from loraserve.types import SamplingParams
a, b = SamplingParams(temperature=0.5), SamplingParams(temperature=0.5, seed=3)
print(a.top_p, a == b, b.seed, a.logit_bias)
try:
    a.seed = 4
except AttributeError:
    print("frozen")
"""


def start(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-P", *command],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_dry_run_writes_result_files_from_arguments(tmp_path: Path) -> None:
    only = "check-rows,attention,linears"
    done = start("benchmarks/gpu/run.py", "--tiny", "--only", only, "--out", str(tmp_path), "--name", "tiny")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "tiny.json").read_text())
    assert {name: part["state"] for name, part in document["parts"].items()} == dict.fromkeys(
        only.split(","), "complete"
    )
    assert all(row["ok"] for row in document["parts"]["check-rows"]["rows"])
    assert document["parts"]["attention"]["rows"][0]["us"] is None
    assert "Nothing is measured" in (tmp_path / "tiny.md").read_text()


def test_run_without_gpu_fails_and_writes_no_file(tmp_path: Path) -> None:
    done = start("-c", "import torch, sys; sys.exit(torch.cuda.device_count() == 0)")
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    done = start("benchmarks/gpu/run.py", "--only", "check-rows", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--tiny" in done.stderr
    assert not list(tmp_path.iterdir())


def test_each_part_is_importable_without_server_packages() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["1.0 False 3 {}", "frozen"]


def test_parts_run_in_fixed_order_regardless_of_request() -> None:
    assert parse(["--only", "peft,check-lora"]).parts == ["check-lora", "peft"]
    assert parse([]).parts == [part.name for part in PARTS]


def test_nonexistent_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--only", "check-lora,nothing"])
    assert "no part is called nothing" in capsys.readouterr().err
