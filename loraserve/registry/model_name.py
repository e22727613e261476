"""What a client writes as ``model``: ``NAME``, ``NAME@ALIAS``, ``NAME@VERSION``, the base's id, or ``BASE:NAME…``."""

from __future__ import annotations

from dataclasses import dataclass

from loraserve.db.names import is_name
from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.limits import NAME_PATTERN

LIVE = "live"
"""The alias that a bare name means."""
RESERVED_ALIASES = frozenset({"base", "latest", "none", "null"})
"""Words that would read as something else than a pointer that people move."""
MAX_VERSION = (1 << 31) - 1
"""What the registry's column holds."""


@dataclass(frozen=True, slots=True)
class ParsedModel:
    """What was asked for. The base: no name. An adapter: its name and exactly one of `version` and `alias`."""

    name: str | None = None
    version: int | None = None
    alias: str | None = None

    @property
    def is_base(self) -> bool:
        return self.name is None

    def __str__(self) -> str:
        if self.name is None:
            return "(base)"
        return f"{self.name}@{self.alias if self.version is None else self.version}"


def parse_model(model: str, base_id: str) -> ParsedModel:
    """What `model` means on a server whose base is called `base_id` (which may hold ``/``, ``:`` and ``@``).

    The base's id wins over everything; a bare name means its alias `LIVE`.

    Raises:
        ModelNotFound: `model` has none of the forms; nothing of that name can exist.
    """
    if model == base_id:
        return ParsedModel()
    name, at, selector = model.removeprefix(f"{base_id}:").partition("@")
    if not is_name(name) or (at and not is_name(selector)):
        raise ModelNotFound("The model does not exist or you do not have access to it.", hint=_HINT)
    if not at:
        return ParsedModel(name, alias=LIVE)
    if not selector.isdigit():
        return ParsedModel(name, alias=selector)
    if selector.startswith("0") or len(selector) > 10 or int(selector) > MAX_VERSION:
        raise ModelNotFound(
            f'The model "{name}@{selector}" does not exist or you do not have access to it.', hint=_HINT
        )
    return ParsedModel(name, version=int(selector))


_HINT = "GET /v1/models lists those that this key may use."


def model_not_found(model: ParsedModel) -> ModelNotFound:
    """One text for absent, deleted and somebody else's; it depends on the question alone."""
    shown = model.name if model.alias == LIVE else str(model)
    return ModelNotFound(f'The model "{shown}" does not exist or you do not have access to it.', hint=_HINT)


def check_adapter_name(name: str, base_id: str) -> str:
    """`name` if an adapter may be called so.

    Raises:
        InvalidRequest: it doesn't match `NAME_PATTERN`, or the base is called so and would hide it.
    """
    if not is_name(name):
        raise InvalidRequest(f"An adapter's name should match {NAME_PATTERN}.", param="name")
    if name == base_id:
        raise InvalidRequest(f'"{name}" is the base model\'s id; give the adapter another name.', param="name")
    return name


def check_alias_name(alias: str) -> str:
    """`alias` if an alias may be called so.

    Raises:
        InvalidRequest: it doesn't match `NAME_PATTERN`, is all digits (it would read as a version), or is reserved.
    """
    if not is_name(alias):
        raise InvalidRequest(f"An alias should match {NAME_PATTERN}.", param="alias")
    if alias.isdigit():
        raise InvalidRequest("An alias of digits alone would read as a version.", param="alias")
    if alias in RESERVED_ALIASES:
        raise InvalidRequest(f'"{alias}" is reserved; give the alias another name.', param="alias")
    return alias
