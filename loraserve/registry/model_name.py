"""Syntax of ``model`` in requests.

It is ``NAME``, ``NAME@ALIAS``, ``NAME@VERSION``, the base's id, or ``BASE:NAME…``. ``OWNER/NAME…``
names an adapter that another tenant has granted. A name may have ``/`` and ``:`` itself: where the
text can be read in several ways, the base's id comes first, then an adapter of the tenant's own
whose name is the whole text, then one whose name stands after ``BASE:``, then a granted one
(`ParsedModel`). Names are compared without regard to case. A sum of adapters is::

    TERM ("+" TERM)*        TERM = [WEIGHT "*"] [OWNER "/"] NAME ["@" (ALIAS | VERSION)]
    a+0.5*b@3
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from loraserve.db.names import ADAPTER_NAME_RULE, is_adapter_name, is_name, name_fault, name_key, split_owner
from loraserve.errors import Conflict, InvalidRequest, ModelNotFound
from loraserve.limits import LIMITS, NAME_PATTERN

LIVE = "live"
"""Alias that a bare name means."""
BASE_FALLBACK = "base"
"""Fallback that means the base."""
RESERVED_ALIASES = frozenset({BASE_FALLBACK, "latest", "none", "null"})
"""Names that could be mistaken for something else than an alias."""
LATEST_TAG = ":latest"
"""End of names at Ollama's clients, which mean the name without it."""
MAX_VERSION = (1 << 31) - 1
"""Maximum of the database column."""
MAX_WEIGHT_LENGTH = 24
"""Maximum number of characters, enough to write any float exactly."""

_WEIGHT = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e-?[0-9]{1,3})?")
_TERM = "[WEIGHT*][OWNER/]NAME[@ALIAS or @VERSION]"


@dataclass(frozen=True, slots=True)
class ParsedModel:
    """Parsed model name.

    It has nothing for the base; a name and exactly one of `version` and `alias` for an adapter.
    """

    name: str | None = None
    """Name as the request has it: an adapter's of the caller, or ``OWNER/NAME``."""
    version: int | None = None
    alias: str | None = None
    prefix: str = ""
    """``BASE:`` before the name; empty if it isn't there."""

    @property
    def is_base(self) -> bool:
        return self.name is None

    def __str__(self) -> str:
        if self.name is None:
            return "(base)"
        return f"{self.name}@{self.alias if self.version is None else self.version}"

    @property
    def own_keys(self) -> tuple[str, ...]:
        """Keys of the caller's own adapters that it may mean; the first that exists is meant."""
        if self.name is None:
            return ()
        names = (f"{self.prefix}{self.name}", self.name) if self.prefix else (self.name,)
        return tuple(name_key(name) for name in names if is_adapter_name(name))

    def as_written(self, text: str, name: str, *, is_granted: bool) -> str:
        """Replace the name in `text`, which was parsed to this, by the found adapter's `name`."""
        asked = f"{self.prefix}{self.name}"
        selector = text[len(asked) :]
        if is_granted and self.granted is not None:
            return f"{self.prefix}{self.granted[0]}/{name}{selector}"
        prefix = "" if name_key(name) == name_key(asked) else self.prefix
        return f"{prefix}{name}{selector}"

    @property
    def granted(self) -> tuple[str, str] | None:
        """Owner's name and key of the granted adapter that it means if no own one is meant."""
        found = None if self.name is None else split_owner(self.name)
        return None if found is None else (found[0], name_key(found[1]))


@dataclass(frozen=True, slots=True)
class Term:
    """Term of a sum of adapters. Weights are exact decimals, so that they can cancel out."""

    adapter: ParsedModel
    weight: Decimal = Decimal(1)


def parse_model(model: str, base_id: str) -> ParsedModel:
    """Parse `model` on a server whose base has the id `base_id`.

    The id may contain ``/``, ``:`` and ``@``. The base's id takes precedence; a bare name means its
    alias `LIVE`.

    Raises:
        ModelNotFound: the syntax is invalid, so that no such model can exist.
    """
    return ParsedModel() if model == base_id else _parse_adapter(*_without_base(model, base_id))


def _without_base(model: str, base_id: str) -> tuple[str, str]:
    """Split off what stands before the name, ``BASE:``; empty if it isn't there."""
    prefix = f"{base_id}:"
    return (model.removeprefix(prefix), prefix) if model.startswith(prefix) else (model, "")


def _parse_adapter(text: str, prefix: str = "") -> ParsedModel:
    name, selector = _split(text)
    if not _is_valid(name, selector):
        raise ModelNotFound("The model does not exist or you do not have access to it.", hint=_HINT)
    if selector is None:
        return ParsedModel(name, alias=LIVE, prefix=prefix)
    if not selector.isdigit():
        return ParsedModel(name, alias=selector, prefix=prefix)
    if selector.startswith("0") or len(selector) > 10 or int(selector) > MAX_VERSION:
        raise ModelNotFound(f'The model "{text}" does not exist or you do not have access to it.', hint=_HINT)
    return ParsedModel(name, version=int(selector), prefix=prefix)


def _split(text: str) -> tuple[str, str | None]:
    """Split ``NAME[@SELECTOR]`` to name and selector, without validating them."""
    name, at, selector = text.partition("@")
    return name, selector if at else None


def _is_valid(name: str, selector: str | None) -> bool:
    """Check whether an adapter could have this name, or a granted one this ``OWNER/NAME``."""
    is_found = is_adapter_name(name) or split_owner(name) is not None
    return is_found and (selector is None or is_name(selector))


def parse_terms(model: str, base_id: str) -> tuple[Term, ...]:
    """Parse `model` to the terms of a sum: one for an adapter, none for the base.

    Raises:
        ModelNotFound: as `parse_model`.
        InvalidRequest: the sum has invalid syntax, too many terms, or an invalid weight.
    """
    if model == base_id:
        return ()
    text, prefix = _without_base(model, base_id)
    if "+" not in text and "*" not in text:
        return (Term(_parse_adapter(text, prefix)),)
    terms = text.split("+")
    if len(terms) > LIMITS.max_composition_terms:
        raise InvalidRequest(
            f"model adds up {len(terms)} adapters; at most {LIMITS.max_composition_terms} are allowed.", param="model"
        )
    return tuple(_parse_term(term, number) for number, term in enumerate(terms, 1))


def _parse_term(text: str, number: int) -> Term:
    weight, star, adapter = text.rpartition("*")
    if not _is_valid(*_split(adapter)):
        raise InvalidRequest(
            f"Term {number} of model isn't {_TERM}.", param="model", hint="Use a form such as a+0.5*b@3."
        )
    if not star:
        return Term(_parse_adapter(adapter))
    if len(weight) > MAX_WEIGHT_LENGTH or not _WEIGHT.fullmatch(weight):
        raise InvalidRequest(
            f"The weight in term {number} of model isn't a decimal number of at most {MAX_WEIGHT_LENGTH} characters.",
            param="model",
            hint="Use a form such as a+0.5*b, or a+-0.5*b to subtract.",
        )
    return Term(_parse_adapter(adapter), check_weight(Decimal(weight), "model"))


def terms_of(adapters: Sequence[tuple[str, float]]) -> tuple[Term, ...]:
    """Parse the terms for these adapters and weights.

    An adapter is ``NAME``, ``NAME@ALIAS`` or ``NAME@VERSION``.

    Raises:
        ModelNotFound: a name has invalid syntax.
        InvalidRequest: a weight is out of bounds.
    """
    return tuple(
        Term(_parse_adapter(name), check_weight(Decimal(repr(weight)), f"adapters.{index}.weight"))
        for index, (name, weight) in enumerate(adapters)
    )


def check_weight(weight: Decimal, param: str) -> Decimal:
    """Check that `weight` is valid, and return it.

    Raises:
        InvalidRequest: its absolute value is over `LIMITS.max_composition_weight`.
    """
    if not abs(weight) <= LIMITS.max_composition_weight:
        raise InvalidRequest(
            f"A weight should be between -{LIMITS.max_composition_weight:g} and {LIMITS.max_composition_weight:g}.",
            param=param,
        )
    return weight


_HINT = "GET /v1/models lists the models that this key may use."


def model_not_found(model: ParsedModel) -> ModelNotFound:
    """Build the same error for absent, deleted and other tenants' models.

    It depends on the request alone.
    """
    shown = model.name if model.alias == LIVE else str(model)
    return ModelNotFound(f'The model "{shown}" does not exist or you do not have access to it.', hint=_HINT)


def check_adapter_name(name: str, base_id: str) -> str:
    """Check that `name` is a valid adapter name, and return it.

    Raises:
        InvalidRequest: the name breaks `ADAPTER_NAME_RULE`, is the base's id, which would hide it,
            or begins as ``BASE:NAME`` does.
    """
    if not is_adapter_name(name):
        raise InvalidRequest(
            f"An adapter's name should be {ADAPTER_NAME_RULE}; of this one, {name_fault(name)}.",
            param="name",
            hint="NAME@ALIAS and NAME@VERSION are how requests choose a version." if "@" in name else None,
        )
    key, base = name_key(name), name_key(base_id)
    if key == base:
        raise InvalidRequest(f'"{name}" is the base model\'s id; give the adapter another name.', param="name")
    if key.startswith(f"{base}:"):
        raise InvalidRequest(
            f'"{name}" begins with the base model\'s id and ":", so that requests for it mean '
            f'"{name[len(base) + 1 :]}" on this base; give the adapter another name.',
            param="name",
        )
    return name


def other_case(name: str, found: str) -> Conflict:
    """Build the refusal of a name that the tenant's adapter `found` has in another case."""
    return Conflict(
        f'The name "{name}" differs in case only from that of the adapter "{found}".',
        hint=f"Use {found}, or choose another name.",
    )


def check_alias_name(alias: str) -> str:
    """Check that `alias` is a valid alias name, and return it.

    Raises:
        InvalidRequest: the name doesn't match `NAME_PATTERN`, looks like a version number, or is
            reserved.
    """
    if not is_name(alias):
        raise InvalidRequest(f"An alias should match {NAME_PATTERN}.", param="alias")
    if alias.isdigit():
        raise InvalidRequest("An alias shouldn't consist of digits only: it would read as a version.", param="alias")
    if alias in RESERVED_ALIASES:
        raise InvalidRequest(f'"{alias}" is reserved; give the alias another name.', param="alias")
    return alias
