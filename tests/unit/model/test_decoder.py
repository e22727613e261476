"""What the decoder owes to rows that share a step: their own adapter, their own bits,
their own failures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraserve.errors import InvariantViolation
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import select_rows
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, PackedAdapter

from .conftest import PagedRun, build_model, load, random_adapter, random_tokens, reference_logits, save_model

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"dtype": torch.float16},
    "int8": {"quantize": "int8"},
}
# heads and widths that the compiled kernels take
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = build_model("qwen3", **SIZES)
    return model, save_model(model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module", params=FORMATS)
def decoder(request: pytest.FixtureRequest, saved: tuple[Any, Path]) -> Decoder:
    return load(saved[1], **FORMATS[request.param])


def with_adapter(adapter: PackedAdapter) -> Any:
    """A model of transformers whose weights have the adapter's update added."""
    model = build_model("qwen3", **SIZES)
    with torch.no_grad():
        for layer, block in enumerate(model.model.layers):
            for module in LAYER_MODULES:
                part = block.self_attn if module in ("q_proj", "k_proj", "v_proj", "o_proj") else block.mlp
                update = adapter.lora_b(layer, module).T @ adapter.lora_a(layer, module)
                getattr(part, module).weight.add_(0.5 * update)
    return model


def test_sequence_has_the_same_bits_alone_and_cobatched(decoder: Decoder) -> None:
    """Same chunks, other neighbours: prefills, decode rows and adapters of all kinds."""
    token_ids = random_tokens(30)
    adapter = random_adapter(decoder, 8)
    alone = PagedRun(decoder)
    sequence = alone.add(token_ids)
    expected = [alone.step([(sequence, 27)], lora=[(adapter, 0, 27)])[0]]
    expected += [alone.step([(sequence, 1)], lora=[(adapter, 0, 1)])[0] for _ in range(3)]

    crowd = PagedRun(decoder, seed=5)
    sequence = crowd.add(token_ids)
    others = [crowd.add(random_tokens(40, seed=seed)) for seed in range(4)]
    other_adapter = random_adapter(decoder, 3, seed=9)
    crowd.step([(others[0], 20), (others[1], 5)])
    found = [
        crowd.step([(others[0], 1), (sequence, 27), (others[2], 9)], lora=[(adapter, 1, 28), (other_adapter, 28, 37)])[
            1
        ]
    ]
    found.append(crowd.step([(sequence, 1), (others[3], 16)], lora=[(adapter, 0, 1), (other_adapter, 1, 17)])[0])
    found.append(crowd.step([(others[0], 1), (others[1], 1), (sequence, 1)], lora=[(adapter, 2, 3)])[2])
    found.append(crowd.step([(others[2], 30), (others[3], 2), (sequence, 1)], lora=[(adapter, 32, 33)])[2])
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), step


def test_int8_stays_near_float32(saved: tuple[Any, Path]) -> None:
    model, directory = saved
    token_ids = random_tokens(60)
    exact = reference_logits(model, token_ids)
    ours = PagedRun(load(directory, quantize="int8")).logits(token_ids, [60])
    error = (ours - exact).norm(dim=1) / exact.norm(dim=1)
    # Rounding a row and a channel to 127 steps of their largest element, about three deviations,
    # costs 1 % a linear; thirteen of them follow each other, and their errors add up as independent
    # ones do.
    assert error.mean() < 0.01 * 13**0.5 * 1.25
    assert error.max() < 0.08


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"dtype": torch.float16}], ids=["bfloat16", "float16"])
def test_half_precision_weights_stay_near_float32(saved: tuple[Any, Path], options: dict[str, Any]) -> None:
    model, directory = saved
    token_ids = random_tokens(60)
    exact = reference_logits(model, token_ids)
    decoder = load(directory, **options)
    error = (PagedRun(decoder).logits(token_ids, [25, 30]) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < (0.03 if options["dtype"] == torch.bfloat16 else 0.003)
    assert decoder.spec.size_bytes < load(directory).spec.size_bytes * 0.7


def test_each_row_gets_assigned_adapter(saved: tuple[Any, Path]) -> None:
    """Base rows and rows of two adapters in one step equal models with the updates merged; only the
    wanted rows' logits are computed.
    """
    model, directory = saved
    run = PagedRun(load(directory))
    first, second = random_adapter(run.decoder, 4), random_adapter(run.decoder, 13, seed=1)
    tokens = [random_tokens(count, seed=count) for count in (20, 31, 18)]
    references = [model, with_adapter(first), with_adapter(second)]
    a, b, c = (run.add(token_ids) for token_ids in tokens)
    prefill = run.step([(a, 19), (b, 30), (c, 17)], lora=[(first, 19, 49), (second, 49, 66)], last_rows_only=True)
    decode = run.step([(a, 1), (b, 1), (c, 1)], lora=[(first, 1, 2), (second, 2, 3)])
    for i, (reference, token_ids) in enumerate(zip(references, tokens, strict=True)):
        ours = torch.cat((prefill[i], decode[i]))
        torch.testing.assert_close(ours, reference_logits(reference, token_ids)[-2:], rtol=0, atol=1e-4)


def test_wanted_row_bits_are_independent_of_unwanted_rows(decoder: Decoder) -> None:
    adapter = random_adapter(decoder, 8)
    results = []
    for last_rows_only in (False, True):
        run = PagedRun(decoder)
        a, b = run.add(random_tokens(20)), run.add(random_tokens(9, seed=1))
        logits = run.step([(a, 20), (b, 9)], lora=[(adapter, 0, 20)], last_rows_only=last_rows_only)
        results.append([part[-1] for part in logits])
    assert all(torch.equal(all_rows, one) for all_rows, one in zip(*results, strict=True))


def test_step_without_wanted_rows_writes_same_cache(decoder: Decoder) -> None:
    adapter = random_adapter(decoder, 8)
    caches = []
    for no_logits in (False, True):
        run = PagedRun(decoder)
        [logits] = run.step([(run.add(random_tokens(20)), 20)], lora=[(adapter, 0, 20)], no_logits=no_logits)
        assert logits.shape == (0 if no_logits else 20, 101)
        caches.append(torch.stack(run.kv.k + run.kv.v).nan_to_num(7.0))
    assert torch.equal(caches[0], caches[1])


def test_only_the_rows_own_slots_are_written(decoder: Decoder) -> None:
    run = PagedRun(decoder)
    a, b = run.add(random_tokens(20)), run.add(random_tokens(9, seed=1))
    run.step([(a, 20), (b, 9)])
    for layer in (*run.kv.k, *run.kv.v):
        written = layer.isfinite().all(-1).all(1)
        assert int(written.sum()) == 29
        assert int(layer.isnan().all(-1).all(1).sum()) == written.numel() - 29


def test_non_finite_adapter_harms_no_other_row(decoder: Decoder) -> None:
    bad, good = random_adapter(decoder, 4), random_adapter(decoder, 4, seed=1)
    bad.data[100] = float("nan")
    results = []
    for is_cobatched in (False, True):
        run = PagedRun(decoder)
        a, b, c = (run.add(random_tokens(12, seed=seed)) for seed in range(3))
        if is_cobatched:
            _, base, adapted = run.step([(a, 12), (b, 12), (c, 12)], lora=[(bad, 0, 12), (good, 24, 36)])
        else:
            base, adapted = run.step([(b, 12), (c, 12)], lora=[(good, 12, 24)])
        results.append(torch.cat((base, adapted)))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


def test_trimmed_adapters_require_ascending_logit_rows(saved: tuple[Any, Path]) -> None:
    run = PagedRun(load(saved[1]))
    adapter = random_adapter(run.decoder, 2)
    a = run.add(random_tokens(5))
    from loraserve.model.inputs import ModelInputs

    inputs = ModelInputs(
        token_ids=torch.tensor(a.token_ids),
        positions=torch.arange(5),
        slot_mapping=torch.arange(5),
        query_starts=[0, 5],
        context_lens=[5],
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        logits_rows=torch.tensor([3, 1]),
        lora=make_plan([(adapter, 0, 5)], 5),
    )
    with pytest.raises(InvariantViolation, match="ascend"):
        run.decoder.forward(inputs, run.kv)


def test_trimmed_plan_keeps_wanted_rows_with_adapters(saved: tuple[Any, Path]) -> None:
    decoder = load(saved[1])
    first, second = random_adapter(decoder, 2), random_adapter(decoder, 3)
    plan = make_plan([(first, 2, 5), (second, 5, 9)], 12)
    assert plan is not None
    trimmed = select_rows(plan, [0, 4, 5, 8, 11])
    assert trimmed is not None
    assert [(s.adapter, s.row_start, s.row_end) for s in trimmed.segments] == [(first, 1, 2), (second, 2, 4)]
    assert trimmed.num_tokens == 5
    assert select_rows(plan, [0, 1, 9]) is None
