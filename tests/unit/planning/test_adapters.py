"""What an adapter is planned to take is what packing it takes, on either device."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from paged_pools import ODD, random_modules, random_rows
from safetensors.numpy import load_file, save_file

from loraserve.adapters.ir import AdapterIR, ModuleIR, NormIR, TensorView
from loraserve.errors import ConfigError
from loraserve.memory.devices.cpu import CpuDevice, cpu_adapter_dtype
from loraserve.memory.loading.lowering import lower
from loraserve.planning.adapters import (
    Shape,
    find_adapters,
    held_dtype,
    plan_directory,
    plan_ranks,
    plan_shape,
    shape_of,
)
from loraserve.types import BaseSpec
from loraserve_kernels.common.modules import LoraModule, size_of
from loraserve_kernels.cpu.lora.layout import ReplacedNorm
from loraserve_kernels.gpu.paged.packing import make_pages

TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def draw_modules(rng: random.Random, *, has_rows_of_layers: bool) -> list[LoraModule]:
    """Any modules of any ranks, some with δ, a shift or rows of their own;
    some with nothing else.
    """
    modules = []
    for name, (out_features, in_features) in ODD.items():
        if rng.random() < 0.4:
            continue
        is_outside = name in ("lm_head", "embed_tokens")
        for layer in (0,) if is_outside else rng.choice(((0,), (0, 1))):
            rank = rng.choice((0, 1, 3, 8, 16, 17, 40))
            has_rows = (is_outside or has_rows_of_layers) and rng.random() < 0.5
            modules.append(
                LoraModule(
                    layer,
                    name,
                    torch.randn(rank, in_features),
                    torch.randn(out_features, rank),
                    1.0,
                    torch.randn(out_features) if rng.random() < 0.3 else None,
                    torch.randn(out_features) if name != "embed_tokens" and rng.random() < 0.3 else None,
                    random_rows(rng.choice((1, 16, 22)), ODD[name], torch.float32, name) if has_rows else None,
                )
            )
    return modules


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("held", ["fp32", "bf16", "int8"])
def test_a_cpu_packs_random_adapters_as_planned(make: Any, seed: int, held: str) -> None:
    rng = random.Random(seed)
    modules = draw_modules(rng, has_rows_of_layers=True)
    norms = [ReplacedNorm(1, "mlp_norm", torch.ones(200))] if rng.random() < 0.5 else []
    base: BaseSpec = make.base(modules=ODD).spec
    assert dict(base.modules) == ODD
    packed = CpuDevice(base, 1 << 30, cpu_adapter_dtype(held)).pack(modules, torch.float32, norms)
    shape = Shape(tuple(map(size_of, modules)), "F32", 200 * len(norms))
    planned = plan_shape(
        "one", 1, 0, shape, make.base(modules=ODD), make.config(adapter_dtype=held), make.arena(1 << 20)
    )
    assert planned.packed_bytes == packed.num_bytes
    assert planned.num_pages == -(-packed.num_bytes // 4096)
    assert (planned.held, planned.refusal) == (held, None)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("held", ["bf16", "int8"])
def test_a_gpu_packs_random_adapters_as_planned(make: Any, seed: int, held: str) -> None:
    modules = draw_modules(random.Random(seed), has_rows_of_layers=False)
    arena = make.arena(1 << 20, page_bytes=8192)
    pages = make_pages(modules, num_layers=2, module_shapes=ODD, page_num_bytes=8192, dtype=TORCH[held])
    config, base = make.config(adapter_dtype=held), make.base("cuda", modules=ODD)
    planned = plan_shape("one", 1, 0, Shape(tuple(map(size_of, modules)), "F32"), base, config, arena)
    assert (planned.num_pages, planned.num_tiles) == (pages.num_pages, pages.num_tiles)


def test_gpu_limitation_refuses_adapter_only_on_gpu(make: Any) -> None:
    modules = [m for m in random_modules(4, ODD, torch.float32) if m.module == "q_proj"]
    shape = Shape(tuple(map(size_of, modules)), "F32", 200)
    on_gpu = plan_shape("one", 1, 0, shape, make.base("cuda", modules=ODD), make.config(), make.arena())
    assert on_gpu.refusal is not None and "norms" in on_gpu.refusal  # noqa: PT018
    assert plan_shape("one", 1, 0, shape, make.base(modules=ODD), make.config(), make.arena()).refusal is None


def test_extra_rows_are_refused_on_gpu_alone(make: Any) -> None:
    modules = [m for m in random_modules(4, ODD, torch.float32) if m.module == "q_proj"]
    sizes = tuple(map(size_of, modules))
    shape = Shape(sizes, "F32", num_extra_weights=2 * 3 * 200)
    on_gpu = plan_shape("one", 1, 0, shape, make.base("cuda", modules=ODD), make.config(), make.arena())
    assert "rows of embedding and head beyond the base's" in (on_gpu.refusal or "")
    plans = [
        plan_shape("one", 1, 0, one, make.base(modules=ODD), make.config(), make.arena())
        for one in (shape, Shape(sizes, "F32"))
    ]
    assert plans[0].refusal is None
    assert plans[0].packed_bytes - plans[1].packed_bytes == 4 * 2 * 3 * 200
    rows = Shape((size_of(modules[0])._replace(num_rows=3),), "F32")
    refusal = plan_shape("one", 1, 0, rows, make.base("cuda", modules=ODD), make.config(), make.arena()).refusal
    assert refusal is not None and "serve the adapter on a CPU" in refusal  # noqa: PT018


def test_adapters_of_ranks_cover_every_layer_equally(make: Any) -> None:
    planned = plan_ranks([4, 8], ["q_proj", "v_proj"], 5, "BF16", make.base(modules=ODD), make.config(), make.arena())
    assert [(p.count, p.held) for p in planned] == [(3, "bf16"), (2, "bf16")]
    for rank, one in zip((4, 8), planned, strict=True):
        modules = [
            LoraModule(layer, name, torch.zeros(rank, ODD[name][1]), torch.zeros(ODD[name][0], rank), 1.0)
            for layer in range(2)
            for name in ("q_proj", "v_proj")
        ]
        packed = CpuDevice(make.base(modules=ODD).spec, 1 << 30).pack(modules, torch.bfloat16)
        assert one.packed_bytes == packed.num_bytes


def test_unsupported_ranks_and_modules_are_refused(make: Any) -> None:
    where = (make.base(modules=ODD), make.config(), make.arena())
    with pytest.raises(ConfigError, match="expected a rank from 1 to 512"):
        plan_ranks([513], ["all"], 1, "F32", *where)
    with pytest.raises(ConfigError, match="expected some of q_proj"):
        plan_ranks([8], ["c_attn"], 1, "F32", *where)


def test_adapter_leaving_no_sequence_memory_is_refused(make: Any) -> None:
    pages = plan_ranks([64], ["all"], 1, "F32", make.base(modules=ODD), make.config(), make.arena(10**6))[0].num_pages
    fitting, too_small = make.arena(pages + 8), make.arena(pages + 7)
    assert plan_ranks([64], ["all"], 1, "F32", make.base(modules=ODD), make.config(), fitting)[0].refusal is None
    refusal = plan_ranks([64], ["all"], 1, "F32", make.base(modules=ODD), make.config(), too_small)[0].refusal
    assert refusal is not None and "beside the KV of one sequence" in refusal  # noqa: PT018


def test_adapter_beyond_gpu_tables_is_refused(make: Any) -> None:
    def refusal(max_tiles: int) -> str | None:
        arena = make.arena(10**6, page_bytes=8192, max_tiles=max_tiles)
        config, base = make.config(), make.base("cuda", modules=ODD)
        found: str | None = plan_ranks([17], ["q_proj"], 1, "F32", base, config, arena)[0].refusal
        return found

    # 17 ranks take two tiles
    assert refusal(2) is None
    assert "2 rank tiles; the tables for adapters have 1" in (refusal(1) or "")


def save_peft(folder: Path, rank: int = 4, **config: Any) -> Path:
    folder.mkdir(parents=True)
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = rng.standard_normal((rank, 200), dtype=np.float32)
        tensors[f"{prefix}.lora_B.weight"] = rng.standard_normal((72, rank), dtype=np.float32)
        if config.get("use_dora"):
            tensors[f"{prefix}.lora_magnitude_vector"] = rng.random(72, dtype=np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("use_dora", [False, True])
def test_directory_plan_equals_packed_modules(make: Any, tmp_path: Path, use_dora: bool) -> None:
    folder = save_peft(tmp_path / "one", use_dora=use_dora)
    planned = plan_directory(folder, make.base(modules=ODD), make.config(), make.arena())
    delta = torch.ones(72) if use_dora else None
    modules = [LoraModule(i, "q_proj", torch.zeros(4, 200), torch.zeros(72, 4), 2.0, delta) for i in range(2)]
    assert (
        planned.packed_bytes == CpuDevice(make.base(modules=ODD).spec, 1 << 30).pack(modules, torch.float32).num_bytes
    )
    assert planned.file_bytes == sum(file.stat().st_size for file in folder.iterdir())


def test_adapter_of_other_base_is_refused_like_upload(make: Any, tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "other", r=8)
    assert "the config says 8" in (
        plan_directory(folder, make.base(modules=ODD), make.config(), make.arena()).refusal or ""
    )
    (folder / "adapter_model.safetensors").unlink()
    assert "can't be read" in (
        plan_directory(folder, make.base(modules=ODD), make.config(), make.arena()).refusal or ""
    )


def test_older_weights_and_shards_are_planned_as_plain(make: Any, tmp_path: Path) -> None:
    plain, older, shards = (save_peft(tmp_path / name) for name in ("plain", "older", "shards"))
    tensors = load_file(plain / "adapter_model.safetensors")
    for folder in (older, shards):
        (folder / "adapter_model.safetensors").unlink()
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, older / "adapter_model.bin")
    places = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, shards / shard)
    (shards / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    planned = [plan_directory(path, make.base(modules=ODD), make.config(), make.arena()) for path in (older, shards)]
    expected = plan_directory(plain, make.base(modules=ODD), make.config(), make.arena())
    assert {plan.packed_bytes for plan in planned} == {expected.packed_bytes}
    assert all(plan.refusal is None for plan in planned)


def test_directories_of_adapters_are_looked_into(tmp_path: Path) -> None:
    one, two = save_peft(tmp_path / "many" / "a"), save_peft(tmp_path / "many" / "b")
    assert find_adapters([tmp_path / "many", one]) == [one, two, one]
    with pytest.raises(ConfigError, match="hold no adapter_config"):
        find_adapters([tmp_path])


def test_gpu_holds_adapters_in_activation_dtype_or_int8(make: Any) -> None:
    assert [held_dtype(name, make.base("cuda", modules=ODD), "F32") for name in ("auto", "bf16", "int8")] == [
        "bf16",
        "bf16",
        "int8",
    ]
    with pytest.raises(ConfigError, match="can't be held in fp16 where activations are bf16"):
        held_dtype("fp16", make.base("cuda", modules=ODD), "F32")
    assert held_dtype("auto", make.base(modules=ODD), "F16") == "fp16"


class Weights:
    """A base of zeros, with biases on q_proj."""

    device = torch.device("cpu")

    def weight_rows(self, layer: int, module: str) -> Iterator[torch.Tensor]:
        yield torch.zeros(ODD[module])

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        return torch.zeros(ODD[module][0]) if module == "q_proj" else None


def view(*shape: int) -> TensorView:
    return TensorView("F32", shape, np.ones(shape, dtype=np.float32))


@pytest.mark.parametrize(
    "fields",
    [
        {"module": "q_proj", "rank": 3, "lora_a": view(3, 200), "lora_b": view(72, 3)},
        {"module": "q_proj", "rank": 3, "lora_a": view(3, 200), "lora_b": view(72, 3), "magnitude": view(72)},
        {"module": "v_proj", "rank": 3, "lora_a": view(3, 200), "lora_b": view(23, 3), "lora_bias": view(23)},
        {"module": "q_proj", "bias": view(72)},
        {"module": "q_proj", "output_scale": view(72)},
        {"module": "v_proj", "output_scale": view(23)},
        {"module": "q_proj", "weight": view(72, 200)},
        {"module": "embed_tokens", "token_ids": (1, 5), "token_rows": view(2, 200)},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_planned_module_sizes_equal_lowered_modules(make: Any, fields: dict[str, Any]) -> None:
    base = structs.replace(make.base(modules=ODD).spec, biased_modules=("q_proj",))
    ir = AdapterIR((ModuleIR(0, **fields),), "F32", norms=(NormIR(1, "mlp_norm", view(200)),))
    lowered = lower(ir, base, Weights())
    shape = shape_of(ir, base)
    assert shape.sizes == tuple(map(size_of, lowered.modules))
    assert shape.num_norm_weights == 200
    assert shape.is_upper_bound is ("weight" in fields)


def test_module_without_changes_takes_no_memory(make: Any) -> None:
    ir = AdapterIR((ModuleIR(0, "v_proj", rank=0, lora_a=view(0, 200), lora_b=view(23, 0)),), "F32")
    assert shape_of(ir, make.base(modules=ODD).spec).sizes == ()
