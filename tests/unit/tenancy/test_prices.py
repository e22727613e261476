"""Price tables: what tokens cost, to the last decimal."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from loraserve.errors import InvalidRequest
from loraserve.limits import LIMITS
from loraserve.tenancy.prices import PriceTable, read_prices

TABLE = {
    "currency": "EUR",
    "prompt": "0.50",
    "cached": "0.05",
    "completion": "1.50",
    "adapters": {"sql": {"completion": "2.5"}, "acme/shared": {"prompt": "1"}},
}


def table(**changed: Any) -> PriceTable:
    read = read_prices({**TABLE, **changed})
    assert read is not None
    return read


def test_tokens_cost_exact_price_of_kind() -> None:
    cost = table().price_of("").cost(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    assert cost == Decimal("0.0000077")


def test_a_great_many_tokens_cost_no_rounding() -> None:
    price = table(prompt="999999999.999999999").price
    cost = price.cost(prompt_tokens=10**15 + 1, cached_tokens=0, completion_tokens=0)
    assert cost == Decimal("1000000000000000998.999999999999999")


def test_an_adapters_own_price_fills_in_the_tables() -> None:
    price = table().price_of("sql")
    assert (price.prompt, price.cached, price.completion) == (Decimal("0.50"), Decimal("0.05"), Decimal("2.5"))


def test_adapter_prompt_price_also_applies_to_cached_tokens() -> None:
    assert table().price_of("acme/shared").cached == 1


def test_cached_tokens_default_to_prompt_price() -> None:
    given = {name: value for name, value in TABLE.items() if name != "cached"}
    read = read_prices(given)
    assert read is not None
    assert read.price.cached == read.price.prompt


@pytest.mark.parametrize("name", ["Qwen/My-LoRA", "Policy", "x:v2", "acme/Org/Policy"])
def test_price_is_found_in_any_case(name: str) -> None:
    prices = table(adapters={name: {"prompt": "7"}})
    assert prices.price_of(name.upper()).prompt == prices.price_of(name).prompt == 7
    assert list(prices.as_json()["adapters"]) == [name]


def test_empty_table_means_no_prices() -> None:
    assert read_prices({}) is None


def test_table_survives_json_round_trip() -> None:
    assert read_prices(table().as_json()) == table()


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"currency": "EURO"}, "prices.currency"),
        ({"prompt": "-1"}, "prices.prompt"),
        ({"prompt": "1e9"}, "prices.prompt"),
        ({"completion": "1٫5"}, "prices.completion"),
        ({"cached": 1}, "prices.cached"),
        ({"tax": "1"}, "prices"),
        ({"adapters": {"no name!": {}}}, "prices.adapters"),
        ({"adapters": {"a//b": {}}}, "prices.adapters"),
        ({"adapters": {"Policy": {}, "policy": {}}}, "prices.adapters.policy"),
        ({"adapters": {"sql": {"prompt": "x"}}}, "prices.adapters.sql.prompt"),
        ({"adapters": {"sql": {"currency": "USD"}}}, "prices.adapters.sql"),
        ({"adapters": {f"a{i}": {} for i in range(LIMITS.max_priced_adapters + 1)}}, "prices.adapters"),
    ],
)
def test_invalid_price_is_refused_by_field(changed: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prices({**TABLE, **changed})
    assert caught.value.param == param
