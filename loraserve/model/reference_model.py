"""The base with an adapter, evaluated in plain float32 PyTorch.

The engine's answers are compared with it. Written from the formulas of `adapters.ir` and of the
architectures alone, in the most direct way. It shares nothing with what it judges: no kernel, no
packed or lowered weight, no plan, no page and no cache. Of the resident base it takes the weights
as they are computed with (dequantised), a block of rows at a time: in addition it needs memory for
a few dozen rows. Several short sequences go through in one pass over the weights, each by the base
alone and with the adapter, and so do several adapters with theirs: reading the weights is half of
the work. A beginning that sequences share is computed once.

Where the base's products round their input to integers, so does this evaluation. Rounding is a
step: a number that differs in its last bit may land on the next code, and after some layers the
logits differ by nearly as much as rounding costs. `Evaluation.nudged` shows by how much: the base
again, with other codes for numbers that lie next to the middle between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.model.config.model_config import ActivationFunction, ModelConfig
from loraserve.model.layers.experts import Expert, MixtureOfExperts, SharedExpert
from loraserve.model.layers.rotary import rope_frequencies
from loraserve.model.reference_pass import Evaluation, Products, ReferencePass, ReferenceWeights, Subject


class FormulaBase(ReferenceWeights, Protocol):
    """A base that the architectures' formulas evaluate; `model.decoder.Decoder` is one."""

    config: ModelConfig

    def experts(self, layer: int) -> MixtureOfExperts | None:
        """Build what stands in the place of a layer's MLP; None where that is an MLP.

        Its linears' weights are read in the same way.
        """
        ...

    def norm_weight(self, name: str) -> Tensor:
        """Read what a norm multiplies with, by the name of its tensor in the checkpoint.

        It is float32.
        """
        ...


@runtime_checkable
class SelfEvaluating(ReferenceWeights, Protocol):
    """A base that modelling code evaluates, which it brings; `ModelledBase` is one."""

    def evaluate(
        self, subjects: Sequence[Subject], is_wanted: Callable[[], bool], *, is_rounding: bool
    ) -> list[Evaluation]:
        """Compute the logits of each subject's sequences, as `evaluate` does."""
        ...


ReferenceBase = FormulaBase | SelfEvaluating


def evaluate(
    base: ReferenceBase,
    subjects: Sequence[Subject],
    *,
    is_wanted: Callable[[], bool] = lambda: True,
    is_rounding: bool = True,
) -> list[Evaluation]:
    """Compute the logits of each subject's sequences.

    One pass over the base's weights computes them.

    Args:
        is_wanted: called before each weight is read.
        is_rounding: whether products round their input where the base's do.

    Raises:
        Stopped: `is_wanted` returned False.
    """
    with torch.inference_mode():
        if isinstance(base, SelfEvaluating):
            return base.evaluate(subjects, is_wanted, is_rounding=is_rounding)
        return _FormulaPass(base, subjects, is_wanted, is_rounding=is_rounding).run()


def run_products(base: FormulaBase, sequences: Sequence[Sequence[int]], products: Products) -> None:
    """Compute a pass over sequences whose products `products` computes, layer by layer."""
    # of logits, the last token's alone
    subject = Subject(sequences, (), known_base=(), starts=[len(sequence) - 1 for sequence in sequences])
    _FormulaPass(base, [subject], lambda: True, is_rounding=False, products=products).run()


class _FormulaPass(ReferencePass):
    """Pass of a base by the formulas of its architecture."""

    def __init__(
        self,
        base: FormulaBase,
        subjects: Sequence[Subject],
        is_wanted: Callable[[], bool],
        *,
        is_rounding: bool = True,
        products: Products | None = None,
    ) -> None:
        super().__init__(
            base,
            subjects,
            is_wanted,
            rounding_modules=("q_proj", "lm_head"),
            is_rounding=is_rounding,
            products=products,
        )
        self._base, self._config = base, base.config

    def _logits(self) -> Tensor:
        config, architecture = self._config, self._config.architecture
        hidden = self._embed() * config.embedding_scale
        for layer in range(config.num_layers):
            x = self._norm(hidden, layer, "attention_norm", architecture.attention_norm)
            attended = self._attend(layer, x)
            delta = self._norm(
                self._linear(attended, layer, "o_proj"), layer, "attention_out_norm", architecture.attention_out_norm
            )
            hidden = hidden + config.residual_scale * delta
            x = self._norm(hidden, layer, "mlp_norm", architecture.mlp_norm)
            delta = self._norm(self._mlp(x, layer), layer, "mlp_out_norm", architecture.mlp_out_norm)
            hidden = hidden + config.residual_scale * delta
        x = self._scale_and_norm(hidden, architecture.norm, 0, "norm")
        x = self._keep_wanted(x)
        logits = self._with_extra(self._linear(x, 0, "lm_head"), x)
        if config.logits_scale != 1:
            logits = logits * config.logits_scale
        if config.logits_cap is not None:
            logits = config.logits_cap * torch.tanh(logits / config.logits_cap)
        return logits

    # a layer's parts

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        config, architecture = self._config, self._config.architecture
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = self._linears(x, layer, {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv})
        if architecture.has_qk_norm and not architecture.is_qk_norm_after_rope:
            q, k = self._norm_heads(q, layer, architecture.q_norm), self._norm_heads(k, layer, architecture.k_norm)
        rope = config.layer_ropes[layer]
        if rope is not None:
            q, k = self._rotate(q, rope), self._rotate(k, rope)
        if architecture.is_qk_norm_after_rope:
            q, k = self._norm_heads(q, layer, architecture.q_norm), self._norm_heads(k, layer, architecture.k_norm)
        q, k, v = (y.view(y.shape[0], -1, config.head_dim) for y in (q, k, v))
        # each key and value serves a group of heads
        k, v = (y.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1) for y in (k, v))
        window = config.sliding_windows[layer]
        attended = torch.empty_like(q)
        for rows in self._sequences:
            attended[rows] = self._attend_alone(q[rows], k[rows], v[rows], window)
        return attended.flatten(1)

    def _attend_alone(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Compute a sequence's attention; all tensors are [num_tokens, num_heads, head_dim]."""
        scores = torch.einsum("ihd,jhd->hij", q, k) * self._config.attention_scale
        if self._config.attention_cap is not None:
            scores = self._config.attention_cap * torch.tanh(scores / self._config.attention_cap)
        positions = torch.arange(q.shape[0], device=q.device)
        distance = positions[:, None] - positions[None, :]
        is_hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v)

    def _rotate(self, x: Tensor, rope: int) -> Tensor:
        """Rotate heads by their positions.

        Args:
            x: [num_tokens, num_heads * head_dim].
        """
        config = self._config.ropes[rope]
        x = x.view(x.shape[0], -1, self._config.head_dim)
        angles = self._positions.float()[:, None] * rope_frequencies(config, self._config.head_dim).to(self._device)
        cos, sin = ((y * config.attention_factor)[:, None] for y in (angles.cos(), angles.sin()))
        turning, still = x.tensor_split([2 * angles.shape[-1]], -1)
        if self._config.architecture.is_rope_interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        else:
            first, second = turning.chunk(2, -1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((turned, still), -1).flatten(1)

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        mixture = self._base.experts(layer)
        if mixture is not None:
            return self._mix(x, layer, mixture)
        size = self._config.intermediate_size
        gate, up = self._linears(x, layer, {"gate_proj": size, "up_proj": size})
        return self._linear(self._activate(gate) * up, layer, "down_proj")

    def _mix(self, x: Tensor, layer: int, mixture: MixtureOfExperts) -> Tensor:
        """Compute the chosen experts' outputs and the shared one's, weighted."""
        scores = self._adapt_expert(x, self._multiply_by(x, mixture.router), layer, "router")
        probabilities = scores.softmax(1)
        chosen = torch.zeros_like(probabilities, dtype=torch.bool)
        chosen.scatter_(1, probabilities.topk(mixture.num_chosen).indices, True)
        weights = probabilities * chosen
        if mixture.is_normed:
            weights = weights / weights.sum(1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(mixture.experts):
            rows = chosen[:, i].nonzero()[:, 0]
            if not len(rows):
                continue
            out[rows] += weights[rows, i : i + 1] * self._expert(x[rows], expert, layer, i, rows)
        if mixture.shared is not None:
            weight = self._adapt_expert(x, self._multiply_by(x, mixture.shared.gate), layer, "shared_gate")
            out += weight.sigmoid() * self._shared_expert(x, mixture.shared, layer)
        return out

    def _expert(self, x: Tensor, expert: Expert, layer: int, number: int, rows: Tensor) -> Tensor:
        """Compute an expert's output for the rows that pass it, which x is."""
        gate, up = self._multiply_by(x, expert.gate_up).chunk(2, 1)
        gate = self._adapt_expert(x, gate, layer, "experts.gate_proj", number, rows)
        up = self._adapt_expert(x, up, layer, "experts.up_proj", number, rows)
        hidden = self._activate(gate) * up
        out = self._multiply_by(hidden, expert.down)
        return self._adapt_expert(hidden, out, layer, "experts.down_proj", number, rows)

    def _shared_expert(self, x: Tensor, shared: SharedExpert, layer: int) -> Tensor:
        """Compute the shared expert's output, whose linears adapters change as an MLP's."""
        gate, up = self._multiply_by(x, shared.gate_up.base).chunk(2, 1)
        gate = self._adapt_expert(x, gate, layer, "gate_proj")
        hidden = self._activate(gate) * self._adapt_expert(x, up, layer, "up_proj")
        return self._adapt_expert(hidden, self._multiply_by(hidden, shared.down.base), layer, "down_proj")

    def _activate(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self._config.activation is ActivationFunction.SILU else F.gelu(gate, approximate="tanh")

    # norms

    def _norm(self, x: Tensor, layer: int, norm: str, name: str | None) -> Tensor:
        """Norm x by a layer's norm; x itself where the architecture has none there.

        Args:
            norm: what adapters call it.
            name: the checkpoint's, inside the layer.
        """
        if name is None:
            return x
        return self._scale_and_norm(x, f"{self._config.architecture.layers}.{layer}.{name}", layer, norm)

    def _scale_and_norm(self, x: Tensor, name: str, layer: int, norm: str) -> Tensor:
        weight = self._base.norm_weight(name).to(self._device)
        normed = _rms(x, self._config.rms_norm_eps)
        out = normed * weight
        for term in self._terms:
            own = term.norm(layer, norm)
            if own is not None:
                own_weight = self._of(own.weight) + self._config.architecture.norm_offset
                out[term.rows] += term.weight * (own_weight - weight) * normed[term.rows]
        return out

    def _norm_heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        weight = self._base.norm_weight(f"{self._config.architecture.layers}.{layer}.{name}").to(self._device)
        heads = x.view(x.shape[0], -1, weight.shape[0])
        return (_rms(heads, self._config.rms_norm_eps) * weight).flatten(1)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
