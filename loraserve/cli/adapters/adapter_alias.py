"""``loraserve adapter alias, aliases, unalias, rollback, shadow, traffic``.

They show which version a name means, and how versions compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.adapters.adapter import NameArgument
from loraserve.cli.adapters.alias_view import ALIAS_COLUMNS, ALIAS_DETAILS, target_in_words
from loraserve.cli.arguments import version_numbers
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column, milliseconds
from loraserve.errors import AliasNotFound

if TYPE_CHECKING:
    from loraserve.contract.traffic import Durations

LIVE, NONE = "live", "none"
AliasArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="Alias; `live` is what NAME alone means.")]
LiveArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="Alias; `live` is what NAME alone means.")]
IfMatchOption = Annotated[str | None, typer.Option(metavar="ETAG", help="Fail unless its ETag is still this one.")]

SHADOW_COLUMNS = (
    Column("HOUR", "hour"),
    Column("VERSION", "version"),
    Column("SHADOW", "shadow_version"),
    Column("REQUESTS", "num_requests"),
    Column("FAILED", "num_failed"),
    Column("SAME", lambda row: _part(row.num_equal, row.num_compared)),
    Column("AGREED TOKENS", lambda row: _part(row.num_agreed_tokens, row.num_tokens)),
    Column("TOOK", lambda row: _ms(row.live_ms, row.num_compared)),
    Column("SHADOW TOOK", lambda row: _ms(row.shadow_ms, row.num_compared)),
)
TRAFFIC_COLUMNS = (
    Column("VERSION", "version"),
    Column("ROLE", "role"),
    Column("REQUESTS", "num_requests"),
    Column("FAILED", "num_failed"),
    Column("TTFT P50", lambda row: _duration(row.first_token_s, "p50")),
    Column("P95", lambda row: _duration(row.first_token_s, "p95")),
    Column("PER TOKEN P50", lambda row: _duration(row.per_token_s, "p50")),
    Column("P95", lambda row: _duration(row.per_token_s, "p95")),
    Column("PROMPT TOKENS", "prompt_tokens"),
    Column("TOKENS", "completion_tokens"),
)


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    for command in (alias, aliases, unalias, rollback, shadow, traffic):
        app.command()(command)


def _part(count: int, total: int) -> str | None:
    return f"{100 * count / total:.1f} %" if total else None


def _ms(total_ms: int, count: int) -> str | None:
    return milliseconds(total_ms / count) if count else None


def _duration(durations: Durations | None, percentile: str) -> str | None:
    return None if durations is None else milliseconds(1000 * getattr(durations, percentile))


def alias(
    name: NameArgument,
    alias: AliasArgument,
    version: Annotated[
        int | None,
        typer.Argument(metavar="VERSION", min=1, help="Version to point at; without one, show where the alias points."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION=WEIGHT,…", help="Split the traffic by weight: 3=90,4=10. Each user stays on one version."
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar=f"VERSION=SHARE|{NONE}",
            help="Run a copy of this share of the requests on that version and compare the answers. "
            "Alone, it leaves the alias where it points.",
        ),
    ] = None,
    if_match: IfMatchOption = None,
    if_better: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="Fail unless VERSION is better by this metric than the version that the alias points to, on the "
            "same data: see `adapter eval`.",
        ),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Point an alias at a version, or at several by weight; without either, show it."""
    if version is not None and split is not None:
        raise typer.BadParameter("Give either a VERSION or --split, not both.")
    if if_better is not None and version is None:
        raise typer.BadParameter("--if-better needs a VERSION: the one that should be better.")
    weights = None if split is None else version_numbers(split, "WEIGHT")
    copies = None if shadow in (None, NONE) else version_numbers(shadow or "", "SHARE")
    if copies is not None and (len(copies) != 1 or max(copies.values()) > 1):
        raise typer.BadParameter(
            f"--shadow is {shadow!r}; it should be one VERSION=SHARE, with a share above 0 and at most 1."
        )
    with connected(format, url, tenant, {"NAME": name, "ALIAS": alias}) as (output, client):
        if version is None and weights is None and shadow is None:
            output.one(client.adapters.alias(name, alias), ALIAS_DETAILS, name="version")
            return
        try:
            now = client.adapters.alias(name, alias)
        except AliasNotFound:
            now = None
        is_shadow_alone = version is None and weights is None
        if is_shadow_alone:
            # the alias points where it pointed
            now = now or client.adapters.alias(name, alias)
            if_match = if_match or now.etag
            weights = {one.version: one.weight for one in now.split} if now.split else None
            version = None if weights else now.version
        copy = next(iter(copies.items())) if copies else None
        moved = client.adapters.set_alias(
            name, alias, version, split=weights, shadow=copy, if_match=if_match, if_better=if_better
        )
        output.one(moved, ALIAS_DETAILS, name="alias")
        if copies and moved.shadow is None:
            output.note(f"No shadow was set: version {next(iter(copies))} answers every request itself.")
        elif copies:
            output.note(f"Compare their answers: loraserve adapter shadow {name} {alias}")
            output.note(f"End the shadow: loraserve adapter alias {name} {alias} --shadow {NONE}")
        if now is None:
            # it was never moved, so that there is nothing to go back to
            output.note(f"Undo it: loraserve adapter unalias {name} {alias}")
        elif (now.version, now.split) != (moved.version, moved.split):
            output.note(f"Undo it: loraserve adapter rollback {name} {alias}")


def aliases(
    name: NameArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """List the aliases of an adapter."""
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        output.rows(client.adapters.aliases(name), ALIAS_COLUMNS, name="alias", empty=f"{name} has no aliases.")


def unalias(
    name: NameArgument,
    alias: AliasArgument,
    if_match: IfMatchOption = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Delete an alias; the versions that it points to stay."""
    with connected(format, url, tenant, {"NAME": name, "ALIAS": alias}) as (output, client):
        client.adapters.delete_alias(name, alias, if_match=if_match)
        output.done({"deleted": f"{name}@{alias}"}, f"Deleted the alias {name}@{alias}.")


def rollback(
    name: NameArgument,
    alias: LiveArgument = LIVE,
    if_match: IfMatchOption = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Point an alias where it pointed before its last move; a second rollback undoes the first."""
    with connected(format, url, tenant, {"NAME": name, "ALIAS": alias}) as (output, client):
        before = client.adapters.alias(name, alias)
        moved = client.adapters.rollback(name, alias, if_match=if_match)
        output.one(moved, ALIAS_DETAILS, name="version")
        output.note(
            f"{name}@{alias} means {target_in_words(moved)} again, and no longer {target_in_words(before)}. "
            f"Undo it: loraserve adapter rollback {name} {alias}"
        )


def shadow(
    name: NameArgument,
    alias: LiveArgument = LIVE,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Compare an alias's shadow version with the one that answered, hour by hour."""
    with connected(format, url, tenant, {"NAME": name, "ALIAS": alias}) as (output, client):
        empty = (
            f"No request was copied to a shadow version yet. Set one: loraserve adapter alias {name} {alias} "
            "--shadow VERSION=0.1"
        )
        output.rows(client.adapters.shadow(name, alias), SHADOW_COLUMNS, name="hour", empty=empty)


def traffic(
    name: NameArgument,
    minutes: Annotated[int, typer.Option(min=10, max=60, help="Count the requests of the last minutes.")] = 60,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Compare the versions of an adapter by the requests that each answered."""
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        found = client.adapters.traffic(name, minutes=minutes)
        output.rows(found.data, TRAFFIC_COLUMNS, name="version", empty=f"No version of {name} answered a request.")
        if found.data:
            output.note(
                f"Requests since {found.since.astimezone():%H:%M %Z}, on this server; percentiles are up to 25 % "
                "too long."
            )
