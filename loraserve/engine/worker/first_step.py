"""A first step of the base, before the engine reports that it is ready."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from loraserve.adapters.ir import OUTSIDE_LAYERS
from loraserve.engine.engine import Engine
from loraserve.engine.probe import Probe
from loraserve.engine.step_hooks import StepListener
from loraserve.errors import EngineError, ModelError
from loraserve.model.reference_model import ReferenceBase, SelfEvaluating
from loraserve.types import BaseSpec, FinishReason, RequestId, TokenOutput

_NUM_TOKENS = 8


def check_first_step(engine: Engine, weights: ReferenceBase) -> None:
    """Compute a few tokens, and check that their logits are finite.

    Args:
        engine: before it has any request.
        weights: read only to name what isn't finite.

    Raises:
        ModelError: a logit is NaN or infinite; it names the weight that is, if one is.
        EngineError: the step failed in another way.
    """
    base = engine.base
    size = max(1, min(_NUM_TOKENS, base.max_model_len - 1))
    tokens = [token * base.vocab_size // size for token in range(size)]
    probe = Probe.of_text(RequestId("first-step"), tokens, size - 1)
    before, listener = engine.listener, _Outputs()
    engine.listener = listener
    engine.add_probe(probe, None)
    while engine.has_requests:
        engine.step()
    engine.listener = before
    failed = next((output for output in listener.outputs if output.finish_reason is FinishReason.ERROR), None)
    logits = probe.logits()
    if failed is None and logits is not None and bool(logits.isfinite().all()):
        return
    name = _not_finite(base, weights)
    if name is not None:
        raise ModelError(
            f"The base {base.id} can't answer: its weight {name} has NaN or infinity.",
            hint="Fetch or save the checkpoint again; its tensors should be finite.",
        )
    if failed is not None and "finite" not in (failed.error_message or ""):
        raise EngineError(failed.error_message or "The base's first step failed.")
    raise ModelError(
        f"The base {base.id} can't answer: logits of its first step are NaN or infinite in {base.dtype},"
        " although all of its weights are finite.",
        hint="Use --dtype float32, or bfloat16 in place of float16: activations may be beyond its range.",
    )


class _Outputs(StepListener):
    """Keep outputs, which are no client's."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []

    def take_outputs(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Take all of them."""
        self.outputs += outputs
        return []


def _not_finite(base: BaseSpec, weights: ReferenceBase) -> str | None:
    """Find the first weight that isn't finite, by its name in the checkpoint; None if all are."""
    return next((name for name, blocks in _weights(base, weights) if not all(map(_is_finite, blocks))), None)


def _is_finite(block: Tensor) -> bool:
    return bool(torch.isfinite(block).all())


def _weights(base: BaseSpec, weights: ReferenceBase) -> Iterator[tuple[str, Iterator[Tensor]]]:
    paths = base.module_paths
    yield f"{paths['embed_tokens']}.weight", weights.weight_rows(0, "embed_tokens")
    if isinstance(weights, SelfEvaluating):
        # of modelling code, the linears alone are known
        for layer, module in product(range(base.num_layers), base.modules):
            if module not in OUTSIDE_LAYERS and base.has_module(layer, module):
                path = f"{base.layers_path}.{layer}.{paths[module]}"
                yield f"{path}.weight", weights.weight_rows(layer, module)
        yield f"{paths['lm_head']}.weight", weights.weight_rows(0, "lm_head")
        return
    for layer in range(base.num_layers):
        prefix = f"{base.layers_path}.{layer}."
        for norm, path in base.norm_paths.items():
            if norm != "norm":
                yield f"{prefix}{path}.weight", iter([weights.norm_weight(f"{prefix}{path}.weight")])
        experts = weights.experts(layer)
        architecture = weights.config.architecture
        for path in (architecture.q_norm, architecture.k_norm) if architecture.has_qk_norm else ():
            yield f"{prefix}{path}", iter([weights.norm_weight(f"{prefix}{path}")])
        for module in base.modules:
            if module in ("embed_tokens", "lm_head") or (experts is not None and module not in ATTENTION):
                continue
            yield f"{prefix}{paths[module]}.weight", weights.weight_rows(layer, module)
            bias = weights.bias(layer, module)
            if bias is not None:
                yield f"{prefix}{paths[module]}.bias", iter([bias])
        for number, expert in enumerate(() if experts is None else experts.experts):
            for linear in (expert.gate_up, expert.down):
                yield f"{prefix}mlp, expert {number}", linear.rows(0, linear.out_features)
    yield f"{base.norm_paths['norm']}.weight", iter([weights.norm_weight(f"{base.norm_paths['norm']}.weight")])
    yield f"{paths['lm_head']}.weight", weights.weight_rows(0, "lm_head")


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Modules that a layer has also where it has experts."""
