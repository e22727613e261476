"""``loraserve operation``: what the server does beside requests, such as fetching an adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loraserve.cli.help import App
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Column, Output, size

if TYPE_CHECKING:
    from loraserve.contract.operation import Operation
    from loraserve.sdk import Client

app = App(help="Show, await or cancel long-running work, such as fetching an adapter.", no_args_is_help=True)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the operation.")]
COLUMNS = (
    Column("ID", "id"),
    Column("KIND", "kind"),
    Column("TARGET", "target"),
    Column("STATE", "state", is_state=True),
    Column("PROGRESS", lambda operation: _progress(operation)),
    Column("UPDATED", "updated_at"),
)
DETAILS = (
    Column("id", "id"),
    Column("kind", "kind"),
    Column("target", "target"),
    Column("state", "state", is_state=True),
    Column("progress", lambda operation: _progress(operation)),
    Column("result", lambda operation: _result(operation)),
    Column("error", lambda operation: _error(operation)),
    Column("created", "created_at"),
)


def _progress(operation: Operation) -> str | None:
    done, total = operation.progress.get("bytes_done"), operation.progress.get("bytes_total")
    if done is None:
        return None
    return size(done) if not total else f"{size(done)} of {size(total)}"


def _result(operation: Operation) -> str | None:
    result = operation.result or {}
    name, version = result.get("name"), result.get("version")
    return f"{name}@{version}" if name and version else ", ".join(f"{key}={value}" for key, value in result.items())


def _error(operation: Operation) -> str | None:
    failure = operation.failure() if operation.state == "failed" else None
    return None if failure is None else f"{failure.code}: {failure.message}"


def show_operation(output: Output, operation: Operation) -> None:
    output.one(operation, DETAILS, name="id")


def wait_for(output: Output, client: Client, operation: Operation, timeout_s: float | None = None) -> Operation:
    """Show a progress bar until the operation is done, and return it.

    Raises:
        LoraserveError: it failed, or still runs after `timeout_s`.
    """
    with output.progress(f"{operation.kind} {operation.target}") as on_progress:
        return client.operations.wait(operation.id, timeout=timeout_s, on_progress=on_progress)


@app.command("list")
def list_(url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None) -> None:
    """List the tenant's operations, newest first."""
    with connected(format, url, tenant) as (output, client):
        empty = "No operations. Start one: loraserve adapter pull NAME --from hf://ORG/NAME"
        output.rows(client.operations.list(), COLUMNS, name="id", empty=empty)


@app.command()
def show(
    operation_id: IdArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Show an operation."""
    with connected(format, url, tenant) as (output, client):
        show_operation(output, client.operations.get(operation_id))


@app.command()
def wait(
    operation_id: IdArgument,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Stop waiting after this long; the operation goes on."),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Wait until an operation is done; exit with 1 if it failed or was cancelled."""
    with connected(format, url, tenant) as (output, client):
        operation = client.operations.get(operation_id)
        show_operation(output, wait_for(output, client, operation, timeout))


@app.command()
def cancel(
    operation_id: IdArgument, url: UrlOption = None, tenant: ActForOption = None, format: FormatOption = None
) -> None:
    """Cancel an operation; its work is undone."""
    with connected(format, url, tenant) as (output, client):
        operation = client.operations.cancel(operation_id)
        show_operation(output, operation)
        if operation.is_running:
            output.note(f"The operation ends soon. See: loraserve operation wait {operation_id}")
