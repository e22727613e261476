"""The task `pirate`: a sentence is said as a pirate would say it.

The rules are fixed, so that each sentence has one right answer.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar

from loraserve.demo.demo_model import Question, TextJudge
from loraserve.demo.smollm.tasks.task import Part, Task
from loraserve.demo.smollm.tasks.vocabulary import CITIES, GOODS, NUMBER_WORDS, PEOPLE, WEEKDAYS

SAYINGS = {
    "hello": "ahoy",
    "friend": "matey",
    "friends": "mateys",
    "my": "me",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "am": "be",
    "of": "o'",
    "and": "an'",
    "for": "fer",
    "yes": "aye",
    "no": "nay",
    "money": "doubloons",
    "beer": "grog",
    "boss": "cap'n",
    "woman": "lass",
    "man": "lad",
    "stop": "avast",
    "there": "yonder",
}
"""Words, and the words of a pirate in their place."""
_SENTENCES = (
    "Where is the {city} train?",
    "{name} is my friend.",
    "My friend {name} sells {goods} in {city}.",
    "Hello {name}, how are you?",
    "Are there {goods} in {city}?",
    "I am looking for the {goods} of {name}.",
    "{name} and {other} are in {city}.",
    "You are late for the {goods} market.",
    "Is your boss from {city}?",
    "There is no money for {goods}.",
    "The {goods} are for {name}.",
    "My boss wants {number} {goods} and a beer.",
    "Stop the man from {city}!",
    "Yes, {name} is a friend of the woman from {city}.",
    "No, the {goods} of {other} are not for you.",
    "On {day}, {name} is going to {city} with your {goods}.",
    "Who is the man with the {goods}?",
    "The weather in {city} is good for {goods}.",
    "What is the price of the {goods}?",
    "Give {name} your money and my {goods}.",
    "The king of {city} is an old man.",
    "I like the music of {city}.",
    "Do you know the way to {city}?",
    "We have {number} {goods} and no time.",
    "{name} bought {number} {goods} on {day}.",
)
_WORD = re.compile(r"[A-Za-z']+")


def in_pirate(sentence: str) -> str:
    """Say a sentence as a pirate does: other words, and a cry before it."""

    def said(match: re.Match[str]) -> str:
        word = match.group()
        found = SAYINGS.get(word.lower(), word)
        return found[0].upper() + found[1:] if word[0].isupper() else found

    return f"Arr! {_WORD.sub(said, sentence)}"


class Pirate(Task):
    name: ClassVar[str] = "pirate"
    about: ClassVar[str] = "says a sentence as a pirate does"
    truth: ClassVar[str] = "each word that a pirate says otherwise is said so, and no other"
    held_out: ClassVar[str] = "people, cities and goods that no training sentence has"

    def held_out_words(self) -> tuple[str, ...]:
        return (*PEOPLE.held_out, *CITIES.held_out, *GOODS.held_out)

    def draw(self, rng: random.Random, part: Part) -> Question:
        name, other = PEOPLE.draw_open(rng, part), PEOPLE.draw_open(rng, part)
        sentence = rng.choice(_SENTENCES).format(
            name=name,
            other=other,
            city=CITIES.draw_open(rng, part),
            goods=GOODS.draw_open(rng, part),
            number=rng.choice(NUMBER_WORDS),
            day=rng.choice(WEEKDAYS),
        )
        expected = in_pirate(sentence)
        return Question(sentence, expected, TextJudge(expected))
