"""Prices of tokens, as decimals from the request's text to the sum, never floats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

from loraserve.db.names import is_adapter_name, name_key, split_owner
from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

_DIGITS = 64
"""Decimal precision, enough for the longest amount times any number of tokens without rounding."""
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_AMOUNT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_KINDS = ("prompt", "cached", "completion")


@dataclass(frozen=True, slots=True)
class Price:
    """Prices per million tokens, in the table's currency."""

    prompt: Decimal
    cached: Decimal
    """Price of cached prompt tokens."""
    completion: Decimal

    def cost(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Decimal:
        """Compute the exact cost of these tokens; `prompt_tokens` include `cached_tokens`."""
        with localcontext(prec=_DIGITS):
            millionths = (
                self.prompt * (prompt_tokens - cached_tokens)
                + self.cached * cached_tokens
                + self.completion * completion_tokens
            )
            return millionths.scaleb(-6)

    def as_json(self) -> dict[str, str]:
        return {kind: f"{getattr(self, kind):f}" for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Price table: a default price, and prices of adapters.

    An adapter is ``NAME``, or ``OWNER/NAME`` of another tenant. Names are found without regard to
    case.
    """

    currency: str
    price: Price
    adapters: Mapping[str, Price] = field(default_factory=dict)
    _by_key: Mapping[str, Price] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_key", {name_key(name): price for name, price in self.adapters.items()})

    def price_of(self, adapter: str) -> Price:
        """Look up the price of an adapter, or the default price.

        The default is for the base (the empty name) and for adapters without a price.
        """
        return self._by_key.get(name_key(adapter), self.price)

    def as_json(self) -> dict[str, Any]:
        """Format the table as `read_prices` reads it, with its defaults filled in."""
        adapters = {name: price.as_json() for name, price in self.adapters.items()}
        return {"currency": self.currency, **self.price.as_json(), "adapters": adapters}


def highest(prices: Sequence[Price]) -> Price:
    """Compute the maximum of each amount over `prices`, which mustn't be empty."""
    return Price(
        prompt=max(price.prompt for price in prices),
        cached=max(price.cached for price in prices),
        completion=max(price.completion for price in prices),
    )


def read_prices(value: Mapping[str, Any]) -> PriceTable | None:
    """Parse a price table of a request or row; None if it is empty.

    ``{currency, prompt, cached?, completion, adapters?: {NAME: {prompt?, cached?, completion?}}}``.
    The default of ``cached`` is ``prompt``; the defaults of an adapter are the table's prices.

    Raises:
        InvalidRequest: a field is invalid; `param` names it.
    """
    if not value:
        return None
    _check_fields(value, {"currency", "adapters", *_KINDS}, "prices")
    currency = value.get("currency")
    if not isinstance(currency, str) or not _CURRENCY.fullmatch(currency):
        raise InvalidRequest('prices.currency should be three capital letters, such as "EUR".', param="prices.currency")
    amounts = {kind: _read_amount(value[kind], f"prices.{kind}") for kind in _KINDS if kind in value}
    for kind in ("prompt", "completion"):
        if kind not in amounts:
            raise InvalidRequest(f"prices.{kind} is missing.", param=f"prices.{kind}")
    amounts.setdefault("cached", amounts["prompt"])
    price = Price(**amounts)
    return PriceTable(currency, price, _read_adapters(value.get("adapters") or {}, price))


def _read_adapters(value: object, default: Price) -> dict[str, Price]:
    if not isinstance(value, Mapping) or len(value) > LIMITS.max_priced_adapters:
        raise InvalidRequest(
            f"prices.adapters should be an object of at most {LIMITS.max_priced_adapters} adapters.",
            param="prices.adapters",
        )
    prices: dict[str, Price] = {}
    keys: set[str] = set()
    for name, own in value.items():
        if not isinstance(name, str) or not (is_adapter_name(name) or split_owner(name)):
            # an invalid name isn't repeated in the message
            raise InvalidRequest(
                "prices.adapters has an invalid adapter name; expected NAME or OWNER/NAME.",
                param="prices.adapters",
            )
        param = f"prices.adapters.{name}"
        if name_key(name) in keys:
            raise InvalidRequest(f"{param} is there twice; names that differ in case only are the same.", param=param)
        keys.add(name_key(name))
        if not isinstance(own, Mapping):
            raise InvalidRequest(f"{param} should be an object.", param=param)
        _check_fields(own, set(_KINDS), param)
        amounts = {kind: _read_amount(own[kind], f"{param}.{kind}") for kind in _KINDS if kind in own}
        cached = amounts.get("cached", amounts.get("prompt", default.cached))
        prices[name] = Price(
            prompt=amounts.get("prompt", default.prompt),
            cached=cached,
            completion=amounts.get("completion", default.completion),
        )
    return prices


def _check_fields(value: Mapping[str, Any], known: set[str], param: str) -> None:
    if not value.keys() <= known:
        raise InvalidRequest(
            f"{param} has an unknown field.",
            param=param,
            hint=f"Known fields: {', '.join(sorted(known))}.",
        )


def _read_amount(value: object, param: str) -> Decimal:
    if not isinstance(value, str) or not _AMOUNT.fullmatch(value):
        raise InvalidRequest(
            f'{param} should be a decimal number as text, per million tokens, such as "0.50".', param=param
        )
    return Decimal(value)
