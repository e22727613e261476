"""A task: an endless supply of questions, in two parts that share no question.

Training draws from one part, scores and tours from the other. Imports no torch.
"""

from __future__ import annotations

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar, Literal

from loraserve.demo.demo_model import Question

Part = Literal["train", "held_out"]

MAX_QUESTIONS = 2_000
_HELD_OUT_SHARE = 4
"""Number of words of which one is held out."""
_LISTED_SHARE = 0.3
_HELD_OUT_COMBINATIONS = 5
"""Number of combinations of words of which one is held out, in tasks whose words are few."""


@dataclass(frozen=True, slots=True)
class Words:
    """Words that training may use, and others that only held-out questions have."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @staticmethod
    def split(text: str) -> Words:
        """Split words that commas separate, every fourth of which is held out."""
        words = [word.strip() for word in text.replace("\n", " ").split(",")]
        is_held_out = [index % _HELD_OUT_SHARE == _HELD_OUT_SHARE - 1 for index in range(len(words))]
        pairs = list(zip(words, is_held_out, strict=True))
        return Words(tuple(word for word, out in pairs if not out), tuple(word for word, out in pairs if out))

    def of(self, part: Part) -> tuple[str, ...]:
        return self.train if part == "train" else self.held_out

    def draw(self, rng: random.Random, part: Part) -> str:
        return rng.choice(self.of(part))

    def draw_open(self, rng: random.Random, part: Part) -> str:
        """Draw a word; in training, most often an arbitrary one in the place of a listed one.

        A model that sees the same forty names again and again learns these, and not to copy a name.
        """
        listed = self.draw(rng, part)
        if part == "held_out" or rng.random() < _LISTED_SHARE:
            return listed
        word = rng.choice(_arbitrary_words())
        word = f"{word}s" if listed.endswith("s") and not word.endswith("s") else word
        return word.capitalize() if listed[0].isupper() else word


@cache
def _arbitrary_words() -> tuple[str, ...]:
    """List some thousand English words, those of the project's text for calibrations."""
    text = files("loraserve.text").joinpath("calibration.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(re.findall(r"(?<![\w'’-])[a-z]{4,9}(?![\w'’-])", text))))


def is_held_out(*words: str) -> bool:
    """Return whether training must never see these words together: decided by their hash alone."""
    return hashlib.sha256(" ".join(words).encode()).digest()[0] % _HELD_OUT_COMBINATIONS == 0


class Task(ABC):
    """Purpose of an adapter's training.

    Attributes:
        name: the adapter's name.
        about: what it does, as a sentence.
        truth: what a check of an answer looks at.
        held_out: how held-out questions differ from those of the training.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    truth: ClassVar[str]
    held_out: ClassVar[str]

    @abstractmethod
    def draw(self, rng: random.Random, part: Part) -> Question:
        """Draw a question of a part."""

    def held_out_words(self) -> tuple[str, ...]:
        """List the words that no question of the training has."""
        return ()


def draw_questions(task: Task, part: Part, seed: int) -> Iterator[Question]:
    """Draw different questions without end, the same ones for the same seed.

    Those of the training have no word that is held out, not even by chance.
    """
    rng = random.Random(f"{task.name} {part} {seed}")
    held_out = "|".join(map(re.escape, task.held_out_words())) if part == "train" else ""
    leaks = re.compile(rf"\b({held_out})\b", re.IGNORECASE) if held_out else None
    seen: set[str] = set()
    while True:
        question = task.draw(rng, part)
        key = question.prompt + repr(question.tools)
        if key not in seen and (leaks is None or leaks.search(question.prompt) is None):
            seen.add(key)
            yield question


def held_out_questions(task: Task, num_questions: int, seed: int) -> list[Question]:
    """Draw questions that no training has seen.

    Raises:
        ValueError: num_questions isn't in 1..MAX_QUESTIONS.
    """
    if not 1 <= num_questions <= MAX_QUESTIONS:
        raise ValueError(f"held_out_questions can give 1 to {MAX_QUESTIONS} questions, not {num_questions}")
    questions = draw_questions(task, "held_out", seed)
    return [next(questions) for _ in range(num_questions)]
