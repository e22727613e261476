"""Adapters of every kind over several processes answer as in one: of linears that are cut, of
layers that are shared out, or both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from pairwise import cover_pairs
from rank_pool import RankedBase, RankPool

from loraserve.memory.devices.cpu import CpuDevice
from loraserve.memory.loading.load import load_adapter
from loraserve.model.checkpoint.whole_weights import WholeWeights
from loraserve.model.decoder import Decoder
from loraserve_kernels.common.modules import ReplacedRows
from loraserve_kernels.cpu.lora.layout import LAYER_MODULES, LoraModule, PackedAdapter, ReplacedNorm

from ..conftest import build_model, load, random_tokens, save_model
from ..test_adapter_kinds import KINDS, LINEARS, Serving, open_model, publish, run_together
from ..test_equality import CASES
from ..test_expert_adapters import config_of_linears, linears_of, save_linears

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
GRIDS = ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2))
"""Ranks of a stage, and stages."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
PARTS = [True, pytest.param(False, marks=pytest.mark.campaign)]
"""Whether a test takes the grids of its cover, in which each pair of its parameters occurs, or the
others.
"""
PEFT_KINDS: dict[str, Any] = {
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=3, alpha=4, target_modules=["q_proj", "o_proj", "up_proj"]),
    "lokr": peft.LoKrConfig(r=3, alpha=4, target_modules=["v_proj", "o_proj", "down_proj"]),
    "saved": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": peft.LoraConfig(r=2, target_modules=["o_proj"], trainable_token_indices=[3, 17, 40, 98]),
    "biases": peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], bias="lora_only"),
}


def module(decoder: Any, layer: int, name: str, rank: int, generator: torch.Generator, *, plain: bool) -> LoraModule:
    """A module with all that a tuner can give it, or with LoRA alone."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    out, width = decoder.spec.modules[name]
    rows = None
    if not plain:
        count, row_width = (width, out) if name == "embed_tokens" else (out, width)
        ids = torch.randperm(count, generator=generator)[: count // 3].sort().values.int()
        rows = ReplacedRows(ids, draw(len(ids), row_width) * (1.0 if name == "embed_tokens" else row_width**-0.5))
    return LoraModule(
        layer,
        name,
        draw(rank, width) * width**-0.5,
        draw(out, rank) * max(1, rank) ** -0.5,
        0.5 if plain else draw(rank).abs(),
        dora_delta=None if plain else 0.2 * draw(out),
        bias_delta=None if plain or name == "embed_tokens" else 0.3 * draw(out),
        row_overrides=rows,
    )


def changes(decoder: Decoder, seed: int) -> tuple[list[LoraModule], list[ReplacedNorm]]:
    generator = torch.Generator().manual_seed(seed)
    plain, names = seed % 2 == 0, [*LAYER_MODULES[seed % 3 :]]
    modules = [
        module(decoder, layer, name, (1 + 5 * seed + layer) % 19, generator, plain=plain)
        for layer in range(decoder.spec.num_layers)
        for name in names
    ]
    if seed % 4:
        modules += [module(decoder, 0, name, 3, generator, plain=plain) for name in ("lm_head", "embed_tokens")]
    places = [(1, "mlp_norm"), (0, "norm"), (2, "attention_norm")]
    norms = [ReplacedNorm(*place, 1 + 0.2 * torch.randn(64, generator=generator)) for place in places]
    return modules, [] if plain else norms


def grids(axes: tuple[list[Any], ...], case: tuple[Any, ...], *, is_cover: bool) -> list[tuple[int, int]]:
    """Return the grids of a case that belong to a part."""
    cover = cover_pairs(*axes, GRIDS)
    return [grid for grid in GRIDS if ((*case, grid) in cover) == is_cover]


@pytest.mark.parametrize("is_cover", PARTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_mixed_adapter_batch_matches_single_process(
    kind: str, dtype: torch.dtype, is_cover: bool, rank_pool: RankPool, tmp_path: Path
) -> None:
    options = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {"tie_word_embeddings": True}
    directory = save_model(build_model(kind, **SIZES, **options), tmp_path)
    whole = load(directory)
    prompts = [random_tokens(7 + i, seed=i) for i in range(6)]
    work = [changes(whole, seed) for seed in range(5)]
    device = CpuDevice(whole.spec, 1 << 28, dtype)
    packed: list[PackedAdapter | None] = [device.pack(m, torch.float32, norms) for m, norms in work]
    expected = run_together(whole, prompts, [*packed, None])
    plain = run_together(whole, prompts, [None] * 6)
    for grid in grids((["llama", "qwen2"], DTYPES), (kind, dtype), is_cover=is_cover):
        with rank_pool.load(directory, *grid, held=dtype) as base:
            hosts = [base.device.pack(m, torch.float32, norms) for m, norms in work]
            for host, (modules, norms) in zip(hosts, work, strict=True):
                assert base.device.footprint_of(host) == base.device.footprint(modules, torch.float32, norms)
            placed = [*(base.place(host) for host in hosts), None]
            for i, (got, wanted) in enumerate(zip(run_together(base, prompts, placed), expected, strict=True)):
                torch.testing.assert_close(got, wanted, atol=1e-4 * max(1, float(wanted.abs().max())), rtol=0)
                assert i == 5 or float((wanted - plain[i]).abs().max()) > 0.05


@pytest.mark.parametrize(
    "grids", [((4, 1), (1, 3), (2, 2)), pytest.param(((2, 1), (1, 2)), marks=pytest.mark.campaign)], ids=str
)
def test_each_peft_kind_matches_single_process(
    grids: tuple[tuple[int, int], ...], rank_pool: RankPool, tmp_path: Path
) -> None:
    serving = Serving(tmp_path, "llama", {**SIZES, "mlp_bias": True})
    directories = []
    for seed, config in enumerate(KINDS.values()):
        serving.adapter(config, seed=seed)
        directories.append(tmp_path / f"adapter-{seed}")
    for name, config in PEFT_KINDS.items():
        directories.append(save_peft(serving.base_dir, config, tmp_path / name))
    prompts = [random_tokens(9, seed=i) for i in range(len(directories))]
    expected = run_together(serving.decoder, prompts, [serving.load(directory) for directory in directories])
    for grid in grids:
        with rank_pool.load(serving.base_dir, *grid) as base:
            placed = [place(serving, directory, base) for directory in directories]
            for got, wanted in zip(run_together(base, prompts, placed), expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4 * max(1, float(wanted.abs().max())), rtol=0)


@pytest.mark.parametrize("is_cover", PARTS)
@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe"])
def test_expert_adapters_match_single_process(
    case: str, dtype: torch.dtype | None, is_cover: bool, rank_pool: RankPool, tmp_path: Path
) -> None:
    kind, options = CASES[case]
    wide = {**SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    serving = Serving(tmp_path, kind, {**options, **wide})
    config, whole = config_of_linears(serving), CpuDevice(serving.decoder.spec, 1 << 30, dtype)
    few = {name: tensor for name, tensor in linears_of(serving, config, seed=2).items() if ".layers.1." in name}
    targets = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in few})
    directories = [
        save_linears(tmp_path / "all", config, linears_of(serving, config, seed=1)),
        save_linears(tmp_path / "few", {**config, "target_modules": targets}, few),
    ]
    refs = [publish(directory, serving.store) for directory in directories]
    hosts = [load_adapter(serving.store, ref, serving.decoder.spec, whole).host for ref in refs]
    prompts = [random_tokens(8 + i, seed=i) for i in range(3)]
    expected = run_together(serving.decoder, prompts, [*hosts, None])
    for grid in grids((["mixtral", "qwen2-moe"], [None, torch.int8]), (case, dtype), is_cover=is_cover):
        with rank_pool.load(serving.base_dir, *grid, held=dtype) as base:
            assert base.spec.experts == serving.decoder.spec.experts
            loaded = [load_adapter(serving.store, ref, base.spec, base.device, base.weights) for ref in refs]
            placed = [*(base.place(one.host) for one in loaded), None]
            for got, wanted in zip(run_together(base, prompts, placed), expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4 * max(1, float(wanted.abs().max())), rtol=0)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_ranks_load_and_drop_adapters_in_step(grid: tuple[int, int], rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model("llama", **SIZES), tmp_path)
    whole = load(directory)
    device = CpuDevice(whole.spec, 1 << 28)
    prompt = random_tokens(9)
    with rank_pool.load(directory, *grid) as base:
        hosts = [base.device.pack(*_split(changes(whole, seed))) for seed in range(3)]
        for _ in range(3):
            for seed, host in enumerate(hosts):
                placed = base.device.place(host)
                handle = placed.handle
                assert isinstance(handle, PackedAdapter)
                wanted = run_together(whole, [prompt], [device.pack(*_split(changes(whole, seed)))])[0]
                got = run_together(base, [prompt], [handle])[0]
                torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
                # what leaves the device is kept, and comes back without a copy
                assert base.device.remove(placed) is host
        assert not base.device.check([])


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "mixtral"])
def test_whole_weights_match_single_process(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    # a rank's inputs are whole blocks of 64, by which one process rotates them too
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    options = {"pad_token_id": 0, "tie_word_embeddings": kind == "qwen2"}
    directory = save_model(build_model(kind, **{**SIZES, **sizes, **options}), tmp_path)
    with rank_pool.load(directory, 2, quantize="none", dtype=torch.bfloat16) as base:
        for quantize in ("none", "int8", "int4", "nf4", "fp8"):
            whole = load(directory, quantize=quantize, dtype=torch.bfloat16)
            assert_same_weights(WholeWeights(directory, base.decoder, torch.bfloat16, quantize), whole, kind)


def assert_same_weights(weights: WholeWeights, whole: Decoder, kind: str) -> None:
    modules = LINEARS if kind != "mixtral" else LINEARS[:4]
    for layer, name in [(1, name) for name in modules] + [(0, "lm_head"), (0, "embed_tokens")]:
        got = torch.cat(list(weights.weight_rows(layer, name)))
        assert torch.equal(got, torch.cat(list(whole.weight_rows(layer, name)))), name
    together = torch.cat(list(weights.weight_rows(2, "q_proj", "k_proj", "v_proj")))
    assert torch.equal(together, torch.cat(list(whole.weight_rows(2, "q_proj", "k_proj", "v_proj"))))
    for name in modules:
        got_bias, bias = weights.bias(1, name), whole.bias(1, name)
        assert (got_bias is None) == (bias is None)
        assert bias is None or got_bias is None or torch.equal(got_bias, bias)
    mixture, wanted = weights.experts(1), whole.experts(1)
    assert (mixture is None) == (wanted is None)
    if mixture is not None and wanted is not None:
        pairs = [
            (mixture.router, wanted.router),
            *((a.down, b.down) for a, b in zip(mixture.experts, wanted.experts, strict=True)),
        ]
        for a, b in pairs:
            rows = [torch.cat(list(linear.rows(0, b.out_features))) for linear in (a, b)]
            assert torch.equal(*rows)


def _split(
    work: tuple[list[LoraModule], list[ReplacedNorm]],
) -> tuple[list[LoraModule], torch.dtype, list[ReplacedNorm]]:
    modules, norms = work
    return modules, torch.float32, norms


def place(serving: Serving, directory: Path, base: RankedBase) -> PackedAdapter:
    ref = publish(directory, serving.store)
    return base.place(load_adapter(serving.store, ref, base.spec, base.device, base.weights).host)


def save_peft(base: Path, config: Any, directory: Path) -> Path:
    model = peft.get_peft_model(open_model(base), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory
