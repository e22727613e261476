"""The decoder on a GPU, with Triton's kernels between linears.

Activations are in bfloat16 or float16 between linears, the residual stream in float32. With
``TRITON_INTERPRET=1`` the same code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraserve.errors import ConfigError, InvariantViolation
from loraserve.model.backends.backend import DecoderLayer, Norm
from loraserve.model.config.model_config import ActivationFunction, ModelConfig
from loraserve.model.inputs import GpuInputs, KVTensors
from loraserve.model.layers.embedding import EmbeddingTable
from loraserve.model.layers.lora_linear import LoraLinear
from loraserve.model.layers.rotary import RotaryEmbedding
from loraserve.progress import Progress
from loraserve_kernels.common.arithmetic import FLOATS, WEIGHT_ONLY, Arithmetic
from loraserve_kernels.common.quantized import QuantizedWeight, quantize, unpermute
from loraserve_kernels.common.rotation import rotate
from loraserve_kernels.common.row_blocks import GPU_BLOCK_WEIGHTS, row_blocks
from loraserve_kernels.cpu import instructions
from loraserve_kernels.gpu.attention.paged import paged_attention
from loraserve_kernels.gpu.gemm.gemm import weight_only_linear
from loraserve_kernels.gpu.rows import rows as gpu_rows

GPU_DTYPES = (torch.bfloat16, torch.float16)
GPU_FORMATS = ("none", "int8", "int4", "nf4", "fp8")


class GpuBackend:
    """Weights in the activations' dtype, or quantized; multiplied as they are stored.

    Raises:
        ConfigError: the device can't keep weights so.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, quantize: str) -> None:
        if dtype not in GPU_DTYPES:
            raise ConfigError(
                f"The dtype {str(dtype).removeprefix('torch.')} isn't available on a GPU; "
                "expected bfloat16 or float16.",
                hint="Leave --dtype out.",
            )
        if quantize not in GPU_FORMATS:
            raise ConfigError(f"Quantization {quantize!r} isn't available; expected one of {', '.join(GPU_FORMATS)}.")
        self.device = device
        self.kv_dtype = dtype
        self._format = None if quantize == "none" else quantize

    def linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> GpuLinear:
        return GpuLinear(self._place(weight), self._place_bias(bias), None)

    def head(self, weight: Tensor | QuantizedWeight) -> GpuLinear:
        return GpuLinear(self._place(weight), None, torch.float32)

    def norm(
        self, weight: Tensor | None, eps: float, *, delta_weight: Tensor | None = None, delta_scale: float = 1.0
    ) -> GpuNorm:
        weight, delta_weight = (None if w is None else w.to(self.device) for w in (weight, delta_weight))
        return GpuNorm(weight, eps, self.kv_dtype, delta_weight, delta_scale)

    def gated(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        (gpu_rows.swiglu if self._config.activation is ActivationFunction.SILU else gpu_rows.geglu)(gate_up, out)
        return out

    def bind(self, config: ModelConfig, *rotaries: RotaryEmbedding) -> None:
        self._config = config
        self._tables = [rotary.table().to(self.device) for rotary in rotaries]

    def program(self, layers: Sequence[DecoderLayer], norm: Norm, head: LoraLinear | None, progress: Progress) -> None:
        """Return None: a step is a CUDA graph."""

    def begin(self, inputs: GpuInputs, kv: KVTensors) -> GpuStep:
        return GpuStep(self._config, self._tables, inputs, self.kv_dtype)

    def _place(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        if isinstance(weight, Tensor):
            if self._format is None:
                return weight.to(self.device, self.kv_dtype, copy=True)
            weight = quantize(weight, self._format)
        return weight.to(self.device)

    def _place_bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.device, self.kv_dtype)


class GpuLinear:
    """``x W^T + bias`` with the weight as it is stored.

    x and the result are in the activations' dtype, or the result in `out_dtype`. Where the weight
    is rotated, x is too: in float32, before the product. Where its inputs are permuted, x is
    gathered.
    """

    __slots__ = ("_out_dtype", "_permutation", "_rotation", "_weight", "bias", "num_bytes", "out_features")

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> None:
        self._rotation = 0 if isinstance(weight, Tensor) else weight.rotation
        if self._rotation and isinstance(weight, QuantizedWeight):
            # x H / n has the size of x; H x would leave float16's range
            weight = replace(weight, rotation=0, scales=weight.scales * self._rotation)
        self._permutation = None if isinstance(weight, Tensor) else weight.permutation
        permutation_bytes = 0 if self._permutation is None else self._permutation.nbytes
        weight = weight if isinstance(weight, Tensor) else weight.without_permutation
        self._weight, self.bias, self._out_dtype = weight, bias, out_dtype
        self.out_features = weight.shape[0] if isinstance(weight, Tensor) else weight.out_features
        self.num_bytes = weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
        self.num_bytes += permutation_bytes + (0 if bias is None else bias.nbytes)

    @property
    def arithmetics(self) -> tuple[Arithmetic, ...]:
        """Arithmetic that it is computed with."""
        weight = self._weight
        if isinstance(weight, Tensor):
            name, device = FLOATS[str(weight.dtype).removeprefix("torch.")], weight.device
        else:
            name, device = WEIGHT_ONLY[weight.format], weight.device
        return (Arithmetic(name, "triton", instructions.gpu(device)),)

    def __call__(self, x: Tensor) -> Tensor:
        if self._rotation:
            x = (rotate(x.float(), self._rotation) / self._rotation).to(x.dtype)
        if self._permutation is not None:
            x = x.index_select(1, self._permutation)
        return weight_only_linear(x, self._weight, self.bias, out_dtype=self._out_dtype)

    def rows(self, start: int, end: int) -> Iterator[Tensor]:
        weight = self._weight
        in_features = weight.shape[1] if isinstance(weight, Tensor) else weight.in_features
        for first, last in row_blocks(start, end, in_features, GPU_BLOCK_WEIGHTS):
            if isinstance(weight, Tensor):
                yield weight[first:last].float()
            else:
                block = weight.rows(first, last).dequantize(torch.float32)
                block = rotate(block, self._rotation) / self._rotation if self._rotation else block
                yield unpermute(block, self._permutation)


class GpuNorm:
    """RMSNorm from the float32 stream to the activations' dtype.

    The sum before it is in the same pass.
    """

    __slots__ = ("_delta_scale", "_delta_weight", "_dtype", "_eps", "_weight")

    def __init__(
        self, weight: Tensor | None, eps: float, dtype: torch.dtype, delta_weight: Tensor | None, delta_scale: float
    ) -> None:
        self._weight, self._eps, self._dtype = weight, eps, dtype
        self._delta_weight, self._delta_scale = delta_weight, delta_scale

    def __call__(self, hidden: Tensor, /) -> Tensor:
        return self._norm(hidden, None)

    def after_adding(self, hidden: Tensor, delta: Tensor, /) -> Tensor:
        return self._norm(hidden, delta)

    def _norm(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        out = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
        gpu_rows.add_rms_norm(
            hidden,
            delta,
            self._weight,
            self._eps,
            out,
            delta_weight=self._delta_weight,
            delta_scale=self._delta_scale,
        )
        return out


class GpuStep:
    """Rotation and attention of a step, and scratch memory for what heads gather."""

    __slots__ = ("_attended", "_config", "_inputs", "_tables")

    def __init__(self, config: ModelConfig, tables: Sequence[Tensor], inputs: GpuInputs, dtype: torch.dtype) -> None:
        self._config, self._tables, self._inputs = config, tables, inputs
        shape = (inputs.token_ids.shape[0], config.num_heads, config.head_dim)
        self._attended = torch.empty(shape, dtype=dtype, device=tables[0].device)

    def embed(self, embedding: EmbeddingTable) -> Tensor:
        if not isinstance(embedding, Tensor):
            raise InvariantViolation("a GPU's embedding is floats")
        shape = (self._inputs.token_ids.shape[0], embedding.shape[1])
        hidden = torch.empty(shape, dtype=torch.float32, device=embedding.device)
        gpu_rows.embed(self._inputs.token_ids, embedding, hidden)
        return hidden

    def store(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        config, q_norm, k_norm = self._config, layer.q_norm, layer.k_norm
        if q_norm is not None and k_norm is not None and config.architecture.is_qk_norm_whole:
            q_size, k_size = q_norm.weight.shape[0], k_norm.weight.shape[0]
            gpu_rows.norm_in_place(qkv[:, :q_size], q_norm.weight, q_norm.eps)
            gpu_rows.norm_in_place(qkv[:, q_size : q_size + k_size], k_norm.weight, k_norm.eps)
            q_norm = k_norm = None
        gpu_rows.rotate_and_store(
            qkv,
            self._inputs.positions,
            None if layer.rope is None else self._tables[layer.rope],
            self._inputs.slot_mapping,
            k_cache,
            v_cache,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            eps=config.rms_norm_eps,
            is_norm_last=config.architecture.is_qk_norm_after_rope,
            is_interleaved=config.architecture.is_rope_interleaved,
        )

    def attend(self, layer: DecoderLayer, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        self.store(layer, qkv, k_cache, v_cache)
        config = self._config
        q = qkv.view(qkv.shape[0], -1, config.head_dim)[:, : config.num_heads]
        paged_attention(
            q,
            k_cache,
            v_cache,
            self._inputs.attention,
            self._attended,
            scale=config.attention_scale,
            sliding_window=layer.sliding_window,
            soft_cap=config.attention_cap,
        )
        return self._attended.view(qkv.shape[0], -1)
