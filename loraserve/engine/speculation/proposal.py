"""Tokens that a step may verify for one request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraserve.engine.request import Request
from loraserve.engine.speculation.draft import Rate, Rates


class ProposalSource(StrEnum):
    """Origin of proposed tokens."""

    REQUEST = "request"
    HISTORY = "history"
    DRAFT = "draft"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that an entry of a step may compute in addition to its own.

    Attributes:
        number: of the entry in the step.
        length: of the match; `DRAFTED` if the draft base proposed them, `FORCED` if a grammar did.
        rates: how often the request's proposals were right.
    """

    number: int
    request: Request
    token_ids: tuple[int, ...]
    source: ProposalSource
    length: int
    rates: Rates

    @property
    def rate(self) -> Rate:
        return self.rates.of(self.length)
