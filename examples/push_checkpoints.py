"""Fine-tune with transformers' Trainer, push each checkpoint, and serve the best one.

pip install "loraserve[demo-train]"
loraserve demo --model pack                         # in another terminal; it prints a key
export LORASERVE_API_KEY=sk-lora-…                  # and LORASERVE_URL, where it isn't http://127.0.0.1:8000
python examples/push_checkpoints.py [STEPS] [DIR]

If the server is away, the training goes on, and DIR keeps the adapters.
"""

from __future__ import annotations

import random
import sys

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from loraserve import Client
from loraserve.demo.frames import draw_frame
from loraserve.demo.pack import base_dir
from loraserve.sdk.trainer import LoraservePushCallback

TOKENIZER = Tokenizer.from_file(str(base_dir() / "tokenizer.json"))


def answers(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return prompts, each with a butler's answer; the prompts aren't learnt."""
    rows, rng = [], random.Random(seed)
    for frame in (draw_frame(rng) for _ in range(count)):
        prompt = TOKENIZER.encode(frame.prompt).ids
        answer = TOKENIZER.encode(f"Certainly, sir. {frame.render('plain')}<|end|>", add_special_tokens=False).ids
        labels = [-100] * len(prompt) + answer
        rows.append({"input_ids": torch.tensor(prompt + answer), "labels": torch.tensor(labels)})
    return rows


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    filler = {"input_ids": 0, "labels": -100}
    return {key: pad_sequence([row[key] for row in rows], True, value) for key, value in filler.items()}


steps, directory = int((sys.argv[1:] or ["80"])[0]), (sys.argv[2:] or ["butler-checkpoints"])[0]
base = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
every = max(1, steps // 2)
when = {"eval_strategy": "steps", "eval_steps": every, "save_strategy": "steps", "save_steps": every}
how = {"per_device_train_batch_size": 16, "learning_rate": 8e-3, "max_grad_norm": 0.3, "use_cpu": True, "report_to": []}
args = TrainingArguments(directory, max_steps=steps, **when, **how)
push = LoraservePushCallback("butler", metric="eval_loss", tags={"example": "push_checkpoints"}, max_delay_s=30)
Trainer(model, args, padded, answers(16 * steps, seed=0), answers(64, seed=1), callbacks=[push]).train()
if push.unpushed:
    print("kept:", *(one.directory for one in push.unpushed))
else:
    with Client() as client:
        print("live:", client.adapters.get("butler").aliases["live"], "of", [one.model for one in push.pushed])
        print(client.completions.create(model="butler", prompt="describe the sea", temperature=0).choices[0].text)
