"""A session: prompts that are typed, and answers, until Ctrl-D."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loraserve import errors
from loraserve.cli.session.asking import Asker, SpokenText
from loraserve.cli.session.commands import Commands, SessionState
from loraserve.cli.session.line_editor import LineEditor, history_path

if TYPE_CHECKING:
    from loraserve.cli.output import Output

MAX_PROMPT_CHARS = 40
"""Characters of a model's name, which may be a long sum, that stand before each line."""


def talk(output: Output, asker: Asker, conversation: SessionState) -> None:
    """Answer what is typed. An answer that fails or is cancelled doesn't end the session."""
    commands = Commands(output, asker.client, conversation)
    editor = LineEditor(commands.words, history_path())
    output.note(f"Talking to {conversation.model}. /help shows the commands, Ctrl-D ends.")
    try:
        while True:
            try:
                line = editor.read(_prompt(conversation.model))
            except EOFError:
                output.note("")
                return
            except KeyboardInterrupt:
                output.note("\nCtrl-D ends.")
                continue
            if not line.strip():
                continue
            if line.startswith("/") and not line.startswith("//"):
                if not _run(output, commands, line):
                    return
                continue
            _answer(output, asker, conversation, line[1:] if line.startswith("//") else line)
    finally:
        editor.close()


def _run(output: Output, commands: Commands, line: str) -> bool:
    try:
        return commands.run(line)
    except KeyboardInterrupt:
        output.note("\nCancelled.")
        return True


def _answer(output: Output, asker: Asker, conversation: SessionState, prompt: str) -> None:
    spoken = SpokenText()
    try:
        asker.ask(conversation.model, conversation.messages(prompt), conversation.fields, spoken)
    except KeyboardInterrupt:
        output.note("Cancelled." if spoken.text else "\nCancelled.")
    except errors.LoraserveError as error:
        output.fail(error)
        if error.code == "context_length_exceeded" and conversation.turns:
            output.note("The conversation has become too long: /clear forgets it.")
        return
    if spoken.is_cut:
        output.note("(The answer was cut at its most tokens: /set max_tokens N changes them.)")
    conversation.keep(prompt, spoken.text)


def _prompt(model: str) -> str:
    return f"{model if len(model) <= MAX_PROMPT_CHARS else model[: MAX_PROMPT_CHARS - 1] + '…'}> "
