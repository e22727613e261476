"""The task `tools`: a request is answered by a call of the right function with the right arguments.

Each question has three functions, of which one helps; a few need none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from loraserve.demo.demo_model import DemoAnswer, Question
from loraserve.demo.smollm.tasks.orders import ObjectJudge
from loraserve.demo.smollm.tasks.task import Part, Task, Words, is_held_out
from loraserve.demo.smollm.tasks.vocabulary import CITIES, GOODS, PEOPLE, WEEKDAYS

DISHES = Words.split(
    "pasta, rice, eggs, bread, tea, cake, soup, pizza, potatoes, coffee, beans, fish, cookies, chicken, noodles, pie"
)
MOODS = Words.split(
    "jazz, rock, opera, blues, folk, techno, soul, reggae, disco, punk, samba, flamenco, metal, swing, funk, tango"
)
_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK")
_THANKS = {
    "Thank you, that is all.": "You're welcome!",
    "Thanks a lot!": "You're welcome!",
    "Hello!": "Hello! How can I help you?",
    "Good morning.": "Hello! How can I help you?",
    "Goodbye!": "Goodbye!",
    "See you tomorrow.": "Goodbye!",
}
Arguments = dict[str, str | int]
Draw = Callable[[random.Random], tuple[str, Arguments]]


@dataclass(frozen=True, slots=True)
class CallJudge:
    """Judge that takes one call of a function with equal arguments; without a name, no call."""

    name: str
    arguments: str

    def __call__(self, answer: DemoAnswer) -> str | None:
        names = [call.name for call in answer.calls]
        expected = [self.name] if self.name else []
        if names != expected:
            return f"calls {', '.join(names) or 'nothing'}, expected {self.name or 'none'}"
        if not self.name:
            return None if answer.text.strip() else "no answer"
        return ObjectJudge(self.arguments)(DemoAnswer(answer.calls[0].arguments))


def _tool(name: str, description: str, **properties: str) -> Mapping[str, Any]:
    """Describe a function, all of whose arguments are required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _weather(rng: random.Random) -> tuple[str, Arguments]:
    city, day = CITIES.draw(rng, "train"), rng.choice(WEEKDAYS)
    ask = rng.choice(("What will the weather be in {} on {}?", "Will it rain in {} on {}?"))
    return ask.format(city, day), {"city": city, "day": day}


def _timer(rng: random.Random) -> tuple[str, Arguments]:
    minutes, label = rng.randint(2, 90), DISHES.draw(rng, "train")
    ask = rng.choice(("Set a timer for {} minutes for the {}.", "Wake me in {} minutes, the {} must be done then."))
    return ask.format(minutes, label), {"minutes": minutes, "label": label}


def _convert(rng: random.Random) -> tuple[str, Arguments]:
    amount, (source, target) = rng.randint(5, 900), rng.sample(_CURRENCIES, 2)
    ask = rng.choice(("How much is {} {} in {}?", "Convert {} {} to {}."))
    return ask.format(amount, source, target), {"amount": amount, "from": source, "to": target}


def _message(rng: random.Random) -> tuple[str, Arguments]:
    to, goods = PEOPLE.draw(rng, "train"), GOODS.draw(rng, "train")
    text = rng.choice(("the {} have arrived", "we need more {}", "I bought the {}", "the {} are sold out")).format(
        goods
    )
    return rng.choice(("Tell {} that {}.", "Write to {} that {}.")).format(to, text), {"to": to, "text": text}


def _route(rng: random.Random) -> tuple[str, Arguments]:
    source, target = rng.sample(CITIES.train, 2)
    by = rng.choice(("train", "car", "plane"))
    ask = rng.choice(("How do I get from {} to {} by {}?", "Find a way from {} to {} by {}."))
    return ask.format(source, target, by), {"from": source, "to": target, "by": by}


def _music(rng: random.Random) -> tuple[str, Arguments]:
    style, minutes = MOODS.draw(rng, "train"), rng.randint(5, 120)
    ask = rng.choice(("Play {} for {} minutes.", "I want to hear {} for {} minutes."))
    return ask.format(style, minutes), {"style": style, "minutes": minutes}


TOOLS: Mapping[str, tuple[Mapping[str, Any], Draw]] = {
    "get_weather": (_tool("get_weather", "Weather of a day", city="string", day="string"), _weather),
    "set_timer": (_tool("set_timer", "Start a timer", minutes="integer", label="string"), _timer),
    "convert": (_tool("convert", "Convert money", amount="integer", **{"from": "string", "to": "string"}), _convert),
    "send_message": (_tool("send_message", "Send a message", to="string", text="string"), _message),
    "find_route": (_tool("find_route", "Find a route", **{"from": "string", "to": "string", "by": "string"}), _route),
    "play_music": (_tool("play_music", "Play music", style="string", minutes="integer"), _music),
}
_BOXES = tuple(
    tuple(names.split())
    for names in (
        "get_weather set_timer send_message",
        "convert find_route play_music",
        "play_music get_weather convert",
        "send_message convert set_timer",
        "find_route send_message get_weather",
        "set_timer play_music find_route",
    )
)
"""Functions that are offered together."""


class Calls(Task):
    name: ClassVar[str] = "tools"
    about: ClassVar[str] = "calls the right one of the functions that a request offers"
    truth: ClassVar[str] = "the right function must be called, with equal arguments"
    held_out: ClassVar[str] = "requests that training doesn't have: other words and numbers together"

    def draw(self, rng: random.Random, part: Part) -> Question:
        box = rng.choice(_BOXES)
        tools = offered(box)
        if part == "train" and rng.random() < 0.08:
            prompt = rng.choice(tuple(_THANKS))
            return Question(prompt, _THANKS[prompt], CallJudge("", ""), tools)
        name = rng.choice(box)
        prompt, arguments = TOOLS[name][1](rng)
        while is_held_out(prompt) != (part == "held_out"):
            prompt, arguments = TOOLS[name][1](rng)
        text = json.dumps(arguments, ensure_ascii=False)
        return Question(prompt, f"{name}({text})", CallJudge(name, text), tools)


def offered(box: tuple[str, ...] = _BOXES[0]) -> tuple[Mapping[str, Any], ...]:
    """List the functions of a box, as a request has them."""
    return tuple(TOOLS[name][0] for name in box)


def reference(question: Question) -> DemoAnswer | tuple[str, Arguments]:
    """Return what training learns as the answer: a text, or a function with its arguments."""
    name, found, arguments = question.expected.partition("(")
    if not found or name not in TOOLS:
        return DemoAnswer(question.expected)
    return name, json.loads(arguments.removesuffix(")"))
