"""Adapters of a base whose embeddings were resized, as PEFT saves them: in a batch with others,
each row's logits are those that PEFT computes on the resized base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters_store import LocalStore
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from loraserve.errors import AdapterRejected
from loraserve.limits import LIMITS
from loraserve.memory.devices.base import refuse_extra_rows
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve_kernels.cpu.lora.layout import ExtraRows, PackedAdapter
from loraserve_kernels.errors import TensorMismatch

from .conftest import SMALL, random_tokens, reference_logits
from .modelling.families import load as load_modelled
from .modelling.families import save
from .test_adapter_kinds import KINDS, Serving, open_model, publish, run_together

# PEFT remarks on tied embeddings and on what it saves of them
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

VOCAB = SMALL["vocab_size"]
NUM_EXTRA = 5
BOTH = ["embed_tokens", "lm_head"]
NEW = list(range(VOCAB, VOCAB + NUM_EXTRA))
SAVED = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "modules_to_save": BOTH, "ensure_weight_tying": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "saved": SAVED,
    "saved with the base": {**SAVED, "save_embedding_layers": True},
    "saved and tied": {**SAVED, "ensure_weight_tying": True},
    "embedding saved": {**SAVED, "modules_to_save": BOTH[:1]},
    "copies of the base": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"]},
    "trained tokens": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "trainable_token_indices": [3, *NEW]},
    "trained tokens of both": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj"],
        "trainable_token_indices": {module: [*NEW, 7] for module in BOTH},
    },
    "lora on both": {"r": 3, "lora_alpha": 4, "target_modules": [*BOTH, "v_proj"]},
}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "scaled": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7}),
    "capped": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 5,
            "final_logit_softcapping": 2.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
        },
    ),
}


def save_resized(
    base: Path, directory: Path, config: dict[str, Any], *, seed: int = 1, num_extra: int = NUM_EXTRA
) -> Any:
    """Save a random adapter of the resized base; return the model as PEFT loads it back."""
    settings = dict(config)
    saving = {name: settings.pop(name) for name in ("save_embedding_layers",) if name in settings}
    torch.manual_seed(seed)
    model = open_model(base)
    model.resize_token_embeddings(VOCAB + num_extra)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_" in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif parameter.requires_grad:
                parameter.add_(0.2 * noise)
    model.save_pretrained(directory, **saving)
    oracle = open_model(base)
    oracle.resize_token_embeddings(VOCAB + num_extra)
    return peft.PeftModel.from_pretrained(oracle, directory).eval()


def prompt_of(seed: int, *more: int) -> list[int]:
    return [*random_tokens(5, seed=seed), *more, *random_tokens(3, seed=seed + 50)]


@pytest.mark.parametrize(
    ("base", "config"),
    [*((base, config) for base in ("untied", "tied") for config in CONFIGS), ("scaled", "saved"), ("capped", "saved")],
)
def test_logits_of_resized_base_equal_peft(base: str, config: str, tmp_path: Path) -> None:
    serving = Serving(tmp_path, *BASES[base])
    oracle = save_resized(serving.base_dir, tmp_path / "own", CONFIGS[config])
    own = serving.load(tmp_path / "own")
    assert own.extra_rows is not None
    assert own.num_bytes >= 4 * 2 * NUM_EXTRA * SMALL["hidden_size"]
    other, other_model = serving.adapter(KINDS["lora"], seed=2)
    prompts = [prompt_of(1), prompt_of(2, NEW[0], NEW[4], NEW[0]), prompt_of(3), prompt_of(4, NEW[2])]
    adapters = [None, own, other, own]
    models = [open_model(serving.base_dir), oracle, other_model, oracle]
    widths = [VOCAB, VOCAB + NUM_EXTRA, VOCAB, VOCAB + NUM_EXTRA]
    expected = [reference_logits(model, prompt) for model, prompt in zip(models, prompts, strict=True)]
    for options in ({}, {"last_rows_only": True}):
        together = run_together(serving.decoder, prompts, adapters, **options)
        for got, wanted, width in zip(together, expected, widths, strict=True):
            assert got.shape[1] == VOCAB + NUM_EXTRA
            torch.testing.assert_close(got[:, :width], wanted[-len(got) :], atol=1e-4, rtol=0)
    # a row's extra logits are the same to the bit in any batch
    alone = run_together(serving.decoder, prompts[1:2], [own])[0]
    assert torch.equal(alone[:, VOCAB:], run_together(serving.decoder, prompts, adapters)[1][:, VOCAB:])


def test_modelled_base_equals_peft_on_resized(tmp_path: Path) -> None:
    # its code scales the logits behind the head
    save("CohereForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    base = load_modelled(tmp_path / "base")
    oracle = save_resized(tmp_path / "base", tmp_path / "own", SAVED)
    store, device = LocalStore(tmp_path / "store"), CpuDevice(base.spec, 1 << 30)
    own = load_adapter(store, publish(tmp_path / "own", store), base.spec, device, base).host
    assert isinstance(own, PackedAdapter)
    prompts = [prompt_of(1, NEW[1], NEW[3]), prompt_of(2)]
    models, widths = (oracle, open_model(tmp_path / "base")), (VOCAB + NUM_EXTRA, VOCAB)
    together = run_together(base, prompts, [own, None])
    for got, model, prompt, width in zip(together, models, prompts, widths, strict=True):
        torch.testing.assert_close(got[:, :width], reference_logits(model, prompt), atol=1e-4, rtol=0)


def test_device_without_extra_rows_names_cure() -> None:
    extra = ExtraRows(torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(TensorMismatch, match=r"2 rows beyond the base's, which aren't served there; serve .* on a CPU"):
        refuse_extra_rows(extra, "there")
    refuse_extra_rows(None, "there")


def test_step_without_extra_rows_has_base_width(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {})
    plain, _ = serving.adapter(KINDS["lora"])
    for got in run_together(serving.decoder, [prompt_of(1), prompt_of(2)], [None, plain]):
        assert got.shape[1] == VOCAB


def test_adapters_keep_own_numbers_of_rows(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {})
    pairs: list[tuple[PackedAdapter, Any]] = []
    for number, num_extra in enumerate((2, 9)):
        directory = tmp_path / f"own-{number}"
        oracle = save_resized(serving.base_dir, directory, SAVED, seed=number, num_extra=num_extra)
        pairs.append((serving.load(directory), oracle))
    prompts = [prompt_of(1, VOCAB + 1), prompt_of(2, VOCAB + 8)]
    together = run_together(serving.decoder, prompts, [packed for packed, _ in pairs])
    for got, prompt, (_, oracle), num_extra in zip(together, prompts, pairs, (2, 9), strict=True):
        wanted = reference_logits(oracle, prompt)
        torch.testing.assert_close(got[:, : VOCAB + num_extra], wanted, atol=1e-4, rtol=0)
        assert bool((got[:, VOCAB + num_extra :] == -torch.inf).all())


def compiled(serving: Serving, directory: Path) -> Any:
    read = read_adapter(*((directory / file).read_bytes() for file in (CONFIG_FILE, WEIGHTS_FILE)))
    return compile_adapter(read.config, read.tensors, serving.decoder.spec)


def edit(directory: Path, change: Any) -> None:
    path = directory / WEIGHTS_FILE
    tensors: dict[str, Tensor] = load_file(path)
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, path)


def without(part: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def shrunk(part: str) -> Any:
    return lambda tensors: {name: tensor[:VOCAB] if part in name else tensor for name, tensor in tensors.items()}


COPIES = CONFIGS["copies of the base"]
TOKENS = CONFIGS["trained tokens"]


@pytest.mark.parametrize(
    ("config", "num_extra", "change", "words"),
    [
        (COPIES, NUM_EXTRA, without("lm_head"), "holds no row of lm_head for token"),
        (COPIES, NUM_EXTRA, without("embed_tokens"), "holds no row of embed_tokens for token"),
        (COPIES, NUM_EXTRA, shrunk("lm_head"), "different numbers of rows: lm_head has"),
        (TOKENS, NUM_EXTRA, without("lm_head"), "holds no row of lm_head for token"),
        (COPIES, LIMITS.max_extra_rows + 1, dict, "at most 1,024 such rows are served"),
        ({**COPIES, "target_modules": BOTH, "use_dora": True}, NUM_EXTRA, dict, "DoRA or a bias"),
    ],
    ids=["no head", "no embedding", "head alone as before", "tokens without head", "too many", "dora"],
)
def test_incomplete_resize_is_refused_by_name(
    config: dict[str, Any], num_extra: int, change: Any, words: str, tmp_path: Path
) -> None:
    serving = Serving(tmp_path, "llama", {})
    save_resized(serving.base_dir, tmp_path / "own", config, num_extra=num_extra)
    edit(tmp_path / "own", change)
    with pytest.raises(AdapterRejected) as refused:
        compiled(serving, tmp_path / "own")
    assert any(words in problem for problem in refused.value.problems), refused.value.problems


def test_trained_tokens_need_row_each(tmp_path: Path) -> None:
    serving = Serving(tmp_path, "llama", {"tie_word_embeddings": True})
    config = {**TOKENS, "trainable_token_indices": [NEW[0], NEW[4]]}
    save_resized(serving.base_dir, tmp_path / "own", config)
    edit(tmp_path / "own", without("base_layer"))
    with pytest.raises(AdapterRejected, match=f"no row of lm_head for token {NEW[1]}"):
        compiled(serving, tmp_path / "own")
