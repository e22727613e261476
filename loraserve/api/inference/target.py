"""Who answers a request: the version that it is bound to, or that version's fallback once the version turned out not to be usable."""

from __future__ import annotations

from urllib.parse import quote

from loraserve.errors import AdapterUnavailable
from loraserve.registry.binding import Binding, Shadow
from loraserve.registry.composition import label
from loraserve.types import AdapterRef

HEADER = "x-loraserve-adapter"

_PLAIN = "/:@.,*+~_- "
"""What stands in a header as it is, beside letters and digits. A base's id may be the name of a folder, in any script."""


class TargetSelector:
    """Which adapter answers one HTTP request: all of its choices, or it would be an answer of two models.

    It changes once at most, from the version that was asked for to its fallback.
    """

    def __init__(self, binding: Binding, base_id: str) -> None:
        self.adapter = binding.adapter
        """None: the base."""
        self.reason = binding.fell_back_for
        """The code of the error for which `adapter` isn't what was asked for; empty: it is."""
        self._from = binding.fell_back_from
        self._fallback = binding.fallback if binding.fell_back_from is None else None
        self._shadow = binding.shadow
        self._base_id = base_id
        self.owners = binding.owners
        """The names of the other tenants whose adapters these are."""

    @property
    def has_fallen_back(self) -> bool:
        return self._from is not None

    @property
    def candidates(self) -> tuple[AdapterRef | None, ...]:
        """Whatever may be `adapter`, now or later."""
        return (self.adapter,) if self._fallback is None else (self.adapter, self._fallback.adapter)

    @property
    def shadow(self) -> Shadow | None:
        """What a copy of the request may run on; None where the fallback answers, which is no measure for it."""
        return None if self.has_fallen_back else self._shadow

    def fall_back(self, error: AdapterUnavailable) -> bool:
        """Whether the fallback answers from now on. False: there is none, or it is the one that failed."""
        if self._fallback is None or self.adapter is None:
            return False
        self._from, self.adapter = self.adapter, self._fallback.adapter
        self._fallback = None
        self.reason = error.code
        return True

    def label(self, adapter: AdapterRef) -> str:
        """How the client would ask for it: ``NAME@VERSION``, ``OWNER/NAME@VERSION`` of one that was granted, or a sum of such."""
        return label(adapter, self.owners)

    def headers(self) -> dict[str, str]:
        """``x-loraserve-adapter``: the version that answers; what it stands in for, and why. None for the base that was asked for."""
        if self._from is not None:
            answering = self._base_id if self.adapter is None else self.label(self.adapter)
            told = f"{answering}; fallback-from={self.label(self._from)}; reason={self.reason}"
        elif self.adapter is not None:
            told = self.label(self.adapter)
        else:
            return {}
        return {HEADER: quote(told, safe=_PLAIN + ";=")}
