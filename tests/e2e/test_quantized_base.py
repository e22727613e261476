"""Servers on bases that are quantized already: adapters of every kind answer as PEFT does on the
weights that the codes mean.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import dequantized, write_gguf
from server_process import ServerProcess
from stored_words import save_gptq
from transformers import AutoModelForCausalLM

from loraserve.demo.pack import base_dir

from .test_adapter_kinds import check_kinds

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

FLOAT = ("--activation-dtype", "float")
"""PEFT rounds no activations."""


def test_adapters_answer_on_gguf_base_as_peft(tmp_path: Path, cache_home: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    file = write_gguf(model, tmp_path / "toy.Q4_1.gguf", "Q4_1")
    dequantized(model, "Q4_1").save_pretrained(tmp_path / "float")
    server = ServerProcess(tmp_path / "data", model=file, flags=FLOAT, variables={"XDG_CACHE_HOME": str(cache_home)})
    server.start()
    try:
        assert server.admin().base().id == "toy.Q4_1"
        check_kinds(server, tmp_path / "float", tmp_path, num_steps=6)
    finally:
        assert server.stop() == 0


def test_adapters_answer_on_gptq_base_as_peft(tmp_path: Path) -> None:
    meant = save_gptq(
        AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32), tmp_path / "gptq", desc_act=True
    )
    meant.save_pretrained(tmp_path / "float")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base_dir() / name, tmp_path / "gptq")
    server = ServerProcess(tmp_path / "data", model=tmp_path / "gptq", flags=FLOAT)
    server.start()
    try:
        check_kinds(server, tmp_path / "float", tmp_path, num_steps=6)
    finally:
        assert server.stop() == 0
