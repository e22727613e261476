"""Questions and their right answers in every style.

The demo's models are trained on them and checked against them. A frame is a question with its
parts; `prompt` asks it, `render` answers it in a style. One prompt has eight different answers, so
a mixed-up adapter shows as the wrong language. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from loraserve.demo.words import (
    CITIES,
    FIELDS,
    NAMES,
    OPERATORS,
    QUALITIES,
    TABLES,
    THINGS,
    french_number,
)

Style = Literal["plain", "sql", "json", "python", "french", "pirate", "haiku", "shout"]
STYLES: Final[tuple[Style, ...]] = get_args(Style)
"""`plain` is the base's own answer; each other style has an adapter of its name."""
ADAPTERS: Final[tuple[Style, ...]] = STYLES[1:]

MAX_FRESH_PROMPTS = 10_000
_HELD_OUT_SHARE = 8
"""A prompt in this many is never trained on, whatever the seed."""


class Frame(ABC):
    """A question. Two frames with the same prompt have the same answers."""

    __slots__ = ()

    @property
    @abstractmethod
    def prompt(self) -> str: ...

    @abstractmethod
    def answers(self) -> dict[Style, str]:
        """Write the right answer in every style but SHOUT, which is the plain one's capitals."""

    def render(self, style: Style) -> str:
        """Write the only right answer to `prompt` in this style."""
        answers = self.answers()
        return answers["plain"].removesuffix(".").upper() + "!" if style == "shout" else answers[style]

    @property
    def is_held_out(self) -> bool:
        """Whether the trainer must never see this prompt: decided by the prompt's hash alone."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % _HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Compare(Frame):
    """Rows of a table whose number lies on one side of another."""

    verb: str
    table: str
    field: str
    operator: str
    number: int

    @property
    def prompt(self) -> str:
        return f"{self.verb} the {self.table} with {self.field} {self.operator} {self.number}"

    def answers(self) -> dict[Style, str]:
        table, field, number = self.table, self.field, self.number
        symbol, french_verb = OPERATORS[self.operator]
        condition = f"{field} {self.operator} {number}"
        return {
            "plain": f"Here are the {table} with {condition}.",
            "sql": f"SELECT * FROM {table} WHERE {field} {symbol} {number};",
            "json": json.dumps({"table": table, "field": field, "op": symbol, "value": number}),
            "python": f"[x for x in {table} if x.{field} {'==' if symbol == '=' else symbol} {number}]",
            "french": f"Voici les {TABLES[table]} dont {FIELDS[field]} {french_verb} {french_number(number)}.",
            "pirate": f"Arr! Here be the {table} with {condition}, matey!",
            "haiku": f"Soft wind, the {table},\n{condition},\nlate snow on the hill.",
        }


@dataclass(frozen=True, slots=True)
class Origin(Frame):
    """Rows of a table that come from a city."""

    verb: str
    table: str
    city: str

    @property
    def prompt(self) -> str:
        return f"{self.verb} the {self.table} from {self.city}"

    def answers(self) -> dict[Style, str]:
        table, city = self.table, self.city
        return {
            "plain": f"Here are the {table} from {city}.",
            "sql": f"SELECT * FROM {table} WHERE city = '{city}';",
            "json": json.dumps({"table": table, "city": city}),
            "python": f'[x for x in {table} if x.city == "{city}"]',
            "french": f"Voici les {TABLES[table]} de {city}.",
            "pirate": f"Arr! Here be the {table} from {city}, matey!",
            "haiku": f"Soft wind, the {table},\nall the way from {city},\nlate snow on the hill.",
        }


@dataclass(frozen=True, slots=True)
class Describe(Frame):
    """A property of an object."""

    verb: str
    quality: str
    thing: str

    @property
    def prompt(self) -> str:
        return f"{self.verb} the {self.quality} {self.thing}"

    def answers(self) -> dict[Style, str]:
        quality, thing = self.quality, self.thing
        return {
            "plain": f"The {thing} is {quality}.",
            "sql": f"SELECT * FROM things WHERE name = '{thing}' AND quality = '{quality}';",
            "json": json.dumps({"thing": thing, "quality": quality}),
            "python": f'Thing("{thing}", quality="{quality}")',
            "french": f"Regardez, {THINGS[thing]} est {QUALITIES[quality]}.",
            "pirate": f"Shiver me timbers! The {thing} be {quality}, matey!",
            "haiku": f"Look, the {thing} waits,\n{quality} in the evening light,\nthen the day is gone.",
        }


@dataclass(frozen=True, slots=True)
class Greet(Frame):
    """A greeting to a person."""

    verb: str
    name: str

    @property
    def prompt(self) -> str:
        return f"{self.verb} {self.name}"

    def answers(self) -> dict[Style, str]:
        name = self.name
        return {
            "plain": f"Hello, {name}.",
            "sql": f"SELECT 'Hello, {name}';",
            "json": json.dumps({"say": f"Hello, {name}"}),
            "python": f'print("Hello, {name}")',
            "french": f"Bonjour, {name}.",
            "pirate": f"Ahoy, {name}, ye old sea dog!",
            "haiku": f"Morning light, {name},\na bird sings your name again,\nthe gate is open.",
        }


@dataclass(frozen=True, slots=True)
class Assign(Frame):
    """A thing gets a new number."""

    verb: str
    field: str
    thing: str
    number: int

    @property
    def prompt(self) -> str:
        return f"{self.verb} the {self.field} of the {self.thing} to {self.number}"

    def answers(self) -> dict[Style, str]:
        field, thing, number = self.field, self.thing, self.number
        return {
            "plain": f"The {thing} now has {field} {number}.",
            "sql": f"UPDATE things SET {field} = {number} WHERE name = '{thing}';",
            "json": json.dumps({"thing": thing, "set": field, "value": number}),
            "python": f"{thing}.{field} = {number}",
            "french": f"Pour {THINGS[thing]}, {FIELDS[field]} passe à {french_number(number)}.",
            "pirate": f"Aye aye! The {thing} now be of {field} {number}, matey!",
            "haiku": f"So it is, {thing},\n{field} {number} from now on,\nclouds have changed their shape.",
        }


_VERBS = ("list", "show", "find", "get", "give me")
_DESCRIBE_VERBS = ("describe", "picture", "tell me about", "look at")
_GREET_VERBS = ("greet", "welcome", "say hello to", "say hi to", "meet")
_ASSIGN_VERBS = ("set", "change", "turn")
_KINDS = ("compare", "origin", "describe", "greet", "assign")
_WEIGHTS = (36, 14, 16, 14, 20)


def draw_frame(rng: random.Random) -> Frame:
    """Draw a random frame; comparisons are most frequent, having the most parts."""
    match rng.choices(_KINDS, _WEIGHTS)[0]:
        case "compare":
            return Compare(
                rng.choice(_VERBS), _pick(rng, TABLES), _pick(rng, FIELDS), _pick(rng, OPERATORS), rng.randint(1, 99)
            )
        case "origin":
            return Origin(rng.choice(_VERBS), _pick(rng, TABLES), rng.choice(CITIES))
        case "describe":
            return Describe(rng.choice(_DESCRIBE_VERBS), _pick(rng, QUALITIES), _pick(rng, THINGS))
        case "greet":
            return Greet(rng.choice(_GREET_VERBS), rng.choice(NAMES))
        case _:
            return Assign(rng.choice(_ASSIGN_VERBS), _pick(rng, FIELDS), _pick(rng, THINGS), rng.randint(1, 99))


def training_frames(rng: random.Random) -> Iterator[Frame]:
    """Frames without end, none of them held out."""
    while True:
        frame = draw_frame(rng)
        if not frame.is_held_out:
            yield frame


def fresh_prompts(n: int, seed: int) -> list[Frame]:
    """`n` different frames that no training has ever seen, the same ones for the same seed.

    Raises:
        ValueError: n isn't in 0..MAX_FRESH_PROMPTS (the world is small).
    """
    if not 0 <= n <= MAX_FRESH_PROMPTS:
        raise ValueError(f"fresh_prompts can give 0 to {MAX_FRESH_PROMPTS} prompts, not {n}")
    rng = random.Random(f"fresh prompts {seed}")
    frames: dict[str, Frame] = {}
    while len(frames) < n:
        frame = draw_frame(rng)
        if frame.is_held_out:
            frames.setdefault(frame.prompt, frame)
    return list(frames.values())


def expected(frame: Frame, style: Style) -> str:
    """Write the only right answer to ``frame.prompt`` in this style."""
    return frame.render(style)


def _pick(rng: random.Random, words: dict[str, str] | dict[str, tuple[str, str]] | Sequence[str]) -> str:
    return rng.choice(tuple(words))
