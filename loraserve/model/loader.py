"""A base model from its files: tensor by tensor, shard by shard, each straight to where it will stay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraserve.errors import ConfigError, MissingTensor, ModelError, ShapeMismatch
from loraserve.model.config import LAYERS_PATH, MODULE_PATHS, ModelConfig, read_model_config
from loraserve.model.decoder import Decoder, DecoderLayer
from loraserve.model.quantize import Linear, LinearBuilder, TiedLinear
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.layout import SITES

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
"""Buffers that old checkpoints carry and that are computed here."""


def load_model(
    model_dir: Path, *, model_id: str, dtype: torch.dtype, quantize: str, device: str, max_model_len: int | None
) -> Decoder:
    """Return the model, its weights in memory. At no time is there more than its final weights and one shard.

    Args:
        dtype: of activations, KV and float weights.
        quantize: of the linears: ``none`` or ``int8``.
        max_model_len: at most the config's; None: the config's.

    Raises:
        ModelError, ConfigError: the file, tensor, shape or setting that is wrong.
    """
    if device != "cpu":
        raise ConfigError(f"--device {device} is not implemented yet; this version computes on the CPU.")
    config = read_model_config(model_dir)
    length = max_model_len or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {length} is over what the model was made for, {config.max_position_embeddings} positions."
        )
    shards = find_shards(model_dir)
    weights = _Weights(config, dtype, quantize)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="base-digest") as pool:
        # Hashing reads the same pages, on another thread, without the interpreter's lock.
        digest = pool.submit(_digest, model_dir / "config.json", shards)
        for name, tensor in _stream(shards):
            weights.put(name, tensor)
        embedding, layers, final_norm, head = weights.finish()
        spec = _describe(config, model_id, digest.result(), length, dtype, quantize, weights)
    return Decoder(config, spec, embedding=embedding, layers=layers, final_norm=final_norm, head=head, dtype=dtype)


def find_shards(model_dir: Path) -> list[Path]:
    """Return the safetensors files that hold the weights, in order.

    Raises:
        MissingTensor: the index names a file that isn't there, or there is no weights file at all.
    """
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} can't be read: {error!r}.") from error
        # A name is a file beside the index, never a path out of it.
        shards = [model_dir / Path(name).name for name in names]
    else:
        shards = [model_dir / "model.safetensors"]
    for shard in shards:
        if not shard.is_file():
            hint = "Only safetensors are loaded, never pickles." if list(model_dir.glob("*.bin")) else None
            raise MissingTensor(f"The weights file {shard.name} is missing in {model_dir}.", hint=hint)
    return shards


def _stream(shards: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"The weights file {shard.name} can't be read: {error}.") from error


def _digest(config_file: Path, shards: list[Path]) -> Digest:
    """Hash what the model is: its config and its weights files, each framed by its length."""
    whole = hashlib.sha256(b"loraserve.base.v1")
    for path in (config_file, *shards):
        with path.open("rb") as file:
            part = hashlib.file_digest(file, "sha256").digest()
        whole.update(path.stat().st_size.to_bytes(8, "little") + part)
    return Digest(whole.hexdigest())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], None]


class _Weights:
    """Every tensor that the config asks for, with its place; what hasn't come by the end is missing."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quantize: str) -> None:
        self._config = config
        self._dtype = dtype
        self._quantize = quantize
        self._vectors: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._places: dict[str, _Place] = {}
        self.num_parameters = 0
        hidden = config.hidden_size
        self._expect_tensor("model.embed_tokens.weight", (config.vocab_size, hidden))
        self._expect_tensor("model.norm.weight", (hidden,))
        if not config.tie_word_embeddings:
            self._expect_linear("lm_head", ["lm_head"], [(config.vocab_size, hidden)], has_bias=False)
        for i in range(config.num_layers):
            self._expect_layer(f"{LAYERS_PATH}.{i}")

    def _expect_layer(self, path: str) -> None:
        config = self._config
        self._expect_tensor(f"{path}.input_layernorm.weight", (config.hidden_size,))
        self._expect_tensor(f"{path}.post_attention_layernorm.weight", (config.hidden_size,))
        if config.spec.has_qk_norm:
            self._expect_tensor(f"{path}.self_attn.q_norm.weight", (config.head_dim,))
            self._expect_tensor(f"{path}.self_attn.k_norm.weight", (config.head_dim,))
        biases = {"qkv": config.has_qkv_bias, "o": config.has_o_bias}
        for site, modules in SITES.items():
            names = [f"{path}.{MODULE_PATHS[module]}" for module in modules]
            shapes = [config.module_shapes[module] for module in modules]
            self._expect_linear(f"{path}.{site}", names, shapes, has_bias=biases.get(site, config.has_mlp_bias))

    def _expect_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        def put(tensor: Tensor) -> None:
            # A copy: the tensor is a view of the file.
            self._vectors[name] = tensor.to(self._dtype, copy=True)

        self._places[name] = _Place(shape, put)

    def _expect_linear(self, key: str, names: list[str], shapes: list[tuple[int, int]], *, has_bias: bool) -> None:
        builder = LinearBuilder(shapes, has_bias=has_bias, dtype=self._dtype, quantize=self._quantize)

        def place(put: Callable[[int, Tensor], None], index: int) -> Callable[[Tensor], None]:
            def put_and_build(tensor: Tensor) -> None:
                put(index, tensor)
                if builder.is_complete:
                    self._linears[key] = builder.build()

            return put_and_build

        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            self._places[f"{name}.weight"] = _Place(shape, place(builder.put_weight, index))
            if has_bias:
                self._places[f"{name}.bias"] = _Place(shape[:1], place(builder.put_bias, index))

    def put(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the checkpoint.

        Raises:
            ShapeMismatch: its shape isn't the config's.
            ModelError: the architecture has no such tensor, or it isn't of floats.
        """
        if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and self._config.tie_word_embeddings):
            return
        place = self._places.pop(name, None)
        if place is None:
            raise ModelError(
                f"The checkpoint has a tensor {name}, which {self._config.architecture} with this config.json has not (or has once)."
            )
        if tuple(tensor.shape) != place.shape:
            raise ShapeMismatch(f"{name} is {_by(tensor.shape)}; config.json makes it {_by(place.shape)}.")
        if not tensor.is_floating_point():
            raise ModelError(
                f"{name} is of {tensor.dtype}; floats were expected.",
                hint="Pre-quantized checkpoints can't be loaded yet.",
            )
        self.num_parameters += tensor.numel()
        place.put(tensor)

    def finish(self) -> tuple[Tensor, tuple[DecoderLayer, ...], Tensor, Linear]:
        """Return (embedding, layers, final norm, head).

        Raises:
            MissingTensor: names what never came.
        """
        if self._places:
            names = list(self._places)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise MissingTensor(f"The checkpoint has no {', '.join(names[:3])}{more}.")
        embedding = self._vectors["model.embed_tokens.weight"]
        head = TiedLinear(embedding) if self._config.tie_word_embeddings else self._linears["lm_head"]
        layers = tuple(self._layer(f"{LAYERS_PATH}.{i}") for i in range(self._config.num_layers))
        return embedding, layers, self._vectors["model.norm.weight"], head

    def _layer(self, path: str) -> DecoderLayer:
        return DecoderLayer(
            input_norm=self._vectors[f"{path}.input_layernorm.weight"],
            qkv=self._linears[f"{path}.qkv"],
            q_norm=self._vectors.get(f"{path}.self_attn.q_norm.weight"),
            k_norm=self._vectors.get(f"{path}.self_attn.k_norm.weight"),
            o=self._linears[f"{path}.o"],
            post_attention_norm=self._vectors[f"{path}.post_attention_layernorm.weight"],
            gate_up=self._linears[f"{path}.gate_up"],
            down=self._linears[f"{path}.down"],
        )

    @property
    def num_bytes(self) -> int:
        linears = sum(linear.num_bytes for linear in self._linears.values())
        return linears + sum(tensor.nbytes for tensor in self._vectors.values())


def _describe(
    config: ModelConfig,
    model_id: str,
    digest: Digest,
    length: int,
    dtype: torch.dtype,
    quantize: str,
    weights: _Weights,
) -> BaseSpec:
    return BaseSpec(
        id=model_id,
        digest=digest,
        architecture=config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=length,
        modules=config.module_shapes,
        module_paths=MODULE_PATHS,
        layers_path=LAYERS_PATH,
        eos_token_ids=config.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantize,
        num_parameters=weights.num_parameters,
        size_bytes=weights.num_bytes,
    )


def _by(shape: tuple[int, ...] | torch.Size) -> str:
    return "×".join(map(str, shape))
