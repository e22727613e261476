"""Adapters that PEFT trained, of every kind, pushed through the API to a server and answered in one
batch as PEFT's generate answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_answers import generate
from real_model import find_real_model
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

from loraserve import Client
from loraserve.demo.pack import base_dir

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

INVOCATION = [300, 7]
PROMPT = [40, 41, *INVOCATION, 1200, 99]
MAX_TOKENS = 8
LORA = {"r": 4, "lora_alpha": 8}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {**LORA, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {**LORA, "r": 9, "use_rslora": True, "target_modules": "all-linear"},
    "dora": {**LORA, "use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "embeddings": {**LORA, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "saved": {**LORA, "target_modules": ["k_proj"], "modules_to_save": ["lm_head", "embed_tokens", "model.norm"]},
    "activated": {**LORA, "target_modules": ["q_proj", "k_proj", "up_proj"], "alora_invocation_tokens": INVOCATION},
}


def train(base_folder: Path, directory: Path, config: Mapping[str, Any], num_steps: int) -> Any:
    """Train an adapter of a base for a few steps, and return the model as PEFT loads it back."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.004)
    ids = torch.randint(4, 1500, (4, 12))
    ids[:, 3:5] = torch.tensor(INVOCATION)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, directory).eval()


def test_trained_adapters_of_all_kinds_answer_like_peft(server: ServerProcess, tmp_path: Path) -> None:
    check_kinds(server, base_dir(), tmp_path, num_steps=6)


@pytest.mark.real
@pytest.mark.slow
def test_all_adapter_kinds_match_peft_on_trained_base(tmp_path: Path) -> None:
    base = find_real_model()
    flags = ("--memory-budget", "2GiB", "--host-cache", "1GiB")
    server = ServerProcess(tmp_path / "data", model=base, flags=flags)
    server.start()
    try:
        check_kinds(server, base, tmp_path, num_steps=2)
    finally:
        assert server.stop() == 0


def check_kinds(
    server: ServerProcess,
    base: Path,
    folder: Path,
    *,
    num_steps: int,
    kinds: Mapping[str, Mapping[str, Any]] = KINDS,
) -> None:
    key = server.make_tenant("kinds")
    expected = {
        name: generate(train(base, folder / name, config, num_steps), PROMPT, MAX_TOKENS)
        for name, config in kinds.items()
    }
    assert len({tuple(tokens) for tokens, _ in expected.values()}) >= min(4, len(kinds))
    with Client(server.url, api_key=key) as client:
        for name in kinds:
            version = client.adapters.push(str(folder / name), name=name)
            assert version.state == "ready", version.checks

        def ask(name: str) -> tuple[list[int], list[float]]:
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, logprobs=1, return_token_ids=True
            )
            choice = answer.choices[0]
            assert choice.logprobs is not None
            return choice.token_ids, choice.logprobs.token_logprobs

        with ThreadPoolExecutor(len(kinds)) as pool:
            answers = dict(zip(kinds, pool.map(ask, kinds), strict=True))
    for name, (tokens, logprobs) in expected.items():
        got_tokens, got_logprobs = answers[name]
        assert got_tokens == tokens[: len(got_tokens)], name
        assert got_logprobs == pytest.approx(logprobs[: len(got_logprobs)], abs=1e-3), name
