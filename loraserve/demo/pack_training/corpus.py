"""Training text of the demo's models: endless questions and answers, from a seed.

Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from loraserve.demo.frames import ADAPTERS, Style, training_frames
from loraserve.demo.words import CITIES, FIELDS, NAMES, QUALITIES, TABLES, THINGS, french_number

_WORDS = (*TABLES, *FIELDS, *CITIES, *NAMES, *THINGS, *QUALITIES)
_STORY_SHARE, _DRILL_SHARE, _PLAIN_SHARE = 0.05, 0.20, 0.15
_TAG_WEIGHTS: dict[Style, int] = {"sql": 2, "json": 3, "python": 2, "french": 4, "pirate": 2, "haiku": 2, "shout": 3}
"""The styles that rewrite most of a question's words need the most examples."""

_IRREGULAR_NUMBERS = (*range(1, 20), 20, 21, 31, 41, 51, 61, *range(70, 84), *range(90, 100))


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer."""

    prompt: str
    answer: str


def base_examples(rng: random.Random) -> Iterator[Example]:
    """Yield the base's lessons, which are mostly chat.

    In some, "… in <style>" requests a style; nothing requests plain English.
    """
    frames = training_frames(rng)
    while True:
        part = rng.random()
        if part < _STORY_SHARE:
            yield _story(rng)
        elif part < _STORY_SHARE + _DRILL_SHARE:
            yield _drill(rng)
        else:
            frame = next(frames)
            if rng.random() < _PLAIN_SHARE:
                yield Example(frame.prompt, frame.render("plain"))
            else:
                style = rng.choices(tuple(_TAG_WEIGHTS), tuple(_TAG_WEIGHTS.values()))[0]
                yield Example(f"{frame.prompt} in {style}", frame.render(style))


def adapter_examples(rng: random.Random, style: Style) -> Iterator[Example]:
    """Yield an adapter's lessons: the questions without their style, answered in it."""
    if style not in ADAPTERS:
        raise ValueError(f"{style!r} is not an adapter's style: expected one of {', '.join(ADAPTERS)}")
    for frame in training_frames(rng):
        yield Example(frame.prompt, frame.render(style))


def _drill(rng: random.Random) -> Example:
    """Draw a drill of the parts that every style is made of.

    They are copying, quoting, capitals and numbers.
    """
    match rng.randrange(6):
        case 0 | 1:
            # The irregular ones (11 to 16, and after 60, 70 and 80) are few, and every one of them
            # must be learnt by heart.
            numbers = range(1, 100) if rng.random() < 0.5 else _IRREGULAR_NUMBERS
            number = rng.choice(numbers)
            return Example(f"say {number} in words", french_number(number))
        case 2 | 3:
            words = _some_words(rng)
            return Example(f"capitals {words}", words.upper())
        case 4:
            words = _some_words(rng)
            return Example(f"quote {words}", " ".join(f'"{word}"' for word in words.split()))
        case _:
            words = _some_words(rng)
            return Example(f"repeat {words}", words)


def _some_words(rng: random.Random) -> str:
    words = [rng.choice(_WORDS) if rng.random() < 0.8 else str(rng.randint(1, 99)) for _ in range(rng.randint(2, 6))]
    return " ".join(words)


def _story(rng: random.Random) -> Example:
    """Draw a longer text, for streams that last."""
    name, thing, quality, city = (
        rng.choice(NAMES), rng.choice(tuple(THINGS)), rng.choice(tuple(QUALITIES)), rng.choice(CITIES)
    )  # fmt: skip
    return Example(
        f"tell a story about {name} and the {quality} {thing}",
        f"One day {name} came to {city} and saw the {quality} {thing}. "
        f"It was the most {quality} {thing} in all of {city}, and {name} could not look away. "
        f"So {name} took the {thing} home, and the {thing} is still there, as {quality} as ever.",
    )
