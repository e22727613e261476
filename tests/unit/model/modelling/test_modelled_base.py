"""Bases of transformers' code: a mixed batch in chunks has transformers' own logits and PEFT's, and
the native decoder's where both read a family.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from campaigns import default_and_campaign
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters_store import LocalStore
from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.errors import AdapterRejected, AdapterUnservable, ConfigError, MissingTensor, UnexpectedTensor
from loraserve.model.inputs import PooledRows
from loraserve.model.modelling.modelled_base import ModelledBase
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject
from loraserve.registry.health.inspection import inspect_upload
from loraserve_kernels.cpu.lora.layout import PackedAdapter

from ..conftest import PagedRun, edit_json, random_tokens, reference_logits
from ..conftest import load as load_native
from ..test_adapter_kinds import load_packed
from .families import BOTH, HYBRIDS, OTHERS, load, save

# PEFT remarks on tied embeddings and on what it saves of them
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

TOLERANCE = 1e-4
LONG, SHORT = random_tokens(29), random_tokens(21, seed=1)
CUTS = [((7, 1), (13, 11), (1, 8), (8, 1)), ((28, 20), (1, 1)), ((29, 21),)]
"""Steps, each with the tokens of two sequences that it computes."""


def mixed(
    base: Any, cuts: tuple[tuple[int, int], ...], adapters: tuple[PackedAdapter | None, PackedAdapter | None]
) -> list[Tensor]:
    """Return the logits of two sequences whose chunks are computed together."""
    run = PagedRun(base)
    sequences = [run.add(LONG), run.add(SHORT)]
    parts: list[list[Tensor]] = [[], []]
    for counts in cuts:
        first, segments = 0, []
        for adapter, count in zip(adapters, counts, strict=True):
            if adapter is not None:
                segments.append((adapter, first, first + count))
            first += count
        for part, logits in zip(parts, run.step(list(zip(sequences, counts, strict=True)), lora=segments), strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]


def equal(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) < TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", [*OTHERS, *HYBRIDS])
def test_mixed_batch_equals_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "base")
    base = load(tmp_path / "base")
    assert base.spec.implementation == "transformers"
    expected = [reference_logits(model, tokens) for tokens in (LONG, SHORT)]
    for cuts in CUTS:
        for found, wanted in zip(mixed(base, cuts, (None, None)), expected, strict=True):
            assert equal(found, wanted)


@pytest.mark.parametrize("name", BOTH)
def test_native_decoder_has_equal_logits(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "base")
    for found, wanted in zip(
        mixed(load(tmp_path / "base"), CUTS[0], (None, None)),
        mixed(load_native(tmp_path / "base"), CUTS[0], (None, None)),
        strict=True,
    ):
        assert equal(found, wanted)


MIXTURES = ("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM")


def adapt(model: Any, base: ModelledBase, root: Path, seed: int, **options: Any) -> Any:
    """Save an adapter of all linears that it may be of, and return PEFT's model."""
    # PEFT takes any of a mixture's MLPs for its experts, and refuses a Mamba's output
    left_out = ("gate_proj", "up_proj", "down_proj") if base.spec.architecture in MIXTURES else ("mamba.out_proj",)
    names = [
        re.escape(path)
        for slot, path in base.spec.module_paths.items()
        if slot not in ("lm_head", "embed_tokens") and not path.endswith(left_out)
    ]
    outside = [re.escape(base.spec.module_paths[slot]) for slot in ("lm_head", "embed_tokens")]
    if base.spec.is_head_tied:
        outside = outside[1:]
    pattern = rf".*\.\d+\.(?:{'|'.join(names)})|{'|'.join(outside)}"
    settings = {"target_modules": pattern, "task_type": "CAUSAL_LM", **options}
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key and "magnitude" not in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    adapted.save_pretrained(root / f"adapter-{seed}")
    return adapted


def loaded(base: ModelledBase, root: Path, seed: int) -> PackedAdapter:
    return load_packed(base, root / f"adapter-{seed}", LocalStore(root / "store"))


ADAPTED = ["CohereForCausalLM", "DeepseekV3ForCausalLM", "GPTNeoXForCausalLM", "GptOssForCausalLM", "PhiForCausalLM"]
ADAPTED += ["FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM"]
ADAPTED += ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]


# the second adapter is LoRA alone in either case
@pytest.mark.parametrize("use_dora", default_and_campaign([False, True], default=[True]))
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_in_mixed_batch_equal_peft(name: str, use_dora: bool, tmp_path: Path) -> None:
    model = save(name, tmp_path / "base", tie_word_embeddings=False)
    base = load(tmp_path / "base")
    first = adapt(model, base, tmp_path, 0, r=3, lora_alpha=6, use_dora=use_dora)
    second = adapt(model, base, tmp_path, 1, r=8, lora_alpha=4, use_rslora=True)
    adapters = loaded(base, tmp_path, 0), loaded(base, tmp_path, 1)
    for cuts in CUTS[:2]:
        found = mixed(base, cuts, adapters)
        assert equal(found[0], reference_logits(first, LONG))
        assert equal(found[1], reference_logits(second, SHORT))
        alone = mixed(base, cuts, (None, adapters[1]))
        assert equal(alone[0], reference_logits(model, LONG))


@pytest.mark.parametrize("name", ADAPTED)
def test_reference_equals_peft(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "base", tie_word_embeddings=False)
    base = load(tmp_path / "base")
    adapted = adapt(model, base, tmp_path, 0, r=3, lora_alpha=6)
    directory = tmp_path / "adapter-0"
    adapter = read_adapter(
        (directory / "adapter_config.json").read_bytes(), (directory / "adapter_model.safetensors").read_bytes()
    )
    ir = compile_adapter(adapter.config, adapter.tensors, base.spec)
    (found,) = evaluate(base, [Subject([LONG, SHORT], [(ir, 1.0)])])
    for tokens, plain, changed in zip((LONG, SHORT), found.base, found.adapted, strict=True):
        assert equal(plain, reference_logits(model, tokens))
        assert equal(changed, reference_logits(adapted, tokens))


@pytest.mark.parametrize("quantize", ["int8", "int4", "nf4", "fp8"])
@pytest.mark.parametrize("name", ["CohereForCausalLM", "GPTNeoXForCausalLM"])
def test_rounded_linears_equal_reference(name: str, quantize: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    model = save(name, tmp_path / "base", **sizes)
    base = load(tmp_path / "base", quantize=quantize, activation_dtype="float")
    assert base.spec.quantization == quantize
    (reference,) = evaluate(base, [Subject([LONG, SHORT], [], known_base=None)])
    for found, wanted in zip(mixed(base, CUTS[0], (None, None)), reference.base, strict=True):
        assert equal(found, wanted)
    assert not equal(reference.base[0], reference_logits(model, LONG))


def test_pooled_rows_equal_last_hidden_states(tmp_path: Path) -> None:
    model = save("CohereForCausalLM", tmp_path / "base")
    base: Any = load(tmp_path / "base")
    run, states = PagedRun(base), list[Tensor | None]()
    forward = base.forward_pooled

    def pooling(inputs: Any, kv: Any) -> tuple[Tensor, Tensor | None]:
        rows = torch.arange(inputs.token_ids.shape[0])
        found = forward(replace(inputs, logits_rows=rows[:0], pooled=PooledRows(rows, rows[:0], rows)), kv)
        states.append(found[1])
        return found

    base.forward_pooled = pooling
    run.step([(run.add(LONG), len(LONG))], no_logits=True)
    with torch.no_grad():
        expected = model.model(input_ids=torch.tensor([LONG])).last_hidden_state[0]
    assert states[0] is not None
    assert equal(states[0], expected)


def test_adapter_of_unplaced_linear_is_refused(tmp_path: Path) -> None:
    model = save("DeepseekV3ForCausalLM", tmp_path / "base")
    base = load(tmp_path / "base")
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM")
    )
    adapted.save_pretrained(tmp_path / "adapter-0")
    # the first layer alone has an MLP in the place of experts
    weights = tmp_path / "adapter-0/adapter_model.safetensors"
    tensors = {name.replace("self_attn.o_proj", "mlp.up_proj"): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    with pytest.raises(AdapterUnservable, match=r"mlp\.up_proj"):
        loaded(base, tmp_path, 0)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            "query_key_value.lora_B",
            torch.zeros(5, 2),
            r"query_key_value\.lora_B is 5×2",
        ),
        ("dense_h_to_4h.lora_A", torch.full((2, 48), torch.nan), r"dense_h_to_4h\.lora_A in layer 1 has 96 of 96"),
    ],
)
def test_refused_adapter_names_linear(part: str, value: Tensor, message: str, tmp_path: Path) -> None:
    model = save("GPTNeoXForCausalLM", tmp_path / "base")
    base = load(tmp_path / "base")
    adapt(model, base, tmp_path, 0, r=2)
    config, weights = (tmp_path / "adapter-0" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    tensors = load_file(weights)
    name = next(name for name in tensors if f".1.{part}" in name.replace("attention.", "").replace("mlp.", ""))
    save_file({**tensors, name: value}, weights)
    with pytest.raises(AdapterRejected, match=message):
        inspect_upload(config.read_bytes(), weights.read_bytes(), base.spec)


def test_input_scaled_by_ia3_is_refused(tmp_path: Path) -> None:
    model = save("GPTNeoXForCausalLM", tmp_path / "base")
    base = load(tmp_path / "base")
    targets = ["query_key_value", "dense_4h_to_h"]
    settings = peft.IA3Config(target_modules=targets, feedforward_modules=targets[1:], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter-0")
    with pytest.raises(AdapterUnservable, match="feedforward_modules names dense_4h_to_h"):
        loaded(base, tmp_path, 0)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path / "base")
    edit_json(tmp_path / "base/config.json", num_hidden_layers=4)
    with pytest.raises(MissingTensor, match=r"layers\.3"):
        load(tmp_path / "base")


def test_missing_linear_is_named_beside_merged_experts(tmp_path: Path) -> None:
    save("DeepseekV3ForCausalLM", tmp_path / "base")
    (file,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(MissingTensor, match=r"layers\.1\.self_attn\.o_proj\.weight"):
        load(tmp_path / "base")


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path / "base")
    edit_json(tmp_path / "base/config.json", num_hidden_layers=2)
    with pytest.raises(UnexpectedTensor, match=r"layers\.2"):
        load(tmp_path / "base")


def test_context_beyond_model_is_refused(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path / "base")
    with pytest.raises(ConfigError, match="128"):
        load(tmp_path / "base", max_model_len=129)


def test_gpu_is_refused(tmp_path: Path) -> None:
    save("PhiForCausalLM", tmp_path / "base")
    with pytest.raises(ConfigError, match="CPU"):
        load(tmp_path / "base", device="cuda")
