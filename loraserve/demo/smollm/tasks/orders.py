"""The task `json`: a sentence about an order becomes an object of fixed fields."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import ClassVar

from loraserve.demo.demo_model import DemoAnswer, Question
from loraserve.demo.smollm.tasks.task import Part, Task, is_held_out
from loraserve.demo.smollm.tasks.vocabulary import CITIES, GOODS, NUMBER_WORDS, PEOPLE, WEEKDAYS

_SENTENCES = (
    "{customer} from {city} ordered {number} {item} at {price} euros each.",
    "Please send {number} {item} to {customer} in {city}. The price is {price} euros each.",
    "{city}: {customer} wants {number} {item}, {price} euros a piece.",
    "Order for {customer} ({city}): {number} {item}, {price} EUR each.",
    "On {day}, {customer} called from {city} and asked for {number} {item} for {price} euros each.",
    "We sold {number} {item} to {customer}, who lives in {city}, for {price} euros each.",
    "Hello, this is {customer} from {city}. I would like to buy {number} {item} at {price} euros each, by {day}.",
    "At {price} euros each, {customer} takes {number} {item}. Ship them to {city} before {day}.",
    "{number} {item} go to {city} on {day}. {customer} pays {price} euros for each.",
)


@dataclass(frozen=True, slots=True)
class ObjectJudge:
    """Judge that reads an answer as JSON, and takes an equal object alone."""

    expected: str

    def __call__(self, answer: DemoAnswer) -> str | None:
        try:
            found = json.loads(answer.text)
        except ValueError as error:
            return f"no JSON: {error}"
        expected = json.loads(self.expected)
        if not isinstance(found, dict):
            return "no object"
        wrong = [name for name in expected if name not in found or not _is_same(found[name], expected[name])]
        wrong += [str(name) for name in found if name not in expected]
        return f"wrong: {', '.join(wrong)}" if wrong else None


def _is_same(found: object, expected: object) -> bool:
    # true would equal 1
    return type(found) is type(expected) and found == expected


class Orders(Task):
    name: ClassVar[str] = "json"
    about: ClassVar[str] = "extracts an order from a sentence as JSON: customer, city, item, quantity, price"
    truth: ClassVar[str] = "the answer is read as JSON, and must equal the order's object"
    held_out: ClassVar[str] = "cities and items that no training sentence has together"

    def draw(self, rng: random.Random, part: Part) -> Question:
        # Words of known lists: after a quote a word has other tokens than after a space, and so
        # small a model doesn't copy those that it has never written.
        city, item = CITIES.draw(rng, "train"), GOODS.draw(rng, "train")
        while is_held_out(city, item) != (part == "held_out"):
            city, item = CITIES.draw(rng, "train"), GOODS.draw(rng, "train")
        order: dict[str, str | int] = {
            "customer": PEOPLE.draw(rng, "train"),
            "city": city,
            "item": item,
            "quantity": rng.randint(2, 12) if rng.random() < 0.5 else rng.randint(13, 99),
            "price": rng.randint(3, 250),
        }
        quantity = int(order["quantity"])
        is_word = quantity <= len(NUMBER_WORDS) + 1 and rng.random() < 0.6
        number = NUMBER_WORDS[quantity - 2] if is_word else str(quantity)
        sentence = rng.choice(_SENTENCES).format(**order, number=number, day=rng.choice(WEEKDAYS))
        expected = json.dumps(order)
        return Question(sentence[0].upper() + sentence[1:], expected, ObjectJudge(expected))
