"""The plain evaluation that certificates rest on: it is transformers' and PEFT's, and shares no
code with what it judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraserve.adapters.compiler import compile_adapter
from loraserve.adapters.format.peft_format import read_adapter
from loraserve.adapters.ir import AdapterIR
from loraserve.errors import InvariantViolation
from loraserve.model.reference_model import ReferenceBase, _FormulaPass, evaluate
from loraserve.model.reference_pass import Evaluation, Stopped, Subject, invocation_start
from loraserve.types import BaseSpec
from loraserve_kernels.common.arithmetic import ActivationRounding
from loraserve_kernels.common.rotation import rotate

from .conftest import build_model, load, random_tokens, reference_logits, save_model
from .stored_quantized import group, save_compressed
from .test_adapter_kinds import open_model
from .test_equality import CASES

# PEFT remarks on tied embeddings and on what it saves of them
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

PROMPTS = [random_tokens(5, seed=1), random_tokens(17, seed=2)]
TOLERANCE = 1e-4


def evaluate_alone(
    base: ReferenceBase, prompts: Sequence[Sequence[int]], terms: Sequence[tuple[AdapterIR, float]]
) -> Evaluation:
    (found,) = evaluate(base, [Subject(prompts, terms)])
    return found


def compile_saved(directory: Path, base: BaseSpec) -> AdapterIR:
    files = [(directory / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    adapter = read_adapter(*files)
    return compile_adapter(adapter.config, adapter.tensors, base)


@pytest.mark.parametrize("case", CASES)
def test_base_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    model = build_model(kind, **options)
    evaluation = evaluate_alone(load(save_model(model, tmp_path)), PROMPTS, [])
    for prompt, base, adapted in zip(PROMPTS, evaluation.base, evaluation.adapted, strict=True):
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
        # a product rounds a row by its place: of torch's `cat([a, a]) @ w` with a few rows, the
        # halves were up to 3.8e-6 apart on one thread and 1.1e-5 on two
        torch.testing.assert_close(adapted, base, atol=1e-5, rtol=0)


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
lora = partial(peft.LoraConfig, task_type="CAUSAL_LM")
CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": lora(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        target_modules=LINEARS,
        rank_pattern={"k_proj": 5},
        alpha_pattern={"o_proj": 2},
    ),
    "dora": lora(r=3, lora_alpha=4, use_dora=True, target_modules=[*LINEARS, "embed_tokens", "lm_head"]),
    "biases": lora(r=3, lora_alpha=4, bias="all", target_modules=LINEARS),
    "lora's biases": lora(r=3, lora_alpha=5, lora_bias=True, target_modules=["q_proj", "down_proj"]),
    "whole modules": lora(
        r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "o_proj", "input_layernorm", "norm"]
    ),
    "tokens": lora(r=3, target_modules=["q_proj"], trainable_token_indices=[PROMPTS[0][1], PROMPTS[1][3], 7]),
    "activated": lora(r=3, lora_alpha=5, target_modules=LINEARS, alora_invocation_tokens=PROMPTS[1][6:8]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=2, alpha=3, target_modules=["q_proj", "up_proj"]),
    "lokr": peft.LoKrConfig(r=2, alpha=3, target_modules=["q_proj", "up_proj"]),
    "vera": peft.VeraConfig(r=5, target_modules=["q_proj", "o_proj"]),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapter_logits_equal_peft(kind: str, tmp_path: Path) -> None:
    model = build_model("qwen2", num_hidden_layers=2)
    save_model(model, tmp_path / "base")
    save_random(peft.get_peft_model(open_model(tmp_path / "base"), CONFIGS[kind]), tmp_path / "adapter")
    adapted = peft.PeftModel.from_pretrained(open_model(tmp_path / "base"), tmp_path / "adapter").eval()
    decoder = load(tmp_path / "base")
    evaluation = evaluate_alone(decoder, PROMPTS, [(compile_saved(tmp_path / "adapter", decoder.spec), 1.0)])
    for prompt, own, base in zip(PROMPTS, evaluation.adapted, evaluation.base, strict=True):
        torch.testing.assert_close(own, reference_logits(adapted, prompt), atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
    assert (
        max(float((own - base).abs().max()) for own, base in zip(evaluation.adapted, evaluation.base, strict=True))
        > 0.1
    )


@torch.no_grad()
def save_random(model: Any, directory: Path) -> None:
    """Save the adapter with something else in each of its trained parameters."""
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.3 * noise if parameter.dim() == 1 else 0.7 * noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)


def test_terms_of_a_composition_add_up(tmp_path: Path) -> None:
    model = build_model("llama", num_hidden_layers=2)
    save_model(model, tmp_path / "base")
    decoder = load(tmp_path / "base")
    terms = []
    merged = open_model(tmp_path / "base")
    for kind, weight in (("lora", 0.5), ("loha", -0.3)):
        save_random(peft.get_peft_model(open_model(tmp_path / "base"), CONFIGS[kind]), tmp_path / kind)
        terms.append((compile_saved(tmp_path / kind, decoder.spec), weight))
        alone = peft.PeftModel.from_pretrained(open_model(tmp_path / "base"), tmp_path / kind).merge_and_unload()
        with torch.no_grad():
            for sum_, own, base in zip(merged.parameters(), alone.parameters(), model.parameters(), strict=True):
                sum_.add_(weight * (own - base))
    for prompt, own in zip(PROMPTS, evaluate_alone(decoder, PROMPTS, terms).adapted, strict=True):
        torch.testing.assert_close(own, reference_logits(merged, prompt), atol=TOLERANCE, rtol=0)


def test_quantized_base_is_evaluated_with_computed_weights(tmp_path: Path) -> None:
    model = build_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    decoder = load(save_model(model, tmp_path), quantize="nf4")
    with torch.no_grad():
        for layer in range(decoder.spec.num_layers):
            for module in LINEARS:
                linear = model.model.layers[layer].get_submodule(decoder.spec.module_paths[module])
                linear.weight.copy_(torch.cat(list(decoder.weight_rows(layer, module))))
        model.lm_head.weight.copy_(torch.cat(list(decoder.weight_rows(0, "lm_head"))))
    # its head has int8 weights, whose products round their input
    assert decoder.activation_rounding(0, "lm_head") == ActivationRounding(127, 64)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rounded_to_int8(inputs[0]))
    evaluation = evaluate_alone(decoder, PROMPTS, [])
    for prompt, base in zip(PROMPTS, evaluation.base, strict=True):
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rows rotated by blocks of 64, rounded, and rotated back."""
    turned = rotate(x, 64) / 8
    step = turned.abs().amax(-1, keepdim=True) / 127
    return rotate(torch.round(turned / step) * step, 64) / 8


def test_activations_are_rounded_like_served_products(tmp_path: Path) -> None:
    model = build_model("llama", hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=1)
    decoder = load(save_model(model, tmp_path), quantize="int8")
    with torch.no_grad():
        for module in LINEARS:
            linear = model.model.layers[0].get_submodule(decoder.spec.module_paths[module])
            linear.weight.copy_(torch.cat(list(decoder.weight_rows(0, module))))
            linear.register_forward_pre_hook(lambda _, inputs: rounded_to_int8(inputs[0]))
        model.lm_head.weight.copy_(torch.cat(list(decoder.weight_rows(0, "lm_head"))))
        model.lm_head.register_forward_pre_hook(lambda _, inputs: rounded_to_int8(inputs[0]))
    evaluation = evaluate_alone(decoder, PROMPTS, [])
    for prompt, base, nudged in zip(PROMPTS, evaluation.base, evaluation.nudged, strict=True):
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
        assert 0 < float((nudged - base).square().mean().sqrt()) < 0.05


ROW_PARALLEL = ("o_proj", "down_proj")
"""Linears of which a rank has some inputs."""


def test_activations_are_rounded_in_groups_where_products_do(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 1}
    model = save_compressed(build_model("llama", **sizes), tmp_path, [group(8, "group", group_size=32)])
    decoder = load(tmp_path)
    assert decoder.activation_rounding(0, "q_proj") == ActivationRounding(127, 0, 32, 2)
    assert decoder.activation_rounding(0, "o_proj") == ActivationRounding(127, 0, 32)
    for module in LINEARS:
        linear, is_part = model.model.layers[0].get_submodule(decoder.spec.module_paths[module]), module in ROW_PARALLEL
        round_row = rounded_in_groups if is_part else rounded_but_outliers
        linear.register_forward_pre_hook(lambda _, inputs, round_row=round_row: round_row(inputs[0]))
    evaluation = evaluate_alone(decoder, PROMPTS, [])
    for prompt, base, nudged in zip(PROMPTS, evaluation.base, evaluation.nudged, strict=True):
        torch.testing.assert_close(base, reference_logits(model, prompt), atol=TOLERANCE, rtol=0)
        assert 0 < float((nudged - base).square().mean().sqrt()) < 0.05


def rounded_in_groups(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, 32))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(groups / step) * step, 0.0).flatten(-2)


def rounded_but_outliers(x: torch.Tensor) -> torch.Tensor:
    """Rows whose two largest inputs aren't rounded."""
    largest = x.abs().topk(2).indices
    rest = rounded_in_groups(x.scatter(-1, largest, 0.0))
    return rest.scatter(-1, largest, x.gather(-1, largest))


def test_float_evaluation_nudges_no_activations(small_llama: tuple[Any, Path]) -> None:
    assert evaluate_alone(load(small_llama[1]), PROMPTS, []).nudged == ()


def test_beginning_is_computed_once_for_all_sequences(tmp_path: Path) -> None:
    model = build_model("qwen2", num_hidden_layers=2)
    save_model(model, tmp_path / "base")
    prompts = [PROMPTS[1], [*PROMPTS[1][:9], *PROMPTS[0]], PROMPTS[1][:12]]
    for kind in ("lora", "activated"):
        save_random(peft.get_peft_model(open_model(tmp_path / "base"), CONFIGS[kind]), tmp_path / kind)
        adapted = peft.PeftModel.from_pretrained(open_model(tmp_path / "base"), tmp_path / kind).eval()
        decoder = load(tmp_path / "base")
        subject = Subject(prompts, [(compile_saved(tmp_path / kind, decoder.spec), 1.0)], starts=[16, 4, 0])
        assert len(_FormulaPass(decoder, [subject], lambda: True)._tokens) == 2 * (17 + 5)
        (found,) = evaluate(decoder, [subject])
        for prompt, start, own, base in zip(prompts, (16, 4, 0), found.adapted, found.base, strict=True):
            torch.testing.assert_close(own, reference_logits(adapted, prompt)[start:], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(base, reference_logits(model, prompt)[start:], atol=TOLERANCE, rtol=0)


def test_joint_evaluation_equals_separate_evaluations(tmp_path: Path) -> None:
    model = build_model("qwen2", num_hidden_layers=2)
    save_model(model, tmp_path / "base")
    decoder = load(tmp_path / "base")
    subjects = []
    for kind, prompts in (
        ("lora", PROMPTS),
        ("activated", PROMPTS),
        ("whole modules", PROMPTS[1:]),
        ("tokens", PROMPTS),
    ):
        save_random(peft.get_peft_model(open_model(tmp_path / "base"), CONFIGS[kind]), tmp_path / kind)
        subjects.append(Subject(prompts, [(compile_saved(tmp_path / kind, decoder.spec), 1.0)]))
    alone = [evaluate(decoder, [subject])[0] for subject in subjects]
    # of one of them the base's answers are known: these are taken as they are
    marked = tuple(torch.full_like(rows, 7.0) for rows in alone[3].base)
    subjects[3] = replace(subjects[3], known_base=marked)
    together = evaluate(decoder, subjects)
    for found, expected in zip(together, alone, strict=True):
        for own, other in zip(found.adapted, expected.adapted, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=0)
    for found, expected in zip(together[:3], alone, strict=False):
        for own, other in zip(found.base, expected.base, strict=True):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=0)
    assert together[3].base is marked


def test_the_bases_answers_are_computed_once_for_all(small_llama: tuple[Any, Path]) -> None:
    prompts = [tuple(prompt) for prompt in PROMPTS]
    both = _FormulaPass(load(small_llama[1]), [Subject(prompts, []), Subject(prompts[1:], [])], lambda: True)
    assert [len(rows) for rows in both._sequences] == [5, 17, 5, 17, 17]


def test_unwanted_evaluation_is_stopped(small_llama: tuple[Any, Path]) -> None:
    answers = iter([True, True, False])
    with pytest.raises(Stopped):
        evaluate(load(small_llama[1]), [Subject(PROMPTS, [])], is_wanted=lambda: next(answers))


def test_each_linears_weight_is_read_once(small_llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(small_llama[1])
    read: list[tuple[str, ...]] = []
    weight_rows = decoder.weight_rows
    monkeypatch.setattr(type(decoder), "weight_rows", lambda _, *place: read.append(place[1:]) or weight_rows(*place))
    evaluate(decoder, [Subject(PROMPTS, [])])
    layer = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert read == [("embed_tokens",), *layer * decoder.config.num_layers, ("lm_head",)]


def test_only_consecutive_modules_are_read_together(small_llama: tuple[Any, Path]) -> None:
    with pytest.raises(InvariantViolation, match="v_proj doesn't follow"):
        next(load(small_llama[1]).weight_rows(0, "q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("invocation", "start"), [((), 0), ((1,), 3), ((3, 1), 2), ((1, 3), 1), ((1, 2), None), ((1, 3, 1, 1, 1), None)]
)
def test_activated_adapter_starts_at_last_invocation(invocation: tuple[int, ...], start: int | None) -> None:
    assert invocation_start([5, 1, 3, 1], invocation) == start
