"""Which command helps after which failure."""

from __future__ import annotations

import re

from loraserve import errors

_STEPS: tuple[tuple[type[errors.LoraserveError], str], ...] = (
    # The first class that an error is one of decides: the narrower stand before the wider.
    (errors.SchemaOutdated, "loraserve db upgrade"),
    (errors.VersionNotFound, "loraserve adapter versions NAME"),
    (errors.AliasNotFound, "loraserve adapter show NAME"),
    (errors.AdapterNotFound, "loraserve adapter list"),
    (errors.ModelNotFound, "loraserve adapter list"),
    (errors.TenantNotFound, "loraserve tenant list"),
    (errors.KeyNotFound, "loraserve key list --tenant NAME"),
    (errors.PreconditionFailed, "loraserve adapter show NAME"),
    (errors.NoChatTemplate, "loraserve run MODEL PROMPT --raw"),
    (errors.AdapterQuarantined, "loraserve adapter versions NAME"),
    (errors.AdapterRejected, "loraserve adapter push DIR --name NAME --dry-run"),
    (
        errors.AuthenticationError,
        "export LORASERVE_API_KEY=… (an admin makes one with: loraserve key create --tenant NAME)",
    ),
    (
        errors.PermissionDenied,
        "export LORASERVE_API_KEY=… with a key that has the scope (see: loraserve key list --tenant NAME)",
    ),
    (errors.Overloaded, "loraserve ps"),
    (errors.RateLimited, "loraserve ps"),
    (errors.ClientTimeout, "loraserve ps"),
    (errors.ConnectionFailed, "loraserve serve --model DIR (or: loraserve demo)"),
)


_NAMED = re.compile(r"(?:See|Run|Try): (loraserve .+?)\.?$")


def next_step(error: errors.LoraserveError) -> str | None:
    """The command to run next: the one that the error names, else the one for its class; None where no command helps."""
    named = _NAMED.search(str(error))
    if named is not None:
        return named[1]
    return next((step for kind, step in _STEPS if isinstance(error, kind)), None)
