"""From a directory to a resident decoder. Weights stream in tensor by tensor: never more than the final weights and one shard are in memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from loraserve.errors import ConfigError, InvariantViolation, MissingTensor, ShapeMismatch, UnexpectedTensor
from loraserve.model.backend import Backend, CpuBackend, DecoderLayer, Norm
from loraserve.model.checkpoint import Checkpoint, open_checkpoint
from loraserve.model.config import ModelConfig, read_config
from loraserve.model.decoder import Decoder
from loraserve.model.layers import RMSNorm
from loraserve.model.lora import LoraLinear
from loraserve.model.quantize import Linear
from loraserve.model.rotary import RotaryEmbedding
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.layout import LAYER_SITES, SITES

_IGNORED_ENDING = ".rotary_emb.inv_freq"
"""A buffer that old Llama checkpoints carry; the config says the same."""


def load_model(
    model_dir: Path, *, model_id: str, dtype: torch.dtype, quantize: str, device: str, max_model_len: int | None
) -> Decoder:
    """Return the base model of `model_dir`, ready to run.

    Args:
        model_id: the name that clients use.
        dtype: what weights are kept in when they aren't quantized; activations are float32.
        quantize: ``none`` or ``int8``.
        device: ``cpu`` or ``cuda``.
        max_model_len: None: what the config says. More than that only as far as its rope scaling covers.

    Raises:
        ConfigError: this machine can't do what is asked, or max_model_len is more than the model has.
        UnknownArchitecture, MissingTensor, UnexpectedTensor, ShapeMismatch, ModelError: what is wrong with the directory, and where.
    """
    backend = make_backend(device, dtype, quantize)
    config = read_config(model_dir)
    context = _context(config, max_model_len)
    checkpoint = open_checkpoint(model_dir)
    return _Loader(config, checkpoint, backend, dtype, quantize).load(model_id, context)


def make_backend(device: str, dtype: torch.dtype, quantize: str) -> Backend:
    """Return the backend of a kind of device.

    Raises:
        ConfigError: there's no such device here, or it can't keep weights so.
    """
    if device == "cpu":
        return CpuBackend(dtype, quantize)
    raise ConfigError(f"The device {device!r} isn't available; this version runs on the CPU.", hint="Use --device cpu.")


def _context(config: ModelConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return config.max_model_len
    if not 0 < max_model_len <= config.max_stretched_len:
        raise ConfigError(
            f"max_model_len is {max_model_len}; this model's positions go to {config.max_stretched_len}.",
            hint="Lower --max-model-len, or leave it out.",
        )
    return max_model_len


class _Site:
    """Gathers the tensors of one site, fused, until the last is there; then they become a linear and the gathering memory is freed."""

    def __init__(
        self, config: ModelConfig, site: str, make: Callable[[Tensor, Tensor | None], Linear], dtype: torch.dtype
    ) -> None:
        modules = SITES[site]
        shapes = config.module_shapes
        self._make, self._dtype = make, dtype
        self._shape = (sum(shapes[module][0] for module in modules), shapes[modules[0]][1])
        self._weight: Tensor | None = None
        self._bias = torch.zeros(self._shape[0]) if any(config.has_bias(module) for module in modules) else None
        self._num_missing = sum(1 + config.has_bias(module) for module in modules)
        self.linear: Linear | None = None

    def put(self, part: Tensor, first_row: int) -> None:
        if part.dim() == 1:
            if self._bias is not None:
                self._bias[first_row : first_row + part.shape[0]] = part
        else:
            if self._weight is None:
                self._weight = torch.empty(self._shape, dtype=self._dtype)
            self._weight[first_row : first_row + part.shape[0]] = part
        self._num_missing -= 1
        if self._num_missing == 0 and self._weight is not None:
            self.linear = self._make(self._weight, self._bias)
            self._weight = None
            _return_free_memory()


class _Loader:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, quantize: str
    ) -> None:
        self._config, self._checkpoint, self._dtype, self._quantize = config, checkpoint, dtype, quantize
        self._backend = backend
        # int8 codes are made from float32, whatever the checkpoint has
        self._gather_dtype = torch.float32 if quantize == "int8" else dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sinks: dict[str, Callable[[str, Tensor], None]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._sites: dict[tuple[int, str], _Site] = {}
        self._head: Linear | None = None
        self._plan()

    def load(self, model_id: str, max_model_len: int) -> Decoder:
        config, architecture = self._config, self._config.architecture
        self._check()
        digest = self._stream()
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len)
        self._backend.bind(config, rotary)
        embedding = self._tensors[architecture.embedding]
        head = self._head if self._head is not None else self._make_head(embedding)
        embedding = embedding.to(self._backend.device)
        layers = tuple(self._layer(layer) for layer in range(config.num_layers))
        norm = self._norm(architecture.norm)
        sites = [site.linear.num_bytes for site in self._sites.values() if site.linear is not None]
        spec = BaseSpec(
            id=model_id,
            digest=digest,
            architecture=architecture.name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            modules=config.module_shapes,
            module_paths=dict(architecture.module_paths),
            layers_path=architecture.layers,
            eos_token_ids=tuple(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size),
            dtype=str(self._dtype).removeprefix("torch."),
            quantization=self._quantize,
            num_parameters=sum(torch.Size(shape).numel() for shape in self._shapes.values()),
            size_bytes=sum(sites) + sum(t.nbytes for t in self._tensors.values()) + head.num_bytes + rotary.num_bytes,
        )
        _return_free_memory()
        return Decoder(config, spec, self._backend, embedding=embedding, layers=layers, norm=norm, head=head)

    def _plan(self) -> None:
        """Say of each tensor that the model needs what shape it has and where it goes."""
        config, architecture = self._config, self._config.architecture
        self._expect(architecture.embedding, (config.vocab_size, config.hidden_size), self._keep_as_is)
        self._expect(architecture.norm, (config.hidden_size,), self._keep)
        # a checkpoint may hold a head although its config ties it to the embedding: transformers then takes the head's own
        if not config.is_tied or architecture.head in self._checkpoint.tensors:
            self._expect(architecture.head, (config.vocab_size, config.hidden_size), self._take_head)
        norms = {architecture.attention_norm: config.hidden_size, architecture.mlp_norm: config.hidden_size}
        if architecture.has_qk_norm:
            norms |= {architecture.q_norm: config.head_dim, architecture.k_norm: config.head_dim}
        for layer in range(config.num_layers):
            prefix = f"{architecture.layers}.{layer}."
            for name, size in norms.items():
                self._expect(prefix + name, (size,), self._keep)
            for site in LAYER_SITES:
                self._plan_site(layer, site, prefix)

    def _plan_site(self, layer: int, site: str, prefix: str) -> None:
        config = self._config
        gathered = self._sites[layer, site] = _Site(config, site, self._backend.linear, self._gather_dtype)
        first_row = 0
        for module in SITES[site]:
            path = prefix + config.architecture.module_paths[module]
            shape = config.module_shapes[module]

            def put(_: str, part: Tensor, gathered: _Site = gathered, first_row: int = first_row) -> None:
                gathered.put(part, first_row)

            self._expect(f"{path}.weight", shape, put)
            if config.has_bias(module):
                self._expect(f"{path}.bias", shape[:1], put)
            first_row += shape[0]

    def _expect(self, name: str, shape: tuple[int, ...], sink: Callable[[str, Tensor], None]) -> None:
        self._shapes[name] = shape
        self._sinks[name] = sink

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.float()

    def _keep_as_is(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor

    def _take_head(self, _: str, tensor: Tensor) -> None:
        self._head = self._make_head(tensor)

    def _make_head(self, weight: Tensor) -> Linear:
        return self._backend.head(weight.to(self._gather_dtype))

    def _check(self) -> None:
        """Compare the headers with what the model needs, before a byte of weights is read."""
        stored = self._checkpoint.tensors
        missing = [name for name in self._shapes if name not in stored]
        if missing:
            raise MissingTensor(
                f"The checkpoint lacks {_listed(missing)}; {self._config.architecture.name} with this config.json has "
                f"{_listed([f'{name} of shape {list(self._shapes[name])}' for name in missing[:1]])}.",
                hint="Fetch the checkpoint again, or check config.json.",
            )
        unexpected = [name for name in stored if name not in self._shapes and not name.endswith(_IGNORED_ENDING)]
        if unexpected:
            raise UnexpectedTensor(
                f"The checkpoint holds {_listed(unexpected)}, which {self._config.architecture.name} with this config.json doesn't have: "
                "leaving tensors out would change the answers.",
                hint="Check num_hidden_layers, the bias flags and the architecture in config.json.",
            )
        for name, shape in self._shapes.items():
            if stored[name].shape != shape:
                raise ShapeMismatch(
                    f"The tensor {name} has the shape {list(stored[name].shape)}; expected {list(shape)} from config.json.",
                    hint="Check that config.json belongs to this checkpoint.",
                )

    def _stream(self) -> Digest:
        """Put every tensor in its place, and return the digest of the base: of the function, not of how its files are cut."""
        tensors: list[tuple[str, str, tuple[int, ...], str]] = []
        # hashing a tensor and placing it take about as long, and both leave the interpreter's lock
        with ThreadPoolExecutor(1, "model-hash") as pool:
            for stored, tensor, raw in self._checkpoint.read(frozenset(self._shapes)):
                hashed = pool.submit(_sha256, raw)
                self._sinks[stored.name](stored.name, tensor)
                tensors.append((stored.name, stored.dtype, stored.shape, hashed.result()))
                del tensor, raw, hashed
        return base_digest(self._config.identity(), tensors)

    def _layer(self, layer: int) -> DecoderLayer:
        config, architecture = self._config, self._config.architecture
        prefix = f"{architecture.layers}.{layer}."
        return DecoderLayer(
            attention_norm=self._norm(prefix + architecture.attention_norm),
            qkv=self._linear(layer, "qkv"),
            q_norm=self._head_norm(prefix + architecture.q_norm) if architecture.has_qk_norm else None,
            k_norm=self._head_norm(prefix + architecture.k_norm) if architecture.has_qk_norm else None,
            o=self._linear(layer, "o"),
            mlp_norm=self._norm(prefix + architecture.mlp_norm),
            gate_up=self._linear(layer, "gate_up"),
            down=self._linear(layer, "down"),
            sliding_window=config.sliding_windows[layer],
        )

    def _norm(self, name: str) -> Norm:
        return self._backend.norm(self._tensors[name], self._config.rms_norm_eps)

    def _head_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._tensors[name].to(self._backend.device), self._config.rms_norm_eps)

    def _linear(self, layer: int, site: str) -> LoraLinear:
        linear = self._sites[layer, site].linear
        if linear is None:
            raise InvariantViolation(f"not every tensor of layer {layer}'s {site} was put")
        return LoraLinear(linear, site, layer)


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


def _return_free_memory() -> None:
    """Give back to the system what was freed: glibc keeps it otherwise, in pieces that the next tensors may not fit."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
