"""Memory of a resident base on a device, by format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from loraserve.config import AUTO_DTYPES, EngineConfig
from loraserve.errors import ConfigError, ModelError
from loraserve.model.checkpoint.blueprint import (
    Blueprint,
    ModulePlan,
    SiteKind,
    SitePlan,
    check_gpu,
    context_len,
    draw,
    rounded_formats,
)
from loraserve.model.checkpoint.headers import ITEM_SIZES, read_headers
from loraserve.model.config.formats import group_size
from loraserve.model.config.model_config import ModelConfig, read_config
from loraserve.model.config.quantization_config import Layout
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.common.formats import NF4_GROUP_SIZE

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
        parts: largest first.
        spec: as the server will have it, but for the digest, which only reading the weights tells:
            it is empty.
    """

    config: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    parts: tuple[Part, ...]
    spec: BaseSpec

    @property
    def num_bytes(self) -> int:
        return self.spec.size_bytes

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block, keys and values of all layers.

        They are float32 on a CPU, of the activations' dtype on a GPU.
        """
        config = self.config
        item = 4 if self.device == "cpu" else DTYPE_BYTES[self.dtype]
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * item


def plan_base(config: EngineConfig, device: str) -> BasePlan:
    """Read the headers of the base's directory.

    Args:
        config: what the engine would be told.
        device: cpu or cuda.

    Raises:
        ConfigError: the device can't do what is asked, max_model_len is more than the model has, or
            the checkpoint is quantized to something else.
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
    model = read_config(model_dir)
    if device == "cuda":
        check_gpu(model)
    max_model_len = context_len(model, config.max_model_len)
    blueprint = draw(model, read_headers(model_dir), config.quantize)
    rounded_formats(blueprint, config.activation_dtype, device)
    parts = Counter[tuple[str, str]]()
    for name, format, num_bytes in _parts(blueprint, device, dtype, max_model_len):
        parts[name, format] += num_bytes
    listed = tuple(Part(*key, num_bytes) for key, num_bytes in parts.most_common())
    spec = blueprint.spec(
        id=config.model_id,
        digest=Digest(""),
        dtype=dtype,
        max_model_len=max_model_len,
        size_bytes=sum(part.num_bytes for part in listed),
    )
    return BasePlan(model, device, dtype, max_model_len, listed, spec)


def _parts(blueprint: Blueprint, device: str, dtype: str, max_model_len: int) -> Iterator[tuple[str, str, int]]:
    config, tensors = blueprint.config, blueprint.tensors
    embedding = tensors[config.architecture.embedding]
    yield "embedding", _STORED_NAMES[embedding.dtype], prod(embedding.shape) * ITEM_SIZES[embedding.dtype]
    for name in blueprint.norms:
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
        kept = "float32" if site.kind is SiteKind.ROUTER else dtype
        bias_bytes = 4 if device == "cpu" else 2
        for module in site.modules:
            yield names[site.kind], *_weight(blueprint, site, module, kept)
        # a site has a bias for all of its linears, or none
        if any(module.has_bias for module in site.modules):
            num_biases = sum(module.out_features for module in site.modules)
            yield names[site.kind], kept, bias_bytes * num_biases
    if blueprint.is_head_tied:
        # kept beside the embedding, in the order that products read
        rows = config.vocab_size, config.hidden_size
        yield "head", *_float_weight(*rows, blueprint.head_quantize, dtype)


def _weight(blueprint: Blueprint, site: SitePlan, module: ModulePlan, dtype: str) -> tuple[str, int]:
    """Return the format of a linear's weight, and its bytes."""
    stored, in_features = blueprint.stored.get(module.path), site.in_features
    if stored is None:
        return _float_weight(module.out_features, in_features, site.quantize, dtype)
    if stored.scheme.layout is Layout.BITSANDBYTES:
        return "nf4", _quantized_bytes("nf4", module.out_features, in_features, NF4_GROUP_SIZE)
    shape = blueprint.tensors[f"{module.path}.weight_scale"].shape
    group = stored.group_size(shape[-1] if len(shape) == 2 else 1)
    format, num_zeros = stored.scheme.format, 0 if stored.scheme.is_symmetric else in_features // group
    num_bytes = _quantized_bytes(format, module.out_features, in_features, group)
    return format, num_bytes + module.out_features * num_zeros


def _float_weight(out_features: int, in_features: int, quantize: str, dtype: str) -> tuple[str, int]:
    if quantize == "none":
        return dtype, out_features * in_features * DTYPE_BYTES[dtype]
    group = group_size(quantize, in_features)
    return quantize, _quantized_bytes(quantize, out_features, in_features, group)


def _quantized_bytes(format: str, out_features: int, in_features: int, group: int) -> int:
    """Codes, and a float32 scale for each group of inputs."""
    code_bytes = in_features // 2 if format in ("int4", "nf4") else in_features
    return out_features * (code_bytes + 4 * (in_features // group))
