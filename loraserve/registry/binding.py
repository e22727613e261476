"""What a request is bound to when it is admitted: one version, what answers if that can't, and who runs a copy of it."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.types import AdapterRef


@dataclass(frozen=True, slots=True)
class Fallback:
    """What answers in place of a version that can't."""

    adapter: AdapterRef | None
    """None: the base."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """A version on which a copy of some of the requests runs, and whose answers nobody sees."""

    adapter: AdapterRef
    adapter_id: str
    """The row of both versions' adapter."""
    share: float
    """Of the requests, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What answers one request, from its admission to its end."""

    adapter: AdapterRef | None
    """None: the base."""
    fallback: Fallback | None = None
    """What answers if `adapter` turns out not to be usable before its first token."""
    shadow: Shadow | None = None
    fell_back_from: AdapterRef | None = None
    """The version that was asked for, where `adapter` is its fallback already."""
    fell_back_for: str = ""
    """The code of the error that `fell_back_from` would have given."""
