"""What a tenant pays for tokens. Money is decimal, from the request's text to the sum: no float is in between."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS

_DIGITS = 64
"""More than the longest amount times any number of tokens has, so that nothing is rounded."""
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_AMOUNT = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_ADAPTER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}(/[a-z0-9][a-z0-9._-]{0,62})?", re.ASCII)
_KINDS = ("prompt", "cached", "completion")


@dataclass(frozen=True, slots=True)
class Price:
    """Per million tokens, in the table's currency."""

    prompt: Decimal
    cached: Decimal
    """Of prompt tokens that weren't computed again."""
    completion: Decimal

    def cost(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Decimal:
        """What these tokens cost, exactly. `cached_tokens` are among `prompt_tokens`."""
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
    """One price for everything, and others for some adapters (``NAME``; ``OWNER/NAME`` for one that another tenant granted)."""

    currency: str
    price: Price
    adapters: Mapping[str, Price] = field(default_factory=dict)

    def price_of(self, adapter: str) -> Price:
        """The price of an adapter; of the base (the empty name) and of whatever has none of its own, the table's."""
        return self.adapters.get(adapter, self.price)

    def as_json(self) -> dict[str, Any]:
        """The table as `read_prices` takes it, with everything said that it filled in."""
        adapters = {name: price.as_json() for name, price in self.adapters.items()}
        return {"currency": self.currency, **self.price.as_json(), "adapters": adapters}


def highest(prices: Sequence[Price]) -> Price:
    """Each amount as the dearest of `prices`, at least one, has it."""
    return Price(
        prompt=max(price.prompt for price in prices),
        cached=max(price.cached for price in prices),
        completion=max(price.completion for price in prices),
    )


def read_prices(value: Mapping[str, Any]) -> PriceTable | None:
    """The table that a request or a row says; None: it is empty, and nothing has a price.

    ``{currency, prompt, cached?, completion, adapters?: {NAME: {prompt?, cached?, completion?}}}``. Without ``cached``, cached
    tokens cost what the others of a prompt do; what an adapter doesn't say is the table's.

    Raises:
        InvalidRequest: something of it can't be; `param` names it.
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
    prices = {}
    for name, own in value.items():
        if not isinstance(name, str) or not _ADAPTER.fullmatch(name):
            # what can't be a name isn't repeated
            raise InvalidRequest(
                "prices.adapters has a name that no adapter can have; NAME or OWNER/NAME was expected.",
                param="prices.adapters",
            )
        param = f"prices.adapters.{name}"
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
            f"{param} has a field that isn't known here.",
            param=param,
            hint=f"Known fields: {', '.join(sorted(known))}.",
        )


def _read_amount(value: object, param: str) -> Decimal:
    if not isinstance(value, str) or not _AMOUNT.fullmatch(value):
        raise InvalidRequest(
            f'{param} should be a decimal number as text, per million tokens, such as "0.50".', param=param
        )
    return Decimal(value)
