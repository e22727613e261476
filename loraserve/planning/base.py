"""Memory of a resident base on a device, by format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from loraserve.config import AUTO_DTYPES, EngineConfig
from loraserve.errors import ConfigError, ModelError, UnknownArchitecture
from loraserve.model.checkpoint.blueprint import (
    Blueprint,
    ModulePlan,
    SiteKind,
    SitePlan,
    check_gpu,
    check_gpu_blocks,
    context_len,
    draw,
    rounded_formats,
)
from loraserve.model.checkpoint.cutting import check_grid, cut_of
from loraserve.model.checkpoint.headers import ITEM_SIZES, read_headers
from loraserve.model.checkpoint.stored_weights import StoredWeight
from loraserve.model.config.formats import group_size
from loraserve.model.config.gguf_types import BLOCK_FORMATS
from loraserve.model.config.implementation import NATIVE, choose_implementation
from loraserve.model.config.model_config import ModelConfig, read_config
from loraserve.model.config.quantization_config import Layout
from loraserve.model.parallel.grid import Grid, RankPlace
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.common.formats import NF4_GROUP_SIZE, PACKED_FORMATS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_STORED_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one part of the base that are kept in one format.

    Attributes:
        name: ``linears``, ``experts``, ``routers``, ``head``, ``embedding``, ``norms`` or
            ``rotary``.
        format: a dtype, or ``int8``, ``int4``, ``nf4`` or ``fp8`` with scales.
    """

    name: str
    format: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BasePlan:
    """A base as it will be resident.

    Attributes:
        device: cpu or cuda.
        dtype: of what isn't quantized.
        max_model_len: the longest context that is served.
        parts: of all processes, largest first.
        grid: the processes that share it.
        rank_bytes: of each process's part.
        spec: as the server will have it, but for the digest, which takes reading the weights:
            it is empty.
    """

    config: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    parts: tuple[Part, ...]
    spec: BaseSpec
    grid: Grid = field(default_factory=Grid)
    rank_bytes: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.spec.size_bytes

    @property
    def places(self) -> list[RankPlace]:
        """Content of each rank."""
        return list(self.grid.places(self.config))

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block, keys and values of all layers.

        They are float32 on a CPU, of the activations' dtype on a GPU.
        """
        return sum(self.kv_rank_bytes(block_size))

    def kv_rank_bytes(self, block_size: int) -> list[int]:
        """Bytes of each rank's part of one KV block."""
        item = 4 if self.device == "cpu" else DTYPE_BYTES[self.dtype]
        return [place.kv_block_bytes(block_size, item) for place in self.places]


def plan_base(config: EngineConfig, device: str) -> BasePlan:
    """Read the headers of the base's directory.

    Args:
        config: what the engine would get.
        device: cpu or cuda.

    Raises:
        ConfigError: the device can't do what is configured, max_model_len is more than the model
            has, or the checkpoint is quantized to something else.
        UnknownArchitecture, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is
            wrong with the directory, and where.
    """
    dtype = AUTO_DTYPES[device] if config.dtype == "auto" else config.dtype
    if device == "cuda" and dtype == "float32":
        raise ConfigError(
            "The dtype float32 isn't available on a GPU; expected bfloat16 or float16.", hint="Leave --dtype out."
        )
    model_dir = Path(config.model_dir)
    if not model_dir.is_dir():
        raise ModelError(
            f"{model_dir} isn't a directory.",
            hint="Give the directory of a base; a base on the hub must be downloaded first.",
        )
    if choose_implementation(model_dir, config.model_impl) != NATIVE:
        raise UnknownArchitecture(
            "transformers' code would compute this base, and the memory of such a base isn't planned.",
            hint="Start it: GET /base says what it takes.",
        )
    model = read_config(model_dir)
    if device == "cuda":
        check_gpu(model)
        check_gpu_blocks(model.quantization)
    max_model_len = context_len(model, config.max_model_len)
    blueprint = draw(model, read_headers(model_dir), config.quantize)
    rounded = rounded_formats(blueprint, config.activation_dtype, device)
    grid = Grid.of(config)
    if grid.size > 1 and device != "cpu":
        raise ConfigError(
            "--tensor-parallel and --pipeline-parallel are for CPUs, and this plan is for a GPU.",
            hint="Leave them out, or use --device cpu.",
        )
    check_grid(blueprint, grid)
    parts, rank_bytes = Counter[tuple[str, str]](), list[int]()
    for place in grid.places(model):
        of_rank = list(_parts(blueprint, device, dtype, max_model_len, place, rounded))
        rank_bytes.append(sum(num_bytes for *_, num_bytes in of_rank))
        for name, format, num_bytes in of_rank:
            parts[name, format] += num_bytes
    listed = tuple(Part(*key, num_bytes) for key, num_bytes in parts.most_common())
    spec = blueprint.spec(
        id=config.model_id,
        digest=Digest(""),
        dtype=dtype,
        max_model_len=max_model_len,
        size_bytes=sum(part.num_bytes for part in listed),
    )
    return BasePlan(model, device, dtype, max_model_len, listed, spec, grid, tuple(rank_bytes))


def _parts(
    blueprint: Blueprint, device: str, dtype: str, max_model_len: int, place: RankPlace, rounded: Collection[str]
) -> Iterator[tuple[str, str, int]]:
    """Yield what a rank holds: a part's name, its format, and bytes.

    Args:
        rounded: formats of weights whose activations are rounded to int8, as `rounded_formats` has
            them. By row, int4's kernel has zeros for all groups, and scales in 16 bits where they
            are numbers of bfloat16; kernels of groups of 32 also where they are float16's.
    """
    config, tensors, stage = blueprint.config, blueprint.tensors, place.stage
    if stage.is_first:
        shape = place.modules["embed_tokens"][1], config.hidden_size
        yield "embedding", *_embedding(blueprint, shape, device, dtype, is_whole=place.shard.size == 1)
    for name in blueprint.norms:
        if stage.has_tensor(name):
            yield "norms", "float32", 4 * prod(tensors[name].shape)
    for rope in config.ropes:
        yield "rotary", "float32", 4 * max_model_len * rope.rotated_dim(config.head_dim)
    names = {
        SiteKind.LAYER: "linears",
        SiteKind.EXPERT: "experts",
        SiteKind.ROUTER: "routers",
        SiteKind.HEAD: "head",
    }
    for site in blueprint.sites:
        if not (stage.is_last if site.kind is SiteKind.HEAD else site.layer in stage.layers):
            continue
        cut, first = cut_of(place.shard, site), 0
        in_features = site.in_features if cut.columns is None else cut.columns[1] - cut.columns[0]
        kept = "float32" if site.kind is SiteKind.ROUTER else dtype
        bias_bytes = 4 if device == "cpu" else 2
        num_biases = 0
        for module in site.modules:
            rows = cut.rows_in(first, first + module.out_features)
            first += module.out_features
            out_features = module.out_features if rows is None else sum(end - start for start, end in rows)
            num_biases += out_features
            shape = out_features, in_features
            yield names[site.kind], *_weight(blueprint, site, module, kept, shape, rounded)
        weights = [blueprint.stored.get(module.path) for module in site.modules]
        if any(weight is not None and weight.scheme.is_reordered and weight.order_name for weight in weights):
            # the order of the inputs, which linears of a site share
            yield names[site.kind], "int32", 4 * in_features
        # a site has a bias for all of its linears, or none
        if cut.has_bias and any(module.has_bias for module in site.modules):
            yield names[site.kind], kept, bias_bytes * num_biases
    if blueprint.is_head_tied and stage.is_last:
        # kept in addition to the embedding, in the order that products read
        shape = place.modules["lm_head"]
        stored = blueprint.stored_embedding
        if stored is not None:
            yield "head", stored.scheme.format, _block_bytes(stored, *shape, rounded)
            return
        yield "head", *_float_weight(shape, blueprint.head_quantize, dtype, config.hidden_size, rounded)


def _embedding(
    blueprint: Blueprint, shape: tuple[int, int], device: str, dtype: str, *, is_whole: bool
) -> tuple[str, int]:
    """Choose the format of the embedding, and compute its bytes.

    Args:
        is_whole: False: the base is cut, and this is a part.
    """
    stored, size = blueprint.stored_embedding, prod(shape)
    if stored is None:
        found = blueprint.tensors[blueprint.config.architecture.embedding].dtype
        return _STORED_NAMES[found], size * ITEM_SIZES[found]
    if device == "cpu" and is_whole and blueprint.is_head_tied:
        # the head's rows are the embedding's
        return stored.scheme.format, 0
    if device == "cpu" and is_whole:
        return stored.scheme.format, _block_bytes(stored, *shape, ())
    kept = "float32" if device == "cpu" else dtype
    return kept, size * DTYPE_BYTES[kept]


def _block_bytes(stored: StoredWeight, out_features: int, in_features: int, rounded: Collection[str]) -> int:
    """Compute the bytes of GGUF's blocks in the order that kernels read."""
    scheme, group = stored.scheme, stored.group_size
    block = BLOCK_FORMATS[scheme.block_type].block
    # a block of one group has its scale in float16
    is_half = f"{scheme.format}-g32" in rounded and block == group
    group_bytes = (2 if is_half else 4) + (0 if scheme.is_symmetric else 4)
    return _quantized_bytes(scheme.format, out_features, in_features, group, group_bytes)


def _weight(
    blueprint: Blueprint,
    site: SitePlan,
    module: ModulePlan,
    dtype: str,
    kept: tuple[int, int],
    rounded: Collection[str],
) -> tuple[str, int]:
    """Choose the format of a linear's weight, and compute the bytes of what is kept of it.

    Args:
        kept: out_features and in_features.
    """
    stored, (out_features, in_features) = blueprint.stored.get(module.path), kept
    if stored is None:
        return _float_weight(kept, site.quantize, dtype, site.in_features, rounded)
    if stored.scheme.layout is Layout.GGUF:
        return stored.scheme.format, _block_bytes(stored, out_features, in_features, rounded)
    if stored.scheme.layout is Layout.BITSANDBYTES:
        return "nf4", _quantized_bytes("nf4", out_features, in_features, NF4_GROUP_SIZE)
    scale = blueprint.tensors[f"{module.path}.{stored.scale_name}"]
    group = min(in_features, stored.group_size)
    format, has_zeros, scale_bytes = stored.scheme.format, not stored.scheme.is_symmetric, 4
    is_permuted = stored.scheme.is_reordered and stored.order_name
    if f"{format}-g32" in rounded and not stored.scheme.rotation and not is_permuted and group % 32 == 0:
        scale_bytes = 2 if scale.dtype in ("BF16", "F16") else 4
    elif format == "int4" and "int4" in rounded:
        has_zeros, scale_bytes = True, 2 if scale.dtype == "BF16" else 4
    return format, _quantized_bytes(format, out_features, in_features, group, scale_bytes + has_zeros)


def _float_weight(
    kept: tuple[int, int], quantize: str, dtype: str, whole_in_features: int, rounded: Collection[str]
) -> tuple[str, int]:
    """Choose the format of a float weight once it is rounded, and compute the bytes kept of it.

    Args:
        kept: out_features and in_features.
        whole_in_features: of the weight before it is cut, by which its groups are.
    """
    out_features, in_features = kept
    if quantize == "none":
        return dtype, out_features * in_features * DTYPE_BYTES[dtype]
    group = min(in_features, group_size(quantize, whole_in_features))
    group_bytes = 4
    if quantize == "int4":
        group_bytes = (2 if "int4" in rounded else 4) + 1
    return quantize, _quantized_bytes(quantize, out_features, in_features, group, group_bytes)


def _quantized_bytes(format: str, out_features: int, in_features: int, group: int, group_bytes: int = 4) -> int:
    """Compute the bytes of codes, and of the scale and the zero of each group of inputs."""
    code_bytes = in_features // 2 if format in PACKED_FORMATS else in_features
    return out_features * (code_bytes + group_bytes * (in_features // group))
