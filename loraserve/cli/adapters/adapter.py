"""``loraserve adapter``: push, pull, see, describe, delete and restore adapters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraserve import errors
from loraserve.cli.adapters.alias_view import ALIAS_COLUMNS, aliases_in_words
from loraserve.cli.adapters.completion import adapter_names
from loraserve.cli.adapters.version_view import VERSION_COLUMNS, check_served, show_version
from loraserve.cli.arguments import folder_name, key_values, split_version
from loraserve.cli.help import App
from loraserve.cli.operation import show_operation, wait_for
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import MAX_PROBLEMS, Column, Format, first_line

if TYPE_CHECKING:
    from loraserve.sdk import Progress

app = App(help="Push, pull, list, alias and delete adapters.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the adapter.", autocompletion=adapter_names)]
TargetArgument = Annotated[
    str,
    typer.Argument(metavar="NAME[@VERSION]", help="Adapter, or one version of it.", autocompletion=adapter_names),
]
NotesOption = Annotated[str | None, typer.Option(help="Free text; - reads it from stdin.")]
TagOption = Annotated[list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="Tag to set; may be repeated.")]

ADAPTER_COLUMNS = (
    Column("NAME", "name"),
    Column("ALIASES", aliases_in_words),
    Column("VERSIONS", "num_versions"),
    Column("OTHER BASE", lambda adapter: adapter.num_versions_of_another_base or ""),
    Column("LATEST", "latest_version"),
    Column("TAGS", "tags"),
    Column("NOTES", lambda adapter: first_line(adapter.notes), is_rare=True),
    Column("UPDATED", "updated_at"),
)
ADAPTER_DETAILS = (
    Column("name", "name"),
    Column("aliases", aliases_in_words),
    Column("versions", "num_versions"),
    Column("of another base", lambda adapter: adapter.num_versions_of_another_base or ""),
    Column("latest", "latest_version"),
    Column("fallback", "fallback"),
    Column("tags", "tags"),
    Column("notes", "notes"),
    Column("updated", "updated_at"),
)


def _notes(text: str | None) -> str | None:
    return sys.stdin.read().removesuffix("\n") if text == "-" else text


def _tags(items: list[str] | None) -> dict[str, str] | None:
    return None if items is None else key_values(items, "KEY=VALUE, such as team=search")


def _variables(text: str | None) -> dict[str, Any] | None:
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(
            'should be a JSON object, such as {"enable_thinking": false}', param_hint="--chat-template-kwargs"
        )
    return value if text is not None else None


@app.command()
def push(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="Directory written by PEFT's save_pretrained() or mlx-lm, a GGUF file of LoRA, one on the "
            "hub: hf:ORG/NAME[@REVISION][:FOLDER], or what MLflow keeps: runs:/RUN_ID/PATH, "
            "models:/NAME/VERSION or models:/NAME@ALIAS.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name that requests use as `model` (default: the folder's).",
            autocompletion=adapter_names,
        ),
    ] = None,
    alias: Annotated[str | None, typer.Option(metavar="ALIAS", help="Alias to point at the new version too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, but publish nothing.")] = False,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="Point NAME itself at the new version.")
    ] = True,
    all_problems: Annotated[
        bool, typer.Option("--all", help="Show every problem of a refused adapter, not only the first five.")
    ] = False,
    notes: NotesOption = None,
    tag: TagOption = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format of its tool calls, part of the version, such as hermes."),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format of its reasoning, part of the version, such as qwen3."),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Variables of its chat template, part of the version, such as "
            """{"enable_thinking": false}.""",
        ),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Push a PEFT directory; the new version is served once this returns."""
    said, tags, variables = _notes(notes), _tags(tag), _variables(chat_template_kwargs)
    is_named = name is not None
    name = folder_name(directory) if name is None else name
    with connected(format, url, tenant, {"NAME": name, "DIR": directory}) as (output, client):
        num_sent = 0
        if not is_named:
            output.note(f"Pushing it as {name}, its folder's name; --name gives it another.")
        output.max_problems = None if all_problems else MAX_PROBLEMS
        output.how_to_see_all = "--all shows them"

        def tell(progress: Progress) -> None:
            nonlocal num_sent
            num_sent = progress.sent_bytes
            if bar is not None:
                bar(progress)

        try:
            with output.progress(f"pushing {name}", then=f"checking and certifying {name}") as bar:
                version = client.adapters.push(
                    directory,
                    name=name,
                    alias=alias,
                    promote=promote,
                    dry_run=dry_run,
                    notes=said,
                    tags=tags,
                    tool_parser=tool_parser,
                    reasoning_parser=reasoning_parser,
                    chat_template_kwargs=variables,
                    on_progress=tell,
                )
        except (errors.ConnectionFailed, errors.ClientTimeout, KeyboardInterrupt):
            if num_sent:
                output.note("The server keeps the bytes that it received: run the same command again to resume.")
            raise
        show_version(output, version)
        if dry_run:
            output.note("Dry run: the adapter would be accepted; nothing was stored.")
        else:
            if version.is_unchanged:
                output.note(f"Unchanged: {version.model} has these bytes already.")
            check_served(output, version)
            if version.verdict == "skipped":
                output.note(f"It isn't verified yet. Try: loraserve adapter verify {version.model}")
            model = name if promote else version.model
            output.note(f'Try it: loraserve run {model} "PROMPT"')


@app.command()
def pull(
    target: TargetArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Directory for its files.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Make the server fetch a new version: hf://ORG/NAME[@REVISION] or s3://BUCKET/PREFIX (takes "
            "an admin key).",
        ),
    ] = None,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="With --from: point NAME itself at the new version.")
    ] = True,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="With --from: wait until the server has it.")] = True,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Download a version's files, or make the server fetch a version with --from.

    Without a version, those of the live version are downloaded.
    """
    name, version = split_version(target)
    if (directory is None) == (source is None):
        raise typer.BadParameter(
            "Give either a DIR to download the files to, or --from SOURCE for the server to fetch."
        )
    if source is not None and version is not None:
        raise typer.BadParameter("--from takes no @VERSION: the server assigns the next number.")
    from loraserve.sdk.files.mlflow_source import is_mlflow

    if source is not None and is_mlflow(source):
        raise typer.BadParameter(
            f"The server doesn't read MLflow; this machine can: loraserve adapter push {source} --name {name}"
        )
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        if directory is not None:
            with output.progress(f"pulling {target}") as tell:
                pulled = client.adapters.pull(name, directory, version=version, overwrite=force, on_progress=tell)
            show_version(output, pulled)
            output.note(f"{pulled.model} is in {directory}.")
        elif source is not None:
            operation = client.adapters.pull_from(name, source, promote=promote)
            if wait:
                operation = wait_for(output, client, operation)
            show_operation(output, operation)
            if not wait:
                output.note(f"The operation continues on the server. See: loraserve operation wait {operation.id}")


@app.command("list")
def list_(url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None) -> None:
    """List the tenant's adapters."""
    with connected(format, url, tenant) as (output, client):
        empty = "No adapters yet. Push one: loraserve adapter push DIR"
        adapters = list(client.adapters.list(with_notes=output.format is Format.HUMAN))
        output.rows(adapters, ADAPTER_COLUMNS, name="name", empty=empty)
        num = sum(adapter.num_versions_of_another_base for adapter in adapters)
        if num:
            output.note(
                f"{num} {'version was' if num == 1 else 'versions were'} made for another base than this "
                "server's, and can't be served here. "
                "See: loraserve adapter versions NAME"
            )


@app.command()
def show(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Show an adapter and its live version, or one version, with its certificate."""
    name, version = split_version(target)
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        if version is not None:
            show_version(output, client.adapters.version(name, version))
            return
        adapter = client.adapters.get(name)
        output.one(adapter, ADAPTER_DETAILS, name="name")
        # Programs requested one thing, and get it.
        if output.format is not Format.HUMAN:
            return
        aliases = list(client.adapters.aliases(name))
        if any(alias.split or alias.shadow for alias in aliases):
            # one version isn't all that such an alias means
            output.rows(aliases, ALIAS_COLUMNS, name="alias", empty="")
        live = adapter.aliases.get("live")
        if live is not None:
            show_version(output, client.adapters.version(name, live))


@app.command()
def versions(
    name: NameArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """List the versions of an adapter."""
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        versions = client.adapters.versions(name, with_notes=output.format is Format.HUMAN)
        output.rows(versions, VERSION_COLUMNS, name="model", empty=f"{name} has no versions.")


@app.command("set")
def set_(
    target: TargetArgument,
    notes: NotesOption = None,
    tag: TagOption = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Tag to remove; may be repeated.")] = None,
    fallback: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION|ALIAS|base|none",
            help="Answer with this if the requested version can't (of an adapter, not a version).",
        ),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Change the notes, tags or fallback of an adapter, or the notes and tags of a version."""
    name, version = split_version(target)
    said, added = _notes(notes), _tags(tag)
    if said is None and added is None and not untag and fallback is None:
        raise typer.BadParameter("Nothing to change: give --notes, --tag, --untag or --fallback.")
    if fallback is not None and version is not None:
        raise typer.BadParameter("--fallback applies to the whole adapter: leave out the @VERSION.")
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        tags = None
        if added is not None or untag:
            before = client.adapters.get(name) if version is None else client.adapters.version(name, version)
            tags = {key: value for key, value in (before.tags | (added or {})).items() if key not in (untag or ())}
        if version is not None:
            show_version(output, client.adapters.update_version(name, version, notes=said, tags=tags))
            return
        if fallback is not None:
            adapter = client.adapters.set_fallback(name, None if fallback == "none" else fallback)
        if said is not None or tags is not None:
            adapter = client.adapters.update(name, notes=said, tags=tags)
        output.one(adapter, ADAPTER_DETAILS, name="name")


@app.command()
def delete(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Delete an adapter, or one version of it.

    Running requests finish on the version they started with.
    """
    name, version = split_version(target)
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        client.adapters.delete(name, version)
        output.done({"deleted": target}, f"Deleted {target}. Undo it: loraserve adapter restore {target}")


@app.command()
def restore(
    target: TargetArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Restore a deleted adapter or version, while the server still keeps it."""
    name, version = split_version(target)
    with connected(format, url, tenant, {"NAME": name}) as (output, client):
        if version is None:
            output.one(client.adapters.restore(name), ADAPTER_DETAILS, name="name")
        else:
            show_version(output, client.adapters.restore_version(name, version))
