"""A trained base: what each format keeps of its distributions, and mixed batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from gguf_files import dequantized, write_gguf
from real_model import find_real_model
from stored_words import save_awq, save_gptq
from transformers import AutoModelForCausalLM

from benchmarks.formats import FORMATS
from benchmarks.quality import compare, cut, load, logits_of, measure, prose
from loraserve.model.checkpoint.source import local_model_dir
from loraserve.model.compensation.quantizing import quantize_checkpoint
from loraserve.text.tokenizer import Tokenizer
from loraserve.types import QuantizeRequest

from .conftest import PagedRun, random_adapter
from .stored_quantized import group, save_compressed

pytestmark = pytest.mark.real
WIDTH = 256
NUM_ADAPTERS = 32


@pytest.fixture(scope="module")
def base() -> Path:
    return find_real_model()


@pytest.fixture(scope="module")
def windows(base: Path) -> list[list[int]]:
    return cut(Tokenizer(base).encode(prose(None)), 8 * WIDTH, WIDTH)


def test_float32_equals_transformers(base: Path, windows: list[list[int]]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    decoder = load(base, FORMATS["float32"], WIDTH)
    with torch.inference_mode():
        for window in windows:
            ours, theirs = PagedRun(decoder).logits(window, [WIDTH]), model(torch.tensor([window])).logits[0]
            # logits of a trained base are some tens
            assert (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 1e-3
            assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_word_codes_equal_encoded_weights(layout: str, base: Path, windows: list[list[int]], tmp_path: Path) -> None:
    """4 bits in groups of 32 with zeros; GPTQ's with inputs in another order (desc_act)."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    meant = save_gptq(model, tmp_path, desc_act=True) if layout == "gptq" else save_awq(model, tmp_path)
    decoder = load(tmp_path, replace(FORMATS["float32"], activations="float"), WIDTH)
    assert decoder.spec.quantization == "int4"
    with torch.inference_mode():
        for window in windows[::4]:
            ours, theirs = PagedRun(decoder).logits(window, [WIDTH]), meant(torch.tensor([window])).logits[0]
            assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.usefixtures("cache_home")
def test_gguf_keeps_stored_weights(base: Path, windows: list[list[int]], tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    file = write_gguf(model, tmp_path / "base.gguf", "Q4_1")
    folder, meant = local_model_dir(file), dequantized(model, "Q4_1")
    with torch.inference_mode():
        theirs = [meant(torch.tensor([window])).logits[0].log_softmax(-1) for window in windows[::4]]
    # scales are float32 where activations are
    for activations, bound, size in (("float", 1e-6, 1.2), ("auto", 0.005, 1.15)):
        decoder = load(folder, replace(FORMATS["float32"], activations=activations), WIDTH)
        assert decoder.spec.size_bytes < size * file.stat().st_size
        with torch.inference_mode():
            losses = []
            for window, wanted in zip(windows[::4], theirs, strict=True):
                ours = PagedRun(decoder).logits(window, [WIDTH]).log_softmax(-1)
                losses.append((wanted.exp() * (wanted - ours)).sum(-1).mean())
            assert torch.stack(losses).mean() < bound, activations


BOUNDS = {"int8": (0.008, 8.1), "int8-float": (0.008, 8.1), "int4-rounded": (0.5, 5.0)}
"""Of a format's divergence, in nats, and of its bits a weight."""


def test_formats_keep_the_distributions(base: Path, windows: list[list[int]]) -> None:
    found = {one.format: (one.divergence, one.bits) for one in measure(base, list(BOUNDS), [], windows[::2])}
    assert found.keys() == BOUNDS.keys()
    for name, (divergence, bits) in BOUNDS.items():
        assert found[name][0] < divergence, found
        assert found[name][1] <= bits, found


@pytest.mark.parametrize(
    ("int8_modules", "divergence", "bits"),
    [
        (None, 0.065, 5),
        # a minute and a half more
        pytest.param(("v_proj", "o_proj", "down_proj"), 0.045, 6, marks=pytest.mark.campaign),
    ],
)
def test_calibrated_base_preserves_uncalibrated_text(
    int8_modules: tuple[str, ...] | None, divergence: float, bits: float, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(QuantizeRequest(str(base), str(out), int8_modules=int8_modules), lambda *_: None)
    # Python's language reference, of which the calibration text has nothing
    text = "\n\n".join(topics[name] for name in sorted(topics))
    (found,) = measure(base, [], [out], cut(Tokenizer(base).encode(text), 4 * WIDTH, WIDTH))
    assert found.divergence < divergence
    assert found.bits <= bits


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_in_groups_keep_stored_weights(
    bits: int, base: Path, windows: list[list[int]], tmp_path: Path
) -> None:
    """Against the same codes with float activations; rounded outliers would make it 0.004."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    save_compressed(model, tmp_path, [group(bits, "group", group_size=32, symmetric=bits == 8)])
    stored, some = FORMATS["float32"], windows[::2]
    with torch.inference_mode():
        whole = load(tmp_path, replace(stored, activations="float"), WIDTH)
        exact = [logits.clone() for logits in logits_of(whole, some)]
        rounded = load(tmp_path, stored, WIDTH)
        divergence, agreement, _ = compare(logits_of(rounded, some), exact, some)
    assert rounded.spec.arithmetic == f"w{bits}a8-g32-o2+w{bits}a8-g32+fp32"
    assert divergence < 0.002
    assert agreement > 0.96


@pytest.fixture(scope="module", params=["float32", "int8"])
def served(base: Path, request: pytest.FixtureRequest) -> Any:
    return load(base, FORMATS[request.param], WIDTH)


def test_mixed_adapters_equal_solo_runs(served: Any, windows: list[list[int]]) -> None:
    adapters = [random_adapter(served, 4 + seed % 3 * 4, seed=seed) for seed in range(NUM_ADAPTERS)]
    starts = [windows[number % len(windows)][number : number + 9] for number in range(NUM_ADAPTERS)]
    run = PagedRun(served)
    sequences = [run.add(tokens) for tokens in starts]
    lora = [(adapter, 9 * number, 9 * number + 9) for number, adapter in enumerate(adapters)]
    together = run.step([(sequence, 9) for sequence in sequences], lora=lora)
    for number, adapter in enumerate(adapters):
        alone = PagedRun(served)
        (logits,) = alone.step([(alone.add(starts[number]), 9)], lora=[(adapter, 0, 9)])
        assert torch.equal(logits, together[number])
