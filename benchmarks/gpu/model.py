"""Decoders with random weights, made on the device without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from loraserve.engine.execution.runner import allocate_kv
from loraserve.model.backends.backend import DecoderLayer
from loraserve.model.backends.gpu_backend import GpuBackend
from loraserve.model.config.model_config import ModelConfig, parse_config
from loraserve.model.decoder import Decoder
from loraserve.model.inputs import KVTensors
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.mlp import GatedMlp
from loraserve.model.layers.norms import RMSNorm
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.types import BaseSpec, Digest
from loraserve_kernels.common.quantized import QuantizedWeight, quantize
from loraserve_kernels.cpu.lora.layout import LAYER_SITES, SITES

HEAD_FORMATS = {"int4": "int8", "nf4": "int8"}
"""As the loader has it: the head's error goes straight into the logits."""


@dataclass(slots=True)
class RandomBase:
    """A decoder, and what it was made of.

    Attributes:
        base_bytes, base_weights: of the linears and the head, as they are stored.
        weights: by their names in a checkpoint, float32, as the decoder computes with them; empty
            unless they were to be kept.
    """

    decoder: Decoder
    base_bytes: int = 0
    base_weights: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config


class _Maker:
    def __init__(self, machine: Machine, config: ModelConfig, dtype: torch.dtype, format: str, *, keep: bool) -> None:
        self.machine, self.config, self.dtype, self.format, self.keep = machine, config, dtype, format, keep
        self.backend = GpuBackend(machine.device, dtype, format)
        self.weights: dict[str, Tensor] = {}
        self.num_bytes = self.num_weights = 0

    def linear_weight(self, names: list[str], shapes: list[tuple[int, int]], format: str) -> Tensor | QuantizedWeight:
        """Side by side, drawn so that activations keep their size."""
        in_features = shapes[0][1]
        weight = self.machine.randn(sum(n for n, _ in shapes), in_features, dtype=self.dtype, std=in_features**-0.5)
        made: Tensor | QuantizedWeight = weight if format == "none" else quantize(weight, format)
        self.num_bytes += weight.nbytes if isinstance(made, Tensor) else made.num_bytes
        self.num_weights += weight.numel()
        if self.keep:
            exact = weight.float() if isinstance(made, Tensor) else made.dequantize(torch.float32)
            self.weights |= dict(
                zip((f"{name}.weight" for name in names), exact.split([n for n, _ in shapes]), strict=True)
            )
        return made

    def vector(self, name: str, size: int, mean: float, std: float) -> Tensor:
        vector = self.machine.randn(size, std=std) + mean
        if self.keep:
            self.weights[name] = vector
        return vector

    def site(self, layer: int, site: str) -> LoraLinear:
        architecture, config = self.config.architecture, self.config
        names = [f"{architecture.layers}.{layer}.{architecture.module_paths[module]}" for module in SITES[site]]
        shapes = [config.module_shapes[module] for module in SITES[site]]
        weight = self.linear_weight(names, shapes, self.format)
        bias = None
        if config.has_bias(SITES[site][0]):
            # as the activations' dtype holds it
            parts = [
                self.vector(f"{name}.bias", n, 0.0, 0.1).to(self.dtype)
                for name, (n, _) in zip(names, shapes, strict=True)
            ]
            bias = torch.cat(parts)
            if self.keep:
                self.weights |= {f"{name}.bias": part.float() for name, part in zip(names, parts, strict=True)}
        return LoraLinear(self.backend.linear(weight, bias), site, layer)

    def layer(self, layer: int) -> DecoderLayer:
        architecture, config = self.config.architecture, self.config
        prefix = f"{architecture.layers}.{layer}."

        def head_norm(name: str) -> RMSNorm | None:
            if not architecture.has_qk_norm:
                return None
            return RMSNorm(self.vector(prefix + name, config.head_dim, 1.0, 0.1), config.rms_norm_eps)

        sites = {site: self.site(layer, site) for site in LAYER_SITES}
        return DecoderLayer(
            attention_norm=self.norm(prefix + architecture.attention_norm),
            qkv=sites["qkv"],
            q_norm=head_norm(architecture.q_norm),
            k_norm=head_norm(architecture.k_norm),
            o=sites["o"],
            mlp_norm=self.norm(prefix + architecture.mlp_norm),
            mlp=GatedMlp(sites["gate_up"], sites["down"], self.backend.gated),
            sliding_window=config.sliding_windows[layer],
        )

    def norm(self, name: str) -> Any:
        return self.backend.norm(self.vector(name, self.config.hidden_size, 1.0, 0.1), self.config.rms_norm_eps)


def make_base(
    machine: Machine,
    config_json: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    format: str = "none",
    keep_weights: bool = False,
) -> RandomBase:
    """Return a decoder of this config.json on the machine's device.

    Args:
        format: what the linears are rounded to; ``none``: they stay in `dtype`.
        keep_weights: for references.
    """
    config = parse_config(config_json, {})
    maker, architecture = _Maker(machine, config, dtype, format, keep=keep_weights), config.architecture
    maker.backend.bind(config, RotaryEmbedding(config.rope, config.head_dim, config.max_model_len))
    embedding = machine.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    if keep_weights:
        maker.weights[architecture.embedding] = embedding.float()
    layers = tuple(maker.layer(layer) for layer in range(config.num_layers))
    shape = (config.vocab_size, config.hidden_size)
    head = maker.linear_weight([architecture.head.removesuffix(".weight")], [shape], HEAD_FORMATS.get(format, format))
    decoder = Decoder(
        config,
        _spec(config, dtype, format),
        maker.backend,
        embedding=embedding,
        layers=layers,
        norm=maker.norm(architecture.norm),
        head=maker.backend.head(head),
    )
    return RandomBase(decoder, maker.num_bytes, maker.num_weights, maker.weights)


def _spec(config: ModelConfig, dtype: torch.dtype, format: str) -> BaseSpec:
    architecture = config.architecture
    around = {
        "lm_head": (config.vocab_size, config.hidden_size),
        "embed_tokens": (config.hidden_size, config.vocab_size),
    }
    paths = {
        "lm_head": architecture.head.removesuffix(".weight"),
        "embed_tokens": architecture.embedding.removesuffix(".weight"),
    }
    return BaseSpec(
        id="random",
        digest=Digest("0" * 64),
        architecture=architecture.name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        modules={**config.module_shapes, **around},
        module_paths={**architecture.module_paths, **paths},
        layers_path=architecture.layers,
        eos_token_ids=(2,),
        dtype=str(dtype).removeprefix("torch."),
        quantization=format,
    )


def make_kv(decoder: Decoder, num_blocks: int, block_size: int, machine: Machine) -> KVTensors:
    """A cache full of random keys and values, as the engine lays it out, so that a step may attend
    to contexts that were never computed.
    """
    kv = allocate_kv(decoder, num_blocks, block_size)
    for layer in (*kv.k, *kv.v):
        # a layer's blocks lie as far apart as all layers' of one block take
        layer.copy_(machine.randn(*layer.shape, dtype=decoder.kv_dtype))
    return kv
