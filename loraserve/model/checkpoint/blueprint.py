"""Plan of a base, from its config and the headers of its files.

It lists which linears become one, which tensors must exist, and which formats they are kept in. The
loader builds from it; plans of memory are made of it. Reads no weight and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol

from loraserve.errors import ConfigError, InvariantViolation, MissingTensor, UnexpectedTensor
from loraserve.model.checkpoint.headers import StoredTensor
from loraserve.model.checkpoint.stored_weights import ExpectedTensor, StoredWeight, find_stored_weight
from loraserve.model.config.architecture import Architecture, ExpertPaths
from loraserve.model.config.formats import group_size
from loraserve.model.config.model_config import ModelConfig
from loraserve.model.config.quantization_config import QuantizationConfig
from loraserve.types import BaseSpec, Digest, ExpertsSpec
from loraserve_kernels.common.formats import FORMATS, GROUP_SIZES, ROUNDED_BY_ROW, ROUNDED_IN_GROUPS
from loraserve_kernels.common.sites import LAYER_SITES, SITES

_IGNORED_ENDING = ".rotary_emb.inv_freq"
"""A buffer that old Llama checkpoints carry; the config has the same."""

HEAD_FORMATS = {"int4": "int8", "nf4": "int8"}
"""The head's error goes straight into the logits,
so it has eight bits where the layers have four.
"""


class SiteKind(Enum):
    LAYER = "a layer's, that adapters know"
    ROUTER = "what chooses experts, or weighs the shared one: float32 always"
    EXPERT = "one of an expert's two"
    HEAD = "the head"


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Linear of the checkpoint.

    Attributes:
        path: ``model.layers.0.self_attn.q_proj``.
    """

    path: str
    out_features: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class SitePlan:
    """Linears with a common input that become one.

    Attributes:
        layer: 0 for the head.
        name: as adapters name it; empty of experts and their router.
        quantize: what float weights are rounded to; ``none``: they aren't.
    """

    kind: SiteKind
    layer: int
    name: str
    modules: tuple[ModulePlan, ...]
    in_features: int
    quantize: str


class WeightFormats(Protocol):
    """Formats of a base's linears; `Blueprint` has them."""

    @property
    def stored(self) -> Mapping[str, StoredWeight]: ...

    @property
    def quantize(self) -> str: ...

    @property
    def head_quantize(self) -> str: ...

    @property
    def quantization(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A base that can be built from its files.

    Attributes:
        stored: the linears that the checkpoint holds quantized, by path.
        quantize: what the others are rounded to; ``none``: they aren't, and always where some are
            quantized already.
        head_quantize: so for the head.
        norms: the names of their tensors.
        sites: in order; an expert's gate and up before its down, experts in theirs, the shared one
            and its gate after the others.
        expected: every tensor that is read.
        tensors: every tensor that there is.
    """

    config: ModelConfig
    stored: Mapping[str, StoredWeight]
    quantize: str
    head_quantize: str
    norms: tuple[str, ...]
    sites: tuple[SitePlan, ...]
    expected: Mapping[str, ExpectedTensor]
    tensors: Mapping[str, StoredTensor]

    @property
    def stored_formats(self) -> list[str]:
        """Formats that the checkpoint is quantized to already; empty if to none."""
        return sorted({weight.scheme.format for weight in self.stored.values()})

    @property
    def quantization(self) -> str:
        """The linears' formats; of the layers alone where the head was rounded to another."""
        return "+".join(self.stored_formats) or self.quantize

    @property
    def is_head_tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return all(site.kind is not SiteKind.HEAD for site in self.sites)

    @property
    def is_head_quantized(self) -> bool:
        """Whether the head's weight is rounded, by the checkpoint or while it is loaded."""
        path = _embedding_path(self.config) if self.is_head_tied else _head_path(self.config)
        return path in self.stored or self.head_quantize != "none"

    @property
    def stored_embedding(self) -> StoredWeight | None:
        """Storage of the embedding; None: as floats."""
        return self.stored.get(_embedding_path(self.config))

    @property
    def num_parameters(self) -> int:
        parts = {f"{path}.{suffix}" for path, weight in self.stored.items() for suffix in weight.tensors}
        floats = (self.tensors[name] for name in self.expected if name not in parts)
        return sum(prod(tensor.shape) for tensor in floats) + sum(
            weight.out_features * weight.in_features for weight in self.stored.values()
        )

    def spec(self, *, id: str, digest: Digest, dtype: str, max_model_len: int, size_bytes: int) -> BaseSpec:
        """Build the base's spec, which other packages read.

        Args:
            dtype: of what isn't quantized.
            size_bytes: what it takes once it is resident.
        """
        config, architecture = self.config, self.config.architecture
        experts, shared = _experts_spec(config), shared_expert(config)
        return BaseSpec(
            id=id,
            digest=digest,
            architecture=architecture.name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            modules={
                **config.module_shapes,
                **{module: shape for module, (_, shape) in shared.items()},
                "lm_head": (config.vocab_size, config.hidden_size),
                "embed_tokens": (config.hidden_size, config.vocab_size),
            },
            module_paths={
                **architecture.module_paths,
                **{module: path for module, (path, _) in shared.items()},
                "lm_head": architecture.head.removesuffix(".weight"),
                "embed_tokens": architecture.embedding.removesuffix(".weight"),
            },
            layers_path=architecture.layers,
            eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
            dtype=dtype,
            quantization=self.quantization,
            num_parameters=self.num_parameters,
            size_bytes=size_bytes,
            biased_modules=tuple(module for module in config.module_shapes if config.has_bias(module)),
            norm_paths={
                norm: name.removesuffix(".weight")
                for norm, name in (
                    ("attention_norm", architecture.attention_norm),
                    ("attention_out_norm", architecture.attention_out_norm),
                    ("mlp_norm", architecture.mlp_norm),
                    ("mlp_out_norm", architecture.mlp_out_norm),
                    ("norm", architecture.norm),
                )
                if name is not None
            },
            norm_offset=architecture.norm_offset,
            is_head_tied=self.is_head_tied,
            is_head_quantized=self.is_head_quantized,
            head_dim=config.head_dim,
            experts=experts,
        )


def draw(config: ModelConfig, tensors: Mapping[str, StoredTensor], quantize: str) -> Blueprint:
    """Draw up what is built of a config and a checkpoint, whose headers must match the config.

    Raises:
        ConfigError: the checkpoint is quantized to something else than `quantize`.
        MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong with the
            checkpoint, or can't be rounded so.
    """
    stored = _find_stored_weights(config, tensors)
    if stored:
        check_contradiction(config.quantization, sorted({weight.scheme.format for weight in stored.values()}), quantize)
        # what the checkpoint has in a float dtype stays so, but for the head next to weights that
        # were made to be served with rounded activations
        quantize = "none"
    is_rotated = any(weight.scheme.rotation for weight in stored.values())
    head_quantize = "int8" if is_rotated else HEAD_FORMATS.get(quantize, quantize)
    architecture = config.architecture
    norms, sites, unread = [architecture.norm], list[SitePlan](), set[str]()
    expected = {
        architecture.embedding: ExpectedTensor(((config.vocab_size, config.hidden_size),)),
        architecture.norm: ExpectedTensor(((config.hidden_size,),)),
    }
    if (table := stored.get(_embedding_path(config))) is not None:
        expected |= {f"{table.path}.{suffix}": part for suffix, part in table.tensors.items()}
    # a checkpoint may hold a head although its config ties it to the embedding: transformers then
    # takes the head's own
    path = _head_path(config)
    if not config.is_tied or architecture.head in tensors or path in stored:
        modules = (ModulePlan(path, config.vocab_size, False),)
        sites.append(SitePlan(SiteKind.HEAD, 0, "lm_head", modules, config.hidden_size, head_quantize))
    for site in sites:
        _expect_site(site, stored, expected, unread)
    for layer in range(config.num_layers):
        for name, size in _norm_sizes(config).items():
            norms.append(f"{architecture.layers}.{layer}.{name}")
            expected[norms[-1]] = ExpectedTensor(((size,),))
        for site in _sites_of_layer(config, layer, quantize):
            sites.append(site)
            _expect_site(site, stored, expected, unread)
    blueprint = Blueprint(config, stored, quantize, head_quantize, tuple(norms), tuple(sites), expected, tensors)
    _check(blueprint, unread)
    return blueprint


def check_gpu(config: ModelConfig) -> None:
    """Raise an error unless a GPU's kernels have all that this model needs.

    Raises:
        ConfigError: they haven't; it names what.
    """
    if config.experts is not None:
        raise ConfigError(
            f"{config.architecture.name} has experts, which aren't served on GPUs yet.", hint="Use --device cpu."
        )


def check_gpu_blocks(config: QuantizationConfig | None) -> None:
    """Raise an error unless a GPU's kernels read all blocks of a GGUF file, if it is one.

    Raises:
        ConfigError: they don't; it names the types.
    """
    schemes = () if config is None or config.by_path is None else config.by_path.values()
    unread = {
        one.block_type
        for one in schemes
        if not one.is_symmetric or one.group_size not in GROUP_SIZES or one.format not in FORMATS
    }
    if unread:
        raise ConfigError(
            f"The file has weights in {', '.join(sorted(unread))}, which aren't served on GPUs yet.",
            hint="Use --device cpu, or give a file in Q8_0 or Q4_0, or the Hugging Face directory.",
        )


def rounded_formats(blueprint: WeightFormats, activation_dtype: str, device: str) -> frozenset[str]:
    """Choose the formats of weights whose activations are rounded to int8 on a CPU.

    By row they are ``int8``, for weights by output channel, and ``int4``; in groups of 32 inputs
    ``int8-g32``, ``int4-g32`` and ``mxfp4-g32``, which weights take that aren't rotated and have
    such groups.

    Args:
        activation_dtype: ``int8``: all. ``float``: none. ``auto``: all where float weights are
            rounded while they're loaded, or the checkpoint holds rotated ones; rows alone where it
            holds weights that were calibrated for that (compressed-tensors' int8 by token); groups
            alone where it holds other quantized weights, whose codes can't be rotated any more.
        device: cpu or cuda. A GPU's activations keep the 16 bits of its dtype.

    Raises:
        ConfigError: int8 is requested, on a GPU or of a base without such weights.
    """
    if activation_dtype == "int8":
        if device != "cpu":
            raise ConfigError(
                "--activation-dtype int8 is for CPUs; a GPU's linears keep their activations in 16 bits.",
                hint="Leave --activation-dtype out.",
            )
        if not _can_round(blueprint):
            raise ConfigError(
                f"--activation-dtype int8: no linear of this base ({blueprint.quantization}) has int8, int4 "
                "or mxfp4 weights, which int8 activations need.",
                hint="Leave --activation-dtype out, or give a float checkpoint and --quantize int8.",
            )
        return ROUNDED_BY_ROW | ROUNDED_IN_GROUPS
    if activation_dtype != "auto" or device != "cpu":
        return frozenset()
    schemes = [weight.scheme for weight in blueprint.stored.values()]
    if any(scheme.has_rounded_inputs for scheme in schemes):
        return ROUNDED_BY_ROW
    is_made_for_rows = all(scheme.rotation for scheme in schemes)
    return ROUNDED_BY_ROW | ROUNDED_IN_GROUPS if is_made_for_rows else ROUNDED_IN_GROUPS


def _can_round(blueprint: WeightFormats) -> bool:
    if {"int8", "int4"} & {blueprint.quantize, blueprint.head_quantize}:
        return True
    return any(f"{weight.scheme.format}-g32" in ROUNDED_IN_GROUPS for weight in blueprint.stored.values())


def context_len(config: ModelConfig, max_model_len: int | None) -> int:
    """Choose the longest context that is served: the requested one, or the config's.

    Raises:
        ConfigError: more is requested than the model's positions cover.
    """
    if max_model_len is None:
        return config.max_model_len
    if not 0 < max_model_len <= config.max_stretched_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; expected at most {config.max_stretched_len}, "
            "this model's longest context.",
            hint="Lower --max-model-len, or leave it out.",
        )
    return max_model_len


def _norm_sizes(config: ModelConfig) -> dict[str, int]:
    """List the sizes of a layer's norms, by their names inside it."""
    architecture = config.architecture
    names = (
        architecture.attention_norm,
        architecture.attention_out_norm,
        architecture.mlp_norm,
        architecture.mlp_out_norm,
    )
    sizes = {name: config.hidden_size for name in names if name is not None}
    if architecture.has_qk_norm:
        num_heads = (config.num_heads, config.num_kv_heads) if architecture.is_qk_norm_whole else (1, 1)
        for name, count in zip((architecture.q_norm, architecture.k_norm), num_heads, strict=True):
            sizes[name] = count * config.head_dim
    return sizes


def _sites_of_layer(config: ModelConfig, layer: int, quantize: str) -> Iterator[SitePlan]:
    for site in _layer_sites(config):
        in_features = config.module_shapes[SITES[site][0]][1]
        yield SitePlan(SiteKind.LAYER, layer, site, _site_modules(config, layer, site), in_features, quantize)
    if config.experts is None:
        return
    paths, prefix = _experts_of(config.architecture), f"{config.architecture.layers}.{layer}."
    # the router decides between experts: it isn't rounded
    router = ModulePlan(prefix + paths.router, config.experts.num_experts, False)
    yield SitePlan(SiteKind.ROUTER, layer, "", (router,), config.hidden_size, "none")
    experts = [
        (f"{prefix}{paths.experts}.{expert}.", config.experts.intermediate_size)
        for expert in range(config.experts.num_experts)
    ]
    if config.experts.shared_intermediate_size is not None:
        gate = ModulePlan(prefix + paths.shared_gate, 1, False)
        yield SitePlan(SiteKind.ROUTER, layer, "", (gate,), config.hidden_size, "none")
        experts.append((f"{prefix}{paths.shared}.", config.experts.shared_intermediate_size))
    for path, inner in experts:
        for modules, in_features in _expert_modules(config, path, inner):
            yield SitePlan(SiteKind.EXPERT, layer, "", modules, in_features, quantize)


def _expect_site(
    site: SitePlan, stored: Mapping[str, StoredWeight], expected: dict[str, ExpectedTensor], unread: set[str]
) -> None:
    if site.quantize != "none":
        # refuses a width before anything is read
        group_size(site.quantize, site.in_features)
    for module in site.modules:
        weight = stored.get(module.path)
        if weight is None:
            expected[f"{module.path}.weight"] = ExpectedTensor(((module.out_features, site.in_features),))
        else:
            unread.update(f"{module.path}.{suffix}" for suffix in weight.unread)
            expected.update({f"{module.path}.{suffix}": part for suffix, part in weight.tensors.items()})
        if module.has_bias:
            expected[f"{module.path}.bias"] = ExpectedTensor(((module.out_features,),))


def _find_stored_weights(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredWeight]:
    """Find the linears that the checkpoint holds quantized, by path."""
    linears = {
        module.path: (module.out_features, site.in_features, module.has_bias)
        for layer in range(config.num_layers)
        for site in _sites_of_layer(config, layer, "none")
        if site.kind is not SiteKind.ROUTER
        for module in site.modules
    }
    if not config.is_tied or any(name.startswith(_head_path(config) + ".") for name in tensors):
        linears[_head_path(config)] = (config.vocab_size, config.hidden_size, False)
    if config.quantization is not None and config.quantization.has_embedding:
        linears[_embedding_path(config)] = (config.vocab_size, config.hidden_size, False)
    found = {
        path: find_stored_weight(config.quantization, path, (out_features, in_features), tensors, has_bias=has_bias)
        for path, (out_features, in_features, has_bias) in linears.items()
    }
    return {path: weight for path, weight in found.items() if weight is not None}


def _site_modules(config: ModelConfig, layer: int, site: str) -> tuple[ModulePlan, ...]:
    """Plan what the checkpoint holds of a site's linears."""
    architecture, prefix = config.architecture, f"{config.architecture.layers}.{layer}."
    modules = tuple(
        ModulePlan(prefix + architecture.module_paths[module], config.module_shapes[module][0], config.has_bias(module))
        for module in SITES[site]
    )
    if site not in architecture.fused_paths:
        return modules
    # the rows of the linears stand there in the site's order
    path, size = prefix + architecture.fused_paths[site], sum(module.out_features for module in modules)
    return (ModulePlan(path, size, any(module.has_bias for module in modules)),)


def _layer_sites(config: ModelConfig) -> list[str]:
    """List the sites of a layer that adapters can change."""
    return [site for site in LAYER_SITES if SITES[site][0] in config.module_shapes]


def _expert_modules(config: ModelConfig, prefix: str, inner: int) -> Iterator[tuple[tuple[ModulePlan, ...], int]]:
    """Yield an expert's two sites.

    Each is what the checkpoint holds of its linears, and their in_features.
    """
    paths, hidden = _experts_of(config.architecture), config.hidden_size
    yield (ModulePlan(prefix + paths.gate, inner, False), ModulePlan(prefix + paths.up, inner, False)), hidden
    yield (ModulePlan(prefix + paths.down, hidden, False),), inner


def _experts_spec(config: ModelConfig) -> ExpertsSpec | None:
    """Describe a layer's mixture of experts as adapters change it; None where there is none."""
    if config.experts is None:
        return None
    paths, sizes, hidden = _experts_of(config.architecture), config.experts, config.hidden_size
    inner, each = sizes.intermediate_size, f"{paths.experts}.{{}}."
    modules = {
        "experts.gate_proj": (inner, hidden),
        "experts.up_proj": (inner, hidden),
        "experts.down_proj": (hidden, inner),
        "router": (sizes.num_experts, hidden),
    }
    module_paths = {
        "experts.gate_proj": each + paths.gate,
        "experts.up_proj": each + paths.up,
        "experts.down_proj": each + paths.down,
        "router": paths.router,
    }
    if sizes.shared_intermediate_size is not None:
        modules["shared_gate"], module_paths["shared_gate"] = (1, hidden), paths.shared_gate
    return ExpertsSpec(
        num_experts=sizes.num_experts, modules=modules, module_paths=module_paths, parameters_path=paths.parameters
    )


def shared_expert(config: ModelConfig) -> dict[str, tuple[str, tuple[int, int]]]:
    """Map an MLP's linears to the shared expert's: path in a layer, and shape."""
    if config.experts is None or config.experts.shared_intermediate_size is None:
        return {}
    paths = _experts_of(config.architecture)
    inner, hidden = config.experts.shared_intermediate_size, config.hidden_size
    return {
        "gate_proj": (f"{paths.shared}.{paths.gate}", (inner, hidden)),
        "up_proj": (f"{paths.shared}.{paths.up}", (inner, hidden)),
        "down_proj": (f"{paths.shared}.{paths.down}", (hidden, inner)),
    }


def _experts_of(architecture: Architecture) -> ExpertPaths:
    if architecture.experts is None:
        raise InvariantViolation(f"{architecture.name} has no experts")
    return architecture.experts


def _head_path(config: ModelConfig) -> str:
    return config.architecture.head.removesuffix(".weight")


def _embedding_path(config: ModelConfig) -> str:
    return config.architecture.embedding.removesuffix(".weight")


def check_contradiction(quantization: QuantizationConfig | None, formats: list[str], quantize: str) -> None:
    """Raise an error if a checkpoint in these formats can't be served as `quantize`.

    Raises:
        ConfigError: it would be quantized again.
    """
    if quantize != "none" and formats != [quantize]:
        method = "" if quantization is None else f" by {quantization.method}"
        raise ConfigError(
            f"--quantize {quantize}: the checkpoint is quantized to {' and '.join(formats)} already{method}, "
            "and can't be quantized again.",
            hint="Leave --quantize out, or give the float checkpoint.",
        )


def _check(blueprint: Blueprint, unread: set[str]) -> None:
    """Compare the headers with what the model needs, before a byte of weights is read."""
    name_of_model, stored = blueprint.config.architecture.name, blueprint.tensors
    missing = [name for name in blueprint.expected if name not in stored]
    if missing:
        shapes = blueprint.expected[missing[0]].shapes
        shape = f" of shape {list(shapes[0])}" if shapes else ""
        raise MissingTensor(
            f"The checkpoint lacks {_listed(missing)}; {name_of_model} with this config.json needs "
            f"{missing[0]}{shape}.",
            hint="Fetch the checkpoint again, or check config.json.",
        )
    unexpected = [
        name
        for name in stored
        if name not in blueprint.expected and name not in unread and not name.endswith(_IGNORED_ENDING)
    ]
    if unexpected:
        raise UnexpectedTensor(
            f"The checkpoint holds {_listed(unexpected)}, which {name_of_model} with this config.json doesn't have: "
            "ignoring tensors would change the answers.",
            hint="Check num_hidden_layers, the bias flags, the architecture and quantization_config in config.json.",
        )
    for name, expected in blueprint.expected.items():
        expected.check(stored[name])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
