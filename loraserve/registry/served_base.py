"""The base that this server serves, and the versions that were made for another one. Replicas may differ: each judges by its own, and writes nothing of it down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loraserve.errors import AdapterOfAnotherBase, EngineUnavailable
from loraserve.types import BaseSpec, Digest

BASE = "base"
"""The name of the check that says which base a version was compiled for."""
_NUM_DIGITS = 12


class ServedBase:
    """Judges versions by the digest of the base that they hold.

    A base's digest is of its weights as the checkpoint stores them and of the config that decides what they compute. What this server
    rounds the weights to, and in which dtype it holds them, aren't part of it.

    Args:
        base: the resident base; may raise `EngineUnavailable` while there is none.
    """

    def __init__(self, base: Callable[[], BaseSpec]) -> None:
        self._base = base

    @property
    def spec(self) -> BaseSpec:
        """Raises:
        EngineUnavailable: it isn't loaded yet.
        """
        return self._base()

    @property
    def digest(self) -> Digest | None:
        """None: the base isn't loaded yet, and no version can be judged."""
        try:
            return self._base().digest
        except EngineUnavailable:
            return None

    def check(self, name: str, number: int, digest: str, checks: Iterable[Mapping[str, Any]]) -> None:
        """Return if the version is of this base, or the base isn't loaded yet.

        Raises:
            AdapterOfAnotherBase
        """
        known = self.digest
        if known is not None and digest != known:
            raise other_base_error(name, number, digest, checks, self.spec)


def other_base_error(
    name: str, number: int, digest: str, checks: Iterable[Mapping[str, Any]], served: BaseSpec
) -> AdapterOfAnotherBase:
    """Return why this version isn't served here: which base it was made for, and which one there is."""
    ids = (check.get("base_id") for check in checks if check["name"] == BASE)
    made_for = _shown(next(ids, None), digest)
    return AdapterOfAnotherBase(
        f"{name}@{number} was made for another base, {made_for}; this server serves {_shown(served.id, served.digest)}.",
        param=f"{name}@{number}",
        hint=f"Serve that base, or let the version be checked for this one. Try: loraserve adapter verify {name}@{number} --rebase",
    )


def _shown(base_id: object, digest: str) -> str:
    short = f"sha256:{digest[:_NUM_DIGITS]}"
    return f"{base_id} ({short})" if base_id else short
