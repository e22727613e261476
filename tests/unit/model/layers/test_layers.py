from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from loraserve.model.config.model_config import parse_config
from loraserve.model.layers.norms import RMSNorm, cap_softly, geglu, swiglu
from loraserve.model.layers.rotary import RotaryEmbedding, rotate

from ..conftest import SMALL
from ..test_equality import LINEAR, LLAMA3, YARN


@pytest.mark.parametrize("shape", [(1, 48), (33, 48), (5, 3, 16), (2, 5000)])
def test_rms_norm_matches_definition(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x).double(), exact, rtol=1e-5, atol=1e-6)


def test_rms_norm_maps_zero_row_to_zero() -> None:
    x = torch.zeros(2, 8)
    x[1] = 3
    given = x.clone()
    normed = RMSNorm(torch.ones(8), 1e-6)(x)
    assert normed[0].tolist() == [0.0] * 8
    assert torch.equal(x, given)


def test_rms_norm_row_bits_are_independent_of_batch() -> None:
    x, norm = torch.randn(100, 768), RMSNorm(torch.randn(768), 1e-5)
    everything = norm(x)
    assert all(torch.equal(norm(x[a:b].clone()), everything[a:b]) for a, b in [(0, 1), (3, 5), (40, 72), (1, 100)])


def test_swiglu_multiplies_second_half_by_activated_first() -> None:
    gate, up = torch.randn(5, 7), torch.randn(5, 7)
    torch.testing.assert_close(swiglu(torch.cat((gate, up), 1)), gate * gate.sigmoid() * up)


def test_geglu_multiplies_second_half_by_activated_first() -> None:
    gate, up = torch.randn(5, 7), torch.randn(5, 7)
    activated = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(geglu(torch.cat((gate, up), 1)), activated * up)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 5e5}, LINEAR, LLAMA3, YARN], ids=lambda r: r["rope_type"]
)
def test_rotation_equals_transformers_far_into_the_context(rope: dict[str, float | str]) -> None:
    theirs = LlamaConfig(**{**SMALL, "max_position_embeddings": 70_000, "head_dim": 64, "rope_parameters": dict(rope)})
    ours = parse_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]}, {})
    positions = torch.tensor([0, 1, 31, 32, 4095, 65_537, 69_999])
    x = torch.randn(len(positions), 6, 64)
    cos, sin = LlamaRotaryEmbedding(theirs)(x, positions[None])
    # theirs wants [batch, heads, tokens, head_dim]
    expected = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    rotate(x, *RotaryEmbedding(ours.rope, 64, 70_000).at(positions))
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1000, 2048, 40_000])
@pytest.mark.parametrize("gate", [swiglu, geglu, lambda x: cap_softly(x.clone(), 3.0)], ids=["swiglu", "geglu", "cap"])
def test_gate_row_bits_ignore_batch_and_thread_count(gate: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
    x = torch.randn(70, 2 * width) * 4
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        everything = gate(x)
        for threads in (1, 3, 5):
            torch.set_num_threads(threads)
            for count in (1, 2, 5, 17, 33, 64, 70):
                assert torch.equal(gate(x[:count]), everything[:count]), (threads, count)
    finally:
        torch.set_num_threads(num_threads)
