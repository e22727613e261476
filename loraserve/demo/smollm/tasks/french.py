"""The task `french`: a simple sentence is translated.

Each sentence has one right translation. Training has every word, but not every combination: which
ones are held out is decided by their hash.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from loraserve.demo.demo_model import Question, TextJudge
from loraserve.demo.smollm.tasks.task import Part, Task, is_held_out
from loraserve.demo.smollm.tasks.vocabulary import PEOPLE


@dataclass(frozen=True, slots=True)
class Noun:
    """A French noun, and whether it is feminine. Its plural has an s."""

    french: str
    is_feminine: bool

    @property
    def the(self) -> str:
        return f"{'la' if self.is_feminine else 'le'} {self.french}"

    @property
    def a(self) -> str:
        return f"{'une' if self.is_feminine else 'un'} {self.french}"


def _nouns(feminine: str, masculine: str) -> dict[str, Noun]:
    pairs = [(pair.split(), True) for pair in feminine.split(",")] + [(p.split(), False) for p in masculine.split(",")]
    return {english: Noun(french, is_feminine) for (english, french), is_feminine in pairs}


NOUNS = _nouns(
    "house maison, car voiture, door porte, table table, lamp lampe, chair chaise, key clé, flower fleur, boot botte",
    "book livre, dog chien, cat chat, bike vélo, bag sac, train train, bridge pont, garden jardin",
)
ADJECTIVES = {
    "red": ("rouge", "rouge"),
    "green": ("vert", "verte"),
    "black": ("noir", "noire"),
    "yellow": ("jaune", "jaune"),
    "heavy": ("lourd", "lourde"),
    "clean": ("propre", "propre"),
    "dirty": ("sale", "sale"),
    "strange": ("étrange", "étrange"),
    "empty": ("vide", "vide"),
    "open": ("ouvert", "ouverte"),
    "closed": ("fermé", "fermée"),
}
"""English → masculine and feminine. All stand behind their noun."""
PLACES = {
    "in the kitchen": "dans la cuisine",
    "near the station": "près de la gare",
    "behind the school": "derrière l'école",
    "in front of the church": "devant l'église",
    "at the market": "au marché",
    "on the road": "sur la route",
    "in the street": "dans la rue",
}
VERBS = {
    "buys": "achète",
    "sells": "vend",
    "sees": "voit",
    "finds": "trouve",
    "wants": "veut",
    "loses": "perd",
    "cleans": "nettoie",
    "paints": "peint",
}
NUMBERS = {
    "two": "deux", "three": "trois", "four": "quatre", "five": "cinq", "six": "six", "seven": "sept", "eight": "huit",
    "nine": "neuf", "ten": "dix",
}  # fmt: skip


class French(Task):
    name: ClassVar[str] = "french"
    about: ClassVar[str] = "translates simple sentences"
    truth: ClassVar[str] = "the translation must be the only right one, letter by letter"
    held_out: ClassVar[str] = "combinations of words that no training sentence has"

    def draw(self, rng: random.Random, part: Part) -> Question:
        while True:
            combination, prompt, expected = _sentence(rng)
            if is_held_out(*combination) == (part == "held_out"):
                return Question(prompt, expected, TextJudge(expected))


def _sentence(rng: random.Random) -> tuple[tuple[str, ...], str, str]:
    """Draw the words that a sentence combines, the sentence and its translation."""
    english = rng.choice(tuple(NOUNS))
    noun = NOUNS[english]
    adjective = rng.choice(tuple(ADJECTIVES))
    described = ADJECTIVES[adjective][noun.is_feminine]
    place = rng.choice(tuple(PLACES))
    name = rng.choice(PEOPLE.train)
    match rng.randrange(5):
        case 0:
            return (
                (adjective, english),
                f"The {adjective} {english} is {place}.",
                f"{noun.the.capitalize()} {described} est {PLACES[place]}.",
            )
        case 1:
            verb = rng.choice(tuple(VERBS))
            article = "an" if adjective[0] in "aeiou" else "a"
            return (
                (adjective, english),
                f"{name} {verb} {article} {adjective} {english}.",
                f"{name} {VERBS[verb]} {noun.a} {described}.",
            )
        case 2:
            verb = rng.choice(tuple(VERBS))
            return (
                (verb, english),
                f"{name} {verb} the {english} {place}.",
                f"{name} {VERBS[verb]} {noun.the} {PLACES[place]}.",
            )
        case 3:
            number = rng.choice(tuple(NUMBERS))
            return (
                (number, english),
                f"{name} has {number} {english}s.",
                f"{name} a {NUMBERS[number]} {noun.french}s.",
            )
        case _:
            return (
                (adjective, english),
                f"Where is the {adjective} {english}?",
                f"Où est {noun.the} {described} ?",
            )
