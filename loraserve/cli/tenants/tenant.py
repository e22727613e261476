"""``loraserve tenant``: the tenants that share the server. Takes an admin key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from loraserve.cli.help import App
from loraserve.cli.options import FormatOption, UrlOption, connected
from loraserve.cli.output import Column

app = App(help="Manage the tenants that share the server (takes an admin key).", no_args_is_help=True)

NONE = "none"
LIMITS = (
    "max_adapters",
    "max_stored_bytes",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "max_queued_requests",
    "max_kv_share",
    "max_cached_bytes",
)
NameArgument = Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")]


def _limit(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar=f"N|{NONE}", help=what, rich_help_panel="Limits (none: remove)")


MaxAdapters = Annotated[str | None, _limit("--max-adapters", "Most adapters.")]
MaxStoredBytes = Annotated[str | None, _limit("--max-stored-bytes", "Most bytes of all its versions.")]
RequestsPerMinute = Annotated[str | None, _limit("--requests-per-minute", "Most requests per minute.")]
TokensPerMinute = Annotated[
    str | None, _limit("--tokens-per-minute", "Most tokens per minute, in prompts and answers.")
]
MaxConcurrent = Annotated[str | None, _limit("--max-concurrent-requests", "Most concurrent requests.")]
MaxQueued = Annotated[str | None, _limit("--max-queued-requests", "Most queued requests.")]
MaxKvShare = Annotated[str | None, _limit("--max-kv-share", "Largest share of the KV memory, 0 to 1.")]
MaxCachedBytes = Annotated[
    str | None, _limit("--max-cached-bytes", "Most bytes of answers in the result cache, none of them without.")
]
WeightOption = Annotated[
    float | None, typer.Option(min=0, metavar="WEIGHT", help="Share of a busy engine, against other tenants' weights.")
]
PricesOption = Annotated[
    str | None,
    typer.Option(
        metavar=f"FILE|-|{NONE}",
        help='Prices per million tokens, as JSON: {"currency": "EUR", "prompt": "0.50", "cached": '
        '"0.05", "completion": "1.50"}; '
        '"adapters": {"NAME": {…}} for those with other prices.',
    ),
]

COLUMNS = (
    Column("NAME", "name"),
    Column("ID", "id"),
    Column("WEIGHT", lambda tenant: f"{tenant.weight:g}"),
    Column("LIMITS", lambda tenant: _set(tenant.limits)),
    Column("PRICES", lambda tenant: _prices(tenant.prices)),
    Column("CREATED", "created_at"),
)
DETAILS = tuple(Column(column.title.lower(), column.value) for column in COLUMNS)


def _set(limits: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in limits.items() if value is not None}


def _prices(prices: dict[str, Any] | None) -> str | None:
    """Format prices: ``EUR 0.50 / 0.05 / 1.50 per million``: prompt, cached, completion."""
    if not prices:
        return None
    own = len(prices.get("adapters") or {})
    parts = " / ".join(str(prices.get(part, "-")) for part in ("prompt", "cached", "completion"))
    return f"{prices.get('currency')} {parts}" + (f" and {own} of their own" if own else "")


def _limits(given: dict[str, str | None]) -> dict[str, int | float | None] | None:
    """Parse the limits that are given as numbers; None if none is.

    Raises:
        typer.BadParameter: one is no number.
    """
    found: dict[str, int | float | None] = {}
    for name, text in given.items():
        if text is None:
            continue
        flag = "--" + name.replace("_", "-")
        try:
            found[name] = None if text == NONE else float(text) if name == "max_kv_share" else int(text)
        except ValueError as error:
            raise typer.BadParameter(f"{flag} is {text!r}; it should be a number, or {NONE}.") from error
    return found or None


def _read_prices(source: str | None) -> dict[str, Any] | None:
    """Read the price table as the server reads it; empty removes it, None leaves it as it is.

    Raises:
        typer.BadParameter: it can't be read, or isn't a JSON object.
    """
    if source is None or source == NONE:
        return None if source is None else {}
    try:
        table = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--prices {source}: {error}") from error
    if not isinstance(table, dict) or not table:
        raise typer.BadParameter(f"--prices {source}: it should be a JSON object with currency, prompt and completion.")
    return table


@app.command()
def create(
    name: NameArgument,
    max_adapters: MaxAdapters = None,
    max_stored_bytes: MaxStoredBytes = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent_requests: MaxConcurrent = None,
    max_queued_requests: MaxQueued = None,
    max_kv_share: MaxKvShare = None,
    max_cached_bytes: MaxCachedBytes = None,
    weight: WeightOption = None,
    prices: PricesOption = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Create a tenant without keys or adapters."""
    given = locals()
    limits, table = _limits({flag: given[flag] for flag in LIMITS}), _read_prices(prices)
    with connected(format, url, named={"TENANT": name}) as (output, client):
        made = client.tenants.create(name, limits=limits, weight=weight, prices=table)
        output.one(made, DETAILS, name="name")
        output.note(f"Give it a key: loraserve key create --tenant {name}")


@app.command("list")
def list_(url: UrlOption = None, format: FormatOption = None) -> None:
    """List the tenants."""
    with connected(format, url) as (output, client):
        empty = "No tenants yet. Make one: loraserve tenant create TENANT"
        output.rows(client.tenants.list(), COLUMNS, name="name", empty=empty)


@app.command()
def show(name: NameArgument, url: UrlOption = None, format: FormatOption = None) -> None:
    """Show a tenant."""
    with connected(format, url, named={"TENANT": name}) as (output, client):
        output.one(client.tenants.get(name), DETAILS, name="name")


@app.command("set")
def set_(
    name: NameArgument,
    max_adapters: MaxAdapters = None,
    max_stored_bytes: MaxStoredBytes = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    max_concurrent_requests: MaxConcurrent = None,
    max_queued_requests: MaxQueued = None,
    max_kv_share: MaxKvShare = None,
    max_cached_bytes: MaxCachedBytes = None,
    weight: WeightOption = None,
    prices: PricesOption = None,
    url: UrlOption = None,
    format: FormatOption = None,
) -> None:
    """Change a tenant's limits, weight or prices; flags left out change nothing."""
    given = locals()
    limits, table = _limits({flag: given[flag] for flag in LIMITS}), _read_prices(prices)
    if limits is None and weight is None and table is None:
        raise typer.BadParameter("Nothing to change: give a limit, --weight or --prices.")
    with connected(format, url, named={"TENANT": name}) as (output, client):
        output.one(client.tenants.update(name, limits=limits, weight=weight, prices=table), DETAILS, name="name")


@app.command()
def delete(name: NameArgument, url: UrlOption = None, format: FormatOption = None) -> None:
    """Delete a tenant; its keys and models stop working at once."""
    with connected(format, url, named={"TENANT": name}) as (output, client):
        client.tenants.delete(name)
        output.done({"deleted": name}, f"Deleted the tenant {name}.")
