"""Cards of the adapters: how each was trained, and how often it is right. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loraserve.errors import ConfigError

CARD_FILE = "card.json"
MIN_RIGHT = 0.9
"""Share of held-out questions that an adapter answers right if it is shipped."""


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """Length and rate of training.

    Attributes:
        num_rows: different rows, each of up to `row_tokens` tokens.
        num_layers: the upper layers, which have the adapter.
    """

    num_rows: int
    num_epochs: int
    row_tokens: int = 384
    num_layers: int = 12
    rank: int = 8
    alpha: int = 16
    learning_rate: float = 1.5e-3
    beta2: float = 0.98
    max_gradient_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Number of held-out questions that were answered right.

    Attributes:
        wrong: (prompt, answer, problem) of the others.
    """

    num_questions: int
    num_right: int
    wrong: tuple[tuple[str, str, str], ...] = ()

    @property
    def share(self) -> float:
        return self.num_right / self.num_questions

    @property
    def is_good(self) -> bool:
        """Whether an adapter with this score may be shipped."""
        return self.share >= MIN_RIGHT


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Recipe and scores of an adapter.

    Attributes:
        num_questions, num_tokens: different ones of the training.
        training_s: seconds of one core.
        transformers: score with transformers and PEFT in float32.
        served: score of the demo's server, on the base as its file has it.
        served_float: the same with the flag ``--activation-dtype float``.
        base: score of the base without an adapter, by the same server.
    """

    name: str
    recipe: AdapterRecipe
    seed: int
    num_questions: int
    num_tokens: int
    last_loss: float
    training_s: int
    transformers: TaskScore
    served: TaskScore | None = None
    served_float: TaskScore | None = None
    base: TaskScore | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def scores(self) -> tuple[TaskScore, ...]:
        """List the adapter's own scores."""
        return tuple(score for score in (self.transformers, self.served, self.served_float) if score is not None)


def write_adapter_card(directory: Path, card: AdapterCard) -> None:
    """Write an adapter's card next to its weights."""
    text = json.dumps(asdict(card), indent=2, ensure_ascii=False)
    (directory / CARD_FILE).write_text(text + "\n", encoding="utf-8")


def read_adapter_card(directory: Path) -> AdapterCard:
    """Read an adapter's card.

    Raises:
        ConfigError: there is none, or it isn't one.
    """
    path = directory / CARD_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        scores = {name: _score(value[name]) for name in ("transformers", "served", "served_float", "base")}
        return AdapterCard(**value | scores | {"recipe": AdapterRecipe(**value["recipe"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the card of a demo's adapter: {error}") from error


def _score(value: dict[str, Any] | None) -> TaskScore | None:
    if value is None:
        return None
    wrong = tuple((prompt, answer, problem) for prompt, answer, problem in value["wrong"])
    return TaskScore(int(value["num_questions"]), int(value["num_right"]), wrong)
