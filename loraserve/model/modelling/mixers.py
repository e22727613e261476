"""Recurrent mixers of transformers' code: each sequence's rows with its own state.

A mixer's linears read all rows of a step at once, as every linear does here. What is between them,
a convolution and a recurrence, is the code's own. One call computes all decoding sequences; chunks
of prompts have a call each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loraserve.errors import InvariantViolation, UnknownArchitecture


@dataclass(frozen=True, slots=True)
class MixerLinears:
    """The linears of a mixer.

    Attributes:
        reading: those that read what the mixer reads.
        writing: the one whose output is the mixer's.
        multiplier: attribute that the input is multiplied with before they read it; None: none is.
    """

    reading: tuple[str, ...]
    writing: str = "out_proj"
    multiplier: str | None = None


_DELTA = MixerLinears(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_MAMBA = MixerLinears(("in_proj",))
MIXERS: dict[str, MixerLinears] = {
    "BambaMixer": _MAMBA,
    "FalconH1Mixer": MixerLinears(("in_proj",), multiplier="ssm_in_multiplier"),
    "GraniteMoeHybridMambaLayer": _MAMBA,
    "Lfm2MoeShortConv": _MAMBA,
    "Lfm2ShortConv": _MAMBA,
    "Qwen3NextGatedDeltaNet": MixerLinears(("in_proj_qkvz", "in_proj_ba")),
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
}
"""Class of transformers → its linears."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences of a pass that one call of a mixer's code computes.

    Attributes:
        numbers: the sequences, numbered in the pass' order.
        rows: the same number of rows of each, one sequence's behind another's.
        part: which part of a sequence's rows it is, where its state is kept on the way.
    """

    numbers: tuple[int, ...]
    rows: slice | Tensor
    part: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Return the group's part of all rows, [num_sequences, num_tokens, width].

        Args:
            x: [1, num_tokens of the pass, width].
        """
        return x[0, self.rows].reshape(len(self.numbers), -1, x.shape[-1])


def group_sequences(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    max_decoding: int,
    borders_of: Callable[[int], Sequence[int]] = lambda number: (),
) -> list[SequenceGroup]:
    """Return the groups of a step: sequences that decode share them, any other has its own.

    Args:
        query_starts: num_seqs + 1 numbers: sequence i has rows ``query_starts[i]:query_starts[i +
            1]``.
        context_lens: num_seqs numbers: tokens of the sequence after the step.
        max_decoding: sequences of a group, at most.
        borders_of: returns the numbers of a sequence's tokens, of this step's, ascending, after
            which its state is kept: each ends a group.
    """
    bounds = list(pairwise(query_starts))
    borders = [borders_of(i) for i in range(len(bounds))]
    # a sequence's first token has no state to read
    is_decoding = [
        end - start == 1 < length and not kept
        for (start, end), length, kept in zip(bounds, context_lens, borders, strict=True)
    ]
    decoding = [i for i, is_one in enumerate(is_decoding) if is_one]
    groups = []
    for first in range(0, len(decoding), max_decoding):
        numbers = decoding[first : first + max_decoding]
        rows = [query_starts[i] for i in numbers]
        is_run = rows[-1] - rows[0] == len(rows) - 1
        groups.append(SequenceGroup(tuple(numbers), slice(rows[0], rows[-1] + 1) if is_run else torch.tensor(rows)))
    for i, is_one in enumerate(is_decoding):
        if not is_one:
            start, end = bounds[i]
            # the row behind a border, counted from the sequence's last
            inner = (end - (context_lens[i] - border) for border in borders[i])
            ends = sorted({start, *inner, end})
            groups += [SequenceGroup((i,), slice(*rows), part) for part, rows in enumerate(pairwise(ends))]
    return groups


class SequenceState:
    """State of a group's sequences at one layer, as a mixer's code calls its cache.

    Attributes:
        conv: [num_sequences, channels, width of the convolution], its last inputs; None: no token
            was computed.
        recurrent: [num_sequences, …], of code that has a recurrence; None likewise.
    """

    def __init__(self, conv: Tensor | None = None, recurrent: Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the state, [num_sequences, …] each."""
        return tuple(one for one in (self.conv, self.recurrent) if one is not None)

    # called by transformers, whose names these are

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the convolution's last inputs, which the caller may change."""
        self._check(state_idx)
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrence's state, which the caller may change."""
        self._check(state_idx)
        return self.recurrent

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keep the last inputs of a convolution, and return them with those before them."""
        self._check(state_idx)
        if self.conv is not None:
            found = torch.cat((self.conv, conv_states), dim=-1)
        else:
            found = F.pad(conv_states, (max(0, (conv_kernel_size or 0) - conv_states.shape[-1]), 0))
        width = conv_kernel_size or found.shape[-1]
        self.conv = found[..., -width:].clone()
        return found

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keep a recurrence's state."""
        self._check(state_idx)
        self.recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether inputs are kept to be rolled back: never."""
        return False

    def _check(self, state_idx: int) -> None:
        if state_idx:
            raise UnknownArchitecture("A mixer keeps several states in one layer.", hint="Choose another base model.")


class Mixing(Protocol):
    """Sequences of a pass, as mixers see them."""

    def groups(self, layer: int) -> Iterator[tuple[SequenceGroup, SequenceState]]:
        """Yield each group and its state, which is kept when the next group is taken."""
        ...


class Recurrence:
    """Stand-in for a mixer's own forward.

    Args:
        mixing: returns the pass that runs; None: none does, and the rows are one whole sequence.
    """

    def __init__(self, mixer: nn.Module, linears: MixerLinears, mixing: Callable[[], Mixing | None]) -> None:
        self._mixer, self._linears, self._mixing = mixer, linears, mixing
        self._compute = mixer.forward

    def __call__(self, hidden_states: Tensor, cache: Any = None, attention_mask: Any = None, **options: Any) -> Tensor:
        """Return the mixer's output, [1, num_tokens, hidden_size]."""
        mixing, mixer, linears = self._mixing(), self._mixer, self._linears
        if mixing is None:
            whole: Tensor = self._compute(hidden_states, cache=cache, attention_mask=attention_mask, **options)
            return whole
        if cache is not None or attention_mask is not None:
            raise UnknownArchitecture(
                f"{type(mixer).__name__} is given a cache or a mask of its own.", hint="Choose another base model."
            )
        read = hidden_states
        if linears.multiplier is not None:
            read = read * getattr(mixer, linears.multiplier)
        own = {name: mixer._modules[name] for name in (*linears.reading, linears.writing)}
        given = {name: _Given(mixer.get_submodule(name)(read)) for name in linears.reading}
        gathered: Tensor | None = None
        mixer._modules.update({**given, linears.writing: nn.Identity()})
        try:
            for group, state in mixing.groups(int(mixer.layer_idx)):  # type: ignore[arg-type]
                for one in given.values():
                    one.group = group
                part = self._compute(group.of(hidden_states), cache=state, attention_mask=None, **options)
                if gathered is None:
                    gathered = part.new_empty(1, hidden_states.shape[1], part.shape[-1])
                gathered[0, group.rows] = part.flatten(0, 1)
        finally:
            mixer._modules.update(own)
        if gathered is None:
            raise InvariantViolation("a mixer was called in a step without sequences")
        out: Tensor = mixer.get_submodule(linears.writing)(gathered)
        return out


class _Given(nn.Module):
    """Linear whose output is known of all rows.

    Attributes:
        group: the sequences that it is called for.
    """

    group: SequenceGroup

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, x: Tensor) -> Tensor:
        return self.group.of(self._output)


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the recurrent mixers that can be computed here, by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in MIXERS}


def divert(mixer: nn.Module, mixing: Callable[[], Mixing | None]) -> None:
    """Have a mixer compute each sequence of a pass from its own state."""
    # no module: `mixer` keeps its paths
    mixer.forward = Recurrence(mixer, MIXERS[type(mixer).__name__], mixing)
