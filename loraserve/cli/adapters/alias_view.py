"""Views of an alias: the version it points to, or the split of its traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraserve.cli.output import Column

if TYPE_CHECKING:
    from loraserve.contract.adapter import Adapter
    from loraserve.contract.alias import Alias

ALIAS_COLUMNS = (
    Column("ALIAS", "alias"),
    Column("VERSION", "version"),
    Column("SPLIT", lambda alias: _split(alias.split)),
    Column("SHADOW", lambda alias: _shadow(alias.shadow)),
    Column("UPDATED", "updated_at"),
)
ALIAS_DETAILS = (
    Column("alias", "alias"),
    Column("version", "version"),
    Column("split", lambda alias: _split(alias.split)),
    Column("shadow", lambda alias: _shadow(alias.shadow)),
    Column("etag", "etag"),
)


def aliases_in_words(adapter: Adapter) -> str | None:
    """Format where each alias leads: ``canary=3, live=1:50%,2:50%``."""
    return ", ".join(f"{name}={_target(adapter, name)}" for name in adapter.aliases) or None


def target_in_words(alias: Alias) -> str:
    """Format where an alias leads: ``version 3``, or its split."""
    return _split(alias.split) or f"version {alias.version}"


def _target(adapter: Adapter, alias: str) -> str:
    split = adapter.splits.get(alias)
    if not split:
        return str(adapter.aliases[alias])
    total = sum(one.weight for one in split)
    return ",".join(f"{one.version}:{100 * one.weight / total:.4g}%" for one in split)


def _split(split: object) -> str | None:
    """Format a split: ``90 % of 3, 10 % of 4``."""
    if not isinstance(split, list) or not split:
        return None
    total = sum(one.weight for one in split)
    return ", ".join(f"{100 * one.weight / total:.4g} % of {one.version}" for one in split)


def _shadow(shadow: object) -> str | None:
    share, version = getattr(shadow, "share", None), getattr(shadow, "version", None)
    return None if share is None else f"{100 * share:.4g} % to {version}"
