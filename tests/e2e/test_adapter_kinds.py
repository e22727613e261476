"""Adapters as PEFT saves them, of kinds beyond plain LoRA, pushed through the API to a server and answered as PEFT answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

from loraserve import Client
from loraserve.demo.pack import base_dir

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}
PROMPT = [40, 41, 300, 7, 1200, 99]


def train(directory: Path, config: dict[str, Any]) -> Any:
    """A few steps on the bundled base, saved; returns the model."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    ids = torch.randint(4, 1500, (4, 12))
    for _ in range(4):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, count: int) -> tuple[list[int], list[float]]:
    ids, logprobs = list(PROMPT), []
    for _ in range(count):
        row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(PROMPT) :], logprobs


def test_trained_adapters_of_each_kind_are_pushed_and_answered_as_peft_answers(
    server: ServerProcess, tmp_path: Path
) -> None:
    key = server.make_tenant("kinds")
    models = {name: train(tmp_path / name, config) for name, config in KINDS.items()}
    with Client(server.url, api_key=key) as client:
        for name in KINDS:
            client.adapters.push(str(tmp_path / name), name=name)
        for name, model in models.items():
            answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=1)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            _, expected = greedy(model, 6)
            assert logprobs.token_logprobs == pytest.approx(expected[: len(logprobs.token_logprobs)], abs=1e-3)
