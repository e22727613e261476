"""What `varlen_attention` hands to torch. FlashAttention itself needs a GPU: here a function answers that follows torch's documentation of the call."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

pytest.importorskip("triton")

from loraserve_kernels.errors import ShapeMismatch
from loraserve_kernels.gpu.attention import paged as gpu_attention
from loraserve_kernels.gpu.attention.paged import varlen_attention, varlen_obstacle

from .attending import SCALE, Attending, make_attending

pytestmark = pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no block tables")


def attend_as_documented(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> None:
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert num_splits == 1
    if cu_seq_k is not None:
        assert torch.equal(cu_seq_k.diff(), seqused_k)
    assert max_q == cu_seq_q.diff().max()
    assert max_k == seqused_k.max()
    left, right = window_size
    for i, context in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1]))
        if context == 0:
            out[rows] = 0
            continue
        pages = block_table[i, : -(-context // key.shape[1])].long()
        k, v = (
            cache[pages].flatten(0, 1)[:context].double().repeat_interleave(query.shape[1] // key.shape[2], 1)
            for cache in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * scale
        offset = torch.arange(context) - torch.arange(context - (rows.stop - rows.start), context)[:, None]
        hidden = (offset > right) | ((offset < -left) if left >= 0 else torch.tensor(False))
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).to(out.dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[inspect.BoundArguments]:
    """The calls, as the installed torch's own signature binds them."""
    bound: list[inspect.BoundArguments] = []
    signature = inspect.signature(varlen.varlen_attn_out)

    def answer(*args: Any, **kwargs: Any) -> None:
        bound.append(signature.bind(*args, **kwargs))
        attend_as_documented(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn_out", answer)
    monkeypatch.setattr(gpu_attention, "varlen_obstacle", lambda plan: None)
    return bound


def attend(step: Attending, sliding_window: int | None = None) -> Tensor:
    varlen_attention(
        step.q, step.k_cache, step.v_cache, step.plan, step.out, scale=SCALE, sliding_window=sliding_window
    )
    return step.out


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_torchs_call_answers_as_the_reference_does(
    calls: list[inspect.BoundArguments], num_kv_heads: int, window: int | None
) -> None:
    step = make_attending([1, 7, 1, 0, 33, 1], [40, 7, 0, 3, 50, 300], num_kv_heads=num_kv_heads)
    out, expected = attend(step, window), step.expected(window)
    assert (out.double() - expected).abs().max() < 2e-3
    assert int(step.wide_out.isfinite().sum()) == out.numel()
    assert len(calls) == 1


def test_the_cache_isnt_copied(calls: list[inspect.BoundArguments]) -> None:
    step = make_attending([1], [40])
    attend(step)
    assert calls[0].arguments["key"].data_ptr() == step.k_cache.data_ptr()
    assert calls[0].arguments["value"].data_ptr() == step.v_cache.data_ptr()
    assert calls[0].arguments["key"].stride(0) == step.k_cache.stride(0)


@pytest.mark.parametrize(("implementation", "has_key_starts"), [(None, True), ("FA2", True), ("FA3", False)])
def test_fa3_is_given_no_key_starts(
    calls: list[inspect.BoundArguments],
    monkeypatch: pytest.MonkeyPatch,
    implementation: str | None,
    has_key_starts: bool,
) -> None:
    monkeypatch.setattr(gpu_attention, "current_flash_attention_impl", lambda: implementation)
    attend(make_attending([1, 3], [40, 3]))
    assert (calls[0].arguments["cu_seq_k"] is not None) == has_key_starts


def test_rows_past_the_plans_arent_handed_over(calls: list[inspect.BoundArguments]) -> None:
    step = make_attending([1, 1], [40, 3])
    step.q, step.out = torch.cat([step.q] * 2), torch.full((4, 4, 64), float("nan"), dtype=torch.float16)
    out = attend(step)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


def test_a_plan_on_the_cpu_is_refused() -> None:
    step = make_attending([1], [40])
    with pytest.raises(RuntimeError, match="needs a CUDA device; the plan is on cpu"):
        attend(step)


def test_tensors_that_dont_fit_the_plan_are_refused(calls: list[inspect.BoundArguments]) -> None:
    step = make_attending([1], [40])
    step.k_cache = step.k_cache[:, :1]
    with pytest.raises(ShapeMismatch):
        attend(step)
    assert not calls


@pytest.mark.parametrize(
    ("torch_version", "implementation", "block_size", "capability", "obstacle"),
    [
        ("2.13.0+cu130", None, 256, 9, None),
        ("2.13.0+cu130", None, 16, 9, "blocks of multiples of 256 tokens, not 16"),
        ("2.13.0", "FA2", 384, 8, "blocks of multiples of 256 tokens, not 384"),
        ("2.13.0", "FA3", 16, 9, None),
        ("2.12.1", "FA3", 16, 9, None),
        ("2.12.1", None, 256, 9, "can't be kept from splitting keys"),
        ("3.0.0", None, 512, 9, None),
        ("2.13.0", "FA4", 16, 9, "compute capability 10 alone"),
        ("2.13.0", "FA4", 16, 10, None),
    ],
)
def test_what_torch_offers_decides(
    monkeypatch: pytest.MonkeyPatch,
    torch_version: str,
    implementation: str | None,
    block_size: int,
    capability: int,
    obstacle: str | None,
) -> None:
    plan = make_attending([1], [40]).plan
    plan.device, plan.block_size = torch.device("cuda"), block_size
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(gpu_attention, "current_flash_attention_impl", lambda: implementation)
    found = varlen_obstacle(plan)
    assert found is obstacle or (obstacle is not None and found is not None and obstacle in found)


def test_a_torch_without_block_tables_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(varlen, "varlen_attn_out")
    assert "has no block tables" in str(varlen_obstacle(make_attending([1], [40]).plan))
