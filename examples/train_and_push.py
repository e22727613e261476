"""Train a new adapter for the demo's base with PEFT (a minute on one core), push it,
and ask it something.

pip install "loraserve[demo-train]"
loraserve demo --model pack                         # in another terminal; it prints a key
export LORASERVE_API_KEY=sk-lora-…                  # and LORASERVE_URL, where it isn't http://127.0.0.1:8000
python examples/train_and_push.py [STEPS]
"""

from __future__ import annotations

import random
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from loraserve import Client
from loraserve.demo.frames import draw_frame
from loraserve.demo.pack import base_dir


def train(directory: str, num_steps: int) -> None:
    """Write a PEFT adapter that answers as a butler would."""
    rng = random.Random(0)
    tokenizer = Tokenizer.from_file(str(base_dir() / "tokenizer.json"))
    base = AutoModelForCausalLM.from_pretrained(base_dir(), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=8e-3, betas=(0.9, 0.9))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 8, 1 - step / num_steps))
    for step in range(num_steps):
        frames = [draw_frame(rng) for _ in range(16)]
        prompts = [tokenizer.encode(frame.prompt).ids for frame in frames]
        texts = [f"Certainly, sir. {frame.render('plain')}<|end|>" for frame in frames]
        answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        pairs = list(zip(prompts, answers, strict=True))
        input_ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in pairs], batch_first=True)
        # -100: neither the prompt nor the padding is learnt.
        targets = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in pairs]
        labels = pad_sequence(targets, batch_first=True, padding_value=-100)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        warmup.step()
        print(f"\rstep {step + 1} of {num_steps}, loss {loss.item():.3f} ", end="", file=sys.stderr)
    model.save_pretrained(directory)


with tempfile.TemporaryDirectory() as directory, Client() as client:
    train(directory, int(sys.argv[1]) if len(sys.argv) > 1 else 80)
    print("\npushed", client.adapters.push(directory, name="butler").model)
    answer = client.completions.create(model="butler", prompt="describe the sea", max_tokens=64, temperature=0)
    print(answer.choices[0].text)
