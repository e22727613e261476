"""``loraserve run``: ask a model something, and see the answer as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from loraserve import errors
from loraserve.cli.options import ActForOption, FormatOption, UrlOption, connected
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.sdk import Client
    from loraserve.sdk.answers import Answer
    from loraserve.sdk.types.fields import SamplingFields
    from loraserve.sdk.types.inference import ChatCompletion, Completion

    Messages = list[dict[str, str]]
    Own = dict[str, float] | None
    """Fields of a request that only this server's API has."""

DEFAULT_MAX_TOKENS = 128


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="NAME, NAME@ALIAS, NAME@VERSION, a sum (a+0.5*b), or the base's id.")
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Prompt; - reads it from stdin.")],
    is_chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the model's chat template (default: if there is one).",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = DEFAULT_MAX_TOKENS,
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
    url: UrlOption = None,
    tenant: ActForOption = None,
    format: FormatOption = None,
) -> None:
    """Send a prompt and stream the answer.

    With --format json, print the whole answer at the end.
    """
    if system is not None and is_chat is False:
        raise typer.BadParameter("--system needs a chat template: leave out --raw.")
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    fields = _fields(max_tokens, temperature, top_p, seed, stop, user)
    own = None if timeout is None else {"timeout": timeout}
    with connected(format, url, tenant, {"MODEL": model, "PROMPT": prompt}) as (output, client):
        if is_chat is not False:
            try:
                _answer_chat(output, client, model, _messages(text, system), fields, own)
                return
            except errors.NoChatTemplate:
                # Who asked for a chat, or gave it a system message, must not get something else.
                if is_chat or system is not None:
                    raise
            output.note("This model has no chat template: the prompt is sent as it is.")
        _answer_raw(output, client, model, text, fields, own)


def _answer_chat(
    output: Output, client: Client, model: str, messages: Messages, fields: SamplingFields, own: Own
) -> None:
    if output.format is Format.JSON:
        chat = client.chat.completions.create(model=model, messages=messages, extra_body=own, **fields)
        _print_whole(output, chat)
        return
    with client.chat.completions.create(
        model=model, messages=messages, stream=True, extra_body=own, **fields
    ) as stream:
        _print_pieces(output, (choice.delta.content or "" for chunk in stream for choice in chunk.choices))
        _tell_fallback(output, stream.answer)


def _answer_raw(output: Output, client: Client, model: str, prompt: str, fields: SamplingFields, own: Own) -> None:
    if output.format is Format.JSON:
        _print_whole(output, client.completions.create(model=model, prompt=prompt, extra_body=own, **fields))
        return
    with client.completions.create(model=model, prompt=prompt, stream=True, extra_body=own, **fields) as stream:
        _print_pieces(output, (choice.text for chunk in stream for choice in chunk.choices))
        _tell_fallback(output, stream.answer)


def _tell_fallback(output: Output, answer: Answer | None) -> None:
    if answer is not None and answer.fell_back_from is not None:
        output.note(
            f"{answer.adapter} answered instead of {answer.fell_back_from}, "
            f"which is unavailable ({answer.fell_back_for})."
        )


def _print_whole(output: Output, whole: ChatCompletion | Completion) -> None:
    output.json(whole.model_dump(mode="json"))
    _tell_fallback(output, whole.answer)


def _print_pieces(output: Output, pieces: Iterator[str]) -> None:
    has_text = False
    try:
        for piece in pieces:
            output.text(piece)
            has_text = has_text or bool(piece)
    finally:
        # What comes next, an error too, begins on a line of its own.
        if has_text:
            output.text("\n")


def _fields(
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    stop: list[str] | None,
    user: str | None,
) -> SamplingFields:
    fields: SamplingFields = {"max_tokens": max_tokens, "temperature": temperature}
    if top_p is not None:
        fields["top_p"] = top_p
    if seed is not None:
        fields["seed"] = seed
    if stop:
        fields["stop"] = stop
    if user is not None:
        fields["user"] = user
    return fields


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]
