"""Name that an adapter's config has for its base.

It proves nothing, but it should be one of this base's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loraserve.adapters.strict_json import shown
from loraserve.errors import AdapterBaseMismatch
from loraserve.registry.health.checks import PASSED, WARNED
from loraserve.types import BaseSpec

FIELD = "base_model_name_or_path"
BASE_NAME = "base_name"
"""Name of the check, which exists if the config names a base."""
MAX_NAME_LENGTH = 1024
"""Length at which names are cut; no path is longer on most systems,
and the check is kept with the version.
"""
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_CACHED = "models--"
"""A hub's cache calls the folder of ORG/NAME ``models--ORG--NAME``."""


class BaseNames:
    """Compares names of bases.

    Names are equal if their last components are, ignoring case: ``org/Name``, ``mirror/name`` and
    ``/data/Name/`` name the same base. A folder in a hub's cache has the name of its model. A
    digest is compared with the base's digest.

    Args:
        names: names of the base apart from its id.
        source: source of the checkpoint, a hub's id or a path; not shown to tenants.
        is_strict: whether adapters of another base, by its name or its tokenizer, are refused.
    """

    def __init__(self, names: Sequence[str] = (), *, source: str = "", is_strict: bool = False) -> None:
        self._names = tuple(names)
        self._source = source
        self.is_strict = is_strict

    def change(self, names: Sequence[str], *, is_strict: bool) -> None:
        """Compare with other names from now on, strictly or not."""
        self._names, self.is_strict = tuple(names), is_strict

    def inspect(self, config: Mapping[str, Any], base: BaseSpec) -> tuple[Mapping[str, Any], ...]:
        """Check the base that the config names; no check where it names none.

        Raises:
            AdapterBaseMismatch: the config names another base, and the server is strict.
        """
        named = config.get(FIELD)
        if not isinstance(named, str) or not named.strip():
            return ()
        check = self.check(named, base)
        if self.is_strict and check["status"] != PASSED:
            raise AdapterBaseMismatch(
                f"{check['detail']}, and accepts adapters of its own base only (--strict-base).",
                hint="Push it to a server of its base; if this base has that name too, "
                "start the server with --base-names.",
            )
        return (check,)

    def check(self, named: str, base: BaseSpec) -> dict[str, Any]:
        """Compare the name with the base's: the entry among a version's checks."""
        named = named.strip()[:MAX_NAME_LENGTH]
        status, detail = PASSED, f"{FIELD} is {shown(named)}, a name of this server's base"
        if not self._is_the_same(named, base):
            known = ", ".join(dict.fromkeys((base.id, *self._names)))
            status, detail = (
                WARNED,
                f"{FIELD} is {shown(named)}; this server serves {known} (sha256:{base.digest[:12]})",
            )
        return {"name": BASE_NAME, "status": status, "detail": detail, "named": named}

    def is_name_of(self, name: str, base: BaseSpec) -> bool:
        """Check whether `name` names this base."""
        return self._is_the_same(name.strip()[:MAX_NAME_LENGTH], base)

    def again(self, checks: Sequence[Mapping[str, Any]], base: BaseSpec) -> list[Mapping[str, Any]]:
        """Compare the name in the checks of a version that is moved to `base` again."""
        return [self.check(check["named"], base) if check["name"] == BASE_NAME else check for check in checks]

    def _is_the_same(self, named: str, base: BaseSpec) -> bool:
        digest = _DIGEST.fullmatch(named.lower())
        if digest is not None:
            return digest[1] == base.digest
        own = {form for name in (base.id, self._source, *self._names) for form in _short_forms(name)}
        return not own.isdisjoint(_short_forms(named))


def _short_forms(name: str) -> set[str]:
    """Extract the last component of a name or path.

    If it is in a hub's cache, add the model's name.
    """
    parts = [part for part in name.casefold().replace("\\", "/").split("/") if part not in ("", ".")]
    cached = (part.removeprefix(_CACHED).rpartition("--")[2] for part in parts if part.startswith(_CACHED))
    return {*parts[-1:], *cached}
