"""Select the adapter that answers a request: the bound version, or its fallback."""

from __future__ import annotations

from urllib.parse import quote

from loraserve.errors import AdapterUnavailable
from loraserve.registry.binding import Binding, Shadow
from loraserve.registry.composition import label, versions_of
from loraserve.types import AdapterRef

HEADER = "x-loraserve-adapter"

_PLAIN = "/:@.,*+~_- "
"""Characters that stand in a header unescaped, as are letters and digits.

A base's id may be a folder's name, in any script.
"""


def has_same_tokenizer(one: AdapterRef | None, other: AdapterRef | None) -> bool:
    """Check whether the same tokens mean the same to both; None is the base."""
    return _tokenizers(one) == _tokenizers(other)


def _tokenizers(adapter: AdapterRef | None) -> set[str]:
    """Collect the blobs of the tokenizers that differ from the base's."""
    extras = [version.extras for version in versions_of(adapter)]
    return {found.tokenizer.blob for found in extras if found is not None and found.tokenizer is not None}


class TargetSelector:
    """Select the adapter that answers one HTTP request, with all of its choices.

    It changes once at most, from the requested version to its fallback.
    """

    def __init__(self, binding: Binding, base_id: str, asked: str | None = None, *, tenant: str = "") -> None:
        """Select what `binding` says.

        Args:
            asked: name under which the client requested it.
            tenant: name of the client's tenant.
        """
        self._tenant = tenant
        self._asked = asked
        self.adapter = binding.adapter
        """Adapter that answers; None: the base."""
        self.reason = binding.fell_back_for
        """The code of the error for which `adapter` isn't what was requested; empty: it is."""
        self._from = binding.fell_back_from
        self._fallback = binding.fallback if binding.fell_back_from is None else None
        self._shadow = binding.shadow
        self._base_id = base_id
        self.owners = binding.owners
        """Names of the other tenants that own these adapters."""

    @property
    def has_fallen_back(self) -> bool:
        return self._from is not None

    @property
    def tenant(self) -> str:
        """Name of the client's tenant."""
        return self._tenant

    @property
    def asked(self) -> str:
        """Name under which the client requested it."""
        return self._asked or self._base_id

    @property
    def answering(self) -> str:
        """Name of what answers: a version, a sum, or the base."""
        return self._base_id if self.adapter is None else self.label(self.adapter)

    @property
    def candidates(self) -> tuple[AdapterRef | None, ...]:
        """Adapters that may answer, now or later."""
        return (self.adapter,) if self._fallback is None else (self.adapter, self._fallback.adapter)

    @property
    def shadow(self) -> Shadow | None:
        """Shadow that a copy may run on.

        None where the fallback answers, which is no measure for a shadow; or where the shadow's
        tokenizer is another, to which the prompt's tokens mean something else.
        """
        is_measured = self._shadow is not None and has_same_tokenizer(self._shadow.adapter, self.adapter)
        return self._shadow if is_measured and not self.has_fallen_back else None

    def fall_back(self, error: AdapterUnavailable) -> bool:
        """Switch to the fallback; return False if there is none, or if the fallback failed.

        There is none where its tokenizer is another: the prompt is tokens by then.
        """
        if self._fallback is None or self.adapter is None:
            return False
        if not has_same_tokenizer(self._fallback.adapter, self.adapter):
            return False
        self._from, self.adapter = self.adapter, self._fallback.adapter
        self._fallback = None
        self.reason = error.code
        return True

    def names(self) -> list[str]:
        """List the names by which a router would request what answers: of a sum, its parts'.

        None for the base.
        """
        if self.adapter is None:
            return []
        # a comma separates names, and a base's id may have one
        if self._asked not in (None, self._base_id) and not self.adapter.parts and "," not in self._asked:
            return [self._asked]
        paths = ((self.owners.get(one.tenant), one.name) for one in versions_of(self.adapter))
        return [name if owner is None else f"{owner}/{name}" for owner, name in paths]

    def owner_names(self) -> list[str]:
        """List the names of the tenants that own what answers: of a sum, its parts'."""
        return [self.owners.get(one.tenant, self._tenant) for one in versions_of(self.adapter)]

    def label(self, adapter: AdapterRef) -> str:
        """Format the name by which the client can request it.

        It is ``NAME@VERSION``, ``OWNER/NAME@VERSION`` if granted, or a sum of such.
        """
        return label(adapter, self.owners)

    def headers(self) -> dict[str, str]:
        """``x-loraserve-adapter``: the version that answers; what it stands in for, and why.

        None if the base was requested.
        """
        if self._from is not None:
            told = f"{self.answering}; fallback-from={self.label(self._from)}; reason={self.reason}"
        elif self.adapter is not None:
            told = self.label(self.adapter)
        else:
            return {}
        return {HEADER: quote(told, safe=_PLAIN + ";=")}

    def lorax_headers(self) -> dict[str, str]:
        """Build LoRAX's headers: the base, and the adapter that answers."""
        headers = {"x-model-id": quote(self._base_id, safe=_PLAIN)}
        if self.adapter is not None:
            headers |= {"x-adapter-id": quote(self.label(self.adapter), safe=_PLAIN), "x-adapter-source": "local"}
        return headers
