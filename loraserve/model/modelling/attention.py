"""Paged attention as an attention function of transformers.

Modelling code calls it layer by layer with queries, keys and values. What a layer's mask would hide
comes from the same code: its mask function gets a window in the place of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraserve.errors import InvariantViolation, ModelError
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.modelling.mixers import Mixing, SequenceGroup, SequenceState, group_sequences
from loraserve.model.states import GroupStates, StepStates
from loraserve_kernels.cpu.attention.paged import AttentionPlan, make_attention_plan, paged_attention, store_kv

NAME = "loraserve"
"""Name under which transformers has the two functions."""
HOLDER = "loraserve_attention"
"""Attribute of an attention module that holds what attends."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values of a layer's rows, and what is done to their scores.

    Attributes:
        q: [num_tokens, num_heads, head_dim] float32.
        k, v: [num_tokens, num_kv_heads, head_dim] float32; v may be narrower.
        scale: what scores are multiplied with.
        window: None: rows see the whole context before them.
        soft_cap: what scores are softly kept below; None: they aren't.
        sinks: [num_heads], a score of each head for nothing; None: there are none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class Attending(Mixing, Protocol):
    """Way to attend and to mix in a pass: by paged caches and slots of states, or by formulas."""

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Return what a layer's rows gather, [num_tokens, num_heads, width of v].

        Args:
            layer: its number among the layers that attend.
        """
        ...


class Attention:
    """Holder in the attention modules and mixers of one model: how the pass that runs attends.

    Attributes:
        layers: those that attend, ascending.
        attending: None: no pass runs.
    """

    __slots__ = ("_numbers", "attending", "layers")

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.attending: Attending | None = None
        self._numbers = {layer: number for number, layer in enumerate(layers)}

    def running(self) -> Attending | None:
        """Return the pass that runs."""
        return self.attending

    def number(self, layer: int) -> int:
        """Return a layer's number among those that attend."""
        return self._numbers[layer]


@dataclass(frozen=True, slots=True)
class MaskWindow:
    """Stands in the place of a mask.

    Attributes:
        num_tokens: positions that a row sees, its own included; None: all before it.
    """

    num_tokens: int | None


class UnknownMask(ModelError):
    """The modelling code hides other positions than causal attention with windows does."""


class UnknownScores(ModelError):
    """The modelling code does to scores what isn't implemented here."""


_WITHOUT_EFFECT = {
    "attention_mask",
    "cache",
    "cache_position",
    "dropout",
    "is_causal",
    "num_items_in_batch",
    "output_attentions",
    "output_router_logits",
    "past_key_values",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}
"""Arguments of an attention function that change nothing here, or are read elsewhere."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskWindow | Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, for one row of tokens.

    Args:
        query: [1, num_heads, num_tokens, head_dim]; key and value likewise.
        attention_mask: what `mask` returned; None: modelling code without a mask, whose window is
            among the options.
        options: others, of which none may change scores.

    Raises:
        UnknownMask, UnknownScores: what isn't implemented.
    """
    holder = getattr(module, HOLDER, None)
    if not isinstance(holder, Attention) or holder.attending is None:
        raise UnknownMask(f"{type(module).__name__} attends outside of the layers.")
    unknown = [name for name, option in options.items() if option is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise UnknownScores(
            f"{type(module).__name__} gives its attention {', '.join(unknown)}, which isn't implemented."
        )
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnknownMask(f"{type(module).__name__} isn't causal.")
    if isinstance(attention_mask, MaskWindow):
        window = attention_mask.num_tokens
    elif attention_mask is None:
        window = options.get("sliding_window")
    else:
        raise UnknownMask(f"{type(module).__name__} is given a mask of its own.")
    q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    heads = Heads(q, k, v, scale, window, softcap, None if s_aux is None else s_aux.float())
    number = holder.number(int(module.layer_idx))  # type: ignore[arg-type]
    out = holder.attending.attend(number, heads)
    return out[None].to(query.dtype), None


def mask(*, local_size: int | None = None, use_vmap: bool = False, **_: Any) -> MaskWindow:
    """Return a layer's window in the place of its mask.

    Args:
        local_size: None: the mask is causal alone.
        use_vmap: whether the modelling code adds a rule of its own.

    Raises:
        UnknownMask: it does.
    """
    if use_vmap:
        raise UnknownMask("The modelling code has a mask of its own.")
    return MaskWindow(local_size)


class PagedAttending:
    """Attention of a step over the paged cache, to which its keys and values are written.

    Args:
        on_layer: called before each layer attends or mixes.

    Raises:
        InvariantViolation: a slot doesn't have the state that a sequence goes on with.
    """

    def __init__(self, inputs: ModelInputs, kv: KVTensors, on_layer: Callable[[], None]) -> None:
        self._inputs, self._kv, self._on_layer = inputs, kv, on_layer
        self._plan: AttentionPlan = make_attention_plan(
            inputs.query_starts, inputs.context_lens, inputs.block_tables, kv.block_size
        )
        self._states = _step_states(inputs, kv)
        self._groups: list[tuple[SequenceGroup, GroupStates]] = []
        if self._states is not None and kv.states is not None:
            groups = group_sequences(
                inputs.query_starts, inputs.context_lens, kv.states.group_size, self._states.borders
            )
            self._groups = [(group, self._states.group(group.numbers, group.part)) for group in groups]

    def commit(self) -> None:
        """End the step: states have advanced by its tokens."""
        if self._states is not None:
            self._states.commit()

    def groups(self, layer: int) -> Iterator[tuple[SequenceGroup, SequenceState]]:
        """Yield each group and its state, which is kept when the next group is taken."""
        if self._states is None:
            raise InvariantViolation("a base with recurrent layers was called without slots for their states")
        self._on_layer()
        for group, states in self._groups:
            state = SequenceState(*(states.read(layer) or ()))
            yield group, state
            states.write(layer, state.tensors)

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Store keys and values, and return what the rows gather from the cache."""
        self._on_layer()
        k_cache, v_cache, width = self._kv.k[layer], self._kv.v[layer], heads.v.shape[-1]
        v = heads.v if width == heads.k.shape[-1] else F.pad(heads.v, (0, heads.k.shape[-1] - width))
        store_kv(heads.k.contiguous(), v.contiguous(), k_cache, v_cache, self._inputs.slot_mapping)
        q = heads.q.contiguous()
        if heads.sinks is not None:
            return self._with_sinks(q, k_cache, v_cache, heads, heads.sinks)[..., :width]
        out = torch.empty_like(q)
        paged_attention(
            q,
            k_cache,
            v_cache,
            self._plan,
            out,
            scale=heads.scale,
            sliding_window=heads.window,
            soft_cap=heads.soft_cap,
        )
        return out[..., :width]

    def _with_sinks(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, heads: Heads, sinks: Tensor) -> Tensor:
        plan, out = self._plan, torch.empty_like(q)
        for i, context_len in enumerate(plan.context_lens):
            rows = slice(plan.query_starts[i], plan.query_starts[i + 1])
            table = plan.block_tables[i, : -(-context_len // plan.block_size)].long()
            k, v = (cache[table].permute(0, 2, 1, 3).flatten(0, 1)[:context_len] for cache in (k_cache, v_cache))
            out[rows] = attend_densely(q[rows], k, v, heads)
        return out


def _step_states(inputs: ModelInputs, kv: KVTensors) -> StepStates | None:
    """Return the states of a step's sequences; None: the base has none."""
    if kv.states is None:
        return None
    if inputs.states is None:
        raise InvariantViolation("a step has no slots for its sequences' states")
    counts = [end - start for start, end in pairwise(inputs.query_starts)]
    starts = [end - count for end, count in zip(inputs.context_lens, counts, strict=True)]
    return kv.states.step(inputs.states, starts, inputs.context_lens)


def attend_densely(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Return a sequence's causal attention in plain PyTorch.

    Args:
        q: [num_rows, num_heads, head_dim], the sequence's last rows.
        k, v: [num_tokens, num_kv_heads, …].
        heads: what is done to scores.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * heads.scale
    if heads.soft_cap is not None:
        scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
    keys = torch.arange(k.shape[0])
    distance = keys[k.shape[0] - q.shape[0] :, None] - keys[None, :]
    is_hidden = distance < 0
    if heads.window is not None:
        is_hidden |= distance >= heads.window
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if heads.sinks is not None:
        scores = torch.cat((scores, heads.sinks[:, None, None].expand(-1, q.shape[0], 1)), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : k.shape[0]], v)
