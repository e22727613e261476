"""A step as one program is what the decoder's layers compute one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraserve import faults
from loraserve.errors import InvariantViolation
from loraserve.model.backends import step_program
from loraserve.model.backends.step_sizes import buffer_bytes, capacity_of
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors, ModelInputs, PooledRows
from loraserve_kernels.common.modules import ReplacedNorm
from loraserve_kernels.common.plan import make_plan
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, LoraModule, PackedAdapter, pack_adapter
from loraserve_kernels.cpu.program.program import kernel
from loraserve_kernels.errors import InvalidPlan
from loraserve_kernels.ops import warm_up

from .conftest import (
    BLOCK_SIZE,
    PagedRun,
    build_model,
    load,
    random_adapter,
    random_tokens,
    reference_logits,
    save_model,
)
from .stored_quantized import group, save_compressed
from .test_equality import CASES

# heads that the kernels take; widths that fill no whole vectors, for rows' last elements
WIDTHS = {"hidden_size": 72, "intermediate_size": 88, "head_dim": 32}
# of kinds whose heads are as wide together as the hidden states
WHOLE = {"hidden_size": 128, "intermediate_size": 88, "head_dim": 32}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"quantize": "int8"},
    "int8-weights": {"quantize": "int8", "activation_dtype": "float"},
    "int4": {"quantize": "int4"},
    "int4-rounded": {"quantize": "int4", "activation_dtype": "int8"},
    "nf4": {"quantize": "nf4"},
    "fp8": {"quantize": "fp8"},
}
# groups fill these
GROUPED = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def by_layer(decoder: Decoder) -> Decoder:
    """The same decoder without its program."""
    decoder._program = None
    return decoder


def mixed_logits(decoder: Decoder, adapters: list[PackedAdapter]) -> torch.Tensor:
    """Prefills, chunks and decode rows, of the base and of adapters."""
    run = PagedRun(decoder)
    a, b, c, d = (run.add(random_tokens(count, seed=count)) for count in (40, 33, 21, 18))
    first, second = adapters
    found = run.step([(a, 31), (b, 5), (c, 1)], lora=[(first, 0, 31), (second, 36, 37)])
    found += run.step([(b, 13), (a, 1), (c, 19)], lora=[(first, 13, 14), (second, 14, 33)])
    found += run.step([(a, 1), (b, 1), (c, 1), (d, 1)], lora=[(first, 0, 1), (second, 2, 3)], last_rows_only=True)
    found += run.step([(d, 16), (a, 1)], lora=[(first, 16, 17)], last_rows_only=True)
    # as many rows, of which more are kept
    found += run.step([(b, 14), (a, 3)], lora=[(first, 14, 17)])
    return torch.cat(found)


# longrope's factors are as many as half of the small heads' elements
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("mistral-window-of-one", "phi3-longrope")])
def test_each_architecture_equals_transformers_and_layered_decoder(case: str, tmp_path: Path) -> None:
    kind, overrides = CASES[case]
    sizes = WHOLE if kind in ("phi3", "olmoe", "helium") else WIDTHS
    model = build_model(kind, **{**overrides, **sizes})
    save_model(model, tmp_path)
    decoder = load(tmp_path)
    assert decoder._program is not None
    token_ids = random_tokens(50)
    ours = PagedRun(decoder).logits(token_ids, [20, 1, 25])
    torch.testing.assert_close(ours, reference_logits(model, token_ids), rtol=0, atol=1e-4)
    modules = LAYER_MODULES if "moe" not in kind and kind != "mixtral" else LAYER_MODULES[:4]
    adapters = [random_adapter(decoder, rank, seed=rank, modules=modules) for rank in (4, 13)]
    ours = mixed_logits(decoder, adapters)
    torch.testing.assert_close(ours, mixed_logits(by_layer(decoder), adapters), rtol=0, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("two_threads")
def test_each_format_equals_layered_decoder(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads, however small the model is."""
    monkeypatch.setattr(step_program, "_MIN_PARALLEL_WEIGHTS", 0)
    save_model(build_model("qwen2", **GROUPED), tmp_path)
    decoder = load(tmp_path, **FORMATS[format])
    adapters = [random_adapter(decoder, rank, seed=rank) for rank in (4, 13)]
    ours = mixed_logits(decoder, adapters)
    theirs = mixed_logits(by_layer(decoder), adapters)
    # a row that is rounded to int8 a step beside where it was
    rounds = format in ("int8", "int4-rounded", "int4", "nf4", "bfloat16")
    error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert error.max() < (0.03 if rounds else 1e-4)
    assert error.median() < (5e-3 if rounds else 1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.usefixtures("two_threads")
def test_stored_codes_equal_layered_decoder(
    bits: int, is_symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rounded in groups of 32 inputs by the kernels of norms and gates."""
    monkeypatch.setattr(step_program, "_MIN_PARALLEL_WEIGHTS", 0)
    groups = [group(bits, "group", group_size=32, symmetric=is_symmetric)]
    save_compressed(build_model("qwen2", **GROUPED), tmp_path, groups)
    decoder = load(tmp_path)
    assert decoder.spec.arithmetic == f"w{bits}a8-g32-o2+w{bits}a8-g32+fp32"
    assert decoder._program is not None
    adapters = [random_adapter(decoder, rank, seed=rank) for rank in (4, 13)]
    ours = mixed_logits(decoder, adapters)
    theirs = mixed_logits(by_layer(decoder), adapters)
    error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert error.max() < 0.03
    assert error.median() < 1e-3


def test_rows_use_norms_of_assigned_adapter(tmp_path: Path) -> None:
    """gemma's four norms, the last layer's among kept rows and the final one."""
    kind, overrides = CASES["gemma3"]
    save_model(build_model(kind, **{**overrides, **WIDTHS}), tmp_path)
    decoder, layers = load(tmp_path), by_layer(load(tmp_path))
    shapes, num_layers = decoder.spec.modules, decoder.spec.num_layers
    generator = torch.Generator().manual_seed(3)
    names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    places = [(layer, name) for layer in range(num_layers) for name in names] + [(0, "norm")]
    norms = [ReplacedNorm(*place, torch.rand(72, generator=generator) + 0.5) for place in places]
    module = LoraModule(0, "q_proj", torch.randn(2, 72, generator=generator), torch.zeros(shapes["q_proj"][0], 2), 1.0)
    own = pack_adapter([module], num_layers=num_layers, module_shapes=shapes, dtype=torch.float32, norms=norms)
    adapters = [own, random_adapter(decoder, 5)]
    found, expected = mixed_logits(decoder, adapters), mixed_logits(layers, adapters)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    plain = mixed_logits(decoder, adapters[::-1])
    assert not torch.allclose(plain, found, atol=1e-2)
    # and nothing of them stays for the next step
    torch.testing.assert_close(plain, mixed_logits(layers, adapters[::-1]), rtol=0, atol=1e-4)


def test_adapters_of_each_dtype_share_a_step(tmp_path: Path) -> None:
    save_model(build_model("llama", **GROUPED), tmp_path)
    decoder, layers = load(tmp_path, quantize="int8"), by_layer(load(tmp_path, quantize="int8"))
    shapes, generator = decoder.spec.modules, torch.Generator().manual_seed(1)
    adapters = [
        pack_adapter(
            [
                LoraModule(
                    layer,
                    module,
                    torch.randn(6, shapes[module][1], generator=generator) * 0.1,
                    torch.randn(shapes[module][0], 6, generator=generator) * 0.1,
                    0.5,
                )
                for layer in range(decoder.spec.num_layers)
                for module in LAYER_MODULES
            ],
            num_layers=decoder.spec.num_layers,
            module_shapes=shapes,
            dtype=dtype,
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    ]

    def logits(decoder: Decoder) -> torch.Tensor:
        run = PagedRun(decoder)
        sequences = [run.add(random_tokens(9, seed=seed)) for seed in range(5)]
        found = []
        for count in (8, 1):
            rows = [(adapter, count * i, count * i + count) for i, adapter in enumerate(adapters)]
            found += run.step([(sequence, count) for sequence in sequences], lora=rows)
        return torch.cat(found)

    error = (logits(decoder) - logits(layers)).norm(dim=1) / logits(layers).norm(dim=1)
    assert error.max() < 0.03
    assert error.median() < 5e-3


def step_inputs(count: int, **changes: Any) -> ModelInputs:
    settings: dict[str, Any] = {
        "token_ids": torch.tensor(random_tokens(count)),
        "positions": torch.arange(count),
        "slot_mapping": torch.arange(count),
        "query_starts": [0, count],
        "context_lens": [count],
        "block_tables": torch.arange(4, dtype=torch.int32)[None],
        "logits_rows": None,
        "lora": make_plan([], count),
        **changes,
    }
    return ModelInputs(**settings)


def cache_of(decoder: Decoder, num_blocks: int = 4) -> KVTensors:
    num_layers, num_kv_heads, head_dim = decoder.kv_shape
    shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
    k, v = (tuple(torch.zeros(shape) for _ in range(num_layers)) for _ in range(2))
    return KVTensors(k, v, BLOCK_SIZE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(build_model("llama", **WIDTHS), tmp_path_factory.mktemp("llama"))


def test_pooled_rows_and_logits_share_a_step(directory: Path) -> None:
    results = []
    for decoder in (load(directory), by_layer(load(directory))):
        pooled = PooledRows(torch.tensor([2, 5, 9]), torch.tensor([0, 2]), torch.tensor([1]))
        inputs = step_inputs(10, logits_rows=torch.tensor([2, 9]), pooled=pooled)
        logits, states = decoder.forward_pooled(inputs, cache_of(decoder))
        assert logits.shape == (2, 101)
        assert states is not None
        assert states.shape == (1, 72)
        results.append((logits, states))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_nonexistent_slots_and_positions_are_refused(directory: Path) -> None:
    decoder = load(directory, max_model_len=64)
    kv = cache_of(decoder)
    with pytest.raises(InvalidPlan, match="1 slots aren't within the cache's 4 blocks of 16"):
        decoder.forward(step_inputs(3, slot_mapping=torch.tensor([0, 64, 2])), kv)
    with pytest.raises(InvalidPlan, match="1 slots"):
        decoder.forward(step_inputs(3, slot_mapping=torch.tensor([0, 1, -1])), kv)
    for positions in ([0, 1, 64], [-1, 0, 1]):
        with pytest.raises(InvariantViolation, match="position"):
            decoder.forward(step_inputs(3, positions=torch.tensor(positions)), kv)
    assert decoder.forward(step_inputs(3), kv).isfinite().all()


def test_step_results_survive_later_steps(directory: Path) -> None:
    decoder = load(directory)
    kv = cache_of(decoder)
    first = decoder.forward(step_inputs(3), kv)
    kept = first.clone()
    larger = decoder.forward(step_inputs(60), kv)
    assert torch.equal(first, kept)
    assert torch.equal(decoder.forward(step_inputs(3), kv), kept)
    assert torch.equal(larger[:3], kept)


@pytest.mark.parametrize("num_rows", [1, 17, 60, 1000])
@pytest.mark.parametrize(("format", "sizes"), [("float32", WIDTHS), ("int8", GROUPED), ("int4-rounded", GROUPED)])
def test_buffers_stay_within_planned_size(tmp_path: Path, format: str, sizes: dict[str, Any], num_rows: int) -> None:
    """The plan is for processors of the widest vectors, and of two bytes for each code."""
    save_model(build_model("qwen2", **sizes), tmp_path)
    decoder = load(tmp_path, **FORMATS[format])
    program = decoder._program
    assert program is not None
    assert program.num_bytes == 0
    program.hidden(num_rows)
    planned = buffer_bytes(decoder.config, num_rows)
    assert program.num_bytes <= planned <= 1.25 * program.num_bytes
    program.hidden(1)
    assert program.num_bytes <= planned, "a step of fewer rows makes no more"


def test_row_capacity_exceeds_rows_by_at_most_quarter() -> None:
    sizes = [capacity_of(num_rows) for num_rows in range(1, 5000)]
    assert all(num_rows <= size <= max(16, 1.25 * num_rows + 16) for num_rows, size in enumerate(sizes, 1))
    assert all(size < 1.25 * num_rows for num_rows, size in enumerate(sizes, 1) if num_rows > 128)
    assert len(set(sizes)) < 64
    assert [capacity_of(num_rows) for num_rows in (512, 2048)] == [512, 2048]


def test_a_long_step_marks_each_layer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = load(directory)
    kv = cache_of(decoder)

    def marks() -> int:
        before = decoder._progress.num_moves
        decoder.forward(step_inputs(8), kv)
        return decoder._progress.num_moves - before

    marks()
    short = marks()
    monkeypatch.setattr(step_program, "_LONG_PRODUCTS", 0)
    # float32's linears stand between the kernels, and are marks themselves
    assert marks() >= short > decoder.spec.num_layers
    hits: list[int] = []
    with faults.arm("model.layer", lambda: hits.append(1)):
        marks()
    assert len(hits) > decoder.spec.num_layers


def test_step_compiles_no_kernel_after_warmup(directory: Path) -> None:
    kernel.cache_clear()
    warm_up(torch.float32)
    num_compiled = kernel.cache_info().misses
    decoder = load(directory)
    mixed_logits(decoder, [random_adapter(decoder, rank, seed=rank) for rank in (4, 13)])
    used = kernel.cache_info()
    # the adapters' own kernel is only looked up: `apply_lora`'s warm-up has compiled it
    assert used.misses - num_compiled == 1
