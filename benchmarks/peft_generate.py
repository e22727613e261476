"""The peer: transformers and PEFT generate for a batch in which every row has an adapter of its
own, in process.

Reads one JSON object a line, ``{"concurrency": 8, "mode": "mixed"}`` (or ``"base"``), and answers
each with a line of results, so that its runs can take turns with another server's. There's no
server here and the rows start and end together, which is the kindest case for this peer.

    echo '{"concurrency": 8, "mode": "mixed"}' \\
        | python benchmarks/peft_generate.py benchmarks/models/S --adapters 8
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def generate(
    model: Any, names: list[str], request: dict[str, Any], options: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Generate for ``concurrency`` fresh random prompts, and say how fast."""
    concurrency, vocab = request["concurrency"], model.config.vocab_size
    prompts = [[rng.randrange(260, vocab) for _ in range(options.prompt_tokens)] for _ in range(concurrency)]
    ids = torch.tensor(prompts)
    is_mixed = request["mode"] == "mixed"
    extra = {"adapter_names": [names[i % len(names)] for i in range(concurrency)]} if is_mixed else {}
    with nullcontext() if is_mixed else model.disable_adapter():
        start, cpu = time.perf_counter(), time.process_time()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=options.output_tokens,
            min_new_tokens=options.output_tokens,
            pad_token_id=3,
            **extra,
        )
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    tokens = concurrency * (out.shape[1] - options.prompt_tokens)
    return {
        "tokens_per_s": tokens / wall_s,
        "wall_s": wall_s,
        "output_tokens": tokens,
        "cpu_ms_per_token": 1e3 * cpu_s / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.model.with_name(f"{options.model.name}-adapters")
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    names = [f"lora-{i:04d}" for i in range(options.adapters)]
    model = PeftModel.from_pretrained(base, str(folder / names[0]), adapter_name=names[0]).eval()
    for name in names[1:]:
        model.load_adapter(str(folder / name), adapter_name=name)
    rng = random.Random(options.seed)
    print(json.dumps({"ready": True}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            print(json.dumps(generate(model, names, json.loads(line), options, rng)), flush=True)


if __name__ == "__main__":
    main()
