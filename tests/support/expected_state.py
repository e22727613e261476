"""What a tenant's adapter must look like after each change: the plain model that a server's answers are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LIVE = "live"


@dataclass(frozen=True, slots=True)
class Expected:
    """One adapter: which versions are visible, by the SHA-256 of their weights, and what its aliases name."""

    versions: Mapping[int, str] = field(default_factory=dict)
    aliases: Mapping[str, int] = field(default_factory=dict)
    last_version: int = 0
    is_there: bool = False

    def published(self, weights: str, *, is_promoting: bool) -> Expected:
        """The same bytes again are the version that has them; after a delete nothing of old comes back but the numbers."""
        versions = dict(self.versions)
        number = next((number for number, found in versions.items() if found == weights), self.last_version + 1)
        versions[number] = weights
        aliases = dict(self.aliases) if self.is_there else {}
        if is_promoting:
            aliases[LIVE] = number
        return Expected(versions, aliases, max(self.last_version, number), is_there=True)

    def moved(self, alias: str, version: int) -> Expected:
        return replace(self, aliases={**self.aliases, alias: version})

    def without_alias(self, alias: str) -> Expected:
        return replace(self, aliases={name: version for name, version in self.aliases.items() if name != alias})

    def without_version(self, number: int) -> Expected:
        return replace(self, versions={found: weights for found, weights in self.versions.items() if found != number})

    def deleted(self) -> Expected:
        return Expected({}, {}, self.last_version, is_there=False)
