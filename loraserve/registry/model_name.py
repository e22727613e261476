"""Syntax of ``model`` in requests.

It is ``NAME``, ``NAME@ALIAS``, ``NAME@VERSION``, the base's id, or ``BASE:NAME…``. ``OWNER/NAME…``
names an adapter that another tenant has granted. A sum of adapters is::

    TERM ("+" TERM)*        TERM = [WEIGHT "*"] [OWNER "/"] NAME ["@" (ALIAS | VERSION)]
    a+0.5*b@3
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from loraserve.db.names import is_name
from loraserve.errors import InvalidRequest, ModelNotFound
from loraserve.limits import LIMITS, NAME_PATTERN

LIVE = "live"
"""Alias that a bare name means."""
BASE_FALLBACK = "base"
"""Fallback that means the base."""
RESERVED_ALIASES = frozenset({BASE_FALLBACK, "latest", "none", "null"})
"""Names that could be mistaken for something else than an alias."""
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
    version: int | None = None
    alias: str | None = None
    owner: str | None = None
    """Name of the tenant that owns the adapter; None for the caller."""

    @property
    def is_base(self) -> bool:
        return self.name is None

    def __str__(self) -> str:
        if self.name is None:
            return "(base)"
        return f"{self.path}@{self.alias if self.version is None else self.version}"

    @property
    def path(self) -> str:
        """``NAME``, or ``OWNER/NAME``."""
        return f"{self.name}" if self.owner is None else f"{self.owner}/{self.name}"


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
    return ParsedModel() if model == base_id else _parse_adapter(model.removeprefix(f"{base_id}:"))


def _parse_adapter(text: str) -> ParsedModel:
    owner, name, selector = _split(text)
    if not all(is_name(part) for part in (owner, name, selector) if part is not None):
        raise ModelNotFound("The model does not exist or you do not have access to it.", hint=_HINT)
    if selector is None:
        return ParsedModel(name, alias=LIVE, owner=owner)
    if not selector.isdigit():
        return ParsedModel(name, alias=selector, owner=owner)
    if selector.startswith("0") or len(selector) > 10 or int(selector) > MAX_VERSION:
        raise ModelNotFound(f'The model "{text}" does not exist or you do not have access to it.', hint=_HINT)
    return ParsedModel(name, version=int(selector), owner=owner)


def _split(text: str) -> tuple[str | None, str, str | None]:
    """Split ``[OWNER/]NAME[@SELECTOR]`` to owner, name and selector, without validating them."""
    owner, slash, rest = text.rpartition("/")
    name, at, selector = rest.partition("@")
    return owner if slash else None, name, selector if at else None


def parse_terms(model: str, base_id: str) -> tuple[Term, ...]:
    """Parse `model` to the terms of a sum: one for an adapter, none for the base.

    Raises:
        ModelNotFound: as `parse_model`.
        InvalidRequest: the sum has invalid syntax, too many terms, or an invalid weight.
    """
    if model == base_id:
        return ()
    text = model.removeprefix(f"{base_id}:")
    if "+" not in text and "*" not in text:
        return (Term(_parse_adapter(text)),)
    terms = text.split("+")
    if len(terms) > LIMITS.max_composition_terms:
        raise InvalidRequest(
            f"model adds up {len(terms)} adapters; at most {LIMITS.max_composition_terms} are allowed.", param="model"
        )
    return tuple(_parse_term(term, number) for number, term in enumerate(terms, 1))


def _parse_term(text: str, number: int) -> Term:
    weight, star, adapter = text.rpartition("*")
    if not all(is_name(part) for part in _split(adapter) if part is not None):
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
    """Return the terms for these adapters and weights.

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
    """Return `weight` if it is valid.

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
    """Return the same error for absent, deleted and other tenants' models.

    It depends on the request alone.
    """
    shown = model.path if model.alias == LIVE else str(model)
    return ModelNotFound(f'The model "{shown}" does not exist or you do not have access to it.', hint=_HINT)


def check_adapter_name(name: str, base_id: str) -> str:
    """Return `name` if it is a valid adapter name.

    Raises:
        InvalidRequest: the name doesn't match `NAME_PATTERN`, or is the base's id, which would hide
            it.
    """
    if not is_name(name):
        raise InvalidRequest(f"An adapter's name should match {NAME_PATTERN}.", param="name")
    if name == base_id:
        raise InvalidRequest(f'"{name}" is the base model\'s id; give the adapter another name.', param="name")
    return name


def check_alias_name(alias: str) -> str:
    """Return `alias` if it is a valid alias name.

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
