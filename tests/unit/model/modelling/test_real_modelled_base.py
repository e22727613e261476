"""A trained base by transformers' code, beside the native decoder, in the default formats."""

from __future__ import annotations

import pytest
import torch
from real_model import find_real_model

from loraserve.text.tokenizer import Tokenizer

from ..conftest import PagedRun
from ..conftest import load as load_native
from .families import load

pytestmark = pytest.mark.real

TEXT = "The Great Lakes are five lakes between Canada and the United States. Lake Superior is the largest, and"


@pytest.mark.parametrize(
    ("quantize", "max_kl"), [("none", 1e-6), pytest.param("int8", 0.02, marks=pytest.mark.campaign), ("int4", 0.2)]
)
def test_trained_modelled_base_agrees_with_native_base(quantize: str, max_kl: float) -> None:
    directory = find_real_model()
    tokens = list(Tokenizer(directory).encode(TEXT))
    found = []
    for base in (load_native(directory, quantize=quantize), load(directory, quantize=quantize)):
        run = PagedRun(base)
        found.append(torch.cat(run.step([(run.add(tokens), len(tokens))])).log_softmax(-1))
    kl = (found[0].exp() * (found[0] - found[1])).sum(-1).mean()
    assert 0.0 <= abs(float(kl)) < max_kl
    assert (found[0].argmax(-1) == found[1].argmax(-1)).float().mean() > (0.99 if quantize == "none" else 0.8)
