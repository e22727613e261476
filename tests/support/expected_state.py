"""What a tenant's adapter must look like after each change:
the plain model that a server's answers are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
LIVE = "live"


@dataclass(frozen=True, slots=True)
class Expected:
    """One adapter: which versions are visible, by the SHA-256 of their weights,
    and what its aliases name.
    """

    versions: Mapping[int, str] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)
    last_version: int = 0
    is_there: bool = False
    previous: Mapping[str, int] = field(default_factory=dict)
    """What an alias named before its last move."""
    removed: Mapping[int, str] = field(default_factory=dict)
    """Versions that were deleted."""
    before_delete: Expected | None = None

    def published(self, weights: str, *, is_promoting: bool) -> Expected:
        """The same bytes again are the version that has them;
        after a delete nothing of old comes back but the numbers.
        """
        versions = dict(self.versions)
        number = next((number for number, found in versions.items() if found == weights), self.last_version + 1)
        versions[number] = weights
        gone = {} if self.before_delete is None else self.before_delete.versions
        made = replace(
            self,
            versions=versions,
            last_version=max(self.last_version, number),
            is_there=True,
            removed={**self.removed, **gone},
            before_delete=None,
        )
        return made.moved(LIVE, number) if is_promoting else made

    def moved(self, alias: str, version: int) -> Expected:
        before = self.aliases.get(alias, version)
        previous = self.previous if before == version else {**self.previous, alias: before}
        return replace(self, aliases={**self.aliases, alias: version}, previous=previous)

    def can_roll_back(self) -> list[str]:
        return sorted(alias for alias, version in self.previous.items() if version in self.versions)

    def rolled_back(self, alias: str) -> Expected:
        return self.moved(alias, self.previous[alias])

    def without_alias(self, alias: str) -> Expected:
        return replace(self, aliases=without(self.aliases, alias), previous=without(self.previous, alias))

    def without_version(self, number: int) -> Expected:
        removed = {**self.removed, number: self.versions[number]}
        return replace(self, versions=without(self.versions, number), removed=removed)

    def can_restore(self) -> list[int]:
        return sorted(number for number, weights in self.removed.items() if weights not in self.versions.values())

    def with_restored(self, number: int) -> Expected:
        versions = {**self.versions, number: self.removed[number]}
        return replace(self, versions=versions, removed=without(self.removed, number))

    def deleted(self) -> Expected:
        return Expected({}, {}, self.last_version, is_there=False, removed=self.removed, before_delete=self)

    def restored(self) -> Expected:
        if self.before_delete is None:
            raise ValueError("it isn't deleted")
        return self.before_delete


def without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return {found: value for found, value in mapping.items() if found != key}
