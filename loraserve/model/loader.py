"""From a directory to a resident decoder. Weights stream in tensor by tensor: never more than the final weights and one shard are in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from loraserve.errors import ConfigError, InvariantViolation, MissingTensor, ModelError, ShapeMismatch, UnexpectedTensor
from loraserve.model.architectures import Architecture, ExpertPaths
from loraserve.model.backend import Backend, DecoderLayer, Norm, make_backend
from loraserve.model.checkpoint import Checkpoint, open_checkpoint
from loraserve.model.config import ExpertsConfig, ModelConfig, read_config
from loraserve.model.decoder import Decoder
from loraserve.model.experts import Expert, MixtureOfExperts
from loraserve.model.layers import RMSNorm
from loraserve.model.lora import LoraLinear
from loraserve.model.mlp import GatedMlp, Mlp
from loraserve.model.prequantized import Expected, StoredWeight, find_stored_weight
from loraserve.model.quantize import Linear, group_size, make_linear, quantize_weight
from loraserve.model.rotary import RotaryEmbedding
from loraserve.model.site import MakeLinear, Site, SiteModule, return_free_memory
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.layout import LAYER_SITES, SITES
from loraserve_kernels.quantized import QuantizedWeight

_IGNORED_ENDING = ".rotary_emb.inv_freq"
"""A buffer that old Llama checkpoints carry; the config says the same."""

_HEAD_FORMATS = {"int4": "int8", "nf4": "int8"}
"""The head's error goes straight into the logits, so it has eight bits where the layers have four."""


def load_model(
    model_dir: Path, *, model_id: str, dtype: torch.dtype, quantize: str, device: str, max_model_len: int | None
) -> Decoder:
    """Return the base model of `model_dir`, ready to run.

    Args:
        model_id: the name that clients use.
        dtype: what weights are kept in when they aren't quantized; activations are float32.
        quantize: ``none``: weights stay what they are in the checkpoint, also where it's quantized already. ``int8``, ``int4``, ``nf4`` or ``fp8``:
            what a float checkpoint's linears are rounded to while they stream in; the head to int8 for the two of 4 bits.
        device: ``cpu`` or ``cuda``.
        max_model_len: None: what the config says. More than that only as far as its rope scaling covers.

    Raises:
        ConfigError: this machine can't do what is asked, max_model_len is more than the model has, or the checkpoint is quantized to something else than `quantize`.
        UnknownArchitecture, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong with the directory, and where.
    """
    backend = make_backend(device, dtype, quantize)
    config = read_config(model_dir)
    if device != "cpu":
        _check_gpu(config)
    context = _context(config, max_model_len)
    checkpoint = open_checkpoint(model_dir)
    stored = _find_stored_weights(config, checkpoint)
    formats = sorted({weight.scheme.format for weight in stored.values()})
    if formats:
        _check_contradiction(config, formats, quantize)
        for format in formats:
            # refuses what this device can't multiply
            make_backend(device, dtype, format)
        # what the checkpoint has in a float dtype stays so
        backend, quantize = make_backend(device, dtype, "none"), "none"
    return _Loader(config, checkpoint, stored, backend, dtype, quantize).load(model_id, context)


def _check_gpu(config: ModelConfig) -> None:
    """Return if a GPU's kernels have all that this model needs."""
    missing = None
    if config.experts is not None:
        missing = "experts"
    elif any(rope.rotated != 1 for rope in config.ropes):
        missing = "heads that turn in part (partial_rotary_factor)"
    if missing is not None:
        raise ConfigError(
            f"{config.architecture.name} has {missing}, which aren't served on GPUs yet.", hint="Use --device cpu."
        )


def _find_stored_weights(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
    """The linears that the checkpoint holds quantized, by path."""
    linears = {
        path: (out_features, config.module_shapes[SITES[site][0]][1])
        for layer in range(config.num_layers)
        for site in _layer_sites(config)
        for path, out_features, _ in _site_modules(config, layer, site)
    }
    if config.experts is not None:
        for layer in range(config.num_layers):
            for expert in range(config.experts.num_experts):
                for modules, in_features in _expert_modules(config, config.experts, layer, expert):
                    linears |= {path: (out_features, in_features) for path, out_features, _ in modules}
    if not config.is_tied or any(name.startswith(_head_path(config) + ".") for name in checkpoint.tensors):
        linears[_head_path(config)] = (config.vocab_size, config.hidden_size)
    found = {
        path: find_stored_weight(config.quantization, path, shape, checkpoint.tensors)
        for path, shape in linears.items()
    }
    return {path: weight for path, weight in found.items() if weight is not None}


def _site_modules(config: ModelConfig, layer: int, site: str) -> list[tuple[str, int, bool]]:
    """What the checkpoint holds of a site's linears: each one's path, out_features and whether it has a bias."""
    architecture, prefix = config.architecture, f"{config.architecture.layers}.{layer}."
    modules = [
        (prefix + architecture.module_paths[module], config.module_shapes[module][0], config.has_bias(module))
        for module in SITES[site]
    ]
    if site not in architecture.fused_paths:
        return modules
    # the rows of the linears stand there in the site's order
    sizes, biases = [size for _, size, _ in modules], [has_bias for _, _, has_bias in modules]
    return [(prefix + architecture.fused_paths[site], sum(sizes), any(biases))]


def _layer_sites(config: ModelConfig) -> list[str]:
    """The sites of a layer that adapters know."""
    return [site for site in LAYER_SITES if SITES[site][0] in config.module_shapes]


def _expert_modules(
    config: ModelConfig, experts: ExpertsConfig, layer: int, expert: int
) -> tuple[tuple[list[tuple[str, int, bool]], int], tuple[list[tuple[str, int, bool]], int]]:
    """An expert's two sites: what the checkpoint holds of its linears (path, out_features, whether it has a bias), and their in_features."""
    architecture = config.architecture
    paths = _experts_of(architecture)
    prefix = f"{architecture.layers}.{layer}.{paths.experts}.{expert}."
    inner, hidden = experts.intermediate_size, config.hidden_size
    gate_up = [(prefix + paths.gate, inner, False), (prefix + paths.up, inner, False)]
    return (gate_up, hidden), ([(prefix + paths.down, hidden, False)], inner)


def _experts_of(architecture: Architecture) -> ExpertPaths:
    if architecture.experts is None:
        raise InvariantViolation(f"{architecture.name} has no experts")
    return architecture.experts


def _head_path(config: ModelConfig) -> str:
    return config.architecture.head.removesuffix(".weight")


def _check_contradiction(config: ModelConfig, formats: list[str], quantize: str) -> None:
    if quantize != "none" and formats != [quantize]:
        method = "" if config.quantization is None else f" by {config.quantization.method}"
        raise ConfigError(
            f"--quantize {quantize}: the checkpoint is quantized to {' and '.join(formats)} already{method}; codes aren't rounded again.",
            hint="Leave --quantize out, or give the float checkpoint.",
        )


def _context(config: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return config.max_model_len
    if not 0 < max_model_len <= config.max_stretched_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model's positions go to {config.max_stretched_len}.",
            hint="Lower --max-model-len, or leave it out.",
        )
    return max_model_len


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        stored: Mapping[str, StoredWeight],
        backend: Backend,
        dtype: torch.dtype,
        quantize: str,
    ) -> None:
        self._config, self._checkpoint, self._dtype, self._quantize = config, checkpoint, dtype, quantize
        self._stored, self._backend = stored, backend
        self._head_quantize = _HEAD_FORMATS.get(quantize, quantize)
        # codes are made from float32, whatever the checkpoint has
        self._gather_dtype = dtype if quantize == "none" else torch.float32
        self._expected: dict[str, Expected] = {}
        self._sinks: dict[str, Callable[[str, Tensor], None]] = {}
        self._unread: set[str] = set()
        self._tensors: dict[str, Tensor] = {}
        self._sites: dict[tuple[int, str], Site] = {}
        self._routers: dict[int, Site] = {}
        # by layer, in the experts' order: gate and up, down
        self._experts: dict[int, list[tuple[Site, Site]]] = {}
        self._head: Site | None = None
        self._plan()

    def load(self, model_id: str, max_model_len: int) -> Decoder:
        config, architecture = self._config, self._config.architecture
        self._check()
        digest = self._stream()
        rotaries = [RotaryEmbedding(rope, config.head_dim, max_model_len) for rope in config.ropes]
        self._backend.bind(config, *rotaries)
        embedding = self._tensors[architecture.embedding]
        head = self._make_head(embedding)
        embedding = embedding.to(self._backend.device)
        layers = tuple(self._layer(layer) for layer in range(config.num_layers))
        norm = self._norm(architecture.norm, self._name(config.num_layers - 1, architecture.mlp_out_norm))
        sites = [site.linear.num_bytes for site in self._all_sites() if site.linear is not None]
        spec = BaseSpec(
            id=model_id,
            digest=digest,
            architecture=architecture.name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            modules={
                **config.module_shapes,
                "lm_head": (config.vocab_size, config.hidden_size),
                "embed_tokens": (config.hidden_size, config.vocab_size),
            },
            module_paths={
                **architecture.module_paths,
                "lm_head": architecture.head.removesuffix(".weight"),
                "embed_tokens": architecture.embedding.removesuffix(".weight"),
            },
            layers_path=architecture.layers,
            eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
            dtype=str(self._dtype).removeprefix("torch."),
            quantization=self._quantization(),
            num_parameters=self._num_parameters(),
            size_bytes=sum(sites)
            + sum(t.nbytes for t in self._tensors.values())
            + head.num_bytes
            + sum(r.num_bytes for r in rotaries),
            biased_modules=tuple(module for module in config.module_shapes if config.has_bias(module)),
            norm_paths={
                norm: name.removesuffix(".weight")
                for norm, name in (
                    ("attention_norm", architecture.attention_norm),
                    ("mlp_norm", architecture.mlp_norm),
                    ("norm", architecture.norm),
                )
                if name is not None
            },
            norm_offset=architecture.norm_offset,
            is_head_tied=self._head is None,
        )
        return_free_memory()
        return Decoder(
            config,
            spec,
            self._backend,
            embedding=embedding,
            layers=layers,
            norm=norm,
            head=head,
            norm_weights={name: tensor for name, tensor in self._tensors.items() if name != architecture.embedding},
        )

    def _plan(self) -> None:
        """Say of each tensor that the model needs what shape it has and where it goes."""
        config, architecture = self._config, self._config.architecture
        self._expect(architecture.embedding, (config.vocab_size, config.hidden_size), self._keep_as_is)
        self._expect(architecture.norm, (config.hidden_size,), self._keep_norm)
        # a checkpoint may hold a head although its config ties it to the embedding: transformers then takes the head's own
        path = _head_path(config)
        if not config.is_tied or architecture.head in self._checkpoint.tensors or path in self._stored:
            self._head = self._site(
                [(path, config.vocab_size, False)], config.hidden_size, self._make_head_linear, self._head_quantize
            )
        names = (
            architecture.attention_norm,
            architecture.attention_out_norm,
            architecture.mlp_norm,
            architecture.mlp_out_norm,
        )
        norms = {name: config.hidden_size for name in names if name is not None}
        if architecture.has_qk_norm:
            num_heads = (config.num_heads, config.num_kv_heads) if architecture.is_qk_norm_whole else (1, 1)
            for name, count in zip((architecture.q_norm, architecture.k_norm), num_heads, strict=True):
                norms[name] = count * config.head_dim
        for layer in range(config.num_layers):
            prefix = f"{architecture.layers}.{layer}."
            for name, size in norms.items():
                self._expect(prefix + name, (size,), self._keep_norm)
            for site in _layer_sites(config):
                self._plan_site(layer, site)
            if config.experts is not None:
                self._plan_experts(layer, config.experts)

    def _plan_site(self, layer: int, site: str) -> None:
        modules = _site_modules(self._config, layer, site)
        in_features = self._config.module_shapes[SITES[site][0]][1]
        self._sites[layer, site] = self._site(modules, in_features, self._backend.linear, self._quantize)

    def _plan_experts(self, layer: int, experts: ExpertsConfig) -> None:
        config, architecture = self._config, self._config.architecture
        router = f"{architecture.layers}.{layer}.{_experts_of(architecture).router}"
        # the router decides between experts: it isn't rounded
        self._routers[layer] = self._site(
            [(router, experts.num_experts, False)], config.hidden_size, self._make_router, "none"
        )
        self._experts[layer] = []
        for expert in range(experts.num_experts):
            gate_up, down = (
                self._site(modules, in_features, self._backend.linear, self._quantize)
                for modules, in_features in _expert_modules(config, experts, layer, expert)
            )
            self._experts[layer].append((gate_up, down))

    def _make_router(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Linear:
        return make_linear(weight, bias, quantize="none", dtype=torch.float32)

    def _all_sites(self) -> Iterator[Site]:
        yield from self._sites.values()
        yield from self._routers.values()
        for experts in self._experts.values():
            for sites in experts:
                yield from sites

    def _site(
        self, modules: Sequence[tuple[str, int, bool]], in_features: int, make: MakeLinear, quantize: str
    ) -> Site:
        """A site of these modules (path, out_features, whether it has a bias) that their tensors will go to."""
        if quantize != "none":
            # refuses a width before anything is read
            group_size(quantize, in_features)
        site = Site(
            [SiteModule(out_features, has_bias, self._stored.get(path)) for path, out_features, has_bias in modules],
            in_features,
            make=make,
            dtype=self._gather_dtype,
            quantize=quantize,
            device=self._backend.device,
        )
        for index, (path, out_features, has_bias) in enumerate(modules):
            stored = self._stored.get(path)
            if stored is None:
                self._expect(f"{path}.weight", (out_features, in_features), _put(site.put_weight, index))
            else:
                self._unread.update(f"{path}.{suffix}" for suffix in stored.unread)
                for suffix, expected in stored.tensors.items():
                    self._expected[f"{path}.{suffix}"] = expected
                    self._sinks[f"{path}.{suffix}"] = _put(site.put_part, index, stored, suffix)
            if has_bias:
                self._expect(f"{path}.bias", (out_features,), _put(site.put_bias, index))
        return site

    def _expect(self, name: str, shape: tuple[int, ...], sink: Callable[[str, Tensor], None]) -> None:
        self._expected[name] = Expected((shape,))
        self._sinks[name] = sink

    def _keep_norm(self, name: str, tensor: Tensor) -> None:
        weight, offset = tensor.float(), self._config.architecture.norm_offset
        self._tensors[name] = weight + offset if offset else weight

    def _keep_as_is(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def _make_head(self, embedding: Tensor) -> Linear:
        """The checkpoint's head, or the embedding as the head."""
        if self._head is not None:
            return _finished(self._head)
        weight = embedding.to(self._gather_dtype)
        if self._head_quantize == "none":
            return self._backend.head(weight)
        return self._backend.head(quantize_weight(weight.to(self._backend.device), self._head_quantize))

    def _make_head_linear(self, weight: Tensor | QuantizedWeight, _: Tensor | None) -> Linear:
        return self._backend.head(weight)

    def _quantization(self) -> str:
        """The linears' formats; of the layers alone where the head was rounded to another."""
        return "+".join(sorted({weight.scheme.format for weight in self._stored.values()})) or self._quantize

    def _num_parameters(self) -> int:
        parts = {f"{path}.{suffix}" for path, weight in self._stored.items() for suffix in weight.tensors}
        floats = (self._checkpoint.tensors[name] for name in self._expected if name not in parts)
        return sum(prod(tensor.shape) for tensor in floats) + sum(
            weight.out_features * weight.in_features for weight in self._stored.values()
        )

    def _check(self) -> None:
        """Compare the headers with what the model needs, before a byte of weights is read."""
        stored = self._checkpoint.tensors
        missing = [name for name in self._expected if name not in stored]
        if missing:
            shapes = self._expected[missing[0]].shapes
            shape = f" of shape {list(shapes[0])}" if shapes else ""
            raise MissingTensor(
                f"The checkpoint lacks {_listed(missing)}; {self._config.architecture.name} with this config.json has {missing[0]}{shape}.",
                hint="Fetch the checkpoint again, or check config.json.",
            )
        unexpected = [
            name
            for name in stored
            if name not in self._expected and name not in self._unread and not name.endswith(_IGNORED_ENDING)
        ]
        if unexpected:
            raise UnexpectedTensor(
                f"The checkpoint holds {_listed(unexpected)}, which {self._config.architecture.name} with this config.json doesn't have: "
                "leaving tensors out would change the answers.",
                hint="Check num_hidden_layers, the bias flags, the architecture and quantization_config in config.json.",
            )
        for name, expected in self._expected.items():
            if expected.shapes is not None and stored[name].shape not in expected.shapes:
                shapes_text = " or ".join(str(list(shape)) for shape in expected.shapes)
                raise ShapeMismatch(
                    f"The tensor {name} has the shape {list(stored[name].shape)}; expected {shapes_text} from config.json.",
                    hint="Check that config.json belongs to this checkpoint.",
                )
            if stored[name].dtype not in expected.dtypes:
                raise ModelError(
                    f"The tensor {name} is stored as {stored[name].dtype}; expected {' or '.join(expected.dtypes)}.",
                    hint="Check quantization_config in config.json, or give the float checkpoint.",
                )

    def _stream(self) -> Digest:
        """Put every tensor in its place, and return the digest of the base: of the function, not of how its files are cut."""
        tensors: list[tuple[str, str, tuple[int, ...], str]] = []
        # hashing a tensor and placing it take about as long, and both leave the interpreter's lock
        with ThreadPoolExecutor(1, "model-hash") as pool:
            for stored, tensor, raw in self._checkpoint.read(frozenset(self._expected)):
                hashed = pool.submit(_sha256, raw)
                self._sinks[stored.name](stored.name, tensor)
                tensors.append((stored.name, stored.dtype, stored.shape, hashed.result()))
                del tensor, raw, hashed
        return base_digest(self._config.identity(), tensors)

    def _layer(self, layer: int) -> DecoderLayer:
        config, architecture = self._config, self._config.architecture
        prefix = f"{architecture.layers}.{layer}."
        return DecoderLayer(
            attention_norm=self._norm(
                self._name(layer, architecture.attention_norm), self._name(layer - 1, architecture.mlp_out_norm)
            ),
            qkv=self._linear(layer, "qkv"),
            q_norm=self._head_norm(prefix + architecture.q_norm) if architecture.has_qk_norm else None,
            k_norm=self._head_norm(prefix + architecture.k_norm) if architecture.has_qk_norm else None,
            o=self._linear(layer, "o"),
            mlp_norm=self._norm(
                self._name(layer, architecture.mlp_norm), self._name(layer, architecture.attention_out_norm)
            ),
            mlp=self._mlp(layer),
            sliding_window=config.sliding_windows[layer],
            rope=config.layer_ropes[layer],
        )

    def _name(self, layer: int, name: str | None) -> str | None:
        """The whole name of a layer's tensor, if there are both."""
        return None if name is None or layer < 0 else f"{self._config.architecture.layers}.{layer}.{name}"

    def _norm(self, name: str | None, delta_name: str | None) -> Norm:
        """The norm of the sum that a delta, normed itself where it has a norm, was added to."""
        config = self._config
        return self._backend.norm(
            None if name is None else self._tensors[name],
            config.rms_norm_eps,
            delta_weight=None if delta_name is None else self._tensors[delta_name],
            delta_scale=config.residual_scale,
        )

    def _head_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensors[name].to(self._backend.device), self._config.rms_norm_eps)

    def _mlp(self, layer: int) -> Mlp:
        experts = self._config.experts
        if experts is None:
            return GatedMlp(self._linear(layer, "gate_up"), self._linear(layer, "down"), self._backend.gated)
        return MixtureOfExperts(
            _finished(self._routers[layer]),
            [Expert(_finished(gate_up), _finished(down)) for gate_up, down in self._experts[layer]],
            num_chosen=experts.num_chosen,
            is_normed=experts.is_normed,
            gated=self._backend.gated,
        )

    def _linear(self, layer: int, site: str) -> LoraLinear:
        return LoraLinear(_finished(self._sites[layer, site]), site, layer)


def _finished(site: Site) -> Linear:
    if site.linear is None:
        raise InvariantViolation("not every tensor of a site was put")
    return site.linear


def _put(put: Callable[..., None], *args: object) -> Callable[[str, Tensor], None]:
    return lambda _, tensor: put(*args, tensor)


def base_digest(identity: Mapping[str, object], tensors: list[tuple[str, str, tuple[int, ...], str]]) -> Digest:
    """Return the SHA-256 of what a base computes: its config's identity and its tensors' names, dtypes, shapes and content.

    The same weights in other shards, or in another order, have the same digest. Every part is framed: no two bases share an input.
    """
    entries = sorted([name, dtype, list(shape), sha256] for name, dtype, shape, sha256 in tensors)
    framed = json.dumps({"base": 1, "config": identity, "tensors": entries}, sort_keys=True, separators=(",", ":"))
    return Digest(hashlib.sha256(framed.encode()).hexdigest())


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
