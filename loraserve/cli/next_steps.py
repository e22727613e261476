"""The command that helps after each failure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from loraserve import errors

_STEPS: tuple[tuple[type[errors.LoraserveError], str], ...] = (
    # the first match decides: subclasses stand before their parents
    (errors.SchemaOutdated, "loraserve db upgrade"),
    (errors.GrantNotFound, "loraserve grant list NAME"),
    (errors.OperationNotFound, "loraserve operation list"),
    (errors.VersionNotFound, "loraserve adapter versions NAME"),
    (errors.AliasNotFound, "loraserve adapter show NAME"),
    (errors.AdapterNotFound, "loraserve adapter list"),
    (errors.ModelNotFound, "loraserve adapter list"),
    (errors.TenantNotFound, "loraserve tenant list"),
    (errors.KeyNotFound, "loraserve key list --tenant TENANT"),
    (errors.PreconditionFailed, "loraserve adapter show NAME"),
    (errors.NoChatTemplate, "loraserve run MODEL PROMPT --raw"),
    (errors.AdapterQuarantined, "loraserve adapter versions NAME"),
    (errors.AdapterOfAnotherBase, "loraserve adapter versions NAME"),
    (
        errors.AuthenticationError,
        "export LORASERVE_API_KEY=… (an admin makes one with: loraserve key create --tenant TENANT)",
    ),
    (errors.DatabaseUnavailable, "loraserve doctor"),
    (errors.Overloaded, "loraserve ps"),
    (errors.RateLimited, "loraserve ps"),
    (errors.ClientTimeout, "loraserve ps"),
    (errors.ConnectionFailed, "loraserve serve --model BASE (or: loraserve demo)"),
)


_NAMED = re.compile(r"(?:See|Run|Try): (loraserve .+?)\.?$")
_PLACES = re.compile(r"\b(NAME|DIR|MODEL|PROMPT|ALIAS|TENANT)\b")


def next_step(error: errors.LoraserveError, named: Mapping[str, str] | None = None) -> str | None:
    """Return the command to run next; None if no command helps.

    It is the error's own, else the one for its class.

    Args:
        named: what NAME, DIR and the like are in the command that failed; others stay as they are.
    """
    said = _NAMED.search(str(error))
    step = said[1] if said is not None else next((step for kind, step in _STEPS if isinstance(error, kind)), None)
    known = named or {}
    return None if step is None else _PLACES.sub(lambda place: shlex.quote(known.get(place[0], place[0])), step)
