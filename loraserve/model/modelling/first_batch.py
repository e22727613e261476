"""A first mixed batch of modelling code, compared with what transformers' own attention computes.

Code that takes positions or masks from anywhere but the arguments would answer wrongly in a batch
of several sequences: it is found here, before a base is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from loraserve.errors import LoraserveError, ModelError, UnknownArchitecture
from loraserve.model.inputs import KVTensors, ModelInputs
from loraserve.model.layers.linears import Linear, rounding_of_row
from loraserve.model.modelling.attention import NAME, Heads, PagedAttending
from loraserve.model.modelling.expert_modules import AdaptedExperts
from loraserve.model.modelling.mixers import SequenceGroup, SequenceState, group_sequences
from loraserve.model.modelling.modelled_base import run_model
from loraserve.model.modelling.modules import AdaptedLinear, RunningStep
from loraserve.model.modelling.skeleton import Skeleton
from loraserve.model.states import StateShapes
from loraserve.types import BaseSpec

_NUM_TOKENS = 12
"""Tokens of each of the two sequences."""
_MAX_DIFFERENCE, _MAX_ROUNDED_DIFFERENCE = 0.005, 0.15
"""Root mean square of the logits' differences, by their deviation: where linears read floats, and
where they round what they read.

Of SmolLM2-135M-Instruct it is 4e-6, and 0.037 in int8 and int4, whose codes flip. Positions that
are the batch's make it 0.32, and 0.42.
"""
_HINT = "Choose another base model."


def check_first_batch(
    skeleton: Skeleton, step: RunningStep, spec: BaseSpec
) -> tuple[tuple[int, int, int], StateShapes]:
    """Compare two sequences, computed in chunks in one batch, with each alone.

    Return the shape of the cache, (num_layers, num_kv_heads, head_dim), and those of recurrent
    layers' states.

    Args:
        skeleton: with its weights.
        step: what its modules read.

    Raises:
        UnknownArchitecture: the code can't be computed so; the message says why.
        ModelError: it failed.
    """
    name = skeleton.architecture
    size = max(2, min(_NUM_TOKENS, spec.max_model_len))
    sequences = [[(7 * i + 3 * j + 1) % spec.vocab_size for i in range(size)] for j in range(2)]
    try:
        with torch.inference_mode():
            expected = torch.cat([_alone(skeleton, step, tokens) for tokens in sequences])
            found, kv_shape, state_shapes = _mixed(skeleton, step, sequences)
    except LoraserveError as error:
        raise UnknownArchitecture(f"{name} can't be served by transformers' code: {error}", hint=_HINT) from error
    except Exception as error:
        said = str(error).splitlines() or [""]
        raise ModelError(
            f"transformers' code of {name} failed in a first batch: {type(error).__name__}: {said[0][:300]}",
            hint="Choose another base model, or another release of transformers.",
        ) from error
    finally:
        step.inputs = step.hidden = skeleton.attention.attending = None
    difference, deviation = float((found - expected).square().mean().sqrt()), float(expected.std())
    is_rounding = any(rounding_of_row(linear, 0) is not None for linear in _linears(skeleton))
    # of NaN, which isn't larger than anything, `check_first_step` names the weight
    if difference > (_MAX_ROUNDED_DIFFERENCE if is_rounding else _MAX_DIFFERENCE) * deviation:
        raise UnknownArchitecture(
            f"{name} computes other logits in a batch of two sequences than of each alone (by {difference:.3g}; they "
            f"deviate by {deviation:.3g}): its positions or masks aren't each sequence's own.",
            hint=_HINT,
        )
    return kv_shape, state_shapes


def _alone(skeleton: Skeleton, step: RunningStep, tokens: Sequence[int]) -> Tensor:
    """Return a sequence's logits with transformers' own attention and masks."""
    step.inputs = _inputs([(tokens, 0, len(tokens))])
    skeleton.model.set_attn_implementation("eager")
    try:
        return run_model(skeleton.model, step.inputs.token_ids, step.inputs.positions)
    finally:
        skeleton.model.set_attn_implementation(NAME)


def _mixed(
    skeleton: Skeleton, step: RunningStep, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor, tuple[int, int, int], StateShapes]:
    """Return the logits of sequences whose chunks are computed together, and the caches' shapes."""
    size, attending = len(sequences[0]), _Attending()
    # chunks of both; then a chunk and a token; then a token of both
    ranges = [pairwise((0, max(1, first), size - 1, size)) for first in (size // 3, size - 2)]
    steps = [spans for spans in zip(*ranges, strict=True) if spans[0][0] < spans[0][1]]
    parts: list[list[Tensor]] = [[], []]
    for spans in steps:
        work = [(tokens, *span) for tokens, span in zip(sequences, spans, strict=True)]
        step.inputs = attending.inputs = _inputs(work)
        skeleton.attention.attending = attending
        logits = run_model(skeleton.model, step.inputs.token_ids, step.inputs.positions)
        sizes = [end - start for _, start, end in work]
        for part, rows in zip(parts, torch.split(logits, sizes), strict=True):
            part.append(rows)
    shapes = {tuple(k.shape[1::2]) for k, _ in attending.caches.values()}
    if len(shapes) != 1 or sorted(attending.caches) != list(range(len(skeleton.attention.layers))):
        raise UnknownArchitecture("its layers' keys aren't all of one shape.", hint=_HINT)
    if set(attending.num_calls.values()) != {len(steps)}:
        raise UnknownArchitecture("a layer attends more than once.", hint=_HINT)
    ((num_kv_heads, head_dim),) = shapes
    state_shapes = {
        layer: tuple(tuple(one.shape[1:]) for one in state.tensors)
        for (layer, number), state in attending.states.items()
        if number == 0
    }
    kv_shape = len(attending.caches), num_kv_heads, head_dim
    return torch.cat([rows for part in parts for rows in part]), kv_shape, state_shapes


def _linears(skeleton: Skeleton) -> Iterator[Linear]:
    for module in skeleton.model.modules():
        if isinstance(module, AdaptedLinear):
            yield module.base
        elif isinstance(module, AdaptedExperts):
            yield from module.linears()


class _Attending:
    """Paged attention whose caches are made as they are called for: a block for each sequence.

    Attributes:
        inputs: the step's.
        caches: by number of the layer among those that attend, keys and values.
        states: by recurrent layer and sequence.
        num_calls: by layer.
    """

    def __init__(self) -> None:
        self.inputs: ModelInputs | None = None
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_calls: dict[int, int] = {}
        self.states: dict[tuple[int, int], SequenceState] = {}

    def groups(self, layer: int) -> Iterator[tuple[SequenceGroup, SequenceState]]:
        """Yield each group and its state."""
        if self.inputs is None:
            raise UnknownArchitecture("it mixes outside of a step.", hint=_HINT)
        for group in group_sequences(self.inputs.query_starts, self.inputs.context_lens, 2):
            before = [self.states.get((layer, number), SequenceState()).tensors for number in group.numbers]
            state = SequenceState(*(torch.cat(parts) for parts in zip(*before, strict=True)))
            yield group, state
            for i, number in enumerate(group.numbers):
                self.states[layer, number] = SequenceState(*(part[i : i + 1] for part in state.tensors))

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Attend over the layer's own cache."""
        if self.inputs is None:
            raise UnknownArchitecture("it attends outside of a step.", hint=_HINT)
        if layer not in self.caches:
            shape = (2, heads.k.shape[1], 16, heads.k.shape[2])
            self.caches[layer] = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.num_calls[layer] = self.num_calls.get(layer, 0) + 1
        k, v = self.caches[layer]
        return PagedAttending(self.inputs, KVTensors((k,), (v,), 16), lambda: None).attend(0, heads)


def _inputs(work: Sequence[tuple[Sequence[int], int, int]]) -> ModelInputs:
    """Return the rows of tokens ``start`` to ``end`` of each sequence, whose blocks are 0, 1, …."""
    starts, tokens, positions, slots = [0], list[int](), list[int](), list[int]()
    for block, (sequence, start, end) in enumerate(work):
        tokens += sequence[start:end]
        positions += range(start, end)
        slots += range(16 * block + start, 16 * block + end)
        starts.append(len(tokens))
    return ModelInputs(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=starts,
        context_lens=[end for _, _, end in work],
        block_tables=torch.arange(len(work), dtype=torch.int32)[:, None],
        logits_rows=None,
        lora=None,
    )
