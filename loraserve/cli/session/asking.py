"""A prompt sent to a model, and the answer printed as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from loraserve import errors
from loraserve.cli.output import Format, Output

if TYPE_CHECKING:
    from loraserve.cli.session.waiting import WaitTeller
    from loraserve.contract.chat import ChatCompletion
    from loraserve.contract.completion import Completion
    from loraserve.contract.result import Answer
    from loraserve.sdk import Client
    from loraserve.sdk.types.fields import SamplingFields

Messages = list[dict[str, str]]
DEFAULT_MAX_TOKENS = 128
"""Default for a prompt that is sent as it is; a chat's default is what fits."""


@dataclass(slots=True)
class SpokenText:
    """An answer's text so far, also where it was cancelled."""

    text: str = ""
    is_cut: bool = False
    """Whether it ended because it was as long as `max_tokens` allows."""


@dataclass(slots=True)
class Asker:
    """Sends prompts as chats, or as they are where the model has no chat template.

    Attributes:
        is_chat: None: a chat if the model has a template, which the first answer shows.
    """

    output: Output
    client: Client
    waits: WaitTeller
    is_chat: bool | None = None
    _told_raw: bool = field(default=False, init=False)

    def ask(
        self, model: str, messages: Messages, fields: Mapping[str, object], spoken: SpokenText | None = None
    ) -> SpokenText:
        """Print the model's answer to the last message, and return it.

        Args:
            messages: oldest first; a prompt that is sent as it is has only the last one.
            fields: the request's other fields.
            spoken: gets the text as it comes, so that a caller that is interrupted has it.

        Raises:
            NoChatTemplate: a chat was requested, or there is a system message.
        """
        spoken = SpokenText() if spoken is None else spoken
        if self.is_chat is not False:
            try:
                self._chat(model, messages, fields, spoken)
                return spoken
            except errors.NoChatTemplate:
                # Who asked for a chat, or gave it a system message, must not get something else.
                if self.is_chat or messages[0]["role"] == "system":
                    raise
            if not self._told_raw:
                self._told_raw = True
                self.output.note("This model has no chat template: the prompt is sent as it is.")
        self._raw(model, messages[-1]["content"], fields, spoken)
        return spoken

    def _chat(self, model: str, messages: Messages, fields: Mapping[str, object], spoken: SpokenText) -> None:
        from loraserve.sdk.types.fields import ChatFields

        known, own = _split(fields, ChatFields.__annotations__)
        create = self.client.chat.completions.create
        if self.output.format is Format.JSON:
            with self.waits.watching(model):
                whole = create(model=model, messages=messages, extra_body=own, **known)
            self._print_whole(whole)
            return
        with self.waits.watching(model):
            stream = create(model=model, messages=messages, stream=True, extra_body=own, **known)
        with stream:
            choices = (choice for chunk in stream for choice in chunk.choices)
            self._print_pieces(((choice.delta.content, choice.finish_reason) for choice in choices), spoken)
        self._tell(stream.answer)

    def _raw(self, model: str, prompt: str, fields: Mapping[str, object], spoken: SpokenText) -> None:
        from loraserve.sdk.types.fields import CompletionFields

        known, own = _split({"max_tokens": DEFAULT_MAX_TOKENS, **fields}, CompletionFields.__annotations__)
        create = self.client.completions.create
        if self.output.format is Format.JSON:
            with self.waits.watching(model):
                text = create(model=model, prompt=prompt, extra_body=own, **known)
            self._print_whole(text)
            return
        with self.waits.watching(model):
            stream = create(model=model, prompt=prompt, stream=True, extra_body=own, **known)
        with stream:
            choices = (choice for chunk in stream for choice in chunk.choices)
            self._print_pieces(((choice.text, choice.finish_reason) for choice in choices), spoken)
        self._tell(stream.answer)

    def _print_whole(self, whole: ChatCompletion | Completion) -> None:
        self.output.json(whole.model_dump(mode="json"))
        self._tell(whole.answer)

    def _print_pieces(self, pieces: Iterator[tuple[str | None, str | None]], spoken: SpokenText) -> None:
        try:
            for piece, finish_reason in pieces:
                if piece:
                    self.output.text(piece)
                    spoken.text += piece
                spoken.is_cut = spoken.is_cut or finish_reason == "length"
        finally:
            # What comes next, an error too, begins on a line of its own.
            if spoken.text:
                self.output.text("\n")

    def _tell(self, answer: Answer | None) -> None:
        tell_answer(self.output, answer)
        self.waits.tell_load(answer)


def tell_answer(output: Output, answer: Answer | None) -> None:
    """Show what the answer's headers have that its reader should know."""
    if answer is None:
        return
    if answer.ignored:
        guesses = answer.did_you_mean
        names = [f"{name} (did you mean {guesses[name]}?)" if name in guesses else name for name in answer.ignored]
        output.note(f"Ignored by the server: {', '.join(names)}.")
    if answer.fell_back_from is not None:
        output.note(
            f"{answer.adapter} answered instead of {answer.fell_back_from}, "
            f"which is unavailable ({answer.fell_back_for})."
        )


def _split(
    fields: Mapping[str, object], known: Mapping[str, object]
) -> tuple[SamplingFields, Mapping[str, object] | None]:
    """Split the fields into the SDK's arguments and the others, for `extra_body`."""
    own = {name: value for name, value in fields.items() if name not in known}
    return cast("SamplingFields", {name: value for name, value in fields.items() if name in known}), own or None


def check_model(client: Client, model: str, terms: Callable[[str], Sequence[str]]) -> None:
    """Check that a model, or each adapter of a sum, is there.

    Raises:
        ModelNotFound: one isn't.
    """
    try:
        client.models.get(model)
    except (errors.AdapterQuarantined, errors.AdapterOfAnotherBase):
        pass  # its fallback may answer
    except (errors.NotFound, errors.InvalidRequest):
        parts = terms(model)
        if parts == [model]:
            raise
        for part in parts:
            client.models.get(part)
