"""A task: an endless supply of questions, in two parts that share no question.

Training draws from one part, scores and tours from the other. Imports no torch.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from loraserve.demo.demo_model import Question

Part = Literal["train", "held_out"]

MAX_QUESTIONS = 2_000
_HELD_OUT_SHARE = 4
"""One word in this many is held out."""


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


class Task(ABC):
    """What an adapter is trained for.

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
    """Draw different questions without end, the same ones for the same seed."""
    rng = random.Random(f"{task.name} {part} {seed}")
    seen: set[str] = set()
    while True:
        question = task.draw(rng, part)
        key = question.prompt + repr(question.tools)
        if key not in seen:
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
