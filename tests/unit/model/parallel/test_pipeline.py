"""Stages of a pipeline: what each holds, and that they compute at the same time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pairwise import pairwise_and_campaign
from rank_pool import RankPool

from loraserve.config import EngineConfig
from loraserve.engine.parallel.micro_batches import MIN_ROWS
from loraserve.errors import ConfigError
from loraserve.limits import LIMITS
from loraserve.model.checkpoint.blueprint import draw
from loraserve.model.checkpoint.cutting import check_grid
from loraserve.model.checkpoint.headers import read_headers
from loraserve.model.config.model_config import read_config
from loraserve.model.inputs import KVTensors, ModelInputs, PooledRows
from loraserve.model.parallel.grid import Grid
from loraserve.planning.adapters import Shape, plan_shape
from loraserve.planning.base import plan_base
from loraserve.planning.memory import plan_arena, plan_step
from loraserve_kernels.common.sizes import ModuleSize
from loraserve_kernels.cpu.lora.layout import LoraModule

from ..conftest import PagedRun, build_model, load, random_tokens, save_model
from .test_architectures import SIZES, logits

GROUPED: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
"""Whose parts have whole groups of scales."""
DEADLINE_S = 30.0


QUANTIZED = [
    # sums over ranks, of another order, may be rounded to another int8: the head's inputs are
    *pairwise_and_campaign(["llama", "qwen2", "mixtral"], ["int8", "int4", "nf4", "fp8"], [(1, 2), (1, 3)]),
    *[(kind, "fp8", (2, 2)) for kind in ("llama", "qwen2", "mixtral")],
]


@pytest.mark.parametrize(("kind", "quantize", "grid"), QUANTIZED)
def test_quantized_pipeline_bases_match_single_process(
    kind: str, quantize: str, grid: tuple[int, int], rank_pool: RankPool, tmp_path: Path
) -> None:
    directory = save_model(build_model(kind, **GROUPED, tie_word_embeddings=kind == "qwen2"), tmp_path)
    expected = logits(load(directory, quantize=quantize))
    with rank_pool.load(directory, *grid, quantize=quantize) as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4 * max(1, float(wanted.abs().max())), rtol=0)


def test_pipeline_rows_equal_single_process_bit_for_bit(rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model("gemma2", **SIZES, head_dim=32, num_hidden_layers=4), tmp_path)
    expected = logits(load(directory))
    for pipeline in (2, 4):
        with rank_pool.load(directory, 1, pipeline) as base:
            assert all(torch.equal(*pair) for pair in zip(logits(base), expected, strict=True))


@pytest.mark.parametrize("kind", ["llama", "olmo2", "gemma3"])
def test_unsupported_head_sizes_are_computed_layer_by_layer(kind: str, rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model(kind, hidden_size=48, head_dim=12), tmp_path)
    expected = logits(load(directory))
    with rank_pool.load(directory, 1, 3) as base:
        for got, wanted in zip(logits(base), expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_pooled_pipeline_rows_match_single_process(rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model("llama", **SIZES), tmp_path)

    class Pooling:
        """Pools every second row, and returns the others' logits."""

        def __init__(self, decoder: Any) -> None:
            self._decoder, self.results = decoder, list[torch.Tensor]()
            self.kv_shape, self.kv_dtype = decoder.kv_shape, decoder.kv_dtype

        def forward(self, inputs: ModelInputs, kv: KVTensors) -> torch.Tensor:
            rows = torch.arange(len(inputs.token_ids))
            scored, pooled = (torch.arange(start, len(rows), 2) for start in (0, 1))
            inputs = replace(inputs, logits_rows=scored, pooled=PooledRows(rows, scored, pooled))
            self.results += self._decoder.forward_pooled(inputs, kv)
            return torch.zeros(len(rows), 1)

    def results(decoder: Any) -> list[torch.Tensor]:
        pooling = Pooling(decoder)
        logits(pooling)
        return pooling.results

    expected = results(load(directory))
    for grid in ((1, 2), (2, 2)):
        with rank_pool.load(directory, *grid) as base:
            for got, wanted in zip(results(base), expected, strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def test_pipeline_stage_reads_only_assigned_tensors(rank_pool: RankPool, tmp_path: Path) -> None:
    directory = save_model(build_model("llama", **SIZES), tmp_path)
    whole = load(directory)
    with rank_pool.load(directory, 1, 3) as base:
        last = base.decoder
        assert (last.stage.layers, base.kv_shape[0]) == (range(2, 3), 1)
        with pytest.raises(Exception, match="only the first stage has"):
            list(last.weight_rows(0, "embed_tokens"))
        assert set(last._norm_weights) == {
            "model.norm.weight",
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.post_attention_layernorm.weight",
        }
        # each stage has its own angles; the rest is there once, and the base known by its digest
        angles = 128 * last.config.head_dim * 4
        assert base.spec.size_bytes == whole.spec.size_bytes + 2 * angles
        assert base.spec.digest == whole.spec.digest


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_plan_counts_memory_of_each_rank(
    grid: tuple[int, int], quantize: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    directory = save_model(build_model("llama", **GROUPED, tie_word_embeddings=True, vocab_size=128), tmp_path)
    config = EngineConfig(
        str(directory), "base", "", quantize=quantize, tensor_parallel=grid[0], pipeline_parallel=grid[1]
    )
    plan = plan_base(config, "cpu")
    whole = plan_base(msgspec.structs.replace(config, tensor_parallel=1, pipeline_parallel=1), "cpu")
    assert plan.kv_block_bytes(16) == whole.kv_block_bytes(16)
    arena = plan_arena(plan, config, plan_step(plan, config), None)
    with rank_pool.load(directory, *grid, quantize=quantize) as base:
        assert base.spec.size_bytes == plan.num_bytes == sum(plan.rank_bytes)
        modules = [
            LoraModule(layer, name, torch.zeros(4, shape[1]), torch.zeros(shape[0], 4), 1.0)
            for name, shape in plan.spec.modules.items()
            if name != "embed_tokens"
            for layer in range(3 if name != "lm_head" else 1)
        ]
        sizes = tuple(ModuleSize(one.layer, one.module, 4) for one in modules)
        planned = plan_shape("one", 1, 0, Shape(sizes, "F32"), plan, config, arena)
        assert base.device.footprint(modules, torch.float32).num_bytes == planned.num_pages * arena.page_bytes
        assert len(planned.rank_bytes) == base.grid.size


@pytest.mark.parametrize("pipeline", [2, 4])
def test_first_stage_sends_all_before_last_stage_computes(
    pipeline: int, rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage, held back before its first micro-batch, sees the others' sent."""
    directory = save_model(build_model("llama", **SIZES, num_hidden_layers=4), tmp_path)
    prompts = [random_tokens(MIN_ROWS, seed=seed) for seed in range(pipeline)]

    def together(decoder: Any) -> list[torch.Tensor]:
        run = PagedRun(decoder)
        return run.step([(run.add(prompt), len(prompt)) for prompt in prompts])

    expected = together(load(directory))
    with rank_pool.load(directory, 1, pipeline) as base:
        num_bytes = sum(map(len, prompts)) * base.config.hidden_size * 4
        forward, seen = base.decoder.forward_pooled, []

        def held_back(inputs: ModelInputs, *rest: Any) -> Any:
            if not seen and pipeline > 2:
                # rank 2 is the second stage: all of the step is there
                deadline = time.monotonic() + DEADLINE_S
                while base.traffic[2].transfer_bytes < num_bytes and time.monotonic() < deadline:
                    time.sleep(0.001)
                seen.append(base.traffic[2].transfer_bytes)
            elif not seen:
                seen.append(arrivals[-1].wait().nbytes * len(prompts))
            return forward(inputs, *rest)

        arrivals: list[Any] = []
        pipe = base.member.pipe
        assert pipe is not None
        expect = pipe.expect

        def noted(*arguments: int) -> Any:
            arrivals.append(expect(*arguments))
            return arrivals[-1]

        monkeypatch.setattr(pipe, "expect", noted)
        monkeypatch.setattr(base.decoder, "forward_pooled", held_back)
        got = together(base)
        assert seen == [num_bytes]
        assert base.group_forward.num_micro_batches == pipeline
        for one, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-4, rtol=0)


def test_impossible_grid_is_refused_by_name(tmp_path: Path) -> None:
    directory = save_model(build_model("llama", **SIZES), tmp_path)
    blueprint = draw(read_config(directory), read_headers(directory), "none")
    check_grid(blueprint, Grid(4, 3))
    with pytest.raises(ConfigError, match="--pipeline-parallel 4: this base has 3 layers") as refused:
        check_grid(blueprint, Grid(1, 4))
    assert "at most 3 stages" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="--tensor-parallel 3: 4 attention heads"):
        check_grid(blueprint, Grid(3, 2))
    tall = save_model(build_model("llama", **SIZES, num_hidden_layers=LIMITS.max_ranks), tmp_path / "tall")
    blueprint = draw(read_config(tall), read_headers(tall), "none")
    with pytest.raises(ConfigError, match="make 32 processes; at most 16"):
        check_grid(blueprint, Grid(2, LIMITS.max_ranks))


def test_grid_assigns_each_layer_and_rank_once(tmp_path: Path) -> None:
    config = read_config(save_model(build_model("llama", **SIZES, num_hidden_layers=7), tmp_path))
    for grid in (Grid(1, 3), Grid(2, 3), Grid(1, 7), Grid(4, 1)):
        places = list(grid.places(config))
        by_stage = sorted(places, key=lambda place: (place.shard.rank, place.stage.index))
        layers = [layer for place in by_stage if place.shard.rank == 0 for layer in place.stage.layers]
        assert layers == list(range(7))
        assert len({(place.shard.rank, place.stage.index) for place in places}) == grid.size
        assert places[0].stage.is_last and places[0].shard.rank == 0  # noqa: PT018
        assert len(places[0].stage.layers) == min(len(place.stage.layers) for place in places)
        whole = Grid().place(0, config).kv_block_bytes(16, 4)
        assert sum(place.kv_block_bytes(16, 4) for place in places) == whole * (2 if grid.tensor == 4 else 1)
