"""Random bases, and random adapters of every kind on them, in mixed batches: each row's logits are
those of PEFT for its adapter alone. Bases are floats, or quantized in every way that is read.

LORASERVE_PARITY_CASES says how many adapters are drawn; the seed of a failure is in its message.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from drawn import BASES, EXPERTS, TOKENS, Draw, draw_adapter, draw_base, save_adapter
from gguf_files import dequantized, write_gguf
from stored_words import save_awq, save_fp8, save_gptq
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters_store import LocalStore
from loraserve.engine.activation import find_activation
from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.adapter_metadata import LoadedAdapter
from loraserve.memory.loading.load import load_adapter
from loraserve.model.checkpoint.source import resolve_model_dir
from loraserve.model.decoder import Decoder
from loraserve.types import Digest
from loraserve_kernels.cpu.lora.layout import PackedAdapter

from .conftest import PagedRun, build_model, load, save_model
from .stored_quantized import group, save_compressed
from .test_adapter_kinds import publish

SaveBase = Callable[[Any, Path], Any]
"""Function that saves a model quantized, and returns the float model that the files mean."""


def save_gguf(form: str, model: Any, directory: Path) -> Any:
    directory.mkdir()
    write_gguf(model, directory / "base.gguf", form)
    return dequantized(model, form)


def save_groups(bits: int, is_symmetric: bool, model: Any, directory: Path) -> Any:
    settings = {"group_size": 32} if bits == 4 else {}
    groups = [group(bits, "group" if bits == 4 else "channel", symmetric=is_symmetric, **settings)]
    return save_compressed(model, directory, groups)


GGUF: Mapping[str, SaveBase] = {
    f"gguf {form}": partial(save_gguf, form) for form in ("F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
}
LINEAR_BY_LINEAR: Mapping[str, SaveBase] = {
    "gptq": save_gptq,
    "gptq desc_act": partial(save_gptq, desc_act=True, sym=True),
    "gptq 8 bits": partial(save_gptq, bits=8, group_size=-1, sym=True),
    "awq": save_awq,
    "fp8 blocks": partial(save_fp8, block=(32, 32)),
    "compressed-tensors int4": partial(save_groups, 4, True),
    "compressed-tensors int4 with zeros": partial(save_groups, 4, False),
    "compressed-tensors int8": partial(save_groups, 8, True),
}
"""Formats that aren't written here for experts, which transformers keeps in one tensor."""
# kinds whose options the files hold
GGUF_KINDS = ("llama", "qwen2", "qwen3", "olmo2", "phi3", "mixtral", "gemma", "exaone4", "olmo3", "olmoe")
GGUF_KINDS += ("seed-oss", "ernie4.5", "hunyuan", "glm4", "qwen2-moe")
WIDTHS = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 3, "vocab_size": 304}

NUM_CASES = int(os.environ.get("LORASERVE_PARITY_CASES", "210"))
PER_BASE = 6
NUM_DEFAULT_SEEDS = 10
TOLERANCE = 1e-4


@dataclass
class Row:
    """A sequence of a batch, and what PEFT says of it."""

    what: str
    model: Any
    token_ids: list[int]
    adapter: PackedAdapter | None
    start: int
    expected: Tensor


class Drawn:
    """A base, and rows of a batch: one of the base alone,
    the others each with an adapter of its own.
    """

    def __init__(self, seed: int, root: Path, draws: int = PER_BASE, *, is_quantized: bool = False) -> None:
        self.seed, rng = seed, random.Random(seed)
        self.kind, options = draw_base(rng)
        if is_quantized:
            self._save_quantized(rng, options, root / "base")
        else:
            base_dir = save_model(build_model(self.kind, seed=seed, **options), root / "base")
            self.model = AutoModelForCausalLM.from_pretrained(
                base_dir, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            self.decoder: Decoder = load(base_dir)
        self.store = LocalStore(root / "store")
        self.adapters: list[tuple[Draw, Path, Any]] = []
        for i in range(draws):
            kind, num_layers = self.kind.split(" in ")[0], self.decoder.spec.num_layers
            draw = draw_adapter(rng, kind, options, num_layers)
            while draw.edit == "16 bits" and self.decoder.spec.is_head_quantized:
                # a copy that is near to a quantized head is left out, unlike in PEFT
                draw = draw_adapter(rng, kind, options, num_layers)
            directory = root / f"adapter-{i}"
            self.adapters.append((draw, directory, save_adapter(self.model, draw, directory, 1000 * seed + i)))

    def _save_quantized(self, rng: random.Random, options: dict[str, Any], directory: Path) -> None:
        """Save and load the base in a format that is drawn."""
        options.update(WIDTHS, num_key_value_heads=rng.choice((1, 2, 4)))
        if self.kind == "phi3":
            options["sliding_window"] = None
        if self.kind == "qwen2-moe":
            options["shared_expert_intermediate_size"] = 64
        formats = dict(GGUF) if self.kind in GGUF_KINDS else {}
        if self.kind not in EXPERTS:
            formats |= LINEAR_BY_LINEAR
        if not formats:
            pytest.skip(f"no format is written here for {self.kind}")
        name = rng.choice(sorted(formats))
        self.model = formats[name](build_model(self.kind, seed=self.seed, **options), directory)
        # the files may have been written from a copy
        self.model.tie_weights()
        self.decoder = load(resolve_model_dir(str(directory)), activation_dtype="float")
        self.kind = f"{self.kind} in {name}"

    def rows(self) -> list[Row]:
        """The same ones at each call."""
        self.rng = random.Random(self.seed)
        token_ids = self._tokens(8)
        rows = [Row("base", self.model, token_ids, None, 0, logits_of(self.model, token_ids))]
        for i, (draw, directory, model) in enumerate(self.adapters):
            loaded = self.load(directory)
            invocation = loaded.metadata.invocation_token_ids
            token_ids = self._tokens(7 + i)
            if invocation and self.rng.random() < 0.7:
                at = self.rng.randrange(len(token_ids) - len(invocation))
                token_ids[at : at + len(invocation)] = invocation
            activation = find_activation(Digest("a"), invocation, token_ids)
            assert isinstance(loaded.host, PackedAdapter)
            what = f"{self.kind}, {draw.kind}, {draw.config.to_dict()}"
            adapter = None if activation is None else loaded.host
            start = 0 if activation is None else activation.start
            rows.append(Row(what, model, token_ids, adapter, start, logits_of(model, token_ids)))
        self.rng.shuffle(rows)
        return rows

    def load(self, directory: Path) -> LoadedAdapter:
        device = CpuDevice(self.decoder.spec, 1 << 30)
        return load_adapter(self.store, publish(directory, self.store), self.decoder.spec, device, self.decoder)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(TOKENS) for _ in range(count)]


@torch.no_grad()
def logits_of(model: Any, token_ids: list[int]) -> Tensor:
    # by name: PEFT looks for an aLoRA's invocation in what is passed so
    logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def differences(drawn: Drawn, rows: list[Row]) -> list[float]:
    """The largest difference of each row: all but the last token in one batch, in two chunks for
    some; then the last of each in another.
    """
    run = PagedRun(drawn.decoder)
    sequences = [run.add(row.token_ids) for row in rows]
    parts: list[list[Tensor]] = [[] for _ in rows]
    cuts = [drawn.rng.randrange(1, len(row.token_ids)) for row in rows]
    steps = [
        cuts,
        [len(row.token_ids) - 1 - cut for row, cut in zip(rows, cuts, strict=True)],
        [1] * len(rows),
    ]
    for counts in steps:
        chosen = [i for i, count in enumerate(counts) if count]
        segments, first = [], 0
        for i in chosen:
            row, done = rows[i], sequences[i].num_computed
            acting = max(0, row.start - done)
            if row.adapter is not None and acting < counts[i]:
                segments.append((row.adapter, first + acting, first + counts[i]))
            first += counts[i]
        for i, logits in zip(chosen, run.step([(sequences[i], counts[i]) for i in chosen], lora=segments), strict=True):
            parts[i].append(logits)
    return [float((torch.cat(logits) - row.expected).abs().max()) for row, logits in zip(rows, parts, strict=True)]


def own_error(row: Row) -> float:
    """How far float32 may be from float64: PEFT's own error, or what half a unit in the last place
    of each weight changes, in three draws.

    Attention whose scores are in the thousands (an untrained LoHa's) makes a hundred times as much
    of a rounding as others. A single order of additions, PEFT's, may be lucky.
    """
    model = copy.deepcopy(row.model).double()
    # what transformers takes for experts by itself knows no float64
    model.set_experts_implementation("eager")
    exact = logits_of(model, row.token_ids)
    errors = [float((row.expected - exact).abs().max())]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                signed = 2 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype) - 1
                weight.copy_(weights[name] * (1 + 2**-24 * signed))
        errors.append(float((logits_of(model, row.token_ids) - exact).abs().max()))
    return max(errors)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed < NUM_DEFAULT_SEEDS else pytest.mark.campaign)
        for seed in range(-(-NUM_CASES // PER_BASE))
    ],
)
def test_random_adapters_in_mixed_batch_equal_peft(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed, tmp_path)
    rows = drawn.rows()
    for row, difference in zip(rows, differences(drawn, rows), strict=True):
        # an adapter may make a base so steep that PEFT's own rounding is more than the tolerance
        assert difference < TOLERANCE or difference < 3 * own_error(row), f"seed {seed}: {row.what}: {difference:.3g}"


@pytest.mark.usefixtures("cache_home")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 5 else pytest.mark.campaign) for seed in range(60)]
)
def test_adapters_on_stored_weights_equal_peft(seed: int, tmp_path: Path) -> None:
    drawn = Drawn(seed, tmp_path, is_quantized=True)
    rows = drawn.rows()
    for row, difference in zip(rows, differences(drawn, rows), strict=True):
        assert difference < TOLERANCE or difference < 3 * own_error(row), f"seed {seed}: {row.what}: {difference:.3g}"


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "olmo2"])
def test_output_norms_equal_peft(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = ["post_attention_layernorm", "post_feedforward_layernorm"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=saved, task_type="CAUSAL_LM")
    monkeypatch.setitem(globals(), "draw_base", lambda rng: (kind, dict(BASES)[kind]))
    monkeypatch.setitem(globals(), "draw_adapter", lambda *_: Draw("output norms", config))
    drawn = Drawn(0, tmp_path, draws=2)
    rows = drawn.rows()
    assert all(row.adapter is None or len(row.adapter.norms) == 2 * drawn.decoder.spec.num_layers for row in rows)
    for row, difference in zip(rows, differences(drawn, rows), strict=True):
        assert difference < TOLERANCE, f"{row.what}: {difference:.3g}"
