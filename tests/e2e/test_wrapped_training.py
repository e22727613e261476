"""Adapters whose models were wrapped while they were trained answer as PEFT does with the model in
its wrapper, on the plain base and on the base of images and text; bad twins are refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_answers import generate
from real_model import find_real_model
from safetensors.torch import load_file, save_file
from server_process import ServerProcess
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from loraserve import Client, errors
from loraserve.demo.pack import base_dir

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

PROMPT = [40, 41, 300, 7, 1200, 99]
MAX_TOKENS = 6
WEIGHTS = "adapter_model.safetensors"
IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
"""An encoder of images, which no text reaches."""


def add_adapter(model: Any, targets: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=targets))


def train(model: Any, targets: Any) -> Any:
    """Train an adapter on the model for a few steps."""
    adapted = add_adapter(model, targets)
    own = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.02)
    text = torch.tensor([[*PROMPT, 17, 23, 31, 17, 23, 31]])
    for _ in range(4):
        adapted(input_ids=text, attention_mask=torch.ones_like(text), labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.eval()


def load_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_compiled(base: Path, folder: Path) -> Any:
    """Train a compiled model, and save as PEFT does."""
    adapted = train(torch.compile(load_base(base), backend="eager"), ["q_proj", "v_proj", "down_proj"])
    adapted.save_pretrained(folder)
    assert all("._orig_mod." in name for name in load_file(folder / WEIGHTS))
    return adapted


def save_checkpointed(base: Path, folder: Path) -> Any:
    """Train a model with checkpointed layers, and save as loops do that gather shards."""
    model = load_base(base)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    adapted = train(model, ["k_proj", "o_proj", "gate_proj"])
    adapted.save_pretrained(folder)
    own = {name: parameter.data for name, parameter in adapted.named_parameters() if "lora_" in name}
    assert all("._checkpoint_wrapped_module." in name for name in own)
    save_file(own, folder / WEIGHTS)
    return adapted


def wrap(base: Path) -> LlavaForConditionalGeneration:
    """Put the base in a model of images and text."""
    decoder = load_base(base)
    size = decoder.config.vocab_size
    vision = {"model_type": "clip_vision_model", **IMAGES, "image_size": 16, "patch_size": 8}
    config = LlavaConfig(
        text_config=decoder.config.to_dict(),
        vision_config=vision,
        image_token_index=size - 1,
        tie_word_embeddings=decoder.config.tie_word_embeddings,
    )
    config._attn_implementation = "eager"
    model = LlavaForConditionalGeneration(config).float().eval()
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.lm_head.load_state_dict(decoder.lm_head.state_dict())
    model.generation_config = decoder.generation_config
    return model


def save_of_images(base: Path, folder: Path) -> Any:
    """Train the decoder of a model of images and text, by an expression of its paths."""
    adapted = train(wrap(base), r".*language_model.*\.(q_proj|up_proj)")
    adapted.save_pretrained(folder)
    assert all(".language_model." in name for name in load_file(folder / WEIGHTS))
    return adapted


WRAPPED = {
    "compiled": (save_compiled, "left out _orig_mod, torch.compile's"),
    "checkpointed": (save_checkpointed, "left out _checkpoint_wrapped_module, activation checkpointing's"),
    "of-images": (save_of_images, "left out language_model, the decoder's path in a model of images and text"),
}
"""Name → how its adapter is trained and saved, and what its version says of names."""


def push(server: ServerProcess, folder: Path, name: str, notes: tuple[str, ...]) -> None:
    pushed = server.run("adapter", "push", str(folder), "--name", name, "--format", "json")
    assert pushed.returncode == 0, pushed.stderr
    version = json.loads(pushed.stdout)
    assert version["state"] == "ready", version
    details = " ".join(check["detail"] for check in version["checks"])
    for note in notes:
        assert note in details


def check_answer(server: ServerProcess, name: str, expected: tuple[list[int], list[float]]) -> None:
    with Client(server.url, api_key=server.variables["LORASERVE_API_KEY"]) as client:
        answer = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0, logprobs=1, return_token_ids=True
        )
    choice, (tokens, logprobs) = answer.choices[0], expected
    assert choice.logprobs is not None
    assert choice.token_ids == tokens[: len(choice.token_ids)], name
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs[: len(choice.token_ids)], abs=1e-3), name


def repeat_plainly(folder: Path) -> None:
    """Add a tensor's plain name beside that of the wrapped model."""
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    plain = ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
    assert plain != name
    save_file({**tensors, plain: tensors[name].clone()}, folder / WEIGHTS)


def start(server: ServerProcess) -> None:
    server.start()
    server.variables = {**server.variables, "LORASERVE_URL": server.url, "LORASERVE_API_KEY": server.make_tenant("w")}


def write_base_of_images(base: Path, folder: Path) -> Path:
    model = wrap(base)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base_of_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_of_images(base_dir(), tmp_path_factory.mktemp("images") / "base")


@pytest.fixture(scope="module")
def server_of_images(base_of_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("wrapped") / "data", model=base_of_images)
    start(server)
    yield server
    assert server.stop() == 0


def check_plain_base(server: ServerProcess, base: Path, folder: Path) -> None:
    """Push what wrapped models gave to the plain base, with the bad twin of each."""
    alone = generate(load_base(base), PROMPT, MAX_TOKENS)
    for name, (save, note) in WRAPPED.items():
        target = folder / name
        expected = generate(save(base, target), PROMPT, MAX_TOKENS)
        assert expected[1] != pytest.approx(alone[1], abs=1e-2)
        push(server, target, name, (note,))
        check_answer(server, name, expected)
        if name == "of-images":
            continue
        repeat_plainly(target)
        refused = server.run("adapter", "push", str(target), "--name", name)
        words = " ".join(refused.stderr.split())
        assert (refused.returncode != 0, "are one tensor" in words) == (True, True), words


def check_base_of_images(server: ServerProcess, base: Path, folder: Path) -> None:
    """Ask a base of images and text, and an adapter trained in the whole model; push bad twins."""
    adapted = save_of_images(base, folder / "decoder")
    push(server, folder / "decoder", "decoder", ())
    check_answer(server, "decoder", generate(adapted, PROMPT, MAX_TOKENS))
    check_answer(server, base_id(server), generate(wrap(base), PROMPT, MAX_TOKENS))
    # text alone would not train the encoder
    add_adapter(wrap(base), r".*vision_tower.*\.(q_proj|v_proj)").save_pretrained(folder / "encoder")
    refused = server.run("adapter", "push", str(folder / "encoder"), "--name", "encoder")
    words = " ".join(refused.stderr.split())
    assert (refused.returncode != 0, "reads images" in words) == (True, True), words
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content: Any = [{"type": "text", "text": "hi"}, image]
    with (
        Client(server.url, api_key=server.variables["LORASERVE_API_KEY"]) as client,
        pytest.raises(errors.InvalidRequest, match=r"content\.1 is 'image_url': this model reads text only"),
    ):
        client.chat.completions.create(model="decoder", messages=[{"role": "user", "content": content}])


def base_id(server: ServerProcess) -> str:
    with Client(server.url, api_key=server.variables["LORASERVE_API_KEY"]) as client:
        return client.base().id


def test_wrapped_models_answer_as_peft(server: ServerProcess, tmp_path: Path) -> None:
    server.variables = {**server.variables, "LORASERVE_URL": server.url, "LORASERVE_API_KEY": server.make_tenant("w")}
    check_plain_base(server, base_dir(), tmp_path)


def test_base_of_images_answers_as_peft(server_of_images: ServerProcess, tmp_path: Path) -> None:
    check_base_of_images(server_of_images, base_dir(), tmp_path)


@pytest.mark.real
@pytest.mark.slow
def test_wrapped_models_answer_as_peft_on_trained_base(tmp_path: Path) -> None:
    base = find_real_model()
    flags = ("--memory-budget", "2GiB", "--host-cache", "1GiB")
    images = write_base_of_images(base, tmp_path / "images")
    for model, check in ((base, check_plain_base), (images, check_base_of_images)):
        server = ServerProcess(tmp_path / f"data-{model.name}", model=model, flags=flags)
        start(server)
        try:
            check(server, base, tmp_path / f"adapters-{model.name}")
        finally:
            assert server.stop() == 0
