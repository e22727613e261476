"""State of a session of ``loraserve run``, and the commands that change it: ``/set …``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loraserve import errors
from loraserve.cli.session.asking import Messages, check_model
from loraserve.cli.session.waiting import term_names

if TYPE_CHECKING:
    from loraserve.cli.output import Output
    from loraserve.sdk import Client

SETTINGS: dict[str, Callable[[str], object]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "stop": lambda text: [text],
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "user": str,
    "timeout": float,
    "system": str,
}
"""Settings that ``/set`` changes, and how each is read. Ranges are the server's to check."""
HELP = (
    ("/model [MODEL]", "show or change the model: NAME, NAME@ALIAS, NAME@VERSION, a sum, or the base's id"),
    ("/adapters [SUM|none]", "list the adapters, or answer with a sum of them: a+0.5*b; none: the base alone"),
    ("/set [NAME [VALUE|none]]", f"show or change a setting: {', '.join(SETTINGS)}"),
    ("/clear", "forget the conversation"),
    ("/help", "show this"),
    ("/bye", "end, as Ctrl-D does"),
    ('"""', 'begin a text of several lines, which ends with """'),
    ("Ctrl-C", "cancel the answer, or the line"),
    ("//TEXT", "send /TEXT as a prompt"),
)
COMMANDS = ("/model", "/adapters", "/set", "/clear", "/help", "/bye", "/exit", "/quit")
_ENDS = frozenset({"/bye", "/exit", "/quit"})


@dataclass(slots=True)
class SessionState:
    """The model, the settings and the turns so far."""

    model: str
    base: str
    settings: dict[str, object] = field(default_factory=dict)
    turns: Messages = field(default_factory=list)

    def messages(self, prompt: str) -> Messages:
        """Join the conversation and a further prompt."""
        system = self.settings.get("system")
        first = [] if system is None else [{"role": "system", "content": str(system)}]
        return [*first, *self.turns, {"role": "user", "content": prompt}]

    def keep(self, prompt: str, answer: str) -> None:
        """Add a turn. One without an answer is left out: a chat alternates."""
        if answer:
            self.turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    @property
    def fields(self) -> dict[str, object]:
        """Fields of a request."""
        return {name: value for name, value in self.settings.items() if name != "system"}


class Commands:
    """Run the commands of a session. A wrong one changes nothing, and shows what is right."""

    def __init__(self, output: Output, client: Client, conversation: SessionState) -> None:
        self._output = output
        self._client = client
        self._conversation = conversation
        self._names: tuple[str, ...] | None = None

    def run(self, line: str) -> bool:
        """Run a command; return whether the session continues."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word in _ENDS:
            return False
        try:
            match word:
                case "/help" | "/?":
                    self._help()
                case "/clear":
                    self._conversation.turns.clear()
                    self._output.note("The conversation is forgotten; the settings stay.")
                case "/model":
                    self._model(rest)
                case "/adapters":
                    self._adapters(rest)
                case "/set":
                    self._set(rest)
                case _:
                    self._output.note(f"There is no command {word}.{_guess(word, COMMANDS)} See: /help")
        except errors.LoraserveError as error:
            self._output.fail(error)
        return True

    def words(self, line: str) -> Sequence[str]:
        """List what may stand at the end of a line that is typed."""
        word, space, _ = line.partition(" ")
        if not space:
            return COMMANDS if line.startswith("/") else ()
        match word:
            case "/model" | "/adapters":
                return self._models()
            case "/set":
                return tuple(SETTINGS)
        return ()

    def _models(self) -> tuple[str, ...]:
        """List the names of models, read once: a key that is held down sends no request."""
        if self._names is None:
            try:
                self._names = tuple(model.id for model in self._client.models.list())
            except errors.LoraserveError:
                self._names = ()
        return self._names

    def _help(self) -> None:
        width = max(len(what) for what, _ in HELP)
        for what, does in HELP:
            self._output.note(f"  {what:<{width}}  {does}")

    def _model(self, model: str) -> None:
        if model:
            model = model.replace(" ", "")
            check_model(self._client, model, term_names)
            self._conversation.model = model
        self._output.note(f"The model is {self._conversation.model}.")

    def _adapters(self, text: str) -> None:
        if text:
            self._model(self._conversation.base if text == "none" else text)
            return
        self._names = None
        names = [name for name in self._models() if name != self._conversation.base]
        if not names:
            self._output.note("No adapters yet. Push one: loraserve adapter push DIR --name NAME")
        for name in names:
            self._output.note(f"  {name}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        value = value.strip()
        settings = self._conversation.settings
        if not name:
            # with those that --field gave
            for key in {**SETTINGS, **settings}:
                self._output.note(f"  {key:<18}  {_shown(settings.get(key))}")
            return
        if name not in SETTINGS and name not in settings:
            self._output.note(f"There is no setting {name}.{_guess(name, SETTINGS)} They are: {', '.join(SETTINGS)}.")
            return
        if value == "none":
            settings.pop(name, None)
        elif value:
            read = SETTINGS.get(name, str)
            try:
                settings[name] = read(value)
            except ValueError:
                kind = "a whole number" if read is int else "a number"
                self._output.note(f"{name} should be {kind}, or none for the server's default; it is {value!r}.")
                return
        self._output.note(f"{name} is {_shown(settings.get(name))}.")


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return ", ".join(repr(one) for one in value) if isinstance(value, list) else str(value)


def _guess(word: str, known: Sequence[str] | dict[str, Callable[[str], object]]) -> str:
    found = errors.closest(word, known)
    return "" if found is None else f" Did you mean {found}?"
