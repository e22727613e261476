"""Memory of adapters on a device, from the headers of their files or from ranks."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loraserve.adapter_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, find_weights, holds_config, shard_names
from loraserve.adapters.compiler import compile_adapter, open_adapter
from loraserve.adapters.format.containers import CONTAINERS, convert_files, needs_conversion
from loraserve.adapters.format.peft_format import read_config
from loraserve.adapters.ir import AdapterIR, ModuleIR
from loraserve.config import EngineConfig
from loraserve.errors import AdapterRejected, AdapterUnsupported, ConfigError
from loraserve.model.gguf.gguf_adapter import GgufAdapter
from loraserve.model.parallel.grid import Grid, RankPlace
from loraserve.model.parallel.part_bytes import region_bytes
from loraserve.planning.base import BasePlan
from loraserve.planning.memory import ArenaPlan
from loraserve.types import BaseSpec, EngineStats
from loraserve_kernels.common.sites import LAYER_MODULES
from loraserve_kernels.common.sizes import MAX_RANK, ItemSized, ModuleSize, lay_out, num_pages_of, num_tiles_of
from loraserve_kernels.errors import TensorMismatch

_ITEMS: dict[str, ItemSized] = {
    "fp32": np.dtype(np.float32),
    # numpy has no bfloat16; only its size counts here
    "bf16": np.dtype(np.float16),
    "fp16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
}
_STORED = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_OF_ACTIVATIONS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter, or as many alike as `count`, as the device will hold it.

    Attributes:
        name: the directory's, or what was requested.
        file_bytes: what is read of it and hashed at a load from disk.
        held: the dtype of its matrices on the device; None where it can't be held.
        packed_bytes: of its numbers as they are packed: what a copy of it takes of the host's
            memory.
        num_pages: of the arena.
        num_tiles: of a GPU's tables; 0 on a CPU.
        is_upper_bound: it holds whole weights, of which only the rows are kept that aren't the
            base's: which these are, only their numbers show.
        refusal: why it can't be served; None: nothing is known against it.
        rank_bytes: of each rank's part, where several processes share the base.
    """

    name: str
    count: int
    file_bytes: int
    held: str | None
    packed_bytes: int
    num_pages: int
    num_tiles: int
    is_upper_bound: bool = False
    refusal: str | None = None
    rank_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """The modules of an adapter, without their weights.

    Attributes:
        stored: as `AdapterIR.dtype`.
        num_norm_weights: of norms in the place of the base's.
        num_extra_weights: of rows of embedding and head beyond the base's.
    """

    sizes: tuple[ModuleSize, ...]
    stored: str
    num_norm_weights: int = 0
    is_upper_bound: bool = False
    num_extra_weights: int = 0


def find_adapters(paths: Iterable[Path]) -> list[Path]:
    """Find the adapters' directories: those given, or in those given.

    Raises:
        ConfigError: there is none in one of them.
    """
    found: list[Path] = []
    for path in paths:
        if _is_adapter(path):
            found.append(path)
            continue
        inside = [child for child in sorted(path.iterdir()) if _is_adapter(child)] if path.is_dir() else []
        if not inside:
            raise ConfigError(f"{path} and the directories in it hold no {CONFIG_FILE}.", hint="Give a PEFT directory.")
        found += inside
    return found


def _is_adapter(path: Path) -> bool:
    """Check whether a directory has an adapter's config, or a file of weights that holds one."""
    return (path / CONFIG_FILE).is_file() or any(holds_config(name) for name in _names(path))


def _names(path: Path) -> list[str]:
    return [child.name for child in path.iterdir() if child.is_file()] if path.is_dir() else []


def plan_directory(path: Path, base: BasePlan, config: EngineConfig, arena: ArenaPlan) -> AdapterPlan:
    """Plan an adapter's directory.

    Of LoRA's files the headers alone are read; other kinds are unfolded, as at a load, and other
    containers than PEFT's converted, as at an upload.
    """
    name, file_bytes = WEIGHTS_FILE, 0
    try:
        name = find_weights(_names(path)) or WEIGHTS_FILE
        config_bytes = b"" if holds_config(name) else (path / CONFIG_FILE).read_bytes()
        index = (path / name).read_bytes() if name == INDEX_FILE else None
        files = [path / shard for shard in (shard_names(index) if index is not None else (name,))]
        file_bytes = len(config_bytes) + sum(file.stat().st_size for file in files)
        shape = shape_of(_open(config_bytes, files, index, base.spec), base.spec)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return _refused(path.name, 1, 0, f"{path / name} can't be read: {reason}.")
    except AdapterRejected as error:
        return _refused(path.name, 1, file_bytes, " ".join(error.problems[:3]) or str(error))
    return plan_shape(path.name, 1, file_bytes, shape, base, config, arena)


def _open(config: bytes, files: Sequence[Path], index: bytes | None, base: BaseSpec) -> AdapterIR:
    """Compile the adapter of these weights."""
    if index is None:
        with files[0].open("rb") as file:
            # pages that aren't accessed are never read
            weights = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    else:
        weights = memoryview(b"".join(file.read_bytes() for file in files))
    containers = (*CONTAINERS, GgufAdapter())
    if not needs_conversion(config, weights[:8], index, containers):
        return open_adapter(config, weights, base)
    converted = convert_files(config, weights, base, index, containers)
    return compile_adapter(read_config(converted.config), converted.tensors, base)


def plan_ranks(
    ranks: Sequence[int],
    targets: Sequence[str],
    count: int,
    stored: str,
    base: BasePlan,
    config: EngineConfig,
    arena: ArenaPlan,
) -> list[AdapterPlan]:
    """Plan as many adapters of LoRA as `count`, on these modules of every layer.

    The ranks are in equal parts.

    Args:
        targets: modules' short names; ``all``: every linear of the layers.
        stored: the dtype of their files: F32, F16 or BF16.

    Raises:
        ConfigError: a rank that isn't served, or a module that the base lacks.
    """
    modules = [m for m in LAYER_MODULES if m in base.spec.modules] if list(targets) == ["all"] else list(targets)
    unknown = [module for module in modules if module not in base.spec.modules]
    if unknown or not modules:
        raise ConfigError(f"--targets {','.join(targets)}: expected some of {', '.join(base.spec.modules)}, or all.")
    for rank in ranks:
        if not 1 <= rank <= MAX_RANK:
            raise ConfigError(f"--ranks {rank}: expected a rank from 1 to {MAX_RANK}.")
    plans = []
    for index, rank in enumerate(ranks):
        part = count // len(ranks) + (index < count % len(ranks))
        sizes = tuple(ModuleSize(layer, module, rank) for layer, module in _places(base.spec, modules))
        num_weights = sum(rank * sum(base.spec.modules[size.module]) for size in sizes)
        # names, shapes and offsets of two matrices take about 250 bytes of a file's header
        file_bytes = num_weights * _ITEMS[_STORED[stored]].itemsize + 250 * len(sizes)
        name = f"rank {rank} on {','.join(modules) if list(targets) != ['all'] else 'all'}"
        plans.append(plan_shape(name, part, file_bytes, Shape(sizes, stored), base, config, arena))
    return [plan for plan in plans if plan.count]


def plan_shape(
    name: str, count: int, file_bytes: int, shape: Shape, base: BasePlan, config: EngineConfig, arena: ArenaPlan
) -> AdapterPlan:
    """Plan an adapter by its shape."""
    held = held_dtype(config.adapter_dtype, base, shape.stored)
    where = {"num_layers": base.spec.num_layers, "module_shapes": base.spec.module_shapes, "dtype": _ITEMS[held]}
    rank_bytes: tuple[int, ...] = ()
    if shape.num_extra_weights and (base.grid.size > 1 or base.device != "cpu"):
        reason = "It has rows of embedding and head beyond the base's, which are served on a CPU without ranks alone."
        return _refused(name, count, file_bytes, reason)
    try:
        if base.grid.size > 1:
            rank_bytes = tuple(_rank_bytes(shape, place, base.grid, _ITEMS[held]) for place in base.places)
            packed = sum(rank_bytes)
            num_pages, num_tiles = packed // arena.page_bytes, 0
        elif base.device == "cpu":
            num_floats = shape.num_norm_weights + shape.num_extra_weights
            packed = lay_out(shape.sizes, **where).num_bytes(_ITEMS[held], num_floats)  # type: ignore[arg-type]
            num_pages, num_tiles = -(-packed // arena.page_bytes), 0
        else:
            if shape.num_norm_weights:
                return _refused(name, count, file_bytes, "It has trained norms, which aren't served on a GPU.")
            num_pages = num_pages_of(shape.sizes, page_num_bytes=arena.page_bytes, **where)  # type: ignore[arg-type]
            num_tiles = num_tiles_of(shape.sizes, num_layers=base.spec.num_layers)
            packed = num_pages * arena.page_bytes
    except TensorMismatch as error:
        return _refused(name, count, file_bytes, f"It can't be served on this device: {error}.")
    refusal = None
    if num_pages > arena.max_adapter_pages:
        refusal = (
            f"It takes {num_pages * arena.page_bytes:,} bytes; beside the KV of one sequence of full length, "
            "the budget has room for "
            f"{arena.max_adapter_pages * arena.page_bytes:,}."
        )
    elif num_tiles > arena.max_tiles:
        refusal = f"It takes {num_tiles:,} rank tiles; the tables for adapters have {arena.max_tiles:,}."
    return AdapterPlan(
        name, count, file_bytes, held, packed, num_pages, num_tiles, shape.is_upper_bound, refusal, rank_bytes
    )


def _rank_bytes(shape: Shape, place: RankPlace, grid: Grid, dtype: ItemSized) -> int:
    """Bound the bytes of a rank's part: which of replaced rows it has depends on ids."""
    cut, shapes = place.cut, place.modules
    sizes = [
        size._replace(
            layer=layer,
            has_shift=size.has_shift and cut.modules[size.module].has_bias,
            num_rows=min(size.num_rows, shapes[size.module][size.module == "embed_tokens"]),
        )
        for size in shape.sizes
        if (layer := cut.module_layer(size.layer, size.module)) is not None
    ]
    layout = lay_out(sizes, num_layers=cut.num_layers, module_shapes=shapes, dtype=dtype)
    return region_bytes(layout, dtype, [-(-shape.num_norm_weights // grid.pipeline)])


def held_dtype(name: str, base: BasePlan, stored: str) -> str:
    """Choose the data type of matrices on the device: fp32, bf16, fp16 or int8.

    Raises:
        ConfigError: 16 bits of the other kind than a GPU's activations'.
    """
    if base.device == "cpu":
        return _STORED[stored] if name == "auto" else name
    of_activations = _OF_ACTIVATIONS[base.dtype]
    if name not in ("auto", "int8", of_activations):
        raise ConfigError(
            f"Adapters can't be held in {name} where activations are {of_activations}.",
            hint="Use auto or int8, or the same --dtype.",
        )
    return of_activations if name == "auto" else name


def shape_of(ir: AdapterIR, base: BaseSpec) -> Shape:
    """Compute the shape of an adapter once it is lowered to the kernels' terms."""
    sizes = [_size(m, base) for m in ir.modules]
    # a module that changes nothing isn't kept
    kept = tuple(s for s in sizes if s.rank or s.has_delta or s.has_shift or s.num_rows)
    num_norm_weights = sum(int(norm.weight.shape[0]) for norm in ir.norms)
    num_extra_weights = 0 if ir.extra_rows is None else 2 * ir.extra_rows.num_rows * base.hidden_size
    return Shape(kept, ir.dtype, num_norm_weights, any(m.weight is not None for m in ir.modules), num_extra_weights)


def _size(m: ModuleIR, base: BaseSpec) -> ModuleSize:
    """Compute the size of a module as `memory.loading.lowering` makes it."""
    has_bias = m.bias is not None or m.lora_bias is not None
    has_shift = has_bias or (m.output_scale is not None and m.module in base.biased_modules)
    num_rows = len(m.token_ids) if m.token_rows is not None else 0
    if m.weight is not None:
        # at most all of them
        num_rows = int(m.weight.shape[0])
    rank = 0 if m.lora_a is None else int(m.lora_a.shape[0])
    has_delta = m.magnitude is not None or m.output_scale is not None
    return ModuleSize(m.layer, m.module, rank, has_delta, has_shift, num_rows, m.expert)


def _places(base: BaseSpec, modules: Sequence[str]) -> Iterator[tuple[int, str]]:
    for module in modules:
        for layer in range(base.num_layers if module in LAYER_MODULES else 1):
            yield layer, module


def _refused(name: str, count: int, file_bytes: int, reason: str) -> AdapterPlan:
    return AdapterPlan(name, count, file_bytes, None, 0, 0, 0, refusal=reason)


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """Refuse adapters that an engine on one process' CPU can never hold.

    A file's size shows little of it: LoKr of 0.75 MB takes 108 MB as the low-rank update that steps
    compute. Other devices find out when they load the adapter for its certificate.

    Args:
        stats: the engine's, of which the budget for adapters counts.
        adapter_dtype: as `EngineConfig.adapter_dtype`.
        has_one_process: whether one process has the whole base.
    """

    stats: Callable[[], EngineStats]
    adapter_dtype: str
    has_one_process: bool

    def may_exceed(self, base: BaseSpec, *, rank: int, modules: tuple[str, ...], stored: str, size_bytes: int) -> bool:
        """Check whether an adapter may need more than the memory for adapters has.

        It is False where `check` would let every adapter pass.

        Args:
            rank: largest rank of any module.
            modules: short names of the modules that it changes.
            stored: as `AdapterIR.dtype`.
            size_bytes: bytes of its files.
        """
        budget_bytes = self.stats().device_adapter_budget_bytes
        if base.device != "cpu" or not self.has_one_process or not budget_bytes:
            return False
        dtype = _ITEMS[_STORED[stored] if self.adapter_dtype == "auto" else self.adapter_dtype]
        places = _places(base, [module for module in modules if module in base.modules])
        sizes = [ModuleSize(layer, module, rank, has_delta=True, has_shift=True) for layer, module in places]
        if base.experts is not None:
            of_experts = [module for module in base.experts.modules if module in modules]
            sizes += [
                ModuleSize(layer, module, rank, has_delta=True, has_shift=True, expert=expert)
                for module in of_experts
                for layer in range(base.num_layers)
                for expert in range(base.experts.num_experts if module.startswith("experts.") else 1)
            ]
        try:
            layout = lay_out(sizes, num_layers=base.num_layers, module_shapes=base.module_shapes, dtype=dtype)
        except TensorMismatch:
            return True
        # rows in the place of the base's are in the file, at least in 16 bits
        return layout.num_bytes(dtype, 0) + 2 * size_bytes > budget_bytes

    def check(self, ir: AdapterIR, base: BaseSpec) -> None:
        """Raise an error if the adapter can't fit.

        Raises:
            AdapterUnsupported: it needs more bytes than the memory for adapters has.
        """
        budget_bytes = self.stats().device_adapter_budget_bytes
        shape = shape_of(ir, base)
        # of whole weights only the rows count that aren't the base's: a load finds out
        if base.device != "cpu" or not self.has_one_process or not budget_bytes or shape.is_upper_bound:
            return
        dtype = _ITEMS[_STORED[shape.stored] if self.adapter_dtype == "auto" else self.adapter_dtype]
        try:
            layout = lay_out(shape.sizes, num_layers=base.num_layers, module_shapes=base.module_shapes, dtype=dtype)
        except TensorMismatch:
            # the load's error has more
            return
        num_bytes = layout.num_bytes(dtype, shape.num_norm_weights)
        if num_bytes > budget_bytes:
            raise AdapterUnsupported(
                f"This adapter needs {num_bytes:,} bytes on the device; the memory for adapters has {budget_bytes:,}.",
                hint="Train it with a lower rank or on fewer modules; or the server's operator starts it with a "
                "larger --memory-budget, or a smaller --max-model-len.",
            )
