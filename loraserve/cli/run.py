"""``loraserve run``: ask a model something, or talk to it, and see the answer as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.adapters.completion import model_names
from loraserve.cli.arguments import request_fields
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Format
from loraserve.cli.session.asking import DEFAULT_MAX_TOKENS, Asker, check_model
from loraserve.cli.session.commands import SessionState
from loraserve.cli.session.waiting import WaitTeller, term_names

if TYPE_CHECKING:
    from loraserve.sdk import Client


_TAKEN = frozenset({"model", "prompt", "messages", "stream", "extra_body"})
"""Fields that the command itself writes."""


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="NAME, NAME@ALIAS, NAME@VERSION, a sum (a+0.5*b), or the base's id (default: the base).",
            show_default=False,
            autocompletion=model_names,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompt; - reads it from stdin. Without one, a terminal begins a session, and a pipe is the prompt.",
            show_default=False,
        ),
    ] = None,
    is_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the model's chat template (default: if there is one).",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most tokens to generate (default: {DEFAULT_MAX_TOKENS}; in a session, what the model has room for).",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling: the same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; may be repeated.")] = None,
    user: Annotated[
        str | None, typer.Option(help="User of the request: under a split alias, each user stays on one version.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="Stop after this long with the tokens generated so far."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Any other field of the request, such as top_k=5; may be repeated."),
    ] = None,
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Send a prompt and stream the answer, or begin a session.

    A session begins on a terminal where no prompt is given. It keeps the conversation; /help there
    shows its commands. With --format json, print the whole answer at the end.
    """
    if system is not None and is_chat is False:
        raise typer.BadParameter("--system needs a chat template: leave out --raw.")
    text = _prompt(prompt, format)
    said = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or None,
        "user": user,
        "timeout": timeout,
        "system": system,
    }
    settings: dict[str, object] = {name: value for name, value in said.items() if value is not None}
    settings |= request_fields(field or (), set(settings) | _TAKEN)
    if max_tokens is None and text is not None:
        settings["max_tokens"] = DEFAULT_MAX_TOKENS
    with connected(format, url, tenant, _named(model, text)) as (output, client):
        base = _base_id(client) if model is None or text is None else ""
        conversation = SessionState(base if model is None else model, base, settings)
        asker = Asker(output, client, WaitTeller(output, url, tenant), is_chat)
        if text is not None:
            asker.ask(conversation.model, conversation.messages(text), conversation.fields)
            return
        from loraserve.cli.session.loop import talk

        check_model(client, conversation.model, term_names)
        talk(output, asker, conversation)


def _prompt(prompt: str | None, format: Format | None) -> str | None:
    """Read the prompt; None: a session is to prompt for them.

    Raises:
        typer.BadParameter: there is none, and no terminal to prompt at.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        if format not in (None, Format.HUMAN):
            raise typer.BadParameter(f"A session is for people: give a PROMPT for --format {format}.")
        return None
    text = sys.stdin.read().removesuffix("\n")
    if prompt is None and not text.strip():
        raise typer.BadParameter("Give a PROMPT, pipe one to stdin, or run this on a terminal to type some.")
    return text


def _named(model: str | None, prompt: str | None) -> dict[str, str]:
    return {name: value for name, value in (("MODEL", model), ("PROMPT", prompt)) if value is not None}


def _base_id(client: Client) -> str:
    """Look up the base's id.

    Raises:
        UnexpectedAnswer: the server has none.
    """
    base = next((model.id for model in client.models.list() if model.parent is None), None)
    if base is None:
        raise errors.UnexpectedAnswer("The server's list of models has no base.")
    return base
