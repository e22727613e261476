"""Facts that a rank sends the others of its part of a base. Imports no torch.

Each stage of a pipeline reads its own tensors alone: the digest of a base, its size and its
arithmetic are those of all parts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loraserve.types import Struct

Tensors = list[tuple[str, str, tuple[int, ...], str]]
"""(name, dtype, shape, SHA-256) of each tensor that was read."""
Multiplied = tuple[str, str, str]
"""Name of an arithmetic, its kernel and its instructions."""


class PartFacts(Struct, frozen=True):
    """A part of a base that was loaded.

    Attributes:
        num_bytes: that it takes.
        layers, experts, head: how its linears multiply.
    """

    tensors: Tensors
    num_bytes: int
    layers: list[Multiplied]
    experts: list[Multiplied]
    head: list[Multiplied]


def join_facts(facts: Sequence[PartFacts]) -> PartFacts:
    """Join the facts of all parts, as of one process that has all of them.

    Args:
        facts: of all ranks, in the order of their stages.
    """
    return PartFacts(
        # a tensor that several parts read was read to the same bytes
        tensors=list({tensor[0]: tensor for one in facts for tensor in one.tensors}.values()),
        num_bytes=sum(one.num_bytes for one in facts),
        layers=_each_once(multiplied for one in facts for multiplied in one.layers),
        experts=_each_once(multiplied for one in facts for multiplied in one.experts),
        head=_each_once(multiplied for one in facts for multiplied in one.head),
    )


def _each_once(multiplied: Iterable[Multiplied]) -> list[Multiplied]:
    return list(dict.fromkeys(multiplied))
