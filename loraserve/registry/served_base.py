"""The base that this server serves, and the refusal of versions of another one.

Replicas may differ, so nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loraserve.errors import AdapterOfAnotherBase, EngineUnavailable
from loraserve.types import BaseSpec, Digest

BASE = "base"
"""Name of the check that states the base of a version."""
_NUM_DIGITS = 12


class ServedBase:
    """Compares versions with this server's base by digest.

    A base's digest covers its weights as the checkpoint stores them and the config that determines
    what they compute, but not this server's quantization or dtype.

    Args:
        base: returns the resident base; may raise `EngineUnavailable` while there is none.
    """

    def __init__(self, base: Callable[[], BaseSpec]) -> None:
        self._base = base

    @property
    def spec(self) -> BaseSpec:
        """Description of the base.

        Raises:
            EngineUnavailable: it isn't loaded yet.
        """
        return self._base()

    @property
    def digest(self) -> Digest | None:
        """Digest of the base; None while it isn't loaded."""
        try:
            return self._base().digest
        except EngineUnavailable:
            return None

    def check(self, name: str, number: int, digest: str, checks: Iterable[Mapping[str, Any]]) -> None:
        """Check that the version is of this base; pass if the base isn't loaded yet.

        Raises:
            AdapterOfAnotherBase
        """
        known = self.digest
        if known is not None and digest != known:
            raise other_base_error(name, number, digest, checks, self.spec)


def other_base_error(
    name: str, number: int, digest: str, checks: Iterable[Mapping[str, Any]], served: BaseSpec
) -> AdapterOfAnotherBase:
    """Build the refusal of a version of another base; the message names both bases."""
    ids = (check.get("base_id") for check in checks if check["name"] == BASE)
    made_for = _shown(next(ids, None), digest)
    return AdapterOfAnotherBase(
        f"{name}@{number} was made for another base, {made_for}; "
        f"this server serves {_shown(served.id, served.digest)}.",
        param=f"{name}@{number}",
        hint="Serve that base, or verify the version on this one. "
        f"Try: loraserve adapter verify {name}@{number} --rebase",
    )


def _shown(base_id: object, digest: str) -> str:
    short = f"sha256:{digest[:_NUM_DIGITS]}"
    return f"{base_id} ({short})" if base_id else short
