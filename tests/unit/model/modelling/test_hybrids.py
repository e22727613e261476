"""Bases with recurrent layers: what they have beside those whose layers all attend."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from loraserve.errors import AdapterUnservable, InvariantViolation, UnknownArchitecture
from loraserve.model.inputs import KVTensors
from loraserve.model.modelling.mixers import MIXERS, Recurrence, group_sequences
from loraserve.model.reference_model import evaluate
from loraserve.model.reference_pass import Subject
from loraserve.model.states import StateUse

from ..conftest import PagedRun, random_tokens, randomize, reference_logits, save_model
from .families import HYBRIDS, build, load, save
from .test_modelled_base import CUTS, LONG, SHORT, adapt, equal, loaded, mixed

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def whole_model() -> Any:
    """Return a small random Qwen 3.5 that reads images too."""
    text = build("Qwen3_5ForCausalLM").config
    config = transformers.Qwen3_5Config(
        text_config=text.to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": text.hidden_size,
            "num_position_embeddings": 16,
        },
        image_token_id=97,
        video_token_id=98,
        vision_start_token_id=99,
        vision_end_token_id=100,
    )
    config._attn_implementation = "eager"
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    randomize(model)
    return model


def test_text_half_equals_transformers(tmp_path: Path) -> None:
    model = whole_model()
    save_model(model, tmp_path / "base")
    base = load(tmp_path / "base")
    assert base.spec.architecture == "Qwen3_5ForConditionalGeneration"
    for found, tokens in zip(mixed(base, CUTS[0], (None, None)), (LONG, SHORT), strict=True):
        assert equal(found, reference_logits(model, tokens))


def test_adapter_of_whole_model_changes_text_half(tmp_path: Path) -> None:
    model = whole_model()
    save_model(model, tmp_path / "base")
    base = load(tmp_path / "base")
    pattern = r".*language_model\.layers\.\d+\.(?:linear_attn\.\w+_proj\w*|self_attn\.[qkvo]_proj|mlp\.\w+_proj)"
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=4, target_modules=pattern)).eval()
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter-0")
    found = mixed(base, CUTS[0], (loaded(base, tmp_path, 0), None))
    assert equal(found[0], reference_logits(adapted, LONG))
    assert not equal(found[0], reference_logits(model, LONG))
    assert equal(found[1], reference_logits(model, SHORT))


def test_spec_names_layers_of_linears(tmp_path: Path) -> None:
    save("Qwen3_5ForCausalLM", tmp_path)
    spec = load(tmp_path).spec
    assert spec.has_recurrent_state
    layers = {spec.module_paths[module]: every for module, every in spec.module_layers.items()}
    assert layers == {
        **{f"self_attn.{name}_proj": (3,) for name in "qkvo"},
        **{f"linear_attn.{name}": (0, 1, 2) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")},
        "linear_attn.out_proj": (0, 1, 2),
    }


def test_tensors_of_layer_without_linear_are_refused(tmp_path: Path) -> None:
    model = save("Qwen3_5ForCausalLM", tmp_path / "base")
    base = load(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter-0")
    weights = tmp_path / "adapter-0/adapter_model.safetensors"
    save_file({name.replace("layers.3", "layers.1"): one for name, one in load_file(weights).items()}, weights)
    with pytest.raises(AdapterUnservable, match=r"self_attn\.q_proj' in layer 1; this base has it in layer 3 alone"):
        loaded(base, tmp_path, 0)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_rounded_hybrid_equals_reference(quantize: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "linear_value_head_dim": 32}
    save("Qwen3_5ForCausalLM", tmp_path / "base", **sizes)
    base = load(tmp_path / "base", quantize=quantize, activation_dtype="float")
    (reference,) = evaluate(base, [Subject([LONG, SHORT], [], known_base=None)])
    for found, wanted in zip(mixed(base, CUTS[0], (None, None)), reference.base, strict=True):
        # of this random model, transformers' own float32 is 2e-4 from its float64
        assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())


def test_step_without_slots_is_refused(tmp_path: Path) -> None:
    save("Lfm2ForCausalLM", tmp_path)
    base: Any = load(tmp_path)
    run = PagedRun(base)
    run.kv = KVTensors(run.kv.k, run.kv.v, run.kv.block_size)
    with pytest.raises(InvariantViolation, match="slots"):
        run.step([(run.add(SHORT), 5)])


def test_skipped_token_is_no_state(tmp_path: Path) -> None:
    save("Lfm2ForCausalLM", tmp_path)
    base: Any = load(tmp_path)
    run = PagedRun(base)
    sequence = run.add(SHORT)
    run.step([(sequence, 5)])
    sequence.num_computed += 1
    with pytest.raises(InvariantViolation, match="has seen 5 tokens"):
        run.step([(sequence, 3)])


@pytest.mark.parametrize("name", HYBRIDS)
def test_mixer_keeps_own_linears(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path / "base")
    base = load(tmp_path / "base")
    paths = {path for path, module in model.named_modules() if type(module).__name__ in MIXERS}
    before = {path: dict(base._skeleton.model.get_submodule(path)._modules) for path in paths}
    mixed(base, CUTS[2], (None, None))
    assert paths
    for path in paths:
        mixer = base._skeleton.model.get_submodule(path)
        assert isinstance(mixer.forward, Recurrence)
        assert mixer._modules == before[path]


def test_adapted_hybrid_continues_from_state(tmp_path: Path) -> None:
    model = save("Qwen3_5ForCausalLM", tmp_path / "base", tie_word_embeddings=False)
    base = load(tmp_path / "base")
    adapted = adapt(model, base, tmp_path, 0, r=3, lora_alpha=6)
    adapter = loaded(base, tmp_path, 0)
    run = PagedRun(base)
    first, second = run.add(LONG), run.add(LONG)
    for _ in range(len(LONG)):
        changed, plain = run.step([(first, 1), (second, 1)], lora=[(adapter, 0, 1)])
    assert equal(changed[0], reference_logits(adapted, LONG)[-1])
    assert equal(plain[0], reference_logits(model, LONG)[-1])


def test_groups_keep_chunks_from_decoding_sequences() -> None:
    # a token, a first token, a chunk, and three more tokens
    starts, lens = [0, 1, 2, 6, 7, 8, 9], [5, 1, 9, 4, 3, 8]
    groups = [
        (group.numbers, torch.arange(9)[group.rows].tolist()) for group in group_sequences(starts, lens, max_decoding=3)
    ]
    assert groups == [((0, 3, 4), [0, 6, 7]), ((5,), [8]), ((1,), [1]), ((2,), [2, 3, 4, 5])]


def test_groups_end_at_borders() -> None:
    # a token, a chunk of tokens 5 to 9, a token and a chunk that end at borders
    starts, lens = [0, 1, 5, 6, 9], [5, 9, 8, 3]
    borders = {1: [6, 8], 2: [8], 3: [3]}
    groups = [
        (group.numbers, group.part, torch.arange(9)[group.rows].tolist())
        for group in group_sequences(starts, lens, 8, lambda number: borders.get(number, ()))
    ]
    assert groups == [
        ((0,), 0, [0]),
        ((1,), 0, [1]),
        ((1,), 1, [2, 3]),
        ((1,), 2, [4]),
        ((2,), 0, [5]),
        ((3,), 0, [6, 7, 8]),
    ]


@pytest.mark.parametrize("name", HYBRIDS)
def test_sequence_from_snapshot_equals_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    base: Any = load(tmp_path)
    wanted = reference_logits(model, LONG)
    for border in (3, 12, 19):
        run = PagedRun(base)
        first, second = run.add(LONG), run.add(LONG)
        first.state = StateUse(first.state.slot, kept=((border, 2),))
        assert equal(run.step([(first, len(LONG))])[0], wanted)
        # its keys and values are there too
        second.blocks, second.num_computed = list(first.blocks), border
        second.state = StateUse(second.state.slot, resumed=2)
        (found,) = run.step([(second, len(LONG) - border - 1)])
        second.state = StateUse(second.state.slot)
        assert equal(torch.cat((found, *run.step([(second, 1)]))), wanted[border:]), border


WIDE = {"linear_num_value_heads": 32, "linear_value_head_dim": 8}
"""Fields of a gated delta rule with as many heads as torch computes at once.

Of fewer, a row of its sigmoid is rounded by the row's place in the batch.
"""


@pytest.mark.parametrize("name", HYBRIDS)
def test_group_size_changes_no_bit(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, **(WIDE if name.startswith("Qwen") else {}))
    base: Any = load(tmp_path)
    found = []
    for size in (1, 2, 4):
        run = PagedRun(base)
        assert run.kv.states is not None
        run.kv.states.group_size = size
        sequences = [run.add(random_tokens(16, seed=i)) for i in range(4)]
        parts = run.step([(sequence, 4) for sequence in sequences])
        for number in range(6):
            # a chunk between decoding sequences, then all decode
            parts += run.step([(one, 4 if i == 1 and number == 2 else 1) for i, one in enumerate(sequences)])
        found.append(torch.cat(parts))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_decoding_sequences_share_call_of_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("Lfm2ForCausalLM", tmp_path)
    base: Any = load(tmp_path)
    code = sys.modules[type(base._skeleton.model).__module__]
    update, shapes = code.causal_conv1d_update, []

    def counted(x: torch.Tensor, *rest: Any) -> Any:
        shapes.append(tuple(x.shape))
        return update(x, *rest)

    monkeypatch.setattr(code, "causal_conv1d_update", counted)
    run = PagedRun(base)
    sequences = [run.add(random_tokens(9, seed=i)) for i in range(4)]
    for sequence in sequences:
        run.step([(sequence, 3)])
    assert shapes == []
    run.step([(sequence, 4 if i == 2 else 1) for i, sequence in enumerate(sequences)])
    width = base._skeleton.config.hidden_size
    assert shapes == [(3, width, 1)] * 2


def test_mixer_with_confused_sequences_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("Lfm2ForCausalLM", tmp_path)
    code = sys.modules[type(build("Lfm2ForCausalLM")).__module__]
    update = code.causal_conv1d_update
    monkeypatch.setattr(code, "causal_conv1d_update", lambda *inputs: update(*inputs).flip(0))
    with pytest.raises(UnknownArchitecture, match="other logits in a batch of two sequences"):
        load(tmp_path)
