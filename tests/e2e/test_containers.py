"""An adapter that PEFT trained, pushed in every container that is read, answers as PEFT answers;
and a bad twin of each is refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from gguf_files import write_gguf_adapter
from peft_answers import generate
from real_model import find_real_model
from safetensors.torch import load_file, save, save_file
from server_process import ServerProcess
from transformers import AutoConfig, AutoModelForCausalLM

from loraserve import Client
from loraserve.demo.pack import base_dir

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

PROMPT = [40, 41, 300, 7, 1200, 99]
MAX_TOKENS = 6
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def train(base_folder: Path, directory: Path, **config: Any) -> Any:
    """Write an adapter of random numbers, and return the model as PEFT loads it back."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape) * 0.02
        if "magnitude" in name:
            parameter.data *= 1 + torch.rand(parameter.shape) / 4
    model.save_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, directory).eval()


def write_archive(source: Path, target: Path, base: Path) -> None:
    shutil.copy(source / CONFIG, target)
    torch.save(load_file(source / WEIGHTS), target / "adapter_model.bin")


def write_shards(source: Path, target: Path, base: Path) -> None:
    shutil.copy(source / CONFIG, target)
    tensors = load_file(source / WEIGHTS)
    places = {name: f"adapter_model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, target / shard)
    (target / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))


def write_mlx(source: Path, target: Path, base: Path) -> None:
    """As mlx_lm.lora writes them: factors transposed, a scale in the place of alpha."""
    config = json.loads((source / CONFIG).read_text())
    parts = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    tensors = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        suffix = next(suffix for suffix in parts if name.endswith(suffix))
        plain = name.removeprefix("base_model.model.").removesuffix(suffix) + parts[suffix]
        tensors[plain] = tensor.T.contiguous()
    data = save(tensors)
    length = int.from_bytes(data[:8], "little")
    # mlx writes that it has no metadata
    header = json.dumps({"__metadata__": None, **json.loads(data[8 : 8 + length])}).encode()
    (target / "adapters.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    parameters = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    kind = "dora" if config["use_dora"] else "lora"
    (target / CONFIG).write_text(
        json.dumps({"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, "iters": 100})
    )


def write_gguf(source: Path, target: Path, base: Path) -> None:
    alpha = json.loads((source / CONFIG).read_text())["lora_alpha"]
    config = AutoConfig.from_pretrained(base)
    write_gguf_adapter(load_file(source / WEIGHTS), config, target / "adapter.gguf", alpha=alpha)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.system, ("exit 1",))


def spoil_archive(target: Path) -> None:
    tensors = torch.load(target / "adapter_model.bin", weights_only=True)
    torch.save({**tensors, "bomb": Bomb()}, target / "adapter_model.bin")


def spoil_shards(target: Path) -> None:
    """The second file is the first once more."""
    first, second = (target / f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2))
    shutil.copy(first, second)


def spoil_mlx(target: Path) -> None:
    config = json.loads((target / CONFIG).read_text())
    (target / CONFIG).write_text(json.dumps({**config, "fine_tune_type": "full"}))


def spoil_gguf(target: Path) -> None:
    data = (target / "adapter.gguf").read_bytes()
    (target / "adapter.gguf").write_bytes(data.replace(b"llama", b"qwen2", 1))


Write = Callable[[Path, Path, Path], None]
CONTAINERS: dict[str, tuple[str, Write, Callable[[Path], None], str]] = {
    "archive": ("lora", write_archive, spoil_archive, "posix.system"),
    "mlx-lora": ("lora", write_mlx, spoil_mlx, "fine_tune_type is full"),
    "mlx-dora": ("dora", write_mlx, spoil_mlx, "fine_tune_type is full"),
    "gguf": ("lora", write_gguf, spoil_gguf, "trained for the architecture 'qwen2'"),
    "shards": ("dora", write_shards, spoil_shards, "is in two of the weights' files"),
}
"""Name → the adapter that is written, how, how it is spoilt, and what is said then."""
ADAPTERS: dict[str, dict[str, Any]] = {
    # PEFT leaves w_pack untrained, which the base doesn't have
    "lora": {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj", "w_pack"]},
    "dora": {"target_modules": ["q_proj", "o_proj", "up_proj"], "use_dora": True},
}


def test_each_container_answers_as_peft(server: ServerProcess, tmp_path: Path) -> None:
    check_containers(server, base_dir(), tmp_path)


@pytest.mark.real
@pytest.mark.slow
def test_each_container_answers_as_peft_on_trained_base(tmp_path: Path) -> None:
    base = find_real_model()
    flags = ("--memory-budget", "2GiB", "--host-cache", "1GiB")
    server = ServerProcess(tmp_path / "data", model=base, flags=flags)
    server.start()
    try:
        check_containers(server, base, tmp_path)
    finally:
        assert server.stop() == 0


def check_containers(server: ServerProcess, base: Path, folder: Path) -> None:
    server.variables = {**server.variables, "LORASERVE_URL": server.url, "LORASERVE_API_KEY": server.make_tenant("c")}
    expected = {
        name: generate(train(base, folder / name, **config), PROMPT, MAX_TOKENS) for name, config in ADAPTERS.items()
    }
    assert expected["lora"][0] != expected["dora"][0]
    for name, (adapter, write, spoil, words) in CONTAINERS.items():
        target = folder / f"as-{name}"
        target.mkdir()
        write(folder / adapter, target, base)
        pushed = server.run("adapter", "push", str(target), "--name", name, "--format", "json")
        assert pushed.returncode == 0, pushed.stderr
        version = json.loads(pushed.stdout)
        assert version["state"] == "ready", version
        found = {check["name"]: check["detail"] for check in version["checks"]}
        assert "container" in found
        assert ("'w_pack'" in found.get("targets", "")) == (name == "archive")
        with Client(server.url, api_key=server.variables["LORASERVE_API_KEY"]) as client:
            answer = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, logprobs=1, return_token_ids=True
            )
        choice = answer.choices[0]
        assert choice.logprobs is not None
        tokens, logprobs = expected[adapter]
        assert choice.token_ids == tokens[: len(choice.token_ids)], name
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs[: len(choice.token_ids)], abs=1e-3), name
        spoil(target)
        refused = server.run("adapter", "push", str(target), "--name", name)
        assert (refused.returncode != 0, words in " ".join(refused.stderr.split())) == (True, True), refused.stderr
    whole = server.run("adapter", "push", str(base), "--name", "whole")
    words = " ".join(whole.stderr.split())
    assert (whole.returncode != 0, f"loraserve serve {base}" in words) == (True, True), words
