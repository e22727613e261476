"""Options of a request, which Ollama's clients send as one object, and `keep_alive`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from loraserve.api.inference.fields import IgnoredField, parse_body
from loraserve.api.inference.sampling import ALL_THE_ROOM
from loraserve.errors import InvalidRequest

OPTIONS = "options"
_INT64 = 1 << 63
_OF_MIROSTAT = ("mirostat_tau", "mirostat_eta")
_RANDOM_SEED = -1
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|[+-]?\d+(\.\d*)?", re.ASCII)
_MAX_DURATION_LENGTH = 32
KEEP_ALIVE = {"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}
"""Schema of the field `keep_alive`."""
_STOP = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}

CHAT_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
"""Options that act, and a chat's field that each is."""


class OllamaOptions(BaseModel):
    """Options that act; others of Ollama's are about how a model is loaded."""

    model_config = ConfigDict(strict=True, frozen=True, hide_input_in_errors=True)

    num_predict: int | None = Field(default=None, ge=-2, lt=1 << 31)
    """Length of the answer at most; -1, -2: as long as the context has room for."""
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64)
    """-1: another one with each request."""
    # checked by `sampling`, as a chat's
    stop: Annotated[Any, WithJsonSchema(_STOP)] = None
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_last_n: int | None = Field(default=None, ge=-1, lt=1 << 31)
    """Tokens that the penalties look at: 0: none; -1: all."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)

    def chat_fields(self) -> dict[str, Any]:
        """Convert the options to a chat's fields.

        Raises:
            InvalidRequest: an answer would have no tokens.
        """
        found = {chat: getattr(self, name) for name, chat in CHAT_NAMES.items() if getattr(self, name) is not None}
        if self.num_predict == 0:
            param = f"{OPTIONS}.num_predict"
            raise InvalidRequest(f"{param} should be 1 or more, or -1 for as many as there is room for.", param=param)
        if self.num_predict is not None and self.num_predict < 0:
            found["max_tokens"] = ALL_THE_ROOM
        if self.seed == _RANDOM_SEED:
            del found["seed"]
        if self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return found


def read_options(value: object) -> tuple[OllamaOptions, tuple[str, ...]]:
    """Check the options, and collect the names of those that change nothing here.

    Raises:
        UnsupportedParameter: an option would change the answer and isn't implemented.
        InvalidRequest: an option is wrong; `param` names it.
    """
    if value is None:
        return OllamaOptions(), ()
    if not isinstance(value, dict):
        raise InvalidRequest(f"{OPTIONS} should be an object.", param=OPTIONS)
    given, ignored = dict(value), list[str]()
    if not given.get("mirostat"):
        # they only say how mirostat works
        ignored += [name for name in _OF_MIROSTAT if given.pop(name, None) is not None]
    try:
        options, unknown = parse_body(OllamaOptions, given)
    except InvalidRequest as error:
        if error.param is not None:
            error.message = error.message.replace(error.param, f"{OPTIONS}.{error.param}", 1)
            error.param = f"{OPTIONS}.{error.param}"
        raise
    ignored += unknown
    if options.repeat_last_n is not None and options.repeat_last_n > 0:
        ignored.append("repeat_last_n")
    return options, tuple(map(_placed, ignored))


def _placed(name: str) -> str:
    """Name an ignored option by its path, and the option that may be meant."""
    meant = name.meant if isinstance(name, IgnoredField) else None
    return IgnoredField.of(f"{OPTIONS}.{name}", None if meant is None else f"{OPTIONS}.{meant}")


def unloads(keep_alive: object) -> bool:
    """Check `keep_alive`, and whether it asks for the model to be unloaded at once.

    Raises:
        InvalidRequest: it is neither seconds nor a duration.
    """
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return keep_alive == 0
    is_text = isinstance(keep_alive, str) and len(keep_alive) <= _MAX_DURATION_LENGTH
    if not isinstance(keep_alive, str) or not is_text or not _DURATION.fullmatch(keep_alive):
        raise InvalidRequest('keep_alive should be seconds, or a duration such as "5m".', param="keep_alive")
    return not re.search("[1-9]", keep_alive)
